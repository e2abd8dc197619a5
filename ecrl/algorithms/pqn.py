"""Parallelised Q-network: Q-learning from the steps of many environments, without a replay buffer or target network.

The network needs layer normalisation, such as `use_layernorm` of a multilayer perceptron. The paper shows that layer
normalisation can replace the target network. The default optimiser is Adam, while the paper uses RAdam.

Source: Gallici et al. 2024, arXiv:2407.04811, algorithm 1.
"""

from functools import partial
from math import inf
from typing import Any, ClassVar, NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import (
    LEARNER_KINDS,
    REWARD_NORM_KINDS,
    Algorithm,
    Run,
    batch_of,
    on_policy,
    reward_norm_init,
    with_scaled_rewards,
)
from ecrl.algorithms.dqn import next_values, with_epsilon
from ecrl.algorithms.interleaved import collect_exploring
from ecrl.algorithms.minibatch_sgd import SGD, MinibatchConfig, gradient_steps, minibatch_epochs, sgd_choices
from ecrl.algorithms.optimizer import learning_state
from ecrl.algorithms.state_kinds import Kind
from ecrl.config.model import Count, Fraction, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import q_lambda, td_loss
from ecrl.kernels.rollout_estimators import decision_discounts
from ecrl.kernels.scan_loop import in_chunks
from ecrl.policies import policy_params
from ecrl.pytree import flatten, mapped
from ecrl.registry import register_algorithm
from ecrl.spaces import Discrete
from ecrl.types import Logs

_NUMBERS = ("gamma", "q_lambda", "initial_epsilon", "final_epsilon", "exploration_fraction")


class PQNConfig(MinibatchConfig):
    """Hyperparameters of PQN. Float hyperparameters are stored in the state and may change during a run."""

    default_policy: ClassVar = {"name": "q_network"}

    n_epochs: Count = Field(default=2, description="passes over each rollout")
    max_grad_norm: Positive = Field(
        default=10.0, description="largest global norm of the gradients; larger gradients are scaled down"
    )
    gamma: Fraction = Field(default=0.99, description="discount per step")
    q_lambda: Fraction = Field(
        default=0.65,
        description="weight of later steps in targets; 0 gives one-step targets, 1 gives Monte-Carlo targets",
    )
    initial_epsilon: Fraction = Field(default=1.0, description="probability of a random action at the start of the run")
    final_epsilon: Fraction = Field(
        default=0.05, description="probability of a random action after exploration_fraction of the run"
    )
    exploration_fraction: Positive = Field(
        default=0.1, le=1.0, description="fraction of the run after which the probability has fallen to final_epsilon"
    )
    normalize_reward: bool = Field(default=False, description="divide rewards by the standard deviation of returns")

    @model_validator(mode="after")
    def _no_distance(self) -> "PQNConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError(
                "lr_scheduler adaptive needs the KL to the policy that collected the steps, which pqn does not have; "
                "use another schedule"
            )
        return self


class Choices(NamedTuple):
    """Settings of a config that determine the compiled graph."""

    sgd: SGD


def init(cfg: PQNConfig, run: Run, key: Tensor) -> dict[str, Any]:
    """Return the parameters, the optimiser state, the hyperparameters, the exploration and any reward statistics.

    Raises: ConfigError if the policy or the action space does not suit PQN.
    """
    policy = run.policy
    if policy.q is None or policy.explore is None or not isinstance(run.env.action_space, Discrete):
        needed = "a policy with a Q-function for Discrete actions, such as q_network"
        raise ConfigError(f"policy.name: pqn needs {needed}; the environment has {run.env.action_space}")
    if policy.frame_stack > 1:
        problem = f"env.frame_stack: {policy.frame_stack}, but pqn learns from single observations"
        raise ConfigError(f"{problem}; use dqn, or set frame_stack to 1")
    if policy.unit != "step":
        raise ConfigError("policy.name: this policy has memory, but pqn needs a policy without memory; use q_network")
    if policy.distribution is not None:
        raise ConfigError(
            f"policy.distribution: {policy.distribution.name}, but pqn learns values, not distributions; leave it out"
        )
    if policy.noisy:
        raise ConfigError("policy.noisy: pqn explores with epsilon only, so the noise is not learnt; leave it out")
    params = policy.init(rng.fold_in(key, rng.INIT))
    epsilon = torch.full((run.static.num_envs,), cfg.initial_epsilon, device=key.device)
    numbers = {name: getattr(cfg, name) for name in _NUMBERS}
    state = learning_state(cfg, params, numbers, key.device, run.algorithm.choices.sgd.groups)
    norm = {"norm": reward_norm_init(run.static.num_envs, key.device)} if cfg.normalize_reward else {}
    return state | {"exploration": TensorDict({"epsilon": epsilon}, [])} | norm


def collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Take `buffer_size` epsilon-greedy steps in every environment."""
    return collect_exploring(run, with_epsilon(state))


def next_q(run: Run, state: TensorDict, steps: TensorDict) -> Tensor:
    """Return the Q-values `[N, T, A]` of the observations after each step.

    Actions that the `action_mask` excludes have the value -inf.

    The values are computed in chunks, which saves memory.
    """
    reached = mapped(
        lambda x: x.transpose(0, 1)[:-1].flatten(0, 1),  # time is the first axis in memory
        steps["final_obs"],
        batch=lambda size: (size[0] * (size[1] - 1), *size[2:]),
    )

    def of_chunk(_: None, obs: Any, params: TensorDict) -> tuple[None, Tensor]:
        return None, next_values(run, params, obs, None)

    _, values = run.scan(of_chunk, None, in_chunks(reached), policy_params(state))
    count = len(flatten(reached)[0][0])
    return values.flatten(0, 1)[:count].unflatten(0, (-1, len(steps))).transpose(0, 1)


def targets(run: Run, state: TensorDict, steps: TensorDict) -> Tensor:
    """Return the target of each step, `[N, T]`, by the kernel `q_lambda`.

    G[t] = reward[t] + gamma * ((1 - q_lambda) * max_a(Q(next_obs[t], a)) + q_lambda * G[t + 1])

    At a time limit and at the last step of the rollout, the target is reward[t] + gamma * max_a(Q(next_obs[t], a)). If
    the episode terminated, the target is reward[t]. If the environment reports `executed`, `gamma ** executed[t]`
    replaces `gamma`.
    """
    taken, hyper = cast(TensorDict, steps[:, :-1]), cast(TensorDict, state["hyper"])
    return q_lambda(
        taken["reward"],
        next_q(run, state, steps),
        taken["terminated"],
        taken["done"],
        gamma=decision_discounts(taken, hyper["gamma"]),
        trace=hyper["q_lambda"],
    )


def loss(run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict) -> tuple[Tensor, Logs]:
    """Return half the mean squared error between the values of the taken actions and their targets."""
    q = cast(Any, run.policy.q)(params, minibatch["obs"], minibatch["action"], None)
    wanted = minibatch["target"]
    return td_loss(q, wanted, torch.ones_like(wanted), mask, delta=inf)


def update(run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Compute the targets once, and learn from them in `n_epochs` passes over minibatches."""
    steps = cast(TensorDict, batch["steps"])
    mask = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
    fields = {"target": targets(run, state, steps), "mask": mask[:, :-1]}
    learnt_from = batch_of(cast(TensorDict, steps.select("obs", "action")))
    state, logs = minibatch_epochs(run, state, learnt_from, fields, loss, run.algorithm.choices.sgd)
    return state, logs | {"epsilon": state["exploration", "epsilon"][0]}


@register_algorithm("pqn")
def pqn(cfg: PQNConfig) -> Algorithm:
    """Build the PQN algorithm. The policy needs a Q-function for Discrete actions."""
    return Algorithm(
        choices=Choices(sgd_choices(cfg)),
        init=partial(init, cfg),
        iterate=on_policy(collect, with_scaled_rewards(update) if cfg.normalize_reward else update),
        kinds={**LEARNER_KINDS, **REWARD_NORM_KINDS, "exploration": Kind.ENVIRONMENT},
        gradient_steps=partial(gradient_steps, cfg),
        as_one=True,
    )
