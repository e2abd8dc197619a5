"""Open environments, outside of any state; a state says by `token` which it is of, and by `step` where they stood.

Token 0 is a state that was loaded: its environments are gone.
"""

import atexit
import itertools
import time
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.distributed import rank
from ecrl.envs.gymnasium.spaces import BadValue
from ecrl.envs.gymnasium.vector_api import Fault, Vector
from ecrl.errors import UserError

_LIVE: dict[int, "Live"] = {}
_TOKENS = itertools.count(time.time_ns())  # of this process alone, so that the state of another one is known as such


class Live:
    """Open environments: whose they are, and how many steps they have taken since the first reset, later ones too."""

    def __init__(self, vector: Vector, owner: object, label: str):
        self.vector, self.owner, self.label, self.steps, self.token = vector, owner, label, -1, next(_TOKENS)
        _LIVE[self.token] = self

    def close(self) -> None:
        """Close them; a second time does nothing."""
        if _LIVE.pop(self.token, None) is not None:
            self.vector.close()

    def ask(self, answer: Callable[[], TensorDict], when: str, before: TensorDict | None = None) -> TensorDict:
        """The state after a step from `before`, or a reset; where one environment fails all are closed, out of step."""
        self.steps += 1  # first, so that a state from before an interrupted step is known to be behind
        try:
            state = answer()
        except (Fault, BadValue) as error:
            self.close()
            text = f"{explained(self.label, error, 0 if before is None else rank() * len(before))}, in {when}"
            raise UserError(text) from error.__cause__
        stamp = torch.tensor((self.token, self.steps)).expand(len(state), 2)
        return state.set("token", stamp[:, 0].clone()).set("step", stamp[:, 1].clone())


@atexit.register
def _close_all() -> None:
    for live in list(_LIVE.values()):
        live.close()


def explained(label: str, error: Fault | BadValue, first: int = 0) -> str:
    """What went wrong, with the environment first, counted from the `first` one of this rank."""
    return f"{label} {error}" if error.env is None else f"env {error.env + first} ({label}) {error}"


def numbers(x: Tensor) -> list[int]:
    """To the host; raises UserError under vmap, which has no way to it."""
    try:
        return x.tolist()
    except RuntimeError as error:
        raise UserError(f"Gymnasium environments run on the host and cannot be vmapped or compiled: {error}") from None


def opened(state: TensorDict, owner: object) -> Live | None:
    """The open environments of a state, wherever they stand; None if they are closed, gone, or not of `owner`."""
    live = _LIVE.get(numbers(state["token"])[0])
    return live if live is not None and live.owner is owner else None


def behind(live: Live, state: TensorDict) -> int:
    """How many steps the environments have taken since they gave the state."""
    return live.steps - numbers(state["step"])[0]


def current(state: TensorDict, owner: object, label: str) -> Live:
    """The open environments of a state; raises UserError if there are none, or they do not stand where it does."""
    live = opened(state, owner)
    if live is None:
        why = "the state was loaded or is of another process, or they were closed"
        raise UserError(f"{label}: envs not open in this process ({why}); reset them")
    if steps := behind(live, state):
        why = f"this state is {steps} steps behind its Gymnasium envs, which cannot go back"
        raise UserError(f"{label}: {why}; go on from the newest state, or reset them")
    return live
