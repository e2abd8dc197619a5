"""Convert batches to rows. Minibatches are drawn from these rows.

For a policy of unit "step", a row is one step of a batch. For a policy of unit "sequence", a row has all steps of one
environment in the iteration. If `segment_length` is set, a row has a segment of these steps. If the policy has memory,
a row also has the memory before the first step of the row. The policy starts its recurrence from this memory. If the
loss needs whole episodes (`MinibatchConfig.needs_episodes`), a row has all steps of one environment for both units. The
methods `evaluate_rows`, `value_rows` and `evaluate_and_value_rows` of a policy take rows of every kind.
"""

from typing import cast

from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import Run
from ecrl.errors import ConfigError
from ecrl.kernels.rollout import sequences
from ecrl.policies import Policy, sum_tokens
from ecrl.policies.contract import described

_OUTCOMES = ("reward", "terminated", "truncated", "info", "final_value")
_DERIVED = {"next_value"}
"""Fields that `ecrl.types.transitions` adds to steps."""


def rows_of(run: Run, batch: TensorDict, **fields: Tensor) -> TensorDict:
    """Convert the steps of a batch to rows with all fields that the policy's `evaluate` and `value` need.

    Args:
        run: the run, whose policy's `unit` and whose `static.row_steps` determine the rows.
        batch: batch `[N]` with `steps` of shape `[N, T + 1]` and, if the policy has memory, `carry` of shape
            `[N, T / L]`, where L is `run.static.row_steps`.
        fields: further fields of the rows, `[N, T]`, such as advantages.

    Returns: `[N * T]` rows with obs, action, done, the other fields of the policy's `act`, and `fields`. The rows
        also have `value`, the critic's value at collection, and the environment's `mask`, if the batch has them. If the
        environment reports `executed`, the rows have this field, because the tokens of steps that were not executed do
        not count. If a row is a sequence of L = `run.static.row_steps` steps, the result has `[N * T / L]` rows, whose
        fields have the shape `[N * T / L, L, ...]`. If the policy has memory, the result also has `carry`, of shape
        `[N * T / L, ...]`. The rows of an environment are consecutive. `sample_log_prob` is summed over the tokens of
        an action.
    Raises: ConfigError if the shape of one of `fields` is not `[N, T, ...]`. Also raised if `act` returned a field with
        the name of one of `fields`, or a field `next_value`, which `ecrl.types.transitions` adds.
    """
    rows = token_rows_of(run, batch, **fields)
    if "sample_log_prob" in rows:
        rows = rows.set("sample_log_prob", sum_tokens(rows["sample_log_prob"], rows))
    return rows


def token_rows_of(run: Run, batch: TensorDict, **fields: Tensor) -> TensorDict:
    """Return the same rows as `rows_of`, but with the token axes of `sample_log_prob`, if any."""
    steps = cast(TensorDict, batch["steps"][:, :-1]).exclude(*_OUTCOMES)  # the last step is padding
    for name in sorted({*steps.keys()} & ({*fields, *_DERIVED} - {"mask"})):
        raise ConfigError(
            f"policy.name: act of {run.policy.name} returns the field {name!r}, which {run.algorithm.name} computes "
            "itself; give it another name"
        )
    for name, x in fields.items():
        if x.shape[:2] != steps.shape:
            problem = f"algorithm {run.algorithm.name}: the field {name} is {described(x)}"
            raise ConfigError(f"{problem}, expected {list(steps.shape)} or more axes; pass one entry per step")
    length = run.static.row_steps
    if run.policy.unit == "step" and length == 1:
        return steps.update(fields).reshape(-1)
    cut = sequences(steps).update(fields).reshape(-1, length)
    carry = {"carry": cast(TensorDict, batch["carry"]).flatten(0, 1)} if "carry" in batch else {}
    return TensorDict({**dict(cut.items()), **carry}, cut.batch_size[:1])


def check_log_prob(policy: Policy, algorithm: str) -> None:
    """Raise ConfigError for a policy without log-probabilities.

    `algorithm` is the name of the algorithm that needs log-probabilities.
    """
    if policy.evaluate is None:
        raise ConfigError(
            f"policy.name: this policy has no log-probabilities, which {algorithm} needs; use actor_critic"
        )


def counted(mask: Tensor, real: Tensor) -> Tensor:
    """Return a mask that is True for each step whose `mask` is True and whose row has `real` True.

    `real` is False for the rows that only fill up a minibatch (see `ecrl.algorithms.minibatch_sgd.shuffled`).

    >>> import torch
    >>> counted(torch.ones(2, 3).bool(), torch.tensor([True, False])).tolist()
    [[True, True, True], [False, False, False]]
    """
    return mask & real.reshape(*real.shape, *[1] * (mask.ndim - real.ndim))
