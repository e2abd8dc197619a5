"""Compile a function for the CPU: trace it into one graph. Inductor turns the graph into C++ and caches it on disk."""

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module

import ecrl.compile.cpu_functions  # noqa: F401  # how inductor writes tanh, erf, expm1 and atanh
from ecrl.compile.autocast import without_autocast
from ecrl.compile.cache import cache_folder, sources_hash
from ecrl.compile.cpu_builds import side_by_side
from ecrl.compile.cpu_codegen import brief_codegen
from ecrl.compile.cpu_loops import lean_loops
from ecrl.compile.trace import captured, memory_of, traced

_SCAN = f"{scan_op.__module__}.{scan_op.__name__}"

_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,  # loops and calls in C++, not in Python
    "cpp_wrapper_build_separate": True,  # calls and loops apart from kernels, for those -O3
    "aot_inductor.enable_frame_pointer": False,  # these two are for profilers
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.compile_wrapper_opt_level": "Og",  # for calls and loops: as fast as -O1, half the compiling
    # Compiling the headers apart pays from the sixth graph on, a run has two. The variable is inductor's own.
    "cpp_cache_precompile_headers": os.environ.get("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS") == "1",
    "epilogue_fusion": False,  # into kernels that are not inductor's own (`ecrl.compile.cpu_tiles`)
    "size_asserts": False,  # the key of a compiled function holds every shape
    "cpp.vec_isa_ok": True,  # the processor's word is taken for its instructions; to try each takes seconds
    # Graphs with loops go to the cache on disk too: its key covers their bodies, as a test shows.
    "unsafe_marked_cacheable_functions": {_SCAN: f"{torch.__version__} {sources_hash()}"},
}

ONE_AT_A_TIME = RLock()  # inductor's settings are the process's


def _shared(tensors: Sequence[Tensor], memory: Sequence[int | None]) -> list[int]:
    """Return the indices of tensors that share memory with an earlier tensor of another `memory`."""
    owner: dict[int, int | None] = {}
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [i for i, place in enumerate(places) if owner.setdefault(place, memory[i]) != memory[i] and place]


def _apart(graph: GraphModule, run: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    """`run`, whose results share no memory that they do not share in the graph.

    Of two copies of one tensor that a graph gives, inductor may leave out both.
    """
    out = cast(Any, graph.graph.output_node().args[0])
    memory = [memory_of(node) for node in (*graph.graph.find_nodes(op="placeholder"), *out)]
    again: list[int] | None = None

    def call(*leaves: Tensor) -> list[Tensor]:
        nonlocal again
        out = [*run(*leaves)]
        if again is None:  # known from then on: it is in the code
            again = [i - len(leaves) for i in _shared((*leaves, *out), memory) if i >= len(leaves)]
        for number in again:
            out[number] = out[number].clone()
        return out

    return call


def compiled(
    fn: Callable[..., Any], structure: Hashable, leaves: list[Tensor]
) -> tuple[Callable[..., list[Tensor]], Hashable, list[Tensor]]:
    """Compile `fn` for tensors like these in this memory layout.

    Returns: the function of the leaves, the structure of its results, and the tensors it captured.
    """
    with ONE_AT_A_TIME, _use_lazy_graph_module(True):  # a graph's Python is written once, not with every change
        graph, out = traced(fn, structure, leaves)
        with ExitStack() as settings:
            for one in (torch.no_grad(), without_autocast(), config.patch(_OPTIONS), cache_folder()):
                settings.enter_context(one)
            for one in (lean_loops(), brief_codegen(), side_by_side()):
                settings.enter_context(one)
            return _apart(graph, compile_fx(graph, leaves)), out, captured(graph)  # pyright: ignore
