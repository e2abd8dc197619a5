"""Declare the kind of each leaf of a run's state, and write to the state's buffers in place.

Leaves of the kinds buffer and frozen are borrowed: an iteration only reads such leaves. An iteration returns the new
entries of the buffers as `writes`. The loop writes the new entries into the buffers after the finite guard has checked
the iteration. An iteration that raises an error therefore leaves the buffers unchanged.

    writes[buffer][part] = {"rows": [B, ...], "index": int64 [B]}        the loop sets buffer[part][index] = rows
    writes[buffer][part] = tensor                                        the loop sets buffer[part] = tensor

A buffer is a field of the state, and its parts are preallocated tensors or TensorDicts. Each buffer has two counts,
which are 0-d int64 tensors. The count `cursor` is the number of steps of each environment that were added to the
buffer, and an iteration increases it. `cursor` has kind counter, so each state has a cursor of its own. The count
`written` has kind buffer, so all states that borrow the buffer share one count. After each iteration, the loop first
sets `written` to the number of actions that each environment has taken (`steps_taken`), and then writes the new
entries. The loop sets `written` even if the finite guard skips the iteration. If `written` differs from `steps_taken`
of a state, another iteration has changed the buffer since, and the state is out of date.
"""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ecrl.algorithms import Interleaved, Run
from ecrl.algorithms.core import steps_taken
from ecrl.algorithms.state_kinds import BORROWED, Kind, Kinds, kind_of, leaf_kinds, split
from ecrl.errors import ConfigError, UserError
from ecrl.loop.state_summary import as_state
from ecrl.pytree import flatten, replaced, unflatten

LOOP_KINDS: Kinds = {
    "env": Kind.ENVIRONMENT,
    "episode": Kind.ENVIRONMENT,
    "carry": Kind.ENVIRONMENT,
    "norm": Kind.STATISTICS,
    "key": Kind.COUNTER,
    "sample_step": Kind.COUNTER,
    "decision_step": Kind.COUNTER,
    "update_step": Kind.COUNTER,
    "iterations": Kind.COUNTER,
    "data_sha256": Kind.COUNTER,
}
"""The kinds of the state's fields that the training loop itself adds."""

_COUNTS = ("cursor", "written")


def kinds_of(run: Run) -> Kinds:
    """Return the kind of each field of a run's state."""
    frozen = {} if run.policy.init_frozen is None else {"frozen_params": Kind.FROZEN}
    data = {} if run.algorithm.data is None else {"data": Kind.FROZEN}
    return {**LOOP_KINDS, **run.algorithm.kinds, **frozen, **data}


def check_data(run: Run, state: TensorDict) -> None:
    """Raise ConfigError if the SHA-256 of the algorithm's data set differs from the SHA-256 in the state."""
    if run.algorithm.data is None or torch.equal(run.algorithm.data.sha256(), state["data_sha256"].cpu()):
        return
    raise ConfigError(
        f"algorithm {run.algorithm.name}: {run.algorithm.data.path}: differs from the data set of this run, whose "
        f"SHA-256 is {sha256_text(state['data_sha256'])}; restore the file, or start a new run"
    )


def sha256_text(words: Tensor) -> str:
    """Convert the SHA-256 in the field `data_sha256` of a state to hexadecimal.

    >>> sha256_text(torch.tensor([1, 0, 0, -1]))[:18]
    '010000000000000000'
    """
    return b"".join(word.to_bytes(8, "little", signed=True) for word in words.tolist()).hex()


def data_of(run: Run, device: torch.device) -> TensorDict:
    """Return a TensorDict with the algorithm's data set as `data`, or an empty TensorDict without a data set."""
    data = run.algorithm.data
    return TensorDict({} if data is None else {"data": data.read(run, device)}, [])


def check_kinds(state: TensorDict, kinds: Kinds) -> None:
    """Raise ConfigError if a leaf has no declared kind, or if a buffer lacks `cursor` or `written`."""
    buffers = {path[0] for path, kind in leaf_kinds(state, kinds).items() if kind is Kind.BUFFER}
    for name in sorted(buffers):
        field, expected = state[name], dict(zip(_COUNTS, (Kind.COUNTER, Kind.BUFFER), strict=True))
        for count, kind in expected.items():
            if not isinstance(field, TensorDict) or count not in field or kind_of((name, count), kinds) is not kind:
                raise ConfigError(
                    f"state: the buffer {name} needs the count {name}/{count} of kind {kind.value}; add it to the "
                    "state and to `kinds`"
                )


def borrowed_leaves(state: TensorDict, kinds: Kinds) -> tuple[TensorDict, TensorDict]:
    """Split a state into its own leaves and its borrowed leaves.

    If `kinds` contains no borrowed kind, the function returns the state itself and an empty TensorDict.
    """
    if not any(kind in BORROWED for kind in kinds.values()):
        return state, TensorDict({}, [])
    return split(state, kinds)


_LARGE = 2**20
"""Size in bytes above which `ZerosWithoutMemory` replaces a tensor of zeros."""


_ALLOCATING = (torch.zeros, torch.empty, torch.zeros_like, torch.empty_like, Tensor.new_zeros, Tensor.new_empty)


_CHANGING_NO_VALUE = {
    *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"),
    *("requires_grad_", "detach_"),
}
"""Names of the in-place functions that do not change the values of a tensor."""


