"""Convert each call of `ecrl.kernels.loop`, or of the function `run.scan` of an algorithm, into one loop operation.

The loop operation belongs to the graph that is being traced.

In an iteration of a loop, reading or writing a tensor takes more time than the arithmetic of a small network. Small
tensors of the same dtype therefore share a buffer, which the loop reads and writes.
"""

import re
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ecrl.compile.scan_gradient import Loop, differentiable, refusal
from ecrl.compile.user_code import protected, user_line
from ecrl.compile.user_line import call_pure
from ecrl.compile.vmap import is_forward_mode, outside_vmap, over_batch, records_gradients, vmapped
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.kernels.scan_loop import check_carry, length_of, use_loop
from ecrl.pytree import flatten, unflatten
from ecrl.tracing_state import in_graph


@use_loop
def loop_or_scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """Run `graph_scan` if a graph is being traced. Otherwise, run `ecrl.kernels.scan`."""
    return (graph_scan if in_graph() else scan)(body, carry, xs, *constants)


def graph_scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """Run a scan as a single loop operation of the graph that is being traced.

    If no graph is being traced, or if the loop has a single iteration, run `ecrl.kernels.scan` itself.

    Raises: ConfigError if the scan is differentiated in forward mode. ConfigError also if `body` captures a tensor that
        the graph computes outside of the loop, instead of taking this tensor as an argument.
    """
    (carry_leaves, c), (x_leaves, x), (constant_leaves, k) = map(flatten, (carry, xs, constants))
    mode, length = get_proxy_mode(), length_of(x_leaves)
    if mode is None or length == 1:
        return scan(body, carry, xs, *constants)
    if is_forward_mode([*carry_leaves, *x_leaves, *constant_leaves]):
        raise ConfigError(refusal(user_line(traceback.extract_stack()), "forward-mode derivatives"))
    if not carry_leaves:  # the scan operator needs at least one tensor to carry
        _, y = graph_scan(
            lambda none, x, *k: (none.clone(), body(carry, x, *k)[1]), x_leaves[0].new_zeros(()), xs, *constants
        )
        return carry, y
    y_structure: list[Hashable] = []
    flat_body = _flatten_body(body, (c, x, k), y_structure)
    if vmapped():
        after, ys = _batched_scan(flat_body, carry_leaves, x_leaves, constant_leaves)
    elif records_gradients(*carry_leaves, *x_leaves, *constant_leaves):
        line = user_line(traceback.extract_stack())
        loop = Loop(flat_body, graph_scan, len(carry_leaves), len(x_leaves), line)
        after, ys = differentiable(loop, [*carry_leaves, *x_leaves, *constant_leaves])
    else:
        after, ys = _packed_scan(mode, flat_body, length, carry_leaves, x_leaves, constant_leaves)
    return unflatten(c, after), unflatten(y_structure[0], ys, lambda size: (length, *size))


