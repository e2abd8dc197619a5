"""Compute logs of the steps that an iteration collected, and average logs over all ranks."""

from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.distributed import all_sum, world_size
from ecrl.kernels import masked_mean
from ecrl.types import Logs

WINDOW = 100
"""The number of recent episodes over which returns and lengths are averaged."""


def _episode_logs(episode: TensorDict) -> Logs:
    """Return the mean return and length of the last `WINDOW` finished episodes, or NaN if no episode has finished."""
    return {
        f"episode_{name}_avg_{WINDOW}": _mean_or_nan(episode[field], episode["finished"])
        for name, field in (("reward", "finished_return"), ("length", "finished_length"))
    }


def counted_steps(steps: TensorDict) -> Tensor:
    """Return the mask of the steps as bool `[N, T]`, without the padding at index T.

    If the steps have no mask, every entry of the result is True.
    """
    return steps["mask"][:, :-1] if "mask" in steps else torch.ones_like(steps["done"][:, :-1])


def _mean_or_nan(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `x` over the entries where `mask` is True, or NaN if `mask` is False everywhere."""
    return torch.where(mask.any(), masked_mean(x, mask), torch.full((), torch.nan, device=x.device))


def _info_logs(steps: TensorDict) -> Logs:
    """Average the values that the environment reported in `info`.

    The logs `rewards/<term>` and `metrics/<name>` are means over the unmasked steps. The mean of a metric also leaves
    out steps where the metric is NaN. The logs `success_rate` and `fail_rate` are means over the episodes that ended,
    and `game_score` is the mean over the games that ended. A mean over zero steps, episodes or games is NaN.
    """
    if "info" not in steps:
        return {}
    info, counted, logs = cast(TensorDict, steps["info"]), counted_steps(steps), {}
    ended = counted & steps["done"][:, :-1]
    for name in ("success", "fail"):
        if name in info:
            logs[f"{name}_rate"] = _mean_or_nan(info[name][:, :-1].to(torch.float32), ended)
    if "game_score" in info:
        score = info["game_score"][:, :-1]
        logs["game_score"] = _mean_or_nan(score, counted & ~score.isnan())
    for group in ("rewards", "metrics"):
        for name, value in info.get(group, {}).items():
            if value.ndim == 2:  # only scalars are logged
                numbers = value[:, :-1].to(torch.float32)
                included = counted & ~numbers.isnan() if group == "metrics" else counted
                logs[f"{group}/{name}"] = _mean_or_nan(numbers, included)
    return logs


def collect_logs(episode: TensorDict, steps: TensorDict) -> Logs:
    """Return the mean return and length of the last finished episodes, and the means of the values in `info`."""
    return _episode_logs(episode) | _info_logs(steps)


def over_ranks(logs: Logs) -> Logs:
    """Average each log, with equal weights, over the ranks where the log is not NaN.

    If a log is NaN on all ranks, its average is NaN.
    """
    if world_size() == 1 or not logs:
        return logs
    values = torch.stack([log.to(torch.float64) for log in logs.values()])
    reported = ~values.isnan()
    sums, counts = all_sum(torch.stack([values.where(reported, 0.0), reported.to(values.dtype)])).unbind()
    return {name: mean.to(log.dtype) for (name, log), mean in zip(logs.items(), sums / counts, strict=True)}
