"""Replace matrix products by faster operations while a graph for a CPU is traced. The results agree up to rounding.

Libraries for matrix products are optimised for large matrices. With such a library, the first and last layers of a
perceptron, and their gradients, run at a tenth of the possible speed. This module therefore distinguishes three kinds
of matrix products:

- A product with a dimension of at most 8 usually becomes a sum, which the compiler fuses with neighbouring operations.
- Any other small float32 product becomes C++ code of this module, which computes the result tile by tile in vector
  registers. Libraries take up to three times as long as this code. For any number of threads, the code adds the terms
  of a sum in the same order. The code can also add a bias and apply relu, or compute the gradient of relu.
- A large float32 product of two matrices calls oneDNN, a library that generates code for the present CPU. In contrast,
  the library MKL has only generic code for AMD's CPUs.

Other products, such as large products in float64, do not change.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor import config, ir
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.mkldnn_ir import LinearUnary
from torch._inductor.utils import parallel_num_threads

from ecrl.compile.cpu_codegen import skip_redundant_codegen
from ecrl.compile.cpu_source import NAME, call, pointers, register, stored

# In the comments on these limits, `a` and `b` are the factors of a product `a @ b`.
_LARGE = 2**18  # if `b` has more elements, `b` does not fit in the cache, and a library is faster
_THIN = 8  # a product becomes a sum only if one of its dimensions is at most this number
_MIN_OUTER = 16  # the minimum number of rows of `b` for `_rows`, which is not faster for fewer rows
_MANY_ROWS = 32  # copying a transposed `b` is worthwhile if `a` has at least this number of rows
_TALL = 64  # copying a strip of `b` is worthwhile if `a` has at least this number of rows
_WIDE = 128  # copying a transposed `a` is worthwhile if `b` has at least this number of columns
_COPIED_ROWS = 288  # the maximum number of rows of `a` that are copied at once
_TERMS = 256  # a tile adds this number of terms before the next tile starts, so that the factors stay in the cache
_PARALLEL = 2**18  # several threads are worthwhile for at least this number of multiplications
_CPP = """
#include <torch/csrc/inductor/cpp_prefix.h>
namespace {name}_tiles {{
using Lane = at::vec::Vectorized<float>;
constexpr int WIDTH = Lane::size(), LANES = WIDTH == 8 ? 2 : 4, COLUMNS = WIDTH * LANES;  // a tile fits in registers
constexpr int64_t ROWS = {N} > WIDTH ? 6 : 12, TILES = {M} / ROWS, REST = {M} % ROWS;
constexpr int64_t TERMS = {K} < {terms} ? {K} : {terms};
// Add products of `terms` columns of `a` and rows of `b` to a tile of `y`, which starts at zero if `starts`. If `ends`,
// store the value of `{finish}` instead of the sum. `third` is the address of the elements of the operator's third
// argument that belong to the tile. Without a third argument, `third` is not read.
template <int ROWS, int LANES, bool PART>
static inline void tile(const float* a, int64_t a_m, int64_t a_k, const float* b, int64_t b_k, const float* third,
                        float* y, int64_t terms, bool starts, bool ends, int64_t part) {{
    Lane sums[ROWS][LANES], row[LANES];
    #pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; r++)
        #pragma GCC unroll 12
        for (int c = 0; c < LANES; c++) {{
            const float* at = y + r * {N} + c * WIDTH;
            sums[r][c] = starts ? Lane(0.0f) : PART && c + 1 == LANES ? Lane::loadu(at, part) : Lane::loadu(at);
        }}
    for (int64_t k = 0; k < terms; k++) {{
        #pragma GCC unroll 12
        for (int c = 0; c < LANES; c++) {{
            const float* at = b + k * b_k + c * WIDTH;
            row[c] = PART && c + 1 == LANES ? Lane::loadu(at, part) : Lane::loadu(at);
        }}
        #pragma GCC unroll 12
        for (int64_t r = 0; r < ROWS; r++) {{
            Lane x(a[r * a_m + k * a_k]);
            #pragma GCC unroll 12
            for (int c = 0; c < LANES; c++) sums[r][c] = at::vec::fmadd(x, row[c], sums[r][c]);
        }}
    }}
    #pragma GCC unroll 12
    for (int64_t r = 0; r < ROWS; r++)
        #pragma GCC unroll 12
        for (int c = 0; c < LANES; c++) {{
            if ({finishes} && ends) {{
                const float* at = third + r * {third_m} + c * WIDTH;
                const Lane sum = sums[r][c], other = PART && c + 1 == LANES ? Lane::loadu(at, part) : Lane::loadu(at);
                sums[r][c] = {finish};
            }}
            if (PART && c + 1 == LANES) sums[r][c].store(y + r * {N} + c * WIDTH, part);
            else sums[r][c].store(y + r * {N} + c * WIDTH);
        }}
}}
// Compute the tiles from `first` to `last` in one strip of columns. Copy the strip of `b` if that is worthwhile.
template <int LANES, bool PART>
static inline void strip(const float* a, int64_t a_t, int64_t a_m, int64_t a_k, const float* b, const float* third,
                         float* y, int64_t first, int64_t last, int64_t terms, bool starts, bool ends, int64_t part) {{
    constexpr int64_t WHOLE = PART ? LANES - 1 : LANES;
    alignas(64) float copy[{copies_b} ? TERMS * LANES * WIDTH : 1];
    if constexpr ({copies_b} && {b_n} == 1) {{
        for (int64_t k = 0; k < terms; k++) {{
            #pragma GCC unroll 4
            for (int c = 0; c < WHOLE; c++)
                Lane::loadu(b + k * {b_k} + c * WIDTH).store(copy + (k * LANES + c) * WIDTH);
            if constexpr (PART)
                Lane::loadu(b + k * {b_k} + WHOLE * WIDTH, part).store(copy + (k * LANES + WHOLE) * WIDTH);
        }}
    }} else if constexpr ({copies_b}) {{
        // Transpose squares of WIDTH rows and columns with vector instructions, and copy the other elements one by one.
        const int64_t squares = {b_k} == 1 ? terms / WIDTH * WIDTH : 0;
        for (int64_t n = 0; n < WHOLE * WIDTH; n += WIDTH)
            for (int64_t k = 0; k < squares; k += WIDTH)
                at::vec::transpose_mxn<float, WIDTH, WIDTH>(
                    b + k + n * {b_n}, {b_n}, copy + k * LANES * WIDTH + n, LANES * WIDTH);
        for (int64_t n = 0; n < WHOLE * WIDTH + (PART ? part : 0); n++)
            for (int64_t k = n < WHOLE * WIDTH ? squares : 0; k < terms; k++)
                copy[k * LANES * WIDTH + n] = b[k * {b_k} + n * {b_n}];
    }}
    const float* rows = {copies_b} ? copy : b;
    constexpr int64_t step = {copies_b} ? LANES * WIDTH : {b_k};
    for (int64_t t = first; t < last; t++)
        tile<ROWS, LANES, PART>(a + (t - first) * a_t, a_m, a_k, rows, step, third + t * ROWS * {third_m},
                                y + t * ROWS * {N}, terms, starts, ends, part);
    if constexpr (REST > 0)
        if (last == TILES)
            tile<REST, LANES, PART>(a + (last - first) * a_t, a_m, a_k, rows, step, third + last * ROWS * {third_m},
                                    y + last * ROWS * {N}, terms, starts, ends, part);
}}
}}
extern "C" {kernel}
{{
    using namespace {name}_tiles;
    constexpr int64_t WHOLE = {N} / COLUMNS * COLUMNS, LAST = {N} - WHOLE;
    {parallel}
    for (int64_t part = 0; part < {batch} * {parts}; part++) {{
        const int64_t i = part / {parts}, first = part % {parts} * TILES / {parts};
        const int64_t last = (part % {parts} + 1) * TILES / {parts};
        const float *a = {a} + i * {a_i} + first * ROWS * {a_m}, *b = {b} + i * {b_i};
        const float* third = {third} + i * {third_i};
        float* y = product + i * {M} * {N};
        alignas(64) float copy[{copies_a} ? ({tiles} + 2) * ROWS * TERMS : 1];
        for (int64_t k = 0; k < {K}; k += TERMS, a += TERMS * {a_k}, b += TERMS * {b_k}) {{
            const int64_t terms = std::min<int64_t>(TERMS, {K} - k), rows = last == TILES ? REST : 0;
            if constexpr ({copies_a}) {{
                const int64_t whole = (last - first) * ROWS, together = {a_m} == 1 ? whole : 0;
                for (int64_t m = 0; m < together; m += ROWS)
                    for (int64_t c = 0; c < terms; c++)
                        std::memcpy(copy + m * TERMS + c * ROWS, a + m + c * {a_k}, ROWS * sizeof(float));
                for (int64_t m = together; m < whole + rows; m += ROWS)
                    for (int64_t c = 0; c < terms; c++)
                        for (int64_t r = 0; r < std::min<int64_t>(ROWS, whole + rows - m); r++)
                            copy[m * TERMS + c * ROWS + r] = a[(m + r) * {a_m} + c * {a_k}];
            }}
            const float* left = {copies_a} ? copy : a;
            constexpr int64_t a_t = ROWS * ({copies_a} ? TERMS : {a_m}), a_m = {copies_a} ? 1 : {a_m};
            constexpr int64_t a_k = {copies_a} ? ROWS : {a_k};
            const bool starts = k == 0, ends = k + TERMS >= {K};
            for (int64_t n = 0; n < WHOLE; n += COLUMNS)
                strip<LANES, false>(
                    left, a_t, a_m, a_k, b + n * {b_n}, third + n, y + n, first, last, terms, starts, ends, 0);
            if constexpr (LAST > 0)
                strip<(LAST + WIDTH - 1) / WIDTH, LAST % WIDTH != 0>(
                    left, a_t, a_m, a_k, b + WHOLE * {b_n}, third + WHOLE, y + WHOLE, first, last, terms, starts, ends,
                    LAST % WIDTH);
        }}
    }}
}}
"""


@cache
def has_vector_instructions() -> bool:
    """Return True if inductor supports this CPU's vector instructions, which the C++ of this module needs."""
    faster = (
        skip_redundant_codegen() if torch.__version__ >= "2.13" else nullcontext()
    )  # torch before 2.13 cannot compile loops for the CPU, so no run needs the faster check
    with config.patch({"cpp.vec_isa_ok": True}), faster:  # testing each instruction set takes seconds
        return bool(pick_vec_isa())


