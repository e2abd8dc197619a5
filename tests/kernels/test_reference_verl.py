"""Losses, means and advantages of sequences against verl's `core_algos`, in float64, to 1e-6.

verl's dependencies conflict with ecrl's extras. These tests import verl's files without its `__init__` modules, so
`pip install --no-deps verl` is enough.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from math import inf
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.checks import close

from ecrl.kernels import (
    cispo_loss,
    clipped_surrogate_asymmetric,
    fixed_length_mean,
    group_centered,
    gspo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_with_k2_gradient,
    leave_one_out,
    sapo_loss,
    sequence_mean,
    token_mean,
    truncated_importance,
    truncated_sequence_importance,
    whiten,
)

pytestmark = [pytest.mark.ref, pytest.mark.slow]
F64 = torch.float64
NAMES = {  # what verl's files import from packages that are not run or not installed
    "omegaconf": ("DictConfig",),
    "transformers": ("PreTrainedTokenizer",),
    "verl": (),
    "verl.protocol": ("DataProto",),
    "verl.trainer": (),
    "verl.trainer.config": ("AlgoConfig",),
    "verl.trainer.config.algorithm": ("RolloutCorrectionConfig",),
    "verl.trainer.ppo": (),
    "verl.utils": ("as_torch_index", "group_mean_std"),
    "verl.utils.device": ("get_device_name", "get_torch_device"),
    "verl.workers": (),
    "verl.workers.config": ("ActorConfig",),
    "verl.workers.config.actor": ("PolicyLossConfig",),
}
LOW, HIGH = 0.2, 0.28
CLIPS = {"clip_low": LOW, "clip_high": HIGH}
MEANS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": sequence_mean,
    "seq-mean-token-sum": lambda x, mask: fixed_length_mean(x, mask, length=1),
    "seq-mean-token-sum-norm": lambda x, mask: fixed_length_mean(x, mask, length=9),
}


class ActorConfig(SimpleNamespace):
    """Settings of verl's actor."""

    def get(self, name, default):
        return getattr(self, name, default)


