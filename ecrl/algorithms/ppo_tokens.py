"""The loss of PPO with one probability ratio per token, or with the setting `clip_coef_high` or `dual_clip`."""

from functools import partial

from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.core import Run
from ecrl.algorithms.ratios import token_counts
from ecrl.distributed import all_sum
from ecrl.kernels import clipped_value_loss, explained_variance, value_loss
from ecrl.kernels.step_weights import token_mean_weights, weighted_step_mean
from ecrl.types import Logs


def token_weights(run: Run, steps: TensorDict, mask: Tensor) -> Tensor:
    """Return `token_mean_weights` over the batches of all ranks, `[N, T]`."""
    return token_mean_weights(token_counts(run, steps).sum(-1), mask, total=all_sum)


def token_loss(
    run: Run, params: TensorDict, minibatch: TensorDict, mask: Tensor, hyper: TensorDict
) -> tuple[Tensor, Logs]:
    """Return the loss and the logs of a minibatch, with a clipped ratio for each token.

        loss = mean over tokens(objective - ent_coef * entropy) + vf_coef * mean over actions(value loss)

    The `objective` of a token is its negated clipped surrogate. If the setting `ratio` is "action", a whole action is
    one token. Advantages and values belong to whole actions. The logs approx_kl and clip_frac are means over the tokens
    of the minibatch.
    """
    choices = run.algorithm.choices
    log_prob, entropy, value = run.policy.evaluate_and_value_tokens(params, minibatch)
    token_mask = choices.ratio.token_mask(log_prob, minibatch) & mask.unsqueeze(-1)
    tokens = log_prob, minibatch["sample_log_prob"], entropy
    log_prob, old_log_prob, entropy = (choices.ratio.per_token(x, minibatch) for x in tokens)
    objective, logs = choices.ratio.objective(log_prob, old_log_prob, minibatch["advantage"], token_mask, hyper)
    mean = partial(weighted_step_mean, token_mask=token_mask, mask=mask, weight=minibatch["weight"])
    policy, bonus = mean(objective), mean(entropy)
    target = minibatch["value_target"]
    if "old_value" in dict(choices.critic_fields):
        critic = clipped_value_loss(value, minibatch["value"], target, mask, clip_coef=hyper["clip_coef"])
    else:
        critic = value_loss(value, target, mask)
    logs |= {
        "policy_loss": policy.detach(),
        "value_loss": critic.detach(),
        "entropy": bonus.detach(),
        "explained_variance": explained_variance(value, target, mask),
        "count": mask.sum().to(policy.dtype),
    }
    return policy + hyper["vf_coef"] * critic - hyper["ent_coef"] * bonus, logs
