"""Off-policy iterations: one loop alternates environment steps and gradient steps on data from a replay buffer.

An algorithm defines a function `turn`, with the steps of the pseudocode in the algorithm's paper:

    def turn(run, state, noise, replay):
        state, steps = take_steps(run, state, noise)               # act, explore, step
        replay = store(run, replay, steps)                         # add the steps to the buffer
        if run.static.phase == "collect":                          # chosen on the host, see `Algorithm.phase`
            return state, replay, steps, {}
        keys = sample_keys(run, state, batch_size)
        index = replay_index(replay, keys, n=1, stack=1)           # sample
        batch = replay_read(replay, index, gamma=gamma, n=1)
        state, logs = learn(update, run, state, batch)
        return state, replay, steps, logs

`interleaved(turn)` turns this function into the `iterate` of an algorithm.

A turn does not depend on the length of an iteration. A turn receives a `run` and a `state` as if every iteration had
one turn. In `run.static`, `buffer_size` is the number of steps per turn. In the state, `update_step` and `iterations`
count turns. The counts of steps, such as `sample_step` and the cursor of the buffer, include the steps of earlier turns
of the same iteration. A step can be sampled as soon as the buffer has the `n` steps after it, where `n` is the number
of rewards in a target. After `store`, the same turn can therefore sample its new steps, except the newest `n` steps. In
a full buffer, new steps replace the oldest steps. Thus `trainer.buffer_size` does not change the result of learning,
with three exceptions. The phase is chosen once per iteration, the finite guard skips whole iterations, and the lengths
of learning-rate schedules are in iterations.

A buffer may have a sum tree, the field `tree` of `replay` in the state. A turn may change this tree (see
`ecrl.algorithms.prioritized`). The loop stores the new tree together with the new steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import distributed, rng
from ecrl.algorithms.core import (
    COUNTERS,
    REWARD_NORM_KINDS,
    Run,
    Static,
    batch_of,
    changed_fields,
    over_steps,
    reward_norm_update,
    step_keys,
    steps_taken,
    with_compiled_policy,
    with_episodes,
)
from ecrl.algorithms.state_kinds import Kind, Kinds
from ecrl.errors import ConfigError
from ecrl.kernels import Replay, act_and_step, replay_add, replay_cut, replay_init, replay_start, replay_writes
from ecrl.kernels.rollout import env_major, restarted_carry
from ecrl.memory import check_room
from ecrl.policies import Policy, policy_params
from ecrl.policies.contract import check_restart
from ecrl.policies.core import example
from ecrl.pytree import Borrowed, flatten, mapped, replaced
from ecrl.tracing_state import in_graph
from ecrl.types import Logs

REPLAY_KINDS: Kinds = {
    "replay": Kind.BUFFER,
    ("replay", "cursor"): Kind.COUNTER,
    "exploration": Kind.ENVIRONMENT,
    **REWARD_NORM_KINDS,
}
"""Kinds of the fields `replay`, `exploration` and `norm`, for the `kinds` of an algorithm."""

_FIXED = ("key", "hyper", "episode", *COUNTERS, "update_step", "iterations", "frozen_params")
_STEPS = ("key", *COUNTERS, "params", "norm", "env", "exploration", "carry", "frozen_params")


class StoredReplay(Replay):
    """Replay buffer after `store` has added the steps of the turn."""


_Carry = tuple[TensorDict, TensorDict, Tensor | None]
Turn = Callable[[Run, TensorDict, Any, Replay], tuple[TensorDict, Replay, TensorDict, Logs]]


@dataclass(frozen=True)
class Interleaved:
    """An `iterate` that learns after every few steps (see `interleaved`)."""

    turn: Turn
    steps: int = 1

    @torch.no_grad()
    def __call__(
        self, run: Run, state: TensorDict, borrowed: TensorDict
    ) -> tuple[TensorDict, TensorDict, dict[str, Tensor]]:
        """Run the turns of one iteration as one loop.

        The loop does not copy the ring, which holds the stored steps of the replay buffer. New steps are added to a
        block, and `writes` contains this block.
        """
        ring, tree = _ring(run, state, borrowed)
        fixed = replaced(state.select(*_FIXED, strict=False), borrowed.select("frozen_params", strict=False))
        moving, start = cast(TensorDict, state.exclude(*_FIXED)), cast(Tensor, state["replay", "cursor"])
        moving = replaced(moving, {"replay": replaced(cast(TensorDict, moving["replay"]), tree)})
        own = run._replace(static=_static_of_turn(run.static, self.steps))
        turns = own.static.turns
        number = torch.arange(turns, device=start.device)
        noise = mapped(
            lambda x: x.unflatten(0, (turns, self.steps)),
            _noise(run, state),
            batch=lambda size: (turns, self.steps, *size[1:]),
        )
        body: Any = partial(_turn, self.turn, run, own)
        if run.algorithm.as_one and run.jit is not partial and not in_graph():  # eager runs have `partial` as `jit`
            body = partial(_turn_in_python, body, own, _stepping(own), run.jit(_rest_of_turn, self.turn, run, own))
        executed = torch.zeros_like(start) if "decision_step" in state else None
        empty = replay_start(ring, start, steps=run.static.buffer_size)
        carry = (moving, empty.block, executed)
        (moving, block, _), (taken, logs) = run.scan(body, carry, (number, noise), fixed, ring, start)
        steps = mapped(lambda x: x.flatten(0, 1), taken, batch=lambda size: (run.static.buffer_size, *size[2:]))
        steps = _rollout(steps, cast(TensorDict, moving["env"]))
        episode = with_episodes(state, steps)
        state = replaced(replaced(state, moving), {"episode": episode})
        writes = replay_writes(empty._replace(block=block)).update({name: moving["replay", name] for name in tree})
        state = replaced(state, {"replay": cast(TensorDict, cast(TensorDict, state["replay"]).exclude(*tree))})
        return state, TensorDict({"batch": batch_of(steps), "replay": writes}, []), over_steps(run, logs)

    def collect(self, run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Take the steps of an iteration without learning, with the parameters and the exploration of `state`."""
        return collect_exploring(run, state)

    def with_executed(self, state: TensorDict) -> TensorDict:
        """Return the state with the field `executed` in the steps of its replay buffer. A new field holds zeros.

        The loop calls this function for a new state if an action of the environment takes several steps.
        """
        if ("replay", "steps") not in state.keys(True) or ("replay", "steps", "executed") in state.keys(True):
            return state
        replay = cast(TensorDict, state["replay"])
        steps = cast(TensorDict, replay["steps"])
        device = cast(Tensor, replay["cursor"]).device
        check_room(8 * steps.numel(), device, f"the field executed of the replay buffer: {steps.numel():,} steps")
        executed = torch.zeros(steps.shape, dtype=torch.int64, device=device)
        return replaced(state, {"replay": replaced(replay, {"steps": replaced(steps, {"executed": executed})})})

    def after_gap(self, state: TensorDict) -> TensorDict:
        """Mark the newest step in the buffer, because the next step will not be its successor (see `replay_cut`).

        The loop calls this function after it restarts the environments, or after it drops the steps of an iteration.
        """
        replay = cast(TensorDict, state["replay"])
        return replaced(state, {"replay": replaced(replay, replay_cut(replay, replay["cursor"]))})


