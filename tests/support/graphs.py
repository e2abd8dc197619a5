"""Graphs of functions, traced without a compiler."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from ecrl.compile import jit
from ecrl.compile.trace import captured, traced
from ecrl.pytree import flatten


def graph_of(fn: Callable, *args: Any) -> GraphModule:
    """Return the graph of `fn` for arguments of these shapes; it takes the leaves of the arguments."""
    leaves, structure = flatten(args)
    return traced(fn, structure, leaves)[0]


def with_reshapes(graph: GraphModule) -> GraphModule:
    """Replace each view in a graph and in the bodies of its loops by a reshape, in place, and return the graph.

    Torch's own loop returns rows with other strides than the traced ones. A view may then be impossible.
    """
    for part in graph.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
                node.target = torch.ops.aten.reshape.default
            part.recompile()
    return graph


def traced_only(monkeypatch: Any) -> Iterator[list[str]]:
    """Run traced graphs in place of compiled functions; yield the names of the traced functions. For a fixture."""
    names: list[str] = []

    def compiled(fn, structure, leaves):
        names.append(fn.func.__name__)
        graph, made = traced(fn, structure, leaves)
        run = with_reshapes(graph)
        return (lambda *leaves: list(run(*leaves))), made, captured(graph)

    monkeypatch.setattr(jit, "_compiler_for", lambda leaves: compiled)
    for known in (jit._compiled, jit._compiled_or_eager):
        known.cache_clear()
    yield names
    for known in (jit._compiled, jit._compiled_or_eager):
        known.cache_clear()
