"""Whether an environment keeps what a run relies on: `ecrl check-env ENV` and `ecrl.check_env`."""

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
from ecrl.env_check.findings import difference, ends, far, not_finite, outside, over_time, where, written
from ecrl.env_check.random_play import Play, play, random_actions
from ecrl.envs import Env, GymnasiumConfig, auto_reset, make_env
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError, UserError
from ecrl.pytree import flatten, mapped, unflatten

_NUM_ENVS, _MANY, _SECONDS = 4, 256, 0.3
_LIVE = ("token", "step")  # of environments outside of the tensors: which they are, not how they are


class EnvCheck(NamedTuple):
    """`findings`: a line for each fault, none where a run can rely on the environment; `notes`: what else was seen."""

    findings: list[str]
    notes: list[str]


def _part(tree: Any, *index: Any) -> Any:
    """Part of a tree, along its first axes."""
    return mapped(lambda x: x[index], tree, batch=lambda size: torch.empty(size)[index].shape)


def _repeated(env: Env, keys: Tensor, played: Play) -> Iterator[str]:
    again = play(env, keys, len(played.actions))
    env.close(_part(again.states, -1))
    one, other = ({k: x for k, x in over_time(p).items() if k not in _LIVE} for p in (played, again))
    if found := difference(one, other):
        name, (step, row, *_) = found
        yield (
            f"{name} is another {where(step, row)} when a play is repeated; draw from the key or noise given, with "
            "ecrl.rng, and keep all that changes in the state"
        )


def _apart(env: Env, keys: Tensor, played: Play) -> Iterator[str]:
    """Environments do not know of each other, nor draws of different times: the last one is as it is alone."""
    last, advice = slice(len(keys) - 1, None), "without the others; work on each row by itself"
    who = f"env {len(keys) - 1} another"
    if found := far(_part(played.start, last), env.reset(keys[last])):
        yield f"reset gives {who} {found} {advice}"
    if found := far(_part(played.noise, slice(1), last), play(env, keys[last], 1).noise):
        yield f"draw gives {who} {found} {advice}"
    for t in range(min(8, len(played.actions) - 1)):
        given = (played.states, t), (played.actions, t + 1), (played.noise, t + 1)
        alone = env.step(*(_part(tree, step, last) for tree, step in given))
        if found := far(_part(played.states, t + 1, last), alone):
            yield f"step gives {who} {found} {advice} (step {t + 1})"
            return


def _in_graph(env: Env, played: Play) -> Iterator[str]:
    """A step as a graph, as compiling would have it, gives what it gives in Python."""
    last = len(played.actions) - 1
    given = _part(played.states, last - 1), _part(played.actions, last), _part(played.noise, last)
    leaves, structure = flatten(given)
    try:
        graph, out = traced(env.step, structure, leaves)
        found = far(unflatten(out, graph(*leaves)), _part(played.states, last))
    except ConfigError as error:
        yield f"step cannot be compiled: {str(error).removeprefix('trainer.compile: ')}"
    except Exception as error:  # whatever its code raises on tensors without data
        told = next(iter(str(error).splitlines()), "")
        yield f"step cannot be compiled, it raises {type(error).__name__}: {told}; or set trainer.compile to off"
    else:
        if found:
            yield f"step gives another {found} as a graph; what it reads beside its arguments must not change"


def _rate(env: Env, keys: Tensor) -> float:
    """Env steps per second, eager, random actions drawn beforehand."""
    state, noise = env.reset(keys), env.draw(keys)
    action, steps = random_actions(env.action_space, keys, state["obs"]), 0
    state, began = env.step(state, action, noise), time.perf_counter()
    while time.perf_counter() < began + _SECONDS:
        state, steps = env.step(state, action, noise), steps + 1
    took = time.perf_counter() - began
    env.close(state)
    return steps * len(keys) / took


def _speed(env: Env, key: Tensor) -> tuple[list[str], str]:
    many = _MANY if env.is_pure else _NUM_ENVS
    one, all_of = (_rate(env, rng.split(key, n)) for n in (1, many))
    note = f"{one:,.0f} env steps/s with one env, {all_of:,.0f} with {many}, eager"
    batched = env.is_pure and env.scene is None  # physics is worked out one by one
    if batched and all_of < 2.0 * one:
        return [
            f"{many} envs take {many * one / all_of:.0f} times as long as one; step all rows in one operation"
        ], note
    return [], note


def _by_gymnasium(cfg: GymnasiumConfig) -> tuple[list[str], list[str]]:
    """What Gymnasium's own checker says of one environment: faults and advice."""
    import gymnasium
    from gymnasium.utils.env_checker import check_env as examine

    kwargs, found = cast(dict[str, Any], cfg.kwargs), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        env = gymnasium.make(cfg.id, max_episode_steps=cfg.max_episode_steps, **kwargs)
        try:
            examine(env.unwrapped, skip_render_check=True)
        except Exception as error:  # of the checker, or of the environment
            found = [f"Gymnasium's checker: {type(error).__name__}: {' '.join(str(error).split())}"]
        env.close()
    plain = [str(w.message).replace("\033[33mWARN: ", "").replace("\033[0m", "") for w in told]
    return found, [f"Gymnasium's checker: {line}" for line in dict.fromkeys(plain)]


def check_env(env: Env | EnvChoice | dict | str, *, num_steps: int = 256, seed: int = 0) -> EnvCheck:
    """Play an environment at random and tell what a run could not rely on.

    Looked at: fields, shapes and dtypes; observations against their space; NaN and infinity; the same play twice, bit
    for bit; inputs that are written on; rows that know of each other; starts, ends and final observations; whether a
    step can be compiled, and gives the same then; how fast it is. Environments of Gymnasium also go through its own
    checker. Four are played on the CPU. What an environment's own code raises passes as it is.

    Args:
        env: one as registered, or what names it in a config.
        num_steps: of the play.
        seed: of its starts, noise and actions.

    Raises: ConfigError if there is no such environment or its settings are wrong; UserError for fewer than two steps.

    >>> check_env("cartpole", num_steps=64).findings
    []
    """
    if num_steps < 2:
        raise UserError(f"num_steps: {num_steps}, expected at least 2")
    choice = None if isinstance(env, Env) else checked(EnvChoice, env, "env")
    made = env if isinstance(env, Env) else make_env(env)
    found, notes = [], []
    if choice is not None and isinstance(choice.cfg, GymnasiumConfig):
        found, notes = _by_gymnasium(choice.cfg)
    try:
        check_fields(made, "")
        keys = rng.split(rng.key(seed), _NUM_ENVS)
        found += written(play(made, keys, 1)) if made.is_pure else []
        seen, said = _played(auto_reset(made), keys, num_steps)
    except UserError as error:
        return EnvCheck([*found, str(error).removeprefix("env : ")], notes)
    slow, note = _speed(auto_reset(made), rng.key(seed))
    return EnvCheck(found + seen + slow, [*said, note, *notes])


def _played(env: Env, keys: Tensor, num_steps: int) -> tuple[list[str], list[str]]:
    """Findings and notes of a play."""
    played = play(env, keys, num_steps)
    env.close(_part(played.states, -1))
    seen = over_time(played)
    found = [*not_finite(seen), *ends(seen, env.lockstep)]
    for name in ("obs", "final_obs"):
        found += outside(env.observation_space, name, seen)
    found += _repeated(env, keys, played)
    if env.is_pure:
        found += [*_apart(env, keys, played), *_in_graph(env, played)]
    over = int((seen["terminated"] | seen["truncated"])[1:].sum())
    return found, [f"{over} episodes ended in {num_steps} steps of {len(keys)} envs"]
