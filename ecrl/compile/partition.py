"""Split a graph for a GPU into compiled segments and Python loops.

A graph is split at its loops over time. The operations between two loops form a segment, which is compiled as a whole.
The body of a loop is also a graph, which is split in the same way. Each iteration of a loop writes its outputs into one
row of a buffer. The Python code that calls the segments never reads the values of tensors, so a CUDA graph can capture
a call of the whole function.
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
"""Type of a function that compiles a graph for tensors with the strides and the alignment of the given tensors."""


class Piece(NamedTuple):
    """Segment or loop of a graph. Its function `run` computes the values of `outputs` from the values of `inputs`."""

    run: Run
    inputs: list[Node]
    outputs: list[Node]


def segmented(graph: GraphModule, compile: Compile) -> Run:
    """Return a function that runs the segments and loops of a graph in order.

    The first call compiles the segments, so a CUDA graph must not capture the first call. Each call frees a tensor as
    soon as no later segment or loop reads the tensor.
    """
    pieces, nodes = _pieces(graph, compile), graph.graph.nodes
    inputs, out = graph.graph.find_nodes(op="placeholder"), _outputs(graph)
    constants = {node: _constant(graph, node, inputs) for node in nodes if node.op == "get_attr"}
    last_use = {node: number for number, piece in enumerate(pieces) for node in (*piece.outputs, *piece.inputs)}
    unused = [[node for node in last_use if last_use[node] == i and node not in out] for i in range(len(pieces))]

    def run(*tensors: Tensor) -> list[Tensor]:
        values = dict(zip(inputs, tensors, strict=True)) | constants
        for piece, unused_after in zip(pieces, unused, strict=True):
            values |= zip(piece.outputs, piece.run(*[values[node] for node in piece.inputs]), strict=True)
            for node in unused_after:
                del values[node]
        return [values[node] for node in out]

    return run


def _outputs(graph: GraphModule) -> list[Node]:
    return list(cast(Any, graph.graph.output_node().args[0]))


def _constant(graph: GraphModule, node: Node, inputs: list[Node]) -> Any:
    """Copy a constant to the device of the inputs once, so that calls need not copy the constant from the host.

    If `node` refers to the body of a loop instead of a tensor, return None.
    """
    constant = getattr(graph, cast(str, node.target))
    return constant.detach().to(inputs[0].meta["val"].device) if isinstance(constant, Tensor) else None


def _pieces(graph: GraphModule, compile: Compile) -> list[Piece]:
    """Return the segments and loops of a graph in the order of execution."""
    pieces, segment = [], []
    for node in [*graph.graph.nodes]:
        if node.op != "call_function":
            continue
        if node.target is scan_op:
            pieces += [*_segment(graph, segment, compile), _loop(graph, node, compile)]
            segment = []
        elif not _is_loop_result(node):
            segment.append(node)
    return pieces + _segment(graph, segment, compile)


def _is_loop_result(node: Node) -> bool:
    return node.target is getitem and cast(Node, node.args[0]).target is scan_op


def _segment(graph: GraphModule, nodes: list[Node], compile: Compile) -> list[Piece]:
    """Return a list with one compiled segment of the operations `nodes`, or an empty list if `nodes` is empty."""
    if not nodes:
        return []
    inside, part, copies = set(nodes), Graph(), {}
    inputs = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside))
    for node in inputs:
        copies[node] = part.placeholder(node.name)
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    part.output(tuple(copies[node] for node in outputs))
    return [Piece(_compile_at_first_run(GraphModule(graph, part), compile), inputs, outputs)]


def _compile_at_first_run(graph: GraphModule, compile: Compile) -> Run:
    compiled: list[Run] = []

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        if not compiled:
            compiled.append(compile(graph, list(tensors)))
        return compiled[0](*tensors)

    return run


def _loop(graph: GraphModule, node: Node, compile: Compile) -> Piece:
    """Convert a loop operation of the graph into a Python loop that calls the compiled body."""
    body_node, *groups = cast(Any, node.args)
    carry, rows, constants = (list(group) for group in groups)
    body, outputs = getattr(graph, body_node.target), list(node.users)
    loop = _loop_over_rows(body, len(carry), len(rows), node.meta["val"], compile)

    def run(*tensors: Tensor) -> list[Tensor]:
        out = loop(*tensors)
        return [out[cast(int, one.args[1])] for one in outputs]

    return Piece(run, [*carry, *rows, *constants], outputs)


def _loop_over_rows(body: GraphModule, carried: int, xs: int, out: Sequence[Tensor], compile: Compile) -> Run:
    """Return a function that runs a loop over time.

    The arguments of the returned function are the tensors of the carry, the tensors to loop over and the constants. The
    results of the returned function are the final carry and the stacked outputs.

    Args:
        body: the graph of one iteration.
        carried: the number of tensors in the carry.
        xs: the number of tensors to loop over.
        out: example results with the shapes, strides and dtypes of the actual results.
        compile: the function that compiles a segment of the body.
    """
    step, compiled = segmented(_writing_rows(body, carried), compile), []

    def run(*tensors: Tensor) -> list[Tensor]:
        carry, rows, constants = tensors[:carried], tensors[carried : carried + xs], tensors[carried + xs :]
        buffers = [torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) for y in out[carried:]]

        def step_at(t: int) -> Sequence[Tensor]:
            return step(*carry, *[row[t] for row in rows], *constants, *[row[t] for row in buffers])

        if not compiled:  # compile for row 1, because row 0 may be better aligned in memory than other rows
            step_at(1)
            compiled.append(True)
        for t in range(len(rows[0])):
            carry = step_at(t)
        return [*carry, *buffers]

    return run


def _writing_rows(body: GraphModule, carried: int) -> GraphModule:
    """Return a copy of a loop's body that writes each stacked output into a buffer, which is an additional input."""
    graph, copies = Graph(), {}
    out = cast(Any, graph.graph_copy(body.graph, copies))
    for row in out[carried:]:
        buffer = graph.placeholder(f"{row.name}_written")
        graph.call_function(torch.ops.aten.copy_.default, (buffer, row))
    graph.output(list(out[:carried]))
    return GraphModule(body, graph)
