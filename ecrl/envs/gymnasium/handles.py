"""The table of open Gymnasium environments, which live outside any state.

A state refers to its environments by `token`, and has their step count in `step`. Token 0 marks a state that was loaded
from a checkpoint: its environments are closed.
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
_TOKENS = itertools.count(time.time_ns())  # unique to this process, so a state of another process is recognised


class Live:
    """Open environments, their owner, and the number of steps and resets since the first reset."""

    def __init__(self, vector: Vector, owner: object, label: str):
        self.vector, self.owner, self.label, self.steps, self.token = vector, owner, label, -1, next(_TOKENS)
        _LIVE[self.token] = self

    def close(self) -> None:
        """Close the environments; a second call does nothing."""
        if _LIVE.pop(self.token, None) is not None:
            self.vector.close()

    def ask(self, answer: Callable[[], TensorDict], when: str, before: TensorDict | None = None) -> TensorDict:
        """Return the state after a step from `before`, or after a reset.

        If one environment fails, all are closed, because the others may have taken the step.

        Raises: UserError with the environment, the error and `when`, the name of the step.
        """
        self.steps += 1  # counted first: after an interrupted step, older states count as behind
        try:
            state = answer()
        except (Fault, BadValue) as error:
            self.close()
            first = 0 if before is None else rank() * len(before)
            raise UserError(f"{fault_text(self.label, error, first)}, in {when}") from error.__cause__
        stamp = torch.tensor((self.token, self.steps)).expand(len(state), 2)
        return state.set("token", stamp[:, 0].clone()).set("step", stamp[:, 1].clone())


@atexit.register
def _close_all() -> None:
    for live in list(_LIVE.values()):
        live.close()


def fault_text(label: str, error: Fault | BadValue, first: int = 0) -> str:
    """Return an error message that begins with the environment. This rank's first one has the index `first`."""
    return f"{label} {error}" if error.env is None else f"env {error.env + first} ({label}) {error}"


def to_list(x: Tensor) -> list[int]:
    """Copy a tensor to the host; raise UserError under vmap, which cannot copy to the host."""
    try:
        return x.tolist()
    except RuntimeError as error:
        raise UserError(f"Gymnasium environments run on the host and cannot be vmapped or compiled: {error}") from None


def find_live(state: TensorDict, owner: object) -> Live | None:
    """Return the open environments of a state, at any step; None if they are closed or belong to another owner."""
    live = _LIVE.get(to_list(state["token"])[0])
    return live if live is not None and live.owner is owner else None


def steps_behind(live: Live, state: TensorDict) -> int:
    """Return the number of steps that the environments have taken since they returned the state."""
    return live.steps - to_list(state["step"])[0]


def require_live(state: TensorDict, owner: object, label: str) -> Live:
    """Return the open environments of a state; raise UserError if there are none, or if they have taken more steps."""
    live = find_live(state, owner)
    if live is None:
        reason = "the state was loaded, or it belongs to another process, or they were closed"
        raise UserError(f"{label}: envs not open in this process ({reason}); reset them")
    if steps := steps_behind(live, state):
        reason = f"this state is {steps} steps behind its Gymnasium envs, which cannot go back"
        raise UserError(f"{label}: {reason}; continue from the newest state, or reset them")
    return live
