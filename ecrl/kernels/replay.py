"""Replay buffer for R steps of N environments, with a ring for old rows and a block for the rows of an iteration.

    replay = replay_start(ring, step, steps=K * S)           # an empty block
    for each of K turns:
        replay = replay_add(replay, rows)                    # S steps of every environment
        index  = replay_index(replay, keys, n=n, stack=1)    # draw rows
        batch  = replay_read(replay, index, gamma=gamma, n=n)
    writes = replay_writes(replay)                           # rows, and where they go in the ring

An iteration only reads the ring. `start` counts the steps of each environment before the iteration, and `added` counts
the steps that the iteration has added. In a compiled loop, the ring and `start` are constants, and the loop's carry
holds the block and `added`. After the loop, one `index_copy_` per field writes the block into the ring. An old row of
the ring can no longer be drawn as soon as the block holds its replacement, although the ring still stores the old row.
The rows that a turn draws therefore do not depend on how the turns are divided into iterations.

All environments step together. A row is one step of one environment. The row of step t of environment e has the index
`(t % R) * N + e`, whether the ring or the block stores it. Each observation is stored once, because the next
observation of a step is the observation of the following step. Only a truncated step also needs its final observation,
which precedes the reset.

The final observation of step t is stored in slot `(t // G) % F` of its environment. F is the number of slots,
`ceil(R / min_truncation_gap) + 1`. G is the number of consecutive steps that share a slot, `ceil(R / (F - 1))`. G is at
most `min_truncation_gap`. Two truncations of an environment that are at least `min_truncation_gap` steps apart
therefore never share a slot while both are in the buffer. If two truncations are closer together, the final observation
of the later step may overwrite the final observation of the earlier step. `replay_read` then returns a discount of NaN
for transitions that end at the earlier step.

If the ring has the field `mask`, a step whose `mask` is False only stores an observation. The action and the reward of
such a step belong to no transition. An n-step transition that reaches such a step ends at the observation of this step.
Gymnasium environments report such a step after the end of an episode.

In the functions that draw and read rows, n is the number of steps in a return, and `stack` is the number of frames in
an observation. A row can be drawn if the buffer has the n steps after the row, and if none of the `stack - 1` steps
before the row has been replaced. The n newest steps therefore cannot be drawn yet. As soon as new steps have replaced
old steps, the `stack - 1` oldest steps in the buffer are only read as frames of later observations.
"""

from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.kernels.dtypes import common_dtype, computed_in, discounts
from ecrl.pytree import combined, flatten, mapped, names, replaced, unflatten
from ecrl.types import Scalar, check_bool

_ENDS = ("terminated", "truncated")
_NEEDED = ("obs", "reward", *_ENDS)


class Replay(NamedTuple):
    """State of a replay buffer during an iteration.

    Attributes:
        ring: the rows of earlier iterations, in a ring from `replay_init`.
        block: the rows of this iteration, with the fields of the ring. Bool fields are stored as uint8, because
            compiled loops copy uint8 faster. Convert these fields with `.bool()` before you use them.
        start: number of steps of each environment before the iteration, 0-d int64.
        added: number of steps of each environment that the iteration has added, 0-d int64.
    """

    ring: TensorDict
    block: TensorDict
    start: Tensor
    added: Tensor


