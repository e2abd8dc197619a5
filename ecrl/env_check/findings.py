"""Find the faults of an environment in a random play; one line per fault with its place and a remedy."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ecrl.env_check.random_play import Play, fields
from ecrl.spaces import Box, Dict, MultiDiscrete, Space


def state_history(trajectory: Play) -> dict[str, Tensor]:
    """Return the fields of the start and of all states: `[T + 1, N, ...]`."""
    states = fields(trajectory.states)
    return {name: torch.cat((x.unsqueeze(0), states[name])) for name, x in fields(trajectory.start).items()}


def place_text(time: int, env: int) -> str:
    """Describe a place in a play for a message."""
    return f"in env {env} " + (f"after step {time}" if time else "at the start")


def first_index(bad: Tensor) -> list[int]:
    """Return the index of the first True."""
    return bad.nonzero()[0].tolist()


def _any(bad: Tensor) -> Tensor:
    """Reduce `[T, N, ...]` to `[T, N]`: True if any element is True."""
    return bad.reshape(*bad.shape[:2], -1).any(-1)


def input_writes(trajectory: Play) -> Iterator[str]:
    """Report the inputs that a function wrote on."""
    for name, inputs in trajectory.written.items():
        if inputs:
            yield f"{name} writes on its input {', '.join(inputs)}; return new tensors, as in state.copy().update(...)"


def _bounds(space: Space) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each element."""
    if isinstance(space, Box):
        return torch.tensor(space.low), torch.tensor(space.high)
    choices = torch.tensor(space.nvec if isinstance(space, MultiDiscrete) else [getattr(space, "n", 0)])
    return torch.zeros_like(choices), choices - 1


def out_of_space(space: Space, name: str, history: dict[str, Tensor]) -> Iterator[str]:
    """Report the first observation outside of its space."""
    if isinstance(space, Dict):
        for key, part in space.items:
            yield from out_of_space(part, f"{name}.{key}", history)
        return
    low, high = _bounds(space)
    x = history[name].reshape(*history[name].shape[:2], len(low))
    bad = (x < low) | (x > high)  # False for NaN
    if bad.any():
        time, env, i = first_index(bad)
        value = f"{name}[{i}] is {x[time, env, i]:g}" if history[name].ndim > 2 else f"{name} is {x[time, env, i]:g}"
        yield f"{value} {place_text(time, env)}, outside of {low[i]:g} to {high[i]:g}; widen observation_space or clip"


def not_finite(history: dict[str, Tensor]) -> Iterator[str]:
    """Report the first NaN or infinity in each observation and reward."""
    for name, x in history.items():
        if name.partition(".")[0] in ("obs", "final_obs", "reward") and not x.isfinite().all():
            place = first_index(~x.isfinite())
            yield (
                f"{name} is {x[tuple(place)]:g} {place_text(place[0], place[1])}; a run would stop there "
                "(trainer.finite_guard); fix the computation of it"
            )


def episode_faults(history: dict[str, Tensor], lockstep: bool) -> Iterator[str]:
    """Report faults of episode starts, episode ends and final observations."""
    done = history["terminated"] | history["truncated"]
    for flag in ("terminated", "truncated"):
        if history[flag][0].any():
            place = place_text(0, first_index(history[flag][0])[0])
            yield f"{flag} is true {place}: the episode is over before its first step; return false from reset"
    if lockstep and (done != done[:, :1]).any():
        time, env = first_index(done != done[:, :1])
        yield f"episodes of envs 0 and {env} do not end together (step {time}), though lockstep is set; leave it out"
    for name in (name for name in history if f"final_{name}" in history and name.startswith("obs")):
        x, final = history[name], history[f"final_{name}"]
        bad = _any((x != final) & ~(x.isnan() & final.isnan())) & ~done
        if bad.any():
            place = place_text(*first_index(bad))
            yield f"final_{name} is not {name} {place}, but no episode ends there; set both to the new observation"


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[str, list[int]] | None:
    """Return the first field and index at which two plays differ, compared bit for bit."""
    mismatches: list[tuple[list[int], str]] = []
    for name, x in one.items():
        y = other[name]
        same = (x == y) | (x != x) & (y != y)
        if not same.all():
            mismatches.append((first_index(~same), name))
    place, name = min(mismatches, default=([], ""))
    return (name, place) if mismatches else None


def first_mismatch(one: Any, other: Any) -> str | None:
    """Describe the first field that differs between two states beyond rounding, with its largest difference."""
    for name, x in fields(one).items():
        y = fields(other)[name]
        if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name} (by up to {(x.double() - y.double()).abs().max():.2g})"
    return None
