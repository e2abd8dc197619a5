"""Half precision, integers and mixed dtypes: every kernel computes in float32 and keeps the dtype of its inputs."""

from typing import Any

import pytest
import torch
from support.checks import close
from support.kernel_calls import CALLS, kernel
from tensordict import TensorDict
from torch import Tensor
from torch.utils import _pytree as pytree

from ecrl import kernels

HALVES = [torch.float16, torch.bfloat16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
LOGS = "the logs of a loss stay in float32"
SKIPPED = {
    "linear_schedule": "gives float64",
    "cosine_schedule": "gives float64",
    "step_schedule": "gives float64",
    "warmup_linear_schedule": "gives float64",
    "warmup_cosine_schedule": "gives float64",
    "exponential_schedule": "gives float64",
    "act_and_step": "has no arithmetic of its own",
    "collect_rollout": "has no arithmetic of its own",
    "scan": "has no arithmetic of its own",
    "loop": "has no arithmetic of its own",
    "replay_add_priority": "sum trees are float64",
    "replay_prioritized_index": "sum trees are float64",
    "replay_set_priority": "sum trees are float64",
    "tree_find": "sum trees are float64",
    "tree_set": "sum trees are float64",
    "moments_merge": "moments are float64",
    "moments_update": "moments are float64",
    "moments_variance": "moments are float64",
}


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Convert the floats of a tree to `dtype`, except moments, which are float64."""
    change = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    return [part if is_moments(part) else pytree.tree_map(change, part) for part in tree]


def is_moments(part: Any) -> bool:
    return isinstance(part, TensorDict) and "m2" in part


def tensors_of(out: Any) -> list[Tensor]:
    """Return the tensors of a result, without the logs of a loss."""
    if isinstance(out, tuple) and isinstance(out[-1], dict):
        out = out[0]
    return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]


@each_half
@pytest.mark.parametrize("name", [name for name in CALLS if name not in SKIPPED])
def test_results_are_the_rounded_results_of_float32(name, dtype):
    args, kwargs = CALLS[name](3)
    low = cast((*args, kwargs), dtype)
    high = cast(low, torch.float32)
    actual, expected = (tensors_of(kernel(name)(*call[:-1], **call[-1])) for call in (low, high))
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == (dtype if e.is_floating_point() else e.dtype)
        if name in ("mask_logits", "tanh_normal_latent"):  # the lowest float and the open interval are the dtype's own
            a, e = (x.double().clamp(-4.0, 4.0) for x in (a, e))
            close(a, e, tol=0.02)
        else:
            assert torch.equal(a, e.to(a.dtype))


@each_half
@pytest.mark.parametrize(
    "name",
    ["discounted_returns", "gae", "vtrace", "ppo_loss", "grpo_loss", "gspo_loss", "sapo_loss", "standardize", "adam"],
)
def test_half_precision_in_every_variant(variant, name, dtype):
    args, kwargs = CALLS[name](3)
    *low, low_kwargs = cast((*args, kwargs), dtype)
    *high, high_kwargs = cast((*low, low_kwargs), torch.float64)
    result = tensors_of(variant(kernel(name))(*low, **low_kwargs))
    for a, e in zip(result, tensors_of(kernel(name)(*high, **high_kwargs)), strict=True):
        close(a, e, tol=2.0 * torch.finfo(dtype).eps)  # a rounding of the result, not one per step


@each_half
def test_returns_of_ones_in_half_precision(variant, dtype):
    ones, no = torch.ones(512, dtype=dtype), torch.zeros(512, dtype=torch.bool)
    expected = torch.tensor([(1 - 0.99 ** (512 - t)) / 0.01 for t in range(512)])
    for name in ("discounted_returns", "n_step_returns", "td_lambda_returns", "gae"):
        hyper = {"gamma": 0.99, **({"n": 512} if "n_step" in name else {})}
        hyper |= {"gae_lambda": 1.0} if name in ("td_lambda_returns", "gae") else {}
        values = (0 * ones,) * (2 if name == "gae" else 1)
        if variant.name == "compiled" and "n" in hyper:
            continue  # a graph of 512 passes
        out = variant(getattr(kernels, name))(ones, *values, no, no, **hyper)
        close(out.advantage if name == "gae" else out, expected, tol=torch.finfo(dtype).eps)
    sums = variant(kernels.running_returns)(ones, no, torch.zeros((), dtype=dtype), gamma=0.99)
    close(sums, expected.flip(0), tol=torch.finfo(dtype).eps)


@each_half
def test_sums_over_many_entries_in_half_precision(variant, dtype):
    x, mask = torch.ones(9, 500, dtype=dtype), torch.ones(9, 500, dtype=torch.bool)
    close(variant(kernels.masked_mean)(x, mask), 1.0)
    close(variant(kernels.value_loss)(x, 3 * x, mask), 4.0)
    fields = dict.fromkeys(("advantage", "entropy", "value", "value_target"), x)
    fields |= {"log_prob": 0 * x, "old_log_prob": 0 * x, "mask": mask}
    _, logs = variant(kernels.ppo_loss)(**fields, clip_coef=0.2, vf_coef=0.5, ent_coef=0.1)
    assert logs["count"] == 4500  # bfloat16 has 4496 and 4512
    assert all(value.dtype in (torch.float32, torch.float64) for value in logs.values()), LOGS
    close(variant(kernels.standardize)(x, mask, eps=1e-8), torch.zeros(9, 500), tol=0.0)


@each_half
def test_a_ratio_that_overflows_in_half_precision(dtype):
    log_prob = torch.tensor([100.0, 50.0, 0.0], dtype=dtype).requires_grad_()
    zeros, mask = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=torch.bool)
    loss, _ = kernels.clipped_surrogate(
        log_prob, zeros, torch.tensor([1.0, -1.0, 0.0], dtype=dtype), mask, clip_coef=0.2
    )
    (grad,) = torch.autograd.grad(loss, log_prob)
    assert loss.dtype == grad.dtype == dtype
    assert loss.isfinite() and loss > 10.0 and grad.tolist() == [0.0, 0.0, 0.0]


ESTIMATORS = ["discounted_returns", "n_step_returns", "td_lambda_returns", "gae", "upgo_returns", "vtrace"]


@pytest.mark.parametrize("reward_dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("value_dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_dtype_does_not_depend_on_a_recorded_gradient(name, value_dtype, reward_dtype):
    args, kwargs = CALLS[name](3)
    at = 2 if name == "vtrace" else 0
    floats = [x.to(reward_dtype if i == at else value_dtype) for i, x in enumerate(args[:-2])]
    recorded = [x.clone().requires_grad_() if x.is_floating_point() else x for x in floats]
    plain, traced = (tensors_of(kernel(name)(*xs, *args[-2:], **kwargs)) for xs in (floats, recorded))
    for a, b in zip(plain, traced, strict=True):
        assert a.dtype == b.dtype == (reward_dtype if reward_dtype.is_floating_point else value_dtype)
        assert torch.equal(a, b.detach())


def test_a_float64_gamma_does_not_widen(variant):
    args, kwargs = CALLS["gae"](3)
    out = variant(kernels.gae)(*args, **{name: value.double() for name, value in kwargs.items()})
    assert out.advantage.dtype == (torch.float64 if variant.name == "double" else torch.float32)


@pytest.mark.parametrize("name", ["normalize", "scale"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool], ids=str)
def test_integers_are_normalized_to_floats(variant, name, dtype):
    # Samples 0 and 4: mean 2, variance 4. The 1 is -1/2 standardised and 1/2 scaled.
    moments = kernels.moments_update(kernels.moments_init(()), torch.tensor([0.0, 4.0]), torch.tensor([True, True]))
    out = variant(getattr(kernels, name))(torch.tensor([1, 0]).to(dtype), moments, eps=0.0, clip=10.0)
    assert out.dtype == torch.float32
    close(out, [-0.5, -1.0] if name == "normalize" else [0.5, 0.0])


@each_half
def test_noise_follows_the_dtype(dtype):
    """A spread of one bit is noise in each dtype, one of many bits is not."""
    one, mask = torch.ones(4, dtype=dtype), torch.ones(4, dtype=torch.bool)
    sides = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    for bits, flat in ((0.5, True), (4.0, False)):
        score = (one.double() + bits * torch.finfo(dtype).eps * sides).to(dtype)
        for out in (
            kernels.group_advantages(score, mask, group_size=4, eps=0.0),
            kernels.standardize(score, mask, eps=0.0),
            kernels.explained_variance(score, score, mask),
        ):
            assert out.any() != flat
    fine = 1.0 + 1e-8 * sides.double()
    close(kernels.group_advantages(fine, mask, group_size=4, eps=0.0), sides, tol=1e-4)
