"""Settings that all algorithms with a replay buffer share, and functions that draw a minibatch and its noise."""

from typing import NamedTuple, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import distributed, rng
from ecrl.algorithms.core import Run, Static, reward_norm_init, scaled_reward
from ecrl.algorithms.interleaved import new_replay, sample_keys
from ecrl.algorithms.optimizer_config import LearningConfig
from ecrl.config.model import Count, Fraction, Natural, Positive
from ecrl.errors import ConfigError
from ecrl.kernels import Replay, replay_index, replay_read, replay_stack
from ecrl.policies.frame_stack import newest_mask
from ecrl.pytree import replaced


class ReplayConfig(LearningConfig):
    """Settings of the replay buffer, of the minibatches and of the gradient steps."""

    gamma: Fraction = Field(default=0.99, description="discount per step")
    n_step: Count = Field(default=1, description="number of rewards in the target of a transition (n-step returns)")
    capacity: Count = Field(
        default=100_000, description="steps in the replay buffer of a rank, over all environments of the rank"
    )
    batch_size: Count = Field(default=256, description="transitions per gradient step, on each rank")
    learning_starts: Natural = Field(
        default=1_000, description="environment steps, over all environments, before the first gradient step"
    )
    train_freq: Count = Field(default=1, description="number of steps of each environment between two updates")
    gradient_steps: Count = Field(default=1, description="number of gradient steps per update")
    max_grad_norm: Positive = Field(
        default=10.0, description="largest global norm of the gradients; larger gradients are scaled down"
    )
    normalize_reward: bool = Field(
        default=False, description="divide sampled rewards by the standard deviation of returns"
    )

    @model_validator(mode="after")
    def _no_distance(self) -> "ReplayConfig":
        if self.lr_scheduler is not None and self.lr_scheduler.name == "adaptive":
            raise ValueError(
                "lr_scheduler adaptive needs the KL to the policy that collected the steps, which learning from replay "
                "does not have; use another schedule"
            )
        return self

    @model_validator(mode="after")
    def _batch_fits(self) -> "ReplayConfig":
        if self.batch_size > self.capacity:
            raise ValueError(f"batch_size {self.batch_size:,} is above capacity {self.capacity:,}; change one of them")
        return self


class Sampling(NamedTuple):
    """Settings that determine how an update draws its transitions."""

    batch_size: int
    gradient_steps: int
    n_step: int


def sampling_choices(cfg: ReplayConfig) -> Sampling:
    """Return the `Sampling` settings of a config."""
    return Sampling(cfg.batch_size, cfg.gradient_steps, cfg.n_step)


def check_steps(run: Run, cfg: ReplayConfig) -> None:
    """Raise ConfigError if the buffer is too short for n-step transitions and stacks of observations."""
    needed = cfg.n_step + run.policy.frame_stack
    if (steps := cfg.capacity // run.static.num_envs) < needed:
        stacked = f" and frame_stack {run.policy.frame_stack}" * (run.policy.frame_stack > 1)
        raise ConfigError(
            f"algorithm.cfg.capacity: {cfg.capacity:,} has room for {steps:,} steps of each environment, but a "
            f"transition of n_step {cfg.n_step}{stacked} needs {needed}; make it larger"
        )


def replay_fields(cfg: ReplayConfig, run: Run, device: torch.device) -> dict[str, TensorDict]:
    """Return a dict with the state field `replay`, an empty buffer.

    If rewards are scaled, the dict also has the state field `norm`, with the reward statistics.
    """
    fields = {"replay": new_replay(run, cfg.capacity, device)}
    return fields | ({"norm": reward_norm_init(run.static.num_envs, device)} if cfg.normalize_reward else {})


def noise_keys(state: TensorDict, size: int, count: Tensor) -> Tensor:
    """Return the keys `[size]` of the noise in a gradient step.

    The keys depend on the key of the run, the rank and `count`, which differs for each gradient step of the run.
    """
    index = torch.arange(size, device=state["key"].device) + distributed.rank() * size
    # `sample_keys` also calls `rng.stream` with negative steps, so `fold_in` makes the keys of the noise differ.
    return rng.fold_in(rng.stream(state["key"], rng.UPDATE, index, -1 - count), 1)


def phase(cfg: ReplayConfig, sample_step: int) -> str:
    """Return "collect" before `learning_starts` environment steps, and "learn" from then on."""
    return "learn" if sample_step >= cfg.learning_starts else "collect"


def gradient_steps(cfg: ReplayConfig, static: Static) -> int:
    """Return the number of gradient steps of an iteration in the phase "learn"."""
    return static.buffer_size // cfg.train_freq * cfg.gradient_steps


def sample(run: Run, state: TensorDict, replay: Replay, sampling: Sampling) -> TensorDict:
    """Draw the transitions of an update uniformly at random.

    Returns: the transitions of `read`, `[gradient_steps * batch_size]`.
    """
    keys = sample_keys(run, state, sampling.gradient_steps * sampling.batch_size)
    index = replay_index(replay, keys, n=sampling.n_step, stack=run.policy.frame_stack)
    return read(run, state, replay, index, sampling)


def read(run: Run, state: TensorDict, replay: Replay, index: Tensor, sampling: Sampling) -> TensorDict:
    """Read transitions by `replay_read`, or by `replay_stack` if the policy sees stacks of observations.

    If the state has reward statistics, the rewards are scaled by `scaled_reward`:

        clip(reward / sqrt(variance(return) + 1e-8), -10, 10),    with the discounted sum of `n_step` rewards as reward

    The variance is computed from the steps before the current turn. The buffer stores the unscaled rewards.
    """
    gamma, stack = state["hyper", "gamma"], run.policy.frame_stack
    if stack == 1:
        batch = replay_read(replay, index, gamma=gamma, n=sampling.n_step)
    else:
        batch = replay_stack(replay, index, gamma=gamma, n=sampling.n_step, stack=stack)
        batch = replaced(batch, {name: newest_mask(batch[name]) for name in ("obs", "next_obs")})
    norm = cast(TensorDict, state["norm"])
    if "reward" not in norm:
        return batch
    return replaced(batch, {"reward": scaled_reward(batch["reward"], cast(TensorDict, norm["reward"]))})
