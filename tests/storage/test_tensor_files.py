"""Files of tensors: the bytes of the library safetensors, no second copy of a tensor, and damage in one line."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from ecrl.errors import CheckpointError
from ecrl.storage import tensor_files
from ecrl.storage.tensor_files import TensorFile, read_tensors


def of_every_dtype():
    """Tensors of three shapes, in the alphabetical order of names with a letter that is not ASCII."""
    tensors = {}
    for number, dtype in enumerate(tensor_files._DTYPES.values()):
        values = torch.arange(6) % 2 if dtype == torch.bool else torch.arange(6)
        tensors[f"z/{number}"] = values.to(dtype).reshape(2, 3)
        tensors[f"a/é{number}"] = values[1].to(dtype, copy=True)
        tensors[f"{number}/empty"] = torch.zeros((3, 0), dtype=dtype)
    return tensors


def equal(one, other):
    return one.keys() == other.keys() and all(
        x.dtype == other[name].dtype
        and x.shape == other[name].shape
        and x.reshape(-1).view(torch.uint8).tolist() == other[name].reshape(-1).view(torch.uint8).tolist()
        for name, x in one.items()
    )


def test_a_file_has_the_bytes_of_the_library_and_comes_back(tmp_path):
    tensors = of_every_dtype()
    content = b"".join(TensorFile(tensors))
    assert content == save(tensors)
    (tmp_path / "x").write_bytes(content)
    assert equal(read_tensors(tmp_path / "x"), tensors) and equal(load(content), tensors)
    assert read_tensors(tmp_path / "x", ["a"]).keys() == {name for name in tensors if name.startswith("a/")}
    (tmp_path / "x").write_bytes(save(tensors, {"a": "note"}))
    assert equal(read_tensors(tmp_path / "x"), tensors)


def test_tensors_may_be_strided_or_share_memory(tmp_path):
    x = torch.arange(12.0).reshape(3, 4)
    tensors = {"x": x, "column": x[:, 1], "t": x.t()}
    (tmp_path / "x").write_bytes(b"".join(TensorFile(tensors)))
    assert equal(read_tensors(tmp_path / "x"), {name: x.contiguous() for name, x in tensors.items()})


def test_a_single_element_may_have_any_stride():
    numbers = torch.arange(6)
    tensors = {"one": numbers.as_strided((1,), (2,), 3), "rows": numbers.as_strided((1, 1), (4, 2), 5)}
    tensors["none"] = numbers.as_strided((0,), (2,))
    content = b"".join(TensorFile(tensors))
    assert {name: x.tolist() for name, x in load(content).items()} == {"one": [3], "rows": [[5]], "none": []}


def test_the_parts_of_a_file_share_the_memory_of_the_tensors(monkeypatch):
    monkeypatch.setattr(tensor_files, "_PART", 8)
    x = torch.arange(5, dtype=torch.float32).reshape(5, 1)
    _, *parts = TensorFile({"x": x})
    assert [len(part) for part in parts] == [8, 8, 4]
    addresses = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    assert addresses == [x.data_ptr(), x.data_ptr() + 8, x.data_ptr() + 16]


def test_a_dtype_without_a_name_is_refused():
    message = "state: norm/x has dtype torch.complex128, which no checkpoint can store; convert it"
    with pytest.raises(CheckpointError, match=f"^{message}$"):
        list(TensorFile({"norm/x": torch.zeros(2, dtype=torch.complex128)}))


def with_header(change):
    content = save({"x": torch.ones(3)})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


FAULTS = {
    "no header": b"\1",
    "no JSON": b"\5\0\0\0\0\0\0\0{{{{{",
    "a list": b"\2\0\0\0\0\0\0\0[]",
    "a length beyond memory": b"\xff" * 8 + b"{}",
    "a text, whose first bytes give a huge length": b"# A text\n" * 9,
    "too short": save({"x": torch.ones(3)})[:-1],
    "another dtype": with_header(lambda header: header["x"].update(dtype="X9")),
    "another shape": with_header(lambda header: header["x"].update(shape=[2**40])),
    "a negative size": with_header(lambda header: header["x"].update(shape=[-1])),
    "no place": with_header(lambda header: header["x"].pop("data_offsets")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, fault):
    (tmp_path / "x").write_bytes(FAULTS[fault])
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path))}/x: damaged \(.*\)$"):
        read_tensors(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"nowhere: cannot be read: No such file or directory$"):
        read_tensors(tmp_path / "nowhere")
