"""Graphs of functions, traced without a compiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.fx import GraphModule

from ecrl.compile import jit
from ecrl.compile.trace import captured, traced
from ecrl.pytree import flatten

needs_cpu_compiler = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="ecrl compiles for the CPU with torch 2.13 or newer"
)


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


@contextmanager
def traced_only() -> Iterator[list[str]]:
    """Run traced graphs in place of compiled functions. Yield a list that gets the names of the traced functions."""
    names: list[str] = []

    def compiled(fn: Any, structure: Any, leaves: Any) -> Any:
        names.append(fn.func.__name__)
        graph, made = traced(fn, structure, leaves)
        run = with_reshapes(graph)
        return (lambda *leaves: list(run(*leaves))), made, captured(graph)

    with patch.object(jit, "_compiler_for", lambda leaves: compiled):
        _forget_compiled()
        yield names
    _forget_compiled()


def _forget_compiled() -> None:
    jit._compiled.cache_clear()
    jit._compiled_or_eager.cache_clear()
