"""The form a run takes, compiled or eager, chosen from config, device and versions alone; the only file that compiles.

A form has a function `jit(fn, *static)` that binds the static arguments of `fn` (functions and numbers that shape the
graph) and makes it as fast as the form allows, and a `scan`, which inside such a function is one loop of its graph.
Equal `fn` and `static` share one compiled function, so a new seed, name or learning rate compiles nothing.

A graph is traced by running the function once on tensors without data: what it finds beside its arguments is part of
the graph. Inductor makes C++ of it, and keeps that on disk for the next process.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._higher_order_ops.scan import scan_op
from torch._inductor import config as inductor
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.kernels.loops import Scan, length_of
from ecrl.products import PRODUCTS
from ecrl.trees import flatten, unflatten

_OPTIONS = {
    "cpp_wrapper": True,  # loops and calls in C++, not in Python
    "cpp.use_decompose_tanh": True,  # by exp: five times faster than the library's, error below 2e-7
    "size_asserts": False,  # the key of a compiled function holds every shape
    "cpp.vec_isa_ok": True,  # the processor's word is taken for its instructions; to try each takes seconds
    # Graphs with loops go to the cache on disk too: its key covers their bodies, as a test shows.
    "unsafe_marked_cacheable_functions": {f"{scan_op.__module__}.{scan_op.__name__}": torch.__version__},
}
_SMALL = 4096  # elements


class Form(NamedTuple):
    """`name` is "compiled" or "eager", `reason` one line for people; `jit` and `scan` are what the algorithms call."""

    name: str
    reason: str
    jit: Callable[..., Callable[..., Any]]
    scan: Scan


def _traced(fn: Callable[..., Any], structure: Hashable, leaves: list[Tensor]) -> tuple[GraphModule, Hashable]:
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


def _dense(leaf: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The leaf in the memory layout that was compiled for."""
    if leaf.stride() == stride:
        return leaf
    return torch.empty_strided(leaf.shape, stride, dtype=leaf.dtype, device=leaf.device).copy_(leaf)


@cache
def _compiled(fn: Callable, *static: Any) -> Callable[..., Any]:
    """`fn` with its static arguments, compiled as a whole for each structure and set of shapes it is called with."""
    bound, made = partial(fn, *static), {}

    def call(*args: Any) -> Any:
        leaves, structure = flatten(args)
        if peek_interpreter_stack() or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)):
            return bound(*args)
        key = structure, *[(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
        if key not in made:
            graph, out = _traced(bound, structure, leaves)
            with torch.no_grad(), inductor.patch(_OPTIONS):
                made[key] = compile_fx(graph, leaves), [leaf.stride() for leaf in leaves], out
        run, strides, out = made[key]
        with torch.no_grad():
            return unflatten(out, run(*map(_dense, leaves, strides)))

    return call


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


def _scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """`ecrl.kernels.scan` as one loop of the graph that is being traced; a plain one outside of any, or of one step."""
    (first, c), (rows, x), (fixed, k) = map(flatten, (carry, xs, constants))
    if get_proxy_mode() is None or length_of(rows) == 1:
        return scan(body, carry, xs, *constants)
    if not first:  # the operator wants something to carry
        _, y = _scan(lambda none, x, *k: (none.clone(), body(carry, x, *k)[1]), rows[0].new_zeros(()), xs, *constants)
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
        return _owned([*packings[0].pack(after), *found[1].pack(y)], given)

    out = scan_op(flat, packed[0], packed[1], tuple(packed[2]))
    structure, packing = found
    after, ys = out[: len(packed[0])], packing.unpack(out[len(packed[0]) :], (length,))
    return unflatten(c, packings[0].unpack(after)), unflatten(structure, ys, lambda size: (length, *size))


def _owned(out: list[Tensor], given: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies of those tensors that share memory with an input or each other, which a loop in a graph may not give."""
    seen, owned = {leaf.untyped_storage()._cdata for leaf in given}, []
    for leaf in out:
        owned.append(leaf.clone() if leaf.untyped_storage()._cdata in seen else leaf)
        seen.add(leaf.untyped_storage()._cdata)
    return owned


@cache
def compiler_fault() -> str | None:
    """Why inductor cannot compile for the CPU here, or None if it can; tried once."""
    compiler = os.environ.get("CXX", "g++")
    if not any(shutil.which(name) for name in (compiler, "g++", "clang++", "cl")):
        return f"no C++ compiler found ({compiler})"
    try:
        with inductor.patch(_OPTIONS):
            torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(8))
    except Exception as error:  # inductor raises many kinds; each means that compiling does not work here
        return f"compiling a first function failed ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    return None


@cache
def choose_form(mode: str, device: str) -> Form:
    """The form for `trainer.compile` on a device.

    "off" is eager. "on" compiles, or raises ConfigError where that is not possible. "auto" compiles where it is
    possible and warns once where it is not.
    """
    if mode == "off":
        return Form("eager", "trainer.compile is off", partial, scan)
    fault = compiler_fault() if device == "cpu" else None
    if fault is None:
        return Form("compiled", f"rollout and update compiled by inductor for {device}", _compiled, _scan)
    advice = "install g++ (Debian: apt install g++), or set trainer.compile to off"
    if mode == "on":
        raise ConfigError(f"trainer.compile: on, but {fault}; {advice}")
    warnings.warn(f"running eager, slower per step: {fault}; {advice}", RuntimeWarning, stacklevel=2)
    return Form("eager", fault, partial, scan)
