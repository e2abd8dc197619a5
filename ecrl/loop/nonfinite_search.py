"""Where NaN or infinity shows first: an iteration taken again, eagerly and step by step.

In what was collected it is a field, an environment and a step; in the update a minibatch, or a step of the sweep back,
and the first number of it that is not finite.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Algorithm, Parts
from ecrl.algorithms.core import steps_taken
from ecrl.algorithms.minibatch_sgd import MinibatchConfig
from ecrl.distributed import rank
from ecrl.kernels import scan
from ecrl.loop.finite_guard import KEYS
from ecrl.pytree import flatten, names
from ecrl.types import Logs

_FIELDS = ("obs", "action", "sample_log_prob", "value", "reward", "final_value")  # as a step comes by them
_TERMS = ("loss", "entropy", "kl_ref", "grad_norm")  # logs by their ends; others may well overflow
_SHOWN = 8


class Found(NamedTuple):
    """The first number that is not finite: its kind (one of `WHAT`), name, place and value, and the value before it."""

    what: str
    key: str
    place: dict[str, int]
    value: Any
    before: Any


def _named(tree: Any) -> dict[str, Tensor]:
    leaves, structure = flatten(tree)
    return {name: x for name, x in zip(names(structure), leaves, strict=True) if x.is_floating_point()}


def _told(x: Tensor) -> Any:
    """A number or the first ones of a vector."""
    return x.item() if x.ndim == 0 else x.flatten()[:_SHOWN].tolist()


def _wrong(batch: TensorDict) -> dict[str, Tensor]:
    """Where a field of a batch counts and is not finite, bool `[N, T + 1]`, by name; padding does not count."""
    steps = torch.ones_like(batch["done"])
    steps[:, -1] = False
    counts = steps if "mask" not in batch else steps & batch["mask"]
    told = batch.select(*_FIELDS, strict=False)
    ordered = {name: x for field in _FIELDS if field in told for name, x in _named({field: told[field]}).items()}
    seen = ("obs", "value") if "mask" not in batch else ()  # which have a last row of their own
    odd = {name: ~x.isfinite().flatten(2).all(-1) if x.ndim > 2 else ~x.isfinite() for name, x in ordered.items()}
    return {name: x & (counts | (~steps if name.startswith(seen) else False)) for name, x in odd.items()}


def in_batch(parts: Parts, state: TensorDict, batch: TensorDict) -> Found | None:
    """The first step of a batch in which a field that counts is not finite, its first field, its first environment.

    `state` is the one before the batch, to which the reward before the first one belongs.
    """
    first = {name: int(x.any(0).int().argmax()) for name, x in _wrong(batch).items() if x.any()}
    if not first:
        return None
    name = min(first, key=lambda name: first[name])
    t, x = first[name], cast(Tensor, batch[tuple(name.split("."))])
    env = int(_wrong(batch)[name][:, t].int().argmax())
    before = x[env, t - 1] if t else cast(TensorDict, state["env"])["reward"][env] if name == "reward" else None
    before = None if name == "final_value" else before  # there is one only where a time limit ended an episode
    place = {"env": env + rank() * len(x), "step": t, "env_step": int(steps_taken(parts, state)) + t}
    what = KEYS.get(name.partition(".")[0], "loss")
    return Found(what, name, place, _told(x[env, t]), None if before is None else _told(before))


def _place(parts: Parts, turn: int, turns: int) -> dict[str, int]:
    """Epoch and minibatch of a gradient step, counted from 0."""
    cfg = parts.cfg.algorithm.cfg
    each = turns // cfg.n_epochs if isinstance(cfg, MinibatchConfig) else turns
    return {"epoch": turn // each, "minibatch": turn % each}


def _minibatch(parts: Parts, turn: int, turns: int, carry: Any, logs: Logs) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Place and numbers of a gradient step on a minibatch: the terms of its loss if it counts, and what it moves to."""
    counts = float(logs["count"]) > 0.0
    told = {name: x for name, x in logs.items() if counts and name.endswith(_TERMS)}
    return _place(parts, turn, turns), told | {f"params.{name}": x for name, x in _named(carry[0]).items()}


def _back(parts: Parts, turn: int, turns: int, carry: Any, _: Any) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Place and numbers of a step of the sweep back: its costate, whose rows are environments, and the gradients."""
    grads, costate = carry
    numbers = {f"costate.{name}": x for name, x in _named(costate).items()}
    rows = [int(env) for x in numbers.values() for env in (~x.isfinite()).reshape(len(x), -1).any(1).nonzero()[:1]]
    place = {"step": turns - 1 - turn} | ({"env": min(rows) + rank() * parts.cfg.trainer.num_envs} if rows else {})
    return place, numbers | {f"gradient.{name}": x for name, x in _named(grads).items()}


_LOOPS = {"_minibatch": _minibatch, "_back": _back}


def _watching(parts: Parts, found: list[tuple[str, dict[str, int], Any, Any]]) -> Callable[..., Any]:
    """A scan that puts the first number that is not finite into `found`: name, place, it, the one of the turn before.

    It goes on to the end: other ranks do.
    """

    def watched(body: Any, carry: Any, xs: Any, *constants: Any) -> Any:
        look = _LOOPS.get(body.func.__name__) if isinstance(body, partial) else None
        if look is None:
            return scan(body, carry, xs, *constants)
        turns = len(flatten(xs)[0][0])
        turn, last = iter(range(turns)), {}

        def step(carry: Any, x: Any, *constants: Any) -> tuple[Any, Any]:
            nonlocal last
            carry, y = body(carry, x, *constants)
            place, now = look(parts, next(turn), turns, carry, y)
            for name, value in now.items() if not found else ():
                if not value.isfinite().all():
                    at = int((~value.isfinite()).flatten().int().argmax())
                    before = last[name].flatten()[at].item() if name in last else None
                    found.append((name, place, value.flatten()[at].item(), before))
                    break
            last = now
            return carry, y

        return scan(step, carry, xs, *constants)

    return watched


def _kind(name: str) -> str:
    """Of a number in the update, which of WHAT it is."""
    if name.startswith("params."):
        return "parameters"
    return "gradient" if name.startswith(("gradient.", "costate.")) or name.endswith("grad_norm") else "loss"


def in_update(algorithm: Algorithm, parts: Parts, collected: TensorDict, batch: TensorDict) -> Found | None:
    """The first step of an update in which a number is not finite, and which; else what it ends in."""
    found: list[tuple[str, dict[str, int], Any, Any]] = []
    watched = parts._replace(jit=partial, scan=_watching(parts, found))
    learnt, logs = algorithm.update(watched, collected, batch)
    terms = {name: x for name, x in logs.items() if name.endswith(_TERMS)}
    ended = terms | {f"params.{name}": x for name, x in _named(learnt["params"]).items()}
    found += [(name, {}, _told(x), None) for name, x in ended.items() if not x.isfinite().all()]
    return Found(_kind(found[0][0]), *found[0]) if found else None
