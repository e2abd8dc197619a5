"""Define the fields of rollouts, batches and run states, and check the shapes and dtypes of rollouts.

A rollout is a TensorDict with batch shape `[num_envs, time + 1]`, also written `[N, T+1]`. Index `t` of the time axis
contains one transition. At the last index of the time axis, every field except `obs` and `value` is padding. The
collector sets padding to zero, and functions that use a rollout ignore padding.

A batch is a TensorDict with batch shape `[num_envs]`. The field `steps` of a batch is a rollout. In the other fields of
a batch, the second axis is not time.
"""

from typing import Literal, NotRequired, TypedDict, cast

import torch
from tensordict import TensorDict
from torch import Tensor

Scalar = float | Tensor
"""Type of a hyperparameter: a Python number or a 0-d tensor. The value of a tensor can change without recompilation."""

Logs = dict[str, Tensor]
"""Type of logs: a dict that maps names to 0-d tensors."""

ROLLOUT_FIELDS = {
    "obs": "[N, T+1, ...] observations, may be a TensorDict; obs[:, -1] is the observation after the last step",
    "action": "[N, T+1, ...] actions of the policy",
    "sample_log_prob": "[N, T+1, ...] float, log-probability of the sampled action in nats; may have token axes; if "
    "there are several, the first token axis is for the steps of a chunk",
    "token_mask": "[N, T+1, ...] bool, optional, of the shape of sample_log_prob, True for tokens that count",
    "value": "[N, T+1] float, value of obs[t]; value[:, -1] is not padding",
    "reward": "[N, T+1] float, in the units of the environment",
    "terminated": "[N, T+1] bool, the environment reached a terminal state",
    "truncated": "[N, T+1] bool, a time limit ended the episode",
    "done": "[N, T+1] bool, terminated | truncated",
    "final_value": "[N, T+1] float, value of the last observation before auto-reset if truncated, else 0",
    "final_obs": "[N, T+1, ...] optional, observation that the step reached, before auto-reset",
    "mask": "[N, T+1, ...] bool, optional, True for steps that count",
    "executed": "[N, T+1] int64, optional, number of environment steps that the action took, if the action is a chunk",
}
BATCH_FIELDS = {
    "steps": "[N, T+1, ...] a rollout, with one entry per step",
    "carry": "[N, S, ...] policy memory before each of S segments of the steps; absent without memory",
    "final": "[N, F, ...] obs, carry and value of the states at time limits; absent without a critic or without time "
    "limits",
}
STATE_FIELDS = {
    "params": "policy parameters, nested under module names",
    "opt": "optimiser state",
    "norm": "running moments of observations and rewards; fixed during an iteration, or during a turn of an "
    "algorithm that learns in turns (`ecrl.algorithms.interleaved`); may be empty",
    "env": "states of the environments, with the last observation",
    "episode": "returns and lengths of the running episodes and of the last finished episodes",
    "frozen_params": "parameters of the policy that are not trained; absent for policies without them",
    "carry": "memory of the policy, one entry per environment; absent for feed-forward policies",
    "exploration": "state and parameters of exploration, one entry per environment; absent for policies without it",
    "data_sha256": "int64 [4], SHA-256 of the file that the algorithm learns from; absent without such a file",
    "hyper": "each hyperparameter that may change during a run, such as gamma, as a 0-d tensor",
    "key": "int64, the source of all randomness in the run",
    "sample_step": "int64, number of environment steps so far, over all ranks",
    "decision_step": "int64, number of actions so far, over all ranks; only if the environment reports `executed`",
    "update_step": "int64, number of updates so far, except updates that `trainer.finite_guard` skipped",
    "iterations": "int64, number of iterations of the run, used as the length of schedules; set from the config",
}
_BOOL_FIELDS = ("terminated", "truncated", "done", "mask")
_PER_STEP_FIELDS = ("value", "reward", "terminated", "truncated", "done", "final_value", "executed")


