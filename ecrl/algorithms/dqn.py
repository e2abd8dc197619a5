"""Deep Q-learning from a replay buffer.

Double DQN, n-step targets and prioritised replay are settings of the algorithm. Dueling networks, distributions (C51
and QR-DQN) and noisy networks are settings of the policy `q_network`. Rainbow combines all of these settings, with C51.

Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning"; van Hasselt et al. 2016,
arXiv:1509.06461 (double); Schaul et al. 2016, arXiv:1511.05952 (prioritised replay); Bellemare et al. 2017,
arXiv:1707.06887 (C51); Dabney et al. 2017, arXiv:1710.10044 (QR-DQN); Fortunato et al. 2018, arXiv:1706.10295 (noisy
networks); Hessel et al. 2018, arXiv:1710.02298 (Rainbow).
"""

from functools import partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import LEARNER_KINDS, Algorithm, Run, counted_after, learn
from ecrl.algorithms.gradient_step import each_minibatch, gradient_step
from ecrl.algorithms.interleaved import REPLAY_KINDS, interleaved, store, take_steps
from ecrl.algorithms.optimizer import Group, groups_of, learning_state
from ecrl.algorithms.prioritized import (
    PRIORITY_KINDS,
    PriorityConfig,
    add_priorities,
    priority_numbers,
    sample_by_priority,
    set_priorities,
    with_tree,
)
from ecrl.algorithms.replay_learning import (
    ReplayConfig,
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
from ecrl.config.model import Count, Fraction, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import (
    Replay,
    categorical_kl,
    categorical_q_target,
    categorical_td_loss,
    double_q_target,
    masked_mean,
    quantile_huber_loss,
    quantile_midpoints,
    quantile_q_target,
    soft_update,
    td_loss,
)
from ecrl.policies import acting_params, fixed_params
from ecrl.pytree import mapped, replaced
from ecrl.registry import register_algorithm
from ecrl.spaces import Discrete
from ecrl.types import Logs

_NUMBERS = ("gamma", "tau", "huber_delta", "initial_epsilon", "final_epsilon", "exploration_fraction")


class DQNConfig(ReplayConfig):
    """Hyperparameters of DQN. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "q_network"}

    double: bool = Field(
        default=True, description="choose the next action in the target with the online network (Double DQN)"
    )
    target_update_freq: Count = Field(
        default=500, description="environment steps, over all environments, between updates of the target network"
    )
    tau: Fraction = Field(default=1.0, description="weight of the online network in an update of the target network")
    prioritized: PriorityConfig | None = Field(
        default=None,
        description=(
            "prioritised replay, which draws transitions with a large error more often; uniform replay if absent"
        ),
    )
    huber_delta: Positive = Field(
        default=1.0, description="TD error beyond which the loss grows linearly, in reward units"
    )
    initial_epsilon: Fraction = Field(default=1.0, description="probability of a random action at the start of the run")
    final_epsilon: Fraction = Field(
        default=0.05, description="probability of a random action after exploration_fraction of the run"
    )
    exploration_fraction: Positive = Field(
        default=0.1, le=1.0, description="fraction of the run after which the probability has fallen to final_epsilon"
    )


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    sampling: Sampling
    prioritized: bool
    double: bool
    target_update_freq: int
    group: Group


def init(cfg: DQNConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return parameters, optimiser state, hyperparameters, target network, exploration and an empty replay buffer.

    Raises: ConfigError if the policy, the action space or `capacity` does not suit DQN.
    """
    policy = run.policy
    if policy.q is None or policy.evaluate is not None or not isinstance(run.env.action_space, Discrete):
        needed = "a policy with a Q-function for Discrete actions, such as q_network"
        raise ConfigError(f"policy.name: dqn needs {needed}; the environment has {run.env.action_space}")
    if policy.distribution is not None and policy.distribution.name == "categorical" and cfg.huber_delta != 1.0:
        raise ConfigError(
            "algorithm.cfg.huber_delta: the loss of categorical distributions has no Huber loss; leave it out"
        )
    check_steps(run, cfg)
    priorities = {} if cfg.prioritized is None else priority_numbers(cfg.prioritized)
    fields = replay_fields(cfg, run, key.device)
    if cfg.prioritized is not None:
        fields["replay"] = with_tree(run, fields["replay"], cfg)
    params = run.policy.init(rng.fold_in(key, rng.INIT))
    epsilon = torch.full((run.static.num_envs,), cfg.initial_epsilon, device=key.device)
    numbers = {name: getattr(cfg, name) for name in _NUMBERS} | priorities
    return learning_state(cfg, params, numbers, key.device) | {
        "target_params": params.clone(),
        "exploration": TensorDict({"epsilon": epsilon}, []),
        **fields,
    }


def with_epsilon(state: TensorDict) -> TensorDict:
    """Set the probability of a random action, which falls linearly from its initial to its final value.

    epsilon = initial + (final - initial) * min(1, update_step / (exploration_fraction * iterations))
    """
    hyper = cast(TensorDict, state["hyper"])
    share = state["update_step"] / (hyper["exploration_fraction"] * state["iterations"])
    initial, final = hyper["initial_epsilon"], hyper["final_epsilon"]
    epsilon = initial + (final - initial) * share.clamp(max=1.0)
    before = state["exploration", "epsilon"]
    every = epsilon.to(before.dtype).expand(before.shape).clone()
    return replaced(state, {"exploration": replaced(cast(TensorDict, state["exploration"]), {"epsilon": every})})


def next_values(run: Run, params: TensorDict, obs: Any, noise: Any) -> Tensor:
    """Return the values `[B, A]` for choosing the next action.

    Actions that the `action_mask` of the observations excludes have the value -inf.
    """
    values = run.policy.q_mean(cast(Any, run.policy.q)(params, obs, None, noise)[0])
    if isinstance(obs, TensorDict) and "action_mask" in obs:
        values = values.masked_fill(~obs["action_mask"], -torch.inf)
    return values


def target(run: Run, state: TensorDict, batch: TensorDict, slow_noise: Any, online_noise: Any) -> Tensor:
    """Return the target of each transition, values `[B]` or distributions `[B, K]`. Each network has its own noise.

    a*     = argmax_a(Q(next_obs, a))             with the online network if `double`, otherwise the target network
    target = reward + discount * Q_target(next_obs, a*) * not terminated
    """
    fixed, policy = fixed_params(state), run.policy
    online, slow = (acting_params(cast(TensorDict, state[name]), fixed) for name in ("params", "target_params"))
    next_q = cast(Any, policy.q)(slow, batch["next_obs"], None, slow_noise)[0]
    chooser = (online, online_noise) if run.algorithm.choices.double else (slow, slow_noise)
    selector = next_values(run, chooser[0], batch["next_obs"], chooser[1])
    reward, terminated, gamma = batch["reward"], batch["terminated"], batch["discount"]
    if policy.distribution is None:
        return double_q_target(reward, next_q, selector, terminated, gamma=gamma)
    if policy.distribution.name == "quantile":
        return quantile_q_target(reward, next_q, selector, terminated, gamma=gamma)
    support = policy.distribution.support(next_q)
    return categorical_q_target(reward, next_q, selector, terminated, support, gamma=gamma)


def loss(
    run: Run, params: TensorDict, batch: TensorDict, target: Tensor, noise: Any, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    """Return the loss between the values, or distributions, of the taken actions and their targets.

    With prioritised replay, the log `row_error` `[B]` has the error of each transition. The error is the mean of the
    target minus the predicted mean. For categorical distributions, the error is the Kullback-Leibler divergence.
    """
    policy, mask, ones = run.policy, batch["mask"], torch.ones_like(batch["reward"])
    weight = batch.get("weight", ones).to(ones.dtype)
    q = cast(Any, policy.q)(params, batch["obs"], batch["action"], noise)
    kind = "values" if policy.distribution is None else policy.distribution.name
    mean = policy.q_mean(q[0].detach())
    if kind == "values":
        value, logs = td_loss(q, target, weight, mask, delta=hyper["huber_delta"])
        error = target - mean
    elif kind == "categorical":
        value, logs = categorical_td_loss(q, target, weight, mask)
        error = categorical_kl(target.log(), q[0].detach())
    else:
        taus = quantile_midpoints(q.shape[-1], dtype=q.dtype, device=q.device)
        # A row that stores no transition may have a NaN as its weight or target, and `0 * nan` is NaN in the gradient.
        wanted = target.masked_fill(~mask.unsqueeze(-1), 0.0)
        of_rows = quantile_huber_loss(q[0], taus, wanted, delta=hyper["huber_delta"])
        value = masked_mean(weight.masked_fill(~mask, 0.0) * of_rows, mask)
        logs = {"q_loss": value.detach(), "count": mask.sum().to(q.dtype)}
        error = target.mean(-1) - mean
    logs |= {"q_value": masked_mean(mean, mask)}
    return value, logs | ({"row_error": error} if run.algorithm.choices.prioritized else {})


def step(run: Run, state: TensorDict, minibatch: TensorDict, count: Tensor) -> tuple[TensorDict, Logs]:
    """Take one gradient step towards the targets. All transitions share the noise of a noisy network."""
    draws = run.policy.draw(noise_keys(state, 3, count))
    noise, *next_noise = (mapped(itemgetter(i), draws, batch=lambda size: size[1:]) for i in range(3))
    wanted = target(run, state, minibatch, *next_noise)
    return gradient_step(run, state, run.algorithm.choices.group, loss, minibatch, wanted, noise, state["hyper"])


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Take the gradient steps of a turn, each on its own part of the batch."""
    return each_minibatch(run, state, batch, run.algorithm.choices.sampling.gradient_steps, step)


def with_target(run: Run, state: TensorDict, steps: TensorDict) -> TensorDict:
    """Update the target network every `target_update_freq` environment steps. `steps` are the steps of the turn.

    target_params = tau * params + (1 - tau) * target_params
    """
    before, period = state["sample_step"], run.algorithm.choices.target_update_freq
    after = counted_after(run, state, steps.get("executed", None))["sample_step"]
    is_due = before // period != after // period
    old, hyper = cast(TensorDict, state["target_params"]), cast(TensorDict, state["hyper"])
    new = soft_update(cast(TensorDict, state["params"]), old, tau=hyper["tau"])
    return replaced(state, {"target_params": mapped(partial(torch.where, is_due), new, old)})


def turn(run: Run, state: TensorDict, noise: Any, replay: Replay) -> tuple[TensorDict, Replay, TensorDict, Logs]:
    """Take epsilon-greedy steps and store them.

    In the phase "learn", also learn from random transitions of the replay buffer, and update the target network. With
    prioritised replay, set the priorities of new and of drawn transitions.
    """
    sampling, prioritized = run.algorithm.choices.sampling, run.algorithm.choices.prioritized
    state, steps = take_steps(run, with_epsilon(state), noise)
    replay, logs = store(run, replay, steps), {"epsilon": state["exploration", "epsilon"][0]}
    state = add_priorities(run, state, replay, sampling) if prioritized else state
    if run.static.phase == "collect":
        return state, replay, steps, logs
    batch = (sample_by_priority if prioritized else sample)(run, state, replay, sampling)
    state, learnt = learn(update, run, state, batch)
    state = with_target(run, state, steps)
    state = set_priorities(state, batch, learnt.pop("row_error")) if prioritized else state
    return state, replay, steps, logs | learnt


@register_algorithm("dqn")
def dqn(cfg: DQNConfig) -> Algorithm:
    """Build the DQN algorithm."""
    (group,) = groups_of(cfg)
    return Algorithm(
        choices=Choices(sampling_choices(cfg), cfg.prioritized is not None, cfg.double, cfg.target_update_freq, group),
        init=partial(init, cfg),
        iterate=interleaved(turn, cfg.train_freq),
        kinds={
            **LEARNER_KINDS,
            **REPLAY_KINDS,
            **({} if cfg.prioritized is None else PRIORITY_KINDS),
            "target_params": Kind.LEARNED,
        },
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
        phase=partial(phase, cfg),
    )
