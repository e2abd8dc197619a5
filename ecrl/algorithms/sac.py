"""Soft actor-critic, which maximises the reward plus the entropy of the policy.

The action space is a Box with finite bounds, or Discrete. For Box actions, the targets and the actor's loss use an
action that the policy draws. For Discrete actions, the targets and the loss use the expectation over all actions.

Source: Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1; Christodoulou 2019, arXiv:1910.07207 (Discrete actions).
"""

from functools import partial
from math import log
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from pydantic import Field, model_validator
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
    critic_loss,
    critic_settings,
    is_due,
    merged_logs,
    with_random_start,
    with_targets,
)
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, learn
from ecrl.algorithms.gradient_step import each_minibatch, gradient_step
from ecrl.algorithms.interleaved import REPLAY_KINDS, interleaved, store, take_steps
from ecrl.algorithms.optimizer import Group, GroupSettings, groups_of, learning_state
from ecrl.algorithms.replay_learning import (
    Sampling,
    check_steps,
    gradient_steps,
    noise_keys,
    phase,
    replay_fields,
    sample,
    sampling_choices,
)
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Count, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import Replay
from ecrl.policies import acting_params, fixed_params
from ecrl.registry import register_algorithm
from ecrl.spaces import Discrete, Space, flat_dim
from ecrl.types import Logs

_DELAYED = (*DELAYED, "entropy", "temperature", "temperature_loss", "temperature_grad_norm")

ENTROPY_SHARE = 0.5
"""Default of `target_entropy` for a Discrete space, as a share of log(A), the entropy of A equally likely actions.

Christodoulou 2019 uses 0.98, and CleanRL uses 0.89. In a task such as CartPole, no policy with a high return has such a
high entropy. The temperature then grows without bound, and the values also grow.
"""


class SACConfig(ActorCriticConfig):
    """Hyperparameters of soft actor-critic. Floats are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "squashed_actor_critic"}

    temperature: Positive = Field(
        default=1.0,
        description=(
            "weight of the entropy (temperature), in reward units per nat; the initial weight if the temperature is "
            "learnt"
        ),
    )
    learn_temperature: bool = Field(
        default=True, description="learn the temperature, so that the entropy approaches target_entropy"
    )
    temperature_learning_rate: Positive | None = Field(
        default=None,
        description="step size of the log temperature, before the schedule; the actor's step size if absent",
    )
    target_entropy: float | None = Field(
        default=None,
        description="entropy towards which a learnt temperature drives the policy, in nats; if absent, -1 per "
        f"dimension of Box actions, or {ENTROPY_SHARE} * log(A) for a Discrete space of A actions",
    )
    policy_delay: Count = Field(default=1, description="gradient steps of the critics per gradient step of the actor")

    @model_validator(mode="after")
    def _temperature_settings(self) -> Self:
        for name in ("temperature_learning_rate", "target_entropy"):
            if not self.learn_temperature and getattr(self, name) is not None:
                raise ValueError(f"{name} has no effect, because learn_temperature is false; leave it out")
        return self


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph. `temperature` is None for a fixed temperature."""

    sampling: Sampling
    actor: Group
    critic: Group
    temperature: Group | None
    policy_delay: int


def groups(cfg: SACConfig) -> tuple[Group, ...]:
    """Return the optimiser groups: actor, critic and, if the temperature is learnt, temperature."""
    paths = {"actor": (("actor",),), "critic": (("critic",),)}
    paths |= {"temperature": (("log_temperature",),)} if cfg.learn_temperature else {}
    return groups_of(cfg, paths, group_settings(cfg))


def group_settings(cfg: SACConfig) -> dict[str, GroupSettings]:
    """Return the optimiser settings that only the critics or only the temperature use, if any."""
    rate = cfg.temperature_learning_rate
    own = {} if rate is None else {"temperature": GroupSettings(learning_rate=rate)}
    return critic_settings(cfg) | own


