"""PPO in the structure of LeanRL. The loop is CleanRL's, and the policy, GAE and the update are compiled.

LeanRL (github.com/pytorch-labs/LeanRL) has no PPO for small discrete tasks. This file has the structure of its PPO for
continuous actions, with a categorical policy. The steps are TensorDicts, and acting uses a copy of the networks with
detached parameters. The loop of GAE is unrolled in one graph. On a CPU, LeanRL uses no CUDA graphs.
"""

from collections.abc import Callable, Iterator
from typing import cast

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, from_module
from torch import Tensor, nn

from benchmarks.other_libraries import STEPS, as_work
from benchmarks.other_libraries.cleanrl_ppo import CLIP, EPOCHS, GAMMA, LAMBDA, MINIBATCHES, network


class Agent(nn.Module):
    """Separate networks for the policy and the value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = network(2, 0.01), network(1, 1.0)

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample actions, and return the actions, their log-probabilities and the values."""
        log_probs = self.actor(obs).log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1)
        return action[:, 0], log_probs.gather(1, action)[:, 0], self.critic(obs)[:, 0]


def iterations(num_envs: int, seed: int = 0) -> Iterator[float]:
    """Yield the mean length of an episode, which equals its return, after each rollout and its update."""
    torch.manual_seed(seed)
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))] * num_envs,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    agent, acting = Agent(), Agent()
    cast(TensorDict, from_module(agent)).data.to_module(acting)  # the same memory, without gradients
    optimizer = torch.optim.Adam(agent.parameters(), lr=torch.tensor(1e-3), eps=1e-5)
    act, gae_of = torch.compile(acting.act), torch.compile(gae, fullgraph=True)
    update = torch.compile(lambda batch: take_gradient_step(batch, agent, optimizer))
    obs, done = torch.as_tensor(envs.reset(seed=seed)[0]), torch.zeros(num_envs)
    while True:
        steps = []
        for _ in range(STEPS):
            with torch.no_grad():
                action, log_prob, value = act(obs)
            new, reward, terminated, truncated, _ = envs.step(action.numpy())
            fields = {"obs": obs, "done": done, "value": value, "action": action, "log_prob": log_prob}
            fields["reward"] = torch.as_tensor(reward, dtype=torch.float32)
            steps.append(TensorDict(fields, [num_envs]))
            obs, done = torch.as_tensor(new), torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        rollout = cast(TensorDict, torch.stack(steps))  # pyright: ignore
        reward, value, was_done = (cast(Tensor, rollout[name]) for name in ("reward", "value", "done"))
        with torch.no_grad():
            advantage = gae_of(reward, value, was_done, acting.critic(obs)[:, 0], done)
        rollout.update({"advantage": advantage, "returns": advantage + value})
        flat = rollout.flatten()
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(flat)).split(len(flat) // MINIBATCHES):
                update(cast(TensorDict, flat)[rows])
        yield STEPS * num_envs / max(1.0, float(was_done.sum()))


def gae(reward: Tensor, value: Tensor, done: Tensor, last_value: Tensor, last_done: Tensor) -> Tensor:
    """Return the generalised advantage estimate, in a loop that the compiler unrolls."""
    advantages, trace, next_value, goes_on = [], torch.zeros_like(last_value), last_value, 1.0 - last_done
    for r, v, d in reversed([*zip(reward.unbind(), value.unbind(), done.unbind(), strict=True)]):
        trace = r + GAMMA * next_value * goes_on - v + GAMMA * LAMBDA * goes_on * trace
        advantages.append(trace)
        next_value, goes_on = v, 1.0 - d
    return torch.stack(advantages[::-1])


def take_gradient_step(batch: TensorDict, agent: Agent, optimizer: torch.optim.Optimizer) -> Tensor:
    """Take a gradient step on a minibatch, and return the loss."""
    optimizer.zero_grad()
    obs, action, old_log_prob = (cast(Tensor, batch[name]) for name in ("obs", "action", "log_prob"))
    log_probs, value = agent.actor(obs).log_softmax(-1), agent.critic(obs)[:, 0]
    ratio = (log_probs.gather(1, action.unsqueeze(1))[:, 0] - old_log_prob).exp()
    chosen = cast(Tensor, batch["advantage"])
    chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
    policy_loss = torch.max(-chosen * ratio, -chosen * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss - 0.01 * entropy + 0.5 * 0.5 * ((value - batch["returns"]) ** 2).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def make(num_envs: int) -> Callable[[], int]:
    """Return a function that runs one rollout and its update, and returns the number of environment steps."""
    return as_work(iterations(num_envs), num_envs * STEPS)
