"""Off-policy iterations, which alternate environment steps and gradient steps in one loop over a replay buffer.

An algorithm defines one turn, in the order of its paper:

    def turn(run, state, noise, replay):
        state, steps = take_steps(run, state, noise)                  # act, explore, step
        replay = add_rows(replay, steps.select("obs", "action", ...))  # store
        if run.static.phase == "collect":                             # chosen on the host, see `Algorithm.phase`
            return state, replay, steps, {}
        index = uniform_index(run, state, replay, batch_size)         # sample
        state, logs = learn(update, run, state, read_rows(replay, index))
        return state, replay, steps, logs

`interleaved(turn)` turns this function into the `iterate` of an algorithm.

A turn does not depend on the length of an iteration. The turn's `run` and `state` look as if every iteration had one
turn. In `run.static`, `buffer_size` is the number of steps per turn. In the state, `sample_step`, `update_step`,
`iterations` and the cursor of the buffer count each turn as an iteration. New rows are in the buffer as soon as a turn
adds them, and the rows that they replace are gone. Thus `trainer.buffer_size` does not change the result of learning,
with two exceptions. The phase is chosen once per iteration, and the finite guard skips whole iterations.
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
    Run,
    Static,
    batch_of,
    step_keys,
    steps_taken,
    with_compiled_policy,
    with_episodes,
)
from ecrl.algorithms.state_kinds import Kind, Kinds
from ecrl.errors import ConfigError
from ecrl.kernels import act_and_step
from ecrl.kernels.rollout import env_major, restarted_carry
from ecrl.memory import check_room
from ecrl.policies import Policy, policy_params
from ecrl.policies.contract import check_restart
from ecrl.pytree import flatten, mapped, names, replaced, unflatten
from ecrl.types import Logs

REPLAY_KINDS: Kinds = {
    "replay": Kind.BUFFER,
    ("replay", "cursor"): Kind.COUNTER,
    "exploration": Kind.ENVIRONMENT,
}
"""Kinds of the fields `replay` and `exploration`, for the `kinds` of an algorithm."""

_FIXED = ("key", "hyper", "episode", *COUNTERS, "update_step", "iterations", "frozen_params")
_STEPS = ("key", *COUNTERS, "params", "norm", "env", "exploration", "carry", "frozen_params")
SUMMED_LOG = "skipped_steps"
"""The log of a turn that an iteration sums over its turns. Other logs are averaged."""


class RowReplay(NamedTuple):
    """The replay buffer inside a turn: the ring as it was before the iteration, and the rows added since.

    The rows may be of any kind. `ecrl.kernels.Replay` holds steps, and reads n-step returns and frame stacks from them.

    Row `i` of the buffer is in `block` if this iteration wrote it, and in `ring` otherwise. `read_rows` reads from
    both.

    Attributes:
        ring: the buffer before the iteration, `[capacity]`, read-only.
        block: the rows of this iteration, `[turns, S * N]`, with one line per turn. Lines of later turns are zero.
        start: number of rows written before the iteration, 0-d int64.
        added: number of rows written in the iteration so far, 0-d int64.
        is_complete: True after `add_rows`, which a turn calls once.
    """

    ring: TensorDict
    block: TensorDict
    start: Tensor
    added: Tensor
    is_complete: bool = False


Turn = Callable[[Run, TensorDict, Any, RowReplay], tuple[TensorDict, RowReplay, TensorDict, Logs]]


@dataclass(frozen=True)
class Interleaved:
    """An `iterate` that learns after every few steps (see `interleaved`)."""

    turn: Turn
    steps: int = 1

    @torch.no_grad()
    def __call__(
        self, run: Run, state: TensorDict, borrowed: TensorDict
    ) -> tuple[TensorDict, TensorDict, dict[str, Tensor]]:
        """Run the turns of one iteration as one loop, without copying the ring."""
        if "replay" not in borrowed:
            advice = "return one of `row_replay_init` from `init`, and add REPLAY_KINDS to `kinds`"
            raise ConfigError(
                f"algorithm {run.algorithm.name}: the state lacks replay, a field of kind buffer; {advice}"
            )
        fields = dict(cast(TensorDict, borrowed["replay"]).exclude("written").items())
        ring = TensorDict(cast(Any, fields), [len(flatten(fields)[0][0])])
        check_replay(run, len(ring))
        turns, rows = run.static.buffer_size // self.steps, self.steps * run.static.num_envs
        block = _zeros(ring, turns, rows)
        fixed = replaced(state.select(*_FIXED, strict=False), borrowed.select("frozen_params", strict=False))
        moving, start = cast(TensorDict, state.exclude(*_FIXED)), cast(Tensor, state["replay", "cursor"])
        number = torch.arange(turns, device=start.device)
        noise = mapped(
            lambda x: x.unflatten(0, (turns, self.steps)),
            _noise(run, state),
            batch=lambda size: (turns, self.steps, *size[1:]),
        )
        body = partial(_turn, self.turn, run, _static_of_turn(run.static, self.steps))
        executed = torch.zeros_like(start) if "decision_step" in state else None
        carry = (moving, block, executed)
        (moving, block, _), (taken, logs) = run.scan(body, carry, (number, noise), fixed, ring, start)
        steps = mapped(lambda x: x.flatten(0, 1), taken, batch=lambda size: (run.static.buffer_size, *size[2:]))
        steps = _rollout(steps, cast(TensorDict, moving["env"]))
        episode = with_episodes(state, steps)
        state = replaced(replaced(state, moving), {"episode": episode})
        index = (start + torch.arange(turns * rows, device=start.device)) % len(ring)
        new = TensorDict({"rows": _lines(block), "index": index}, [])
        return state, TensorDict({"batch": batch_of(steps), "replay": new}, []), _over_turns(run, logs)

    def collect(self, run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Take the steps of an iteration without learning, with the parameters and the exploration of `state`.

        Returns: the state with new `env`, `exploration` and `carry`, and a batch `[N]`. The shape of its
            `steps` is `[N, T + 1]`.
        """
        after, rows = take_steps(run, state, _noise(run, state))
        steps = _rollout(cast(TensorDict, rows.exclude("final_obs")), cast(TensorDict, after["env"]))
        return after, batch_of(steps)