class LogData(TypedDict):
    """Record of a run: its `log_type`, the number of environment steps so far (`sample_step`), logs and the state.

    The training loop yields records of the types "collect" and "train". `ecrl.run.evaluation.with_evaluation` adds
    records of the type "evaluate".

    If several ranks train, `files` on rank 0 maps the names of the other ranks' checkpoint files to the contents of
    these files. On the other ranks, `files` is empty. Only records whose state may be saved have `files`. If a signal
    ends a run of several ranks, `stopping` is True in the last record. `taken` is the number of environment steps since
    the previous record of the same type.
    """

    log_type: Literal["collect", "train", "evaluate"]
    sample_step: int
    logs: Logs
    state: TensorDict
    files: NotRequired[dict[str, bytes]]
    stopping: NotRequired[bool]
    taken: NotRequired[int]


def check_tensors(**named: Tensor) -> None:
    """Raise TypeError unless all arguments are tensors. The message names the first argument that is not a tensor.

    >>> check_tensors(reward=torch.zeros(2), value=0.5)
    Traceback (most recent call last):
    TypeError: value is a float, expected a tensor; pass torch.as_tensor(value)
    """
    for name, x in named.items():
        if not isinstance(x, Tensor):
            kind = type(x).__name__
            article = "an" if kind[0] in "aeiou" else "a"
            raise TypeError(f"{name} is {article} {kind}, expected a tensor; pass torch.as_tensor({name})")


