"""What ranks share. One process for now: rank 0 of 1, and every mean over ranks is the identity."""

import os
from typing import TypeVar

from tensordict import TensorDict
from torch import Tensor

from ecrl.errors import ConfigError

T = TypeVar("T", Tensor, TensorDict)


def rank() -> int:
    """Index of this process."""
    return 0


def world_size() -> int:
    """Number of processes that train together."""
    return 1


def all_mean(x: T, *, weight: Tensor) -> T:
    """Mean of `x` (every leaf of a TensorDict) over ranks, weighted by each one's count; on one process `x` itself.

    sum_ranks(weight * x) / sum_ranks(weight)
    """
    return x


def start(distributed: bool) -> None:
    """Join the other processes if the run is distributed; refuses more than one, which is not built yet."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if distributed and launched != "1":
        raise ConfigError(
            f"trainer.distributed: {launched} processes were started, only 1 is supported; use one process"
        )
