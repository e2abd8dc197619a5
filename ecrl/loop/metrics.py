"""What an iteration tells of what it collected, and of all ranks together."""

from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.distributed import all_sum, world_size
from ecrl.kernels import masked_mean
from ecrl.types import Logs

WINDOW = 100
"""Episodes in the running averages of return and length."""


def _episode_logs(episode: TensorDict) -> Logs:
    """Means over the last finished episodes, NaN before the first."""
    return {
        f"episode_{name}_avg_{WINDOW}": _mean_or_nan(episode[field], episode["finished"])
        for name, field in (("reward", "finished_return"), ("length", "finished_length"))
    }


def counted_steps(batch: TensorDict) -> Tensor:
    """Which steps of a batch count, bool `[N, T]`."""
    return batch["mask"][:, :-1] if "mask" in batch else torch.ones_like(batch["done"][:, :-1])


def _mean_or_nan(x: Tensor, mask: Tensor) -> Tensor:
    """The mean over `mask`; NaN over none."""
    return torch.where(mask.any(), masked_mean(x, mask), torch.full((), torch.nan, device=x.device))


def _info_logs(batch: TensorDict) -> Logs:
    """What the environment reports.

    `rewards/<term>` and `metrics/<name>`, mean over the steps that count, of a metric over those where it is not NaN;
    `success_rate` and `fail_rate`, of the episodes that ended. NaN where there is none.
    """
    if "info" not in batch:
        return {}
    info, counted, logs = cast(TensorDict, batch["info"]), counted_steps(batch), {}
    ended = counted & batch["done"][:, :-1]
    for name in ("success", "fail"):
        if name in info:
            logs[f"{name}_rate"] = _mean_or_nan(info[name][:, :-1].to(torch.float32), ended)
    for group in ("rewards", "metrics"):
        for name, value in info.get(group, {}).items():
            if value.ndim == 2:  # vectors are for the environment's own use
                numbers = value[:, :-1].to(torch.float32)
                told = counted & ~numbers.isnan() if group == "metrics" else counted
                logs[f"{group}/{name}"] = _mean_or_nan(numbers, told)
    return logs


def collect_logs(episode: TensorDict, batch: TensorDict) -> Logs:
    """Of the last finished episodes, and of what the environment reports in this batch."""
    return _episode_logs(episode) | _info_logs(batch)


def over_ranks(logs: Logs) -> Logs:
    """The mean over the ranks that tell it, each of equal weight; NaN where none does."""
    if world_size() == 1:
        return logs
    values = torch.stack([log.to(torch.float64) for log in logs.values()])
    told = ~values.isnan()
    sums, counts = all_sum(torch.stack([values.where(told, 0.0), told.to(values.dtype)])).unbind()
    return {name: mean.to(log.dtype) for (name, log), mean in zip(logs.items(), sums / counts, strict=True)}
