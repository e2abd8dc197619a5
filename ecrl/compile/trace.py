"""A function as one graph of tensor operations, with loops over time that stay loops.

A graph is traced by running the function once on tensors without data: what it finds beside its arguments is part of
the graph.
"""

import re
import traceback
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ecrl.compile.cpu_philox  # how inductor writes Philox
import ecrl.compile.scan  # noqa: F401  # how `ecrl.kernels.loop` is traced
from ecrl.compile.cpu_matmul import PRODUCTS
from ecrl.compile.user_code import checking_writes, user_line
from ecrl.compile.user_line import call_pure
from ecrl.errors import ConfigError
from ecrl.pytree import flatten, unflatten
from ecrl.tracing_state import tracing_graph


def traced(fn: Callable[..., Any], structure: Hashable, leaves: list[Tensor]) -> tuple[GraphModule, Hashable]:
    """The graph of `fn` on tensors like these, as a function of the leaves, and the structure of what it gives."""
    found: list[Hashable] = []

    def flat(*given: Tensor) -> list[Tensor]:
        with checking_writes(without_data) as check, check.protected(given):
            out, made = flatten(call_pure(fn, lambda: unflatten(structure, given)))
        found[:] = [made]
        return out

    rewrites = PRODUCTS if all(leaf.device.type == "cpu" for leaf in leaves) else None
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        without_data = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
    with torch.no_grad(), tracing(TracingContext(without_data)), tracing_graph():
        try:
            graph = make_fx(flat, rewrites, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, _READS) and not re.match(_READ_MESSAGES, str(error)):
                raise
            line, operation = user_line(traceback.extract_tb(error.__traceback__)), re.split(" is | of ", str(error))[0]
            raise ConfigError(
                f"trainer.compile: {line} reads values of a tensor ({operation}), "
                "which no compiled graph can; say it in tensors, such as torch.where, work out constants beforehand, "
                "or set trainer.compile to off"
            ) from error
    shapes.settings = ShapeEnv().settings  # inductor's loops have a counter that is such a value
    return _lifted(graph), found[0]


def captured(graph: GraphModule) -> list[Tensor]:
    """The tensors that a traced function found beside its arguments, or made of numbers."""
    return [*graph.buffers(), *graph.parameters()]


_READ_MESSAGES = (
    r"\.numpy\(\)|Cannot access data pointer|unsupported format string passed to FakeTensor.__format__"
    r"|(could not convert string to float|invalid literal for int\(\)).*FakeTensor\("
)
_READS = DataDependentOutputException, DynamicOutputShapeException


def _once(graph: GraphModule) -> None:
    """Calculate once what is calculated alike twice.

    Not so random numbers, nor tensors that are written to, nor what is read from them, nor what a loop takes or gives:
    that may not share memory.
    """
    nodes = graph.graph.nodes
    apart = [n for n in nodes if n.op == "output" or n.target is scan_op or _writes(n)]
    apart = {memory_of(n) for node in apart for n in (node, *node.all_input_nodes)} - {None}
    first: dict[str, Node] = {}
    for node in list(nodes):
        memory = memory_of(node)
        if node.op != "call_function" or memory is None or apart & {memory, *map(memory_of, node.all_input_nodes)}:
            continue
        if _random(node):
            continue
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)


def _random(node: Node) -> bool:
    """Return True if the operation gives other values each time."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def memory_of(node: Node) -> int | None:
    """Return a number that is equal for two nodes if their tensors share memory."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _behind(node: Node) -> Node:
    """Return the node behind a view that changes nothing. Inductor's loops free such a view after their first turn."""
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
                inside.target = inside.name  # a loop inside would otherwise overwrite it with its own constant
                node.replace_all_uses_with(inside)
                body.graph.erase_node(node)
                given.append(outside)
        loop.args = (loop.args[0], *[[*map(_behind, cast(list, part))] for part in loop.args[1:-1]], tuple(given))
        body.recompile()
    graph.recompile()
    return graph
