"""Compiled functions without a compiler: they are traced, and their graphs run as they are."""

from collections.abc import Iterator
from typing import Any

from ecrl.compile import jit
from ecrl.compile.trace import captured, traced


def traced_only(monkeypatch: Any) -> Iterator[list[str]]:
    """Trace functions in place of compiling them; yield the names of those that were traced. For a fixture."""
    names: list[str] = []

    def compiled(fn, structure, leaves):
        names.append(fn.func.__name__)
        graph, made = traced(fn, structure, leaves)
        return (lambda *leaves: list(graph(*leaves))), made, captured(graph)

    monkeypatch.setattr(jit, "_compiler_for", lambda leaves: compiled)
    jit._compiled.cache_clear()
    yield names
    jit._compiled.cache_clear()
