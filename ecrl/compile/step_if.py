"""Convert `ecrl.kernels.scan_loop.step_if` into a conditional operation of the graph that is traced for the CPU."""

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
    without_aliases,
)
from ecrl.compile.user_line import call_pure
from ecrl.compile.vmap import records_gradients, vmapped
from ecrl.kernels.scan_loop import check_carry, step_or_keep, use_step_if
from ecrl.pytree import flatten, unflatten


@use_step_if
def graph_step_if(due: Tensor, body: Callable[..., tuple[Any, Any]], carry: Any, *constants: Any) -> tuple[Any, Any]:
    """Add a conditional operation to the graph that is being traced.

    If no graph is being traced, run `ecrl.kernels.scan_loop.step_or_keep` instead. Also run `step_or_keep` on a GPU,
    under vmap, while gradients are recorded, and with several ranks.
    """
    (old, c), (fixed, k) = flatten(carry), flatten(constants)
    mode, one_by_one = get_proxy_mode(), vmapped() or records_gradients(*old, *fixed) or distributed.world_size() > 1
    if mode is None or one_by_one or due.device.type != "cpu":
        return step_or_keep(due, body, carry, *constants)
    packings = pack_small(old), pack_small(fixed)
    buffers = packings[0].pack(old), packings[1].pack(fixed)
    shapes, at = [x.shape for part in buffers for x in part], len(buffers[0])
    structure, y_packing, y_like = list[Any](), list[Packing](), list[tuple[torch.Size, torch.dtype]]()

    def run(*vectors: Tensor) -> list[Tensor]:
        inputs = [x.reshape(shape) for x, shape in zip(vectors, shapes, strict=True)]

        def build_args() -> tuple[Any, ...]:
            return unflatten(c, packings[0].unpack(inputs[:at])), *unflatten(k, packings[1].unpack(inputs[at:]))

        after, y = call_pure(body, build_args)
        (new, c_after), (y_leaves, y_structure) = flatten(after), flatten(y)
        check_carry((old, c), (new, c_after))
        structure[:], y_packing[:] = [y_structure], [pack_small(y_leaves)]
        y_buffers = y_packing[0].pack(y_leaves)
        y_like[:] = [(x.shape, x.dtype) for x in y_buffers]
        return without_aliases([*map(_vector, packings[0].pack(new)), *map(dense, y_buffers)], vectors)

    def keep(*vectors: Tensor) -> list[Tensor]:
        absent = [torch.full(shape, torch.nan, dtype=dtype) for shape, dtype in y_like]
        return [*(x.clone() for x in vectors[:at]), *absent]

    operands = without_aliases([_vector(x) for part in buffers for x in part], ())
    out = cond_op(due, run, keep, tuple(operands))
    advice = "pass it to step_if after carry, and the body receives it after carry"
    refuse_captured_variables(mode.tracer.root, "step_if", advice)
    share_constants(mode.tracer.root)
    new = [x.reshape(shape) for x, shape in zip(out[:at], shapes, strict=False)]
    return unflatten(c, packings[0].unpack(new)), unflatten(structure[0], y_packing[0].unpack(out[at:]))


def _vector(x: Tensor) -> Tensor:
    """Flatten a tensor. The compiler may reorder the memory of a matrix that a branch reads, but not of a vector."""
    return x.reshape(-1)
