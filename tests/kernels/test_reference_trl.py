"""GRPO against TRL's own trainer code, run on a fake trainer with the attributes that it reads; float64, to 1e-6.

TRL has one advantage per completion. Here, a completion is an episode and a token is a step.
"""

import warnings
from collections import defaultdict
from math import sqrt
from types import SimpleNamespace

import pytest
import torch
from support.checks import close
from tensordict import TensorDict

from ecrl.kernels import group_advantages, grpo_advantages, grpo_loss

pytestmark = [pytest.mark.ref, pytest.mark.slow]  # importing trl takes 13 s
F64 = torch.float64
EPS = 1e-4  # what TRL adds to its standard deviation


@pytest.fixture(scope="module")
def trainer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports warn of deprecations
        return pytest.importorskip("trl").GRPOTrainer


class Accelerator:
    """Accelerator of one process."""

    device, process_index, num_processes, sync_gradients = torch.device("cpu"), 0, 1, True

    def gather(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def trls_advantages(trainer, rewards, group_size):
    """`GRPOTrainer._generate_and_score_completions` where `_generate` gives one-token texts and `rewards` `[N]`."""
    n = len(rewards)
    ones = [[1]] * n
    fake_trainer = SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=n,
            gradient_accumulation_steps=1,
            steps_per_generation=1,
            gradient_checkpointing_kwargs=None,
        ),
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        use_vllm=False,
        beta=0.0,
        num_generations=group_size,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        reward_weights=torch.ones(1, dtype=F64),
        reward_func_names=["return"],
        reward_funcs=[None],
        log_multimodal=False,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        _generate=lambda prompts: (ones, ones, None, ["x"] * n, None, {}, None, None),
        _calculate_rewards=lambda *ignored: rewards.unsqueeze(1),
    )
    return trainer._generate_and_score_completions(fake_trainer, [{"prompt": "x"}] * n)["advantages"]


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_group_normalisation(trainer, group_size):
    """TRL divides by the sample deviation, ecrl by the population's: a factor of sqrt(G / (G - 1)), also in eps."""
    draw = torch.Generator().manual_seed(group_size)
    rewards = 3.0 * torch.randn(48, generator=draw, dtype=F64) + 5.0
    ratio = sqrt(group_size / (group_size - 1))
    expected = ratio * trls_advantages(trainer, rewards, group_size)
    settings = {"group_size": group_size, "eps": EPS / ratio}
    close(group_advantages(rewards, torch.ones(48, dtype=torch.bool), **settings), expected, tol=1e-6)

    steps = torch.randn(48, 4, generator=draw, dtype=F64)  # the last slot is padding
    steps[:, 2] += rewards - steps[:, :3].sum(1)  # three steps of an episode that pays `rewards`
    end = torch.zeros(48, 4, dtype=torch.bool)
    end[:, 2] = True
    rollout = TensorDict({"reward": steps, "terminated": end, "truncated": end & ~end, "done": end}, [48, 4])
    advantages, mask = grpo_advantages(rollout, gamma=1.0, **settings)
    assert mask.all()
    close(advantages[:, 0], expected, tol=1e-6)


def trls_loss(trainer, batch, clip_coef, kl_coef, ent_coef):
    """`GRPOTrainer._compute_loss` for given log-probabilities; loss_type bnpo is the mean over counted tokens."""
    zeros = torch.zeros(batch["mask"].shape, dtype=torch.int64)
    fake_trainer = SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=kl_coef,
        loss_type="bnpo",
        epsilon_low=clip_coef,
        epsilon_high=clip_coef,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=True,
        use_adaptive_entropy=False,
        entropy_coef=ent_coef,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (batch["log_prob"], batch["entropy"], None),
    )
    inputs = {
        "prompt_ids": zeros[:, :1],
        "prompt_mask": zeros[:, :1] + 1,
        "completion_ids": zeros,
        "completion_mask": batch["mask"].to(F64),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["old_log_prob"],
        "ref_per_token_logps": batch["ref_log_prob"],
    }
    loss = trainer._compute_loss(fake_trainer, None, inputs)
    return loss, {name: values[-1] for name, values in fake_trainer._metrics["train"].items()}


@pytest.mark.parametrize("seed", range(3))
def test_clipped_loss_with_kl(trainer, seed):
    draw = torch.Generator().manual_seed(seed)
    shape, numbers = (6, 9), {"clip_coef": 0.2, "kl_coef": 0.3, "ent_coef": 0.05}
    batch = {name: 0.3 * torch.randn(shape, generator=draw, dtype=F64) for name in ("old_log_prob", "ref_log_prob")}
    batch |= {"advantage": torch.randn(6, generator=draw, dtype=F64), "mask": torch.rand(shape, generator=draw) < 0.7}
    live = [0.3 * torch.randn(shape, generator=draw, dtype=F64) for _ in range(2)]
    batch |= {name: x.requires_grad_() for name, x in zip(("log_prob", "entropy"), live, strict=True)}
    expected, expected_logs = trls_loss(trainer, batch, **numbers)
    names = ("log_prob", "old_log_prob", "ref_log_prob", "advantage", "entropy", "mask")
    actual, logs = grpo_loss(*(batch[name] for name in names), **numbers)
    close(actual, expected, tol=1e-6)
    for a, b in zip(torch.autograd.grad(actual, live), torch.autograd.grad(expected, live), strict=True):
        close(a, b, tol=1e-6)
    close(logs["kl_ref"], expected_logs["kl"], tol=1e-6)
    close(logs["entropy"], expected_logs["entropy"], tol=1e-6)
    assert logs["clip_frac"] > 0.2
