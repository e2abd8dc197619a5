"""Cut a graph into compiled pieces and plain Python loops over them, for a GPU.

A graph is cut at its loops over time. The operations between two loops form a stretch, which is compiled as a whole.
The body of a loop is a graph of its own. It is cut in the same way, and writes each row to its place. The remaining
Python does not depend on values of tensors, so a call can be captured once and replayed.
"""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.fx import Graph, GraphModule, Node

Run = Callable[..., Sequence[Tensor]]
Compile = Callable[[GraphModule, list[Tensor]], Run]
"""Makes a stretch fast, for tensors like those given: of their strides, and aligned as they are."""


class Piece(NamedTuple):
    """A compiled part of a graph: `run` maps the tensors of the nodes `takes` to the tensors of the nodes `gives`."""

    run: Run
    takes: list[Node]
    gives: list[Node]


def segmented(graph: GraphModule, compile: Compile) -> Run:
    """The graph as a function of the same tensors; a stretch is compiled when it is first run, which is not captured.

    A tensor is let go after the last piece that takes it.
    """
    pieces, nodes = _pieces(graph, compile), graph.graph.nodes
    given, out = graph.graph.find_nodes(op="placeholder"), _given_back(graph)
    constants = {node: _constant(graph, node, given) for node in nodes if node.op == "get_attr"}
    last = {node: number for number, piece in enumerate(pieces) for node in (*piece.gives, *piece.takes)}
    over = [[node for node in last if last[node] == number and node not in out] for number in range(len(pieces))]

    def run(*tensors: Tensor) -> list[Tensor]:
        values = dict(zip(given, tensors, strict=True)) | constants
        for piece, gone in zip(pieces, over, strict=True):
            values |= zip(piece.gives, piece.run(*[values[node] for node in piece.takes]), strict=True)
            for node in gone:
                del values[node]
        return [values[node] for node in out]

    return run


def _given_back(graph: GraphModule) -> list[Node]:
    return list(cast(Any, graph.graph.output_node().args[0]))


def _constant(graph: GraphModule, node: Node, given: list[Node]) -> Any:
    """A constant where the inputs are: nothing is fetched from the host in a call."""
    constant = getattr(graph, cast(str, node.target))
    return constant.detach().to(given[0].meta["val"].device) if isinstance(constant, Tensor) else None


def _pieces(graph: GraphModule, compile: Compile) -> list[Piece]:
    """Return the stretches and loops in the order of the graph."""
    pieces, stretch = [], []
    for node in [*graph.graph.nodes]:
        if node.op != "call_function":
            continue
        if node.target is scan_op:
            pieces += [*_stretch(graph, stretch, compile), _loop(graph, node, compile)]
            stretch = []
        elif not _of_loop(node):
            stretch.append(node)
    return pieces + _stretch(graph, stretch, compile)


def _of_loop(node: Node) -> bool:
    return node.target is getitem and cast(Node, node.args[0]).target is scan_op


def _stretch(graph: GraphModule, nodes: list[Node], compile: Compile) -> list[Piece]:
    """The nodes as one compiled graph, if they are any."""
    if not nodes:
        return []
    inside, part, copies = set(nodes), Graph(), {}
    takes = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside))
    for node in takes:
        copies[node] = part.placeholder(node.name)
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    gives = [node for node in nodes if any(user not in inside for user in node.users)]
    part.output(tuple(copies[node] for node in gives))
    return [Piece(_when_run(GraphModule(graph, part), compile), takes, gives)]


def _when_run(graph: GraphModule, compile: Compile) -> Run:
    made: list[Run] = []

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        if not made:
            made.append(compile(graph, list(tensors)))
        return made[0](*tensors)

    return run


def _loop(graph: GraphModule, node: Node, compile: Compile) -> Piece:
    """A loop as a step that is taken for each row."""
    kind, *groups = cast(Any, node.args)
    carry, rows, fixed = (list(group) for group in groups)
    body, gives = getattr(graph, kind.target), list(node.users)
    steps = _stepped(body, len(carry), len(rows), node.meta["val"], compile)

    def run(*tensors: Tensor) -> list[Tensor]:
        out = steps(*tensors)
        return [out[cast(int, one.args[1])] for one in gives]

    return Piece(run, [*carry, *rows, *fixed], gives)


def _stepped(body: GraphModule, many: int, count: int, out: Sequence[Tensor], compile: Compile) -> Run:
    """A loop as a function of `many` tensors that are carried, `count` of rows, and those that stay the same.

    It gives tensors like `out`, the carry first.
    """
    step, rehearsed = segmented(_writing(body, many), compile), []

    def run(*tensors: Tensor) -> list[Tensor]:
        carry, rows, fixed = tensors[:many], tensors[many : many + count], tensors[many + count :]
        written = [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) for y in out[many:]]

        def stepped(t: int) -> Sequence[Tensor]:
            return step(*carry, *[row[t] for row in rows], *fixed, *[row[t] for row in written])

        if not rehearsed:  # compiled for the second row: the first is aligned even where the others are not
            stepped(1)
            rehearsed.append(True)
        for t in range(len(rows[0])):
            carry = stepped(t)
        return [*carry, *written]

    return run


def _writing(body: GraphModule, carried: int) -> GraphModule:
    """The body of a loop with what it gives beside the carry written to further inputs."""
    graph, copies = Graph(), {}
    out = cast(Any, graph.graph_copy(body.graph, copies))
    for row in out[carried:]:
        place = graph.placeholder(f"{row.name}_written")
        graph.call_function(torch.ops.aten.copy_.default, (place, row))
    graph.output(list(out[:carried]))
    return GraphModule(body, graph)
