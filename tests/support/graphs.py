"""Graphs of functions, traced without a compiler."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import GraphModule

from ecrl.compile import jit
from ecrl.compile.trace import captured, traced
from ecrl.pytree import flatten


def graph_of(fn: Callable, *args: Any) -> GraphModule:
    """Return the graph of `fn` for arguments of these shapes; it takes the leaves of the arguments."""
    leaves, structure = flatten(args)
    return traced(fn, structure, leaves)[0]


def traced_only(monkeypatch: Any) -> Iterator[list[str]]:
    """Run traced graphs in place of compiled functions; yield the names of the traced functions. For a fixture."""
    names: list[str] = []

    def compiled(fn, structure, leaves):
        names.append(fn.func.__name__)
        graph, made = traced(fn, structure, leaves)
        return (lambda *leaves: list(graph(*leaves))), made, captured(graph)

    monkeypatch.setattr(jit, "_compiler_for", lambda leaves: compiled)
    for known in (jit._compiled, jit._compiled_or_eager):
        known.cache_clear()
    yield names
    for known in (jit._compiled, jit._compiled_or_eager):
        known.cache_clear()
