"""Loops over time as loops of the graph that is being traced."""

import re
import traceback
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ecrl.compile.packing import Packing, packing
from ecrl.compile.scan_gradient import Loop, differentiable, refusal
from ecrl.compile.user_code import protected, user_line
from ecrl.compile.user_line import call_pure
from ecrl.compile.vmap import is_forward_mode, outside, over_batch, recorded, vmapped
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.kernels.scan_loop import check_carry, length_of, loops_of_graphs
from ecrl.pytree import flatten, unflatten


@loops_of_graphs
def graph_scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """`ecrl.kernels.scan` as one loop of the graph that is being traced; a plain one outside of any, or of one step."""
    (first, c), (rows, x), (fixed, k) = map(flatten, (carry, xs, constants))
    mode = get_proxy_mode()
    if mode is None or length_of(rows) == 1:
        return scan(body, carry, xs, *constants)
    if is_forward_mode([*first, *rows, *fixed]):
        raise ConfigError(refusal(user_line(traceback.extract_stack()), "forward-mode derivatives are taken"))
    if not first:  # the operator needs at least one tensor to carry
        _, y = graph_scan(
            lambda none, x, *k: (none.clone(), body(carry, x, *k)[1]), rows[0].new_zeros(()), xs, *constants
        )
        return carry, y
    length, found = length_of(rows), []
    turn = _turn(body, (c, x, k), found)
    if vmapped():
        after, ys = _batched_scan(turn, first, rows, fixed)
        return unflatten(c, after), unflatten(found[0], ys, lambda size: (length, *size))
    if recorded(*first, *rows, *fixed):
        line = user_line(traceback.extract_stack())
        one = Loop(turn, graph_scan, len(first), len(rows), line)
        after, ys = differentiable(one, [*first, *rows, *fixed])
        return unflatten(c, after), unflatten(found[0], ys, lambda size: (length, *size))
    first, rows, fixed = (list(map(_in_graph, part)) for part in (first, rows, fixed))
    packings = packing(first), packing(rows, 1), packing(fixed)
    packed = packings[0].pack(first), packings[1].pack(rows, 1), packings[2].pack(fixed)
    kept: list[Packing] = []

    def flat(*given: Tensor) -> list[Tensor]:
        at, to = len(packed[0]), len(packed[0]) + len(packed[1])
        with protected(given):
            after, y = turn(
                *(p.unpack(g) for p, g in zip(packings, (given[:at], given[at:to], given[to:]), strict=True))
            )
        kept[:] = [packing(y)]
        ys = kept[0].pack(y) or [given[0].new_zeros(())]  # the operator needs an output to stack
        after = [_laid_out(leaf, old.stride()) for leaf, old in zip(packings[0].pack(after), given, strict=False)]
        return _owned([*after, *ys], given)

    own = _owned([*map(_dense, packed[0]), *packed[2]], ())
    out = scan_op(flat, own[: len(packed[0])], packed[1], tuple(own[len(packed[0]) :]))
    _refuse_outsiders(mode.tracer.root)
    _share_constants(mode.tracer.root)
    after, ys = packings[0].unpack(out[: len(packed[0])]), kept[0].unpack(out[len(packed[0]) :], (length,))
    return unflatten(c, after), unflatten(found[0], ys, lambda size: (length, *size))


