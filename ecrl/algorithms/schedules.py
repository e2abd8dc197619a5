"""Learning-rate schedules, which the config block `lr_scheduler` selects by name.

The compiled graph depends only on the name of a schedule. The schedule's parameters are stored in
`state["hyper"]["schedule"]`, or in `state["hyper"]["adaptive"]` for an adaptive schedule. If a schedule has the setting
`total_iters` or `T_max`, but the config does not set it, the schedule lasts for the whole run of `state["iterations"]`
iterations.
"""

from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.optimizer_config import DESIRED_DISTANCE, USED, SchedulerConfig
from ecrl.kernels import optim


def schedule_numbers(cfg: SchedulerConfig | None, device: torch.device) -> TensorDict:
    """Return the schedule parameters that are not None. The result is empty for a constant or an adaptive rate.

    The parameters are 0-d tensors of dtype float64, or int64 for counts of iterations.

    >>> cfg = SchedulerConfig.model_validate({"name": "step", "kwargs": {"gamma": 0.5, "step_size": 2}})
    >>> schedule_numbers(cfg, torch.device("cpu"))["gamma"]
    tensor(0.5000, dtype=torch.float64)
    """
    if cfg is None or cfg.name == "adaptive":
        return TensorDict({}, [])
    numbers: dict[str, Any] = {name: getattr(cfg.kwargs, name) for name in USED[cfg.name]}
    dtypes = {name: torch.float64 if isinstance(x, float) else torch.int64 for name, x in numbers.items()}
    tensors = {name: torch.tensor(x, dtype=dtypes[name], device=device) for name, x in numbers.items() if x is not None}
    return TensorDict(tensors, [])


def scheduled_rate(
    schedule: str, base: Tensor, numbers: TensorDict, step: Tensor, iterations: Tensor, turns: int = 1
) -> Tensor:
    """Return the 0-d learning rate in turn `step`, in the dtype of `base`.

    Args:
        schedule: linear, cosine, step, exponential, warmup_constant, warmup_linear or warmup_cosine.
        base: learning rate before the schedule.
        numbers: schedule parameters from `schedule_numbers`, with lengths in iterations.
        step: number of completed turns, int64.
        iterations: length of the schedule in turns if `numbers` has no length, int64.
        turns: number of turns per iteration. If an algorithm has no turns, an iteration is one turn.
    """
    match schedule:
        case "linear":
            start, end = numbers["start_factor"], numbers["end_factor"]
            horizon = numbers["total_iters"] * turns if "total_iters" in numbers else iterations
            rate = base * optim.linear_schedule(step, start=start, end=end, horizon=horizon)
        case "cosine":
            lowest, horizon = numbers["eta_min"], numbers["T_max"] * turns if "T_max" in numbers else iterations
            factor = optim.cosine_schedule(step, end=0.0, horizon=horizon)
            rate = (base - lowest.to(base.dtype)) * factor + lowest
        case "step":
            rate = base * optim.step_schedule(step, every=numbers["step_size"] * turns, gamma=numbers["gamma"])
        case "exponential":
            rate = base * optim.exponential_schedule(step.to(torch.float64) / turns, gamma=numbers["gamma"])
        case "warmup_constant":
            start, warmup = numbers["warmup_factor"], numbers["warmup_iters"] * turns
            rate = base * optim.linear_schedule(step, start=start, end=1.0, horizon=warmup)
        case "warmup_linear":
            start, warmup = numbers["warmup_factor"], numbers["warmup_iters"] * turns
            horizon = numbers["total_iters"] * turns if "total_iters" in numbers else iterations
            end = numbers["end_factor"]
            rate = base * optim.warmup_linear_schedule(step, start=start, end=end, warmup=warmup, horizon=horizon)
        case "warmup_cosine":
            start, warmup = numbers["warmup_factor"], numbers["warmup_iters"] * turns
            lowest, horizon = numbers["eta_min"], numbers["T_max"] * turns if "T_max" in numbers else iterations
            factor = optim.warmup_cosine_schedule(step, start=start, end=0.0, warmup=warmup, horizon=horizon)
            rate = torch.where(step < warmup, base * factor, (base - lowest.to(base.dtype)) * factor + lowest)
        case _:
            raise ValueError(f"lr_scheduler {schedule!r} does not set a rate per iteration; use another schedule")
    return rate.to(base.dtype)


def adapted_rate(rate: Tensor, distance: Tensor, numbers: TensorDict) -> Tensor:
    """Return the learning rate of a gradient step, given the distance that the policy moved before this step.

        rate / factor if distance > 2 * desired, rate * factor if distance < desired / 2, otherwise rate

    The result is clipped to [min_rate, max_rate].

    Args:
        rate: learning rate of the previous gradient step, 0-d.
        distance: distance between the policy that collected the rollout and the policy before the gradient step, as
            measured by the algorithm, 0-d.
        numbers: the parameters of the schedule: the desired distance (key `DESIRED_DISTANCE`, in the unit of
            `distance`), `factor`, `min_rate` and `max_rate`.

    Source: Heess et al. 2017, arXiv:1707.02286, where the penalty coefficient is adapted instead of the learning rate.
    """
    desired, factor = numbers[DESIRED_DISTANCE], numbers["factor"]
    too_far, too_near = distance > 2.0 * desired, distance < desired / 2.0
    adapted = torch.where(too_far, rate / factor, torch.where(too_near, rate * factor, rate))
    return torch.minimum(torch.maximum(adapted, cast(Tensor, numbers["min_rate"])), numbers["max_rate"])
