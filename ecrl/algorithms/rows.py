"""Rows of minibatches, and a policy's functions on them.

A row is one step of a rollout. If the policy's `unit` is "sequence", a row has all steps of one environment in the
iteration. It also has the policy's memory before the first step, so that the policy can run its recurrence.
"""

from typing import Any, cast

from tensordict import TensorDict
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.kernels.rollout import sequences
from ecrl.policies import Policy

_OUTCOMES = ("reward", "terminated", "truncated", "info", "final_value")


def rows_of(policy: Policy, rollout: TensorDict, **fields: Tensor) -> TensorDict:
    """Return the steps of a rollout as rows, with everything that the policy's `evaluate` and `value` need.

    Args:
        policy: the policy; `unit` is read.
        rollout: `[N, T + 1]`.
        fields: further fields of the rows, `[N, T]`, such as advantages.

    Returns: `[N * T]` rows with obs, action, done and the other fields of the policy's `act`. For sequences, `[N]` rows
        with fields `[N, T, ...]`, and `carry` `[N, ...]` if the policy has memory.

    >>> import torch
    >>> rollout = TensorDict({"obs": torch.zeros(2, 4, 3), "done": torch.zeros(2, 4).bool()}, [2, 4])
    >>> policy = Policy(*[print] * 5)
    >>> rows_of(policy, rollout, advantage=torch.zeros(2, 3)).shape
    torch.Size([6])
    """
    steps = cast(TensorDict, rollout[:, :-1]).exclude(*_OUTCOMES)  # the last row is padding
    if both := {*steps.keys()} & fields.keys() - {"mask"}:
        raise ValueError(f"act returned the fields {sorted(both)}, which the algorithm adds itself; rename them")
    if policy.unit == "step":
        return steps.update(fields).reshape(-1)
    carry = {"carry": cast(TensorDict, steps["carry"])[:, 0]} if "carry" in steps else {}
    return TensorDict({**dict(sequences(steps).items()), **fields, **carry}, steps.batch_size[:1])


def _parts(policy: Policy, rows: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Return the policy's memory before the first step of each row, and the steps of the rows."""
    if policy.unit == "step":
        return TensorDict({}, []), rows
    carry = cast(TensorDict, rows.get("carry", TensorDict({}, [])))
    return carry, TensorDict(dict(rows.exclude("carry").items()), rows["done"].shape)


def joint(x: Tensor, rows: TensorDict) -> Tensor:
    """Sum the log-probabilities or entropies of an action's tokens.

        log_prob(action) = sum(log_prob(token) for the tokens of the action that count)

    Args:
        x: the shape of `rows["done"]`, or with further axes of tokens.
        rows: with `done`, and `token_mask`, bool in the shape of `x`, if some tokens do not count.

    Returns: the shape of `rows["done"]`.
    Gradient: flows through the tokens that count.

    >>> import torch
    >>> rows = TensorDict({"done": torch.tensor([False]), "token_mask": torch.tensor([[True, True, False]])}, [1])
    >>> joint(torch.tensor([[-1.0, -2.0, -4.0]]), rows)
    tensor([-3.])
    """
    ndim = rows["done"].ndim
    if x.ndim == ndim:
        return x
    if "token_mask" in rows:
        x = x.masked_fill(~rows["token_mask"], 0.0)
    return x.flatten(ndim).sum(-1)


def check_log_prob(policy: Policy, algorithm: str) -> None:
    """Refuse a policy without log-probabilities, for an algorithm that needs them.

    Raises: ConfigError.
    """
    if policy.evaluate is None:
        raise ConfigError(
            f"policy.name: this policy has no log-probabilities, which {algorithm} needs; use actor_critic"
        )


def evaluate(policy: Policy, params: TensorDict, rows: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the action and the entropy, in nats, of every step in the rows."""
    log_prob, entropy = cast(Any, policy.evaluate)(params, *_parts(policy, rows))
    return joint(log_prob, rows), joint(entropy, rows)


def value(policy: Policy, params: TensorDict, rows: TensorDict) -> Tensor:
    """Return the critic's value of every step in the rows."""
    carry, steps = _parts(policy, rows)
    critic: Any = policy.value
    return critic(params, carry, steps["obs"]) if policy.unit == "step" else critic(params, carry, steps, None)[0]


def counted(mask: Tensor, real: Tensor) -> Tensor:
    """Return True for each step that counts: in the `mask` of the chosen rows, and not in a repeated row.

    >>> import torch
    >>> counted(torch.ones(2, 3).bool(), torch.tensor([True, False])).tolist()
    [[True, True, True], [False, False, False]]
    """
    return mask & real.reshape(*real.shape, *[1] * (mask.ndim - real.ndim))
