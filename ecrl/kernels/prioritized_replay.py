"""Prioritised replay, which draws transitions with probabilities based on their latest temporal-difference errors.

    tree               = replay_add_priority(replay, tree, largest, steps=S, n=n, stack=1)       # after `replay_add`
    index, probability = replay_prioritized_index(tree, keys)
    weight             = importance_weights(probability, beta=beta)                              # weights of the loss
    tree, largest      = replay_set_priority(tree, largest, index, td_error, mask, alpha=alpha, eps=eps)

The replay buffer and its rows are described in `ecrl.kernels.replay`. The ring stores R steps of N environments. The
sum tree (`ecrl.kernels.sum_tree`) has one leaf for each row of the ring, at the row's index. A row that cannot be drawn
has the priority 0. `largest` is the largest priority so far. Start with `tree_init(R * N)` and a `largest` of 1. The
tree has the shape `[2 * P]`. P is the number of leaves: the smallest power of two that is at least 2 and at least
R * N.

Source: Schaul et al. 2016, arXiv:1511.05952.
"""

import torch
from torch import Tensor

from ecrl import rng
from ecrl.kernels.dtypes import common_dtype, scalars, widened
from ecrl.kernels.replay import Replay, valid_steps
from ecrl.kernels.sum_tree import tree_find, tree_set
from ecrl.types import Scalar, checked_mask


