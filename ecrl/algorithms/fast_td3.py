"""FastTD3: TD3 for thousands of parallel environments.

The update has five differences from TD3. The critics predict categorical distributions of the return (C51). The target
is the distribution of the critic with the smallest mean. The next action comes from the current actor, because there is
no target actor. The actor maximises the smallest mean of the critics. The target critics move in every gradient step.

Each environment has its own scale of the exploration noise, and draws a new scale when an episode ends.

The defaults are from the authors' code with 1,024 environments, except for the optimiser and the replay buffer. The
authors use AdamW with a weight decay of 0.1, and standardise the observations. To do the same, set
`algorithm.cfg.optimizer` and `policy.normalize_obs`. The authors' replay buffer has 10,240 steps of each environment,
ten times the default of ecrl.

Source: Seo et al. 2025, arXiv:2505.22642.
"""

from functools import partial
from typing import Any, ClassVar, Self, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

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
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, env_index, learn, steps_taken
from ecrl.algorithms.ddpg import GROUPS
from ecrl.algorithms.gradient_step import each_minibatch, gradient_step
from ecrl.algorithms.interleaved import REPLAY_KINDS, interleaved, store, take_steps
from ecrl.algorithms.optimizer import groups_of, learning_state
from ecrl.algorithms.replay_learning import check_steps, noise_keys, phase, replay_fields, sample, sampling_choices
from ecrl.algorithms.state_kinds import Kind
from ecrl.algorithms.td3 import Choices
from ecrl.config.model import Count, Fraction, Natural, NonNegative
from ecrl.kernels import (
    Replay,
    categorical_td_loss,
    dpg_loss,
    masked_mean,
    min_categorical_target,
    noise_scales,
    smoothed_action,
)
from ecrl.policies import acting_params, fixed_params
from ecrl.policies.core import ReturnDistribution
from ecrl.policies.heads import from_unit, to_unit
from ecrl.pytree import replaced
from ecrl.registry import register_algorithm
from ecrl.spaces import Box
from ecrl.types import Logs

_NUMBERS = (*SHARED_NUMBERS, "policy_noise", "noise_clip", "min_exploration_noise", "max_exploration_noise")


class FastTD3Config(ActorCriticConfig):
    """Hyperparameters of FastTD3. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "deterministic_actor_critic", "distribution": "categorical"}

    tau: Fraction = Field(default=0.1, description="weight of the trained critics in an update of the target critics")
    capacity: Count = Field(
        default=1_048_576, description="steps in the replay buffer of a rank, over all environments of the rank"
    )
    batch_size: Count = Field(default=32_768, description="transitions per gradient step, on each rank")
    learning_starts: Natural = Field(
        default=10_240, description="environment steps, over all environments, before the first gradient step"
    )
    gradient_steps: Count = Field(default=2, description="number of gradient steps per update")
    policy_delay: Count = Field(default=2, description="gradient steps of the critics per gradient step of the actor")
    policy_noise: NonNegative = Field(
        default=0.001, description="standard deviation of the noise in the target, in units of half the action range"
    )
    noise_clip: NonNegative = Field(
        default=0.5, description="bound to which the noise in the target is clipped, in units of half the action range"
    )
    min_exploration_noise: NonNegative = Field(
        default=0.001, description="smallest standard deviation of exploration noise, in units of half the action range"
    )
    max_exploration_noise: NonNegative = Field(
        default=0.4, description="largest standard deviation of exploration noise, in units of half the action range"
    )

    @model_validator(mode="after")
    def _ordered_noise(self) -> Self:
        low, high = self.min_exploration_noise, self.max_exploration_noise
        if low > high:
            raise ValueError(f"min_exploration_noise {low:g} is above max_exploration_noise {high:g}; swap them")
        return self


def init(cfg: FastTD3Config, run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser states, hyperparameters, target critics, noise scales and an empty replay buffer.

    Raises: ConfigError if the policy, the action space or `capacity` does not suit FastTD3.
    """
    check_policy(run, "fast_td3", needs_log_prob=False, needs_distribution=True)
    check_steps(run, cfg)
    params, own = run.policy.init(rng.fold_in(key, rng.INIT)), critic_settings(cfg)
    numbers = {name: getattr(cfg, name) for name in _NUMBERS}
    fields = learning_state(cfg, params, numbers, key.device, groups_of(cfg, GROUPS, own), own)
    everywhere = torch.ones(run.static.num_envs, dtype=torch.bool, device=key.device)
    scales = drawn_scales(run, key, torch.full_like(key, -1), everywhere, everywhere.float(), fields["hyper"])
    return fields | {
        "target_params": params.select("critic").clone(),
        "exploration": TensorDict({"random": ~everywhere, "std": scales}, []),
        **replay_fields(cfg, run, key.device),
    }


def drawn_scales(run: Run, key: Tensor, step: Tensor, renewed: Tensor, scales: Tensor, hyper: TensorDict) -> Tensor:
    """Return the noise scales `[N]` after the turn that begins at `step`.

    Environments whose `renewed` is True draw a new scale.
    """
    keys = rng.stream(key, rng.ACTION, env_index(run.static.num_envs, key.device), step)
    uniform = rng.uniform(rng.fold_in(keys, 1))  # the policy draws its action noise from `keys`
    low, high = hyper["min_exploration_noise"], hyper["max_exploration_noise"]
    return noise_scales(scales, uniform, renewed, low=low, high=high)


