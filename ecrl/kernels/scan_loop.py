"""Loops over time, which run in Python or in a compiled graph.

The argument `scan` of `collect_rollout` is the function that runs the loop over the steps of a rollout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecrl.pytree import flatten, mapped, names, unflatten

_CPU_ROWS, _GPU_ROWS = 2048, 65_536
"""Largest number of rows in a chunk (see `chunking`), or largest number of steps if each row is a sequence.

With the CPU limit, the activations of a small network fit in a cache. A chunk with the GPU limit keeps a GPU busy.
"""

_CPU_BYTES, _GPU_BYTES = 2048 * _CPU_ROWS, 2048 * _GPU_ROWS
"""Largest number of bytes in a chunk: 4 MiB on a CPU and 128 MiB on a GPU.

If a row is larger than 2 KiB, this limit applies before the limit on the number of rows. This limit bounds the memory
of a convolutional network, whose activations take several times as much memory as the images.
"""
Scan = Callable[..., tuple[Any, Any]]
"""Type of a function with the same arguments and results as `scan`."""


def scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """Run `body` along the first axis of `xs` in a Python loop.

        carry, y[t] = body(carry, x[t], *constants)

    Args:
        body: a pure function that reads only its arguments.
        carry: tensors or TensorDicts, optionally nested in tuples, lists and dicts. `body` must preserve all shapes and
            dtypes.
        xs: tensors in the same kinds of containers. The first axis of all tensors has the same length, at least 1.
        constants: further arguments of `body`, the same in every step.

    Returns: the last carry, and all `y` stacked along a new first axis.
    Gradient: flows through `body`.
    Raises: ValueError if `xs` holds no tensor, or if the first axes of its tensors differ in length. ValueError if
        `body` changes the structure of the carry, or the shape or dtype of a tensor in the carry.

    >>> scan(lambda total, x: (total + x, total), torch.tensor(0), torch.arange(1, 4))
    (tensor(6), tensor([0, 1, 3]))
    """
    leaves, structure = flatten(xs)
    length, start, ys = length_of(leaves), flatten(carry), []
    for x in zip(*(leaf.unbind(0) for leaf in leaves), strict=True):
        after, y = body(carry, unflatten(structure, x, lambda size: size[1:]), *constants)
        if not ys:
            check_carry(start, flatten(after))
        carry = after
        ys.append(y)
    return carry, mapped(lambda *parts: torch.stack(parts), *ys, batch=lambda size: (length, *size))


def check_carry(before: tuple[list[Tensor], Any], after: tuple[list[Tensor], Any]) -> None:
    """Raise ValueError if a step changed the structure of the carry, or the shape or dtype of a leaf.

    >>> check_carry(flatten({"x": torch.zeros(4)}), flatten({"x": torch.zeros(4).long()}))
    Traceback (most recent call last):
    ...
    ValueError: carry field 'x' was float32 [4], but body returned int64 [4]
    """
    if after[1] != before[1]:
        raise ValueError(f"the carry changed its structure from {before[1]} to {after[1]}; body must keep it")
    for number, (old, new) in enumerate(zip(before[0], after[0], strict=True)):
        if old.shape != new.shape or old.dtype != new.dtype:
            name = names(before[1])[number]
            field = f"carry field {name!r}" if name else "the carry"
            raise ValueError(f"{field} was {_describe(old)}, but body returned {_describe(new)}")


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


_LOOP: list[Scan] = [scan]


def use_loop(fn: Scan) -> Scan:
    """Make `loop` call the decorated function instead of `scan`. `ecrl.compile` uses this decorator."""
    _LOOP[:] = [fn]
    return fn


def loop(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *constants: Any) -> tuple[Any, Any]:
    """Run `body` along the first axis of `xs`, in a Python loop or as one loop of a compiled graph.

        carry, y[t] = body(carry, x[t], *constants)

    Policies use `loop` for the recurrence over the steps of a sequence, and environments for the iterations of a
    solver. In eager code, `loop` runs `scan`. A compiled graph contains the body of `loop` once, for any number of
    steps. With a plain `scan`, the graph would contain the body once per step.

    Args:
        body: a pure function that reads no tensors except its arguments, so pass all tensors in `xs` or `constants`.
        carry: tensors or TensorDicts, optionally nested in tuples, lists and dicts. `body` must preserve all shapes and
            dtypes.
        xs: tensors in the same kinds of containers. The first axis of all tensors has the same length, at least 1.
        constants: further arguments of `body`, the same in every step.

    Returns: the last carry, and all `y` stacked along a new first axis.
    Gradient: flows through `body` to `carry`, `xs` and `constants`. In a compiled graph, a second loop computes the
        gradient backwards in time, so the carry of every step is kept in memory. A compiled graph does not support
        second derivatives.
    Raises: ValueError in the same cases as `scan`. A compiled graph raises ConfigError if `body` uses a tensor of the
        graph that is not an argument of `body`. A compiled graph also raises ConfigError if second or forward-mode
        derivatives are taken.

    >>> loop(lambda x, _: (0.5 * (x + 2.0 / x), None), torch.tensor(1.0), torch.zeros(4))[0]  # Heron's root of 2
    tensor(1.4142)
    """
    return _LOOP[0](body, carry, xs, *constants)


def step_or_keep(due: Tensor, body: Callable[..., tuple[Any, Any]], carry: Any, *constants: Any) -> tuple[Any, Any]:
    """Run `body`, and keep its results only if `due` is True.

        carry, y = body(carry, *constants)    if due
        carry, y = carry, NaN                 otherwise

    Args:
        due: 0-d bool.
        body: a pure function that reads only its arguments.
        carry: tensors or TensorDicts, optionally nested in tuples, lists and dicts. `body` must preserve all shapes and
            dtypes.
        constants: further arguments of `body`.

    Returns: the new carry, and `y`. All tensors of `y` must be floats.
    Gradient: flows through `body` if `due` is True, and from the old carry to the new one otherwise.
    Raises: ValueError if `body` changes the structure of the carry, or the shape or dtype of a tensor in the carry.

    >>> step_or_keep(torch.tensor(False), lambda x: (x + 1.0, x), torch.tensor(3.0))
    (tensor(3.), tensor(nan))
    """
    after, y = body(carry, *constants)
    check_carry(flatten(carry), flatten(after))
    keep = partial(torch.where, due)
    return mapped(keep, after, carry), mapped(lambda leaf: torch.where(due, leaf, torch.nan), y)


_STEP_IF: list[Callable[..., tuple[Any, Any]]] = [step_or_keep]


def use_step_if(fn: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Make `step_if` call the decorated function instead of `step_or_keep`. `ecrl.compile` uses this decorator."""
    _STEP_IF[:] = [fn]
    return fn