def _rollout(steps: TensorDict, env: TensorDict) -> TensorDict:
    """Convert steps `[T, N]` to a rollout `[N, T + 1]` that ends with the observations of `env`."""
    return env_major(steps.exclude("obs")).set("obs", env_major(steps["obs"], env["obs"]))


def interleaved(turn: Turn, steps: int = 1) -> Interleaved:
    """Compose an `iterate` that runs turns of environment steps and gradient steps as one loop.

    An iteration has `trainer.buffer_size / steps` turns. In a compiled iteration, the turns are one loop of the graph.
    If the environment steps in Python, or with several ranks, Python runs the turns one by one and calls compiled
    functions.

    Args:
        turn: (run, state, noise, replay) -> (state, replay, steps, logs), which runs one turn, as in the module
            docstring. Pass `noise` to `take_steps`, and return the `steps` of `take_steps`. The logs are floats. The
            logs of an iteration are means over its turns, except that `skipped_steps` is a sum. All fields of the state
            may change except `key`, `hyper`, `episode`, `sample_step`, `decision_step`, `update_step`, `iterations` and
            `frozen_params`.
        steps: number of steps of each environment per turn. `turn` may then take any number of gradient steps. With 4
            steps and 1 gradient step, there is a quarter of a gradient step for each step of an environment.

    The state needs a replay buffer in the field `replay` (see `row_replay_init`). Declare the kinds of its fields with
    `REPLAY_KINDS`.

    Raises: ConfigError in the first iteration if the state lacks `replay`, if `steps` does not divide `buffer_size`, if
        the buffer is shorter than an iteration, or if a `segment_length` below `steps` does not divide `steps`.
    """
    if steps < 1:
        raise ValueError(f"interleaved needs steps >= 1, got {steps}")
    return Interleaved(turn, steps)


def _static_of_turn(static: Static, steps: int) -> Static:
    """Return the static settings of a run whose iterations have one turn."""
    return static._replace(buffer_size=steps, row_steps=min(steps, static.row_steps))


