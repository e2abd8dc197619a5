"""Check the results of the functions of an algorithm and a policy. Errors name the function, the field and the shape.

The checks run when a state is created, and in the first iteration of each phase of the algorithm. In compiled code, the
checks run while the code is traced. Later iterations run without checks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl.algorithms import Algorithm, Interleaved, Run
from ecrl.algorithms.core import SKIPPED_STEPS, OnPolicy, Static
from ecrl.algorithms.state_kinds import Kind, Kinds, kind_of
from ecrl.errors import ConfigError
from ecrl.kernels import Replay
from ecrl.loop.buffers import buffer_names
from ecrl.policies.contract import (
    Checked,
    Unchecked,
    check_fields,
    checked_policy,
    described,
    named_leaves,
    returned,
)
from ecrl.types import STATE_FIELDS

_NEEDED = ("params", "hyper")
_SET_BY_LOOP = ("env", "episode", "carry", "key", "frozen_params")
_SET_BY_LOOP += ("data", "data_sha256", "sample_step", "decision_step", "update_step", "iterations")
_KEY = '`state["key"]`'
_STEP_FIELDS = ("obs", "reward", "done")
"""Fields that the steps of every batch must have.

The steps that the `turn` of an interleaved algorithm returns must have the same fields.
"""

_ONE_PER_STEP, _FLAGS = ("reward", "done", "executed"), ("done", "mask")
"""Names of the fields with one number per step, and names of the bool fields."""


def check_logs(label: str, logs: Any) -> None:
    """Raise ConfigError unless `logs` maps names to 0-d tensors."""
    if not isinstance(logs, Mapping):
        raise ConfigError(f"{label} returns {described(logs)} as logs, expected a dict of 0-d tensors; return one")
    for name, log in logs.items():
        if not isinstance(log, Tensor) or log.ndim:
            raise ConfigError(f"{label} returns the log {name} as {described(log)}; make it a 0-d tensor")


def _check_init(label: str, args: tuple[Any, ...], fields: Any) -> None:
    if not isinstance(fields, Mapping | TensorDictBase):
        raise ConfigError(f"{label} returns {described(fields)}, expected a dict of fields of the state; return one")
    names = ", ".join(sorted(map(str, fields.keys()))) or "no fields"
    for name in _NEEDED:
        if name not in fields:
            meaning = f"a TensorDict, possibly empty, of {STATE_FIELDS[name]}"
            raise ConfigError(f"{label} returns no {name}, only {names}; add it, {meaning}")
        if not isinstance(fields[name], Mapping | TensorDictBase):
            raise ConfigError(f"{label} returns {name} as {described(fields[name])}, expected a TensorDict; return one")
    for name in _SET_BY_LOOP:
        if name in fields:
            raise ConfigError(f"{label} returns the field {name}, which the loop sets itself; give it another name")


def check_batch(label: str, batch: Any, static: Static) -> None:
    """Raise ConfigError unless a batch is a TensorDict with valid `steps` of shape `[num_envs, buffer_size + 1]`.

    Args:
        label: name of the algorithm, followed by the name of the function that returned the batch.
        batch: the batch.
        static: settings of the run, such as the number of environments.
    """
    if not isinstance(batch, TensorDictBase):
        raise ConfigError(f"{label} returns {described(batch)} as the batch, expected a TensorDict; return one")
    if "steps" not in batch:
        raise ConfigError(
            f"{label} returns a batch without steps, only {_names(batch)}; return TensorDict({{'steps': ...}})"
        )
    _check_steps(label, batch["steps"], [static.num_envs, static.buffer_size + 1], "[num_envs, buffer_size + 1]")


def _names(tree: TensorDictBase) -> str:
    return ", ".join(sorted(map(str, tree.keys()))) or "no fields"


def _check_steps(label: str, steps: Any, axes: list[int], meaning: str, also: tuple[str, ...] = ()) -> None:
    """Raise ConfigError unless `steps` is a TensorDict with the fields in `_STEP_FIELDS` and in `also`.

    The shape of each field must begin with the sizes in `axes`, and the fields in `_FLAGS` must be bool. `meaning`
    names these axes in the error.
    """
    if not isinstance(steps, TensorDictBase):
        raise ConfigError(f"{label} returns {described(steps)} as the steps, expected a TensorDict; return one")
    for name in (*_STEP_FIELDS, *also):
        if name not in steps:
            raise ConfigError(f"{label} returns steps without {name}, only {_names(steps)}; add the field")
    for name, x in named_leaves(steps).items():
        dtype = "bool " if name in _FLAGS else ""
        has_axes = list(x.shape if name in _ONE_PER_STEP else x.shape[:2]) == axes
        if not has_axes or (dtype and x.dtype != torch.bool):
            more = "" if name in _ONE_PER_STEP else ", ..."
            expected = f"{dtype}[{axes[0]}, {axes[1]}{more}] for {meaning}"
            raise ConfigError(
                f"{label} returns the steps' {name} as {described(x)}, expected {expected}; return such a tensor"
            )


def _check_collect(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, batch = returned(label, out, "state", "batch")
    check_fields(label, args[1], state)
    check_batch(label, batch, args[0].static)


def _check_update(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, logs = returned(label, out, "state", "logs")
    check_fields(label, args[1], state)
    check_logs(label, logs)


def _check_turn(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, replay, steps, logs = returned(label, out, "state", "replay", "steps", "logs")
    check_fields(label, args[1], state)
    if not isinstance(replay, Replay):
        raise ConfigError(
            f"{label} returns {described(replay)} as the replay, expected the result of `store`; return it"
        )
    static, also = args[0].static, ("executed",) if "decision_step" in args[1] else ()
    _check_steps(label, steps, [static.buffer_size, static.num_envs], "[steps of a turn, num_envs]", also)
    check_logs(label, logs)
    for name, log in logs.items():
        if name != SKIPPED_STEPS and not log.is_floating_point():
            problem = f"{label} returns the log {name} as {described(log)}, expected a float for the mean over turns"
            raise ConfigError(f"{problem}; convert it")


def _check_iterate(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, writes, logs = returned(label, out, "state", "writes", "logs")
    check_fields(label, args[1], state)
    _check_writes(label, args[0], args[2], writes)
    check_logs(label, logs)


def _check_writes(label: str, run: Run, borrowed: TensorDict, writes: Any) -> None:
    """Raise ConfigError if `writes` has an invalid batch, invalid rows of a buffer, or any other field."""
    if not isinstance(writes, TensorDictBase):
        raise ConfigError(f"{label} returns {described(writes)} as writes, expected a TensorDict; return one")
    kinds = run.algorithm.kinds
    buffers = [name for name in buffer_names(kinds) if name in borrowed]
    for name in map(str, writes.keys()):
        if name == "batch":
            check_batch(label, writes[name], run.static)
        elif name in buffers:
            _check_parts(label, name, run, cast(TensorDict, borrowed[name]), writes[name])
        else:
            expected = " or ".join(("batch", *buffers))
            raise ConfigError(f"{label} returns the field {name} of writes, expected {expected}; remove or rename it")


def _check_parts(label: str, name: str, run: Run, buffer: TensorDict, parts: Any) -> None:
    """Raise ConfigError unless the writes of a buffer are valid. The writes may omit parts of the buffer."""
    kinds, tree = run.algorithm.kinds, "a TensorDict with the rows and the index of each part"
    if not isinstance(parts, TensorDictBase):
        raise ConfigError(f"{label} returns the writes of {name} as {described(parts)}, expected {tree}; return one")
    known = [
        str(part)
        for part, _ in cast(Any, buffer.items())
        if part != "written" and _is_buffer(name, str(part), buffer, kinds)
    ]
    for part, write in cast(Any, parts.items()):
        if part not in known:
            expected = " or ".join(sorted(known))
            raise ConfigError(
                f"{label} returns the field {part} of the writes of {name}, expected {expected}; rename or remove it"
            )
        _check_rows(label, f"{name}/{part}", buffer[part], write)


def _is_buffer(name: str, part: str, buffer: TensorDict, kinds: Kinds) -> bool:
    """Return True if all leaves of a part of a buffer have kind buffer."""
    leaves = [key.split("/") for key in named_leaves(buffer.select(part))]
    return all(kind_of((name, *path), kinds) is Kind.BUFFER for path in leaves)


def _check_rows(label: str, name: str, part: Any, write: Any) -> None:
    """Raise ConfigError unless a write is valid.

    A write is either a tensor of the part's shape and dtype, or a TensorDict with `index`, int64 of shape `[B]`, and
    `rows`, whose first axis also has size B. The rows have the fields of the part.
    """
    if isinstance(write, Tensor) and isinstance(part, Tensor):
        if write.shape != part.shape or write.dtype != part.dtype:
            expected = f"a tensor like the part, {described(part)}"
            raise ConfigError(f"{label} returns {name} as {described(write)}, expected {expected}; return one")
        return
    if not isinstance(write, TensorDictBase):
        raise ConfigError(
            f"{label} returns the writes of {name} as {described(write)}, expected a TensorDict; return one"
        )
    for key, expected in (("rows", "the new entries of the part"), ("index", "int64 [B], one entry per row")):
        if key not in write:
            raise ConfigError(
                f"{label} returns the writes of {name} without {key}, only {_names(write)}; add {expected}"
            )
    index, rows, rings = write["index"], named_leaves(write["rows"]), named_leaves(part)
    for problem, fields in (("without", rings.keys() - rows.keys()), ("with the unknown", rows.keys() - rings.keys())):
        if fields:
            given, expected = (", ".join(sorted(f or "tensor" for f in names)) for names in (fields, rings))
            raise ConfigError(
                f"{label} returns rows of {name} {problem} {given}, expected {expected}; return these fields"
            )
    if index.dtype != torch.int64 or index.ndim != 1:
        problem = f"{label} returns the index of {name} as {described(index)}, expected int64 [B], one entry per row"
        raise ConfigError(f"{problem}; return such a tensor")
    for field, x in rows.items():
        shape = [len(index), *rings[field].shape[1:]]
        if list(x.shape) != shape or x.dtype != rings[field].dtype:
            expected = f"{rings[field].dtype} {shape} for an index {[*index.shape]}".removeprefix("torch.")
            given = f"the rows{f' of {field}' if field else ''} of {name} as {described(x)}"
            raise ConfigError(f"{label} returns {given}, expected {expected}; return such a tensor")


def _checked_algorithm(algorithm: Algorithm) -> Algorithm:
    label, iterate = f"algorithm {algorithm.name}", algorithm.iterate
    init = Checked(f"{label}: init", algorithm.init, _check_init, (), "its key")
    if isinstance(iterate, OnPolicy):
        collect = Checked(f"{label}: collect", iterate.collect, _check_collect, (), _KEY)
        update = Checked(f"{label}: update", iterate.update, _check_update, (), _KEY)
        checked: Any = replace(iterate, collect=collect, update=update)
    elif isinstance(iterate, Interleaved):
        checked = replace(iterate, turn=Checked(f"{label}: turn", iterate.turn, _check_turn, (), _KEY))
    else:
        checked = Checked(f"{label}: iterate", iterate, _check_iterate, (), _KEY)
    return replace(algorithm, init=init, iterate=checked)


def with_contract(run: Run) -> Run:
    """Return a run whose policy and algorithm check their results inside `ecrl.policies.contract.checking`.

    The returned run does not check its environments for random draws from torch's global generators. Use
    `ecrl.check_env` for this check.
    """
    env = run.env
    unchecked = {name: Unchecked(getattr(env, name)) for name in ("reset", "draw", "step")}
    return run._replace(
        env=replace(env, **unchecked),
        policy=checked_policy(run.policy, env.observation_space, env.action_space),
        algorithm=_checked_algorithm(run.algorithm),
    )
