"""Random episodes as plain lists, the transitions in them by a plain loop, and the write of a block into a ring."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from ecrl.kernels import Replay, replay_writes


def stored(replay: Replay) -> TensorDict:
    """Return a copy of the ring with the rows of the block."""
    ring: Any = replay.ring.clone()
    for part, write in replay_writes(replay).items():
        for path, rows in write["rows"].items(True, True):
            ring[part][path].index_copy_(0, write["index"], rows)
    return ring


@dataclass
class Step:
    """A step of one environment. Observations are numbers, each a different one."""

    obs: int
    reward: float
    terminated: bool
    truncated: bool
    final_obs: int
    mask: bool = True


@dataclass
class History:
    """All steps of some environments, `steps[e][t]`. Truncations of an environment are at least `gap` steps apart.

    With `masks`, some steps only store an observation: the last of an episode, or of one that breaks off.
    """

    num_envs: int
    gap: int
    seed: int
    masks: bool = False
    steps: list[list[Step]] = field(default_factory=list)

    def __post_init__(self):
        self.random, self.number = random.Random(self.seed), 0
        self.steps = [[] for _ in range(self.num_envs)]
        self.obs = [self._next() for _ in range(self.num_envs)]
        self.since = [self.random.randrange(self.gap) for _ in range(self.num_envs)]

    def _next(self) -> int:
        self.number += 1
        return self.number

    def take(self, length: int) -> TensorDict:
        """Take steps in every environment. Return them as rows `[length, N]`."""
        for _ in range(length):
            for e, steps in enumerate(self.steps):
                self.since[e] += 1
                if self.masks and self.random.random() < 0.2:
                    steps.append(Step(self.obs[e], 0.0, False, False, self.obs[e], mask=False))
                    self.obs[e] = self._next()
                    continue
                end, limit = self.random.random() < 0.1, self.since[e] >= self.gap and self.random.random() < 0.5
                self.since[e] = 0 if limit else self.since[e]
                reached = self._next()
                steps.append(Step(self.obs[e], self.random.randrange(-16, 17) / 8, end, limit, reached))
                self.obs[e] = self._next() if end or limit else reached
        return rows_of([steps[-length:] for steps in self.steps], self.masks)

    def skip(self, length: int, width: int) -> None:
        """Take steps that are not part of the history. The step before them keeps only its observation.

        So does a step whose final observation might be overwritten early, with slots of `width` steps.
        """
        size = len(self.steps[0])
        self.take(length)
        for steps in self.steps:
            del steps[size:]
            last = steps[-1]
            last.mask = last.mask and (last.terminated or last.truncated)
            for step in steps[size // width * width :]:
                step.mask = step.mask and not step.truncated

    def transition(self, e: int, t: int, n: int, gamma: float) -> tuple[float, float, int | None, bool]:
        """Return reward, discount, the next observation (None after the end) and terminated, by a plain loop."""
        reward, discount = 0.0, 1.0
        for k, step in enumerate(self.steps[e][t : t + n]):
            if k and not step.mask:
                return reward, discount, step.obs, False
            reward += discount * step.reward
            discount *= gamma
            if step.terminated:
                return reward, 0.0, None, True
            if step.truncated:
                return reward, discount, step.final_obs, False
        return reward, discount, self.steps[e][t + n].obs, False

    def frames(self, e: int, t: int, stack: int) -> list[int]:
        """Return the observations up to step t, with the first one of the episode repeated in front."""
        out = [self.steps[e][t].obs]
        while len(out) < stack:
            t -= 1
            starts = t < 0 or self.steps[e][t].terminated or self.steps[e][t].truncated or not self.steps[e][t].mask
            out = [out[0]] * (stack - len(out)) + out if starts else [self.steps[e][t].obs, *out]
        return out


def rows_of(steps: list[list[Step]], masks: bool) -> TensorDict:
    """Return steps of N environments as rows `[length, N]`, with `mask` if asked for."""

    def table(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[getattr(step, name) for step in env] for env in steps], dtype=dtype).t().contiguous()

    obs = table("obs", torch.float32)
    fields = {
        "obs": obs,
        "action": 2 * obs.to(torch.int64),
        "reward": table("reward", torch.float32),
        "terminated": table("terminated", torch.bool),
        "truncated": table("truncated", torch.bool),
        "final_obs": table("final_obs", torch.float32),
    }
    if masks:
        fields["mask"] = table("mask", torch.bool)
    return TensorDict(fields, obs.shape)
