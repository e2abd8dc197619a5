"""Stacks of frames and random shifts: their values, bits, gradients and errors."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close
from tensordict import TensorDict

from ecrl import rng
from ecrl.kernels import push_frame, random_shift, stack_frames


def test_a_frame_is_pushed_by_hand(variant):
    frames, obs = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([3.0, 4.0])
    close(variant(push_frame)(frames, torch.tensor([True, False]), obs), [[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]])


def test_frames_are_stacked_by_hand(variant):
    frames, started = torch.tensor([[-2.0, -1.0], [-2.0, -1.0]]), torch.tensor([True, False])
    obs = torch.arange(4.0).expand(2, 4)
    done = torch.tensor([[False, True, False, False], [False, False, True, True]])
    expected = [
        [[-2.0, -1.0, 0.0], [-1.0, 0.0, 1.0], [2.0, 2.0, 2.0], [2.0, 2.0, 3.0]],
        [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 2.0], [3.0, 3.0, 3.0]],
    ]
    close(variant(stack_frames)(frames, started, obs, done), expected)


def stacks_in_python(frames, started, obs, done):
    """Return the stacks of one sequence, one step after the other."""
    k, last, out = len(frames) + 1, list(frames) if started else [], []
    for frame, ends in zip(obs, done, strict=True):
        last = [*(last or [frame] * (k - 1)), frame][-k:]
        out.append(list(last))
        last = [] if ends else last[1:]
    return out


@given(seed=st.integers(0, 10_000), k=st.integers(2, 5), steps=st.integers(1, 9), share=st.floats(0.0, 1.0))
def test_stacks_equal_a_python_loop_and_pushed_frames(seed, k, steps, share):
    g = torch.Generator().manual_seed(seed)
    frames, obs = torch.randint(0, 256, (3, k - 1), generator=g), torch.randint(0, 256, (3, steps), generator=g)
    done, started = torch.rand(3, steps, generator=g) < share, torch.rand(3, generator=g) < 0.5
    out = stack_frames(frames, started, obs, done)
    assert out.tolist() == [
        stacks_in_python(*row)
        for row in zip(frames.tolist(), started.tolist(), obs.tolist(), done.tolist(), strict=True)
    ]
    for t in range(steps):
        stack = push_frame(frames, started, obs[:, t])
        assert torch.equal(stack, out[:, t])
        frames, started = stack[:, 1:], ~done[:, t]


def test_images_stay_uint8_and_names_stay():
    image = torch.arange(24, dtype=torch.uint8).reshape(2, 1, 3, 4)
    obs = TensorDict({"camera": image, "joints": torch.ones(2, 1, 5)}, [2, 1])
    frames = TensorDict({"camera": image.repeat(1, 3, 1, 1), "joints": torch.zeros(2, 3, 5)}, [2])
    out = stack_frames(frames, torch.tensor([True, False]), obs, torch.zeros(2, 1, dtype=torch.bool))
    assert out["camera"].dtype == torch.uint8 and out["camera"].shape == (2, 1, 4, 3, 4)
    assert out["joints"][:, 0].sum(-1).tolist() == [[0.0, 0.0, 0.0, 5.0], [5.0, 5.0, 5.0, 5.0]]


def test_stacks_have_the_dtype_of_the_observations():
    frames, started, obs = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.bool), torch.ones(2, 4)
    assert push_frame(frames, started, obs[:, 0]).dtype == torch.float32
    assert stack_frames(frames, started, obs, torch.zeros(2, 4, dtype=torch.bool)).dtype == torch.float32


def test_shapes_that_do_not_fit_are_refused():
    frames, started, obs, done = torch.zeros(2, 3), torch.ones(2).bool(), torch.ones(2, 4), torch.zeros(2, 4).bool()
    with pytest.raises(
        ValueError, match=r"^frames has shape \[2, 3\], and obs has \[2, 4\]; expected \[2, k - 1\] and \["
    ):
        stack_frames(frames, started, obs, done[:, :3])
    with pytest.raises(
        ValueError, match=r"^started has shape \[3\], and done has \[2, 4\]; expected \[n\] and \[n, S\]"
    ):
        stack_frames(frames, torch.ones(3).bool(), obs, done)
    with pytest.raises(ValueError, match=r"^frames has shape \[2, 3, 5\], and obs has \[2, 4\]"):
        stack_frames(torch.zeros(2, 3, 5), started, obs, done)
    with pytest.raises(
        ValueError, match=r"^frames has shape \[2, 3\], and obs has \[3\]; expected \[2, k - 1\] and \[2\]"
    ):
        push_frame(frames, started, torch.ones(3))
    with pytest.raises(ValueError, match=r"^frames has 1 tensors, and obs has 2; expected the same fields"):
        push_frame(TensorDict({"a": frames}, [2]), started, TensorDict({"a": obs[:, 0], "b": obs[:, 0]}, [2]))


def test_gradients_of_stacks():
    g = torch.Generator().manual_seed(0)
    frames, obs = (torch.randn(2, n, dtype=torch.float64, generator=g).requires_grad_() for n in (2, 5))
    started, done = torch.tensor([True, False]), torch.rand(2, 5, generator=g) < 0.4
    assert torch.autograd.gradcheck(lambda x, y: stack_frames(x, started, y, done), (frames, obs))
    assert torch.autograd.gradcheck(
        lambda x, y: push_frame(x, started, y), (frames, obs[:, 0].detach().requires_grad_())
    )


def shifted_by_padding(image, dy, dx, pad):
    """Return a crop of a padded image, as DrQ describes it."""
    height, width = image.shape[:2]
    padded = F.pad(image.permute(2, 0, 1).unsqueeze(0).double(), (pad,) * 4, mode="replicate")[0].permute(1, 2, 0)
    return padded[pad + dy : pad + dy + height, pad + dx : pad + dx + width].to(image.dtype)


def test_a_shift_by_hand(variant):
    image = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).unsqueeze(-1)
    close(variant(random_shift)(image, torch.tensor([1, -1])).squeeze(-1), [[4.0, 4.0, 5.0], [4.0, 4.0, 5.0]])


@given(seed=st.integers(0, 10_000), pad=st.integers(0, 4), height=st.integers(1, 9), width=st.integers(1, 9))
def test_shifts_equal_crops_of_padded_images(seed, pad, height, width):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (5, height, width, 3), generator=g, dtype=torch.uint8)
    shift = rng.randint(rng.split(rng.key(seed), 5), (2,), low=-pad, high=pad + 1)
    out = random_shift(image, shift)
    assert out.dtype == torch.uint8
    for row, moved, (dy, dx) in zip(image, out, shift.tolist(), strict=True):
        assert torch.equal(moved, shifted_by_padding(row, dy, dx, pad))


def test_the_frames_of_a_stack_share_a_shift():
    image = torch.arange(2 * 4 * 5 * 5).reshape(2, 4, 5, 5, 1)
    shift = torch.tensor([[1, 2], [-2, 0]])
    out = random_shift(image, shift.unsqueeze(1))
    for i in range(4):
        assert torch.equal(out[:, i], random_shift(image[:, i], shift))


def test_gradients_of_shifts():
    image = torch.randn(2, 3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: random_shift(x, torch.tensor([[1, -1], [0, 2]])), (image,))


def test_wrong_shifts_are_refused():
    image = torch.zeros(2, 4, 4, 1)
    with pytest.raises(ValueError, match=r"^shift has dtype torch\.float32, expected torch\.int64$"):
        random_shift(image, torch.zeros(2, 2))
    with pytest.raises(
        ValueError, match=r"^image has shape \[2, 4, 4, 1\], and shift has \[2\]; expected \[\*B, h, w, c\]"
    ):
        random_shift(image, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^image has shape \[2, 4, 4, 1\], and shift has \[3, 2\]"):
        random_shift(image, torch.zeros(3, 2, dtype=torch.int64))
