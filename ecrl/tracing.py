"""A function as one graph of tensor operations, with loops over time that stay loops.

A graph is traced by running the function once on tensors without data: what it finds beside its arguments is part of
the graph.
"""

import re
import traceback
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ecrl.philox_cpp  # noqa: F401  # how inductor writes Philox
from ecrl import batching
from ecrl.batching import outside, over_batch, recorded, vmapped
from ecrl.errors import ConfigError
from ecrl.kernels import loops, scan
from ecrl.kernels.loops import length_of, loops_of_graphs
from ecrl.products import PRODUCTS
from ecrl.trees import flatten, unflatten

_SMALL = 4096  # elements


def traced(fn: Callable[..., Any], structure: Hashable, leaves: list[Tensor]) -> tuple[GraphModule, Hashable]:
    """The graph of `fn` on tensors like these, as a function of the leaves, and the structure of what it gives."""
    found: list[Hashable] = []

    def flat(*given: Tensor) -> list[Tensor]:
        out, made = flatten(fn(*unflatten(structure, given)))
        found[:] = [made]
        return out

    rewrites = PRODUCTS if all(leaf.device.type == "cpu" for leaf in leaves) else None
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        without_data = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
    with torch.no_grad(), tracing(TracingContext(without_data)):
        try:
            graph = make_fx(flat, rewrites, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
        except RuntimeError as error:
            if not isinstance(error, _READS) and not str(error).startswith((".numpy()", "Cannot access data pointer")):
                raise
            place, operation = _place(traceback.extract_tb(error.__traceback__)), re.split(" is | of ", str(error))[0]
            raise ConfigError(
                f"trainer.compile: {place} reads values of a tensor ({operation}), "
                "which no compiled graph can; say it in tensors, such as torch.where, work out constants beforehand, "
                "or set trainer.compile to off"
            ) from error
    shapes.settings = ShapeEnv().settings  # inductor's loops have a counter that is such a value
    return _lifted(graph), found[0]


_READS = DataDependentOutputException, DynamicOutputShapeException


def _place(frames: traceback.StackSummary) -> str:
    """The last line of code that is neither torch's nor what brings loops into a graph."""
    inside = {Path(torch.__file__).parent, Path(__file__), Path(batching.__file__), Path(loops.__file__)}
    outer = [f for f in frames if not inside & {Path(f.filename), *Path(f.filename).parents}]
    last = (outer or frames)[-1]
    return f"{last.filename}:{last.lineno}, in {last.name},"


def _once(graph: GraphModule) -> None:
    """Calculate once what is calculated alike twice.

    Not so tensors that are written to, nor what is read from them, nor what a loop takes or gives: that may not share
    memory.
    """
    nodes = graph.graph.nodes
    apart = [n for n in nodes if n.op == "output" or n.target is scan_op or _writes(n)]
    apart = {memory_of(n) for node in apart for n in (node, *node.all_input_nodes)} - {None}
    first: dict[str, Node] = {}
    for node in list(nodes):
        memory = memory_of(node)
        if node.op != "call_function" or memory is None or apart & {memory, *map(memory_of, node.all_input_nodes)}:
            continue
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def memory_of(node: Node) -> int | None:
    """What two nodes have in common if their tensors lie in one piece of memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _behind(node: Node) -> Node:
    """What a view shows that changes nothing; inductor's loops free such a view after their first turn."""
    while node.op == "call_function" and not _writes(node) and len(node.all_input_nodes) == 1:
        (shown,) = node.all_input_nodes
        if memory_of(shown) is None or _layout(shown) != _layout(node):
            break
        node = shown
    return node


def _layout(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return memory_of(node), value.dtype, value.shape, value.stride(), value.storage_offset()


def _lifted(graph: GraphModule) -> GraphModule:
    """The graph with the constants of its loops' bodies as inputs of the loops, which may not have any of their own."""
    _once(graph)
    for loop in graph.graph.find_nodes(op="call_function", target=scan_op):
        kind = cast(Node, loop.args[0]).target
        body = _lifted(cast(GraphModule, getattr(graph, cast(str, kind))))
        given: list[Any] = [*map(_behind, cast(tuple, loop.args[-1]))]
        for node in body.graph.find_nodes(op="get_attr"):
            constant = getattr(body, node.target)
            if isinstance(constant, Tensor):
                name = f"{kind}_constant_{len(given)}"
                graph.register_buffer(name, constant.clone())  # no two inputs may share memory
                with graph.graph.inserting_before(loop):
                    outside = graph.graph.get_attr(name)
                with body.graph.inserting_after([n for n in body.graph.nodes if n.op == "placeholder"][-1]):
                    inside = body.graph.placeholder(name)
                inside.target = inside.name  # not that of a constant of a loop inside of it, which it would take over
                node.replace_all_uses_with(inside)
                body.graph.erase_node(node)
                given.append(outside)
        loop.args = (loop.args[0], *[[*map(_behind, cast(list, part))] for part in loop.args[1:-1]], tuple(given))
        body.recompile()
    graph.recompile()
    return graph


class _Packing(NamedTuple):
    """How small tensors lie in few: `(buffer, first element, shape)` of each; a large one has a buffer for itself."""

    places: list[tuple[int, int, torch.Size]]
    buffers: list[list[int]]

    def pack(self, leaves: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
        """The buffers, with the first `lead` axes kept."""
        flat = [leaf.reshape(*leaf.shape[:lead], -1) for leaf in leaves]
        return [
            torch.cat([flat[i] for i in inside], -1) if len(inside) > 1 else leaves[inside[0]]
            for inside in self.buffers
        ]

    def unpack(self, buffers: Sequence[Tensor], lead: tuple[int, ...] = ()) -> list[Tensor]:
        """The tensors, as views."""
        return [
            buffers[which]
            if len(self.buffers[which]) == 1
            else buffers[which].narrow(-1, first, shape.numel()).reshape((*lead, *shape))
            for which, first, shape in self.places
        ]


def _packing(leaves: Sequence[Tensor], lead: int = 0) -> _Packing:
    """Every variable of a loop costs more than a step of a small network, so small ones of one dtype share a buffer."""
    places, buffers, groups = [], [], {}
    for i, leaf in enumerate(leaves):
        shape = leaf.shape[lead:]
        which = groups.setdefault(leaf.dtype if shape.numel() <= _SMALL else i, len(groups))
        if which == len(buffers):
            buffers.append([])
        places.append((which, sum(leaves[j].shape[lead:].numel() for j in buffers[which]), shape))
        buffers[which].append(i)
    return _Packing(places, buffers)


@loops_of_graphs
def graph_scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """`ecrl.kernels.scan` as one loop of the graph that is being traced; a plain one outside of any, or of one step."""
    (first, c), (rows, x), (fixed, k) = map(flatten, (carry, xs, constants))
    mode = get_proxy_mode()
    if mode is None or length_of(rows) == 1:
        return scan(body, carry, xs, *constants)
    if recorded(*first, *rows, *fixed):
        raise ConfigError(
            f"trainer.compile: {_place(traceback.extract_stack())} scans where gradients are recorded, which no loop "
            "of a compiled graph can; use ecrl.kernels.scan there, whose turns are compiled one by one, or set "
            "trainer.compile to off"
        )
    if not first:  # the operator wants something to carry
        _, y = graph_scan(
            lambda none, x, *k: (none.clone(), body(carry, x, *k)[1]), rows[0].new_zeros(()), xs, *constants
        )
        return carry, y
    length, found = length_of(rows), []
    turn = _turn(body, (c, x, k), found)
    if vmapped():
        after, ys = _batched_scan(turn, first, rows, fixed)
        return unflatten(c, after), unflatten(found[0], ys, lambda size: (length, *size))
    packings = _packing(first), _packing(rows, 1), _packing(fixed)
    packed = packings[0].pack(first), packings[1].pack(rows, 1), packings[2].pack(fixed)
    kept: list[_Packing] = []

    def flat(*given: Tensor) -> list[Tensor]:
        at, to = len(packed[0]), len(packed[0]) + len(packed[1])
        after, y = turn(*(p.unpack(g) for p, g in zip(packings, (given[:at], given[at:to], given[to:]), strict=True)))
        kept[:] = [_packing(y)]
        ys = kept[0].pack(y) or [given[0].new_zeros(())]  # the operator wants something to stack
        return _owned([*packings[0].pack(after), *ys], given)

    own = _owned([*packed[0], *packed[2]], ())
    out = scan_op(flat, own[: len(packed[0])], packed[1], tuple(own[len(packed[0]) :]))
    _refuse_outsiders(mode.tracer.root)
    _share_constants(mode.tracer.root)
    after, ys = packings[0].unpack(out[: len(packed[0])]), kept[0].unpack(out[len(packed[0]) :], (length,))
    return unflatten(c, after), unflatten(found[0], ys, lambda size: (length, *size))


def _turn(body: Callable[..., tuple[Any, Any]], structures: Sequence[Hashable], found: list[Hashable]) -> Callable:
    """`body` on lists of tensors; `found` is told the structure of what it gives beside the carry."""
    c, x, k = structures

    def turn(now: Sequence[Tensor], row: Sequence[Tensor], rest: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        after, y = body(unflatten(c, now), unflatten(x, row, lambda size: size[1:]), *unflatten(k, rest))
        (after, like), (y, kept) = flatten(after), flatten(y)
        if like != c:
            raise ValueError(f"the carry of a scan changed its structure from {c} to {like}")
        found[:] = [kept]
        return after, y

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
                f"trainer.compile: {_place(traceback.extract_stack())} scans with a body that uses a {kind} tensor "
                f"{list(value.shape)} made outside of it; pass it to scan after xs: it comes to the body after x"
            )


def _read(node: Node) -> bool:
    """Whether the values of a tensor matter to what the graph gives, and not only its shape, dtype and device."""
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


def _owned(out: list[Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies of those tensors that share memory with an input or each other, which a loop in a graph may not give."""
    seen, owned = {leaf.untyped_storage()._cdata for leaf in given}, []
    for leaf in out:
        owned.append(leaf.clone() if leaf.untyped_storage()._cdata in seen else leaf)
        seen.add(leaf.untyped_storage()._cdata)
    return owned
