"""GRPO and the losses of sequences against TRL's trainer code; float64, to 1e-6.

The code runs on a fake trainer with the attributes that it reads. TRL has one advantage per completion. For
`grpo_loss`, a completion is an episode and a token is a step.
"""

import inspect
import re
import warnings
from collections import defaultdict
from math import inf, sqrt
from types import SimpleNamespace

import pytest
import torch
from support.checks import close
from tensordict import TensorDict

from ecrl.kernels import (
    cispo_loss,
    clipped_surrogate_asymmetric,
    fixed_length_mean,
    group_advantages,
    group_centered,
    grpo_advantages,
    grpo_loss,
    gspo_loss,
    kl_k3,
    masked_sequence_importance,
    sapo_loss,
    sequence_log_ratio,
    sequence_mean,
    token_mean,
    truncated_importance,
    truncated_sequence_importance,
    vespo_loss,
)

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


def trls_batch(trainer, rewards, group_size, lengths=None, sampler_log_prob=None, **settings):
    """Return the batch of `GRPOTrainer._generate_and_score_completions` for given completions and `rewards` `[N]`.

    The completions have one token, unless `lengths` gives their lengths. `settings` replaces attributes of the trainer.
    """
    n = len(rewards)
    ones, completions = [[1]] * n, [[1] * length for length in lengths or [1] * n]
    attributes = dict(
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
        _generate=lambda prompts: (ones, completions, None, ["x"] * n, sampler_log_prob, {}, None, None),
        _calculate_rewards=lambda *ignored: rewards.unsqueeze(1),
    )
    fake_trainer = SimpleNamespace(**attributes | settings)
    return trainer._generate_and_score_completions(fake_trainer, [{"prompt": "x"}] * n)


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_group_normalisation(trainer, group_size):
    """TRL divides by the sample deviation, ecrl by the population's: a factor of sqrt(G / (G - 1)), also in eps."""
    draw = torch.Generator().manual_seed(group_size)
    rewards = 3.0 * torch.randn(48, generator=draw, dtype=F64) + 5.0
    ratio = sqrt(group_size / (group_size - 1))
    expected = ratio * trls_batch(trainer, rewards, group_size)["advantages"]
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


@pytest.mark.parametrize("group_size", [2, 4, 16])
def test_group_centering(trainer, group_size):
    rewards = torch.randn(48, generator=torch.Generator().manual_seed(group_size), dtype=F64)
    expected = trls_batch(trainer, rewards, group_size, scale_rewards="none")["advantages"]
    close(group_centered(rewards, torch.ones(48, dtype=torch.bool), group_size=group_size), expected, tol=1e-6)


LOW, HIGH, LONGEST = 0.2, 0.28, 12


