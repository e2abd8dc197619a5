"""Check that an environment fulfils the contract of `Env`. `ecrl check-env ENV` and `ecrl.check_env` run these checks.

The first functions in this file take random actions in the environment. The functions in the middle of the file find
faults in the trajectory of these actions. The last functions in this file run all checks.
"""

import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.compile.user_line import is_outside
from ecrl.config import EnvChoice
from ecrl.config.model import validate_section
from ecrl.envs import NEVER, Env, auto_reset, make_env
from ecrl.envs.gymnasium import GymnasiumConfig
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import scan
from ecrl.pytree import flatten, mapped, names, unflatten
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space
from ecrl.tracing_state import version_of

_NUM_ENVS, _MANY, _SECONDS = 4, 256, 0.3
_LONGEST, _LONGEST_S = 4096, 20.0  # maximum steps and seconds to wait for the end of an episode
# fields that identify open Gymnasium environments, and therefore differ if a rollout is repeated
_REFERENCES = ("token", "step")
_MASK = "action_mask"
_PACKAGE = Path(__file__).resolve().parents[1]


class EnvCheck(NamedTuple):
    """Result of `check_env`.

    Attributes:
        findings: one message for each fault. The list is empty if the environment has no fault.
        notes: messages about other results, such as the speed of the environment.
    """

    findings: list[str]
    notes: list[str]


class Trajectory(NamedTuple):
    """States, actions and noise of a rollout with random actions.

    Attributes:
        start: the state that `reset` returned, `[N]`.
        states: the state after each step, `[T, N]`.
        actions: the action of each step, `[T, N]`.
        noise: the noise of each step, `[T, N]`.
        written: a dictionary that maps each of `reset`, `draw` and `step` to the names of the inputs that the function
            modified.
    """

    start: TensorDict
    states: TensorDict
    actions: Tensor
    noise: Any
    written: dict[str, list[str]]


def random_actions(space: Space, keys: Tensor, obs: Any) -> Tensor:
    """Draw one random action per key, uniform over the space.

    If a bound of an element of a Box is infinite, the element is drawn from a standard normal distribution instead, and
    clamped to the other bound if that bound is finite.

    If `obs` contains an action mask, only actions that the mask allows are drawn.

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


def _fields(tree: Any) -> dict[str, Tensor]:
    """Return a dictionary that maps the dotted name of each tensor in a tree to the tensor."""
    leaves, structure = flatten(tree)
    return dict(zip(names(structure), leaves, strict=True))


def _record_writes(written: list[str], fn: Callable[..., Any], **inputs: Any) -> Any:
    """Call `fn` and return its output. Append to `written` the names of inputs that `fn` changed, added or deleted."""
    before = _fields(inputs)
    versions = {name: version_of(x) for name, x in before.items()}
    out, after = fn(*inputs.values()), _fields(inputs)
    changed = [name for name, x in before.items() if after.get(name) is not x or version_of(x) != versions[name]]
    written += [name for name in (*changed, *(after.keys() - before.keys())) if name not in written]
    return out


def roll_out(env: Env, keys: Tensor, num_steps: int) -> Trajectory:
    """Take random actions in one environment per key, and return the trajectory.

    If `num_steps` is above 1, `env` must reset itself after the end of an episode, as with `auto_reset`.
    """
    written: dict[str, list[str]] = {"reset": [], "draw": [], "step": []}
    index, times = torch.zeros_like(keys), torch.arange(num_steps, device=keys.device).unsqueeze(1)
    start = _record_writes(written["reset"], env.reset, keys=keys.clone())
    noise = _record_writes(written["draw"], env.draw, keys=rng.stream(keys, rng.ENV, index, times))

    def step(state: TensorDict, row: tuple[Any, Tensor]) -> tuple[TensorDict, tuple[TensorDict, Tensor]]:
        action = random_actions(env.action_space, row[1], state["obs"])
        state = _record_writes(written["step"], env.step, state=state, action=action, noise=row[0])
        return state, (state, action)

    _, (states, actions) = scan(step, start, (noise, rng.stream(keys, rng.ACTION, index, times)))
    return Trajectory(start, states, actions, noise, written)


def _state_history(trajectory: Trajectory) -> dict[str, Tensor]:
    """Map the dotted name of each field to the field's values at the start and after each step, `[T + 1, N, ...]`."""
    states = _fields(trajectory.states)
    return {name: torch.cat((x.unsqueeze(0), states[name])) for name, x in _fields(trajectory.start).items()}


