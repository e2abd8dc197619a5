"""Compile functions for CUDA. Inductor compiles segments of a function, and one CUDA graph captures a whole call.

A CUDA graph reads and writes the same memory at every replay. Each call of a compiled function therefore copies its
arguments into the graph's memory. The call also copies the results out of the graph's memory, so that the next call
does not overwrite the results. Copying a state takes little time compared with a rollout. The CUDA graphs of a device
share one memory pool for intermediate values, because only one graph runs at a time.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

import ecrl.compile.reverse_scan  # noqa: F401  # registers `reverse_scan` as a single operation of a graph
from ecrl.compile.autocast import without_autocast
from ecrl.compile.cache import cache_folder
from ecrl.compile.cpu import COMPILE_LOCK
from ecrl.compile.partition import Compile, Run, segmented
from ecrl.compile.trace import captured, traced
from ecrl.pytree import is_borrowed

Capture = Callable[[Run, list[Tensor]], tuple[Callable[[], None], Sequence[Tensor]]]
"""Type of a function that captures one call of another function on tensors.

The capturing function returns a function that repeats the captured call in the same memory, and the result tensors of
the captured call.
"""


@cache
def _pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle()


def cuda_graph(run: Run, inputs: list[Tensor]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """Capture `run(*inputs)` as one CUDA graph. Return the function that replays the graph, and the result tensors.

    A first call outside the capture compiles the function, because compilation synchronises with the GPU. During a
    capture, synchronisation is an error.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    pool = _pool(inputs[0].device)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        out = run(*inputs)
    return graph.replay, out


def compile_segment(graph: GraphModule, inputs: list[Tensor]) -> Run:
    """Compile a segment with inductor, but without inductor's CUDA graphs, because this module captures whole calls."""
    with config.patch({"triton.cudagraphs": False}), cache_folder():
        return compile_fx(graph, inputs)  # pyright: ignore


def _copy(to: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy the tensors `leaves` into the tensors `to`. If torch has `_foreach_copy_`, use one kernel per dtype."""
    if not hasattr(torch, "_foreach_copy_"):
        for target, leaf in zip(to, leaves, strict=True):
            target.copy_(leaf)
        return
    for kind in {leaf.dtype for leaf in to}:
        pairs = [(target, leaf) for target, leaf in zip(to, leaves, strict=True) if target.dtype == kind]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))  # pyright: ignore


def compiled(
    fn: Callable[..., Any],
    structure: Hashable,
    leaves: list[Tensor],
    capture: Capture = cuda_graph,
    compile: Compile = compile_segment,
) -> tuple[Run, Hashable, list[Tensor]]:
    """Compile `fn` for tensors with the shapes and dtypes of `leaves`.

    A call of the compiled function copies its arguments, which may be on the host, into the graph's memory. The call
    does not copy borrowed leaves (`ecrl.pytree.Borrowed`), because the CUDA graph reads borrowed leaves at their own
    addresses. If the address of a borrowed leaf changes, the call captures a new CUDA graph.

    Returns: the compiled function, the structure of its results, and the tensors that `fn` captured.
    """
    first = next((leaf for leaf in leaves if leaf.is_cuda), leaves[0])
    with COMPILE_LOCK, torch.no_grad(), torch.cuda.device_of(first):
        borrowed = [i for i, is_one in enumerate(is_borrowed(structure)) if is_one]
        copied = [i for i in range(len(leaves)) if i not in borrowed]
        inputs = [
            x if i in borrowed else torch.empty_like(x, device=first.device).copy_(x) for i, x in enumerate(leaves)
        ]
        graph, output_structure = traced(fn, structure, inputs)
        pieces = cache(lambda matmul_precision: segmented(graph, compile))  # compiled code depends on the precision
        replays = lru_cache(1 if borrowed else None)(
            lambda precision, *addresses: capture(pieces(precision), [*inputs])
        )
        with without_autocast():
            replays(torch.get_float32_matmul_precision(), *(inputs[i].data_ptr() for i in borrowed))

    def run(*leaves: Tensor) -> list[Tensor]:
        with COMPILE_LOCK, torch.no_grad(), torch.cuda.device_of(inputs[copied[0] if copied else 0]):
            _copy([inputs[i] for i in copied], [leaves[i] for i in copied])
            for i in borrowed:
                inputs[i] = leaves[i]
            addresses = [leaves[i].data_ptr() for i in borrowed]
            replay, out = replays(torch.get_float32_matmul_precision(), *addresses)
            replay()
            results = [torch.empty_like(leaf) for leaf in out]
            _copy(results, out)
            return results

    return run, output_structure, captured(graph)
