"""Check that an environment fulfils its contract: `ecrl check-env ENV` and `ecrl.check_env`."""

import time
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ecrl import rng
from ecrl.compile.trace import traced
from ecrl.config import EnvChoice
from ecrl.config.model import checked
from ecrl.env_check.findings import (
    difference,
    episode_faults,
    first_mismatch,
    input_writes,
    not_finite,
    out_of_space,
    place_text,
    state_history,
)
from ecrl.env_check.random_play import Play, play, random_actions
from ecrl.envs import Env, GymnasiumConfig, auto_reset, make_env
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError, UserError
from ecrl.pytree import flatten, mapped, unflatten

_NUM_ENVS, _MANY, _SECONDS = 4, 256, 0.3
_LIVE = ("token", "step")  # fields that identify an environment outside of the tensors; they differ between plays


class EnvCheck(NamedTuple):
    """Result of `check_env`.

    Attributes:
        findings: a line per fault; empty for a sound environment.
        notes: further results, such as its speed.
    """

    findings: list[str]
    notes: list[str]


def _part(tree: Any, *index: Any) -> Any:
    """Index a tree along its first axes."""
    return mapped(lambda x: x[index], tree, batch=lambda size: torch.empty(size)[index].shape)


def _check_repeatable(env: Env, keys: Tensor, trajectory: Play) -> Iterator[str]:
    repeat = play(env, keys, len(trajectory.actions))
    env.close(_part(repeat.states, -1))
    one, other = ({k: x for k, x in state_history(p).items() if k not in _LIVE} for p in (trajectory, repeat))
    if mismatch := difference(one, other):
        name, (step, row, *_) = mismatch
        yield (
            f"{name} differs {place_text(step, row)} when the play is repeated; draw only from the given key or noise, "
            "with ecrl.rng, and keep everything that changes in the state"
        )


def _check_independent_rows(env: Env, keys: Tensor, trajectory: Play) -> Iterator[str]:
    """Report rows that depend on other rows: the last environment must give the same values on its own."""
    last, advice = slice(len(keys) - 1, None), "without the other envs; compute each row independently"
    who = f"env {len(keys) - 1} another"
    if mismatch := first_mismatch(_part(trajectory.start, last), env.reset(keys[last])):
        yield f"reset gives {who} {mismatch} {advice}"
    if mismatch := first_mismatch(_part(trajectory.noise, slice(1), last), play(env, keys[last], 1).noise):
        yield f"draw gives {who} {mismatch} {advice}"
    for t in range(min(8, len(trajectory.actions) - 1)):
        inputs = (trajectory.states, t), (trajectory.actions, t + 1), (trajectory.noise, t + 1)
        single = env.step(*(_part(tree, step, last) for tree, step in inputs))
        if mismatch := first_mismatch(_part(trajectory.states, t + 1, last), single):
            yield f"step gives {who} {mismatch} {advice} (step {t + 1})"
            return


def _check_traceable(env: Env, trajectory: Play) -> Iterator[str]:
    """Report a step that cannot be traced into a graph, or gives other values as a graph."""
    last = len(trajectory.actions) - 1
    inputs = _part(trajectory.states, last - 1), _part(trajectory.actions, last), _part(trajectory.noise, last)
    leaves, structure = flatten(inputs)
    try:
        graph, out = traced(env.step, structure, leaves)
        mismatch = first_mismatch(unflatten(out, graph(*leaves)), _part(trajectory.states, last))
    except ConfigError as error:
        yield f"step cannot be compiled: {str(error).removeprefix('trainer.compile: ')}"
    except Exception as error:  # the environment may raise anything on tensors without data
        reason = next(iter(str(error).splitlines()), "")
        yield f"step cannot be compiled, it raises {type(error).__name__}: {reason}; or set trainer.compile to off"
    else:
        if mismatch:
            yield f"step gives another {mismatch} as a graph; let it read only its arguments and constants"


def _steps_per_second(env: Env, keys: Tensor) -> float:
    """Measure env steps per second, eager, with random actions that are drawn once."""
    state, noise = env.reset(keys), env.draw(keys)
    action, steps = random_actions(env.action_space, keys, state["obs"]), 0
    state, began = env.step(state, action, noise), time.perf_counter()
    while time.perf_counter() < began + _SECONDS:
        state, steps = env.step(state, action, noise), steps + 1
    took = time.perf_counter() - began
    env.close(state)
    return steps * len(keys) / took