def _place_text(time: int, env: int) -> str:
    """Return the place of a fault for a message, such as "in env 2 after step 5"."""
    return f"in env {env} " + (f"after step {time}" if time else "at the start")


def _first_index(bad: Tensor) -> list[int]:
    """Return the index of the first True element of `bad`."""
    return bad.nonzero()[0].tolist()


def _any(bad: Tensor) -> Tensor:
    """Reduce a bool tensor from `[T, N, ...]` to `[T, N]` with a logical or."""
    return bad.reshape(*bad.shape[:2], -1).any(-1)


def _input_writes(trajectory: Trajectory) -> Iterator[str]:
    """Report each function that modified its inputs."""
    for name, inputs in trajectory.written.items():
        if inputs:
            yield f"{name} modifies its input {', '.join(inputs)}; return new tensors, as in state.copy().update(...)"


def _kept_fields(env: Env, keys: Tensor) -> Iterator[str]:
    """Report if `step` returns the reward or the flag `terminated` of its input state unchanged."""
    start, noise = env.reset(keys), env.draw(keys)
    action = random_actions(env.action_space, keys, start["obs"])
    for name, values in (("reward", (0.0, 12345.0)), ("terminated", (False, True))):
        befores = [start.copy().set(name, torch.full_like(start[name], value)) for value in values]
        afters = [env.step(before, action, noise)[name] for before in befores]
        if all(torch.equal(after, before[name]) for before, after in zip(befores, afters, strict=True)):
            advice = ", to False if no episode terminates" if name == "terminated" else ""
            yield f"step returns the {name} of its input; set {name} in every step{advice}"


def _undeclared(space: Space, history: dict[str, Tensor]) -> Iterator[str]:
    """Report entries of a Dict observation that the space does not have. A policy does not see such entries."""
    if not isinstance(space, Dict):
        return
    parts = {name for name, _ in space.items}
    for name in sorted({name.split(".")[1] for name in history if name.startswith("obs.")} - parts):
        yield f"obs.{name} is not in observation_space, so a policy ignores it; add it to the space"


def _empty_masks(space: Space, history: dict[str, Tensor]) -> Iterator[str]:
    """Report the first mask that allows no value of a Discrete action, or of one entry of a MultiDiscrete action."""
    mask = history.get(f"obs.{_MASK}")
    if mask is None:
        return
    choices = space.nvec if isinstance(space, MultiDiscrete) else (mask.shape[-1],)
    empty = torch.stack([(part == 0).all(-1) for part in mask.split([*choices], -1)], -1).any(-1)
    if empty.any():
        place = _place_text(*_first_index(empty))
        yield f"obs.{_MASK} allows no action {place}; allow at least one action, or one value per MultiDiscrete entry"


def _ends(env: Env, state: TensorDict, keys: Tensor) -> bool:
    """Take random actions until an episode ends. Return False if none ends within the limits of steps and time."""
    began, index = time.perf_counter(), torch.zeros_like(keys)
    for step in range(_LONGEST):
        noise = env.draw(rng.stream(keys, rng.ENV, index, step))
        state = env.step(
            state, random_actions(env.action_space, rng.stream(keys, rng.ACTION, index, step), state["obs"]), noise
        )
        if bool((state["terminated"] | state["truncated"]).any()):
            return True
        if time.perf_counter() > began + _LONGEST_S:
            return False
    return False


def _endless(env: Env, trajectory: Trajectory, history: dict[str, Tensor], keys: Tensor) -> Iterator[str]:
    """Report if no episode of a pure environment ends, neither in the trajectory nor in the further steps of `_ends`.

    If a finite `min_truncation_gap` above the number of steps is declared, nothing is reported.
    """
    num_steps = len(trajectory.actions)
    if (history["terminated"] | history["truncated"])[1:].any() or num_steps < env.min_truncation_gap < NEVER:
        return
    if env.is_pure and not _ends(env, _part(trajectory.states, -1), keys):
        advice = "let step set terminated, wrap the environment in time_limit, or declare min_truncation_gap"
        yield f"no episode ended in {num_steps:,} steps, and none in up to {_LONGEST:,} further steps; {advice}"


