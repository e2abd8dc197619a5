"""Triton kernels for the recursion of `ecrl.kernels.reverse_scan`. Import this module only if Triton is installed.

Each thread processes one row of the batch, from the last time step to the first. A thread loads the inputs of 16 time
steps before it computes the first of these 16 steps. If the batch has too few rows to fill a GPU, the time axis is
split into chunks that run in parallel. A time step computes `y = b + a * y_next`. Two consecutive time steps are
equivalent to one step with other values of `a` and `b`. The first kernel therefore composes all steps of a chunk into
one step. For each chunk, the second kernel runs the composed steps of all chunks that are later in time. The second
kernel then runs the time steps of the chunk itself. Both kernels compute in float64.
"""

import torch
import triton  # pyright: ignore
import triton.language as tl  # pyright: ignore
from torch import Tensor

_STEPS, _ROWS = 16, 32  # steps that a thread loads at once; rows per program, one for each of the 32 threads of a warp
_PROGRAMS = 2048  # this number of programs fills a large GPU, so more chunks would not speed up the kernels
_CHUNKS = 32  # the maximum number of chunks, because more chunks slow down the second kernel


@triton.jit
def _step(y, a, b):
    """Return `b + a * y`. At a cut, `a` is 0 and the result is `b`, even if `y` is NaN."""
    return tl.where(a != 0.0, b + a * y, b)


@triton.jit
def _load_steps(x, decay, cut, after, row, rows, VARIES: tl.constexpr, STEPS: tl.constexpr):
    """Load `a` and `b` of `STEPS` steps before time `after`, the latest first. For t < 0, return a = 1 and b = 0."""
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
    """Load `a` and `b` of `STEPS` chunks from index `first` on. From index `end` on, return a = 1 and b = 0."""
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
    """Compose all steps of each chunk into one step.

    Store `a` of the composed steps in `a_out`, and `b` in `b_out`. Both have the shape `[chunks, rows]`. Chunk 0 is the
    last chunk in time.
    """
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
    """Run the composed steps of all chunks that are later in time, then store `y` for each time step of this chunk."""
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
    """Return the number of chunks and the number of tiles per chunk, where a tile has 16 time steps.

    With fewer rows, there are more chunks, up to 32, so more programs run in parallel. No chunk is empty.
    """
    tiles, programs_per_chunk = -(-time // _STEPS), -(-rows // _ROWS)
    tiles_per_chunk = -(-tiles // max(1, min(tiles, _CHUNKS, _PROGRAMS // programs_per_chunk)))
    return -(-tiles // tiles_per_chunk), tiles_per_chunk


def reverse_scan(x: Tensor, decay: Tensor, cut: Tensor, last: Tensor) -> Tensor:
    """Run the recursion of `ecrl.kernels.reverse_scan` on a GPU, and return `y` with shape `[T, R]`.

    Args:
        x: the term that each step adds, `[T, R]`.
        decay: the factor of the next step's `y`, `[T, R]` or 0-d.
        cut: True at each step where the recursion restarts from `x`, bool `[T, R]`.
        last: the value of `y` after the last step, `[R]`.
    """
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
