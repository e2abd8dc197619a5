"""Products of small matrices in the C++ that inductor writes: tiles of the product stay in vector registers.

A library for matrix products takes up to three times as long for these: it is made for large ones, and MKL has only a
generic path for AMD's processors. Every row is summed in the same order for any number of threads.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor import config, ir, lowering
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.select_algorithm import PartialRender
from torch._inductor.utils import Placeholder, parallel_num_threads

from ecrl.compile.cpu_codegen import brief_codegen

_WORTH_THREADS = 2**18  # multiplications
_NAME = str(Placeholder.KERNEL_NAME)
_CPP = """
#include <torch/csrc/inductor/cpp_prefix.h>
template <int ROWS, int LANES, bool PART>
static inline void {name}_tile(const float* a, const float* b, float* y, int64_t part) {{
    using Lane = at::vec::Vectorized<float>;
    constexpr int WIDTH = Lane::size();
    Lane sums[ROWS][LANES], row[LANES];
    #pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; r++)
        #pragma GCC unroll 12
        for (int c = 0; c < LANES; c++) sums[r][c] = Lane(0.0f);
    for (int64_t k = 0; k < {K}; k++) {{
        #pragma GCC unroll 12
        for (int c = 0; c < LANES; c++) {{
            const float* at = b + k * {b_k} + c * WIDTH;
            row[c] = PART && c + 1 == LANES ? Lane::loadu(at, part) : Lane::loadu(at);
        }}
        #pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; r++) {{
            Lane x(a[r * {a_m} + k * {a_k}]);
            #pragma GCC unroll 12
            for (int c = 0; c < LANES; c++) sums[r][c] = at::vec::fmadd(x, row[c], sums[r][c]);
        }}
    }}
    #pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; r++)
        #pragma GCC unroll 12
        for (int c = 0; c < LANES; c++) {{
            if (PART && c + 1 == LANES) sums[r][c].store(y + r * {N} + c * WIDTH, part);
            else sums[r][c].store(y + r * {N} + c * WIDTH);
        }}
}}
template <int ROWS>
static inline void {name}_rows(const float* a, const float* b, float* y) {{
    constexpr int WIDTH = at::vec::Vectorized<float>::size(), LANES = WIDTH == 8 ? 2 : 4;  // what registers hold
    constexpr int WHOLE = {N} / (WIDTH * LANES) * (WIDTH * LANES), REST = {N} - WHOLE;
    for (int64_t n = 0; n < WHOLE; n += WIDTH * LANES) {name}_tile<ROWS, LANES, false>(a, b + n, y + n, 0);
    if constexpr (REST > 0)
        {name}_tile<ROWS, (REST + WIDTH - 1) / WIDTH, REST % WIDTH != 0>(a, b + WHOLE, y + WHOLE, REST % WIDTH);
}}
extern "C" {kernel}
{{
    constexpr int64_t ROWS = {N} > at::vec::Vectorized<float>::size() ? 6 : 12, TILES = {M} / ROWS, REST = {M} % ROWS;
    constexpr int64_t rest = {M} - REST;
    {parallel}
    for (int64_t part = 0; part < {batch} * {parts}; part++) {{
        const int64_t i = part / {parts}, first = part % {parts} * TILES / {parts};
        const int64_t last = (part % {parts} + 1) * TILES / {parts};
        const float *a = {a} + {a_0} + i * {a_i}, *b = {b} + {b_0} + i * {b_i};
        float* y = product + i * {M} * {N};
        for (int64_t t = first; t < last; t++) {name}_rows<ROWS>(a + t * ROWS * {a_m}, b, y + t * ROWS * {N});
        if constexpr (REST > 0)
            if (last == TILES) {name}_rows<REST>(a + rest * {a_m}, b, y + rest * {N});
    }}
}}
"""


@torch.library.custom_op("ecrl::bmm", mutates_args=())
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


@_bmm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


@cache
def compile_here() -> bool:
    """Return True if inductor knows vector instructions of this CPU. Without them, the tiles do not compile."""
    with config.patch({"cpp.vec_isa_ok": True}), brief_codegen():  # trying each instruction set takes seconds
        return bool(pick_vec_isa())


def _written(kernel: CppTemplateKernel, a: Any, b: Any, product: Any) -> str:
    """The C++ of one product, for the layouts of its factors."""
    (batch, m, k), n = a.get_size(), b.get_size()[2]
    threads = parallel_num_threads() if batch * m * k * n >= _WORTH_THREADS else 1
    parts = 1 if batch >= threads else min(threads, max(m // 12, 1))
    names = {a.get_name(): "a_in"}
    names.setdefault(b.get_name(), "b_in")  # both may lie in one buffer
    (a_i, a_m, a_k), (b_i, b_k, _) = a.get_stride(), b.get_stride()
    text = _CPP.format(
        name=_NAME,
        kernel=kernel.def_kernel({names[x.get_name()]: x for x in (a, b)}, {"product": product}),
        parallel=f"#pragma omp parallel for num_threads({threads})" if threads > 1 else "",
        **{"batch": batch, "parts": parts, "M": m, "K": k, "N": n},
        **{"a": names[a.get_name()], "a_0": a.get_layout().offset, "a_i": a_i, "a_m": a_m, "a_k": a_k},
        **{"b": names[b.get_name()], "b_0": b.get_layout().offset, "b_i": b_i, "b_k": b_k},
    )
    return PartialRender(text, kernel.render_hooks).finalize_all()


def _kernel(product: Any, **options: Any) -> tuple[CppTemplateKernel, Callable[[], str]]:
    """Inductor's record of a kernel, and what gives its C++."""
    kernel = CppTemplateKernel(_NAME, parallel_num_threads())
    return kernel, partial(_written, kernel, *product.inputs, product)


def _realized(x: Any) -> Any:
    """In memory, at a place that is known: what a loop takes in a turn is copied, its place moves."""
    x = ir.ExternKernel.realize_input(x)
    _, layout = ir.as_storage_and_layout(x, freeze=True)
    if not (isinstance(layout.offset, int) or layout.offset.is_number):
        x = ir.ExternKernel.copy_input(x)
        ir.as_storage_and_layout(x, freeze=True)
    return x


@lowering.register_lowering(torch.ops.ecrl.bmm.default, type_promotion_kind=None)
def _lowered(a: Any, b: Any) -> Any:
    a, b = _realized(a), _realized(b)
    if b.get_stride()[2] != 1:
        b = _realized(ir.ExternKernel.require_contiguous(b))
    layout = ir.FixedLayout(a.get_device(), a.get_dtype(), [*a.get_size()[:2], b.get_size()[2]])
    product = ir.CppTemplateBuffer(layout, [a, b], _kernel, cast(Any, None), None)
    cast(Any, product).allow_epilogue_fusion = False  # torch before 2.13 reads an option instead
    return ir.TensorBox.create(product)