def _bounds(space: Space) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each element of a space."""
    if isinstance(space, Box):
        return torch.tensor(space.low), torch.tensor(space.high)
    choices = torch.tensor(space.nvec if isinstance(space, MultiDiscrete) else [getattr(space, "n", 0)])
    return torch.zeros_like(choices), choices - 1


def _out_of_space(space: Space, name: str, history: dict[str, Tensor]) -> Iterator[str]:
    """Report the first value of the observation `name` that is outside its space.

    For a Dict space, the first such value of each entry is reported.
    """
    if isinstance(space, Dict):
        for key, part in space.items:
            yield from _out_of_space(part, f"{name}.{key}", history)
        return
    low, high = _bounds(space)
    x = history[name].reshape(*history[name].shape[:2], len(low))
    bad = (x < low) | (x > high)  # comparisons with NaN are False
    if bad.any():
        time, env, i = _first_index(bad)
        value = f"{name}[{i}] is {x[time, env, i]:g}" if history[name].ndim > 2 else f"{name} is {x[time, env, i]:g}"
        yield f"{value} {_place_text(time, env)}, outside of {low[i]:g} to {high[i]:g}; widen observation_space or clip"


def _not_finite(history: dict[str, Tensor]) -> Iterator[str]:
    """Report the first NaN or infinity in each observation and reward."""
    for name, x in history.items():
        if name.partition(".")[0] in ("obs", "final_obs", "reward") and not x.isfinite().all():
            place = _first_index(~x.isfinite())
            yield (
                f"{name} is {x[tuple(place)]:g} {_place_text(place[0], place[1])}; a run would stop there "
                "(trainer.finite_guard); fix its computation"
            )


def _episode_faults(history: dict[str, Tensor], lockstep: bool) -> Iterator[str]:
    """Report faults in episode starts, episode ends and final observations."""
    done = history["terminated"] | history["truncated"]
    for flag in ("terminated", "truncated"):
        if history[flag][0].any():
            place = _place_text(0, _first_index(history[flag][0])[0])
            yield f"{flag} is true {place}: the episode is over before its first step; return false from reset"
    if lockstep and (done != done[:, :1]).any():
        time, env = _first_index(done != done[:, :1])
        yield f"episodes of envs 0 and {env} do not end together (step {time}), but lockstep is set; leave lockstep out"
    for name in (name for name in history if f"final_{name}" in history and name.startswith("obs")):
        x, final = history[name], history[f"final_{name}"]
        bad = _any((x != final) & ~(x.isnan() & final.isnan())) & ~done
        if bad.any():
            place = _place_text(*_first_index(bad))
            yield f"final_{name} is not {name} {place}, but no episode ends there; set both to the new observation"


def _executed_faults(history: dict[str, Tensor]) -> Iterator[str]:
    """Report the first action that executed no environment step."""
    if "executed" in history and (none := history["executed"][1:] < 1).any():
        time, env = _first_index(none)
        number = history["executed"][time + 1, env]
        yield f"executed is {number} {_place_text(time + 1, env)}; an action takes at least 1 step of the environment"


def _early_truncations(history: dict[str, Tensor], gap: int) -> Iterator[str]:
    """Report the first truncation before step `gap` of an episode.

    A run could lose the final observation of an episode that is truncated too early. In a game with lives, an episode
    is one life, and the steps are counted from the start of the game.
    """
    elapsed = torch.zeros_like(history["reward"][0], dtype=torch.int64)
    ended, whole = history["terminated"] | history["truncated"], "episode"
    if "info.game_score" in history:
        ended, whole = ~history["info.game_score"].isnan(), "game"
    for step, truncated in enumerate(history["truncated"]):
        early = truncated & (elapsed < gap)
        if step and early.any():
            (env,) = _first_index(early)
            declared = "no truncation" if gap == NEVER else f"no truncation before step {gap}"
            place = f"{_place_text(step, env)}, at step {elapsed[env]} of the {whole}"
            yield f"truncated is true {place}, but min_truncation_gap declares {declared}; lower this gap"
            return
        elapsed = elapsed.masked_fill(ended[step], 0) + 1


def _difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> tuple[str, list[int]] | None:
    """Return the name of the field that differs first between two trajectories, and the index of the difference.

    The result is None if no field differs. Two NaN values count as equal.
    """
    mismatches: list[tuple[list[int], str]] = []
    for name, x in one.items():
        y = other[name]
        same = (x == y) | (x != x) & (y != y)
        if not same.all():
            mismatches.append((_first_index(~same), name))
    place, name = min(mismatches, default=([], ""))
    return (name, place) if mismatches else None


def _first_mismatch(one: Any, other: Any) -> str | None:
    """Return the first field that differs by more than rounding, with its largest difference, or None."""
    for name, x in _fields(one).items():
        y = _fields(other)[name]
        if not torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"{name} (by up to {(x.double() - y.double()).abs().max():.2g})"
    return None


def _part(tree: Any, *index: Any) -> Any:
    """Index every tensor of a tree along the tensor's leading axes."""
    return mapped(lambda x: x[index], tree, batch=lambda size: torch.empty(size)[index].shape)


