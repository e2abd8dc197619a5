"""Trace a function into one graph of tensor operations.

A call of `ecrl.kernels.loop`, or of the function `run.scan` that an algorithm gets, becomes one loop operation of the
graph. A call of `ecrl.kernels.scan`, or a loop in Python, becomes separate operations for each iteration.

During the trace, the function runs once on tensors without data, and torch records the operations. Tensors that the
function captures from outside become constants of the graph.
"""

import re
import traceback
from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import ecrl.compile.cpu_philox  # registers C++ code for Philox
import ecrl.compile.cpu_sum_tree  # registers C++ code for sum trees
import ecrl.compile.scan  # registers the implementation of `ecrl.kernels.loop` for graphs
import ecrl.compile.step_if  # noqa: F401  # registers the implementation of `ecrl.kernels.scan_loop.step_if` for graphs
from ecrl.compile.cpu_matmul import PRODUCTS
from ecrl.compile.graph_nodes import storage_of, writes
from ecrl.compile.rewrites import fuse_relu, stack_only_parts
from ecrl.compile.user_code import checking_writes, user_line
from ecrl.compile.user_line import call_pure
from ecrl.errors import ConfigError
from ecrl.pytree import flatten, unflatten
from ecrl.tracing_state import tracing_graph


def traced(fn: Callable[..., Any], structure: Hashable, leaves: list[Tensor]) -> tuple[GraphModule, Hashable]:
    """Trace `fn` on tensors like `leaves`. Return a graph with these inputs, and the structure of its results.

    Raises: ConfigError if `fn` is impure or reads the values of a tensor.
    """
    output_structure: list[Hashable] = []

    def flat_fn(*inputs: Tensor) -> list[Tensor]:
        with checking_writes(without_data) as check, check.protected(inputs):
            out, structure_of_out = flatten(call_pure(fn, lambda: unflatten(structure, inputs)))
        output_structure[:] = [structure_of_out]
        return out

    rewrites = PRODUCTS if all(leaf.device.type == "cpu" for leaf in leaves) else None
    shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        without_data = FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)
    with torch.no_grad(), tracing(TracingContext(without_data)), tracing_graph():
        try:
            graph = make_fx(flat_fn, rewrites, tracing_mode="fake", _allow_non_fake_inputs=True)(*leaves)
        except (RuntimeError, TypeError, ValueError) as error:
            if not isinstance(error, _READS) and not re.match(_READ_MESSAGES, str(error)):
                raise
            line, operation = user_line(traceback.extract_tb(error.__traceback__)), re.split(" is | of ", str(error))[0]
            raise ConfigError(
                f"trainer.compile: {line} reads values of a tensor ({operation}), "
                "which a compiled graph cannot do; use tensor operations such as torch.where, compute constants "
                "beforehand, or set trainer.compile to off"
            ) from error
    shapes.settings = ShapeEnv().settings  # inductor's loop counters need the default settings
    return _lift_constants(graph), output_structure[0]


def captured(graph: GraphModule) -> list[Tensor]:
    """Return the constants of a graph: tensors that the traced function captured or created from Python numbers."""
    return [*graph.buffers(), *graph.parameters()]


WITH_BODIES = cond_op, scan_op
"""Operations whose arguments are graphs: a loop has a body, and a condition has two branches."""

_STORE_LIMIT = 64
"""Maximum number of elements of a tensor that `_store_numbers` stores.

An operation reads the stored tensor only if the operation's result has at least this number of elements for each
element of the stored tensor.
"""
_CONVERSION = "aten::_to_copy"
"""Name of the operation that converts dtypes. This pointwise operation lacks torch's tag `pointwise`."""

_READ_MESSAGES = (
    r"\.numpy\(\)|Cannot access data pointer|unsupported format string passed to FakeTensor.__format__"
    r"|(could not convert string to float|invalid literal for int\(\)).*FakeTensor\("
)
_READS = DataDependentOutputException, DynamicOutputShapeException


def _merge_duplicates(graph: GraphModule) -> None:
    """Merge operations of a graph that compute the same value from the same arguments.

    The function does not merge operations that draw random numbers. Three kinds of tensors must not become aliases:
    tensors written in place, tensors that a loop or a condition reads or returns, and tensors that the graph returns.
    The function therefore does not merge an operation whose result or argument shares memory with such a tensor.
    """
    nodes = graph.graph.nodes
    separate = [n for n in nodes if n.op == "output" or n.target in WITH_BODIES or writes(n)]
    separate = {storage_of(n) for node in separate for n in (node, *node.all_input_nodes)} - {None}
    first: dict[str, Node] = {}
    for node in list(nodes):
        storage = storage_of(node)
        if node.op != "call_function" or storage is None:
            continue
        if _is_random(node) or separate & {storage, *map(storage_of, node.all_input_nodes)}:
            continue
        same = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)