def _unrolled(a: Tensor, b: Tensor) -> Tensor:
    """Multiply `a`, of shape `[M, K]`, by `b`, of shape `[K, N]`, as a sum of K outer products."""
    total = a[:, :1] * b[0]
    for k in range(1, a.shape[1]):
        total = total + a[:, k : k + 1] * b[k]
    return total


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """Multiply `a`, of shape `[M, K]`, by `b`, of shape `[K, N]`, as M weighted sums of the rows of `b`."""
    return torch.stack([(a[m].unsqueeze(1) * b).sum(0, dtype=a.dtype) for m in range(a.shape[0])])


def _check_dtypes(a: Tensor, b: Tensor) -> None:
    """Raise RuntimeError if two matrices have different dtypes, which torch does not detect during tracing."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"cannot multiply matrices of {a.dtype} and {b.dtype}; convert one of them")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b`, or return NotImplemented so that torch computes the product or reports wrong shapes."""
    (m, k), n = a.shape, b.shape[1]
    _check_dtypes(a, b)
    if min(m, k, n) == 0 or k != b.shape[0]:
        return NotImplemented
    if k <= _THIN and b.stride(1) == 1 and n > _THIN:
        return _unrolled(a, b)
    if m <= _THIN and k >= _MIN_OUTER and n > _THIN and b.stride(1) == 1:
        return _rows(a, b)
    if n <= _THIN and k >= _MIN_OUTER and m > _THIN and a.stride(0) == 1:
        return _rows(b.t(), a.t()).t()
    if n <= _THIN and k > _THIN and a.stride(1) == 1 and b.stride(0) == 1:
        # The sums of a column are adjacent in memory, for code that reads one column of the result.
        return (a * b.t().unsqueeze(1)).sum(-1, dtype=a.dtype).t().contiguous()
    if a.dtype == torch.float32 and k * n <= _LARGE and has_vector_instructions():
        return torch.ops.ecrl.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)
    if a.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.ecrl.linear(a, b.t())
    return NotImplemented


def addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Return `bias + a @ b`. If `alpha` or `beta` is not 1, return NotImplemented so that torch computes the result."""
    if beta != 1 or alpha != 1:
        return NotImplemented
    product = mm(a, b)
    # Subtract -bias, because inductor would merge a product and a sum into one call that copies the bias to all rows.
    return torch.mm(a, b) - (-bias) if product is NotImplemented else product + bias


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` for batches of matrices, or NotImplemented so that torch computes the product.

    The function only handles float32 matrices that torch would multiply more slowly. Suppose that `a` is a transposed
    view with more than 8 rows. If `b` is not a transposed view, or has at most 8 columns, the result is also a
    transposed view. The gradient of a batch of weights `[B, out, in]` is such a product. Autograd transposes this
    product again, so the gradient has the layout of the weights.
    """
    m, n = a.shape[1], b.shape[2]
    _check_dtypes(a, b)
    if a.dtype != torch.float32 or b.shape[:2] != (a.shape[0], a.shape[2]):
        return NotImplemented
    if min(*a.shape, n) == 0 or not has_vector_instructions():
        return NotImplemented
    is_gradient = a.stride(2) != 1 and b.stride(2) == 1
    if m > _THIN and a.stride(1) == 1 and (n <= _THIN or is_gradient):
        return torch.ops.ecrl.bmm(b.mT, a.mT).mT
    if b.stride(2) == 1 or m >= _MANY_ROWS:
        return torch.ops.ecrl.bmm(a, b)
    return NotImplemented


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.mm.default: mm,
    torch.ops.aten.addmm.default: addmm,
    torch.ops.aten.bmm.default: bmm,
}
"""Decompositions of matrix products, in the format that `torch.fx.experimental.proxy_tensor.make_fx` takes."""