def _check_repeatable(env: Env, keys: Tensor, trajectory: Trajectory) -> Iterator[str]:
    """Repeat a rollout from the same keys, and report the first value that differs."""
    repeat = roll_out(env, keys, len(trajectory.actions))
    env.close(_part(repeat.states, -1))
    one, other = ({k: x for k, x in _state_history(p).items() if k not in _REFERENCES} for p in (trajectory, repeat))
    if mismatch := _difference(one, other):
        name, (step, row, *_) = mismatch
        yield (
            f"{name} differs {_place_text(step, row)} when the rollout is repeated; draw only from the key or the "
            "noise, with ecrl.rng, and store everything that changes in the state; in a Gymnasium environment, draw "
            "only from self.np_random"
        )


def _check_independent_rows(env: Env, keys: Tensor, trajectory: Trajectory) -> Iterator[str]:
    """Report functions whose results for one environment depend on the other environments of the batch.

    The last environment of the batch must give the same values if it runs alone.
    """
    last, advice = slice(len(keys) - 1, None), "without the other envs; compute each env independently"
    who = f"env {len(keys) - 1} a different"
    if mismatch := _first_mismatch(_part(trajectory.start, last), env.reset(keys[last])):
        yield f"reset gives {who} {mismatch} {advice}"
    if mismatch := _first_mismatch(_part(trajectory.noise, slice(1), last), roll_out(env, keys[last], 1).noise):
        yield f"draw gives {who} {mismatch} {advice}"
    for t in range(min(8, len(trajectory.actions) - 1)):
        inputs = (trajectory.states, t), (trajectory.actions, t + 1), (trajectory.noise, t + 1)
        single = env.step(*(_part(tree, step, last) for tree, step in inputs))
        if mismatch := _first_mismatch(_part(trajectory.states, t + 1, last), single):
            yield f"step gives {who} {mismatch} {advice} (step {t + 1})"
            return


def _check_traceable(env: Env, trajectory: Trajectory) -> Iterator[str]:
    """Report if `step` cannot be traced into a graph, or if the graph gives different values than `step`."""
    last = len(trajectory.actions) - 1
    inputs = _part(trajectory.states, last - 1), _part(trajectory.actions, last), _part(trajectory.noise, last)
    leaves, structure = flatten(inputs)
    from ecrl.compile.trace import traced  # import here, because the module needs private functions of torch

    try:
        graph, out = traced(env.step, structure, leaves)
        mismatch = _first_mismatch(unflatten(out, graph(*leaves)), _part(trajectory.states, last))
    except ConfigError as error:
        yield f"step cannot be compiled: {str(error).removeprefix('trainer.compile: ')}"
    except Exception as error:  # an environment may raise any error if its tensors have no data
        reason = next(iter(str(error).splitlines()), "")
        yield (
            f"step cannot be compiled, because it raises {type(error).__name__}: {reason}; "
            "change step, or set trainer.compile to off"
        )
    else:
        if mismatch:
            yield f"step gives a different {mismatch} as a graph; let step read only its arguments and constants"


