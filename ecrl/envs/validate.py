"""Check the states of an environment before a run starts.

An error message names the function that returned an invalid state, and says what is wrong.
"""

from functools import cache
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.envs.core import Env, checked_state
from ecrl.errors import ConfigError
from ecrl.spaces import Box, Dict, Space, element_shape, observation_dtype

_SAME_FIELDS = "both must return the same fields"
_FLAGS = ("terminated", "truncated")


def _type_text(dtype: torch.dtype, shape: Any) -> str:
    return f"{dtype} {list(shape)}".removeprefix("torch.")


def _zero_action(space: Space, batch: torch.Size) -> Tensor:
    """Return zero actions, clamped to the bounds of a Box space."""
    if not isinstance(space, Box):
        return torch.zeros(*batch, *element_shape(space), dtype=torch.int64)
    low, high = (torch.tensor(bound).reshape(space.shape) for bound in (space.low, space.high))
    return torch.zeros(*batch, *space.shape).clamp(low, high)


def _field_types(state: Any, batch: torch.Size, call: str) -> dict[str, str]:
    """Map the dotted name of each tensor in a state to its dtype and shape. Error messages begin with `call`."""
    state = checked_state(state, call)
    if state.batch_size != batch:
        sizes = f"{list(state.batch_size)}, expected the batch size of the keys, {list(batch)}"
        raise ConfigError(f"{call} returns batch size {sizes}")
    leaves = state.items(True, True)
    return {".".join(k) if isinstance(k, tuple) else k: _type_text(x.dtype, x.shape) for k, x in leaves}


def _obs_types(space: Space, name: str, batch: torch.Size) -> dict[str, str]:
    """Map the dotted name of each observation tensor to its dtype and shape. An action mask is bool in any space."""
    if isinstance(space, Dict):
        parts = (_obs_types(part, f"{name}.{key}", batch) for key, part in space.items)
        return {key: text for part in parts for key, text in part.items()}
    return {name: _type_text(observation_dtype(name, space), (*batch, *element_shape(space)))}


def _check_required(env: Env, types: dict[str, str], batch: torch.Size, call: str) -> None:
    """Raise ConfigError if a required field is absent or has a wrong dtype or shape."""
    required = _obs_types(env.observation_space, "obs", batch)
    required |= {"reward": _type_text(torch.float32, batch)}
    required |= {flag: _type_text(torch.bool, batch) for flag in _FLAGS}
    required |= {"executed": _type_text(torch.int64, batch)} if "executed" in types else {}
    for name, expected in required.items():
        nested = any(key.startswith(f"{name}.") for key in types)
        actual = "a TensorDict" if nested else types.get(name, "")
        if actual != expected:
            reason = " (see observation_space)" if name.startswith("obs") else ""
            returned = f"field {name!r} as {actual}" if actual else f"no field {name!r}"
            raise ConfigError(f"{call} returns {returned}, expected {expected}{reason}")


def _check_same(before: dict[str, str], after: dict[str, str], label: str) -> None:
    """Raise ConfigError if `reset` and `step` return different fields, dtypes or shapes."""
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None:
            raise ConfigError(f"{label}: step returns field {name!r} as {new}, but reset does not; {_SAME_FIELDS}")
        if new is None:
            raise ConfigError(f"{label}: reset returns field {name!r} as {old}, but step does not; {_SAME_FIELDS}")
        if old != new:
            raise ConfigError(f"{label}: step returns field {name!r} as {new}, but reset as {old}; {_SAME_FIELDS}")


@cache
def check_fields(env: Env, name: str) -> None:
    """Raise ConfigError if an environment returns states that a run cannot use.

    The check resets and steps two copies of the environment on the CPU. Each `env` is checked only once. `reset` and
    `step` must return TensorDicts of batch size `[*B]` with the same fields, shapes and dtypes. The required fields are
    `obs`, `reward` (float32 `[*B]`), `terminated` and `truncated` (both bool `[*B]`). `obs` must have the shape and the
    dtype of the observation space. The dtype of a Discrete or MultiDiscrete space is int64, but an entry `action_mask`
    of a Dict space must be bool. The field `executed` (int64 `[*B]`) is optional. The check also calls `reset` with
    keys `[T, N]`, as `auto_reset` does. If `reset_unobserved` is set, it must return the fields of `reset` without
    `obs`. An environment that is not pure is not checked. Errors raised by the environment's own code are not caught.

    Args:
        env: the registered environment, before a run wraps it.
        name: the name of the environment for error messages.

    Raises: ConfigError that names the environment and says what is wrong. If a field of `reset` or `step` is wrong, the
        message gives the actual and the expected dtype and shape of the field.

    >>> from ecrl.envs import make_env
    >>> check_fields(make_env("cartpole"), "cartpole")
    """
    if not env.is_pure:
        return
    label, keys = f"env {name}", rng.split(rng.key(0), 2)
    key_rows = rng.split(rng.key(1), 6).reshape(3, 2)
    with torch.no_grad():
        start = env.reset(keys)
        before = _field_types(start, keys.shape, f"{label}: reset")
        _check_required(env, before, keys.shape, f"{label}: reset")
        call = f"{label}: reset of keys {list(key_rows.shape)}"
        _check_required(env, _field_types(env.reset(key_rows), key_rows.shape, call), key_rows.shape, call)
        if env.reset_unobserved:
            call = f"{label}: reset_unobserved"
            unobserved = _field_types(env.reset_unobserved(keys), keys.shape, call)
            expected = {name: kind for name, kind in before.items() if name.split(".")[0] != "obs"}
            if unobserved != expected:
                names = ", ".join(sorted(name for name, _ in unobserved.items() ^ expected.items()))
                raise ConfigError(f"{call} must return the fields of reset without obs; these differ: {names}")
        after: TensorDict = env.step(start, _zero_action(env.action_space, keys.shape), env.draw(keys))
    _check_same(before, _field_types(after, keys.shape, f"{label}: step"), label)