def trls_loss(trainer, batch, loss_type, level="token", *, kl_coef=0.0, ent_coef=0.0, weight=None, **settings):
    """Return the result and the metrics of `GRPOTrainer._compute_loss` for given log-probabilities.

    `settings` replaces attributes of the trainer and of its arguments.
    """
    zeros = torch.zeros(batch["mask"].shape, dtype=torch.int64)
    arguments = {
        "use_bias_correction_kl": False,
        "delta": None,
        "steps_per_generation": 1,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    attributes = {
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": level,
        "beta": kl_coef,
        "loss_type": loss_type,
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "max_completion_length": LONGEST,
        "use_vllm": weight is not None,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": True,
        "use_adaptive_entropy": False,
        "entropy_coef": ent_coef,
        "get_gamma_weights": trainer.get_gamma_weights,
        "_get_per_token_logps_and_entropies": lambda *a, **k: (batch["log_prob"], batch["entropy"], None),
    }
    for given in (arguments, attributes):
        given |= {name: settings.pop(name) for name in list(settings) if name in given}
    assert not settings
    metrics = defaultdict(list)
    fake_trainer = SimpleNamespace(args=SimpleNamespace(**arguments), _metrics={"train": metrics}, **attributes)
    inputs = {
        "prompt_ids": zeros[:, :1],
        "prompt_mask": zeros[:, :1] + 1,
        "completion_ids": zeros,
        "completion_mask": batch["mask"].to(F64),
        "advantages": batch["advantage"],
        "old_per_token_logps": batch["old_log_prob"],
        "ref_per_token_logps": batch["ref_log_prob"],
        "num_items_in_batch": batch["mask"].sum(),
    }
    if weight is not None:
        inputs["importance_sampling_ratio"] = weight
    loss = trainer._compute_loss(fake_trainer, None, inputs)
    return loss, {name: values[-1] for name, values in metrics.items()}


def random_batch(seed, spread=0.3):
    draw = torch.Generator().manual_seed(seed)
    shape = (6, 9)
    names = ("log_prob", "entropy", "old_log_prob", "ref_log_prob")
    batch = {name: spread * torch.randn(shape, generator=draw, dtype=F64) for name in names}
    batch |= {"advantage": torch.randn(6, generator=draw, dtype=F64), "mask": torch.rand(shape, generator=draw) < 0.7}
    return batch | {name: batch[name].requires_grad_() for name in ("log_prob", "entropy")}


@pytest.mark.parametrize("seed", range(3))
def test_clipped_loss_with_kl(trainer, seed):
    batch, numbers = random_batch(seed), {"kl_coef": 0.3, "ent_coef": 0.05}
    live = [batch["log_prob"], batch["entropy"]]
    # Loss type bnpo is the mean over unmasked tokens.
    expected, expected_logs = trls_loss(trainer, batch, "bnpo", epsilon_high=LOW, **numbers)
    names = ("log_prob", "old_log_prob", "ref_log_prob", "advantage", "entropy", "mask")
    actual, logs = grpo_loss(**{name: batch[name] for name in names}, clip_coef=LOW, **numbers)
    close(actual, expected, tol=1e-6)
    for a, b in zip(torch.autograd.grad(actual, live), torch.autograd.grad(expected, live), strict=True):
        close(a, b, tol=1e-6)
    close(logs["kl_ref"], expected_logs["kl"], tol=1e-6)
    close(logs["entropy"], expected_logs["entropy"], tol=1e-6)
    assert logs["clip_frac"] > 0.2


CLIPS = {"clip_low": LOW, "clip_high": HIGH}
CAP = 1.5
GATES = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}


def surrogate(*batch):
    return clipped_surrogate_asymmetric(*batch, **CLIPS, dual_clip=inf)


def dual(*batch):
    return clipped_surrogate_asymmetric(*batch, **CLIPS, dual_clip=CAP)


def gspo(*batch):
    return gspo_loss(*batch, **CLIPS)


def cispo(*batch):
    return cispo_loss(*batch, clip_low=1.0, clip_high=CAP - 1.0)


def sequence_cispo(log_prob, old_log_prob, advantage, mask):
    ratio = sequence_log_ratio(log_prob, old_log_prob, mask).detach()
    return cispo(log_prob, log_prob.detach() - ratio, advantage, mask)


def sapo(*batch):
    return sapo_loss(*batch, tau_positive=1.0, tau_negative=1.05)


def sequence_sapo(log_prob, old_log_prob, advantage, mask):
    return sapo(sequence_log_ratio(log_prob, old_log_prob, mask), torch.zeros_like(log_prob), advantage, mask)


def vespo(*batch):
    return vespo_loss(*batch, **GATES)


def fixed(x, mask):
    return fixed_length_mean(x, mask, length=LONGEST)


def sum_mean(x, mask):
    return fixed_length_mean(x, mask, length=1)


TRLS = [  # the loss type, the level of the ratio, other settings, and the loss and the mean here
    ("grpo", "token", {}, surrogate, sequence_mean),
    ("bnpo", "token", {}, surrogate, token_mean),
    ("dapo", "token", {}, surrogate, token_mean),
    ("dr_grpo", "token", {}, surrogate, fixed),
    ("luspo", "token", {}, surrogate, sum_mean),
    ("cispo", "token", {"epsilon_high": CAP}, cispo, token_mean),
    ("sapo", "token", {}, sapo, sequence_mean),
    ("vespo", "token", {}, vespo, token_mean),
    ("dapo", "token", {"delta": CAP}, dual, token_mean),
    ("grpo", "sequence", {}, gspo, sequence_mean),
    ("bnpo", "sequence", {}, gspo, token_mean),
    ("dapo", "sequence", {}, gspo, token_mean),
    ("dr_grpo", "sequence", {}, gspo, fixed),
    ("luspo", "sequence", {}, gspo, sum_mean),
    ("cispo", "sequence", {"epsilon_high": CAP}, sequence_cispo, token_mean),
    ("sapo", "sequence", {}, sequence_sapo, sequence_mean),
    ("vespo", "sequence", {}, vespo, token_mean),
]