@pytest.fixture(scope="module")
def verl() -> Iterator[Any]:
    """Import `verl.trainer.ppo.core_algos` and `rollout_corr_helper` with empty modules in place of their packages."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("verl is not installed")
    (folder,) = spec.submodule_search_locations
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
            patch.delitem(sys.modules, name)
        for name, members in NAMES.items():
            module: Any = ModuleType(name)
            module.__path__ = [folder + name.removeprefix("verl").replace(".", "/")]
            for member in members:
                setattr(module, member, ActorConfig if member == "ActorConfig" else type(member, (), {}))
            patch.setitem(sys.modules, name, module)
        names = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper")
        core, correction = (importlib.import_module(name) for name in names)
        yield SimpleNamespace(core=core, correction=correction)
        for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
            del sys.modules[name]


def random_batch(seed, spread=0.5):
    """Return log_prob, old_log_prob, an advantage per token and a mask with an empty sequence, in float64."""
    draw = torch.Generator().manual_seed(seed)
    log_prob, old, advantage = (spread * torch.randn(6, 9, generator=draw, dtype=F64) for _ in range(3))
    mask = torch.rand(6, 9, generator=draw) < 0.7
    mask[2] = False
    return log_prob.requires_grad_(), old, advantage, mask


def check_equal(actual, expected, leaf):
    close(actual, expected, tol=1e-6)
    close(torch.autograd.grad(actual, leaf)[0], torch.autograd.grad(expected, leaf)[0], tol=1e-6)


LOSSES = {
    "vanilla": lambda *batch: clipped_surrogate_asymmetric(*batch, **CLIPS, dual_clip=1.5),
    "gspo": lambda *batch: gspo_loss(*batch, **CLIPS),
    "cispo": lambda *batch: cispo_loss(*batch, **CLIPS),
    "sapo": lambda *batch: sapo_loss(*batch, tau_positive=1.0, tau_negative=1.05),
}


CASES = [(name, mode) for name in ("vanilla", "gspo", "cispo") for mode in MEANS]
CASES += [("sapo", "seq-mean-token-mean")]  # verl has one mean for SAPO


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_losses(verl, name, mode):
    config = ActorConfig(
        clip_ratio=LOW,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=1.5,
        tau_pos=1.0,
        tau_neg=1.05,
        global_batch_info={},
    )
    for seed in range(3):
        log_prob, old, advantage, mask = random_batch(seed)
        loss = verl.core.get_policy_loss_fn(name)
        expected, _ = loss(old, log_prob, advantage, mask.to(F64), loss_agg_mode=mode, config=config)
        losses, _ = LOSSES[name](log_prob, old, advantage, mask)
        check_equal(MEANS[mode](losses, mask), expected, log_prob)


def test_losses_without_a_dual_clip(verl):
    config = ActorConfig(clip_ratio=LOW, clip_ratio_low=LOW, clip_ratio_high=HIGH, clip_ratio_c=inf)
    config.global_batch_info = {}
    log_prob, old, advantage, mask = random_batch(0)
    expected, _ = verl.core.compute_policy_loss_vanilla(old, log_prob, advantage, mask.to(F64), "token-mean", config)
    losses, _ = clipped_surrogate_asymmetric(log_prob, old, advantage, mask, **CLIPS, dual_clip=inf)
    check_equal(token_mean(losses, mask), expected, log_prob)


@pytest.mark.parametrize(
    ("kernel", "name"), [(kl_k1, "k1"), (kl_k2, "k2"), (kl_k3, "k3"), (kl_k3_with_k2_gradient, "k3+")]
)
def test_kl_estimates(verl, kernel, name):
    log_prob, ref, _, _ = random_batch(0)
    check_equal(kernel(log_prob, ref).sum(), verl.core.kl_penalty(log_prob, ref, name).sum(), log_prob)


def scores(seed):
    """Return a score per sequence, the scores as rewards of the last token, and a mask."""
    draw = torch.Generator().manual_seed(seed)
    score, lengths = torch.randn(12, generator=draw, dtype=F64), torch.randint(1, 8, (12,), generator=draw)
    mask, rewards = torch.arange(7) < lengths.unsqueeze(1), torch.zeros(12, 7, dtype=F64)
    rewards[torch.arange(12), lengths - 1] = score
    return score, rewards, mask


GROUPS = [i // 4 for i in range(12)]
YES = torch.ones(12, dtype=torch.bool)


@pytest.mark.parametrize("seed", range(3))
def test_leave_one_out(verl, seed):
    score, rewards, mask = scores(seed)
    expected, _ = verl.core.compute_rloo_outcome_advantage(rewards, mask.to(F64), GROUPS)
    close(leave_one_out(score, YES, group_size=4).unsqueeze(1) * mask, expected, tol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_group_centering(verl, seed):
    score, rewards, mask = scores(seed)
    expected, _ = verl.core.compute_grpo_outcome_advantage(rewards, mask.to(F64), GROUPS, norm_adv_by_std_in_grpo=False)
    close(group_centered(score, YES, group_size=4).unsqueeze(1) * mask, expected, tol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_whitening(verl, seed):
    score, rewards, mask = scores(seed)
    expected, _ = verl.core.compute_reinforce_plus_plus_outcome_advantage(
        rewards.clone(), mask.to(F64), SimpleNamespace(gamma=1.0)
    )
    close(whiten(score, mask, eps=1e-8), expected, tol=1e-6)
    centred = group_centered(score, YES, group_size=4)
    expected, _ = verl.core.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards.clone(), mask.to(F64), GROUPS
    )
    close(whiten(centred, mask, eps=1e-8), expected, tol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "level"), [(truncated_importance, "token"), (truncated_sequence_importance, "sequence")]
)
def test_importance_weights(verl, kernel, level):
    log_prob, sampler, _, mask = random_batch(0)
    weights, _ = verl.correction.compute_rollout_correction_weights(
        (log_prob - sampler).detach(), mask.to(F64), rollout_is=level, rollout_is_threshold=1.2
    )
    close(kernel(log_prob, sampler, mask, cap=1.2), weights, tol=1e-6)
