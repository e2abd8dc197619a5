"""Graphs of functions, traced without a compiler."""

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from ecrl.compile.trace import traced
from ecrl.pytree import flatten


def graph_of(fn: Callable, *args: Any) -> GraphModule:
    """Return the graph of `fn` for arguments of these shapes; it takes the leaves of the arguments."""
    leaves, structure = flatten(args)
    return traced(fn, structure, leaves)[0]
