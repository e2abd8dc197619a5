"""Check the results of the functions of an algorithm and a policy. Errors name the function, the field and the shape.

The checks run when a state is created and in the first iteration. In compiled code, the checks run during the trace.
Iterations after the first iteration run without checks.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from ecrl.algorithms import Algorithm, Interleaved, Run
from ecrl.algorithms.core import OnPolicy
from ecrl.errors import ConfigError
from ecrl.policies.contract import Checked, Unchecked, check_fields, checked_policy, described, returned
from ecrl.types import STATE_FIELDS

_NEEDED = ("params", "hyper")
_SET_BY_LOOP = ("env", "episode", "carry", "key", "frozen_params")
_SET_BY_LOOP += ("sample_step", "decision_step", "update_step", "iterations")
_KEY = '`state["key"]`'


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
            meaning = f"a TensorDict of {STATE_FIELDS[name]}, which may be empty"
            raise ConfigError(f"{label} returns no {name}, only {names}; add it, {meaning}")
        if not isinstance(fields[name], Mapping | TensorDictBase):
            raise ConfigError(f"{label} returns {name} as {described(fields[name])}, expected a TensorDict; return one")
    for name in _SET_BY_LOOP:
        if name in fields:
            raise ConfigError(f"{label} returns the field {name}, which the loop sets itself; give it another name")


def check_batch(label: str, batch: Any) -> None:
    """Raise ConfigError unless `batch` is a TensorDict with the field `steps`. The message starts with `label`."""
    if not isinstance(batch, TensorDictBase):
        raise ConfigError(f"{label} returns {described(batch)} as the batch, expected a TensorDict; return one")
    if "steps" not in batch:
        have = ", ".join(sorted(map(str, batch.keys()))) or "no fields"
        raise ConfigError(f"{label} returns a batch without steps, only {have}; return TensorDict({{'steps': ...}})")


def _check_collect(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, batch = returned(label, out, "state", "batch")
    check_fields(label, args[1], state)
    check_batch(label, batch)


def _check_update(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, logs = returned(label, out, "state", "logs")
    check_fields(label, args[1], state)
    check_logs(label, logs)


def _check_turn(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, _, _, logs = returned(label, out, "state", "replay", "steps", "logs")
    check_fields(label, args[1], state)
    check_logs(label, logs)


def _check_iterate(label: str, args: tuple[Any, ...], out: Any) -> None:
    state, _, logs = returned(label, out, "state", "writes", "logs")
    check_fields(label, args[1], state)
    check_logs(label, logs)


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