def _packed_scan(
    mode: Any, flat_body: Callable, length: int, *parts: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Add a loop to the graph, with the loop's small tensors packed into shared buffers.

    The argument `parts` contains three lists: the leaves of the carry, of `xs` and of the constants. The function
    returns the final carry and the stacked outputs.
    """
    carry, xs, constants = (list(map(_in_graph, part)) for part in parts)
    packings = pack_small(carry), pack_small(xs, 1), pack_small(constants)
    buffers = packings[0].pack(carry), packings[1].pack(xs, 1), packings[2].pack(constants)
    at, to = len(buffers[0]), len(buffers[0]) + len(buffers[1])
    y_packing: list[Packing] = []

    def packed_body(*inputs: Tensor) -> list[Tensor]:
        groups = inputs[:at], inputs[at:to], inputs[to:]
        with protected(inputs):
            after, y = flat_body(*(p.unpack(group) for p, group in zip(packings, groups, strict=True)))
        y_packing[:] = [pack_small(y)]
        ys = y_packing[0].pack(y) or [inputs[0].new_zeros(())]  # the scan operator needs a stacked output
        after = [with_stride(leaf, old.stride()) for leaf, old in zip(packings[0].pack(after), inputs, strict=False)]
        return without_aliases([*after, *ys], inputs)

    inputs = without_aliases([*map(dense, buffers[0]), *buffers[2]], ())
    xs = [*map(dense, buffers[1])]  # inductor would copy a whole tensor with gaps in each iteration of the loop
    out = scan_op(packed_body, inputs[:at], xs, tuple(inputs[at:]))
    advice = "pass it to scan after xs, and the body receives it after x"
    refuse_captured_variables(mode.tracer.root, "a scan", advice)
    share_constants(mode.tracer.root)
    return packings[0].unpack(out[:at]), y_packing[0].unpack(out[at:], (length,))


def _flatten_body(body: Callable[..., tuple[Any, Any]], structures: Sequence[Hashable], y_structure: list) -> Callable:
    """Convert `body` to a function of lists of tensors. The function stores the structure of `y` in `y_structure`."""
    c, x, k = structures

    def flat_body(
        carry: Sequence[Tensor], row: Sequence[Tensor], constants: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        def build_args() -> tuple[Any, ...]:
            return unflatten(c, carry), unflatten(x, row, lambda size: size[1:]), *unflatten(k, constants)

        after, y = call_pure(body, build_args)
        after, (y_leaves, structure) = flatten(after), flatten(y)
        check_carry((list(carry), c), after)
        y_structure[:] = [structure]
        return after[0], y_leaves

    return flat_body


def _batched_scan(flat_body: Callable, *parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a loop under vmap as a single loop that computes a step of the whole batch in each iteration.

    The argument `parts` contains three lists: the leaves of the carry, of `xs` and of the constants. The function
    returns the final carry and the stacked outputs.
    """
    at, to = len(parts[0]), len(parts[0]) + len(parts[1])

    def flat_output(*leaves: Tensor) -> list[Tensor]:
        after, y = flat_body(leaves[:at], leaves[at:to], leaves[to:])
        return [*after, *y]

    def scan_batch(batched: tuple[bool, ...], *leaves: Tensor) -> list[Tensor]:
        pairs, is_carry_batched = list(zip(leaves, batched, strict=True)), any(batched)
        size = [len(leaf) for leaf, has_batch in pairs if has_batch][:1]
        carry = [
            (leaf if has_batch else leaf.expand((*size, *leaf.shape))).contiguous() for leaf, has_batch in pairs[:at]
        ]
        xs = [leaf.movedim(0, 1) if has_batch else leaf for leaf, has_batch in pairs[at:to]]
        _, structure = flatten(leaves)

        def body(carry: list[Tensor], xs: list[Tensor], *constants: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            which = (*[is_carry_batched] * at, *batched[at:])
            out = over_batch(flat_output, (), structure, which, *carry, *xs, *constants)
            return [leaf.contiguous() for leaf in out[:at]], out[at:]

        after, ys = graph_scan(body, carry, xs, *leaves[to:])
        return [*after, *([y.movedim(0, 1) for y in ys] if is_carry_batched else ys)]

    out = outside_vmap(scan_batch, [leaf for part in parts for leaf in part])
    return list(out[:at]), list(out[at:])


_SMALL = 4096  # a tensor with more elements does not share a buffer with other tensors


class Packing(NamedTuple):
    """Layout of several tensors in shared buffers.

    Attributes:
        positions: for each tensor, the index of its buffer, the index of its first element, and its shape.
        buffers: for each buffer, the indices of its tensors. A large tensor has its own buffer.
    """

    positions: list[tuple[int, int, torch.Size]]
    buffers: list[list[int]]

    def pack(self, leaves: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
        """Concatenate the flattened tensors of each buffer. A buffer with a single tensor is this tensor itself.

        The first `lead` axes are not flattened, and become the first axes of the buffers.
        """
        flat = [leaf.reshape(*leaf.shape[:lead], -1) for leaf in leaves]
        return [
            torch.cat([flat[i] for i in members], -1) if len(members) > 1 else leaves[members[0]]
            for members in self.buffers
        ]

    def unpack(self, buffers: Sequence[Tensor], lead: tuple[int, ...] = ()) -> list[Tensor]:
        """Return the tensors as views of `buffers`. The first axes of each buffer have the shape `lead`."""
        return [
            buffers[which]
            if len(self.buffers[which]) == 1
            else buffers[which].narrow(-1, first, shape.numel()).reshape((*lead, *shape))
            for which, first, shape in self.positions
        ]


def pack_small(leaves: Sequence[Tensor], lead: int = 0) -> Packing:
    """Assign all small tensors of the same dtype to one buffer, and each large tensor to its own buffer.

    The first `lead` axes of the tensors become the first axes of the buffers.
    """
    positions, buffers, groups = [], [], {}
    for i, leaf in enumerate(leaves):
        shape = leaf.shape[lead:]
        which = groups.setdefault(leaf.dtype if shape.numel() <= _SMALL else i, len(groups))
        if which == len(buffers):
            buffers.append([])
        positions.append((which, sum(leaves[j].shape[lead:].numel() for j in buffers[which]), shape))
        buffers[which].append(i)
    return Packing(positions, buffers)


def refuse_captured_variables(root: torch.nn.Module, call: str, advice: str) -> None:
    """Raise ConfigError if the body of the most recent call captures a tensor of the graph around the call.

    Args:
        root: module that the tracer has filled with the bodies of loops and with the branches of conditions.
        call: the call in the error message: "a scan" or "step_if". A call of step_if has two branches.
        advice: how to pass the tensor to the body instead.
    """
    count = 2 if call == "step_if" else 1
    bodies = cast(list[GraphModule], [*root.children()][-count:])
    for body, node in ((part, node) for part in bodies for node in part.graph.find_nodes(op="get_attr")):
        value = getattr(body, node.target)
        if isinstance(value, FakeTensor) and _affects_output(node):
            kind = str(value.dtype).removeprefix("torch.")
            line = user_line(traceback.extract_stack())
            raise ConfigError(
                f"trainer.compile: {line} calls {call} whose body captures a {kind} tensor {list(value.shape)} from "
                f"outside; {advice}"
            )


def _affects_output(node: Node) -> bool:
    """Return True if an output depends on the values of a node's tensor, not only on its shape, dtype and device."""
    dependent, todo = {node}, [node]
    while todo:
        for user in todo.pop().users.keys() - dependent:
            if user.op == "output":
                return True
            if not re.search(r"\.new_|_like\.", str(user.target)):
                dependent.add(user)
                todo.append(user)
    return False


def share_constants(root: torch.nn.Module) -> None:
    """Register the constants of loop bodies with the graph that contains the loops.

    If the traced code uses a constant in a loop and again after the loop, the tracer looks up the constant in the
    loop's body. But code outside the loop can only read constants that are registered with the outer graph.
    """
    for name, constant in [*root.named_buffers(), *root.named_parameters()]:
        if "." in name:
            register = root.register_parameter if isinstance(constant, torch.nn.Parameter) else root.register_buffer
            register(name.replace(".", "_"), constant)


def _in_graph(leaf: Tensor) -> Tensor:
    """Copy a tensor from outside into the graph, as torch's scan operator requires. Return other tensors unchanged."""
    return leaf if isinstance(leaf, FakeTensor) else leaf.clone()


def dense(leaf: Tensor) -> Tensor:
    """Copy a tensor with gaps in memory to row-major order. Return a tensor without gaps unchanged."""
    return leaf if leaf.stride() == torch.empty_like(leaf, device="meta").stride() else leaf.contiguous()


def with_stride(leaf: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return `leaf` with the given strides, which must describe a dense tensor. Copy `leaf` only if necessary."""
    if leaf.stride() == strides:
        return leaf
    order = sorted(range(leaf.ndim), key=lambda axis: -strides[axis])
    return leaf.permute(order).contiguous().as_strided(leaf.shape, strides)


def without_aliases(tensors: list[Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Copy each tensor that shares memory with an input or with an earlier tensor. Return all tensors.

    The copies are needed because neither the inputs nor the results of a loop or condition in a graph may be aliases.
    """
    seen, out = {leaf.untyped_storage()._cdata for leaf in inputs}, []
    for leaf in tensors:
        out.append(leaf.clone() if leaf.untyped_storage()._cdata in seen else leaf)
        seen.add(leaf.untyped_storage()._cdata)
    return out
