"""The error of an iteration that met NaN or infinity: one line, a report, and the state before it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import isfinite
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Algorithm, Parts
from ecrl.errors import NotFiniteError
from ecrl.kernels import scan
from ecrl.loop.finite_guard import WHAT
from ecrl.loop.nonfinite_search import Found, in_batch, in_update

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
        advice = _ADVICE.get(report["met"][0], _LEARNING)
        return f"{met}; looked at eagerly, it shows nowhere on this rank; {advice}, {guard}"
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
    asked: deque[tuple[TensorDict, Tensor]] = deque(maxlen=2)
    times = count(1)

    def step(world: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        asked.append((world, action))
        taken = next(times)
        if not isfinite(sum(action.flatten().tolist())):  # for few numbers faster than any call of torch
            raise _unfit(parts, state, asked, taken - len(asked))
        return parts.env.step(world, action, noise)

    return parts._replace(env=replace(parts.env, step=step))


def _unfit(parts: Parts, state: TensorDict, asked: Sequence[tuple[TensorDict, Tensor]], before: int) -> NotFiniteError:
    """The error of an iteration that ends while it collects, by what was last seen and done, after `before` steps."""
    seen = [(world["obs"], action) for world, action in (*asked, asked[-1])]  # the last row of a batch is apart
    obs, action = (torch.stack(x, 1) for x in zip(*seen, strict=True))
    done = torch.zeros(action.shape[:2], dtype=torch.bool, device=action.device)
    found = cast(Found, in_batch(parts, state, TensorDict({"obs": obs, "action": action, "done": done}, done.shape)))
    place = {name: n + before * (name != "env") for name, n in found.place.items()}
    report = {**_steps(state), "met": [found.what], "found": found._replace(place=place)._asdict()}
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