def _ring(run: Run, state: TensorDict, borrowed: TensorDict) -> tuple[TensorDict, dict[str, Tensor]]:
    """Return the ring of the replay buffer, which holds the stored steps, and a dict with the field `tree`, if any.

    Raises: ConfigError if the ring is missing, too short, or lacks a field.
    """
    if "replay" not in borrowed:
        advice = "return the result of `new_replay` as `replay` from `init`, and add REPLAY_KINDS to `kinds`"
        raise ConfigError(f"algorithm {run.algorithm.name}: the state lacks replay, a field of kind buffer; {advice}")
    buffer = cast(TensorDict, borrowed["replay"])
    ring, tree = cast(TensorDict, buffer.select("steps", "final")), cast(Any, buffer.select("tree", strict=False))
    check_replay(run, len(ring["steps"]) * run.static.num_envs)
    if "decision_step" in state and "executed" not in ring["steps"]:
        fault = "an action of this environment takes several steps, but the replay buffer has no field executed"
        raise ConfigError(f"algorithm {run.algorithm.name}: {fault}; create the state with `init_state`")
    return ring, dict(tree.items())


def _rollout(steps: TensorDict, env: TensorDict) -> TensorDict:
    """Convert steps `[T, N]` to a rollout `[N, T + 1]` that ends with the observations of `env`."""
    return env_major(steps.exclude("obs")).set("obs", env_major(steps["obs"], env["obs"]))


