"""Probability ratios per action, per token or per episode, and the clipped objectives that PPO and GRPO share.

The objectives take log-probabilities and masks of shape `[*B, K]`, and advantages of shape `[*B]`. `[*B]` is the shape
of `rows["done"]`, and the last axis runs over the K tokens of a step. A step has one token if each action has one
ratio.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple, Self, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import Run
from ecrl.algorithms.minibatch_sgd import MinibatchConfig
from ecrl.algorithms.rows import rows_of, token_rows_of
from ecrl.config.model import Positive
from ecrl.errors import ConfigError
from ecrl.kernels import clipped_surrogate_asymmetric, gspo_loss
from ecrl.policies import Policy, counted_tokens, sum_tokens
from ecrl.types import Logs


class ClippedConfig(MinibatchConfig):
    """Settings of the minibatches and of the clipped probability ratio."""

    clip_coef: Positive = Field(default=0.2, description="distance from 1 at which the probability ratio is clipped")
    clip_coef_high: Positive | None = Field(
        default=None, description="distance above 1 at which the probability ratio is clipped; clip_coef if absent"
    )
    dual_clip: Positive | None = Field(
        default=None,
        description=(
            "largest ratio for negative advantages; must be above 1 + clip_coef_high, or above 1 + clip_coef if "
            "clip_coef_high is absent; no limit if dual_clip is absent"
        ),
    )

    @model_validator(mode="after")
    def _dual_clip_is_above_the_clip(self) -> Self:
        high = 1.0 + (self.clip_coef if self.clip_coef_high is None else self.clip_coef_high)
        if self.dual_clip is not None and self.dual_clip <= high:
            raise ValueError(f"dual_clip {self.dual_clip} is not above the largest clipped ratio, {high}; raise it")
        return self


class Ratio(NamedTuple):
    """Functions for one kind of probability ratio: per action, token or episode.

    Attributes:
        evaluate: for ratios of whole actions, `Policy.evaluate_rows`, which sums over tokens. For other ratios,
            `Policy.evaluate_tokens`.
        rows_of: same arguments and result as `ecrl.algorithms.rows.rows_of`, with `sample_log_prob` per action or per
            token.
        per_token: (x, rows) -> `[*B, K]`, where `x` is a result of `Policy.evaluate_tokens`: log-probabilities or
            entropies.
        token_mask: (x, rows) -> bool `[*B, K]`, True for the tokens that count.
        objective: function with the arguments of `clipped_objective` that returns the loss per token and the logs.
    """

    evaluate: Callable[[Policy, TensorDict, TensorDict], tuple[Tensor, Tensor]]
    rows_of: Callable[..., TensorDict]
    per_token: Callable[[Tensor, TensorDict], Tensor]
    token_mask: Callable[[Tensor, TensorDict], Tensor]
    objective: Callable[[Tensor, Tensor, Tensor, Tensor, TensorDict], tuple[Tensor, Logs]]


def clipped_objective(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    """Apply `clipped_surrogate_asymmetric` with the clips in `hyper`. Each token has its own ratio."""
    low, high = clips(hyper)
    dual = hyper.get("dual_clip", inf)
    return clipped_surrogate_asymmetric(
        log_prob, old_log_prob, advantage, mask, clip_low=low, clip_high=high, dual_clip=dual
    )


def episode_objective(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    """Apply `gspo_loss` with the clips in `hyper`. All tokens of a sequence `[T, K]` have the same ratio."""
    low, high = clips(hyper)
    advantage = advantage.unsqueeze(-1).expand_as(log_prob)
    flat = (x.flatten(-2) for x in (log_prob, old_log_prob, advantage, mask))
    loss, logs = gspo_loss(*flat, clip_low=low, clip_high=high)
    return loss.reshape(log_prob.shape), logs


def clips(hyper: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the two distances from 1, below and above, at which ratios are clipped."""
    return hyper["clip_coef"], hyper.get("clip_coef_high", hyper["clip_coef"])


def rows_with_token_axes(run: Run, batch: TensorDict, **fields: Tensor) -> TensorDict:
    """Return the result of `token_rows_of`. Raise ConfigError if an action has only one log-probability."""
    if batch["steps", "sample_log_prob"].ndim == batch["steps", "done"].ndim:
        text = f"policy {run.policy.name} has one log-probability per action"
        raise ConfigError(f"algorithm.cfg.ratio: token, but {text}; use action")
    return token_rows_of(run, batch, **fields)


def _one_token(x: Tensor, rows: TensorDict) -> Tensor:
    return sum_tokens(x, rows).unsqueeze(-1)


def _one_counts(x: Tensor, rows: TensorDict) -> Tensor:
    return torch.ones_like(rows["done"]).unsqueeze(-1)


def _tokens(x: Tensor, rows: TensorDict) -> Tensor:
    return x.reshape(*rows["done"].shape, -1)


def _tokens_count(x: Tensor, rows: TensorDict) -> Tensor:
    mask = counted_tokens(x, rows) if x.ndim > rows["done"].ndim else None
    return _tokens(torch.ones_like(x, dtype=torch.bool) if mask is None else mask, rows)


RATIOS = {
    "action": Ratio(Policy.evaluate_rows, rows_of, _one_token, _one_counts, clipped_objective),
    "token": Ratio(Policy.evaluate_tokens, rows_with_token_axes, _tokens, _tokens_count, clipped_objective),
    "sequence": Ratio(Policy.evaluate_tokens, token_rows_of, _tokens, _tokens_count, episode_objective),
}


def token_counts(run: Run, steps: TensorDict) -> Tensor:
    """Return a float tensor `[N, T, K]` that is 1 for each token that counts, and 0 for all other tokens.

    `steps` has the shape `[N, T + 1]`. The last step is padding.
    """
    taken = cast(TensorDict, steps[:, :-1])
    log_prob = cast(Tensor, taken["sample_log_prob"])
    return run.algorithm.choices.ratio.token_mask(log_prob, taken).to(log_prob.dtype)
