"""FastSAC: soft actor-critic for thousands of parallel environments.

The update has four differences from soft actor-critic. The critics predict categorical distributions of the return
(C51). Each critic has its own target, from its own target critic. The actor maximises the mean of the critics' values
instead of the smallest value. Every gradient step also updates the temperature, with the entropy of the next actions.

The defaults are from the authors' code, except for the optimiser and the networks. The authors use AdamW with betas of
0.9 and 0.95 and a weight decay of 0.001, standardised observations, and networks with LayerNorm. To do the same, set
`algorithm.cfg.optimizer`, `policy.normalize_obs`, and `use_layernorm` of both networks. The largest log standard
deviation is 0 in the authors' code, and 2 in ecrl. In ecrl, `target_entropy` and all other entropies refer to actions
scaled to [-1, 1].

Source: Seo et al. 2025, arXiv:2512.01996.
"""

from functools import partial
from math import log
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.algorithms.continuous_actions import (
    DELAYED,
    NO_CARRY,
    SHARED_NUMBERS,
    ActorCriticConfig,
    check_policy,
    critic_settings,
    is_due,
    merged_logs,
    with_targets,
)
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, learn
from ecrl.algorithms.gradient_step import each_minibatch, gradient_step
from ecrl.algorithms.interleaved import REPLAY_KINDS, interleaved, store, take_steps
from ecrl.algorithms.optimizer import Group, GroupSettings, groups_of, learning_state
from ecrl.algorithms.replay_learning import (
    Sampling,
    check_steps,
    noise_keys,
    phase,
    replay_fields,
    sample,
    sampling_choices,
)
from ecrl.algorithms.sac import temperature_loss
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Count, Fraction, Natural, Positive
from ecrl.kernels import Replay
from ecrl.policies import acting_params, fixed_params
from ecrl.policies.core import ReturnDistribution
from ecrl.registry import register_algorithm
from ecrl.types import Logs

GROUPS = {"actor": (("actor",),), "critic": (("critic",),), "temperature": (("log_temperature",),)}
"""Optimiser groups of FastSAC."""


class FastSACConfig(ActorCriticConfig):
    """Hyperparameters of FastSAC. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "squashed_actor_critic", "distribution": "categorical"}

    gamma: Fraction = Field(default=0.97, description="discount per step")
    tau: Fraction = Field(default=0.125, description="weight of the trained critics in an update of the target critics")
    capacity: Count = Field(
        default=1_048_576, description="steps in the replay buffer of a rank, over all environments of the rank"
    )
    batch_size: Count = Field(default=8_192, description="transitions per gradient step, on each rank")
    learning_starts: Natural = Field(
        default=10_240, description="environment steps, over all environments, before the first gradient step"
    )
    gradient_steps: Count = Field(default=8, description="number of gradient steps per update")
    policy_delay: Count = Field(default=4, description="gradient steps of the critics per gradient step of the actor")
    temperature: Positive = Field(default=0.001, description="initial weight of the entropy, in reward units per nat")
    temperature_learning_rate: Positive | None = Field(
        default=None,
        description="step size of the log temperature, before the schedule; the actor's step size if absent",
    )
    target_entropy: float = Field(
        default=0.0, description="entropy towards which the temperature drives the policy, in nats"
    )


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    sampling: Sampling
    actor: Group
    critic: Group
    temperature: Group
    policy_delay: int


def group_settings(cfg: FastSACConfig) -> dict[str, GroupSettings]:
    """Return the optimiser settings that only the critics or only the temperature use, if any."""
    rate = cfg.temperature_learning_rate
    own = {} if rate is None else {"temperature": GroupSettings(learning_rate=rate)}
    return critic_settings(cfg) | own


def init(cfg: FastSACConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser states, hyperparameters, target critics, exploration and an empty replay buffer.

    Raises: ConfigError if the policy, the action space or `capacity` does not suit FastSAC.
    """
    check_policy(run, "fast_sac", needs_log_prob=True, needs_distribution=True)
    check_steps(run, cfg)
    params, own = run.policy.init(rng.fold_in(key, rng.INIT)), group_settings(cfg)
    targets = params.select("critic").clone()
    params = params.set("log_temperature", torch.tensor(log(cfg.temperature), device=key.device))
    numbers = {name: getattr(cfg, name) for name in (*SHARED_NUMBERS, "target_entropy")}
    is_random = torch.zeros(run.static.num_envs, dtype=torch.bool, device=key.device)
    return learning_state(cfg, params, numbers, key.device, groups_of(cfg, GROUPS, own), own) | {
        "target_params": targets,
        "exploration": TensorDict({"random": is_random}, []),
        **replay_fields(cfg, run, key.device),
    }


