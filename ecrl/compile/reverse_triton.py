"""Triton kernels for the recursion of `ecrl.kernels.reverse_scan`. Import this module only if Triton is installed.

A thread handles one row and steps backwards through time. It loads 16 steps before it computes the first of them. A few
rows cannot fill a GPU, so the time axis of a few rows is cut into chunks that run in parallel. A step is
`y = b + a * y_next`. Two steps in a row are equal to one step with another `a` and `b`. So the first kernel composes
all steps of a chunk into one step. The second kernel runs the composed steps of all later chunks, and then the steps of
its own chunk. Both kernels compute in float64.
"""

import torch
import triton  # pyright: ignore
import triton.language as tl  # pyright: ignore
from torch import Tensor

_STEPS, _ROWS = 16, 32  # steps that a thread loads at a time, and rows of a program (one warp has 32 threads)
_PROGRAMS, _CHUNKS = 2048, 32  # limits: so many programs fill a large GPU; more chunks slow down the second kernel


@triton.jit
def _step(y, a, b):
    """Return `b + a * y`. At a cut `a` is 0, and the result is `b` even if `y` is NaN."""
    return tl.where(a != 0.0, b + a * y, b)


@triton.jit
def _load_steps(x, decay, cut, after, row, rows, VARIES: tl.constexpr, STEPS: tl.constexpr):
    """Load `a` and `b` of the steps before time `after`, the last step first. Before time 0, `a` is 1 and `b` is 0."""
    a, b = (), ()
    for i in tl.static_range(STEPS):
        t = after - 1 - i
        inside = row < tl.where(t >= 0, rows, 0)
        at = t.to(tl.int64) * rows + row
        factor = tl.load(decay + at, mask=inside, other=1.0) if VARIES else tl.load(decay)
        is_cut = tl.load(cut + at, mask=inside, other=0) != 0
        a = a + (tl.where(inside, tl.where(is_cut, 0.0, factor), 1.0),)  # noqa: RUF005 (Triton cannot unpack)
        b = b + (tl.load(x + at, mask=inside, other=0.0),)  # noqa: RUF005
    return a, b


@triton.jit
def _load_chunks(a_in, b_in, first, end, row, rows, STEPS: tl.constexpr):
    """Load `a` and `b` of the chunks from `first` on. From chunk `end` on, `a` is 1 and `b` is 0."""
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
    """Compose the steps of each chunk into one step, `[chunks, rows]`. Chunk 0 is the last one in time."""
    chunk, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    a_all, b_all = tl.full((ROWS,), 1.0, tl.float64), tl.full((ROWS,), 0.0, tl.float64)
    for tile in range(chunk * tiles, (chunk + 1) * tiles):
        a, b = _load_steps(x, decay, cut, time - tile * STEPS, row, rows, VARIES, STEPS)
        for i in tl.static_range(STEPS):
            a_all, b_all = tl.where(a[i] != 0.0, a[i] * a_all, 0.0), _step(b_all, a[i], b[i])
    tl.store(a_out + chunk * rows + row, a_all, mask=row < rows)
    tl.store(b_out + chunk * rows + row, b_all, mask=row < rows)


@triton.jit
def _step_through(
    x, decay, cut, last, a_in, b_in, y_out, time, rows, tiles, VARIES: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr
):  # fmt: skip
    """Run the composed steps of the chunks later in time, then the steps of this chunk."""
    chunk, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    y = tl.load(last + row, mask=row < rows, other=0.0).to(tl.float64)
    for first in range(0, chunk, STEPS):
        a, b = _load_chunks(a_in, b_in, first, chunk, row, rows, STEPS)
        for i in tl.static_range(STEPS):
            y = _step(y, a[i], b[i])
    for tile in range(chunk * tiles, (chunk + 1) * tiles):
        after = time - tile * STEPS
        a, b = _load_steps(x, decay, cut, after, row, rows, VARIES, STEPS)
        for i in tl.static_range(STEPS):
            y = _step(y, a[i], b[i])
            t = after - 1 - i
            tl.store(y_out + t.to(tl.int64) * rows + row, y, mask=row < tl.where(t >= 0, rows, 0))


def chunks_of(time: int, rows: int) -> tuple[int, int]:
    """Return the number of chunks, and the number of tiles (16 steps) in each. No chunk is empty.

    Fewer rows give more chunks, so that enough programs run to fill a GPU.
    """
    tiles, programs_per_chunk = -(-time // _STEPS), -(-rows // _ROWS)
    tiles_per_chunk = -(-tiles // max(1, min(tiles, _CHUNKS, _PROGRAMS // programs_per_chunk)))
    return -(-tiles // tiles_per_chunk), tiles_per_chunk


def reverse_scan(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    """Run the recursion on `x` and `cut` `[T, R]`, `decay` `[T, R]` or 0-d, and `last` `[R]`. Return `[T, R]`."""
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
