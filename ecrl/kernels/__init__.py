"""Pure functions on tensors: returns, advantages, losses, distributions, collection, moments, optimisers.

Every name here can be imported alone into another trainer.
"""

from ecrl.kernels.distributions import (
    Squashed,
    categorical_entropy,
    categorical_kl,
    categorical_log_prob,
    categorical_mode,
    categorical_sample,
    mask_logits,
    multi_discrete_entropy,
    multi_discrete_kl,
    multi_discrete_log_prob,
    multi_discrete_mode,
    multi_discrete_sample,
    normal_entropy,
    normal_kl,
    normal_log_prob,
    normal_mode,
    normal_sample,
    tanh_normal_entropy,
    tanh_normal_kl,
    tanh_normal_latent,
    tanh_normal_log_prob,
    tanh_normal_mode,
    tanh_normal_sample,
)
from ecrl.kernels.groups import first_episode_mask, group_advantages, grpo_advantages
from ecrl.kernels.losses import (
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    grpo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    masked_mean,
    ppo_loss,
    standardize,
    value_loss,
)
from ecrl.kernels.moments import moments_init, moments_merge, moments_update, moments_variance, normalize
from ecrl.kernels.optim import (
    adam,
    adam_init,
    adamw,
    clip_by_global_norm,
    cosine_schedule,
    exponential_schedule,
    global_norm,
    linear_schedule,
    rmsprop,
    rmsprop_init,
    sgd,
    sgd_init,
    step_schedule,
)
from ecrl.kernels.returns import (
    GAE,
    VTrace,
    compute_gae,
    compute_n_step_returns,
    compute_returns,
    compute_td_lambda_returns,
    compute_vtrace,
    discounted_returns,
    gae,
    n_step_returns,
    td_lambda_returns,
    vtrace,
)
from ecrl.kernels.rollout import act_and_step, collect_rollout, episode_init, episode_update
from ecrl.types import transitions

__all__ = [name for name in dir() if not name.startswith("_")]