def step_if(due: Tensor, body: Callable[..., tuple[Any, Any]], carry: Any, *constants: Any) -> tuple[Any, Any]:
    """Run `body`, and keep its results only if `due` is True. The arguments and results are those of `step_or_keep`.

    A compiled graph for the CPU does not run `body` if `due` is False. In eager code, on a GPU, under vmap, while
    gradients are recorded, and with several ranks, `step_if` calls `step_or_keep`, which always runs `body`.
    """
    return _STEP_IF[0](due, body, carry, *constants)


def length_of(leaves: list[Tensor]) -> int:
    """Return the length of the leaves' first axis. Raise ValueError if there is no common length of at least 1."""
    lengths = {len(leaf) if leaf.ndim else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(f"xs has tensors of lengths {sorted(lengths)}, expected one length of at least 1")
    return lengths.pop()


def row_bytes(rows: Any) -> int:
    """Return the number of bytes per row, summed over all tensors `[M, ...]` of a tree.

    >>> row_bytes({"image": torch.zeros(5, 8, 8, 1, dtype=torch.uint8), "joints": torch.zeros(5, 3)})
    76
    """
    return sum(leaf.element_size() * leaf.shape[1:].numel() for leaf in flatten(rows)[0])


def chunking(rows: int, device: torch.device, one_row: int, length: int = 1) -> tuple[int, int]:
    """Return the number of chunks and the rows per chunk, for a network that processes rows chunk by chunk.

    On a CPU, chunks are small enough for the activations of a small network to stay in a core's cache. On a GPU, chunks
    limit the memory use. On a CPU, a chunk has at most 2,048 rows and 4 MiB. On another device, a chunk has at most
    65,536 rows and 128 MiB. A chunk always has at least one row, even if the row exceeds a limit. If each row is a
    sequence, the limit on rows applies to steps instead.

    Args:
        rows: number of rows.
        device: device of the rows.
        one_row: size of one row in bytes (see `row_bytes`).
        length: number of steps in a row, if a row is a sequence.

    Returns: the `number` of chunks and the `size` of a chunk in rows, with `number * size >= rows`.

    >>> cpu = torch.device("cpu")
    >>> chunking(5000, cpu, 400), chunking(5000, cpu, 84 * 84 * 4), chunking(50, cpu, 400, length=1000)
    ((3, 1667), (34, 148), (25, 2))
    """
    most, size = (_CPU_ROWS, _CPU_BYTES) if device.type == "cpu" else (_GPU_ROWS, _GPU_BYTES)
    number = -(-rows // max(1, min(most // length, size // max(1, one_row))))
    return number, -(-rows // number)


def in_chunks(rows: Any, length: int = 1) -> Any:
    """Reshape rows `[M, ...]` to chunks `[K, C, ...]` for a scan.

    All chunks have C rows. Copies of the last row fill the places after row M. `length` is the number of steps in a
    row, if a row is a sequence.

    >>> in_chunks(torch.zeros(5000, 3)).shape, in_chunks(torch.zeros(50, 1000, 3), length=1000).shape
    (torch.Size([3, 1667, 3]), torch.Size([25, 2, 1000, 3]))
    """
    leaves, _ = flatten(rows)
    count = length_of(leaves)
    number, size = chunking(count, leaves[0].device, row_bytes(leaves), length)

    def cut(leaf: Tensor) -> Tensor:
        missing = leaf[-1:].expand(number * size - count, *leaf.shape[1:])
        return (torch.cat((leaf, missing)) if len(missing) else leaf).reshape(number, size, *leaf.shape[1:])

    return mapped(cut, rows, batch=lambda batch: (number, size, *batch[1:]))