def replay_init(rows: TensorDict, *, steps: int, min_truncation_gap: int) -> TensorDict:
    """Return an empty ring for a replay buffer.

    Args:
        rows: `[N]`, one example row for each environment, with `obs`, `reward`, `terminated`, `truncated` and any other
            fields, such as a bool `mask`. `obs` may be a TensorDict. The values of the rows are not used.
        steps: the number R of steps that the ring stores for each environment, at least 2.
        min_truncation_gap: the smallest number of steps between two truncations of an environment. Use 1 if this number
            is unknown.

    Returns: TensorDict with `steps` and `final`. `steps` has the fields of `rows`, in the shape `[R, N, ...]`. `final`,
        of shape `[F, N]`, has F = ceil(R / min_truncation_gap) + 1 slots for final observations of each environment. A
        slot stores an `obs` and the number of the truncated step, `step`, which is -1 for an empty slot.
    Gradient: none.
    Raises: ValueError if `rows` lacks a field or is not `[N]`, if `terminated`, `truncated` or `mask` is not bool, or
        if `steps` or `min_truncation_gap` is too small.

    >>> flag = torch.zeros(3, dtype=torch.bool)
    >>> rows = {"obs": torch.zeros(3, 8, dtype=torch.uint8), "reward": flag.float(), "terminated": flag}
    >>> ring = replay_init(TensorDict(rows | {"truncated": flag}, [3]), steps=100, min_truncation_gap=40)
    >>> ring["steps", "obs"].shape, ring["final", "obs"].shape
    (torch.Size([100, 3, 8]), torch.Size([4, 3, 8]))
    """
    if missing := [name for name in _NEEDED if name not in rows]:
        raise ValueError(f"rows lacks {', '.join(missing)}; it has {', '.join(sorted(map(str, rows.keys())))}")
    check_bool(**{f"rows[{name!r}]": rows[name] for name in (*_ENDS, "mask") if name in rows})
    if rows.ndim != 1:
        raise ValueError(f"rows has batch shape {list(rows.shape)}, expected [num_envs]")
    for name, number, least in (("steps", steps, 2), ("min_truncation_gap", min_truncation_gap, 1)):
        if number < least:
            raise ValueError(f"replay_init needs {name} >= {least}, got {number}")
    slots, device = -(-steps // min_truncation_gap) + 1, rows["reward"].device
    final = TensorDict(
        {
            "obs": _zeros(rows["obs"], slots),
            "step": torch.full((slots, len(rows)), -1, dtype=torch.int64, device=device),
        },
        [slots, len(rows)],
    )
    return TensorDict({"steps": _zeros(rows, steps), "final": final}, [])


def _zeros(rows: Any, length: int) -> Any:
    """Return zeros of shape `[length, N, ...]` with the fields of `rows`, of shape `[N, ...]`."""
    return mapped(lambda x: x.new_zeros((length, *x.shape)), rows, batch=lambda size: (length, *size))


def _slot_width(ring: TensorDict) -> int:
    """Return the width of a slot: the number of consecutive steps whose final observations share this slot."""
    return -(-len(ring["steps"]) // (len(ring["final"]) - 1))


def replay_start(ring: TensorDict, start: Tensor, *, steps: int) -> Replay:
    """Return the buffer at the start of an iteration, with an empty block.

    Args:
        ring: ring from `replay_init`, with the rows of earlier iterations.
        start: number of steps of each environment before the iteration, 0-d int64.
        steps: number of steps of each environment in the iteration, at most the length of the ring.

    Returns: a `Replay` that shares the tensors of `ring`.
    Gradient: none.
    Raises: ValueError if `steps` is not between 1 and R, or if `start` is not 0-d int64.

    >>> flag = torch.zeros(3, dtype=torch.bool)
    >>> rows = TensorDict({name: flag for name in ("obs", "reward", "terminated", "truncated")}, [3])
    >>> ring = replay_init(rows, steps=100, min_truncation_gap=40)
    >>> replay_start(ring, torch.tensor(0), steps=5).block["steps", "obs"].shape
    torch.Size([5, 3])
    """
    if not 1 <= steps <= (capacity := len(ring["steps"])):
        raise ValueError(f"replay_start needs 1 <= steps <= {capacity}, the length of the ring, got {steps}")
    if start.ndim or start.dtype != torch.int64:
        raise ValueError(f"start is {start.dtype} {list(start.shape)}, expected torch.int64 []")
    # The largest number of slots that `steps` consecutive steps can span.
    slots = (steps - 2) // _slot_width(ring) + 2

    def zeros(tree: Any, length: int) -> Any:
        def zero(x: Tensor) -> Tensor:
            return x.new_zeros((length, *x.shape[1:]), dtype=torch.uint8 if x.dtype == torch.bool else x.dtype)

        return mapped(zero, tree, batch=lambda size: (length, *size[1:]))

    final = zeros(ring["final"], slots)
    block = TensorDict({"steps": zeros(ring["steps"], steps), "final": final.set("step", final["step"] - 1)}, [])
    return Replay(ring, block, start, torch.zeros_like(start))


def replay_add(replay: Replay, rows: TensorDict) -> Replay:
    """Return the buffer with new steps in its block. If the ring is full, the new steps replace the oldest steps.

    The block must have room for the rows. A row that does not fit is not stored.

    Args:
        replay: the buffer.
        rows: `[S, N]`, with the fields of the ring and `final_obs`. `final_obs` is the observation that the step led
            to, before any reset. Only the `final_obs` of truncated steps is read.

    Returns: the buffer with the new rows, and with `added` increased by S.
    Gradient: flows through `rows`.
    Raises: ValueError if the fields of `rows` differ from the fields of the ring, or if a field has another shape or
        dtype.

    >>> f, t = torch.tensor([[False]] * 2), torch.tensor([[False], [True]])
    >>> x = torch.tensor([[1.0], [2.0]])
    >>> rows = TensorDict({"obs": x, "reward": x, "terminated": f, "truncated": t, "final_obs": 10 * x}, [2, 1])
    >>> ring = replay_init(rows[0].exclude("final_obs"), steps=9, min_truncation_gap=1)
    >>> replay = replay_add(replay_start(ring, torch.tensor(0), steps=2), rows)
    >>> replay.block["steps", "obs"].tolist(), replay.block["final", "obs"].tolist()
    ([[1.0], [2.0]], [[0.0], [20.0]])
    """
    block, length = replay.block["steps"], len(rows)
    if "final_obs" not in rows:
        raise ValueError("rows lacks final_obs, the observation after each step and before any reset")
    new, final_obs = cast(TensorDict, rows.exclude("final_obs")), rows["final_obs"]
    _check_rows("rows", new, replay.ring["steps"])
    _check_rows("rows['final_obs']", final_obs, replay.ring["final", "obs"])
    device = replay.start.device
    # A row that does not fit becomes a copy of the row for the last place, so that both writes have equal values.
    room = len(block) - 1 - replay.added
    number = torch.minimum(torch.arange(length, device=device), room)
    place, fits = replay.added + number, number >= 0
    is_first = torch.arange(length, device=device) <= room.clamp(min=0)  # the gradient flows through the first copy

    def write(old: Tensor, rows: Tensor) -> Tensor:
        new = rows.index_select(0, number.clamp(min=0)).to(old.dtype)
        values = torch.where(_append_axes(fits, old), new, old.index_select(0, place))
        return old.index_put((place,), torch.where(_append_axes(is_first, old), values, values.detach()))

    steps = combined(write, block, new)
    final = _with_final(replay, rows["truncated"], final_obs)
    block = TensorDict({"steps": steps, "final": final}, [])
    return Replay(replay.ring, block, replay.start, replay.added + length)  # torch 2.11 compiles `_replace` to ()


def _check_rows(label: str, rows: Any, stored: Any) -> None:
    """Raise ValueError unless new rows (`[S, N]`) have the same fields, shapes and dtypes as stored rows (`[T, N]`)."""
    (new, structure), (old, expected) = flatten(rows), flatten(stored)
    if names(structure) != names(expected):
        raise ValueError(f"{label} has the fields {names(structure)}, but the ring has {names(expected)}")
    for name, x, y in zip(names(expected), new, old, strict=True):
        if x.shape[1:] != y.shape[1:] or x.dtype != y.dtype:
            field = f"{label} has {name}".rstrip()
            raise ValueError(f"{field} {x.dtype} {list(x.shape)}, expected {y.dtype} [S, {str(list(y.shape[1:]))[1:]}")


def _append_axes(x: Tensor, like: Tensor) -> Tensor:
    """Append axes of size 1, so that `x` has as many axes as `like`."""
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def _with_final(replay: Replay, truncated: Tensor, final_obs: Any) -> TensorDict:
    """Return the slots of the block, with the final observations of the new truncated steps."""
    final, width = replay.block["final"], _slot_width(replay.ring)
    length, num_envs = truncated.shape
    number = torch.arange(length, device=truncated.device)
    first = replay.start + replay.added
    slot = (first + number) // width - replay.start // width
    slots = torch.arange(len(final), device=truncated.device)
    here = truncated.unsqueeze(1) & (slot.unsqueeze(-1) == slots).unsqueeze(-1)  # [S, slots, N]
    latest = torch.where(here, number.reshape(-1, 1, 1), -1).amax(0)  # last truncated step of each slot, or -1
    source = (latest.clamp(min=0) * num_envs + torch.arange(num_envs, device=truncated.device)).flatten()

    def fill(old: Tensor, new: Tensor) -> Tensor:
        rows = new.flatten(0, 1).index_select(0, source).reshape(old.shape).to(old.dtype)
        return torch.where(_append_axes(latest >= 0, old), rows, old)

    obs = combined(fill, final["obs"], final_obs)
    step = torch.where(latest >= 0, first + latest, final["step"])
    return TensorDict({"obs": obs, "step": step}, final.batch_size)


def replay_writes(replay: Replay) -> TensorDict:
    """Return the contents of a full block and where to write them in the ring.

    To store them, run `ring[part][field].index_copy_(0, index, rows[field])` for each part and each field. `rows` and
    `index` are the fields of the part in the result.

    Args:
        replay: the buffer after the last `replay_add` of the iteration.

    Returns: TensorDict with the parts `steps` and `final`. Each part has `rows` and `index`. The first axis of `rows`
        runs over steps or slots, and `index` holds their positions on the first axis of the part in the ring. A slot
        without a new final observation keeps its old contents.
    Gradient: flows through the rows of the block.

    >>> flag = torch.zeros(1, dtype=torch.bool)
    >>> rows = TensorDict({name: flag for name in ("obs", "reward", "terminated", "truncated")}, [1])
    >>> ring = replay_init(rows, steps=5, min_truncation_gap=3)
    >>> replay_writes(replay_start(ring, torch.tensor(4), steps=3))["steps", "index"]
    tensor([4, 0, 1])
    """
    ring, block, device = replay.ring, replay.block, replay.start.device
    index = (replay.start + torch.arange(len(block["steps"]), device=device)) % len(ring["steps"])
    slots = replay.start // _slot_width(ring) + torch.arange(len(block["final"]), device=device)
    slots = slots % len(ring["final"])
    filled = block["final", "step"] >= 0

    def keep(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(_append_axes(filled, new), new.to(old.dtype), old.index_select(0, slots))

    final = combined(keep, block["final"], ring["final"])
    rows = combined(lambda new, old: new.to(old.dtype), block["steps"], ring["steps"])
    return TensorDict(
        {
            "steps": TensorDict({"rows": rows, "index": index}, []),
            "final": TensorDict({"rows": final, "index": slots}, []),
        },
        [],
    )


def replay_cut(ring: TensorDict, start: Tensor) -> TensorDict:
    """Return a ring without the transitions that would lead from its newest steps to unrelated new steps.

    Call this function if the next step that is added will not follow the newest step, for example because the
    environments were restarted in between. The `mask` of the newest step of each environment becomes False, unless an
    episode ended at this step. The `mask` of a truncated step also becomes False if the first new step will have the
    same slot for final observations, because a truncation soon after the restart could then overwrite the final
    observation of the truncated step.

    Args:
        ring: ring from `replay_init`, with the field `mask`. It may have fields other than `steps` and `final`.
        start: number of steps of each environment so far, 0-d int64.

    Returns: a ring with a new tensor `mask`. The new ring shares all other tensors with `ring`.
    Gradient: none.
    Raises: ValueError if the ring has no `mask`.

    >>> yes = torch.ones(2, dtype=torch.bool)
    >>> rows = {"obs": yes, "reward": yes, "terminated": torch.tensor([False, True]), "truncated": ~yes, "mask": yes}
    >>> ring = replay_init(TensorDict(rows, [2]), steps=2, min_truncation_gap=1)
    >>> ring["steps"][0] = TensorDict(rows, [2])
    >>> replay_cut(ring, torch.tensor(1))["steps", "mask"][0].tolist()
    [False, True]
    """
    steps = cast(TensorDict, ring["steps"])
    if "mask" not in steps:
        raise ValueError(f"ring lacks mask; its steps have {', '.join(sorted(map(str, steps.keys())))}")
    age, width = (start - 1 - torch.arange(len(steps), device=start.device)) % len(steps), _slot_width(ring)
    is_newest, shares_slot = age == 0, (start - 1 - age) // width == start // width
    is_cut = is_newest.unsqueeze(1) & ~steps["terminated"] & ~steps["truncated"]
    is_cut = is_cut | (shares_slot.unsqueeze(1) & steps["truncated"])
    return replaced(ring, {"steps": replaced(steps, {"mask": steps["mask"] & ~is_cut})})


def valid_steps(replay: Replay, n: int, stack: int) -> tuple[Tensor, Tensor]:
    """Return the range of steps that can be drawn: the first step, and the first step after the range."""
    capacity = len(replay.ring["steps"])
    for name, number in (("n", n), ("stack", stack)):
        if number < 1:
            raise ValueError(f"{name} is {number}, expected at least 1")
    if n + stack > capacity:
        raise ValueError(f"n={n} and stack={stack} need a ring of at least {n + stack} steps, but it has {capacity}")
    now = replay.start + replay.added
    # Until the ring is full, all steps since the start of the first episode are stored.
    return torch.where(now > capacity, now - capacity + stack - 1, 0), now - n


def replay_count(replay: Replay, *, n: int, stack: int) -> Tensor:
    """Return the number of rows that can be drawn.

        count = N * max(0, now - n - first),  now = start + added
        first = now - R + stack - 1 if now > R else 0

    Args:
        replay: the buffer.
        n: number of steps in a return, at least 1.
        stack: number of frames in an observation, 1 without frame stacking.

    Returns: 0-d int64.
    Gradient: none.
    Raises: ValueError if `n` or `stack` is below 1, or if the ring has fewer than `n + stack` steps.

    >>> flag = torch.zeros(2, dtype=torch.bool)
    >>> rows = TensorDict({name: flag for name in ("obs", "reward", "terminated", "truncated")}, [2])
    >>> ring = replay_init(rows, steps=10, min_truncation_gap=3)
    >>> [int(replay_count(replay_start(ring, torch.tensor(t), steps=1), n=3, stack=1)) for t in (2, 5, 10, 11, 99)]
    [0, 4, 14, 14, 14]
    """
    first, end = valid_steps(replay, n, stack)
    return (end - first).clamp(min=0) * replay.ring["steps"].shape[1]


def replay_index(replay: Replay, keys: Tensor, *, n: int, stack: int) -> Tensor:
    """Draw the indices of rows uniformly at random, with replacement.

    Args:
        replay: the buffer. If no row can be drawn (see `replay_count`), the result is 0, the index of the first row. If
            the ring has the field `mask`, `replay_read` then returns a `mask` of False for this row.
        keys: `[*B]` int64, one key of `ecrl.rng` for each draw.
        n: number of steps in a return, at least 1.
        stack: number of frames in an observation, 1 without frame stacking.

    Returns: int64 `[*B]`, indices for `replay_read`.
    Gradient: none.
    Raises: ValueError if `n` or `stack` is below 1, or if the ring has fewer than `n + stack` steps.

    >>> flag = torch.zeros(2, dtype=torch.bool)
    >>> rows = TensorDict({name: flag for name in ("obs", "reward", "terminated", "truncated")}, [2])
    >>> replay = replay_start(replay_init(rows, steps=10, min_truncation_gap=3), torch.tensor(12), steps=1)
    >>> drawn = replay_index(replay, torch.arange(1000), n=3, stack=1)
    >>> sorted(set((drawn // 2).tolist()))  # steps 2 to 8 of 0 to 11
    [2, 3, 4, 5, 6, 7, 8]
    """
    first, _ = valid_steps(replay, n, stack)
    capacity, num_envs = replay.ring["steps"].shape
    draw = rng.randint(keys, low=0, high=replay_count(replay, n=n, stack=stack).clamp(min=1))
    return (first + draw // num_envs) % capacity * num_envs + draw % num_envs


def _step_and_env(replay: Replay, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the step and the environment of each index. If several steps share an index, return the newest one."""
    if index.dtype != torch.int64:
        raise ValueError(f"index has dtype {index.dtype}, expected torch.int64")
    capacity, num_envs = replay.ring["steps"].shape
    newest = replay.start + replay.added - 1
    return newest - (newest - index // num_envs) % capacity, index % num_envs


def _gather(old: Any, new: Any, is_new: Tensor, old_row: Tensor, new_row: Tensor, env: Tensor) -> Any:
    """Read rows of shape `[*B]`, from the block `new` where `is_new` is True and from the ring `old` elsewhere."""
    num_envs, shape = flatten(old)[0][0].shape[1], is_new.shape
    old_row = (old_row * num_envs + env).flatten()
    new_row = (new_row.clamp(0, len(flatten(new)[0][0]) - 1) * num_envs + env).flatten()

    def read(x: Tensor, y: Tensor) -> Tensor:
        before, after = x.flatten(0, 1).index_select(0, old_row), y.flatten(0, 1).index_select(0, new_row)
        rows = torch.where(_append_axes(is_new.flatten(), before), after.to(x.dtype), before)
        return rows.reshape(*shape, *x.shape[2:])

    leaves = [read(*pair) for pair in zip(flatten(old)[0], flatten(new)[0], strict=True)]
    return unflatten(flatten(old)[1], leaves, lambda size: (*shape, *size[2:]))


def _read_steps(replay: Replay, fields: Any, step: Tensor, env: Tensor) -> TensorDict:
    """Read `fields` at the steps `step` of the environments `env`. The results have the shape of `step`."""
    old, new = (x["steps"].select(*fields) for x in (replay.ring, replay.block))
    env = env.expand(step.shape)
    return _gather(old, new, step >= replay.start, step % len(old), step - replay.start, env)


def _read_final(replay: Replay, step: Tensor, env: Tensor) -> TensorDict:
    """Read the slots of final observations for the steps `step` of the environments `env`, int64 `[*B]` each.

    A slot belongs to a step only if its field `step` equals the step.
    """
    old, new, width = replay.ring["final"], replay.block["final"], _slot_width(replay.ring)
    slot = step // width
    return _gather(old, new, step >= replay.start, slot % len(old), slot - replay.start // width, env)


def _transitions(
    replay: Replay, index: Tensor, gamma: Scalar, n: int
) -> tuple[TensorDict, tuple[Tensor, Tensor, Tensor]]:
    """Return the result of `replay_read`, and the first step, the last step and the environment of each row."""
    valid_steps(replay, n, 1)
    (gamma,) = discounts(gamma=gamma)
    step, env = _step_and_env(replay, index)
    fields = replay.ring["steps"].keys()
    read = [name for name in ("reward", *_ENDS, "executed") if name in fields]
    also = ["mask"] if "mask" in fields else []
    ahead = step.unsqueeze(-1) + torch.arange(n, device=step.device)
    ahead = _read_steps(replay, [*read, *also], ahead, env.unsqueeze(-1))  # [*B, n]
    out = common_dtype(ahead["reward"])
    rewards, dtype = ahead["reward"].to(computed_in(out)), computed_in(out)

    running = torch.ones_like(index, dtype=torch.bool)
    terminated, truncated = torch.zeros_like(running), torch.zeros_like(running)
    total, last, executed = torch.zeros_like(rewards[..., 0]), step, torch.zeros_like(step)
    for k in range(n):
        running = running & ahead["mask"][..., k] if also and k else running
        weight = torch.pow(gamma, executed.double()).to(dtype)
        total = torch.where(running & (weight != 0), total + weight * rewards[..., k], total)
        last = torch.where(running, step + k, last)
        executed = executed + torch.where(running, ahead["executed"][..., k] if "executed" in fields else 1, 0)
        terminated = terminated | (running & ahead["terminated"][..., k])
        truncated = truncated | (running & ahead["truncated"][..., k])
        running = running & ~(terminated | truncated)
    is_cut = truncated & ~terminated
    final = _read_final(replay, last, env)
    discount = torch.pow(gamma, executed.double()).masked_fill(terminated, 0.0)
    discount = discount.masked_fill(is_cut & (final["step"] != last), torch.nan)

    batch = _read_steps(replay, [name for name in fields if name not in read], step, env)
    following = _read_steps(replay, ["obs"], last + 1, env)["obs"]
    next_obs = mapped(lambda x, y: torch.where(_append_axes(is_cut, x), x, y), final["obs"], following)
    results = {
        "reward": total.to(out),
        "discount": discount.to(dtype).to(out),
        "next_obs": next_obs,
        "terminated": terminated,
    }
    if also:  # if no step can be drawn, `replay_index` returns 0, and the mask of this row must be False
        results["mask"] = batch["mask"] & (step + n < replay.start + replay.added)
    return batch.update(results), (step, last, env)


def replay_read(replay: Replay, index: Tensor, *, gamma: Scalar, n: int) -> TensorDict:
    """Read n-step transitions. A transition has fewer steps if its episode ends earlier.

        m        = the smallest k >= 1 with terminated[t + k - 1], truncated[t + k - 1] or not mask[t + k], at most n
        reward   = sum of gamma^k * reward[t + k] over k = 0 .. m - 1
        discount = 0 if terminated[t + m - 1] else gamma^m
        next_obs = final_obs[t + m - 1] if truncated[t + m - 1] else obs[t + m]

    The target for a value function V is `reward + discount * V(next_obs)`. If the ring has the field `executed`, a step
    may consist of several environment steps. The exponents k and m of `gamma` then count environment steps.

    Args:
        replay: the buffer.
        index: int64 `[*B]`, from `replay_index` or `replay_prioritized_index`.
        gamma: discount per environment step.
        n: largest number of rewards in a sum, at least 1.

    Returns: TensorDict `[*B]` with `reward` (reward units), `discount`, `next_obs`, and `terminated` of the last step.
        The other fields of the ring, such as `obs` and `action`, belong to step t. `truncated` and `executed` are left
        out. `obs` and `next_obs` keep their dtype. `discount` has the dtype of `reward`. If `mask` is False, step t
        stores no transition, or cannot be drawn yet. If `terminated` is True, `next_obs` is an arbitrary observation.
        If the last step was truncated and its final observation was overwritten, `discount` is NaN.
    Gradient: flows through the rows and `gamma`.
    Raises: ValueError if `n` is not between 1 and R - 1, if `gamma` is not 0-d, or if `index` is not int64.
    Source: Sutton and Barto 2018, eq. 7.1; time limits as in Pardo et al. 2018, arXiv:1712.00378.

    >>> x, f = torch.arange(6.0).reshape(6, 1), torch.zeros(6, 1, dtype=torch.bool)
    >>> cut = (x == 3) | f
    >>> rows = TensorDict({"obs": x, "reward": x, "terminated": f, "truncated": cut, "final_obs": 10 * x}, [6, 1])
    >>> ring = replay_init(rows[0].exclude("final_obs"), steps=8, min_truncation_gap=3)
    >>> replay = replay_add(replay_start(ring, torch.tensor(0), steps=6), rows)
    >>> batch = replay_read(replay, torch.tensor([1, 2, 3]), gamma=0.5, n=2)
    >>> batch["reward"].tolist(), batch["discount"].tolist(), batch["next_obs"].tolist()
    ([2.0, 3.5, 3.0], [0.25, 0.25, 0.5], [3.0, 30.0, 30.0])
    """
    return _transitions(replay, index, gamma, n)[0]


def replay_stack(replay: Replay, index: Tensor, *, gamma: Scalar, n: int, stack: int) -> TensorDict:
    """Read n-step transitions whose observations are stacks of the latest frames.

        obs[i] = frame[max(t - stack + 1 + i, start of the episode)],  i = 0 .. stack - 1

    A stack that would reach into an earlier episode repeats the first frame of its own episode. Gymnasium's
    `FrameStackObservation` also repeats the first frame by default. A step whose `mask` is False belongs to no later
    stack. The last frame of `next_obs` equals the `next_obs` of `replay_read`.

    Args:
        replay: the buffer, which stores single frames.
        index: int64 `[*B]`, drawn with the same `stack`.
        gamma: discount per environment step.
        n: largest number of rewards in a sum, at least 1.
        stack: number of frames, at least 1.

    Returns: TensorDict `[*B]` with the same fields as in `replay_read`. `obs` and `next_obs` have the shape
        `[*B, stack, ...]`, with the oldest frame first.
    Gradient: flows through the rows and `gamma`.
    Raises: ValueError if `n` or `stack` is below 1, if the ring has fewer than `n + stack` steps, if `gamma` is not
        0-d, or if `index` is not int64.
    Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", methods.

    >>> x, f = torch.arange(6.0).reshape(6, 1), torch.zeros(6, 1, dtype=torch.bool)
    >>> cut = (x == 3) | f
    >>> rows = TensorDict({"obs": x, "reward": x, "terminated": f, "truncated": cut, "final_obs": 10 * x}, [6, 1])
    >>> ring = replay_init(rows[0].exclude("final_obs"), steps=8, min_truncation_gap=3)
    >>> replay = replay_add(replay_start(ring, torch.tensor(0), steps=6), rows)
    >>> batch = replay_stack(replay, torch.tensor([3, 4]), gamma=0.5, n=1, stack=3)
    >>> batch["obs"].tolist(), batch["next_obs"].tolist()
    ([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]], [[2.0, 3.0, 30.0], [4.0, 4.0, 5.0]])
    """
    valid_steps(replay, n, stack)
    batch, (step, last, env) = _transitions(replay, index, gamma, n)
    obs, older = _frames(replay, step, env, stack), _frames(replay, last, env, stack)
    axis = index.ndim

    def append(frames: Tensor, newest: Tensor) -> Tensor:
        return torch.cat((frames.narrow(axis, 1, stack - 1), newest.unsqueeze(axis)), axis)

    return batch.update({"obs": obs, "next_obs": combined(append, older, batch["next_obs"])})


def _frames(replay: Replay, step: Tensor, env: Tensor, stack: int) -> Any:
    """Return the last `stack` frames up to `step`, in shape `[*B, stack, ...]`, with the oldest frame first."""
    earlier = step.unsqueeze(-1) - torch.arange(1, stack, device=step.device)
    flags = [name for name in (*_ENDS, "mask") if name in replay.ring["steps"].keys()]  # noqa: SIM118
    steps = _read_steps(replay, flags, earlier, env.unsqueeze(-1))
    ends = steps["terminated"] | steps["truncated"] | (earlier < 0)
    ends = ends | ~steps["mask"] if "mask" in flags else ends
    inside, age = torch.ones_like(step, dtype=torch.bool), torch.zeros_like(step)
    for k in range(stack - 1):
        inside = inside & ~ends[..., k]
        age = age + inside
    back = torch.arange(stack - 1, -1, -1, device=step.device)
    frames = step.unsqueeze(-1) - torch.minimum(back, age.unsqueeze(-1))
    return _read_steps(replay, ["obs"], frames, env.unsqueeze(-1))["obs"]
