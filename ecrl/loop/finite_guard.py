"""The finite guard: whether an iteration met NaN or infinity, as part of the iteration itself.

A handful of sums over what was collected and learnt; `ecrl.loop.nonfinite_search` says where it shows first.
"""

from typing import cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.distributed import all_sum
from ecrl.kernels import restarted
from ecrl.pytree import flatten, mapped, replaced
from ecrl.types import Logs

WHAT = ("observation", "reward", "action", "loss", "gradient", "parameters")
"""What the guard looks at, in the order of its flags."""

KEYS = {"obs": "observation", "action": "action", "sample_log_prob": "action", "reward": "reward"}
"""Fields of a batch, and which of WHAT they are."""


def _odd(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Whether any of them holds NaN or infinity, 0-d bool: 0 times those is NaN, and sums keep it."""
    sums = [(x.detach() * 0.0).sum().to(torch.float32) for x in tensors if x.is_floating_point()]
    return torch.stack(sums).sum().isnan() if sums else torch.zeros((), dtype=torch.bool, device=device)


def _counted(batch: TensorDict, key: str) -> list[Tensor]:
    """The steps of a field that count, without the padding behind them; all observations where nothing is masked."""
    leaves: list[Tensor] = flatten(batch[key])[0]
    if "mask" not in batch:
        return leaves if key == "obs" else [x[:, :-1] for x in leaves]
    mask, steps = batch["mask"][:, :-1], [x[:, :-1] for x in leaves if x.is_floating_point()]
    return [x.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), 0.0) for x in steps]


def flags(batch: TensorDict, logs: Logs, params: TensorDict) -> Tensor:
    """Which of WHAT is not finite, bool `[2, 6]`: on this rank, and on any.

    Args:
        batch: `[N, T + 1]`; `obs`, `action`, `sample_log_prob`, `reward` and `mask` are read where it has them.
        logs: of the update; losses are called `loss` or `*_loss`, norms of gradients `*grad_norm`.
        params: after it.

    >>> batch, params = TensorDict({"reward": torch.tensor([[torch.inf, 0.0]])}, [1, 2]), TensorDict({"w": 1.0}, [])
    >>> flags(batch, {"loss": torch.tensor(0.0)}, params)[0].tolist()
    [False, True, False, False, False, False]
    """
    fields = [
        [x for key, of in KEYS.items() if of == what and key in batch for x in _counted(batch, key)]
        for what in WHAT[:3]
    ]
    losses = [x for name, x in logs.items() if name == "loss" or name.endswith("_loss")]
    norms, leaves = [x for name, x in logs.items() if name.endswith("grad_norm")], flatten(params)[0]
    here = torch.stack([_odd(group, leaves[0].device) for group in (*fields, losses, norms, leaves)])
    return torch.stack((here, all_sum(here.to(torch.int64)) > 0))


def left_out(odd: Tensor, start: TensorDict, collected: TensorDict, learnt: TensorDict) -> TensorDict:
    """The state after an iteration, without its update where any of the flags `odd` `[6]` is up.

    Parameters, optimiser, statistics and `update_step` are then as they were, and schedules wait. Environments have
    moved on. Where a reward is not finite, its iteration is left out of the returns of episodes too.

    Args:
        odd: as `flags` gives them for any rank.
        start: the state before the iteration.
        collected: after collecting.
        learnt: after learning.
    """
    skipped, unpaid = odd.any(), odd[WHAT.index("reward")]
    kept = mapped(lambda old, new: old if old is new else torch.where(skipped, old, new), collected, learnt)
    before = restarted(cast(TensorDict, start["episode"]))
    episode = mapped(lambda old, new: torch.where(unpaid, old, new), before, kept["episode"])
    return replaced(kept, {"episode": episode})
