"""Table of the Gymnasium environments that are open in this process.

A state consists of tensors, and cannot hold Gymnasium environments. Instead, the state's field `token` identifies the
open environments. The state's field `step` is the number of steps and resets that these environments had taken since
their first reset. Token 0 marks a state from a checkpoint, whose environments are no longer open.
"""

import atexit
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.distributed import rank
from ecrl.envs.gymnasium.spaces import BadValue
from ecrl.envs.gymnasium.vector_api import Fault, Vector
from ecrl.errors import UserError

_LIVE: dict[int, "Live"] = {}
_TOKENS = itertools.count(time.time_ns())  # start at the current time, so that tokens of different processes differ


class Live:
    """Open environments, with a counter of their steps and resets since the first reset.

    `owner` is an object that identifies the `Env` to which the environments belong.
    """

    def __init__(self, vector: Vector, owner: object, label: str):
        self.vector, self.owner, self.label, self.steps, self.token = vector, owner, label, -1, next(_TOKENS)
        _LIVE[self.token] = self

    def close(self) -> None:
        """Close the environments. A second call has no effect."""
        if _LIVE.pop(self.token, None) is not None:
            self.vector.close()

    def ask(self, answer: Callable[[], TensorDict], when: str, before: TensorDict | None = None) -> TensorDict:
        """Call `answer`, and return its state with the token and the step count added.

        `before` is the state before a step, or None for a reset. If one environment fails, all environments are closed,
        because other environments may already have taken the step.

        Raises: UserError that names the environment, the error and `when`, such as "step 3" or "reset".
        """
        self.steps += 1  # count before the call: even an interrupted step makes older states out of date
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
    """Return an error message that begins with the index (if known) and the label of the environment.

    `first` is the index of this rank's first environment among the environments of all ranks.
    """
    return f"{label} {error}" if error.env is None else f"env {error.env + first} ({label}) {error}"


def to_list(x: Tensor) -> list[int]:
    """Return the values of a tensor as a list. Raise UserError under vmap or compilation, which hide the values."""
    try:
        return x.tolist()
    except RuntimeError as error:
        raise UserError(f"Gymnasium environments run on the host and cannot be vmapped or compiled: {error}") from None


def find_live(state: TensorDict, owner: object) -> Live | None:
    """Return the open environments of a state, or None if they are closed or belong to another owner.

    The environments may have been stepped or reset since they returned the state.
    """
    live = _LIVE.get(to_list(state["token"])[0])
    return live if live is not None and live.owner is owner else None


def draw(state: TensorDict) -> list[np.ndarray]:
    """Draw the environments of `state` in their newest state. Return one image uint8 `[h, w, 3]` per environment.

    Raises: UserError if the environments are not open in this process, or cannot draw images.
    """
    live = _LIVE.get(to_list(state["token"])[0])
    if live is None:
        raise UserError("the envs of this state are not open in this process, so they cannot be drawn; reset the envs")
    try:
        return live.vector.render()
    except (Fault, BadValue) as error:
        raise UserError(f"while drawing an image: {fault_text(live.label, error)}") from error.__cause__


def steps_behind(live: Live, state: TensorDict) -> int:
    """Return the number of steps and resets that the environments have taken since they returned the state."""
    return live.steps - to_list(state["step"])[0]


def require_live(state: TensorDict, owner: object, label: str) -> Live:
    """Return the open environments of a state.

    Raises: UserError if the environments are closed, or have been stepped or reset since they returned the state.
    """
    live = find_live(state, owner)
    if live is None:
        reason = "the state was loaded or belongs to another process, or the envs were closed"
        raise UserError(f"{label}: the envs are not open in this process ({reason}); reset the envs")
    if steps := steps_behind(live, state):
        reason = f"this state is {steps} steps or resets behind its Gymnasium envs, which cannot go back"
        raise UserError(f"{label}: {reason}; continue from the newest state, or reset the envs")
    return live