def _check_speed(env: Env, key: Tensor) -> tuple[list[str], str]:
    many = _MANY if env.is_pure else _NUM_ENVS
    one, many_rate = (_steps_per_second(env, rng.split(key, n)) for n in (1, many))
    note = f"{one:,.0f} env steps/s with one env, {many_rate:,.0f} with {many}, eager"
    batched = env.is_pure and env.scene is None  # MuJoCo steps the environments one by one
    if batched and many_rate < 2.0 * one:
        return [
            f"{many} envs take {many * one / many_rate:.0f} times as long as one; step all rows in one operation"
        ], note
    return [], note


def _gymnasium_checker(cfg: GymnasiumConfig) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings of Gymnasium's own checker for one environment."""
    import gymnasium
    from gymnasium.utils.env_checker import check_env as gymnasium_check

    kwargs, findings = cast(dict[str, Any], cfg.kwargs), []
    with warnings.catch_warnings(record=True) as captured:
        warnings.simplefilter("always")
        env = gymnasium.make(cfg.id, max_episode_steps=cfg.max_episode_steps, **kwargs)
        try:
            gymnasium_check(env.unwrapped, skip_render_check=True)
        except Exception as error:  # from the checker or from the environment
            findings = [f"Gymnasium's checker: {type(error).__name__}: {' '.join(str(error).split())}"]
        env.close()
    plain = [str(w.message).replace("\033[33mWARN: ", "").replace("\033[0m", "") for w in captured]
    return findings, [f"Gymnasium's checker: {line}" for line in dict.fromkeys(plain)]


def check_env(env: Env | EnvChoice | dict | str, *, num_steps: int = 256, seed: int = 0) -> EnvCheck:
    """Play an environment with random actions and report its faults.

    It checks:

    - fields, shapes and dtypes, and observations against their space;
    - NaN and infinity;
    - that the same play gives the same bits twice;
    - that no function writes on its inputs, and that rows are independent;
    - episode starts, episode ends and final observations;
    - that a step can be compiled and then gives the same values;
    - the speed of a batch.

    An environment of Gymnasium also goes through Gymnasium's own checker. The play has four environments on the CPU.
    Errors raised by the environment's own code are not caught.

    Args:
        env: a registered environment, or its name or section in a config.
        num_steps: steps of the play.
        seed: seed of its starts, noise and actions.

    Raises: ConfigError if there is no such environment or its settings are wrong; UserError for fewer than two steps.

    >>> check_env("cartpole", num_steps=64).findings
    []
    """
    if num_steps < 2:
        raise UserError(f"num_steps: {num_steps}, expected at least 2")
    choice = None if isinstance(env, Env) else checked(EnvChoice, env, "env")
    checked_env = env if isinstance(env, Env) else make_env(env)
    findings, notes = [], []
    if choice is not None and isinstance(choice.cfg, GymnasiumConfig):
        findings, notes = _gymnasium_checker(choice.cfg)
    try:
        check_fields(checked_env, "")
        keys = rng.split(rng.key(seed), _NUM_ENVS)
        findings += input_writes(play(checked_env, keys, 1)) if checked_env.is_pure else []
        play_findings, play_notes = _check_play(auto_reset(checked_env), keys, num_steps)
    except UserError as error:
        return EnvCheck([*findings, str(error).removeprefix("env : ")], notes)
    speed_findings, note = _check_speed(auto_reset(checked_env), rng.key(seed))
    return EnvCheck(findings + play_findings + speed_findings, [*play_notes, note, *notes])


def _check_play(env: Env, keys: Tensor, num_steps: int) -> tuple[list[str], list[str]]:
    """Play the environment, and return the findings and notes of the play."""
    trajectory = play(env, keys, num_steps)
    env.close(_part(trajectory.states, -1))
    history = state_history(trajectory)
    findings = [*not_finite(history), *episode_faults(history, env.lockstep)]
    for name in ("obs", "final_obs"):
        findings += out_of_space(env.observation_space, name, history)
    findings += _check_repeatable(env, keys, trajectory)
    if env.is_pure:
        findings += [*_check_independent_rows(env, keys, trajectory), *_check_traceable(env, trajectory)]
    num_ended = int((history["terminated"] | history["truncated"])[1:].sum())
    return findings, [f"{num_ended} episodes ended in {num_steps} steps of {len(keys)} envs"]
