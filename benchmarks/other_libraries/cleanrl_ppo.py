"""PPO in one file, as CleanRL structures it: a Gymnasium SyncVectorEnv, eager torch, NumPy in between."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.other_libraries import STEPS, as_work

EPOCHS, MINIBATCHES = 4, 4
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


def network(out: int, gain: float) -> nn.Sequential:
    """Return a 64x64 tanh network with orthogonal weights."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out)]
    for layer, scale in ((layers[0], 2**0.5), (layers[2], 2**0.5), (layers[4], gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Rollout(NamedTuple):
    """Fields of a rollout, `[T, N]` each; `done[t]` is true if `obs[t]` starts an episode."""

    obs: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    done: Tensor
    value: Tensor


def iterations(num_envs: int, seed: int = 0) -> Iterator[float]:
    """Yield the mean length of an episode, which equals its return, after each rollout and its update."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * num_envs,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    actor, critic = network(envs.single_action_space.n, 0.01), network(1, 1.0)  # pyright: ignore
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3, eps=1e-5)
    obs, done = torch.tensor(envs.reset(seed=seed)[0]), torch.zeros(num_envs)
    shapes = {"obs": (4,), "action": (), "log_prob": (), "reward": (), "done": (), "value": ()}
    rollout = Rollout(**{name: torch.zeros(STEPS, num_envs, *shape) for name, shape in shapes.items()})
    while True:
        obs, done = collect(rollout, envs, actor, critic, obs, done)
        with torch.no_grad():
            advantage = gae(rollout, critic(obs).flatten(), done)
        update(rollout, advantage, actor, critic, optimizer)
        yield STEPS * num_envs / max(1.0, float(rollout.done.sum()))


def collect(
    rollout: Rollout, envs: gym.vector.VectorEnv, actor: nn.Module, critic: nn.Module, obs: Tensor, done: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill the rollout and return its last observations and flags."""
    for t in range(STEPS):
        with torch.no_grad():
            choice = Categorical(logits=actor(obs))
            action = choice.sample()
            row = obs, action, choice.log_prob(action), torch.zeros(()), done, critic(obs).flatten()
        for field, value in zip(rollout, row, strict=True):
            field[t] = value
        new, reward, terminated, truncated, _ = envs.step(action.numpy())
        rollout.reward[t] = torch.tensor(reward)
        obs, done = torch.tensor(new), torch.tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
    return obs, done


def gae(rollout: Rollout, last_value: Tensor, last_done: Tensor) -> Tensor:
    """Return the generalised advantage estimate, computed step by step from the end."""
    advantage, trace = torch.zeros_like(rollout.reward), torch.zeros_like(last_value)
    for t in reversed(range(STEPS)):
        last = t == STEPS - 1
        goes_on = 1 - (last_done if last else rollout.done[t + 1])
        next_value = last_value if last else rollout.value[t + 1]
        delta = rollout.reward[t] + GAMMA * next_value * goes_on - rollout.value[t]
        trace = advantage[t] = delta + GAMMA * LAMBDA * goes_on * trace
    return advantage


def update(
    rollout: Rollout, advantage: Tensor, actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Take one gradient step on each shuffled minibatch of each epoch."""
    flat = Rollout(*(field.flatten(0, 1) for field in rollout))
    advantage, returns = advantage.flatten(), (advantage + rollout.value).flatten()
    order, size = np.arange(len(advantage)), len(advantage) // MINIBATCHES
    parameters = [*actor.parameters(), *critic.parameters()]
    for _ in range(EPOCHS):
        np.random.shuffle(order)
        for first in range(0, len(order), size):
            rows = order[first : first + size]
            choice, value = Categorical(logits=actor(flat.obs[rows])), critic(flat.obs[rows]).flatten()
            log_ratio = choice.log_prob(flat.action[rows]) - flat.log_prob[rows]
            ratio = log_ratio.exp()
            chosen = advantage[rows]
            chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
            policy_loss = torch.max(-chosen * ratio, -chosen * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            value_loss = 0.5 * ((value - returns[rows]) ** 2).mean()
            loss = policy_loss - 0.01 * choice.entropy().mean() + 0.5 * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


def make(num_envs: int) -> Callable[[], int]:
    """Return a function that runs one rollout and its update, and returns the number of environment steps."""
    return as_work(iterations(num_envs), num_envs * STEPS)