def _is_one_element(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > 1 and not any(x.stride())


class ZerosWithoutMemory(TorchFunctionMode):
    """Context that replaces each large new tensor of zeros or uninitialised values by one zero, expanded to its shape.

    Use this context to get the shapes and dtypes of a state without allocating its large buffers. Writing to an
    expanded zero has no effect, and copying an expanded zero returns the same tensor.

    >>> with ZerosWithoutMemory():
    ...     ring = torch.zeros(2**30, 8).clone()
    >>> ring.shape, ring.untyped_storage().nbytes()
    (torch.Size([1073741824, 8]), 4)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, first = getattr(func, "__name__", ""), next(iter((*args, *kwargs.values())), None)
        if _is_one_element(first):  # the functions of `torch.nn.init` pass the tensor by name
            writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
            if (writes and name not in _CHANGING_NO_VALUE) or name in ("clone", "contiguous"):
                return first
        if func in _ALLOCATING and kwargs.get("out") is None:
            like = func(*args, **{**kwargs, "device": "meta"})
            if like.numel() * like.element_size() > _LARGE:
                device = kwargs.get("device", args[0].device if isinstance(args[0], Tensor) else None)
                return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
        return func(*args, **kwargs)


def with_own_buffers(state: TensorDict, kinds: Kinds) -> TensorDict:
    """Return the state with copies of its buffers, for a loop that writes to the buffers."""

    def copied(path: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, TensorDict):
            inner = {key: copied((*path, key), part) for key, part in cast(Any, value.items())}
            return TensorDict(inner, value.batch_size)
        return value.clone() if kind_of(path, kinds) is Kind.BUFFER else value

    return as_state(
        replaced(state, {name: copied((name,), state[name]) for name in buffer_names(kinds) if name in state})
    )


def buffer_names(kinds: Kinds) -> list[str]:
    """Return the names of the state's fields that are buffers.

    >>> buffer_names({"params": Kind.LEARNED, "replay": Kind.BUFFER, ("replay", "cursor"): Kind.COUNTER})
    ['replay']
    """
    return sorted({key if isinstance(key, str) else key[0] for key, kind in kinds.items() if kind is Kind.BUFFER})


def without_buffers(state: TensorDict, kinds: Kinds) -> TensorDict:
    """Return a copy of a state without the fields that are buffers."""
    return cast(TensorDict, state.exclude(*buffer_names(kinds)))


def overwritten_buffers(run: Run, state: TensorDict) -> list[str]:
    """Return the names of the buffers in `state` that are out of date.

    A buffer is out of date if an iteration after the iteration of `state` has overwritten the buffer.
    """
    names = [name for name in buffer_names(kinds_of(run)) if name in state]
    taken = int(steps_taken(run, state)) if names else 0
    return [name for name in names if int(state[name, "written"]) != taken]


def check_current(run: Run, state: TensorDict) -> None:
    """Raise UserError if an iteration after the iteration of `state` has overwritten a buffer in `state`."""
    for name in overwritten_buffers(run, state):
        raise UserError(
            f"state: the buffer {name} was overwritten by a later iteration; use a yielded state before the next "
            "iteration, or keep state.clone()"
        )


def mark_written(run: Run, borrowed: TensorDict, after: TensorDict) -> None:
    """Set the counts `written` of the buffers in `borrowed`, in place, so that `after` is the only current state.

    Call this function before a write to the buffers. After an interrupted write, every older state is then out of date.
    """
    for name in buffer_names(kinds_of(run)):
        if name in borrowed:
            borrowed[name, "written"].copy_(steps_taken(run, after))


def commit(borrowed: TensorDict, writes: TensorDict) -> None:
    """Write the new entries of an iteration into the buffers, in place, after `mark_written`.

    Args:
        borrowed: the borrowed leaves, which contain the buffers.
        writes: the new entries, as in the module docstring.
    """
    for name, parts in cast(Any, writes.items()):
        for part, write in parts.items():
            if isinstance(write, Tensor):
                borrowed[name, part].copy_(write)
                continue
            for old, rows in zip(flatten(borrowed[name, part])[0], flatten(write["rows"])[0], strict=True):
                old.index_copy_(0, write["index"], rows)


def committed(run: Run, borrowed: TensorDict, writes: TensorDict, after: TensorDict, skipped: Tensor) -> TensorDict:
    """Write the new entries of an iteration into copies of the buffers, and return the copies.

    If `skipped`, a 0-d bool tensor, is True, the copies equal the buffers, except for the counts `written`.
    """

    def chosen(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(skipped.reshape(*skipped.shape, *(1,) * (new.ndim - skipped.ndim)), old, new)

    def write(old: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        return old.index_copy(0, index, chosen(old[index], rows))

    copies = borrowed.copy()
    for name in buffer_names(kinds_of(run)):
        fields: dict[str, Any] = {"written": steps_taken(run, after)}
        for part, one in cast(Any, writes.get(name, TensorDict({}, [])).items()):
            if isinstance(one, Tensor):
                fields[part] = chosen(borrowed[name, part], one)
                continue
            leaves, structure = flatten(borrowed[name, part])
            new = [write(old, rows, one["index"]) for old, rows in zip(leaves, flatten(one["rows"])[0], strict=True)]
            fields[part] = unflatten(structure, new)
        copies[name] = replaced(cast(TensorDict, borrowed[name]), fields)
    return copies


def with_gap(run: Run, state: TensorDict) -> TensorDict:
    """Return a state whose replay buffer marks the newest steps as having no successors (see `replay_cut`).

    If the algorithm is not `Interleaved`, return the state unchanged.
    """
    iterate = run.algorithm.iterate
    return iterate.after_gap(state) if isinstance(iterate, Interleaved) else state


def overwrite(borrowed: TensorDict, new: TensorDict) -> None:
    """Copy the tensors of `new` into the tensors of `borrowed`, in place.

    A tensor that is the same object in both is not copied.
    """
    for old, value in zip(flatten(borrowed)[0], flatten(new)[0], strict=True):
        if old is not value:
            old.copy_(value)
