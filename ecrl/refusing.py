"""The error of an iteration that met NaN or infinity: one line, a report, and the state before it."""

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Algorithm, Parts
from ecrl.errors import NotFiniteError
from ecrl.finite import WHAT
from ecrl.kernels import scan
from ecrl.locating import in_batch, in_update

_ADVICE = {
    "observation": "mend the environment",
    "reward": "mend the environment",
    "action": "the policy gave it: lower the learning rate",
}
_FINAL = "it is the value of the observation at a time limit: mend the environment if that is not finite, else "
_LEARNING = "lower the learning rate or max_grad_norm"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_PLACES = {
    "env": "env {}",
    "step": "step {} of the rollout",
    "env_step": "step {} of that env",
    "epoch": "epoch {}",
    "minibatch": "minibatch {}",
}


def explained(report: dict[str, Any]) -> str:
    """One line: what, where, what it was before, what to do."""
    begin = f"iteration {report['update_step']} (after {report['sample_step']} env steps)"
    met = f"{begin}: NaN or infinity in {', '.join(report['met'])}"
    found, guard = report["found"], 'or set trainer.finite_guard to "skip" to leave such updates out'
    if found is None:
        return f"{met}; looked at eagerly, it shows nowhere on this rank; {_LEARNING}, {guard}"
    where = ", ".join(_PLACES[name].format(number) for name, number in found["place"].items())
    last = "there is none before it" if found["before"] is None else f"last finite value {_shown(found['before'])}"
    advice = (_FINAL if found["key"] == "final_value" else "") + _ADVICE.get(found["what"], _LEARNING)
    first = f"first {found['key']} = {_shown(found['value'])}{f' in {where}' if where else ''}"
    return f"{met}; {first}, {last}; {advice}, {guard}"


def careful(parts: Parts, state: TensorDict) -> Parts:
    """The parts for collecting from `state`, with host environments that are given no action of NaN or infinity.

    A robot may be behind them. Everything else is judged when all is collected.

    Raises: NotFiniteError, when it steps.
    """
    asked: list[TensorDict] = []

    def step(world: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        seen = {"obs": world["obs"], "action": action, "done": torch.zeros_like(world["terminated"])}
        asked.append(TensorDict(seen, world.batch_size))
        if action.is_floating_point() and not action.isfinite().all():
            raise _unfit(parts, state, asked)
        return parts.env.step(world, action, noise)

    return parts._replace(env=replace(parts.env, step=step))


def _unfit(parts: Parts, state: TensorDict, asked: list[TensorDict]) -> NotFiniteError:
    """The error of an iteration from `state` that ends while it collects, by what the policy saw and did."""
    batch = cast(TensorDict, torch.stack((*asked, asked[-1]), 1))
    found = in_batch(parts, state, batch)
    report = {**_steps(state), "met": [found.what] if found else [], "found": found and found._asdict()}
    return NotFiniteError(explained(report), report, state)


def _steps(state: TensorDict) -> dict[str, int]:
    return {name: int(state[name]) for name in ("update_step", "sample_step")}


def refusal(
    algorithm: Algorithm,
    parts: Parts,
    state: TensorDict,
    odd: Tensor,
    collected: tuple[TensorDict, TensorDict] | None = None,
) -> NotFiniteError:
    """The error of an iteration from `state` whose flags `[2, 6]` are `odd`.

    `collected` is what it collected, the state and the batch; collected again where that is None. Where several ranks
    train, all call this: the update is the work of all.
    """
    eager = parts._replace(jit=partial, scan=scan)
    with torch.no_grad():
        after, batch = collected or algorithm.collect(eager, state)
        found = in_batch(parts, state, batch)
        if not odd[1, :3].any():
            learnt = in_update(algorithm, eager, after, batch)
            found = found or learnt
    met = [what for what, is_odd in zip(WHAT, odd[1].tolist(), strict=True) if is_odd]
    report = {**_steps(state), "met": met, "found": None if found is None else found._asdict()}
    return NotFiniteError(explained(report), report, state)
