"""Deep deterministic policy gradient.

The exploration noise is Gaussian, as in TD3. The paper uses an Ornstein-Uhlenbeck process.

Source: Lillicrap et al. 2016, arXiv:1509.02971, algorithm 1.
"""

from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.continuous_actions import (
    NO_CARRY,
    SHARED_NUMBERS,
    ActorCriticConfig,
    check_policy,
    critic_loss,
    critic_settings,
    merged_logs,
    with_random_start,
    with_targets,
)
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, learn
from ecrl.algorithms.gradient_step import each_minibatch, gradient_step
from ecrl.algorithms.interleaved import REPLAY_KINDS, interleaved, store, take_steps
from ecrl.algorithms.optimizer import Group, groups_of, learning_state
from ecrl.algorithms.replay_learning import (
    Sampling,
    check_steps,
    gradient_steps,
    phase,
    replay_fields,
    sample,
    sampling_choices,
)
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import NonNegative
from ecrl.kernels import Replay, dpg_loss, min_q_target
from ecrl.policies import acting_params, fixed_params
from ecrl.pytree import mapped, replaced
from ecrl.registry import register_algorithm
from ecrl.types import Logs

GROUPS = {"actor": (("actor",),), "critic": (("critic",),)}
"""Optimiser groups of DDPG and TD3."""


class DDPGConfig(ActorCriticConfig):
    """Hyperparameters of DDPG. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "deterministic_actor_critic"}

    exploration_noise: NonNegative = Field(
        default=0.1, description="standard deviation of the noise on actions, in units of half the action range"
    )


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    sampling: Sampling
    actor: Group
    critic: Group


def init(cfg: DDPGConfig, numbers: tuple[str, ...], run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser states, hyperparameters, target networks, exploration and an empty replay buffer.

    `numbers` lists the names of the settings that `hyper` stores.

    Raises: ConfigError if the policy, the action space or `capacity` does not suit the algorithm.
    """
    check_policy(run, run.algorithm.name, needs_log_prob=False)
    check_steps(run, cfg)
    params, own = run.policy.init(rng.fold_in(key, rng.INIT)), critic_settings(cfg)
    is_random = torch.ones(run.static.num_envs, dtype=torch.bool, device=key.device)
    std = torch.full((run.static.num_envs,), cfg.exploration_noise, device=key.device)
    values = {name: getattr(cfg, name) for name in numbers}
    return learning_state(cfg, params, values, key.device, groups_of(cfg, GROUPS, own), own) | {
        "target_params": params.clone(),
        "exploration": TensorDict({"random": is_random, "std": std}, []),
        **replay_fields(cfg, run, key.device),
    }


def with_exploration(run: Run, state: TensorDict) -> TensorDict:
    """Let the policy take random actions until learning starts, and add the exploration noise afterwards."""
    state = with_random_start(run, state)
    exploration, std = cast(TensorDict, state["exploration"]), state["hyper", "exploration_noise"]
    every = std.to(exploration["std"].dtype).expand(exploration["std"].shape).clone()
    return replaced(state, {"exploration": replaced(exploration, {"std": every})})


def target(run: Run, state: TensorDict, batch: TensorDict) -> Tensor:
    """Return the critics' target for each transition, `[B]`, from the smallest value of the target critics.

    target = reward + discount * min_c(Q_target_c(next_obs, actor_target(next_obs))) * not terminated
    """
    slow = acting_params(cast(TensorDict, state["target_params"]), fixed_params(state))
    action = run.policy.act(slow, NO_CARRY, batch["next_obs"], None)[1]["action"]
    next_q = cast(Any, run.policy.q)(slow, batch["next_obs"], action, None)
    return min_q_target(batch["reward"], next_q, batch["terminated"], gamma=batch["discount"])


def actor_loss(run: Run, params: TensorDict, batch: TensorDict) -> tuple[Tensor, Logs]:
    """Return the negated mean value of the actor's actions, according to the first critic.

    -mean(Q_0(obs, actor(obs)))
    """
    action = run.policy.act(params, NO_CARRY, batch["obs"], None)[1]["action"]
    first = replaced(params, {"critic": mapped(lambda weight: weight[:1], params["critic"])})
    q = cast(Any, run.policy.q)(first, batch["obs"], action, None)[0]
    return dpg_loss(q, batch["mask"])


def step(run: Run, state: TensorDict, minibatch: TensorDict, count: Tensor) -> tuple[TensorDict, Logs]:
    """Take one gradient step of the critics and then of the actor, and update the target networks."""
    choices, wanted = run.algorithm.choices, target(run, state, minibatch)
    state, critic_logs = gradient_step(run, state, choices.critic, critic_loss, minibatch, wanted)
    state, actor_logs = gradient_step(run, state, choices.actor, actor_loss, minibatch)
    return with_targets(state), merged_logs(critic_logs, actor_logs)


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Take the gradient steps of a turn, each on its own part of the batch."""
    return each_minibatch(run, state, batch, run.algorithm.choices.sampling.gradient_steps, step)


def turn(run: Run, state: TensorDict, noise: Any, replay: Replay) -> tuple[TensorDict, Replay, TensorDict, Logs]:
    """Take environment steps and store them. In the phase "learn", also learn from transitions of the replay buffer."""
    state, steps = take_steps(run, with_exploration(run, state), noise)
    replay = store(run, replay, steps)
    if run.static.phase == "collect":
        return state, replay, steps, {}
    batch = sample(run, state, replay, run.algorithm.choices.sampling)
    state, logs = learn(update, run, state, batch)
    return state, replay, steps, logs


@register_algorithm("ddpg")
def ddpg(cfg: DDPGConfig) -> Algorithm:
    """Build the DDPG algorithm. To use one critic, as in the paper, set `policy.num_critics` to 1."""
    actor, critic = groups_of(cfg, GROUPS, critic_settings(cfg))
    return Algorithm(
        choices=Choices(sampling_choices(cfg), actor, critic),
        init=partial(init, cfg, (*SHARED_NUMBERS, "exploration_noise")),
        iterate=interleaved(turn, cfg.train_freq),
        kinds={**LEARNER_KINDS, **REPLAY_KINDS, "target_params": Kind.LEARNED},
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
        phase=partial(phase, cfg),
    )
