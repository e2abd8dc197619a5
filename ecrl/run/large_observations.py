"""Warn if large observations cause updates that change the policy too much."""

import warnings
from collections.abc import Iterator
from typing import Any, cast

from tensordict import TensorDict
from torch import Tensor

from ecrl.config import Config
from ecrl.types import LogData

_KL, _LARGE = 0.1, 20.0  # a normal update has an approx_kl below 0.05, and the inputs of a network should be about 1


def largest(observation: Tensor | TensorDict) -> float:
    """Return the largest magnitude in the float entries of an observation, or 0 if there are none.

    >>> import torch
    >>> largest(TensorDict({"force": torch.tensor([[-500.0]]), "image": torch.zeros(1, 8, 8, 3, dtype=torch.uint8)}, 1))
    500.0
    """
    if isinstance(observation, Tensor):
        return float(observation.abs().max()) if observation.is_floating_point() and observation.numel() else 0.0
    return max((largest(cast(Any, entry)) for entry in observation.values()), default=0.0)


def with_warning_of_large_observations(records: Iterator[LogData], cfg: Config) -> Iterator[LogData]:
    """Yield the records. Warn once if an update is too large and the policy reads large observations unscaled.

    An update is too large if its `approx_kl` is above 0.1. An observation is large if the magnitude of a float entry is
    above 20. Joint torques in N m, for example, may be large. `policy.normalize_obs` standardises observations.
    """
    warned = bool(cfg.policy.normalize_obs)
    for record in records:
        kl = record["logs"].get("approx_kl") if record["log_type"] == "train" and not warned else None
        if kl is not None and float(kl) > _KL:
            magnitude = largest(cast(TensorDict, record["state"])["env", "obs"])
            if magnitude > _LARGE:
                warned = True
                fault = f"observations reach {magnitude:.4g}, and an update had an approx_kl of {float(kl):.3g}"
                warnings.warn(
                    f'policy.normalize_obs: is false, but {fault}; add "normalize_obs": true to policy', stacklevel=2
                )
        yield record
