"""Environments that only tests need, registered as a user would."""

import torch
from tensordict import TensorDict

from ecrl.config.model import ConfigModel
from ecrl.envs import Env, state_of
from ecrl.registry import register_env
from ecrl.spaces import Discrete, box


class LadderConfig(ConfigModel):
    """No settings."""


class EndlessConfig(ConfigModel):
    """No settings."""


@register_env("ladder")
def ladder(cfg: LadderConfig) -> Env:
    """Episode k of env i lasts i + 1 + 10 k steps. All episodes except the first of an env succeed.

    An env knows its index in the batch, and counts its episodes in `obs`, which a reset sets to 1.
    """

    def reset(keys):
        # A first reset has keys [N], the noise of auto-reset [T, N]: the latter is for second episodes.
        later = torch.full(keys.shape, float(keys.ndim > 1))
        index = torch.arange(keys.shape[-1]).expand(keys.shape)
        limit = index + 1 + 10 * later.to(torch.int64)
        info = TensorDict({"success": torch.zeros(keys.shape, dtype=torch.bool)}, keys.shape)
        return state_of(torch.zeros(*keys.shape, 1), keys.shape, limit=limit, later=later).set("info", info)

    def step(state, action, noise):
        limit = state["limit"] - 1
        after = {
            "limit": limit,
            "reward": torch.ones_like(state["reward"]),
            "terminated": limit == 0,
            "info": TensorDict({"success": (limit == 0) & (state["later"] > 0)}, state.batch_size),
        }
        return state.copy().update(after)

    return Env(reset, step, box(0.0, 1.0, 1), Discrete(2))


@register_env("endless")
def endless(cfg: EndlessConfig) -> Env:
    """Never ends."""

    def reset(keys):
        return state_of(torch.zeros(*keys.shape, 1), keys.shape)

    return Env(reset, lambda state, action, noise: state.copy(), box(0.0, 1.0, 1), Discrete(2))


class TellingConfig(ConfigModel):
    """No settings."""


@register_env("telling")
def telling(cfg: TellingConfig) -> Env:
    """Episodes of one step, whose metrics `slow` and `fast` are 1 and 2, each time in another order."""

    def info(batch, names):
        numbers = {"slow": torch.full(batch, 1.0), "fast": torch.full(batch, 2.0)}
        return TensorDict({"metrics": TensorDict({name: numbers[name] for name in names}, batch)}, batch)

    def reset(keys):
        return state_of(torch.zeros(*keys.shape, 1), keys.shape).set("info", info(keys.shape, ("slow", "fast")))

    def step(state, action, noise):
        after = state.copy().set("terminated", torch.ones_like(state["terminated"]))
        return after.set("info", info(state.batch_size, ("fast", "slow")))

    return Env(reset, step, box(0.0, 1.0, 1), Discrete(2))


class PausingConfig(ConfigModel):
    """No settings."""


@register_env("pausing")
def pausing(cfg: PausingConfig) -> Env:
    """Rounds of four steps: a pause that does not count and pays 1000, then an episode that pays 1, 1, 1.

    The observation is the place in the round, 1000 at the pause. Like a Gymnasium vector that spends a step on resets.
    """

    def reset(keys):
        no = torch.zeros(keys.shape, dtype=torch.bool)  # of no step: it must not reach the one that ended an episode
        return state_of(torch.full((*keys.shape, 1), 1000.0), keys.shape, mask=no)

    def step(state, action, noise):
        place = state["obs"][..., 0]
        pause = place == 1000.0
        after = {
            "obs": torch.where(pause, 1.0, place + 1.0).unsqueeze(-1),
            "reward": torch.where(pause, 1000.0, 1.0),
            "terminated": place == 3.0,
            "mask": ~pause,
        }
        return state.copy().update(after)

    return Env(reset, step, box(0.0, 1000.0, 1), Discrete(2))
