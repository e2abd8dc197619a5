"""The plain loop over time, and loops over chunks of rows."""

import pytest
import torch
from support.checks import assert_pure, close
from tensordict import TensorDict

from ecrl.kernels import scan
from ecrl.kernels.scan_loop import chunking, in_chunks, row_bytes

CPU = torch.device("cpu")


def leaky(carry, x, factor):
    after = {"sum": carry["sum"] * factor + x["dx"]}
    return after, (after["sum"], x["dx"])


def test_a_leaky_sum_by_hand():
    steps = TensorDict({"dx": torch.tensor([[1.0], [2.0], [4.0]])}, [3, 1])
    after, (sums, carries) = assert_pure(scan, leaky, {"sum": torch.zeros(1)}, steps, torch.tensor(0.5))
    close(sums, [[1.0], [2.5], [5.25]])  # 1; 0.5 + 2; 1.25 + 4
    close(after["sum"], [5.25])
    close(carries, steps["dx"])


def test_gradients_cross_time():
    factor = torch.tensor(0.5, requires_grad=True)
    steps = TensorDict({"dx": torch.ones(3, 1)}, [3, 1])
    scan(leaky, {"sum": torch.zeros(1)}, steps, factor)[0]["sum"].sum().backward()
    close(factor.grad, 2.0)  # d(f^2 + f + 1) / df at 0.5


@pytest.mark.parametrize("xs", [None, {}, torch.tensor(1.0), torch.zeros(0, 2), (torch.zeros(2), torch.zeros(3))])
def test_what_has_no_one_length_is_refused(xs):
    with pytest.raises(ValueError, match=r"xs has tensors of lengths .*, expected one length of at least 1"):
        scan(lambda carry, x: (carry, x), torch.tensor(0), xs)


@pytest.mark.parametrize(
    ("device", "one_row", "most"),
    [
        ("cpu", 1, 2048),
        ("cpu", 2048, 2048),
        ("cpu", 2049, 2046),  # 4 MiB / 2049 B
        ("cpu", 84 * 84 * 4, 148),
        ("cpu", 2**40, 1),
        ("cuda", 2048, 65_536),
        ("cuda", 84 * 84 * 4, 4755),  # 128 MiB / 28,224 B
    ],
)
def test_a_chunk_has_so_many_rows_and_bytes_at_most(device, one_row, most):
    number, size = chunking(10**6, torch.device(device), one_row)
    assert number == -(-(10**6) // most) and size == -(-(10**6) // number) <= most


def test_images_come_in_smaller_chunks():
    rows = {"camera": torch.zeros(300, 84, 84, 4, dtype=torch.uint8), "x": torch.zeros(300, 2)}
    assert row_bytes(rows) == 84 * 84 * 4 + 8
    parts = in_chunks(rows)
    assert parts["camera"].shape == (3, 100, 84, 84, 4) and parts["camera"].dtype == torch.uint8


@pytest.mark.parametrize("rows", [1, 2047, 2048, 2049, 5000, 65_536])
def test_parts_hold_every_row_and_are_nearly_equal(rows):
    number, size = chunking(rows, CPU, 8)
    assert number * (size - 1) < rows <= number * size
    assert size <= 2048
    parts = in_chunks(TensorDict({"x": torch.arange(rows)}, [rows]))
    assert parts.batch_size == torch.Size([number, size])
    assert parts["x"].flatten()[:rows].tolist() == list(range(rows))
    assert set(parts["x"].flatten()[rows:].tolist()) <= {rows - 1}