@torch.library.custom_op("ecrl::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `x @ weight.T`. In a compiled graph, oneDNN computes this product."""
    return x @ weight.t()


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _lower_linear(x: Any, weight: Any) -> Any:
    return ir.TensorBox.create(cast(Any, LinearUnary).create(x, weight, None, "none", [], ""))


register(torch.ops.ecrl.linear, _lower_linear)


@torch.library.custom_op("ecrl::bmm", mutates_args=())
def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b)


@torch.library.custom_op("ecrl::bmm_relu", mutates_args=())
def _bmm_relu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """Return `relu(a @ b + bias)` for batches of matrices and a bias of shape `[B, 1, N]`."""
    return torch.relu(torch.bmm(a, b) + bias)


@torch.library.custom_op("ecrl::bmm_relu_gradient", mutates_args=())
def _bmm_relu_gradient(a: Tensor, b: Tensor, relu: Tensor) -> Tensor:
    """Return `a @ b` for batches of matrices, with zeros where `relu`, of the same shape, is not positive."""
    return torch.ops.aten.threshold_backward(torch.bmm(a, b), relu, 0)


@_bmm.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


@_bmm_relu.register_fake
@_bmm_relu_gradient.register_fake
def _(a: Tensor, b: Tensor, other: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


_FINISH = {
    "bmm": "sum",
    "bmm_relu": "at::vec::clamp_min(sum + other, Lane(0.0f))",
    "bmm_relu_gradient": "Lane::blendv(sum, Lane(0.0f), other <= Lane(0.0f))",
}
"""C++ expression for the elements of each operator's result.

In the expression, `sum` has the elements of `a @ b`, and `other` has the elements of the operator's third argument.
"""


def _tiles_code(operator: str, declare: Callable[..., str], factors: list[Any], product: Any) -> str:
    """Write the C++ of `operator`, a key of `_FINISH`, for the shapes and the memory layouts of `factors`."""
    a, b, *others = factors
    (batch, m, k), n = a.get_size(), b.get_size()[2]
    buffers, addresses = pointers(factors)
    (a_i, a_m, a_k), (b_i, b_k, b_n) = a.get_stride(), b.get_stride()
    third, (third_i, third_m) = "product", (0, 0)
    for other in others:
        third, (third_i, third_m) = addresses[2], other.get_stride()[:2]
        third_m = third_m if other.get_size()[1] > 1 else 0
    copies_a, copies_b = a_k != 1 and n >= _WIDE, b_n != 1 or m >= _TALL
    threads = parallel_num_threads() if batch * m * k * n >= _PARALLEL else 1
    parts = 1 if batch >= threads else min(threads, max(m // 12, 1))
    if copies_a:  # the copy of one part of `a` should fit in the cache
        parts = max(parts, -(-m // _COPIED_ROWS))
    return _CPP.format(
        name=NAME,
        kernel=declare(buffers, "product"),
        parallel=f"#pragma omp parallel for num_threads({threads})" if threads > 1 else "",
        **{"batch": batch, "parts": parts, "M": m, "K": k, "N": n, "terms": _TERMS},
        **{"a": addresses[0], "a_i": a_i, "a_m": a_m, "a_k": a_k},
        **{"b": addresses[1], "b_i": b_i, "b_k": b_k, "b_n": b_n},
        **{"third": third, "third_i": third_i, "third_m": third_m},
        **{"finish": _FINISH[operator], "finishes": str(bool(others)).lower()},
        **{"copies_a": str(copies_a).lower(), "copies_b": str(copies_b).lower(), "tiles": -(-m // (6 * parts))},
    )


def _lower(operator: str, a: Any, b: Any, *others: Any) -> Any:
    factors = [*map(stored, (a, b)), *(stored(ir.ExternKernel.require_contiguous(x)) for x in others)]
    return call(partial(_tiles_code, operator), factors, [*a.get_size()[:2], b.get_size()[2]], a.get_dtype())


for _operator in _FINISH:
    register(getattr(torch.ops.ecrl, _operator), partial(_lower, _operator))
