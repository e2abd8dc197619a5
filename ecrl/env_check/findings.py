"""What a play shows to be wrong with an environment; one line for each fault: what, where, what to do."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ecrl.env_check.random_play import Play, fields
from ecrl.spaces import Box, Dict, MultiDiscrete, Space


def over_time(played: Play) -> dict[str, Tensor]:
    """The fields of the states, the start first: `[T + 1, N, ...]`."""
    states = fields(played.states)
    return {name: torch.cat((x.unsqueeze(0), states[name])) for name, x in fields(played.start).items()}


def where(time: int, env: int) -> str:
    """A place in a play, in words."""
    return f"in env {env} " + (f"after step {time}" if time else "at the start")


def first(wrong: Tensor) -> list[int]:
    """The first place in which it is true."""
    return wrong.nonzero()[0].tolist()


def _any(wrong: Tensor) -> Tensor:
    """Of `[T, N, ...]`, whether it is true anywhere in a row, `[T, N]`."""
    return wrong.reshape(*wrong.shape[:2], -1).any(-1)


def written(played: Play) -> Iterator[str]:
    """Inputs that were written on."""
    for name, inputs in played.written.items():
        if inputs:
            yield f"{name} writes on its input {', '.join(inputs)}; give new tensors, as state.copy().update(...) does"


def _bounds(space: Space) -> tuple[Tensor, Tensor]:
    """The least and largest value of each element."""
    if isinstance(space, Box):
        return torch.tensor(space.low), torch.tensor(space.high)
    choices = torch.tensor(space.nvec if isinstance(space, MultiDiscrete) else [getattr(space, "n", 0)])
    return torch.zeros_like(choices), choices - 1


def outside(space: Space, name: str, seen: dict[str, Tensor]) -> Iterator[str]:
    """Where an observation is first not in its space."""
    if isinstance(space, Dict):
        for key, part in space.items:
            yield from outside(part, f"{name}.{key}", seen)
        return
    low, high = _bounds(space)
    x = seen[name].reshape(*seen[name].shape[:2], len(low))
    wrong = (x < low) | (x > high)  # not so NaN
    if wrong.any():
        time, env, i = first(wrong)
        told = f"{name}[{i}] is {x[time, env, i]:g}" if seen[name].ndim > 2 else f"{name} is {x[time, env, i]:g}"
        yield f"{told} {where(time, env)}, not in {low[i]:g} to {high[i]:g}; widen observation_space, or clip it"


def not_finite(seen: dict[str, Tensor]) -> Iterator[str]:
    """Where an observation or reward is NaN or infinite."""
    for name, x in seen.items():
        if name.partition(".")[0] in ("obs", "final_obs", "reward") and not x.isfinite().all():
            place = first(~x.isfinite())
            yield (
                f"{name} is {x[tuple(place)]:g} {where(place[0], place[1])}; a run would stop there "
                "(trainer.finite_guard): mend what it comes from"
            )


def ends(seen: dict[str, Tensor], lockstep: bool) -> Iterator[str]:
    """What is wrong about starts, ends and final observations."""
    over = seen["terminated"] | seen["truncated"]
    for flag in ("terminated", "truncated"):
        if seen[flag][0].any():
            place = where(0, first(seen[flag][0])[0])
            yield f"{flag} is true {place}: the episode is over before its first step; reset gives false there"
    if lockstep and (over != over[:, :1]).any():
        time, env = first(over != over[:, :1])
        yield f"episodes of envs 0 and {env} do not end together (step {time}), though lockstep is set; leave it out"
    for name in (name for name in seen if f"final_{name}" in seen and name.startswith("obs")):
        x, final = seen[name], seen[f"final_{name}"]
        wrong = _any((x != final) & ~(x.isnan() & final.isnan())) & ~over
        if wrong.any():
            yield f"final_{name} is not {name} {where(*first(wrong))}, where no episode ends; both are what was reached"


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[str, list[int]] | None:
    """The field in which two plays differ first, bit for bit, and where."""
    found: list[tuple[list[int], str]] = []
    for name, x in one.items():
        y = other[name]
        same = (x == y) | (x != x) & (y != y)
        if not same.all():
            found.append((first(~same), name))
    place, name = min(found, default=([], ""))
    return (name, place) if found else None


def far(one: Any, other: Any) -> str | None:
    """The first field in which two states are not nearly equal, and by how much at most."""
    for name, x in fields(one).items():
        y = fields(other)[name]
        if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name} (by up to {(x.double() - y.double()).abs().max():.2g})"
    return None