def interleaved(turn: Turn, steps: int = 1) -> Interleaved:
    """Compose an `iterate` that runs turns of environment steps and gradient steps as one loop.

    An iteration has `trainer.buffer_size / steps` turns. In a compiled iteration, the turns are one loop of the graph.
    If the environment steps in Python, or if there are several ranks, Python runs the turns one by one. If Python runs
    the turns of a compiled run with `as_one=True`, the code of `turn` before `take_steps` runs twice. The first, eager
    call finds the arguments of `take_steps`. The second call is one compiled function with the rest of the turn. Learn
    after `take_steps`, so that the gradient steps run only once.

    Args:
        turn: (run, state, noise, replay) -> (state, replay, steps, logs), which runs one turn, as in the module
            docstring. Pass `noise` to `take_steps` unchanged, and return the `steps` of `take_steps`. The logs are
            0-d float tensors. The logs of an iteration are means over its turns, except that `skipped_steps` is a sum.
            All fields of the state may change except `key`, `hyper`, `episode`, `sample_step`, `decision_step`,
            `update_step`, `iterations` and `frozen_params`.
        steps: number of steps of each environment per turn. `turn` may take any number of gradient steps after these
            steps. For example, with `steps=4` and one gradient step in `turn`, the algorithm takes one gradient step
            after every 4 steps of each environment.

    The state needs a replay buffer in the field `replay` (see `new_replay`). Declare the kinds of the buffer's fields
    with `REPLAY_KINDS`. After each turn, the statistics in the field `norm` are updated with the steps of the turn.
    `norm` has statistics of observations if the policy standardises them, and statistics of `reward_norm_init` if
    `init` returns them.

    Raises: ValueError if `steps` is below 1. In the first iteration, ConfigError if the state lacks `replay`, or if
        `check_replay` rejects the numbers of steps.
    """
    if steps < 1:
        raise ValueError(f"interleaved needs steps >= 1, got {steps}")
    return Interleaved(turn, steps)


