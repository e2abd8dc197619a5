"""Implement the recursion of `ecrl.kernels.reverse_scan` in C++ for graphs on a CPU.

With tensor operations, the recursion over a long time axis adds hundreds of operations to the graph, which take long
to compile. In C++, the recursion is one loop over time for each block of up to 1,024 rows. An inner loop computes the
rows of a time step in float64.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir

from ecrl.compile.cpu_source import call, pointers, register, stored
from ecrl.kernels.reverse_scan import as_float64, scan_time_major
from ecrl.types import Scalar

_SCAN = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <algorithm>
extern "C" {kernel}
{{
    constexpr int64_t TIME = {time}, ROWS = {rows}, TOGETHER = 1024;
    double carry[TOGETHER];
    for (int64_t first = 0; first < ROWS; first += TOGETHER) {{
        const int64_t n = std::min(TOGETHER, ROWS - first);
        const auto* last = {last} + first;
        for (int64_t i = 0; i < n; i++) carry[i] = last[i];
        for (int64_t t = TIME - 1; t >= 0; t--) {{
            const auto* x = {x} + t * ROWS + first;
            const auto* decay = {decay} + t * {decay_of_step} + first * {decay_of_row};
            const auto* cut = {cut} + t * ROWS + first;
            auto* y = out + t * ROWS + first;
            for (int64_t i = 0; i < n; i++) {{
                const double weight = decay[i * {decay_of_row}];
                const double passed = weight * carry[i];
                carry[i] = x[i] + (cut[i] | (weight == 0) ? 0.0 : passed);
                y[i] = carry[i];
            }}
        }}
    }}
}}
"""

# The operator takes `x` and `cut` of shape [T, rows], `decay` of shape [1 or T, 1 or rows], and `last` of shape [rows].
torch.library.define("ecrl::cpu_reverse_scan", "(Tensor x, Tensor decay, Tensor cut, Tensor last) -> Tensor")
_operator = torch.ops.ecrl.cpu_reverse_scan


@torch.library.impl("ecrl::cpu_reverse_scan", "cpu")
def _(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    """Run the recursion if a traced graph runs without compilation."""
    one = decay.reshape(()) if decay.numel() == 1 else decay.expand(x.shape)
    return scan_time_major(x, one, cut, last)


@torch.library.register_fake("ecrl::cpu_reverse_scan")
def _(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _batched(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
    """Run the operator on a batch of vmap, whose members become additional rows."""
    moved = [x.unsqueeze(-2) if dim is None else x.movedim(dim, -2) for x, dim in zip(args, in_dims, strict=True)]
    size, rows = info.batch_size, moved[0].shape[-1]
    x, decay, cut, last = (one.expand(*one.shape[:-2], size, rows).flatten(-2) for one in moved)
    return _operator(x, decay, cut, last).unflatten(-1, (size, rows)), 1


torch.library.register_vmap("ecrl::cpu_reverse_scan", _batched)


def _code(declare: Callable[..., str], inputs: list[Any], result: Any) -> str:
    """Fill in the declaration, the addresses and the sizes in the C++ template."""
    time, rows = result.get_size()
    buffers, addresses = pointers(inputs)
    steps, columns = inputs[1].get_size()
    return _SCAN.format(
        kernel=declare(buffers, "out"),
        **dict(zip(("x", "decay", "cut", "last"), addresses, strict=True)),
        time=time,
        rows=rows,
        decay_of_step=columns if steps > 1 else 0,
        decay_of_row=1 if columns > 1 else 0,
    )


def _lower(*args: Any) -> Any:
    inputs = [stored(ir.ExternKernel.require_contiguous(x)) for x in args]
    return call(_code, inputs, args[0].get_size(), args[0].get_dtype())


register(_operator, _lower)


def cpu_scan(x: Tensor, decay: Scalar, cut: Tensor, last: Tensor) -> Tensor:
    """Run `scan_time_major`, the recursion of `ecrl.kernels.reverse_scan`, as one operation without derivatives.

    Args:
        x: `[T, *B]` float32 or float64, on the CPU and not empty.
        decay: a number, a 0-d tensor or a `[T, *B]` tensor.
        cut: `[T, *B]` bool.
        last: `[*B]` in the dtype of `x`.

    Returns: `[T, *B]` in the dtype of `x`.
    """
    decay = as_float64(decay, x)
    x_rows, cut_rows = (t.reshape(len(x), -1) for t in (x, cut))
    decay_rows = decay.reshape(x_rows.shape) if decay.ndim else decay.reshape(1, 1)
    return _operator(x_rows, decay_rows, cut_rows, last.reshape(-1)).reshape(x.shape)
