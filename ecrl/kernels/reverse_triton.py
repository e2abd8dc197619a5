"""The recursion over time of `ecrl.kernels.reverse_scan` on a GPU; imported where it is used, as it needs Triton.

A thread steps through time for one row, and fetches many steps before it takes the first. Few rows leave a GPU idle, so
where there are few, time is cut into chunks. Steps `y = b + a * y_next` compose to one of the same kind: one kernel
composes the steps of each chunk, a second one steps through the chunks after its own, and from there through its own.
All of it in float64.
"""

import torch
import triton  # pyright: ignore
import triton.language as tl  # pyright: ignore
from torch import Tensor

_STEPS, _ROWS = 16, 32  # of a program, at a time: a warp
_PROGRAMS, _CHUNKS = 2048, 32  # keep a large GPU busy; more chunks than that take longer to step through than to spare


@triton.jit
def _stepped(y, a, b):
    """What a step makes of `y`. A cut has a = 0, and lets nothing through, not even NaN."""
    return tl.where(a != 0.0, b + a * y, b)


@triton.jit
def _fetched(x, decay, cut, after, row, rows, VARIES: tl.constexpr, STEPS: tl.constexpr):
    """`a` and `b` of the steps before time `after`, the last one first; those before the first change nothing."""
    a, b = (), ()
    for i in tl.static_range(STEPS):
        t = after - 1 - i
        inside = row < tl.where(t >= 0, rows, 0)
        at = t.to(tl.int64) * rows + row
        factor = tl.load(decay + at, mask=inside, other=1.0) if VARIES else tl.load(decay)
        closed = tl.load(cut + at, mask=inside, other=0) != 0
        a = a + (tl.where(inside, tl.where(closed, 0.0, factor), 1.0),)  # noqa: RUF005 (Triton cannot unpack)
        b = b + (tl.load(x + at, mask=inside, other=0.0),)  # noqa: RUF005
    return a, b


@triton.jit
def _chunks(a_in, b_in, first, end, row, rows, STEPS: tl.constexpr):
    """`a` and `b` of chunks from `first` on; those from `end` on change nothing."""
    a, b = (), ()
    for i in tl.static_range(STEPS):
        chunk = first + i
        inside = row < tl.where(chunk < end, rows, 0)
        a = a + (tl.load(a_in + chunk * rows + row, mask=inside, other=1.0),)  # noqa: RUF005
        b = b + (tl.load(b_in + chunk * rows + row, mask=inside, other=0.0),)  # noqa: RUF005
    return a, b


@triton.jit
def _compose_chunks(
    x, decay, cut, a_out, b_out, time, rows, tiles, VARIES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr
):
    """Each chunk as one step, `[chunks, rows]`; the first chunk is the last one in time."""
    chunk, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a_all, b_all = tl.full((ROWS,), 1.0, tl.float64), tl.full((ROWS,), 0.0, tl.float64)
    for tile in range(chunk * tiles, (chunk + 1) * tiles):
        a, b = _fetched(x, decay, cut, time - tile * STEPS, row, rows, VARIES, STEPS)
        for i in tl.static_range(STEPS):
            a_all, b_all = tl.where(a[i] != 0.0, a[i] * a_all, 0.0), _stepped(b_all, a[i], b[i])
    tl.store(a_out + chunk * rows + row, a_all, mask=row < rows)
    tl.store(b_out + chunk * rows + row, b_all, mask=row < rows)


@triton.jit
def _step_through(
    x, decay, cut, last, a_in, b_in, y_out, time, rows, tiles, VARIES: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    """What comes after a chunk, then its steps."""
    chunk, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = tl.load(last + row, mask=row < rows, other=0.0).to(tl.float64)
    for first in range(0, chunk, STEPS):
        a, b = _chunks(a_in, b_in, first, chunk, row, rows, STEPS)
        for i in tl.static_range(STEPS):
            y = _stepped(y, a[i], b[i])
    for tile in range(chunk * tiles, (chunk + 1) * tiles):
        after = time - tile * STEPS
        a, b = _fetched(x, decay, cut, after, row, rows, VARIES, STEPS)
        for i in tl.static_range(STEPS):
            y = _stepped(y, a[i], b[i])
            t = after - 1 - i
            tl.store(y_out + t.to(tl.int64) * rows + row, y, mask=row < tl.where(t >= 0, rows, 0))


def chunks_of(time: int, rows: int) -> tuple[int, int]:
    """Number of chunks, and tiles in each: as many as keep a GPU busy, none empty."""
    tiles, beside = -(-time // _STEPS), -(-rows // _ROWS)
    each = -(-tiles // max(1, min(tiles, _CHUNKS, _PROGRAMS // beside)))
    return -(-tiles // each), each


def reverse_scan(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    """`x` and `cut` `[T, R]`, `decay` of that shape or 0-d, `last` `[R]`; gives `[T, R]` in the dtype of `x`."""
    x, cut, last = x.contiguous(), cut.contiguous().view(torch.uint8), last.contiguous()
    decay, y = decay.double().contiguous(), torch.empty_like(x)
    time, rows = x.shape
    chunks, tiles = chunks_of(time, rows)
    a, b = torch.empty(2, chunks, rows, dtype=torch.float64, device=x.device)
    grid, size = (-(-rows // _ROWS), chunks), {"VARIES": decay.ndim > 0, "STEPS": _STEPS, "ROWS": _ROWS}
    compose, step = _compose_chunks[grid], _step_through[grid]  # pyright: ignore
    with torch.cuda.device_of(x):
        if chunks > 1:
            compose(x, decay, cut, a, b, time, rows, tiles, **size, num_warps=1)
        step(x, decay, cut, last, a, b, y, time, rows, tiles, **size, num_warps=1)
    return y