def with_new_scales(run: Run, state: TensorDict, before: Tensor, done: Tensor) -> TensorDict:
    """Draw a new noise scale for each environment whose episode ended in this turn.

    `before` is the number of steps that each environment took before the turn. `done` has the shape `[S, N]`.
    """
    exploration, hyper = cast(TensorDict, state["exploration"]), cast(TensorDict, state["hyper"])
    scales = drawn_scales(run, state["key"], before, done.any(0), exploration["std"], hyper)
    return replaced(state, {"exploration": replaced(exploration, {"std": scales})})


def target(run: Run, state: TensorDict, batch: TensorDict, count: Tensor) -> Tensor:
    """Return the target distribution of each transition, `[B, K]`.

    In the equations, actions are scaled to [-1, 1], so the noise is in units of half the action range. The critics
    receive actions in the units of the environment.

    action = clip(actor(next_obs) + clip(policy_noise * noise, -noise_clip, noise_clip), -1, 1)
    c*     = argmin_c(mean(Z_target_c(next_obs, action)))
    target = projection of the distribution of reward + discount * Z_target_c*(next_obs, action) * not terminated
    """
    space, hyper = cast(Box, run.env.action_space), cast(TensorDict, state["hyper"])
    params, slow = (
        acting_params(cast(TensorDict, state[name]), fixed_params(state)) for name in ("params", "target_params")
    )
    unit = to_unit(run.policy.act(params, NO_CARRY, batch["next_obs"], None)[1]["action"], space)
    noise = rng.normal(noise_keys(state, len(unit), count), (unit.shape[-1],))
    sizes = {"policy_noise": hyper["policy_noise"], "noise_clip": hyper["noise_clip"]}
    action = from_unit(smoothed_action(unit, noise, -1.0, 1.0, **sizes), space)
    next_logits = cast(Any, run.policy.q)(slow, batch["next_obs"], action, None)
    support = cast(ReturnDistribution, run.policy.distribution).support(next_logits)
    return min_categorical_target(batch["reward"], next_logits, batch["terminated"], support, gamma=batch["discount"])


def critic_loss(run: Run, params: TensorDict, batch: TensorDict, target: Tensor) -> tuple[Tensor, Logs]:
    """Return the cross-entropy between the target and the predicted distributions, summed over the critics.

    sum_c(mean(-sum_k(target[k] * log(Z_c(obs, action)[k]))))
    """
    logits, mask = cast(Any, run.policy.q)(params, batch["obs"], batch["action"], None), batch["mask"]
    value, logs = categorical_td_loss(logits, target, torch.ones_like(batch["reward"]), mask)
    return value, logs | {"q_value": masked_mean(run.policy.q_mean(logits.detach()).mean(0), mask)}


def actor_loss(run: Run, params: TensorDict, batch: TensorDict) -> tuple[Tensor, Logs]:
    """Return the negated mean value of the actor's actions, according to the critic with the smallest value.

    -mean(min_c(mean(Z_c(obs, actor(obs)))))
    """
    action = run.policy.act(params, NO_CARRY, batch["obs"], None)[1]["action"]
    q = run.policy.q_mean(cast(Any, run.policy.q)(params, batch["obs"], action, None))
    return dpg_loss(q.amin(0), batch["mask"])


def step(run: Run, state: TensorDict, minibatch: TensorDict, count: Tensor) -> tuple[TensorDict, Logs]:
    """Take one gradient step of the critics and, every `policy_delay` steps, of the actor. Move the target critics."""
    choices, wanted = run.algorithm.choices, target(run, state, minibatch, count)
    state, critic_logs = gradient_step(run, state, choices.critic, critic_loss, minibatch, wanted)
    moves = is_due(count, choices.policy_delay)
    state, actor_logs = gradient_step(run, state, choices.actor, actor_loss, minibatch, moves=moves)
    return with_targets(state), merged_logs(critic_logs, actor_logs)


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Take the gradient steps of a turn, each on its own part of the batch."""
    return each_minibatch(run, state, batch, run.algorithm.choices.sampling.gradient_steps, step)


def turn(run: Run, state: TensorDict, noise: Any, replay: Replay) -> tuple[TensorDict, Replay, TensorDict, Logs]:
    """Take steps, draw new noise scales after the end of episodes, and store the steps.

    In the phase "learn", also learn from random transitions of the replay buffer.
    """
    before = steps_taken(run, state)
    state, steps = take_steps(run, state, noise)
    state = with_new_scales(run, state, before, steps["done"])
    replay = store(run, replay, steps)
    if run.static.phase == "collect":
        return state, replay, steps, {}
    batch = sample(run, state, replay, run.algorithm.choices.sampling)
    state, logs = learn(update, run, state, batch)
    return state, replay, steps, logs


@register_algorithm("fast_td3")
def fast_td3(cfg: FastTD3Config) -> Algorithm:
    """Build the FastTD3 algorithm."""
    actor, critic = groups_of(cfg, GROUPS, critic_settings(cfg))
    return Algorithm(
        choices=Choices(sampling_choices(cfg), actor, critic, cfg.policy_delay),
        init=partial(init, cfg),
        iterate=interleaved(turn, cfg.train_freq),
        kinds={**LEARNER_KINDS, **REPLAY_KINDS, "target_params": Kind.LEARNED},
        gradient_steps=None,  # with batches this large, compiling always shortens a run
        as_one=True,
        phase=partial(phase, cfg),
        delayed=DELAYED if cfg.policy_delay > 1 else (),
    )