def _static_of_turn(static: Static, steps: int) -> Static:
    """Return the static settings for a turn of `steps` steps, with the number of turns per iteration in `turns`."""
    return static._replace(buffer_size=steps, row_steps=min(steps, static.row_steps), turns=static.buffer_size // steps)


def _turn(
    turn: Turn,
    run: Run,
    own: Run,
    carry: _Carry,
    x: tuple[Tensor, Any],
    fixed: TensorDict,
    ring: TensorDict,
    start: Tensor,
) -> tuple[_Carry, tuple[TensorDict, Logs]]:
    """Run one turn. Return the next carry, and the steps and logs of the turn.

    `run` describes an iteration, and `own` describes a turn. The carry of the loop has the fields that change and the
    block of new steps. If the environment reports `executed`, the carry also has the number of environment steps so far
    in the iteration.
    """
    (moving, block, executed), (number, noise) = carry, x
    static, turns = own.static, own.static.turns
    taken = number * (static.buffer_size * static.num_envs * static.world_size)
    counters = {
        "sample_step": fixed["sample_step"] + (taken if executed is None else executed),
        "update_step": fixed["update_step"] * turns + number,
        "iterations": fixed["iterations"] * turns,
    } | ({} if executed is None else {"decision_step": fixed["decision_step"] + taken})
    before = replaced(replaced(moving, fixed), counters)
    replay = Replay(ring, block, start, moving["replay", "cursor"] - start)
    after, replay, steps, logs = turn(own, before, noise, replay)
    if not isinstance(replay, StoredReplay):
        raise ValueError("a turn returned a replay buffer without its steps; call `store`, and return its result")
    for name in _FIXED:
        if any(new is not old for new, old in zip(*(flatten(s.get(name, None))[0] for s in (after, before)))):  # noqa: B905
            raise ValueError(f"a turn changed the field {name} of the state; return this field as it was given")
    after = cast(TensorDict, after.exclude(*_FIXED))
    norm = cast(TensorDict, after["norm"])
    if run.policy.norm_update is not None:
        counted = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
        norm = replaced(norm, {"obs": run.jit(run.policy.norm_update)(norm["obs"], steps["obs"], counted)})
    if "reward" in norm:
        paid, gamma = steps.select("reward", "done", "mask", "executed", strict=False), before["hyper", "gamma"]
        reward = run.jit(reward_norm_update)(norm["reward"], paid.transpose(0, 1), gamma)
        norm = replaced(norm, {"reward": reward})
    after = replaced(after, {"norm": norm})
    cursor = replaced(cast(TensorDict, after["replay"]), {"cursor": start + replay.added})
    if executed is not None:
        executed = executed + distributed.all_sum(steps["executed"].sum())
    return (replaced(after, {"replay": cursor}), replay.block, executed), (steps.exclude("final_obs"), logs)


class _StepsTaken(NamedTuple):
    """Result of the environment steps of a turn. The turn receives this object instead of noise."""

    changed: TensorDict
    steps: TensorDict


class _StepsNeeded(BaseException):
    """Exception that stops a turn at `take_steps`, and holds the arguments `run` and `state` of `take_steps`.

    The class is not a subclass of Exception, so code that handles the errors of an environment does not catch it.
    """

    def __init__(self, run: Run, state: TensorDict) -> None:
        super().__init__("a turn needs environment steps")
        self.run, self.state = run, state


class _Stop:
    """Object that a turn receives instead of noise, which stops the turn at `take_steps`."""

    def __getitem__(self, key: Any) -> Any:  # Python also calls this method to unpack the object
        raise ValueError("a turn may not use its noise; pass it to take_steps unchanged")


_STOP = _Stop()


def _turn_in_python(
    whole: Callable[..., Any],
    own: Run,
    stepping: Callable[..., Any],
    rest: Callable[..., Any],
    carry: _Carry,
    x: tuple[Tensor, Any],
    fixed: TensorDict,
    ring: TensorDict,
    start: Tensor,
) -> tuple[_Carry, tuple[TensorDict, Logs]]:
    """Run one turn like `_turn`, but compile all code after the environment steps as one function.

    A call of `whole` runs the turn up to `take_steps`. `stepping` takes the steps. If the turn changed its `run`, a
    function for the changed `run` takes the steps. The compiled call of `rest` runs the whole turn again, and receives
    the steps.
    """
    number, noise = x
    try:
        return whole(carry, (number, _STOP), fixed, ring, start)
    except _StepsNeeded as needed:
        acting, state = needed.run, needed.state
    taken = _StepsTaken(*(stepping if acting is own else _stepping(acting))(state, noise))
    (changed, block, executed), out = rest(carry, (number, taken), fixed, Borrowed(ring), start)
    return (replaced(carry[0], changed), block, executed), out


def _rest_of_turn(
    turn: Turn,
    run: Run,
    own: Run,
    carry: _Carry,
    x: tuple[Tensor, _StepsTaken],
    fixed: TensorDict,
    ring: Borrowed,
    start: Tensor,
) -> tuple[_Carry, tuple[TensorDict, Logs]]:
    """Run one turn with given environment steps. Of the state's fields in the carry, return only the changed fields."""
    (moving, block, executed), out = _turn(turn, run, own, carry, x, fixed, ring.fields, start)
    if differing := {*moving.keys()} ^ {*carry[0].keys()}:
        raise ValueError(
            f"a turn added or dropped fields of the state: {', '.join(sorted(map(str, differing)))}; keep all fields"
        )
    return (changed_fields(moving, carry[0]), block, executed), out


def _draw(run: Run, keys: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
    """Draw the noise of the actions and of the environments, from environment keys and action keys `[T, N]`."""
    env_keys, action_keys = keys
    return run.policy.draw(action_keys), run.env.draw(env_keys)


def _noise(run: Run, state: TensorDict) -> tuple[Any, Any]:
    """Draw the noise of all steps of an iteration, `[T, N]`, before the loop over turns."""
    draw = run.jit(_draw, run) if run.env.is_pure else partial(_draw, with_compiled_policy(run))
    return draw(step_keys(run, state))


def _explored(
    policy: Policy, params: TensorDict, carry: tuple[TensorDict, TensorDict], obs: Any, noise: Any
) -> tuple[tuple[TensorDict, TensorDict], TensorDict]:
    """Act and, if the policy has `explore`, explore. Return the new memory and exploration state, and the output."""
    memory, exploration = carry
    memory, out = policy.act(params, memory, obs, noise)
    if policy.explore is not None:
        exploration, out = policy.explore(params, exploration, out, noise)
    return (memory, exploration), out


def _step(
    run: Run,
    carry: tuple[Any, TensorDict],
    noise: tuple[Any, Any],
    params: TensorDict,
    initial: tuple[TensorDict, TensorDict],
) -> tuple[tuple[Any, TensorDict], TensorDict]:
    """Take one step in every environment. Return the next carry and the transition.

    The carry has the memory, the exploration state and the environment state. `initial` has the memory and the
    exploration state at the start of an episode.
    """
    before, env = carry
    act = partial(_explored, run.policy)
    (memory, exploration), after, row = act_and_step(act, run.env.step, params, before, env, *noise)
    memory = restarted_carry(memory, initial[0], row)
    exploration = _restarted_exploration(run.policy, exploration, initial[1], row)
    return ((memory, exploration), after), row.set("obs", env["obs"])


def _restarted_exploration(policy: Policy, exploration: TensorDict, initial: TensorDict, row: TensorDict) -> TensorDict:
    """Return the exploration state for the next step. If an episode ended, only the fields of `initial` restart."""
    if initial.is_empty():
        return exploration
    check_restart(policy, exploration, initial)
    first = TensorDict(dict(initial.items()), exploration.batch_size)
    return replaced(exploration, restarted_carry(exploration.select(*initial.keys()), first, row))


@torch.no_grad()
def _take_steps(run: Run, state: TensorDict, noise: tuple[Any, Any]) -> tuple[TensorDict, TensorDict]:
    """Take the steps of a turn. Return the state's new `env`, `exploration` and `carry`, if present, and the steps."""
    params, empty = policy_params(state), TensorDict({}, [])
    memory, exploration = (cast(TensorDict, state.get(name, empty)) for name in ("carry", "exploration"))
    initial = memory if memory.is_empty() else run.policy.init_carry(params, run.static.num_envs)
    initial = initial, run.policy.init_exploration(params, run.static.num_envs)
    start = (memory, exploration), cast(TensorDict, state["env"])
    ((memory, exploration), env), steps = run.scan(partial(_step, run), start, noise, params, initial)
    fields = {"env": env, "exploration": exploration, "carry": memory}
    return TensorDict({name: field for name, field in fields.items() if name in state}, []), steps


def take_steps(run: Run, state: TensorDict, noise: tuple[Any, Any]) -> tuple[TensorDict, TensorDict]:
    """Take the steps of a turn in every environment. In each step, the policy first acts and then explores.

        carry, out       = act(params, carry, obs, noise)
        exploration, out = explore(params, exploration, out, noise)        if the policy has `explore`

    At the end of an episode, the memory restarts from the policy's `init_carry`, and exploration fields restart from
    the policy's `init_exploration`.

    Args:
        run: the run that was passed to the turn.
        state: state of the turn. If the policy's `explore` keeps a state or reads numbers such as epsilon, the state of
            the turn has the field `exploration` `[N]`.
        noise: the noise that was passed to the turn.

    Returns: the state with new `env`, `exploration` and `carry`, and the steps `[S, N]`. The steps have `obs`, the
        fields of the policy's output, `reward`, `terminated`, `truncated`, `done`, and `info`, `mask` and `executed` if
        the environment has them. `final_obs` is the successor of `obs`. At the end of an episode, `final_obs` is the
        last observation of that episode.
    Gradient: none, because the function runs under `no_grad`.
    """
    if noise is _STOP:
        raise _StepsNeeded(run, state)
    changed, steps = noise if isinstance(noise, _StepsTaken) else _stepping(run)(state, noise)
    return replaced(state, changed), steps


def _stepping(run: Run) -> Callable[[TensorDict, tuple[Any, Any]], tuple[TensorDict, TensorDict]]:
    """Return `_take_steps` of a run, compiled as a whole or, for an environment in Python, with a compiled policy."""
    fn = run.jit(_take_steps, run) if run.env.is_pure else partial(_take_steps, with_compiled_policy(run))
    return lambda state, noise: fn(state.select(*_STEPS, strict=False), noise)


def collect_exploring(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Explore for `buffer_size` steps in every environment. Pass this function to `on_policy` as `collect`.

    The steps are the same as from `take_steps`, with the exploration that the state describes.

    Returns: the state with new `env`, `episode`, `exploration` and `carry`, and a batch `[N]`. The `steps` of the batch
        are a rollout `[N, T + 1]` without values. The rollout has the field `final_obs`, the observation that each step
        reached before any reset.
    """
    after, rows = take_steps(run, state, _noise(run, state))
    steps = _rollout(rows, cast(TensorDict, after["env"]))
    return replaced(after, {"episode": with_episodes(state, steps)}), batch_of(steps)


def new_replay(run: Run, capacity: int, device: torch.device, **fields: Any) -> TensorDict:
    """Return an empty replay buffer, for the field `replay` of the state.

    A step in the buffer has the fields `obs`, `action`, `reward`, `terminated`, `truncated` and `mask`. Declare the
    kinds of the buffer's leaves with `REPLAY_KINDS`.

    Args:
        run: the run.
        capacity: number of steps in the buffer, for all environments of this rank together. The buffer has
            R = capacity // num_envs steps of each environment.
        device: device of the buffer.
        fields: further fields of a step, such as `sample_log_prob`. Pass a tensor or a TensorDict `[N, ...]`, whose
            values are not used. In each turn, pass fields of the same names to `store`, except fields that the steps
            from `take_steps` already have. The loop adds `executed` if an action of the environment takes several
            steps.

    Returns: TensorDict with the ring of `ecrl.kernels.replay_init`, and two counts of steps of each environment, 0-d
        int64: `cursor`, the steps that were added to the buffer, and `written` (see `ecrl.loop.buffers`).
    Raises: ConfigError if `check_replay` rejects the capacity, or if the buffer does not fit in memory.
    """
    check_replay(run, capacity)
    num_envs = run.static.num_envs
    obs, action = (_first(example(space), num_envs) for space in (run.env.observation_space, run.env.action_space))
    floats = [leaf.dtype for leaf in flatten(obs)[0] if leaf.is_floating_point()]
    flag = torch.zeros(num_envs, dtype=torch.bool)
    reward = torch.zeros(num_envs, dtype=[*floats, torch.float32][0])
    flags = {"terminated": flag, "truncated": flag, "mask": flag}
    rows = TensorDict({"obs": obs, "action": action, "reward": reward, **flags, **fields}, [num_envs])
    steps, gap = capacity // num_envs, run.env.min_truncation_gap
    sizes = [sum(leaf.element_size() * leaf.numel() for leaf in flatten(tree)[0]) for tree in (rows, obs)]
    check_room(sizes[0] * steps + sizes[1] * (-(-steps // gap) + 1), device, f"the replay buffer: {capacity:,} steps")
    zero = torch.zeros((), dtype=torch.int64, device=device)
    ring = replay_init(rows.to(device), steps=steps, min_truncation_gap=gap)
    return TensorDict({**dict(ring.items()), "cursor": zero, "written": zero.clone()}, [])


def _first(examples: Any, num_envs: int) -> Any:
    """Return the first of several examples, expanded to `[N, ...]`."""
    return mapped(lambda x: x[:1].expand(num_envs, *x.shape[1:]), examples, batch=lambda size: (num_envs, *size[1:]))


def check_replay(run: Run, capacity: int) -> None:
    """Raise ConfigError unless the sizes of the replay buffer, an iteration and a turn fit together.

    The buffer must not be shorter than an iteration. An iteration must be a whole number of turns. If a row of a
    minibatch has fewer steps than a turn, a turn must be a whole number of rows.
    """
    iterate, size = run.algorithm.iterate, run.static.buffer_size
    if isinstance(iterate, Interleaved) and size % iterate.steps:
        raise ConfigError(
            f"trainer.buffer_size: {size} is not a multiple of {iterate.steps}, the steps of a turn; use a multiple"
        )
    length = run.static.row_steps
    if isinstance(iterate, Interleaved) and length < iterate.steps and iterate.steps % length:
        raise ConfigError(
            f"algorithm.cfg.segment_length: {length} does not divide {iterate.steps}, the steps of a turn; "
            "use a divisor"
        )
    if (steps := capacity // run.static.num_envs) < size:
        raise ConfigError(
            f"trainer.buffer_size: {size:,} is more than {steps:,}, the steps of each environment in a replay buffer "
            f"of capacity {capacity:,}; lower it or make the capacity larger"
        )


def store(run: Run, replay: Replay, steps: TensorDict, **fields: Any) -> StoredReplay:
    """Add the steps of a turn to the replay buffer. If the buffer is full, the new steps replace the oldest steps.

    Args:
        run: the run that was passed to the turn.
        replay: the replay buffer that was passed to the turn.
        steps: the steps `[S, N]` from `take_steps`. Only the fields of the buffer are stored.
        fields: further fields `[S, N, ...]`, which replace fields of `steps` of the same name, such as a scaled reward.

    Returns: the buffer with the new steps.
    Raises: ValueError for a second call in a turn, or for a wrong number of steps. Also raised if the steps lack a
        field of the buffer, or if the field has another shape or dtype.
    """
    if isinstance(replay, StoredReplay):
        raise ValueError("store was called twice in a turn; call it once, with all steps of the turn")
    if len(steps) != run.static.buffer_size:
        raise ValueError(f"store got {len(steps)} steps, expected the {run.static.buffer_size} steps of the turn")
    steps = replaced(steps, fields)
    if "mask" not in steps:
        steps = steps.set("mask", torch.ones_like(steps["done"]))
    names = (*replay.block["steps"].keys(), "final_obs")
    return StoredReplay(*replay_add(replay, cast(TensorDict, steps.select(*names, strict=False))))


def sample_keys(run: Run, state: TensorDict, size: int) -> Tensor:
    """Return the keys `[size]` for drawing steps from the replay buffer in a turn.

    The keys depend on the key of the run, the rank and the number of steps that each environment took before the turn.
    """
    index = torch.arange(size, device=state["key"].device) + distributed.rank() * size
    return rng.stream(state["key"], rng.UPDATE, index, -1 - steps_taken(run, state))  # `minibatch_sgd` uses steps >= 0
