"""Twin delayed deep deterministic policy gradient.

TD3 is DDPG with three changes. The target uses the smallest value of several critics. The action in the target has
noise. Only every `policy_delay`-th gradient step updates the actor and the target networks. ecrl's `ddpg` also uses the
smallest value, unless `policy.num_critics` is 1.

Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1.
"""

from functools import partial
from typing import Any, NamedTuple, cast

from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.continuous_actions import (
    DELAYED,
    NO_CARRY,
    SHARED_NUMBERS,
    critic_loss,
    critic_settings,
    is_due,
    merged_logs,
    with_targets,
)
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, learn
from ecrl.algorithms.ddpg import GROUPS, DDPGConfig, actor_loss, init, with_exploration
from ecrl.algorithms.gradient_step import each_minibatch, gradient_step
from ecrl.algorithms.interleaved import REPLAY_KINDS, interleaved, store, take_steps
from ecrl.algorithms.optimizer import Group, groups_of
from ecrl.algorithms.replay_learning import Sampling, gradient_steps, noise_keys, phase, sample, sampling_choices
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Count, NonNegative
from ecrl.kernels import Replay, min_q_target, smoothed_action
from ecrl.policies import acting_params, fixed_params
from ecrl.policies.heads import from_unit, to_unit
from ecrl.registry import register_algorithm
from ecrl.spaces import Box
from ecrl.types import Logs


class TD3Config(DDPGConfig):
    """Hyperparameters of TD3. Float hyperparameters are stored in the state and may change during a run."""

    policy_delay: Count = Field(default=2, description="gradient steps of the critics per gradient step of the actor")
    policy_noise: NonNegative = Field(
        default=0.2, description="standard deviation of the noise in the target, in units of half the action range"
    )
    noise_clip: NonNegative = Field(
        default=0.5, description="bound to which the noise in the target is clipped, in units of half the action range"
    )


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    sampling: Sampling
    actor: Group
    critic: Group
    policy_delay: int


def target(run: Run, state: TensorDict, batch: TensorDict, count: Tensor) -> Tensor:
    """Return the target of each transition, `[B]`.

    In the equations, actions are scaled to [-1, 1], so the noise is in units of half the action range. The critics
    receive actions in the units of the environment.

    action = clip(actor_target(next_obs) + clip(policy_noise * noise, -noise_clip, noise_clip), -1, 1)
    target = reward + discount * min_c(Q_target_c(next_obs, action)) * not terminated
    """
    space, hyper = cast(Box, run.env.action_space), cast(TensorDict, state["hyper"])
    slow = acting_params(cast(TensorDict, state["target_params"]), fixed_params(state))
    unit = to_unit(run.policy.act(slow, NO_CARRY, batch["next_obs"], None)[1]["action"], space)
    noise = rng.normal(noise_keys(state, len(unit), count), (unit.shape[-1],))
    sizes = {"policy_noise": hyper["policy_noise"], "noise_clip": hyper["noise_clip"]}
    action = from_unit(smoothed_action(unit, noise, -1.0, 1.0, **sizes), space)
    next_q = cast(Any, run.policy.q)(slow, batch["next_obs"], action, None)
    return min_q_target(batch["reward"], next_q, batch["terminated"], gamma=batch["discount"])


def step(run: Run, state: TensorDict, minibatch: TensorDict, count: Tensor) -> tuple[TensorDict, Logs]:
    """Take one gradient step of the critics. Every `policy_delay` steps, also update actor and target networks."""
    choices, wanted = run.algorithm.choices, target(run, state, minibatch, count)
    moves = is_due(count, choices.policy_delay)
    state, critic_logs = gradient_step(run, state, choices.critic, critic_loss, minibatch, wanted)
    state, actor_logs = gradient_step(run, state, choices.actor, actor_loss, minibatch, moves=moves)
    return with_targets(state, moves), merged_logs(critic_logs, actor_logs)


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


@register_algorithm("td3")
def td3(cfg: TD3Config) -> Algorithm:
    """Build the TD3 algorithm."""
    actor, critic = groups_of(cfg, GROUPS, critic_settings(cfg))
    return Algorithm(
        choices=Choices(sampling_choices(cfg), actor, critic, cfg.policy_delay),
        init=partial(init, cfg, (*SHARED_NUMBERS, "exploration_noise", "policy_noise", "noise_clip")),
        iterate=interleaved(turn, cfg.train_freq),
        kinds={**LEARNER_KINDS, **REPLAY_KINDS, "target_params": Kind.LEARNED},
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
        phase=partial(phase, cfg),
        delayed=DELAYED if cfg.policy_delay > 1 else (),
    )
