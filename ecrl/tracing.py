"""A function as one graph of tensor operations, with loops over time that stay loops.

A graph is traced by running the function once on tensors without data: what it finds beside its arguments is part of
the graph.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

import ecrl.philox_cpp  # noqa: F401  # how inductor writes Philox
from ecrl.kernels import scan
from ecrl.kernels.loops import length_of
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
    with torch.no_grad():
        graph = make_fx(flat, rewrites, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
    return _lifted(graph), found[0]


def _once(graph: GraphModule) -> None:
    """Calculate once what is calculated alike twice.

    Not so tensors that are written to, nor what is read from them, nor what a loop takes or gives: that may not share
    memory.
    """
    nodes = graph.graph.nodes
    apart = [n for n in nodes if n.op == "output" or n.target is scan_op or _writes(n)]
    apart = {_memory(n) for node in apart for n in (node, *node.all_input_nodes)} - {None}
    first: dict[str, Node] = {}
    for node in list(nodes):
        memory = _memory(node)
        if node.op != "call_function" or memory is None or apart & {memory, *map(_memory, node.all_input_nodes)}:
            continue
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _lifted(graph: GraphModule) -> GraphModule:
    """The graph with the constants of its loops' bodies as inputs of the loops, which may not have any of their own."""
    _once(graph)
    for loop in graph.graph.find_nodes(op="call_function", target=scan_op):
        kind = cast(Node, loop.args[0]).target
        body = _lifted(cast(GraphModule, getattr(graph, cast(str, kind))))
        given: list[Any] = list(cast(tuple, loop.args[-1]))
        for node in body.graph.find_nodes(op="get_attr"):
            constant = getattr(body, node.target)
            if isinstance(constant, Tensor):
                name = f"{kind}_constant_{len(given)}"
                graph.register_buffer(name, constant.clone())  # no two inputs may share memory
                with graph.graph.inserting_before(loop):
                    outside = graph.graph.get_attr(name)
                with body.graph.inserting_after([n for n in body.graph.nodes if n.op == "placeholder"][-1]):
                    node.replace_all_uses_with(body.graph.placeholder(name))
                body.graph.erase_node(node)
                given.append(outside)
        loop.args = (*loop.args[:-1], tuple(given))
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


def graph_scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """`ecrl.kernels.scan` as one loop of the graph that is being traced; a plain one outside of any, or of one step."""
    (first, c), (rows, x), (fixed, k) = map(flatten, (carry, xs, constants))
    mode = get_proxy_mode()
    if mode is None or length_of(rows) == 1:
        return scan(body, carry, xs, *constants)
    if not first:  # the operator wants something to carry
        _, y = graph_scan(
            lambda none, x, *k: (none.clone(), body(carry, x, *k)[1]), rows[0].new_zeros(()), xs, *constants
        )
        return carry, y
    length, found = length_of(rows), []
    packings = _packing(first), _packing(rows, 1), _packing(fixed)
    packed = packings[0].pack(first), packings[1].pack(rows, 1), packings[2].pack(fixed)

    def flat(*given: Tensor) -> list[Tensor]:
        at, to = len(packed[0]), len(packed[0]) + len(packed[1])
        now, row, rest = (p.unpack(g) for p, g in zip(packings, (given[:at], given[at:to], given[to:]), strict=True))
        after, y = body(unflatten(c, now), unflatten(x, row, lambda size: size[1:]), *unflatten(k, rest))
        (after, like), (y, kept) = flatten(after), flatten(y)
        if like != c:
            raise ValueError(f"the carry of a scan changed its structure from {c} to {like}")
        found[:] = [kept, _packing(y)]
        ys = found[1].pack(y) or [given[0].new_zeros(())]  # the operator wants something to stack
        return _owned([*packings[0].pack(after), *ys], given)

    own = _owned([*packed[0], *packed[2]], ())
    out = scan_op(flat, own[: len(packed[0])], packed[1], tuple(own[len(packed[0]) :]))
    _share_constants(mode.tracer.root)
    structure, packing = found
    after, ys = out[: len(packed[0])], packing.unpack(out[len(packed[0]) :], (length,))
    return unflatten(c, packings[0].unpack(after)), unflatten(structure, ys, lambda size: (length, *size))


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
