"""Apply the estimators of `returns.py` to rollouts of shape `[N, T + 1]`.

Each function reads the fields of the rollout that its estimator needs. The padding in the last time slot is ignored.
Without the field `final_value`, a time limit counts as a termination. If the rollout has `executed`, the discount of a
step is `gamma ** executed`.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.returns import (
    GAE,
    VTrace,
    discounted_returns,
    gae,
    n_step_returns,
    td_lambda_returns,
    upgo_returns,
    vtrace,
)
from ecrl.types import Scalar, check_rollout, transitions


def decision_discounts(steps: TensorDict, gamma: Scalar) -> Scalar:
    """Return the discount of each step, in shape `[*B]`, or return `gamma` if the steps have no field `executed`.

        discount[t] = gamma ** executed[t]

    Raises: ValueError if `executed` does not hold integers of shape `[*B]`.

    >>> decision_discounts(TensorDict({"executed": torch.tensor([1, 3])}, [2]), 0.5)
    tensor([0.5000, 0.1250], dtype=torch.float64)
    """
    if "executed" not in steps:
        return gamma
    executed = steps["executed"]
    if executed.shape != steps.batch_size or executed.is_floating_point():
        have = f"{executed.dtype} {list(executed.shape)}".removeprefix("torch.")
        raise ValueError(f"executed is {have}, expected int64 {list(steps.batch_size)}")
    return torch.pow(gamma.double() if isinstance(gamma, Tensor) else gamma, executed.double())


def compute_returns(rollout: TensorDict, gamma: Scalar) -> Tensor:
    """Apply `discounted_returns` to a rollout of shape `[N, T + 1]`. The result has shape `[N, T]`.

    The function reads the fields reward, terminated, truncated and done and, if present, value, final_value and
    executed. Without `value`, the returns do not bootstrap.

    Raises: ValueError naming a field that is missing or has a wrong shape.

    >>> rollout = TensorDict({"reward": torch.ones(1, 3)} | {k: torch.zeros(1, 3, dtype=torch.bool)
    ...     for k in ("terminated", "truncated", "done")}, [1, 3])
    >>> compute_returns(rollout, 0.5).tolist()
    [[1.5, 1.0]]
    """
    check_rollout(rollout, "reward", "terminated", "truncated", "done")
    steps = transitions(rollout)
    next_value = steps.get("next_value", None)
    next_value = torch.zeros_like(steps["reward"]) if next_value is None else next_value
    discount = decision_discounts(steps, gamma)
    return discounted_returns(steps["reward"], next_value, steps["terminated"], steps["done"], gamma=discount)


def compute_n_step_returns(rollout: TensorDict, gamma: Scalar, n: int) -> Tensor:
    """Apply `n_step_returns` to a rollout of shape `[N, T + 1]`. The result has shape `[N, T]`.

    The function reads the fields reward, value, terminated, truncated and done and, if present, final_value and
    executed.

    Raises: ValueError naming a field that is missing or has a wrong shape, or if `n < 1`.

    >>> rollout = TensorDict({"reward": torch.ones(1, 3), "value": torch.full((1, 3), 4.0)} |
    ...     {k: torch.zeros(1, 3, dtype=torch.bool) for k in ("terminated", "truncated", "done")}, [1, 3])
    >>> compute_n_step_returns(rollout, 0.5, 2).tolist()
    [[2.5, 3.0]]
    """
    check_rollout(rollout, "reward", "value", "terminated", "truncated", "done")
    s = transitions(rollout)
    discount = decision_discounts(s, gamma)
    return n_step_returns(s["reward"], s["next_value"], s["terminated"], s["done"], gamma=discount, n=n)


def compute_td_lambda_returns(rollout: TensorDict, gamma: Scalar, gae_lambda: Scalar) -> Tensor:
    """Apply `td_lambda_returns` to a rollout of shape `[N, T + 1]`. The result has shape `[N, T]`.

    The function reads the fields reward, value, terminated, truncated and done and, if present, final_value and
    executed.

    Raises: ValueError naming a field that is missing or has a wrong shape.

    >>> rollout = TensorDict({"reward": torch.ones(1, 3), "value": torch.full((1, 3), 4.0)} |
    ...     {k: torch.zeros(1, 3, dtype=torch.bool) for k in ("terminated", "truncated", "done")}, [1, 3])
    >>> compute_td_lambda_returns(rollout, 0.5, 0.0).tolist()
    [[3.0, 3.0]]
    """
    check_rollout(rollout, "reward", "value", "terminated", "truncated", "done")
    s = transitions(rollout)
    discount = decision_discounts(s, gamma)
    return td_lambda_returns(
        s["reward"], s["next_value"], s["terminated"], s["done"], gamma=discount, gae_lambda=gae_lambda
    )


def compute_gae(rollout: TensorDict, gamma: Scalar, gae_lambda: Scalar) -> GAE:
    """Apply `gae` to a rollout of shape `[N, T + 1]`. Return the advantages and value targets, each `[N, T]`.

    The function reads the fields reward, value, terminated, truncated and done and, if present, final_value and
    executed.

    Raises: ValueError naming a field that is missing or has a wrong shape.

    >>> rollout = TensorDict({"reward": torch.ones(1, 3), "value": torch.full((1, 3), 4.0)} |
    ...     {k: torch.zeros(1, 3, dtype=torch.bool) for k in ("terminated", "truncated", "done")}, [1, 3])
    >>> advantages, returns = compute_gae(rollout, 0.5, 1.0)
    >>> advantages.tolist(), returns.tolist()
    ([[-1.5, -1.0]], [[2.5, 3.0]])
    """
    check_rollout(rollout, "reward", "value", "terminated", "truncated", "done")
    s = transitions(rollout)
    fields = (s["reward"], s["value"], s["next_value"], s["terminated"], s["done"])
    return gae(*fields, gamma=decision_discounts(s, gamma), gae_lambda=gae_lambda)


def compute_vtrace(
    rollout: TensorDict,
    log_prob: Tensor,
    *,
    gamma: Scalar,
    gae_lambda: Scalar,
    clip_rho: Scalar,
    clip_c: Scalar,
    clip_pg_rho: Scalar,
) -> VTrace:
    """Apply `vtrace` to a rollout of shape `[N, T + 1]`. Return the advantages and value targets, each `[N, T]`.

    `log_prob`, of shape `[N, T]`, holds the log-probabilities of the actions under the policy being trained. The
    function reads the rollout's fields sample_log_prob, reward, value, terminated, truncated and done and, if present,
    final_value and executed.

    Raises: ValueError naming a field that is missing or has a wrong shape.

    >>> zero, no = torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool)
    >>> rollout = TensorDict({"reward": torch.ones(1, 3), "value": zero, "sample_log_prob": zero,
    ...     "terminated": no, "truncated": no, "done": no}, [1, 3])
    >>> clips = {"clip_rho": 1.0, "clip_c": 1.0, "clip_pg_rho": 1.0}
    >>> compute_vtrace(rollout, torch.zeros(1, 2), gamma=0.5, gae_lambda=1.0, **clips).value_target.tolist()
    [[1.5, 1.0]]
    """
    check_rollout(rollout, "sample_log_prob", "reward", "value", "terminated", "truncated", "done")
    s = transitions(rollout)
    fields = (s["sample_log_prob"], s["reward"], s["value"], s["next_value"], s["terminated"], s["done"])
    discount = decision_discounts(s, gamma)
    clips = {"clip_rho": clip_rho, "clip_c": clip_c, "clip_pg_rho": clip_pg_rho}
    return vtrace(log_prob, *fields, gamma=discount, gae_lambda=gae_lambda, **clips)


def compute_upgo_returns(rollout: TensorDict, gamma: Scalar) -> Tensor:
    """Apply `upgo_returns` to a rollout of shape `[N, T + 1]`. The result has shape `[N, T]`.

    The function reads the fields reward, value, terminated, truncated and done and, if present, final_value and
    executed.

    Raises: ValueError naming a field that is missing or has a wrong shape.

    >>> rollout = TensorDict({"reward": torch.ones(1, 3), "value": torch.full((1, 3), 2.0)} |
    ...     {k: torch.zeros(1, 3, dtype=torch.bool) for k in ("terminated", "truncated", "done")}, [1, 3])
    >>> compute_upgo_returns(rollout, 0.5).tolist()
    [[2.0, 2.0]]
    """
    check_rollout(rollout, "reward", "value", "terminated", "truncated", "done")
    s = transitions(rollout)
    fields = (s["reward"], s["value"], s["next_value"], s["terminated"], s["done"])
    return upgo_returns(*fields, gamma=decision_discounts(s, gamma))
