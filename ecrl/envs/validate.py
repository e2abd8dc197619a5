"""What a run asks of an environment, checked once before it starts, so that a fault is said by its field."""

from functools import cache
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl import rng
from ecrl.envs.core import Env
from ecrl.errors import ConfigError
from ecrl.spaces import Box, Dict, Space, element_shape

_NEEDED = "a TensorDict with obs, reward, terminated and truncated"
_SAME = "both must give the same fields"
_FLAGS = ("terminated", "truncated")


def _kind(dtype: torch.dtype, shape: Any) -> str:
    return f"{dtype} {list(shape)}".removeprefix("torch.")


def _zero(space: Space, batch: torch.Size) -> Tensor:
    """The action 0, or what is nearest to it in a Box."""
    if not isinstance(space, Box):
        return torch.zeros(*batch, *element_shape(space), dtype=torch.int64)
    low, high = (torch.tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
    return torch.zeros(*batch, *space.shape).clamp(low, high)


def _fields(state: Any, batch: torch.Size, told: str) -> dict[str, str]:
    """Dtype and shape of the leaves of a state under dotted names."""
    if not isinstance(state, TensorDictBase):
        raise ConfigError(f"{told} gives {type(state).__name__}, expected {_NEEDED}")
    if state.batch_size != batch:
        raise ConfigError(f"{told} gives batch size {list(state.batch_size)}, expected {list(batch)}, that of the keys")
    leaves = state.items(True, True)
    return {".".join(k) if isinstance(k, tuple) else k: _kind(x.dtype, x.shape) for k, x in leaves}


def _observed(space: Space, name: str, batch: torch.Size) -> dict[str, tuple[str, ...]]:
    """What an observation of a space may be, by dotted name; masks of actions may be bool too."""
    if isinstance(space, Dict):
        parts = (_observed(part, f"{name}.{key}", batch) for key, part in space.items)
        return {key: kinds for part in parts for key, kinds in part.items()}
    dtypes = (torch.float32,) if isinstance(space, Box) else (torch.int64,)
    dtypes = (torch.bool, *dtypes) if name.endswith(".action_mask") else dtypes
    return {name: tuple(_kind(dtype, (*batch, *element_shape(space))) for dtype in dtypes)}


def _check_needed(env: Env, given: dict[str, str], batch: torch.Size, told: str) -> None:
    needed = _observed(env.observation_space, "obs", batch)
    needed |= {"reward": (_kind(torch.float32, batch),)} | {flag: (_kind(torch.bool, batch),) for flag in _FLAGS}
    for name, kinds in needed.items():
        nested = any(key.startswith(f"{name}.") for key in given)
        kind = "a TensorDict" if nested else given.get(name, "absent")
        if kind not in kinds:
            why = ", as observation_space says" if name.startswith("obs") else ""
            raise ConfigError(f"{told} gives field {name!r} as {kind}, expected {' or '.join(kinds)}{why}")


def _check_same(before: dict[str, str], after: dict[str, str], told: str) -> None:
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None:
            raise ConfigError(f"{told}: step gives field {name!r} as {new}, which reset does not give; {_SAME}")
        if new is None:
            raise ConfigError(f"{told}: reset gives field {name!r} as {old}, which step does not give; {_SAME}")
        if old != new:
            raise ConfigError(f"{told}: step gives field {name!r} as {new}, reset as {old}; {_SAME}")


@cache
def check_fields(env: Env, name: str) -> None:
    """Refuse an environment whose states a run cannot use: one reset and one step of two, on the CPU, once per env.

    `reset` and `step` must give TensorDicts `[*B]` of the same fields, of equal shapes and dtypes, among them `obs` as
    the observation space says (float32 of a Box, int64 of choices), `reward` float32 and `terminated` and `truncated`
    bool, all `[*B]`. `reset` is called with keys `[T, N]` too, as auto-reset does. An environment that is not pure is
    left alone. What the environment's own code raises passes as it is.

    Args:
        env: as registered, before any wrapper of a run.
        name: said in messages.

    Raises: ConfigError naming the environment, the field, what was given and what was expected.

    >>> from ecrl.envs import make_env
    >>> check_fields(make_env("cartpole"), "cartpole")
    """
    if not env.is_pure:
        return
    told, keys = f"env {name}", rng.split(rng.key(0), 2)
    rows = rng.split(rng.key(1), 6).reshape(3, 2)
    with torch.no_grad():
        start = env.reset(keys)
        before = _fields(start, keys.shape, f"{told}: reset")
        _check_needed(env, before, keys.shape, f"{told}: reset")
        many = f"{told}: reset of keys {list(rows.shape)}"
        _check_needed(env, _fields(env.reset(rows), rows.shape, many), rows.shape, many)
        after: TensorDict = env.step(start, _zero(env.action_space, keys.shape), env.draw(keys))
    _check_same(before, _fields(after, keys.shape, f"{told}: step"), told)