def same_shape(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape. The message names each tensor with a different shape.

    >>> same_shape(reward=torch.zeros(2, 3), value=torch.zeros(2, 4))
    Traceback (most recent call last):
    ValueError: value has shape [2, 4], expected [2, 3], the shape of reward
    """
    check_tensors(**tensors)
    first, *rest = tensors
    expected = tensors[first].shape
    wrong = [f"{name} has shape {list(tensors[name].shape)}" for name in rest if tensors[name].shape != expected]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}, expected {list(expected)}, the shape of {first}")


def check_axes(batch: Tensor, *, before: str = "", after: str = "", **tensors: Tensor) -> None:
    """Raise ValueError unless the shape of each tensor is `[*before, *batch.shape, *after]`.

    Each letter of `before` and `after` names one axis. Axes with the same letter must have the same size.

    >>> check_axes(torch.zeros(3), before="C", after="A", q=torch.zeros(2, 3, 5))
    >>> check_axes(torch.zeros(3), after="A", q=torch.zeros(3, 2), probs=torch.zeros(3))
    Traceback (most recent call last):
    ValueError: probs has shape [3], expected [3, 2]
    """
    check_tensors(**tensors)
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        first, last = ([sizes.get(axis, axis) for axis in axes] for axes in (before, after))
        expected = [*first, *batch.shape, *last]
        pairs = list(zip(expected, tensor.shape, strict=False))
        if len(expected) != tensor.ndim or any(size != actual for size, actual in pairs if not isinstance(size, str)):
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [{', '.join(map(str, expected))}]")
        sizes |= {size: actual for size, actual in pairs if isinstance(size, str)}


def check_bool(**tensors: Tensor) -> None:
    """Raise ValueError unless all tensors have dtype bool. The message names each argument of another dtype.

    >>> check_bool(done=torch.tensor([True]), mask=torch.ones(1))
    Traceback (most recent call last):
    ValueError: mask has dtype float32, expected bool
    """
    check_tensors(**tensors)
    wrong = [f"{name} has dtype {str(x.dtype)[6:]}" for name, x in tensors.items() if x.dtype != torch.bool]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}, expected bool")


def checked_mask(mask: Tensor | None, **tensors: Tensor) -> Tensor:
    """Check that the tensors and `mask` have the same shape. Return `mask`, or a mask of True if `mask` is None.

    Raises: ValueError naming the argument, if shapes differ or `mask` is not bool.

    >>> checked_mask(None, value=torch.zeros(2))
    tensor([True, True])
    >>> checked_mask(torch.ones(2), value=torch.zeros(2))
    Traceback (most recent call last):
    ValueError: mask has dtype float32, expected bool
    """
    if mask is None:
        same_shape(**tensors)
        return torch.ones_like(next(iter(tensors.values())), dtype=torch.bool)
    same_shape(**tensors, mask=mask)
    check_bool(mask=mask)
    return mask


def check_steps(**tensors: Tensor) -> None:
    """Raise ValueError unless each tensor has at least one time step on its last axis.

    >>> check_steps(reward=torch.zeros(2, 0))
    Traceback (most recent call last):
    ValueError: reward has shape [2, 0], expected at least one time step on the last axis
    """
    for name, tensor in tensors.items():
        if not tensor.ndim or not tensor.shape[-1]:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, expected at least one time step on the last axis")


def check_rollout(rollout: TensorDict, *keys: str) -> None:
    """Raise ValueError unless `rollout` has batch shape `[N, T + 1]`, with T at least 1, and the fields in `keys`.

    A field in `keys` with one value per step, such as `reward` or `done`, must have the batch shape. The fields
    `terminated`, `truncated`, `done` and `mask` must have dtype bool if they are in `keys`.

    >>> check_rollout(TensorDict({"reward": torch.zeros(2, 3)}, [2, 3]), "reward", "done")
    Traceback (most recent call last):
    ValueError: rollout lacks 'done' ([N, T+1] bool, terminated | truncated); it has reward
    """
    if len(rollout.batch_size) != 2 or rollout.batch_size[1] < 2:
        advice = "; pass the field 'steps' of the batch" if "steps" in rollout else ""
        raise ValueError(
            f"rollout has batch shape {list(rollout.batch_size)}, expected [num_envs, time + 1] with time >= 1{advice}"
        )
    for key in keys:
        if key not in rollout:
            have = ", ".join(sorted(map(str, rollout.keys())))
            raise ValueError(
                f"rollout lacks {key!r} ({ROLLOUT_FIELDS.get(key, 'declared by the policy')}); it has {have}"
            )
        field = rollout[key]
        if key in _PER_STEP_FIELDS and field.shape != rollout.batch_size:
            shapes = f"shape {list(field.shape)}, expected {list(rollout.batch_size)}"
            raise ValueError(f"rollout[{key!r}] has {shapes}: {ROLLOUT_FIELDS[key]}")
        if key in _BOOL_FIELDS and field.dtype != torch.bool:
            raise ValueError(f"rollout[{key!r}] has dtype {field.dtype}, expected torch.bool: {ROLLOUT_FIELDS[key]}")


def transitions(rollout: TensorDict) -> TensorDict:
    """Return the T transitions of a rollout, with the additional field `next_value` if the rollout has values.

        next_value[t] = final_value[t] if truncated[t] else value[t + 1]

    If the rollout has no `final_value`, `next_value` is 0 at truncated steps, so a time limit counts as a termination.
    At terminated steps, `next_value` has no meaning, and the estimators do not read it. All fields except `next_value`
    are views of the rollout's fields.

    Args:
        rollout: a rollout with batch shape `[N, T + 1]`.

    Returns: a TensorDict with batch shape `[N, T]` and every field of the rollout.
    Gradient: flows through `value` and `final_value`.
    Raises: ValueError if a field is missing or has a wrong shape or dtype. The error message names the field.
    Source: Pardo et al. 2018, arXiv:1712.00378.

    >>> rollout = TensorDict({"value": torch.tensor([[1.0, 2.0, 3.0]]),
    ...     "truncated": torch.tensor([[True, False, False]]), "final_value": torch.tensor([[9.0, 0.0, 0.0]])}, [1, 3])
    >>> transitions(rollout)["next_value"].tolist()
    [[9.0, 3.0]]
    """
    check_rollout(rollout)
    steps = cast(TensorDict, rollout[:, :-1])
    if "value" not in rollout:
        return steps
    has_final_value = "final_value" in rollout
    check_rollout(rollout, "value", "truncated", *(["final_value"] if has_final_value else []))
    final_value = steps["final_value"] if has_final_value else torch.zeros_like(steps["value"])
    next_value = torch.where(steps["truncated"], final_value, rollout["value"][:, 1:])
    return steps.copy().set("next_value", next_value)