def check_equal(actual, expected, leaf):
    close(actual, expected, tol=1e-6)
    close(torch.autograd.grad(actual, leaf)[0], torch.autograd.grad(expected, leaf)[0], tol=1e-6)


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(("loss_type", "level", "settings", "loss", "mean"), TRLS)
def test_losses_of_sequences(trainer, loss_type, level, settings, loss, mean, kl_coef):
    for seed in range(3):
        batch = random_batch(seed, 0.6)
        expected, logs = trls_loss(trainer, batch, loss_type, level, kl_coef=kl_coef, **settings)
        losses, _ = loss(*(batch[name] for name in ("log_prob", "old_log_prob", "advantage", "mask")))
        penalty = kl_k3(*(batch[name].masked_fill(~batch["mask"], 0.0) for name in ("log_prob", "ref_log_prob")))
        check_equal(mean(losses + kl_coef * penalty, batch["mask"]), expected, batch["log_prob"])
        assert loss_type in ("cispo", "sapo", "vespo") or 0.1 < logs["clip_ratio/region_mean"] < 0.9


def test_every_loss_type_and_level_is_covered(trainer):
    source = inspect.getsource(trainer._compute_loss)
    listed = {
        name for part in re.findall(r"loss_type (?:==|in) (\S.*):", source) for name in re.findall(r'"(\w+)"', part)
    }
    assert {loss_type for loss_type, *_ in TRLS} == listed
    for loss_type in listed:
        assert {level for name, level, *_ in TRLS if name == loss_type} == {"token", "sequence"}


@pytest.mark.parametrize(("loss_type", "mean"), [("grpo", sequence_mean), ("dr_grpo", fixed)])
def test_an_empty_sequence_counts_in_trl_only(trainer, loss_type, mean):
    """TRL divides by all six sequences, and ecrl by the five with an unmasked token."""
    batch = random_batch(0)
    batch["mask"][2] = False
    expected, _ = trls_loss(trainer, batch, loss_type)
    losses, _ = surrogate(*(batch[name] for name in ("log_prob", "old_log_prob", "advantage", "mask")))
    check_equal(mean(losses, batch["mask"]) * 5 / 6, expected, batch["log_prob"])


@pytest.mark.parametrize(
    ("kernel", "mode"),
    [
        (truncated_importance, "token_truncate"),
        (truncated_sequence_importance, "sequence_truncate"),
        (masked_sequence_importance, "sequence_mask"),
    ],
)
def test_importance_weights(trainer, kernel, mode):
    batch, lengths = random_batch(1), [9, 7, 1, 3, 5, 2]
    old, sampler = (batch[name].detach().float().double() for name in ("old_log_prob", "ref_log_prob"))
    batch["mask"] = mask = torch.arange(9) < torch.tensor(lengths).unsqueeze(1)
    weight = trls_batch(
        trainer,
        torch.zeros(6, dtype=F64),
        2,
        lengths,
        [row[:length].tolist() for row, length in zip(sampler, lengths, strict=True)],
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=1.2,
        _get_per_token_logps_and_entropies=lambda *a, **k: (old, None, None),
    )["importance_sampling_ratio"]
    actual = kernel(old, sampler, mask, cap=1.2)
    close(actual, weight.expand(6, 9).masked_fill(~mask, 0.0), tol=1e-6)
    assert (actual == (0.0 if mode == "sequence_mask" else 1.2))[mask].any()
    expected, _ = trls_loss(trainer, batch, "dapo", weight=weight)
    losses, _ = surrogate(*(batch[name] for name in ("log_prob", "old_log_prob", "advantage", "mask")))
    check_equal(token_mean(actual * losses, mask), expected, batch["log_prob"])
