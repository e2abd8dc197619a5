"""Losses against rlax, TorchRL and the formulas of CleanRL and Stable-Baselines3, values and gradients, in float32.

Tolerance 1e-6: sums of at most 64 terms of size 1, each rounded by 6e-8, divided by their count.
"""

import numpy as np
import pytest
import torch
from support.checks import close
from torch.nn import functional

from ecrl.kernels import clipped_surrogate, ppo_loss, ppo_loss_clipped_value, standardize, value_loss

pytestmark = pytest.mark.ref
CLIP, VF, ENT = 0.2, 0.5, 0.01
YES = torch.ones(64, dtype=torch.bool)
LIVE = ("log_prob", "entropy", "value")


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    b = {k: torch.randn(64, generator=g) for k in ("advantage", "value", "value_target", "old_value", "entropy")}
    return b | {k: 0.3 * torch.randn(64, generator=g) for k in ("log_prob", "old_log_prob")}


def value_and_gradients(loss, b):
    leaves = {k: b[k].clone().requires_grad_() for k in LIVE}
    out = loss(b | leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def same(actual, expected, seeds=3):
    for seed in range(seeds):
        b = batch(seed)
        for a, e in zip(value_and_gradients(actual, b), value_and_gradients(expected, b), strict=True):
            close(a, e, tol=1e-6)


def our_ppo(b, vf_coef=VF, advantage=None):
    advantage = b["advantage"] if advantage is None else advantage
    fields = (b["log_prob"], b["old_log_prob"], advantage, b["entropy"], b["value"], b["value_target"], YES)
    return ppo_loss(*fields, clip_coef=CLIP, vf_coef=vf_coef, ent_coef=ENT)


def test_rlax_clipped_surrogate():
    rlax, jax = pytest.importorskip("rlax"), pytest.importorskip("jax")
    for seed in range(3):
        b = batch(seed)
        log_prob = b["log_prob"].requires_grad_()
        loss, _ = clipped_surrogate(log_prob, b["old_log_prob"], b["advantage"], YES, clip_coef=CLIP)
        old, advantage = b["old_log_prob"].numpy(), b["advantage"].numpy()

        def rlax_loss(x, old=old, advantage=advantage):
            return rlax.clipped_surrogate_pg_loss(jax.numpy.exp(x - old), advantage, CLIP)

        expected, gradient = jax.value_and_grad(rlax_loss)(log_prob.detach().numpy())
        close(loss.detach(), float(expected), tol=1e-6)
        close(torch.autograd.grad(loss, log_prob)[0], torch.from_numpy(np.array(gradient)), tol=1e-6)


def cleanrl(b, clip_vloss):
    """CleanRL's ppo.py, its lines in its order; its value loss carries a factor 1/2."""
    logratio = b["log_prob"] - b["old_log_prob"]
    ratio = logratio.exp()
    pg_loss1 = -b["advantage"] * ratio
    pg_loss2 = -b["advantage"] * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    unclipped = (b["value"] - b["value_target"]) ** 2
    if clip_vloss:
        v_clipped = b["old_value"] + torch.clamp(b["value"] - b["old_value"], -CLIP, CLIP)
        v_loss = 0.5 * torch.max(unclipped, (v_clipped - b["value_target"]) ** 2).mean()
    else:
        v_loss = 0.5 * unclipped.mean()
    return pg_loss - ENT * b["entropy"].mean() + v_loss * VF


def test_cleanrl():
    same(lambda b: our_ppo(b, vf_coef=VF / 2)[0], lambda b: cleanrl(b, clip_vloss=False))


def test_cleanrl_with_clipped_values():
    def ecrl_loss(b):
        fields = (b["log_prob"], b["old_log_prob"], b["advantage"], b["entropy"])
        values = (b["value"], b["old_value"], b["value_target"])
        return ppo_loss_clipped_value(*fields, *values, YES, clip_coef=CLIP, vf_coef=VF / 2, ent_coef=ENT)[0]

    same(ecrl_loss, lambda b: cleanrl(b, clip_vloss=True))


def test_cleanrl_logs():
    b = batch()
    logratio = b["log_prob"] - b["old_log_prob"]
    ratio, logs = logratio.exp(), our_ppo(b)[1]
    close(logs["approx_kl"], ((ratio - 1) - logratio).mean(), tol=1e-6)
    close(logs["clip_frac"], ((ratio - 1.0).abs() > CLIP).float().mean(), tol=1e-6)
    y_pred, y_true = b["value"].double().numpy(), b["value_target"].double().numpy()
    close(logs["explained_variance"], 1 - np.var(y_true - y_pred) / np.var(y_true), tol=1e-5)


def stable_baselines3(b):
    """The lines of its PPO.train without value clipping; its value loss has no factor 1/2, its entropy a minus sign."""
    advantages = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-8)
    ratio = torch.exp(b["log_prob"] - b["old_log_prob"])
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    policy_loss = -torch.min(policy_loss_1, policy_loss_2).mean()
    entropy_loss = -torch.mean(b["entropy"])
    return policy_loss + ENT * entropy_loss + VF * functional.mse_loss(b["value_target"], b["value"])


def test_stable_baselines3():
    # It adds 1e-8 to a std near 1 where ecrl takes the larger of the two: no difference in float32.
    same(lambda b: our_ppo(b, advantage=standardize(b["advantage"], YES, eps=1e-8))[0], stable_baselines3)


def test_stable_baselines3_explained_variance():
    utils = pytest.importorskip("stable_baselines3.common.utils")
    b = batch()
    expected = utils.explained_variance(b["value"].numpy(), b["value_target"].numpy())
    close(our_ppo(b)[1]["explained_variance"], float(expected), tol=1e-5)  # a ratio of two float32 sums


def test_torchrl_value_loss():
    objectives = pytest.importorskip("torchrl.objectives.utils")
    b = batch()
    expected = objectives.distance_loss(b["value"], b["value_target"], "l2").mean()
    close(value_loss(b["value"], b["value_target"], YES), expected, tol=1e-6)
