"""Error of an iteration with NaN or infinity: one line, a report, and the state before the iteration."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Run
from ecrl.errors import NotFiniteError
from ecrl.loop.finite_guard import KINDS
from ecrl.loop.nonfinite_search import FirstNonfinite, in_batch, search

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
    """Describe a report in one line: what is not finite, where, the value before, and advice."""
    begin = f"iteration {report['update_step']} (after {report['sample_step']} env steps)"
    problem = f"{begin}: NaN or infinity in {', '.join(report['met'])}"
    first, guard = report["found"], 'or set trainer.finite_guard to "skip" to leave such updates out'
    if first is None:
        advice = _ADVICE.get(report["met"][0], _LEARNING)
        return f"{problem}; looked at eagerly, it shows nowhere on this rank; {advice}, {guard}"
    where = ", ".join(_PLACES[name].format(number) for name, number in first["place"].items())
    last = "there is none before it" if first["before"] is None else f"last finite value {_shown(first['before'])}"
    advice = (_FINAL if first["key"] == "final_value" else "") + _ADVICE.get(first["what"], _LEARNING)
    number = f"first {first['key']} = {_shown(first['value'])}{f' in {where}' if where else ''}"
    return f"{problem}; {number}, {last}; {advice}, {guard}"


class NonfiniteAction(Exception):
    """An action for a host environment has NaN or infinity, after `taken` finite ones of this iteration.

    `last` has the last states of the environment with their actions, two at most.
    """

    def __init__(self, last: Sequence[tuple[TensorDict, Tensor]], taken: int) -> None:
        super().__init__()
        self.last, self.taken = tuple(last), taken


@dataclass(frozen=True)
class _CheckedStep:
    """Wrapper of the `step` of a host environment. It refuses actions with NaN or infinity. Compared by `step`."""

    step: Callable[[TensorDict, Tensor, Any], TensorDict]
    last: deque[tuple[TensorDict, Tensor]] = field(default_factory=lambda: deque(maxlen=2), compare=False)
    taken: Iterator[int] = field(default_factory=count, compare=False)

    def __call__(self, env_state: TensorDict, action: Tensor, noise: Any) -> TensorDict:
        self.last.append((env_state, action))
        taken = next(self.taken)
        if not isfinite(sum(action.flatten().tolist())):  # for few numbers faster than any call of torch
            raise NonfiniteAction(self.last, taken)
        return self.step(env_state, action, noise)


def with_checked_actions(run: Run) -> Run:
    """Return the run of one iteration with a host environment that refuses an action with NaN or infinity.

    A robot may execute the actions. Everything else is checked after collecting. All such runs are equal, so functions
    that are compiled for one serve the others.

    Raises: NonfiniteAction, when it steps.
    """
    return run._replace(env=replace(run.env, step=_CheckedStep(run.env.step)))


def action_error(run: Run, state: TensorDict, refused: NonfiniteAction) -> NotFiniteError:
    """Return the error of an iteration that began at `state` and ended at an action with NaN or infinity."""
    rows = [(env_state["obs"], action) for env_state, action in (*refused.last, refused.last[-1])]  # one of padding
    obs, action = (torch.stack(x, 1) for x in zip(*rows, strict=True))
    done = torch.zeros(action.shape[:2], dtype=torch.bool, device=action.device)
    first = cast(
        FirstNonfinite, in_batch(run, state, TensorDict({"obs": obs, "action": action, "done": done}, done.shape))
    )
    before = refused.taken + 1 - len(refused.last)
    place = {name: n + before * (name != "env") for name, n in first.place.items()}
    report = {**_steps(state), "met": [first.what], "found": first._replace(place=place)._asdict()}
    return NotFiniteError(explained(report), report, state)


def _steps(state: TensorDict) -> dict[str, int]:
    return {name: int(state[name]) for name in ("update_step", "sample_step")}


def nonfinite_error(
    run: Run, state: TensorDict, nonfinite: Tensor, collected: tuple[TensorDict, TensorDict] | None = None
) -> NotFiniteError:
    """Return the error of an iteration from `state` with the flags `nonfinite` `[2, 6]`. Repeat the iteration eagerly.

    All ranks call it, because the update is the work of all.

    Args:
        run: the run.
        state: the state before the iteration.
        nonfinite: flags of the finite guard.
        collected: the state after the iteration and its steps. Without it the steps are collected again.
    """
    with torch.no_grad():
        first = search(run, state, bool(nonfinite[1, :3].any()), collected)
    kinds = [kind for kind, flag in zip(KINDS, nonfinite[1].tolist(), strict=True) if flag]
    report = {**_steps(state), "met": kinds, "found": None if first is None else first._asdict()}
    return NotFiniteError(explained(report), report, state)
