"""Functions for other GRPO settings than the defaults: baselines, episode scores, group filters, ratios and means.

Sources: Yu et al. 2025 (DAPO), arXiv:2503.14476. Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783. Zheng et al. 2025
(GSPO), arXiv:2507.18071. Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
"""

from collections.abc import Callable
from math import inf

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import Run
from ecrl.algorithms.ratios import Ratio, token_counts
from ecrl.distributed import all_sum
from ecrl.envs.action_chunks import undiscounted_reward
from ecrl.kernels import (
    group_advantages,
    group_centered,
    informative_groups,
    kl_k3,
    leave_one_out,
    masked_mean,
)
from ecrl.kernels.groups import returns_to_go
from ecrl.kernels.step_weights import (
    fixed_length_mean_weights,
    sequence_mean_weights,
    token_mean_weights,
    weighted_step_mean,
)
from ecrl.types import Logs

Baseline = Callable[[Tensor, Tensor, int, TensorDict], Tensor]


def standardized(score: Tensor, mask: Tensor, group_size: int, hyper: TensorDict) -> Tensor:
    """Return (score - mean) / (std + eps) within each group."""
    return group_advantages(score, mask, group_size=group_size, eps=hyper["eps"])


def centered(score: Tensor, mask: Tensor, group_size: int, hyper: TensorDict) -> Tensor:
    """Return score - mean within each group."""
    return group_centered(score, mask, group_size=group_size)


def left_one_out(score: Tensor, mask: Tensor, group_size: int, hyper: TensorDict) -> Tensor:
    """Return the score of each member minus the mean score of the other members of its group."""
    return leave_one_out(score, mask, group_size=group_size)


BASELINES: dict[str, Baseline] = {"standardized": standardized, "centered": centered, "leave_one_out": left_one_out}
Weights = Callable[[Run, TensorDict, Tensor], Tensor]


def token_weights(run: Run, steps: TensorDict, mask: Tensor) -> Tensor:
    """Return `token_mean_weights` over the batches of all ranks, scaled by `_per_row`."""
    count = token_counts(run, steps)
    return _per_row(run, mask, token_mean_weights(count.sum(-1), mask, total=all_sum))


def episode_weights(run: Run, steps: TensorDict, mask: Tensor) -> Tensor:
    """Return `sequence_mean_weights` over the batches of all ranks, scaled by `_per_row`."""
    count = token_counts(run, steps)
    return _per_row(run, mask, sequence_mean_weights(count.sum(-1), mask, total=all_sum))


def fixed_length_weights(run: Run, steps: TensorDict, mask: Tensor) -> Tensor:
    """Return `fixed_length_mean_weights` over the batches of all ranks, scaled by `_per_row`."""
    count = token_counts(run, steps)
    weight = fixed_length_mean_weights(count.sum(-1), mask, length=count[0].numel(), total=all_sum)
    return _per_row(run, mask, weight)


def _per_row(run: Run, mask: Tensor, weight: Tensor) -> Tensor:
    """Multiply the weights by `rows / steps`.

    The weights are for a mean over steps, but `weighted_loss` takes a mean over rows. `rows` is the number of rows with
    an unmasked step, and `steps` is the number of unmasked steps, on all ranks.
    """
    rows = counted_rows(mask.reshape(-1, run.static.row_steps))
    return weight * (all_sum(rows) / all_sum(mask.sum()).clamp(min=1)).to(weight.dtype)


WEIGHTS: dict[str, Weights] = {
    "token": token_weights,
    "sequence": episode_weights,
    "fixed_length": fixed_length_weights,
}


def counted_rows(mask: Tensor) -> Tensor:
    """Return the number of rows with an unmasked step, for a mask `[M]` or `[M, T]`."""
    return mask.reshape(len(mask), -1).any(-1).sum()


def filtered(run: Run, hyper: TensorDict, steps: TensorDict, mask: Tensor) -> Tensor:
    """Mask the steps of groups whose mean score is not between `min_group_score` and `max_group_score`.

    The score of an environment is the sum of the rewards of its unmasked steps, without discounts. A limit that is
    missing in `hyper` excludes no group.
    """
    score = undiscounted_reward(steps)[:, :-1].masked_fill(~mask, 0.0).sum(-1)
    low, high = hyper.get("min_group_score", -inf), hyper.get("max_group_score", inf)
    kept = informative_groups(score, mask.any(-1), group_size=run.algorithm.group_size, low=low, high=high)
    return mask & kept.unsqueeze(-1)


def variant_advantages(run: Run, hyper: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the advantages and the mask of steps to learn from, each `[N, T]`, for any baseline, score and limits."""
    choices, group_size = run.algorithm.choices, run.algorithm.group_size
    score, mask = returns_to_go(steps, gamma=hyper["gamma"])
    if choices.scores_episodes:
        of_episodes = choices.baseline(score[:, 0], mask.any(-1), group_size, hyper)
        advantage = of_episodes.unsqueeze(-1).masked_fill(~mask, 0.0)
    else:
        advantage = choices.baseline(score, mask, group_size, hyper)
    if "min_group_score" in hyper or "max_group_score" in hyper:
        mask = filtered(run, hyper, steps, mask)
    return advantage, mask


def weighted_loss(
    run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    """Return the loss and the logs of a minibatch, for any ratio and any mean.

        loss = sum(weight * (objective + kl_coef * kl_k3 - ent_coef * entropy)) / rows

    The sum is over the unmasked tokens, and the `objective` of a token is its negated clipped surrogate.
    `rows` is the number of rows with an unmasked step. A row has `static.row_steps` steps. Except for `policy_loss`,
    the logs are means over the tokens of the minibatch.
    """
    ratio: Ratio = run.algorithm.choices.ratio
    log_prob, entropy = run.policy.evaluate_tokens(params, minibatch)
    token_mask = ratio.token_mask(log_prob, minibatch) & mask.unsqueeze(-1)
    log_prob, entropy = ratio.per_token(log_prob, minibatch), ratio.per_token(entropy, minibatch)
    old_log_prob = ratio.per_token(minibatch["sample_log_prob"], minibatch)
    objective, logs = ratio.objective(log_prob, old_log_prob, minibatch["advantage"], token_mask, hyper)
    rows = counted_rows(mask)
    steps_per_row = mask.sum() / rows.clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return steps_per_row * weighted_step_mean(x, token_mask, mask, minibatch["weight"])

    policy, bonus = mean(objective), mean(entropy)
    penalty, kl_ref = torch.zeros_like(policy), torch.zeros_like(policy)
    if "ref_log_prob" in minibatch:
        # Fill masked entries before the exponential, because a masked NaN would make the gradient NaN.
        both = (log_prob, ratio.per_token(minibatch["ref_log_prob"], minibatch))
        distance = kl_k3(*(x.masked_fill(~token_mask, 0.0) for x in both))
        penalty, kl_ref = mean(distance), masked_mean(distance, token_mask)
    entropy_log = masked_mean(entropy, token_mask)
    logs |= {"policy_loss": policy.detach(), "entropy": entropy_log.detach(), "kl_ref": kl_ref.detach()}
    total = policy + hyper.get("kl_coef", 0.0) * penalty - hyper["ent_coef"] * bonus
    return total, logs | {"count": rows.to(total.dtype)}