def _turn(body: Callable[..., tuple[Any, Any]], structures: Sequence[Hashable], found: list[Hashable]) -> Callable:
    """Adapt `body` to lists of tensors. It stores the structure of its output beside the carry in `found`."""
    c, x, k = structures

    def turn(now: Sequence[Tensor], row: Sequence[Tensor], rest: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        args = lambda: (unflatten(c, now), unflatten(x, row, lambda size: size[1:]), *unflatten(k, rest))  # noqa: E731
        after, y = call_pure(body, args)
        after, (y, kept) = flatten(after), flatten(y)
        check_carry((list(now), c), after)
        found[:] = [kept]
        return after[0], y

    return turn


def _batched_scan(turn: Callable, *given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The last carry and what is kept, of a loop under vmap: one loop, each turn of the whole batch."""
    at, to = len(given[0]), len(given[0]) + len(given[1])

    def one(*leaves: Tensor) -> list[Tensor]:
        after, y = turn(leaves[:at], leaves[at:to], leaves[to:])
        return [*after, *y]

    def whole(batched: tuple[bool, ...], *leaves: Tensor) -> list[Tensor]:
        which, carried = list(zip(leaves, batched, strict=True)), any(batched)
        size = [len(leaf) for leaf, has in which if has][:1]
        carry = [(leaf if has else leaf.expand((*size, *leaf.shape))).contiguous() for leaf, has in which[:at]]
        xs = [leaf.movedim(0, 1) if has else leaf for leaf, has in which[at:to]]
        _, structure = flatten(leaves)

        def step(carry: list[Tensor], xs: list[Tensor], *fixed: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            out = over_batch(one, (), structure, (*[carried] * at, *batched[at:]), *carry, *xs, *fixed)
            return [leaf.contiguous() for leaf in out[:at]], out[at:]

        after, ys = graph_scan(step, carry, xs, *leaves[to:])
        return [*after, *([y.movedim(0, 1) for y in ys] if carried else ys)]

    out = outside(whole, [leaf for leaves in given for leaf in leaves])
    return list(out[:at]), list(out[at:])


def _refuse_outsiders(root: torch.nn.Module) -> None:
    """ConfigError if the body of the last loop uses a tensor of the graph around it, which it cannot get at."""
    body = cast(GraphModule, [*root.children()][-1])
    for node in body.graph.find_nodes(op="get_attr"):
        value = getattr(body, node.target)
        if isinstance(value, FakeTensor) and _read(node):
            kind = str(value.dtype).removeprefix("torch.")
            raise ConfigError(
                f"trainer.compile: {user_line(traceback.extract_stack())} scans with a body that uses a {kind} tensor "
                f"{list(value.shape)} made outside of it; pass it to scan after xs: it comes to the body after x"
            )


def _read(node: Node) -> bool:
    """Return True if an output depends on the values of a tensor, not only on its shape, dtype and device."""
    behind, todo = {node}, [node]
    while todo:
        for user in todo.pop().users.keys() - behind:
            if user.op == "output":
                return True
            if not re.search(r"\.new_|_like\.", str(user.target)):
                behind.add(user)
                todo.append(user)
    return False


def _share_constants(root: torch.nn.Module) -> None:
    """Tensors that a loop's body found beside its arguments, for what comes after the loop to find too.

    The tracer looks for a constant in the bodies of earlier loops, and then cannot get at it there.
    """
    for name, constant in [*root.named_buffers(), *root.named_parameters()]:
        if "." in name:
            keep = root.register_parameter if isinstance(constant, torch.nn.Parameter) else root.register_buffer
            keep(name.replace(".", "_"), constant)


def _in_graph(leaf: Tensor) -> Tensor:
    """The leaf as a tensor of the graph; the operator takes no captured ones."""
    return leaf if isinstance(leaf, FakeTensor) else leaf.clone()


def _dense(leaf: Tensor) -> Tensor:
    """The leaf in a layout without gaps: its own, or row-major order."""
    return leaf if leaf.stride() == torch.empty_like(leaf, device="meta").stride() else leaf.contiguous()


def _laid_out(leaf: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The leaf with the strides of a dense tensor."""
    if leaf.stride() == strides:
        return leaf
    order = sorted(range(leaf.ndim), key=lambda axis: -strides[axis])
    return leaf.permute(order).contiguous().as_strided(leaf.shape, strides)


def _owned(out: list[Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies of those tensors that share memory with an input or each other, which a loop in a graph may not give."""
    seen, owned = {leaf.untyped_storage()._cdata for leaf in given}, []
    for leaf in out:
        owned.append(leaf.clone() if leaf.untyped_storage()._cdata in seen else leaf)
        seen.add(leaf.untyped_storage()._cdata)
    return owned
