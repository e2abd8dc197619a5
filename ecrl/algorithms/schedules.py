"""Learning-rate schedules by name, from the config block `lr_scheduler`.

The name and the counts of a schedule shape the graph. Its other numbers live in the state, in `hyper["schedule"]`.
"""

from typing import NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.optimizer_config import DESIRED_DISTANCE, USED, SchedulerConfig
from ecrl.kernels import optim


class Schedule(NamedTuple):
    """Settings of a schedule that shape the compiled graph.

    Attributes:
        name: linear, cosine, step, exponential or adaptive.
        horizon: length in iterations; None for the whole run.
        step_size: iterations between two reductions of the step schedule.
    """

    name: str
    horizon: int | None
    step_size: int


def schedule_choice(cfg: SchedulerConfig | None) -> Schedule | None:
    """Return the `Schedule` of a config block; None for a constant rate."""
    if cfg is None:
        return None
    kwargs = cfg.kwargs
    return Schedule(cfg.name, kwargs.total_iters if cfg.name == "linear" else kwargs.T_max, kwargs.step_size)


def schedule_numbers(cfg: SchedulerConfig | None, device: torch.device) -> TensorDict:
    """Return the floats of a config block as 0-d float64 tensors; empty for a constant or an adaptive rate.

    >>> cfg = SchedulerConfig.model_validate({"name": "step", "kwargs": {"gamma": 0.5, "step_size": 2}})
    >>> schedule_numbers(cfg, torch.device("cpu"))["gamma"]
    tensor(0.5000, dtype=torch.float64)
    """
    if cfg is None or cfg.name == "adaptive":
        return TensorDict({}, [])
    numbers = {name: getattr(cfg.kwargs, name) for name in USED[cfg.name]}
    floats = {name: number for name, number in numbers.items() if isinstance(number, float)}
    return TensorDict(
        {name: torch.tensor(number, dtype=torch.float64, device=device) for name, number in floats.items()}, []
    )


def scheduled_rate(schedule: Schedule, base: Tensor, numbers: TensorDict, step: Tensor, iterations: int) -> Tensor:
    """Return the learning rate in iteration `step` of `iterations`, 0-d, in the dtype of `base`.

    Args:
        schedule: one of linear, cosine, step and exponential.
        base: rate before the schedule.
        numbers: from `schedule_numbers`.
        step: iterations done, int64.
        iterations: length of a schedule without its own horizon.
    """
    horizon = schedule.horizon or iterations
    match schedule.name:
        case "linear":
            start, end = numbers["start_factor"], numbers["end_factor"]
            rate = base * optim.linear_schedule(step, start=start, end=end, horizon=horizon)
        case "cosine":
            lowest = numbers["eta_min"]
            factor = optim.cosine_schedule(step, end=0.0, horizon=horizon)
            rate = (base - lowest.to(base.dtype)) * factor + lowest
        case "step":
            rate = base * optim.step_schedule(step, every=schedule.step_size, gamma=numbers["gamma"])
        case "exponential":
            rate = base * optim.exponential_schedule(step, gamma=numbers["gamma"])
        case _:
            raise ValueError(f"lr_scheduler {schedule.name!r} has no rate by iteration")
    return rate.to(base.dtype)


def adapted_rate(rate: Tensor, distance: Tensor, numbers: TensorDict) -> Tensor:
    """Return the learning rate after a gradient step that moved the policy by `distance`.

        rate / factor if distance > 2 desired, rate * factor if distance < desired / 2; within [min_rate, max_rate]

    Args:
        rate: the rate so far, 0-d.
        distance: how far the policy moved, measured by the algorithm, 0-d.
        numbers: the desired distance in the same unit (`DESIRED_DISTANCE`), `factor`, `min_rate` and `max_rate`.

    Source: Heess et al. 2017, arXiv:1707.02286, sec. 3, with the rate in place of the penalty.
    """
    desired, factor = numbers[DESIRED_DISTANCE], numbers["factor"]
    too_far, too_near = distance > 2.0 * desired, distance < desired / 2.0
    adapted = torch.where(too_far, rate / factor, torch.where(too_near, rate * factor, rate))
    return torch.minimum(torch.maximum(adapted, cast(Tensor, numbers["min_rate"])), numbers["max_rate"])
