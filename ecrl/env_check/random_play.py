"""Play an environment with random actions, and record its outputs and any writes on its inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs import Env
from ecrl.kernels import scan
from ecrl.pytree import flatten, names
from ecrl.spaces import Box, Discrete, MultiDiscrete, Space

_MASK = "action_mask"


class Play(NamedTuple):
    """A random play.

    Attributes:
        start: the state after reset, `[N]`.
        states: the state after each step, `[T, N]`.
        actions: the action of each step, `[T, N]`.
        noise: the noise of each step, `[T, N]`.
        written: for `reset`, `draw` and `step`, the names of the inputs that the function wrote on.
    """

    start: TensorDict
    states: TensorDict
    actions: Tensor
    noise: Any
    written: dict[str, list[str]]


def random_actions(space: Space, keys: Tensor, obs: Any) -> Tensor:
    """Draw one action per key, uniform over the space and an action mask in `obs`; normal if there are no bounds.

    >>> random_actions(Discrete(3), rng.key(0).expand(2), TensorDict({"action_mask": torch.eye(3)[:2]}, [2]))
    tensor([0, 1])
    """
    if isinstance(space, Box):
        low, high = (torch.tensor(bound, device=keys.device) for bound in (space.low, space.high))
        within = low + (high - low) * rng.uniform(keys, low.shape)
        action = torch.where(within.isfinite(), within, rng.normal(keys, low.shape).clamp(low, high))
        return action.reshape(*keys.shape, *space.shape)
    choices = (space.n,) if isinstance(space, Discrete) else cast(MultiDiscrete, space).nvec
    score = rng.uniform(keys, (sum(choices),))
    if isinstance(obs, TensorDict) and _MASK in obs:
        score = score.masked_fill(obs[_MASK] == 0, -1.0)
    chosen = [part.argmax(-1) for part in score.split(choices, -1)]
    return chosen[0] if isinstance(space, Discrete) else torch.stack(chosen, -1)


def fields(tree: Any) -> dict[str, Tensor]:
    """Return the tensors of a tree by dotted name."""
    leaves, structure = flatten(tree)
    return dict(zip(names(structure), leaves, strict=True))


def _record_writes(written: list[str], fn: Callable[..., Any], **inputs: Any) -> Any:
    """Call `fn` and return its output; append the names of inputs that it changed, set or deleted to `written`."""
    before = fields(inputs)
    versions = {name: x._version for name, x in before.items()}
    out, after = fn(*inputs.values()), fields(inputs)
    changed = [name for name, x in before.items() if after.get(name) is not x or x._version != versions[name]]
    written += [name for name in (*changed, *(after.keys() - before.keys())) if name not in written]
    return out


def play(env: Env, keys: Tensor, num_steps: int) -> Play:
    """Take random actions in the environments of `keys` `[N]`; `env` must reset itself (`auto_reset`)."""
    written: dict[str, list[str]] = {"reset": [], "draw": [], "step": []}
    index, times = torch.zeros_like(keys), torch.arange(num_steps, device=keys.device).unsqueeze(1)
    start = _record_writes(written["reset"], env.reset, keys=keys.clone())
    noise = _record_writes(written["draw"], env.draw, keys=rng.stream(keys, rng.ENV, index, times))

    def step(state: TensorDict, row: tuple[Any, Tensor]) -> tuple[TensorDict, tuple[TensorDict, Tensor]]:
        action = random_actions(env.action_space, row[1], state["obs"])
        state = _record_writes(written["step"], env.step, state=state, action=action, noise=row[0])
        return state, (state, action)

    _, (states, actions) = scan(step, start, (noise, rng.stream(keys, rng.ACTION, index, times)))
    return Play(start, states, actions, noise, written)
