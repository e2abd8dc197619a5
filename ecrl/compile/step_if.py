"""Convert each `step_if` into a conditional operation of the graph that is being traced for the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.cond import cond_op
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ecrl import distributed
from ecrl.compile.scan import (
    Packing,
    dense,
    pack_small,
    refuse_captured_variables,
    share_constants,
    with_stride,
    without_aliases,
)
from ecrl.compile.user_line import call_pure
from ecrl.compile.vmap import records_gradients, vmapped
from ecrl.kernels.scan_loop import check_carry, step_or_keep, use_step_if
from ecrl.pytree import flatten, unflatten


@use_step_if
def graph_step_if(due: Tensor, body: Callable[..., tuple[Any, Any]], carry: Any, *constants: Any) -> tuple[Any, Any]:
    """Add a conditional operation to the graph that is being traced.

    Run `ecrl.kernels.scan_loop.step_or_keep` if no graph is being traced, on a GPU, under vmap or a gradient, and with
    several ranks.
    """
    (old, c), (fixed, k) = flatten(carry), flatten(constants)
    mode, one_by_one = get_proxy_mode(), vmapped() or records_gradients(*old, *fixed) or distributed.world_size() > 1
    if mode is None or one_by_one or due.device.type != "cpu":
        return step_or_keep(due, body, carry, *constants)
    packings = pack_small(old), pack_small(fixed)
    buffers = packings[0].pack(old), packings[1].pack(fixed)
    at, structure, y_packing, y_buffers = len(buffers[0]), list[Any](), list[Packing](), list[Tensor]()

    def run(*inputs: Tensor) -> list[Tensor]:
        def build_args() -> tuple[Any, ...]:
            return unflatten(c, packings[0].unpack(inputs[:at])), *unflatten(k, packings[1].unpack(inputs[at:]))

        after, y = call_pure(body, build_args)
        (new, c_after), (y_leaves, y_structure) = flatten(after), flatten(y)
        check_carry((old, c), (new, c_after))
        structure[:], y_packing[:] = [y_structure], [pack_small(y_leaves)]
        y_buffers[:] = y_packing[0].pack(y_leaves)
        new = [with_stride(x, before.stride()) for x, before in zip(packings[0].pack(new), inputs, strict=False)]
        return without_aliases([*new, *y_buffers], inputs)

    def keep(*inputs: Tensor) -> list[Tensor]:
        return [*(x.clone() for x in inputs[:at]), *(torch.full_like(x, torch.nan) for x in y_buffers)]

    out = cond_op(due, run, keep, tuple(without_aliases([*map(dense, buffers[0]), *buffers[1]], ())))
    refuse_captured_variables(mode.tracer.root)
    share_constants(mode.tracer.root)
    return unflatten(c, packings[0].unpack(out[:at])), unflatten(structure[0], y_packing[0].unpack(out[at:]))
