"""Compile a function for CUDA: trace it into one graph, compile its pieces by inductor, and capture one CUDA graph.

A captured graph reads and writes memory that never moves. Arguments are copied there, and results are copied from
there, so a result never changes later. Copying a state costs little beside a rollout. Graphs share one memory pool for
intermediate values, because only one of them runs at a time.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

import ecrl.compile.reverse_scan  # noqa: F401  # the recursion over time as one operation
from ecrl.compile.autocast import without_autocast
from ecrl.compile.cache import cache_folder
from ecrl.compile.cpu import ONE_AT_A_TIME
from ecrl.compile.partition import Compile, Run, segmented
from ecrl.compile.trace import captured, traced
from ecrl.pytree import is_borrowed

Capture = Callable[[Run, list[Tensor]], tuple[Callable[[], None], Sequence[Tensor]]]
"""Runs a function on tensors once: what does the same again in the same memory, and what it gives, in that memory."""


@cache
def _pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle()


def cuda_graph(run: Run, given: list[Tensor]) -> tuple[Callable[[], None], Sequence[Tensor]]:
    """`run(*given)` as one CUDA graph. It is run before, which compiles: a capture allows no synchronising."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    pool = _pool(given[0].device)
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        out = run(*given)
    return graph.replay, out


def by_inductor(graph: GraphModule, given: list[Tensor]) -> Run:
    """A stretch as kernels that inductor writes."""
    with config.patch({"triton.cudagraphs": False}), cache_folder():  # of a piece: the whole is captured
        return compile_fx(graph, given)  # pyright: ignore


def _copy(to: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Copy all tensors of one dtype at once: a GPU has one kernel for many of them. Without it, copy one by one."""
    if not hasattr(torch, "_foreach_copy_"):
        for place, leaf in zip(to, leaves, strict=True):
            place.copy_(leaf)
        return
    for kind in {leaf.dtype for leaf in to}:
        pairs = [(place, leaf) for place, leaf in zip(to, leaves, strict=True) if place.dtype == kind]
        torch._foreach_copy_(*map(list, zip(*pairs, strict=True)))  # pyright: ignore


def compiled(
    fn: Callable[..., Any],
    structure: Hashable,
    leaves: list[Tensor],
    capture: Capture = cuda_graph,
    compile: Compile = by_inductor,
) -> tuple[Run, Hashable, list[Tensor]]:
    """Compile `fn` for tensors like these.

    Returns: the function of the leaves, the structure of its results, and the tensors it captured.

    A number that lies on the host, such as a learning rate set by hand, is taken to where the others are.
    Borrowed leaves are not copied: a graph holds their address, and another address captures again.
    """
    first = next((leaf for leaf in leaves if leaf.is_cuda), leaves[0])
    with ONE_AT_A_TIME, torch.no_grad(), torch.cuda.device_of(first):
        lent = [i for i, borrowed in enumerate(is_borrowed(structure)) if borrowed]
        own = [i for i in range(len(leaves)) if i not in lent]
        place = [x if i in lent else torch.empty_like(x, device=first.device).copy_(x) for i, x in enumerate(leaves)]
        graph, made = traced(fn, structure, place)
        pieces = cache(lambda matmul_precision: segmented(graph, compile))  # the precision is in the graph
        replays = lru_cache(1 if lent else None)(lambda precision, *addresses: capture(pieces(precision), [*place]))
        with without_autocast():
            replays(torch.get_float32_matmul_precision(), *(place[i].data_ptr() for i in lent))

    def run(*leaves: Tensor) -> list[Tensor]:
        with ONE_AT_A_TIME, torch.no_grad(), torch.cuda.device_of(place[own[0] if own else 0]):
            _copy([place[i] for i in own], [leaves[i] for i in own])
            for i in lent:
                place[i] = leaves[i]
            addresses = [leaves[i].data_ptr() for i in lent]
            replay, out = replays(torch.get_float32_matmul_precision(), *addresses)
            replay()
            fresh = [torch.empty_like(leaf) for leaf in out]
            _copy(fresh, out)
            return fresh

    return run, made, captured(graph)