def _steps_per_second(env: Env, keys: Tensor) -> float:
    """Measure the number of environment steps per second without compilation.

    The random actions are drawn only once.
    """
    state, noise = env.reset(keys), env.draw(keys)
    action, steps = random_actions(env.action_space, keys, state["obs"]), 0
    state, began = env.step(state, action, noise), time.perf_counter()
    while time.perf_counter() < began + _SECONDS:
        state, steps = env.step(state, action, noise), steps + 1
    took = time.perf_counter() - began
    env.close(state)
    return steps * len(keys) / took


def _check_speed(env: Env, key: Tensor) -> tuple[list[str], str]:
    """Measure the speed of one and of many environments. Return findings and a note.

    A finding reports a batch that is less than twice as fast as one environment. The speeds of MuJoCo environments and
    of environments that are not pure are only noted.
    """
    many = _MANY if env.is_pure else _NUM_ENVS
    one, many_rate = (_steps_per_second(env, rng.split(key, n)) for n in (1, many))
    note = f"{one:,.0f} env steps/s with one env, {many_rate:,.0f} with {many}, eager"
    batched = env.is_pure and env.scene is None  # MuJoCo steps its environments one by one
    if batched and many_rate < 2.0 * one:
        return [
            f"{many} envs take {many * one / many_rate:.0f} times as long as one; step all envs in one operation"
        ], note
    return [], note


def _gymnasium_checker(cfg: GymnasiumConfig) -> tuple[list[str], list[str]]:
    """Return the errors and the warnings that Gymnasium's checker reports for one environment."""
    import gymnasium
    from gymnasium.utils.env_checker import check_env as gymnasium_check

    findings: list[str] = []
    with warnings.catch_warnings(record=True) as captured:
        warnings.simplefilter("always")
        env = gymnasium.make(cfg.id, **cast(dict[str, Any], cfg.kwargs))
        try:
            gymnasium_check(env.unwrapped, skip_render_check=True)
        except Exception as error:  # the checker or the environment may raise any error
            findings = [f"Gymnasium's checker: {type(error).__name__}: {' '.join(str(error).split())}"]
        env.close()
    plain = [str(w.message).replace("\033[33mWARN: ", "").replace("\033[0m", "") for w in captured]
    return findings, [f"Gymnasium's checker: {line}" for line in dict.fromkeys(plain)]


def check_env(env: Env | EnvChoice | dict | str, *, num_steps: int = 256, seed: int = 0) -> EnvCheck:
    """Take random actions in an environment and report its faults.

    The function makes these checks:

    - States have the required fields, shapes and dtypes, and observations are within their space.
    - Observations and rewards are finite.
    - A repeated rollout with the same keys and actions gives the same values.
    - No function modifies its inputs, and the environments of a batch are independent.
    - Episode starts, episode ends, final observations and `executed` are consistent, and episodes end.
    - `step` sets the reward and `terminated`.
    - The observation space has all entries of a Dict observation, and action masks allow an action.
    - A step can be compiled, and the compiled step gives the same values.
    - A batch of 256 environments takes at least twice as many steps per second as one environment.

    An environment that is not pure, such as a Gymnasium environment, need not pass all checks. The checks of fields,
    shapes, dtypes, modified inputs, independence, endless episodes, `step`'s reward and `terminated`, compilation and
    speed are only for pure environments. The speed of MuJoCo tasks is noted, but not checked.

    If `env` names a Gymnasium environment, Gymnasium's own checker also runs. Apart from the measurement of speed, the
    random actions are taken in four environments on the CPU. An error that the environment's own code raises is a
    finding with the line of the code.

    Args:
        env: an environment, its name, or the `env` section of a config.
        num_steps: number of steps with random actions.
        seed: random seed of the initial states, the noise and the actions.

    Raises: ConfigError if the environment is unknown or its settings are wrong. UserError if `num_steps` is less than
        2.

    >>> check_env("cartpole", num_steps=64).findings
    []
    """
    if num_steps < 2:
        raise UserError(f"num_steps: {num_steps}, expected at least 2")
    choice = None if isinstance(env, Env) else validate_section(EnvChoice, env, "env")
    checked_env = env if isinstance(env, Env) else make_env(env)
    findings, notes = [], []
    if choice is not None and isinstance(choice.cfg, GymnasiumConfig):
        findings, notes = _gymnasium_checker(choice.cfg)
    try:
        if wrong := _wrong_spaces(checked_env):
            return EnvCheck(findings + wrong, notes)
        found, more_notes = _check_everything(checked_env, num_steps, seed)
        findings, notes = findings + found, [*more_notes, *notes]
    except UserError as error:
        findings.append(str(error).removeprefix("env : "))
    except Exception as error:  # the code of an environment may raise any error
        findings.append(_own_error(error))
    return EnvCheck(findings, notes)


