"""Kinds of the leaves in a run's state. A leaf's kind determines how the loop, the ranks and checkpoints handle it.

| kind | examples | copied for each record | across ranks | saved |
|---|---|---|---|---|
| learned | params, opt, ref_params | yes | equal: gradients are averaged | once |
| statistics | running moments | yes | equal: sums are over all ranks | once |
| environment | env, episode, carry, running returns | yes | each rank has its own | per rank |
| buffer | replay | no, it is borrowed | each rank has its own | per rank |
| frozen | frozen_params | no, it is borrowed | equal | in one file for all checkpoints |
| counter | key, sample_step, update_step, hyper | yes | equal | once |

A record is what `ecrl.train_iter` yields after an iteration. The state of a record is a copy that belongs to the
caller. An iteration only reads borrowed leaves, and the loop writes new steps to the buffers in place.

Declare a kind for a field, or for a path inside a field. The declaration with the longest matching path applies.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, cast

from tensordict import TensorDict

from ecrl.errors import ConfigError
from ecrl.pytree import flatten, paths

Path = tuple[str, ...]


class Kind(StrEnum):
    """Kind of a leaf in the state. The table of this module describes each kind."""

    LEARNED = "learned"
    STATISTICS = "statistics"
    ENVIRONMENT = "environment"
    BUFFER = "buffer"
    FROZEN = "frozen"
    COUNTER = "counter"


Kinds = Mapping[str | Path, Kind]
"""Mapping from the name of a field, or from a path inside a field, to the declared kind."""

BORROWED = (Kind.BUFFER, Kind.FROZEN)
PER_RANK = (Kind.ENVIRONMENT, Kind.BUFFER)


def kind_of(path: Path, kinds: Kinds) -> Kind:
    """Return the kind that is declared for a leaf, or for the longest declared prefix of its path.

    Raises: ConfigError if neither the path nor a prefix of the path is declared.

    >>> kinds = {"norm": Kind.STATISTICS, ("norm", "reward", "running"): Kind.ENVIRONMENT}
    >>> kind_of(("norm", "reward", "running"), kinds).value, kind_of(("norm", "obs", "mean"), kinds).value
    ('environment', 'statistics')
    """
    for length in range(len(path), 0, -1):
        kind = kinds.get(path[:length], kinds.get(path[0]) if length == 1 else None)
        if kind is not None:
            return kind
    known = ", ".join(sorted({key if isinstance(key, str) else "/".join(key) for key in kinds}))
    raise ConfigError(
        f"state: the kind of {'/'.join(path)} is not declared (declared: {known}); add it to `kinds` of the algorithm"
    )


def leaf_kinds(state: TensorDict, kinds: Kinds) -> dict[Path, Kind]:
    """Return a dict from the path of every leaf to the leaf's kind. Raise ConfigError for a leaf without a kind."""
    return {path: kind_of(path, kinds) for path in paths(flatten(state)[1])}


def environment_fields(state: TensorDict, kinds: Kinds) -> list[str]:
    """Return the names of the fields whose declared kind is environment.

    >>> state = TensorDict({"env": {"x": 1.0}, "key": 2}, [])
    >>> environment_fields(state, {"env": Kind.ENVIRONMENT, "key": Kind.COUNTER})
    ['env']
    """
    return [str(name) for name, _ in cast(Any, state.items()) if kinds.get(name) is Kind.ENVIRONMENT]


def split(state: TensorDict, kinds: Kinds) -> tuple[TensorDict, TensorDict]:
    """Split a state into leaves that an iteration replaces and borrowed leaves, which have the kind buffer or frozen.

    >>> state = TensorDict({"params": {"w": 1.0}, "replay": {"obs": 2.0}}, [])
    >>> own, borrowed = split(state, {"params": Kind.LEARNED, "replay": Kind.BUFFER})
    >>> list(own.keys()), list(borrowed.keys())
    (['params'], ['replay'])
    """
    chosen = [path for path, kind in leaf_kinds(state, kinds).items() if kind in BORROWED]
    if not chosen:
        return state, TensorDict({}, [])
    return _without(state, set(chosen), ()), _only(state, set(chosen), ())


def _only(tree: TensorDict, chosen: set[Path], at: Path) -> TensorDict:
    fields: dict[str, Any] = {}
    for key, value in cast(Any, tree.items()):
        if isinstance(value, TensorDict):
            inner = _only(value, chosen, (*at, key))
            if not inner.is_empty():
                fields[key] = inner
        elif (*at, key) in chosen:
            fields[key] = value
    return TensorDict(fields, tree.batch_size)


def _without(tree: TensorDict, chosen: set[Path], at: Path) -> TensorDict:
    fields: dict[str, Any] = {}
    for key, value in cast(Any, tree.items()):
        if isinstance(value, TensorDict):
            inner = _without(value, chosen, (*at, key))
            if not inner.is_empty() or value.is_empty():
                fields[key] = inner
        elif (*at, key) not in chosen:
            fields[key] = value
    return TensorDict(fields, tree.batch_size)


def without(state: TensorDict, borrowed: TensorDict) -> TensorDict:
    """Remove the leaves of `borrowed` from a state, which undoes `merge`.

    >>> state = TensorDict({"params": {"w": 1.0}, "replay": {"obs": 2.0}}, [])
    >>> list(without(state, TensorDict({"replay": {"obs": 2.0}}, [])).keys())
    ['params']
    """
    return state if borrowed.is_empty() else _without(state, set(paths(flatten(borrowed)[1])), ())


def merge(own: TensorDict, borrowed: TensorDict) -> TensorDict:
    """Undo `split`: merge the leaves of both results into one state. The tensors are not copied."""
    if borrowed.is_empty():
        return own
    fields: dict[str, Any] = dict(own.items())
    for key, value in cast(Any, borrowed.items()):
        fields[key] = merge(fields[key], value) if key in fields else value
    return TensorDict(fields, own.batch_size)