def replay_add_priority(replay: Replay, tree: Tensor, largest: Tensor, *, steps: int, n: int, stack: int) -> Tensor:
    """Return the sum tree with new priorities for the rows that the last `replay_add` affects.

    Rows that can now be drawn for the first time get the priority `largest`. Rows that cannot be drawn get the priority
    0.

        priority[t] = largest    for now - steps - n <= t < now - n
        priority[t] = 0          for now - n <= t < now
        priority[t] = 0          for now - R <= t < now - R + stack - 1, if now > R

    Here `now` is `replay.start + replay.added`, the number of steps so far, and R is the number of steps that the ring
    stores. The n newest steps cannot be drawn yet. As soon as new steps have replaced old steps, the `stack - 1` oldest
    steps in the buffer can no longer be drawn.

    Args:
        replay: the buffer after `replay_add`.
        tree: a sum tree with at least R * N leaves, for N environments.
        largest: 0-d float64, the largest priority so far.
        steps: the number S of steps that the last `replay_add` added.
        n: number of steps in a return, at least 1.
        stack: number of frames in an observation, 1 without frame stacking.

    Returns: the new tree, float64 `[2 * P]`.
    Gradient: none, because the arguments are detached.
    Raises: ValueError if the tree is too small, if `steps`, `n` or `stack` is below 1, or if the ring has fewer than
        `steps + n + stack` steps.
    Source: Schaul et al. 2016, arXiv:1511.05952, algorithm 1, line 6.

    >>> from ecrl.kernels import replay_init, replay_start, tree_init
    >>> flag = torch.zeros(1, dtype=torch.bool)
    >>> from tensordict import TensorDict
    >>> rows = TensorDict({name: flag for name in ("obs", "reward", "terminated", "truncated")}, [1])
    >>> replay = replay_start(replay_init(rows, steps=8, min_truncation_gap=3), torch.tensor(6), steps=1)
    >>> replay_add_priority(replay, tree_init(8), torch.tensor(1.0), steps=4, n=2, stack=1)[8:].tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    """
    capacity, num_envs = replay.ring["steps"].shape
    (first, end), now = valid_steps(replay, n, stack), replay.start + replay.added
    if steps < 1:
        raise ValueError(f"steps is {steps}, expected at least 1")
    if (least := steps + n + stack) > capacity:
        numbers = f"steps={steps}, n={n} and stack={stack}"
        raise ValueError(f"{numbers} need a ring of at least {least} steps, but it has {capacity}")
    if 2 * capacity * num_envs > len(tree):
        raise ValueError(f"tree has {len(tree) // 2} leaves, expected at least {capacity * num_envs}, one per row")
    device, env = replay.start.device, torch.arange(num_envs, device=replay.start.device)
    newest = now - steps - n + torch.arange(steps + n, device=device)
    oldest = now - capacity + torch.arange(stack - 1, device=device)
    step = torch.cat((newest, oldest)).unsqueeze(1)
    index = step % capacity * num_envs + env
    can_be_drawn = (step >= first) & (step < end)
    priority = torch.where(can_be_drawn, largest.to(tree.dtype), 0.0).expand(index.shape)
    # Until the ring is full, no step has been overwritten, so the priorities of the oldest steps do not change.
    old = tree.index_select(0, len(tree) // 2 + index.flatten()).reshape(index.shape)
    unchanged = (torch.arange(len(step), device=device) >= steps + n).unsqueeze(1) & (now <= capacity)
    return tree_set(tree, index, torch.where(unchanged, old, priority))


def replay_prioritized_index(tree: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Draw rows with replacement, each row with a probability proportional to its priority.

        mass[i]        = (i + uniform[i]) / B * sum of all priorities
        index[i]       = tree_find(tree, mass[i])
        probability[i] = priority[index[i]] / sum of all priorities

    The interval from 0 to the sum of all priorities is divided into B equal parts, and one number, `mass[i]`, is drawn
    from each part. The number of times that a row occurs in the batch has a mean of B times the row's probability. The
    variance of this number is at most as large as with independent draws.

    Args:
        tree: a sum tree with at least one priority above 0.
        keys: `[*, B]` int64, one key of `ecrl.rng` for each draw. The last axis is a batch.

    Returns: the indices of the rows, int64 `[*, B]`, and the rows' probabilities, float64 `[*, B]`.
    Gradient: none, because `tree` is detached.
    Raises: ValueError if `keys` is 0-d, or if `tree` is not `[2 * P]`.
    Source: Schaul et al. 2016, arXiv:1511.05952, eq. 1 and appendix B.2.1.

    >>> from ecrl.kernels import tree_init, tree_set
    >>> tree = tree_set(tree_init(4), torch.tensor([1, 2]), torch.tensor([1.0, 3.0]))
    >>> index, probability = replay_prioritized_index(tree, torch.arange(4))
    >>> index.tolist(), probability.tolist()
    ([1, 2, 2, 2], [0.25, 0.75, 0.75, 0.75])
    """
    if not keys.ndim:
        raise ValueError("keys has shape [], expected [*, B]")
    tree, part = tree.detach(), torch.arange(keys.shape[-1], device=keys.device)
    mass = (part + rng.uniform(keys, dtype=torch.float64)) / keys.shape[-1] * tree[1]
    index = tree_find(tree, mass)
    return index, tree.index_select(0, len(tree) // 2 + index.flatten()).reshape(index.shape) / tree[1]


def replay_set_priority(
    tree: Tensor,
    largest: Tensor,
    index: Tensor,
    td_error: Tensor,
    mask: Tensor | None = None,
    *,
    alpha: Scalar,
    eps: Scalar,
) -> tuple[Tensor, Tensor]:
    """Set the priorities of the drawn rows after a gradient step.

        priority = (|td_error| + eps) ^ alpha if mask else 0
        largest  = max(largest, priority)

    Args:
        tree: the sum tree.
        largest: 0-d float64, the largest priority so far.
        index: `[*B]` int64, indices of the rows. If an index occurs twice, the last priority for this index is stored.
            If `index` is empty, nothing changes.
        td_error: `[*B]` float, temporal-difference errors in reward units. A row whose error is NaN or infinite gets
            the priority `largest`.
        mask: `[*B]` bool, from `replay_read`, or None if every row counts. A row whose `mask` is False stores no
            transition, so it is not drawn again until a new step replaces it.
        alpha: exponent of the priority. An exponent of 0 makes all priorities equal.
        eps: constant added to |td_error|, in reward units. Use a value above 0. If `eps` is 0 and `alpha` is above 0, a
            row whose error is 0 is not drawn again until a new step replaces it.

    Returns: the new tree, float64 `[2 * P]`, and the new `largest`.
    Gradient: none, because the arguments are detached.
    Raises: ValueError if shapes differ, if `mask` is not bool, if a hyperparameter is not 0-d, or if `tree` is not
        `[2 * P]`.
    Source: Schaul et al. 2016, arXiv:1511.05952, sec. 3.3 (proportional variant) and algorithm 1.

    >>> from ecrl.kernels import tree_init
    >>> index, error = torch.tensor([0, 1]), torch.tensor([-3.0, 8.0])
    >>> mask = torch.tensor([True, True])
    >>> tree, largest = replay_set_priority(tree_init(2), torch.tensor(1.0), index, error, mask, alpha=0.5, eps=1.0)
    >>> tree.tolist(), float(largest)
    ([0.0, 5.0, 2.0, 3.0], 3.0)
    """
    mask = checked_mask(mask, index=index, td_error=td_error)
    alpha, eps = scalars(alpha=alpha, eps=eps)
    error = td_error.detach().abs().to(tree.dtype)
    priority = torch.where(error.isfinite(), torch.pow(error + eps, alpha), largest.detach()).detach()
    priority = torch.where(mask, priority, 0.0)
    tree, largest = tree_set(tree, index, priority), largest.detach()
    return tree, torch.maximum(largest, priority.amax()) if index.numel() else largest


def importance_weights(probability: Tensor, *, beta: Scalar) -> Tensor:
    """Return importance weights that correct for unequal probabilities. The largest weight of the batch is 1.

        weight[i] = (count * probability[i])^-beta / max over j of (count * probability[j])^-beta
                  = (min over j of probability[j] / probability[i])^beta

    `count` is the number of rows that can be drawn, and has no effect on the result. In a distributed run, each rank
    draws its own batch. To divide by the largest weight in the batches of all ranks instead, multiply the result by
    `(smallest probability of all ranks / smallest probability of this rank)^beta`.

    Args:
        probability: `[*B]` float, probabilities of the drawn rows, above 0.
        beta: strength of the correction, from 0 (no correction) to 1 (full correction). `beta` usually rises to 1
            during training.

    Returns: `[*B]` in the dtype of `probability`.
    Gradient: flows through `probability`.
    Raises: ValueError if `beta` is not 0-d.
    Source: Schaul et al. 2016, arXiv:1511.05952, sec. 3.4.

    >>> importance_weights(torch.tensor([0.5, 0.125]), beta=0.5)
    tensor([0.5000, 1.0000])
    """
    (beta,) = scalars(beta=beta)
    (p,) = widened(probability)
    if not p.numel():  # an empty batch has no smallest probability
        return p.to(common_dtype(probability))
    return torch.pow(p.amin() / p, beta).to(common_dtype(probability))
