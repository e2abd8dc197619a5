"""Losses against rlax, TorchRL and the formulas of CleanRL and Stable-Baselines3, values and gradients, in float32.

Tolerance 1e-6: sums of at most 64 terms of size 1, each rounded by 6e-8, divided by their count.
"""

import numpy as np
import pytest
import torch
from support.checks import close
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.nn import functional

from ecrl.kernels import (
    a2c_loss,
    adaptive_kl_coef,
    categorical_entropy,
    categorical_kl,
    categorical_log_prob,
    clipped_surrogate,
    huber_value_loss,
    policy_gradient_loss,
    ppo_loss,
    ppo_loss_clipped_value,
    ppo_loss_kl_penalty,
    standardize,
    value_loss,
)

pytestmark = pytest.mark.ref
CLIP, VF, ENT = 0.2, 0.5, 0.01
YES = torch.ones(64, dtype=torch.bool)
FIELDS = ("log_prob", "old_log_prob", "advantage", "entropy", "value", "value_target")
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
    fields = {name: b[name] for name in FIELDS} | {"advantage": advantage}
    return ppo_loss(**fields, clip_coef=CLIP, vf_coef=vf_coef, ent_coef=ENT)


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


@pytest.mark.filterwarnings("ignore:Rlax softmax will be deprecated")
def test_rlax_policy_gradient_loss():
    rlax, jax = pytest.importorskip("rlax"), pytest.importorskip("jax")
    for seed in range(3):
        g, b = torch.Generator().manual_seed(seed), batch(seed)
        logits, action = torch.randn(64, 5, generator=g).requires_grad_(), torch.randint(5, (64,), generator=g)
        mask = torch.rand(64, generator=g) < 0.7
        loss, _ = policy_gradient_loss(categorical_log_prob(logits, action), b["advantage"], mask)
        weight = (mask * 64 / mask.sum()).numpy()  # rlax weights the entries, and divides by their number

        def rlax_loss(x, action=action.int().numpy(), advantage=b["advantage"].numpy(), weight=weight):
            return rlax.policy_gradient_loss(x, action, advantage, weight)

        expected, gradient = jax.value_and_grad(rlax_loss)(logits.detach().numpy())
        close(loss.detach(), float(expected), tol=1e-6)
        close(torch.autograd.grad(loss, logits)[0], torch.from_numpy(np.array(gradient)), tol=1e-6)


@pytest.mark.parametrize("delta", [0.5, 1.0, 3.0])
def test_rlax_and_torch_huber_losses(delta):
    rlax, b = pytest.importorskip("rlax"), batch()
    loss = huber_value_loss(b["value"], b["value_target"], YES, delta=delta)
    close(loss, float(rlax.huber_loss((b["value"] - b["value_target"]).numpy(), delta).mean()), tol=1e-6)
    close(loss, functional.huber_loss(b["value"], b["value_target"], delta=delta), tol=1e-6)


def stable_baselines3_a2c(b):
    """The lines of its A2C.train."""
    policy_loss = -(b["advantage"] * b["log_prob"]).mean()
    value_loss = functional.mse_loss(b["value_target"], b["value"])
    entropy_loss = -torch.mean(b["entropy"])
    return policy_loss + ENT * entropy_loss + VF * value_loss


def test_stable_baselines3_a2c():
    names = ("log_prob", "advantage", "entropy", "value", "value_target")
    same(lambda b: a2c_loss(**{k: b[k] for k in names}, vf_coef=VF, ent_coef=ENT)[0], stable_baselines3_a2c)


@pytest.mark.parametrize(("step", "expected_beta"), [(0.0, 0.375), (0.05, 0.375), (0.15, 0.75), (0.3, 1.5)])
def test_torchrl_ppo_with_a_kl_penalty(step, expected_beta):
    """The loss, its gradient, and the next weight of the penalty, for policies at several distances."""
    objectives, modules = pytest.importorskip("torchrl.objectives"), pytest.importorskip("torchrl.modules")
    g, b = torch.Generator().manual_seed(7), {k: v.unsqueeze(-1) for k, v in batch().items()}
    policy, critic = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)
    for p in (*policy.parameters(), *critic.parameters()):
        p.data = torch.randn(p.shape, generator=g)
    actor = modules.ProbabilisticActor(
        TensorDictModule(policy, ["observation"], ["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = modules.ValueOperator(critic, in_keys=["observation"])
    settings = {"beta": 0.75, "dtarg": 0.01, "loss_critic_type": "l2", "entropy_coeff": ENT, "critic_coeff": VF}
    # It changes beta in place before the backward pass, so the gradient is compared with a beta that stays.
    constant = objectives.KLPENPPOLoss(actor, value, **settings, increment=1.0, decrement=1.0)
    adaptive = objectives.KLPENPPOLoss(actor, value, **settings, increment=2.0, decrement=0.5)
    obs, action = torch.randn(64, 4, generator=g), torch.randint(3, (64,), generator=g)
    old_logits = policy(obs).detach()
    policy.weight.data += step * torch.randn(3, 4, generator=g)

    logits, now = policy(obs), critic(obs).squeeze(-1)
    fields = {"log_prob": categorical_log_prob(logits, action), "kl": categorical_kl(old_logits, logits)}
    fields |= {"old_log_prob": categorical_log_prob(old_logits, action), "entropy": categorical_entropy(logits)}
    fields |= {name: b[name].squeeze(-1) for name in ("advantage", "value_target")}
    loss, logs = ppo_loss_kl_penalty(**fields, value=now, kl_coef=0.75, vf_coef=VF, ent_coef=ENT)

    data = {"observation": obs, "action": action, "logits": old_logits, "action_log_prob": fields["old_log_prob"]}
    data = TensorDict(data | {name: b[name] for name in ("advantage", "value_target")}, [64])
    out = constant(data)
    expected = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
    weights = (policy.weight, critic.weight)
    close(loss, expected, tol=1e-6)
    grads = [torch.autograd.grad(x, weights) for x in (loss, expected)]
    for actual, other in zip(*grads, strict=True):
        close(actual, other, tol=1e-6)
    beta = adaptive_kl_coef(torch.tensor(0.75), logs["kl"], target_kl=0.01, tolerance=1.5, factor=2.0)
    adaptive(data)
    close(beta, adaptive.beta)
    assert float(beta) == expected_beta


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
        fields = {name: b[name] for name in (*FIELDS, "old_value")}
        return ppo_loss_clipped_value(**fields, clip_coef=CLIP, vf_coef=VF / 2, ent_coef=ENT)[0]

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
