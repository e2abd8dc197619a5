"""Compile functions for the CPU. Each function is traced into one graph, which inductor translates to C++."""

import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module

import ecrl.compile.cpu_functions  # registers C++ code for tanh, erf, expm1 and atanh
import ecrl.compile.reverse_scan  # noqa: F401  # registers the implementation of `reverse_scan` for graphs
from ecrl.compile.autocast import without_autocast
from ecrl.compile.cache import cache_folder, sources_hash
from ecrl.compile.cpu_builds import parallel_builds
from ecrl.compile.cpu_carries import writing_carries_in_place
from ecrl.compile.cpu_codegen import skip_redundant_codegen
from ecrl.compile.cpu_loops import rewriting_loops
from ecrl.compile.graph_nodes import storage_of
from ecrl.compile.trace import WITH_BODIES, captured, traced

_WITH_BODIES = tuple(f"{operation.__module__}.{operation.__name__}" for operation in WITH_BODIES)

_OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,  # write loops and kernel calls in C++ instead of Python
    "cpp_wrapper_build_separate": True,  # write kernels to a separate file, which is compiled with -O3
    "aot_inductor.enable_frame_pointer": False,  # only profilers need frame pointers and line tables
    "aot_inductor.enable_line_tables": False,
    # With -Og, loops and kernel calls run as fast as with -O1 and compile in half the time.
    "aot_inductor.compile_wrapper_opt_level": "Og",
    # Precompiled headers save time only for six or more graphs, and most runs have fewer graphs. Users can enable
    # precompiled headers with inductor's environment variable.
    "cpp_cache_precompile_headers": os.environ.get("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS") == "1",
    "epilogue_fusion": False,  # do not fuse operations into the kernels of `cpu_matmul.py`
    "inplace_buffers": False,  # inductor writes wrong C++ if it reuses the memory of a loop's stacked outputs
    "size_asserts": False,  # skip checks of sizes, because a compiled function's key contains every shape
    "cpp.min_chunk_size": 2048,  # elements per thread; starting a thread for fewer elements takes longer than it saves
    "cpp.vec_isa_ok": True,  # trust the CPU's list of instruction sets, because testing each set takes seconds
    # Let inductor cache graphs with loops on disk. Inductor's cache key includes the bodies of the loops.
    "unsafe_marked_cacheable_functions": dict.fromkeys(_WITH_BODIES, f"{torch.__version__} {sources_hash()}"),
}

COMPILE_LOCK = RLock()  # only one thread may compile at a time, because all threads share inductor's settings


_FEW = 2**16
"""If no tensor of a graph has more elements, one thread runs the graph, because several threads are not faster."""


def _threads(graph: GraphModule) -> int:
    """Return the number of threads for a graph: one if all tensors of the graph and its loops are small."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, GraphModule)]
    results = [node.meta.get("val") for one in graphs for node in one.nodes]
    tensors = [value for result in results for value in (result if isinstance(result, (list, tuple)) else (result,))]
    largest = max((value.numel() for value in tensors if isinstance(value, Tensor)), default=0)
    return 1 if largest <= _FEW else torch.get_num_threads()


def _unexpected_aliases(tensors: Sequence[Tensor], storages: Sequence[int | None]) -> list[int]:
    """Return the indices of tensors that share memory with an earlier tensor, but have another storage in the graph."""
    owner: dict[int, int | None] = {}
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    return [i for i, at in enumerate(addresses) if owner.setdefault(at, storages[i]) != storages[i] and at]


def _separate_results(graph: GraphModule, run: Callable[..., Sequence[Tensor]]) -> Callable[..., list[Tensor]]:
    """Wrap `run` to clone each result that shares memory with another tensor but has its own storage in the graph.

    For example, if a graph returns two copies of one tensor, inductor may return the tensor itself twice.
    """
    out = cast(Any, graph.graph.output_node().args[0])
    storages = [storage_of(node) for node in (*graph.graph.find_nodes(op="placeholder"), *out)]
    aliases: list[int] | None = None

    def call(*leaves: Tensor) -> list[Tensor]:
        nonlocal aliases
        out = [*run(*leaves)]
        if aliases is None:  # detect aliases only once, because the compiled code alone determines them
            aliases = [i - len(leaves) for i in _unexpected_aliases((*leaves, *out), storages) if i >= len(leaves)]
        for number in aliases:
            out[number] = out[number].clone()
        return out

    return call


def compiled(
    fn: Callable[..., Any], structure: Hashable, leaves: list[Tensor]
) -> tuple[Callable[..., list[Tensor]], Hashable, list[Tensor]]:
    """Compile `fn` for tensors with the shapes, dtypes and strides of `leaves`.

    Returns: the compiled function, the structure of its results, and the tensors that `fn` captured.
    """
    with COMPILE_LOCK, _use_lazy_graph_module(True):  # write a graph's Python code once, not after each change
        graph, out = traced(fn, structure, leaves)
        with ExitStack() as settings:
            options = config.patch(_OPTIONS | {"cpp.threads": _threads(graph)})
            for setting in (torch.no_grad(), without_autocast(), options, cache_folder()):
                settings.enter_context(setting)
            settings.enter_context(writing_carries_in_place())
            for setting in (rewriting_loops(), skip_redundant_codegen(), parallel_builds()):
                settings.enter_context(setting)
            return _separate_results(graph, compile_fx(graph, leaves)), out, captured(graph)  # pyright: ignore
