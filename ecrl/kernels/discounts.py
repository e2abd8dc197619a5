"""Weights of rewards in a sum that runs forward in time over several episodes."""

import torch
from torch import Tensor

from ecrl.kernels.dtypes import scalars
from ecrl.types import Scalar


def episode_discounts(done: Tensor, *, gamma: Scalar) -> Tensor:
    """The discount of every step, counted from the first one here and anew from the start of each episode.

        disc[0] = 1;    disc[t + 1] = 1 if done[t] else gamma * disc[t]

    Args:
        done: `[*B, T]` bool.
        gamma: discount per step.

    Returns: `[*B, T]` float, in the dtype of `gamma` (torch's default for a Python number).
    Gradient: flows through `gamma`.
    Raises: ValueError if `gamma` is not a number or a 0-d tensor.

    >>> episode_discounts(torch.tensor([False, False, True, False, False]), gamma=0.5).tolist()
    [1.0, 0.5, 0.25, 1.0, 0.5]
    """
    dtype = gamma.dtype if isinstance(gamma, Tensor) else torch.get_default_dtype()
    (gamma,) = scalars(gamma=gamma)
    steps = torch.arange(done.shape[-1], device=done.device).expand(done.shape)
    begins = torch.where(done, steps + 1, 0)[..., :-1].cummax(-1).values
    begins = torch.cat((torch.zeros_like(steps[..., :1]), begins), -1)
    return torch.pow(gamma, steps - begins).to(dtype)