def check_actions(run: Run) -> None:
    """Raise ConfigError if the policy does not support soft actor-critic in the action space of the environment."""
    policy, space = run.policy, run.env.action_space
    if not isinstance(space, Discrete):
        check_policy(run, "sac", needs_log_prob=True)
    elif policy.q is None or policy.evaluate is None:
        needed = "a stochastic policy with a Q-function for Discrete actions, such as categorical_actor_critic"
        raise ConfigError(f"policy.name: sac needs {needed}; the actions of this environment are {space}")


def default_entropy(space: Space) -> float:
    """Return the default of `target_entropy` for an action space, in nats.

    >>> from ecrl.spaces import box
    >>> default_entropy(box(-1.0, 1.0, 3)), round(default_entropy(Discrete(2)), 4)
    (-3.0, 0.3466)
    """
    return ENTROPY_SHARE * log(space.n) if isinstance(space, Discrete) else -float(flat_dim(space))


def init(cfg: SACConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser states, hyperparameters, target critics, exploration and an empty replay buffer.

    A learnt temperature is the parameter `log_temperature`. A fixed temperature is a hyperparameter.

    Raises: ConfigError if the policy, the action space or `capacity` does not suit soft actor-critic.
    """
    check_actions(run)
    check_steps(run, cfg)
    params, numbers = run.policy.init(rng.fold_in(key, rng.INIT)), {name: getattr(cfg, name) for name in SHARED_NUMBERS}
    targets = params.select("critic").clone()
    if cfg.learn_temperature:
        params = params.set("log_temperature", torch.tensor(log(cfg.temperature), device=key.device))
        default = default_entropy(run.env.action_space)
        numbers["target_entropy"] = default if cfg.target_entropy is None else cfg.target_entropy
    else:
        numbers["temperature"] = cfg.temperature
    is_random = torch.ones(run.static.num_envs, dtype=torch.bool, device=key.device)
    return learning_state(cfg, params, numbers, key.device, groups(cfg), group_settings(cfg)) | {
        "target_params": targets,
        "exploration": TensorDict({"random": is_random}, []),
        **replay_fields(cfg, run, key.device),
    }


def temperature_of(state: TensorDict) -> Tensor:
    """Return the temperature, 0-d: `exp(log_temperature)`, or the hyperparameter if the temperature is fixed."""
    params, hyper = cast(TensorDict, state["params"]), cast(TensorDict, state["hyper"])
    return params["log_temperature"].exp() if "log_temperature" in params else hyper["temperature"]


def logits_of(run: Run, out: TensorDict) -> Tensor:
    """Return the logits `[B, A]` in the output of `act`. Raise ConfigError if the output has no logits."""
    if "logits" not in out:
        fault = f"the act of policy {run.policy.name} returns no logits, only {', '.join(map(str, out.keys()))}"
        raise ConfigError(f"policy.name: sac needs the logits of Discrete actions, but {fault}; return the logits")
    return out["logits"]


def target(run: Run, state: TensorDict, batch: TensorDict, noise: Any) -> Tensor:
    """Return the target of each transition, `[B]`. The current policy draws the next action.

    next   = min_c(Q_target_c(next_obs, next_action)) - temperature * log_prob(next_action)
    target = reward + discount * next * not terminated

    For Discrete actions, `next` is the expectation over the next action. p(a) is the policy's probability of a:

    next = sum_a(p(a) * (min_c(Q_target_c(next_obs, a)) - temperature * log(p(a))))
    """
    fixed, obs, q = fixed_params(state), batch["next_obs"], cast(Any, run.policy.q)
    params, slow = (acting_params(cast(TensorDict, state[name]), fixed) for name in ("params", "target_params"))
    out = run.policy.act(params, NO_CARRY, obs, noise)[1]
    reward, terminated = batch["reward"], batch["terminated"]
    numbers = {"gamma": batch["discount"], "temperature": temperature_of(state)}
    if isinstance(run.env.action_space, Discrete):
        return k.soft_q_target(reward, q(slow, obs, None, None), logits_of(run, out), terminated, **numbers)
    next_q = q(slow, obs, out["action"], None)
    return k.soft_min_q_target(reward, next_q, out["sample_log_prob"], terminated, **numbers)


def actor_loss(run: Run, params: TensorDict, batch: TensorDict, noise: Any, temperature: Tensor) -> tuple[Tensor, Logs]:
    """Return the actor's loss, which is small if the policy has a large entropy and its actions have large values.

    mean(temperature * log_prob(action) - min_c(Q_c(obs, action)))

    For Discrete actions, the loss is the expectation over the action. p(a) is the policy's probability of a:

    mean(sum_a(p(a) * (temperature * log(p(a)) - min_c(Q_c(obs, a)))))
    """
    obs, q = batch["obs"], cast(Any, run.policy.q)
    out = run.policy.act(params, NO_CARRY, obs, noise)[1]
    if isinstance(run.env.action_space, Discrete):
        logits, values = logits_of(run, out), q(params, obs, None, None)
        return k.discrete_soft_actor_loss(logits, values, batch["mask"], temperature=temperature)
    values = q(params, obs, out["action"], None)
    return k.soft_actor_loss(out["sample_log_prob"], values, batch["mask"], temperature=temperature)


def temperature_loss(
    run: Run, params: TensorDict, entropy: Tensor, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    """Return the loss of the temperature, which drives the 0-d `entropy` of the policy towards `target_entropy`.

    exp(log_temperature) * (entropy - target_entropy)
    """
    log_prob = -entropy.expand_as(mask)
    return k.temperature_loss(params["log_temperature"], log_prob, mask, target_entropy=hyper["target_entropy"])


def step(run: Run, state: TensorDict, minibatch: TensorDict, count: Tensor) -> tuple[TensorDict, Logs]:
    """Take one gradient step of the critics, then of the actor and the temperature. Update the target critics.

    Actor and temperature are updated every `policy_delay` gradient steps. The temperature's loss uses the entropy from
    the actor's loss.
    """
    choices, temperature = run.algorithm.choices, temperature_of(state)
    next_noise, noise = (run.policy.draw(keys) for keys in rng.split(noise_keys(state, len(minibatch), count)))
    moves = is_due(count, choices.policy_delay)
    wanted = target(run, state, minibatch, next_noise)
    state, logs = gradient_step(run, state, choices.critic, critic_loss, minibatch, wanted)
    parts = [logs]
    state, logs = gradient_step(run, state, choices.actor, actor_loss, minibatch, noise, temperature, moves=moves)
    parts.append(logs)
    if choices.temperature is not None:
        args = logs["entropy"], minibatch["mask"], state["hyper"]
        state, logs = gradient_step(run, state, choices.temperature, temperature_loss, *args, moves=moves)
        parts.append(logs)
    return with_targets(state), merged_logs(*parts)


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Take the gradient steps of a turn, each on its own part of the batch."""
    return each_minibatch(run, state, batch, run.algorithm.choices.sampling.gradient_steps, step)


def turn(run: Run, state: TensorDict, noise: Any, replay: Replay) -> tuple[TensorDict, Replay, TensorDict, Logs]:
    """Take environment steps and store them. In the phase "learn", also learn from transitions of the replay buffer."""
    state, steps = take_steps(run, with_random_start(run, state), noise)
    replay = store(run, replay, steps)
    if run.static.phase == "collect":
        return state, replay, steps, {}
    batch = sample(run, state, replay, run.algorithm.choices.sampling)
    state, logs = learn(update, run, state, batch)
    return state, replay, steps, logs


@register_algorithm("sac")
def sac(cfg: SACConfig) -> Algorithm:
    """Build the soft actor-critic algorithm, for Box actions with finite bounds and for Discrete actions.

    For Discrete actions, the output of the policy's `act` must have the `logits` `[*B, A]`. If an action mask allows
    fewer than A actions, set `target_entropy`. The default may be above the largest possible entropy, and a learnt
    temperature would then grow without bound.
    """
    actor, critic, *temperature = groups(cfg)
    return Algorithm(
        choices=Choices(sampling_choices(cfg), actor, critic, next(iter(temperature), None), cfg.policy_delay),
        init=partial(init, cfg),
        iterate=interleaved(turn, cfg.train_freq),
        kinds={**LEARNER_KINDS, **REPLAY_KINDS, "target_params": Kind.LEARNED},
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
        phase=partial(phase, cfg),
        delayed=_DELAYED if cfg.policy_delay > 1 else (),
    )