def _wrong_spaces(env: Env) -> list[str]:
    """Report each observation or action space that is not a space of `ecrl.spaces`, and actions that are a Dict."""
    if isinstance(env.action_space, Dict):
        return ["action_space is a Dict, expected a Box, Discrete or MultiDiscrete; join its parts into one action"]
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    return [
        f"{name} is {type(space).__module__}.{type(space).__name__}, expected a space of ecrl.spaces; "
        "from_gymnasium converts spaces of Gymnasium"
        for name, space in spaces.items()
        if not isinstance(space, Box | Discrete | MultiDiscrete | Dict)
    ]


def _own_error(error: Exception) -> str:
    """Describe an error that the environment's code raised, with the file and line of this code.

    If the traceback has no line outside of ecrl and its libraries, the error is raised again.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_outside(frame)]
    own = [frame for frame in frames if _PACKAGE not in Path(frame.filename).parents]
    if not own:
        raise error
    reason = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{own[-1].name} raises {type(error).__name__}: {reason} ({own[-1].filename}:{own[-1].lineno})"


def _check_everything(env: Env, num_steps: int, seed: int) -> tuple[list[str], list[str]]:
    """Return the findings and notes of all checks that need no config.

    If a function modifies its inputs, only this fault is returned.
    """
    check_fields(env, "")
    keys = rng.split(rng.key(seed), _NUM_ENVS)
    if env.is_pure:
        if writes := [*_input_writes(roll_out(env, keys, 1))]:
            return writes, []  # all other findings may be consequences of the writes
        kept = [*_kept_fields(env, keys)]
    else:
        kept = []
    findings, notes = _check_rollout(auto_reset(env), keys, num_steps)
    speed_findings, note = _check_speed(auto_reset(env), rng.key(seed))
    return kept + findings + speed_findings, [*notes, note]


def _check_rollout(env: Env, keys: Tensor, num_steps: int) -> tuple[list[str], list[str]]:
    """Take random actions in the environment, and check the trajectory. Return findings and notes."""
    trajectory = roll_out(env, keys, num_steps)
    env.close(_part(trajectory.states, -1))
    history = _state_history(trajectory)
    findings = [*_not_finite(history), *_episode_faults(history, env.lockstep)]
    findings += [*_executed_faults(history), *_early_truncations(history, env.min_truncation_gap)]
    findings += [*_undeclared(env.observation_space, history), *_empty_masks(env.action_space, history)]
    findings += _endless(env, trajectory, history, keys)
    for name in ("obs", "final_obs"):
        findings += _out_of_space(env.observation_space, name, history)
    findings += _check_repeatable(env, keys, trajectory)
    num_ended = int((history["terminated"] | history["truncated"])[1:].sum())
    notes = [f"{num_ended} episodes ended in {num_steps} steps of {len(keys)} envs"]
    if env.is_pure:
        findings += _check_independent_rows(env, keys, trajectory)
        try:
            findings += _check_traceable(env, trajectory)
        except (ImportError, AttributeError) as error:
            notes.append(f"the graph of step was not checked: torch {torch.__version__} cannot trace it: {error}")
    return findings, notes