def target(run: Run, state: TensorDict, batch: TensorDict, noise: Any) -> tuple[Tensor, Tensor]:
    """Return the target distributions of each critic, `[C, B, K]`, and the entropy of the next actions, 0-d in nats.

    soft     = Z_target_c(next_obs, next_action) - temperature * log_prob(next_action)
    target_c = projection of the distribution of reward + discount * soft * not terminated
    """
    fixed, obs, mask = fixed_params(state), batch["next_obs"], batch["mask"]
    params, slow = (acting_params(cast(TensorDict, state[name]), fixed) for name in ("params", "target_params"))
    out = run.policy.act(params, NO_CARRY, obs, noise)[1]
    next_logits = cast(Any, run.policy.q)(slow, obs, out["action"], None)
    wanted = k.soft_categorical_target(
        batch["reward"],
        next_logits,
        out["sample_log_prob"],
        batch["terminated"],
        cast(ReturnDistribution, run.policy.distribution).support(next_logits),
        gamma=batch["discount"],
        temperature=params["log_temperature"].exp(),
    )
    return wanted, -k.masked_mean(out["sample_log_prob"], mask)


def critic_loss(run: Run, params: TensorDict, batch: TensorDict, target: Tensor) -> tuple[Tensor, Logs]:
    """Return the cross-entropy between the targets and the predicted distributions, summed over the critics.

    sum_c(mean(-sum_k(target[c, k] * log(Z_c(obs, action)[k]))))
    """
    logits = cast(Any, run.policy.q)(params, batch["obs"], batch["action"], None)
    mask = batch["mask"].expand(logits.shape[:-1])
    # Each critic has its own target, so the kernel receives one critic with a batch [C, B].
    value, logs = k.categorical_td_loss(logits.unsqueeze(0), target, torch.ones_like(mask, dtype=target.dtype), mask)
    value, q = len(logits) * value, run.policy.q_mean(logits.detach())
    return value, logs | {"q_loss": value.detach(), "q_value": k.masked_mean(q, mask)}


def actor_loss(run: Run, params: TensorDict, batch: TensorDict, noise: Any, temperature: Tensor) -> tuple[Tensor, Logs]:
    """Return the actor's loss, which is small if the policy has a large entropy and its actions have large values.

    mean(temperature * log_prob(action) - mean_c(mean(Z_c(obs, action))))
    """
    out = run.policy.act(params, NO_CARRY, batch["obs"], noise)[1]
    q = run.policy.q_mean(cast(Any, run.policy.q)(params, batch["obs"], out["action"], None))
    return k.soft_actor_loss(out["sample_log_prob"], q.mean(0, keepdim=True), batch["mask"], temperature=temperature)


def step(run: Run, state: TensorDict, minibatch: TensorDict, count: Tensor) -> tuple[TensorDict, Logs]:
    """Take one gradient step of the critics and the temperature and, every `policy_delay` steps, of the actor.

    Then move the target critics.
    """
    choices = run.algorithm.choices
    next_noise, noise = (run.policy.draw(keys) for keys in rng.split(noise_keys(state, len(minibatch), count)))
    wanted, entropy = target(run, state, minibatch, next_noise)
    state, critic_logs = gradient_step(run, state, choices.critic, critic_loss, minibatch, wanted)
    args = entropy, minibatch["mask"], state["hyper"]
    state, temperature_logs = gradient_step(run, state, choices.temperature, temperature_loss, *args)
    temperature, moves = state["params", "log_temperature"].exp(), is_due(count, choices.policy_delay)
    state, actor_logs = gradient_step(run, state, choices.actor, actor_loss, minibatch, noise, temperature, moves=moves)
    return with_targets(state), merged_logs(critic_logs, temperature_logs, actor_logs)


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Take the gradient steps of a turn, each on its own part of the batch."""
    return each_minibatch(run, state, batch, run.algorithm.choices.sampling.gradient_steps, step)


def turn(run: Run, state: TensorDict, noise: Any, replay: Replay) -> tuple[TensorDict, Replay, TensorDict, Logs]:
    """Take environment steps and store them. In the phase "learn", also learn from transitions of the replay buffer."""
    state, steps = take_steps(run, state, noise)
    replay = store(run, replay, steps)
    if run.static.phase == "collect":
        return state, replay, steps, {}
    batch = sample(run, state, replay, run.algorithm.choices.sampling)
    state, logs = learn(update, run, state, batch)
    return state, replay, steps, logs


@register_algorithm("fast_sac")
def fast_sac(cfg: FastSACConfig) -> Algorithm:
    """Build the FastSAC algorithm."""
    actor, critic, temperature = groups_of(cfg, GROUPS, group_settings(cfg))
    return Algorithm(
        choices=Choices(sampling_choices(cfg), actor, critic, temperature, cfg.policy_delay),
        init=partial(init, cfg),
        iterate=interleaved(turn, cfg.train_freq),
        kinds={**LEARNER_KINDS, **REPLAY_KINDS, "target_params": Kind.LEARNED},
        gradient_steps=None,  # with batches this large, compiling always shortens a run
        as_one=True,
        phase=partial(phase, cfg),
        delayed=(*DELAYED, "entropy") if cfg.policy_delay > 1 else (),
    )
