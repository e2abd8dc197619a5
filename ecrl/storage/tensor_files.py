"""Write and read safetensors files without a second copy of the tensors.

The functions `save` and `load` of the library `safetensors` hold the content of a whole file in one bytes object. For a
replay buffer, this second copy of the tensors may not fit in memory.

A file begins with the length of its header in 8 bytes. The header is JSON with the dtype, the shape and the position of
each tensor. The bytes of the tensors follow. As in files that the library writes, the tensors whose dtypes have the
most bytes per element come first. A file of this module therefore has the same checksum as a file of the library with
the same content.
"""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecrl.errors import CheckpointError

_DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in a header, in the order of the tensors in a file."""

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_DTYPES.values())}
_PART = 2**26
"""The largest part of a tensor, in bytes, that is copied to host memory at once."""


def _bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor as a 1-d uint8 tensor. If `x` is contiguous, the result shares the memory of `x`."""
    x = x.detach().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


@dataclass(frozen=True, eq=False)
class TensorFile:
    """Content of a safetensors file, as an iterable of parts. The parts share the memory of contiguous CPU tensors.

    >>> content = b"".join(TensorFile({"x": torch.tensor([1, 2], dtype=torch.uint8)}))
    >>> int.from_bytes(content[:8], "little"), content[8:-2].rstrip(), list(content[-2:])
    (56, b'{"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', [1, 2])
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Texts by name. The header stores them under `__metadata__`."""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for name, x in self.tensors.items():
            if x.dtype not in _NAMES:
                raise CheckpointError(f"state: {name} has dtype {x.dtype}, which no checkpoint can store; convert it")
        ordered = sorted(self.tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
        header: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        end = 0
        for name, x in ordered:
            start, end = end, end + x.numel() * x.element_size()
            header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for _, x in ordered:
            for part in _bytes_of(x).split(_PART):
                yield part.cpu().numpy().data


class Header(NamedTuple):
    """Header of a safetensors file: dtypes and shapes of its tensors by name, and its metadata."""

    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises: CheckpointError if the file cannot be read, or is not a safetensors file.
    """
    with _opened(path) as (_, _, header, metadata):
        return Header({name: (_DTYPES[x["dtype"]], tuple(x["shape"])) for name, x in header.items()}, metadata)


def read_tensors(path: Path, fields: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, by name. Verify the checksum of the file before this call.

    Args:
        path: the file.
        fields: first parts of the names of the tensors to read, such as `params` for `params/w`; None for all tensors.

    Raises: CheckpointError if the file cannot be read, or is not a safetensors file.
    """
    with _opened(path) as (file, begin, header, _):
        chosen = [name for name in header if fields is None or name.split("/")[0] in fields]
        return {name: _read_tensor(file, begin, **header[name]) for name in chosen}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, int, dict[str, Any], dict[str, str]]]:
    """Open a safetensors file. Yield the file, the position of its first tensor, the header and the metadata.

    Raises: CheckpointError if the file cannot be read, or is damaged.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > os.fstat(file.fileno()).st_size - 8:  # a file of another format may give a huge length
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            yield file, 8 + length, header, metadata
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged ({error})") from None


def _read_tensor(file: Any, begin: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    """Read a tensor. Its `data_offsets` are relative to `begin`.

    Raises: ValueError if the data of the tensor does not fit its shape or the file.
    """
    (start, end), room = data_offsets, os.fstat(file.fileno()).st_size - begin
    if not 0 <= start <= end <= room or end - start != (size := math.prod(shape) * _DTYPES[dtype].itemsize):
        raise ValueError(
            f"data_offsets {data_offsets} do not fit a tensor {dtype} {shape} in {room} bytes of tensor data"
        )
    x = torch.empty(shape, dtype=_DTYPES[dtype])
    file.seek(begin + start)
    if size and file.readinto(_bytes_of(x).numpy()) != size:
        raise ValueError(f"the file became shorter than {begin + end} bytes")
    return x
