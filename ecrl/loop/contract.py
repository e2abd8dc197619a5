"""Check what the functions of an algorithm and a policy return, and report its name, the field and its shape.

The checks read shapes and dtypes only. In compiled code they run while a function is traced, before it is compiled.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl.algorithms import Algorithm, Interleaved, Run
from ecrl.algorithms.core import Collect, Iterate, OnPolicy, Update, collect_of
from ecrl.algorithms.interleaved import Replay, Turn
from ecrl.errors import ConfigError
from ecrl.pytree import flatten, paths
from ecrl.types import Logs

_RESERVED = {
    *("obs", "final_obs", "reward", "terminated", "truncated", "done", "info", "mask", "executed"),
    *("value", "final_value", "next_value", "carry", "final_carry"),
}
"""Fields of a rollout that the collector and the estimators set."""


def _described(x: Any) -> str:
    if not isinstance(x, Tensor):
        return f"{type(x).__name__} {x!r:.40}"
    return f"{x.dtype} {list(x.shape)}".removeprefix("torch.")


def check_fields(label: str, before: TensorDict, after: Any) -> None:
    """Raise ConfigError if a function drops or adds a leaf of the state, or changes its shape or dtype.

    Args:
        label: name of the algorithm and of its function.
        before: the state that the function was given.
        after: the state that it returned.
    """
    if not isinstance(after, TensorDictBase):
        raise ConfigError(f"{label} returns {type(after).__name__} as the state, expected a TensorDict; return one")
    (old, structure), (new, structure_after) = flatten(before), flatten(after)
    if structure == structure_after:
        for i, (x, y) in enumerate(zip(old, new, strict=True)):
            if x is not y and (x.shape != y.shape or x.dtype != y.dtype):
                name = "/".join(paths(structure)[i])
                change = f"changes the state's {name} from {_described(x)} to {_described(y)}"
                raise ConfigError(f"{label} {change}; keep its shape and dtype")
        return
    named, named_after = ({"/".join(path) for path in paths(s)} for s in (structure, structure_after))
    for change, fields in (("drops", named - named_after), ("adds", named_after - named)):
        if fields:
            listed = ", ".join(sorted(fields))
            raise ConfigError(f"{label} {change} fields of the state: {listed}; return the fields that `init` returns")
    raise ConfigError(f"{label} changes the batch size of a TensorDict in the state; keep it")


def check_logs(label: str, logs: Any) -> None:
    """Raise ConfigError if logs are not 0-d tensors by name."""
    if not isinstance(logs, Mapping):
        raise ConfigError(f"{label} returns {_described(logs)} as logs, expected a dict of 0-d tensors; return one")
    for name, log in logs.items():
        if not isinstance(log, Tensor) or log.ndim:
            raise ConfigError(f"{label} returns the log {name} as {_described(log)}; make it a 0-d tensor")


def check_act(label: str, obs: Any, out: Any, required: Sequence[str]) -> None:
    """Raise ConfigError if the output of a policy's `act` lacks a field, or has one of a wrong shape or name.

    Args:
        label: name of the policy and of its function.
        obs: the observations `[N, ...]`.
        out: the output of `act`.
        required: the fields that it must have.
    """
    if not isinstance(out, TensorDictBase):
        raise ConfigError(f"{label} returns {type(out).__name__} as its output, expected a TensorDict; return one")
    known = ", ".join(map(str, out.keys())) or "no fields"
    for name in required:
        if name not in out:
            raise ConfigError(f"{label} returns no {name}, only {known}; add the field")
    for name in sorted(_RESERVED.intersection(map(str, out.keys()))):
        raise ConfigError(f"{label} returns the field {name}, which the rollout has itself; give it another name")
    count = flatten(obs)[0][0].shape[:1]
    leaves, structure = flatten(out)
    for path, leaf in zip(paths(structure), leaves, strict=True):
        if leaf.shape[:1] != count:
            problem = f"{label} returns {'/'.join(path)} as {_described(leaf)}, expected [{count[0]}, ...]"
            raise ConfigError(f"{problem}; return one row per environment")
    if "token_mask" in out and "sample_log_prob" in out:
        mask, log_prob = cast(Tensor, out["token_mask"]), cast(Tensor, out["sample_log_prob"])
        if mask.dtype != torch.bool or mask.shape != log_prob.shape:
            expected = f"bool {list(log_prob.shape)}, the shape of sample_log_prob"
            raise ConfigError(f"{label} returns token_mask as {_described(mask)}, expected {expected}; return that")


@dataclass(frozen=True)
class CheckedAct:
    """The `act` of the policy `name`, with its output checked."""

    name: str
    act: Callable[..., tuple[TensorDict, TensorDict]]
    required: tuple[str, ...]

    @property
    def __name__(self) -> str:
        """Name of the function, for the report of its compilation."""
        return self.act.__name__

    def __call__(self, params: Any, carry: Any, obs: Any, noise: Any) -> tuple[TensorDict, TensorDict]:
        """Return the result of `act`."""
        carry, out = self.act(params, carry, obs, noise)
        check_act(f"policy {self.name}: act", obs, out, self.required)
        return carry, out


def _with_checked_act(run: Run, name: str) -> Run:
    required = ("action",) if run.policy.evaluate is None else ("action", "sample_log_prob")
    return run._replace(policy=replace(run.policy, act=CheckedAct(name, run.policy.act, required)))


@dataclass(frozen=True)
class CheckedCollect:
    """The `collect` of the algorithm `name`, with its state checked, and the output of the policy's `act`."""

    name: str
    policy: str
    collect: Collect

    def __call__(self, run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        """Return the result of `collect`."""
        after, batch = self.collect(_with_checked_act(run, self.policy), state)
        check_fields(f"algorithm {self.name}: collect", state, after)
        return after, batch


@dataclass(frozen=True)
class CheckedUpdate:
    """The `update` of the algorithm `name`, with its state and logs checked."""

    name: str
    update: Update

    def __call__(self, run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
        """Return the result of `update`."""
        after, logs = self.update(run, state, batch)
        label = f"algorithm {self.name}: update"
        check_fields(label, state, after)
        check_logs(label, logs)
        return after, logs


@dataclass(frozen=True)
class CheckedTurn:
    """The `turn` of the algorithm `name`, with its state and logs checked, and the output of the policy's `act`."""

    name: str
    policy: str
    turn: Turn

    def __call__(
        self, run: Run, state: TensorDict, noise: Any, replay: Replay
    ) -> tuple[TensorDict, Replay, TensorDict, Logs]:
        """Return the result of `turn`."""
        after, replay, steps, logs = self.turn(_with_checked_act(run, self.policy), state, noise, replay)
        label = f"algorithm {self.name}: turn"
        check_fields(label, state, after)
        check_logs(label, logs)
        return after, replay, steps, logs


@dataclass(frozen=True)
class CheckedIterate:
    """The `iterate` of the algorithm `name`, with its state and logs checked, and the output of the policy's `act`."""

    name: str
    policy: str
    iterate: Iterate

    @property
    def collect(self) -> Collect | None:
        """The `collect` of `iterate`, for videos."""
        return collect_of(self.iterate)

    def __call__(self, run: Run, state: TensorDict, borrowed: TensorDict) -> tuple[TensorDict, TensorDict, Logs]:
        """Return the result of `iterate`."""
        after, writes, logs = self.iterate(_with_checked_act(run, self.policy), state, borrowed)
        label = f"algorithm {self.name}: iterate"
        check_fields(label, state, after)
        check_logs(label, logs)
        return after, writes, logs


def with_contract(algorithm: Algorithm, name: str, policy: str) -> Algorithm:
    """Return an algorithm whose functions check their results.

    Args:
        algorithm: choices and functions.
        name: name under which the algorithm is registered.
        policy: name under which the policy is registered.
    """
    iterate = algorithm.iterate
    if isinstance(iterate, OnPolicy):
        checked: Any = OnPolicy(CheckedCollect(name, policy, iterate.collect), CheckedUpdate(name, iterate.update))
    elif isinstance(iterate, Interleaved):
        checked = replace(iterate, turn=CheckedTurn(name, policy, iterate.turn))
    else:
        checked = CheckedIterate(name, policy, iterate)
    return replace(algorithm, iterate=checked)