def _store_numbers(graph: GraphModule) -> None:
    """Make the compiler store small tensors in memory if many elements of other tensors depend on them.

    An example of such a tensor is a step size. Without this rewrite, the compiler computes the step size again for each
    element that depends on it.
    """
    for node in list(graph.graph.nodes):
        if not _is_pointwise(node):
            continue
        value = cast(Tensor, node.meta["val"])
        readers = [user for user in node.users if _elements(user) >= _STORE_LIMIT * value.numel()]
        if not readers or value.numel() > _STORE_LIMIT or not any(_elements(x) for x in node.all_input_nodes):
            continue
        with graph.graph.inserting_after(node):
            stored = graph.graph.call_function(torch.ops.aten.as_strided.default, (node, value.shape, value.stride()))
        stored.meta = {"val": value}
        for user in readers:
            user.replace_input_with(node, stored)


def _store_parts(body: GraphModule) -> None:
    """If a result of a loop body is a view of a part of a larger tensor, store the result in a tensor of its own.

    A clone is not enough, because the compiler replaces a clone of such a part by a view. Code after the loop then adds
    the view's offset twice, or declares the C++ variable of the larger tensor twice.
    """
    output = body.graph.output_node()
    for node in dict.fromkeys(cast(Any, output.args[0])):
        if _is_part(node):
            with body.graph.inserting_before(output):
                stored = body.graph.call_function(torch.ops.aten.maximum.default, (node, node))  # equals the node
            stored.meta = {"val": torch.empty_like(node.meta["val"])}
            output.replace_input_with(node, stored)


def _is_part(node: Node) -> bool:
    """Return True if a node's tensor is a view of a part of a larger tensor, or a clone of such a view."""
    while node.op == "call_function":
        value, inputs = node.meta.get("val"), node.all_input_nodes
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.numel() * value.element_size():
            return True
        is_clone = node.target is torch.ops.aten.clone.default
        if not inputs or not (is_clone or (storage_of(node) is not None and storage_of(node) == storage_of(inputs[0]))):
            return False
        node = inputs[0]
    return False


def _is_pointwise(node: Node) -> bool:
    """Return True if an operation, other than a view, computes a dense float tensor element by element."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise not in node.target.tags and node.target.name() != _CONVERSION:
        return False
    value = node.meta.get("val")
    dense = isinstance(value, Tensor) and value.is_floating_point() and value.is_contiguous() and value.numel() > 0
    return dense and storage_of(node) not in map(storage_of, node.all_input_nodes)


def _elements(node: Node) -> int:
    """Return the number of elements of an operation's result, or 0 if the operation has several results."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) and node.target is not scan_op else 0


def _is_random(node: Node) -> bool:
    """Return True if an operation draws random numbers."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _skip_views(node: Node) -> Node:
    """Starting at `node`, follow views with the same layout back to the viewed tensor, and return its node.

    If a loop reads a view instead, inductor frees the view after the first iteration of the loop.
    """
    while node.op == "call_function" and not writes(node) and len(node.all_input_nodes) == 1:
        (base,) = node.all_input_nodes
        if storage_of(base) is None or _layout(base) != _layout(node):
            break
        node = base
    return node


def _layout(node: Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return storage_of(node), value.dtype, value.shape, value.stride(), value.storage_offset()


def _lift_constants(graph: GraphModule) -> GraphModule:
    """Convert the constants of loop bodies and branches to inputs, because bodies and branches must not have constants.

    The function also applies `stack_only_parts`, `fuse_relu`, `_merge_duplicates` and `_store_numbers` to the graph and
    to each body and branch. To bodies and branches, the function also applies `_store_parts`. The function returns the
    graph.
    """
    stack_only_parts(graph)
    fuse_relu(graph)
    _merge_duplicates(graph)
    _store_numbers(graph)
    for node in [n for n in graph.graph.nodes if n.target in WITH_BODIES]:
        names = [str(arg.target) for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        bodies = [_lift_constants(cast(GraphModule, getattr(graph, name))) for name in names]
        inputs = [*map(_skip_views, node.args[-1])]
        for name, body in zip(names, bodies, strict=True):
            _store_parts(body)
            for read in body.graph.find_nodes(op="get_attr"):
                constant = getattr(body, read.target)
                if isinstance(constant, Tensor):
                    lifted = f"{name}_constant_{len(inputs)}"
                    graph.register_buffer(lifted, constant.clone())  # a copy, because inputs must not be aliases
                    with graph.graph.inserting_before(node):
                        inputs.append(graph.graph.get_attr(lifted))
                    inside = {other: _add_input(other, lifted) for other in bodies}
                    read.replace_all_uses_with(inside[body])
                    body.graph.erase_node(read)
        lists = [[*map(_skip_views, arg)] if isinstance(arg, list) else arg for arg in node.args[:-1]]
        node.args = (*lists, tuple(inputs))
        for body in bodies:
            body.recompile()
    graph.recompile()
    return graph


def _add_input(body: GraphModule, name: str) -> Node:
    """Add an input to a loop body or a branch, after its other inputs."""
    with body.graph.inserting_after(body.graph.find_nodes(op="placeholder")[-1]):
        inside = body.graph.placeholder(name)
    inside.target = inside.name  # prevent a nested loop from overwriting this constant with its own
    return inside