def _turn(
    turn: Turn,
    run: Run,
    static: Static,
    carry: tuple[TensorDict, TensorDict, Tensor | None],
    x: tuple[Tensor, Any],
    fixed: TensorDict,
    ring: TensorDict,
    start: Tensor,
) -> tuple[tuple[TensorDict, TensorDict, Tensor | None], tuple[TensorDict, Logs]]:
    """Run one turn. Return the next carry, and the steps and logs of the turn.

    The carry has the fields that change and the block of new rows. If the environment reports `executed`, the carry
    also has the number of environment steps in the iteration so far.
    """
    (moving, block, executed), (number, noise) = carry, x
    taken = number * (static.buffer_size * static.num_envs * static.world_size)
    turns = run.static.buffer_size // static.buffer_size
    counters = {
        "sample_step": fixed["sample_step"] + (taken if executed is None else executed),
        "update_step": fixed["update_step"] * turns + number,
        "iterations": fixed["iterations"] * turns,
    } | ({} if executed is None else {"decision_step": fixed["decision_step"] + taken})
    before = replaced(replaced(moving, fixed), counters)
    replay = RowReplay(ring, block, start, moving["replay", "cursor"] - start)
    after, replay, steps, logs = turn(run._replace(static=static), before, noise, replay)
    if not replay.is_complete:
        raise ValueError("a turn returned a replay without its rows; call add_rows once, and return its result")
    for name in _FIXED:
        if any(new is not old for new, old in zip(*(flatten(s.get(name, None))[0] for s in (after, before)))):  # noqa: B905
            raise ValueError(f"a turn may not change the field {name} of the state")
    after = cast(TensorDict, after.exclude(*_FIXED))
    if run.policy.norm_update is not None:
        counted = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
        norm = cast(TensorDict, after["norm"])
        obs = run.jit(run.policy.norm_update)(norm["obs"], steps["obs"], counted)
        after = replaced(after, {"norm": replaced(norm, {"obs": obs})})
    cursor = replaced(cast(TensorDict, after["replay"]), {"cursor": start + replay.added})
    if executed is not None:
        executed = executed + distributed.all_sum(steps["executed"].sum())
    return (replaced(after, {"replay": cursor}), replay.block, executed), (steps.exclude("final_obs"), logs)


def _over_turns(run: Run, logs: Logs) -> Logs:
    """Average the logs `[turns]` over the turns of an iteration, but sum `skipped_steps`.

    If all gradient steps of a turn were left out because of NaN or infinity, the means leave out the turn's logs.
    """
    mean = torch.nanmean if run.static.skips_nonfinite else torch.mean
    return {name: log.sum() if name == SUMMED_LOG else mean(log) for name, log in logs.items()}


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
    """Act and explore. Return the new memory and exploration state, and the policy's output."""
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
    """Return the exploration state for the next step. Where an episode ended, only the fields of `initial` restart."""
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
        state: state of the turn, with a field `exploration` `[N]` if `explore` keeps a state or reads parameters, such
            as epsilon.
        noise: the noise that was passed to the turn.

    Returns: the state with new `env`, `exploration` and `carry`, and the steps `[S, N]`. The steps have `obs`, the
        fields of the policy's output, `reward`, `terminated`, `truncated`, `done`, and `info`, `mask` and `executed` if
        the environment has them. `final_obs` is the successor of `obs`. At the end of an episode it is the last
        observation of that episode.
    Gradient: none, because the function runs under `no_grad`.
    """
    steps = run.jit(_take_steps, run) if run.env.is_pure else partial(_take_steps, with_compiled_policy(run))
    changed, taken = steps(state.select(*_STEPS, strict=False), noise)
    return replaced(state, changed), taken


def _zeros(rows: TensorDict, *size: int) -> TensorDict:
    """Return a TensorDict of zeros with batch size `size` and the fields of `rows` `[M]`."""
    return mapped(lambda x: x.new_zeros((*size, *x.shape[1:])), rows, batch=lambda batch: (*size, *batch[1:]))


def _lines(block: TensorDict) -> TensorDict:
    """Flatten a block `[turns, S * N]` to rows `[turns * S * N]`."""
    return mapped(lambda x: x.flatten(0, 1), block, batch=lambda size: (block.shape.numel(), *size[2:]))


def row_replay_init(run: Run, rows: TensorDict, capacity: int) -> TensorDict:
    """Return an empty replay buffer of rows, for the field `replay` of the state.

    Args:
        run: the run.
        rows: example rows `[M]`, with the same fields as the rows that turns will add. The values are not used.
        capacity: number of rows of the buffer, for all environments of this rank together.

    Raises: ConfigError if the buffer is shorter than an iteration, or does not fit in memory.
    """
    check_replay(run, capacity)
    leaves = flatten(rows)[0]
    size = capacity * sum(x.element_size() * x.shape[1:].numel() for x in leaves)
    check_room(size, leaves[0].device, f"the replay buffer: {capacity:,} rows")
    zero = torch.zeros((), dtype=torch.int64, device=leaves[0].device)
    fields: dict[str, Any] = dict(_zeros(rows, capacity).items())
    return TensorDict(fields | {"cursor": zero, "written": zero.clone()}, [])


def check_replay(run: Run, capacity: int) -> None:
    """Check that the sizes of replay buffer, iteration and turn fit together.

    The buffer must not be shorter than an iteration. An iteration must be a whole number of turns. If a row of a
    minibatch has fewer steps than a turn, a turn must be a whole number of rows.

    Raises: ConfigError.
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
    if capacity < (written := size * run.static.num_envs):
        raise ConfigError(
            f"the replay buffer: {capacity:,} rows are fewer than trainer.num_envs * trainer.buffer_size = "
            f"{written:,}; make it larger"
        )


def add_rows(replay: RowReplay, rows: TensorDict) -> RowReplay:
    """Add the rows of a turn to the buffer. If the buffer is full, new rows immediately replace the oldest rows.

    Args:
        replay: the replay buffer that was passed to the turn.
        rows: `[S, N]`, with the fields of the buffer. Rows are stored in order of steps.

    Raises: ValueError for a second call in a turn, and for rows whose fields differ from the buffer's.
    """
    if replay.is_complete:
        raise ValueError("add_rows was called twice in a turn; call it once, with all rows")
    (old, structure), (new, of_rows) = flatten(replay.block), flatten(rows)
    if names(structure) != names(of_rows):
        raise ValueError(f"the rows have the fields {names(of_rows)}, the replay buffer has {names(structure)}")
    for name, x, y in zip(names(structure), new, old, strict=True):
        if x.flatten(0, 1).shape != y.shape[1:] or x.dtype != y.dtype:
            raise ValueError(
                f"the rows of a turn have {name} {x.dtype} {list(x.shape)}, expected {y.dtype} and, after "
                f"flattening the first two axes, {list(y.shape[1:])}"
            )
    turns, lines = replay.block.shape
    is_now = torch.arange(turns, device=replay.added.device) == replay.added // lines
    leaves = [
        torch.where(is_now.reshape(-1, *[1] * (y.ndim - 1)), x.flatten(0, 1), y) for x, y in zip(new, old, strict=True)
    ]
    return replay._replace(block=unflatten(structure, leaves), added=replay.added + lines, is_complete=True)


def row_count(replay: RowReplay) -> Tensor:
    """Return the number of rows in the buffer, as 0-d int64."""
    return (replay.start + replay.added).clamp(max=len(replay.ring))


def uniform_index(run: Run, state: TensorDict, replay: RowReplay, size: int) -> Tensor:
    """Draw row indices of the buffer uniformly and with replacement, as int64 `[size]`.

    The draw depends on the key of the run, the rank and the number of steps that each environment took before.
    """
    index = torch.arange(size, device=replay.added.device) + distributed.rank() * size
    keys = rng.stream(state["key"], rng.UPDATE, index, -1 - steps_taken(run, state))  # `minibatch_sgd` uses steps >= 0
    return rng.randint(keys, low=0, high=row_count(replay))


def read_rows(replay: RowReplay, index: Tensor, *fields: str) -> TensorDict:
    """Read rows of the buffer, from this iteration or from earlier ones.

    Args:
        replay: the replay buffer in the turn.
        index: int64 `[*B]`, 0 to `row_count(replay) - 1`.
        fields: names of the fields to read. If no name is passed, all fields are read.

    Returns: the rows `[*B]`.
    """
    flat = index.flatten()
    age = (flat - replay.start) % len(replay.ring)  # index in the block if this iteration wrote the row
    is_new, place = age < replay.added, age.clamp(max=replay.block.shape.numel() - 1)
    ring, block = (cast(TensorDict, x.select(*fields)) if fields else x for x in (replay.ring, _lines(replay.block)))

    def read(new: Tensor, old: Tensor) -> Tensor:
        chosen = is_new.reshape(-1, *[1] * (old.ndim - 1))
        rows = torch.where(chosen, new.index_select(0, place), old.index_select(0, flat))
        return rows.reshape(*index.shape, *old.shape[1:])

    leaves = [read(*pair) for pair in zip(flatten(block)[0], flatten(ring)[0], strict=True)]
    return unflatten(flatten(ring)[1], leaves, lambda size: (*index.shape, *size[1:]))
