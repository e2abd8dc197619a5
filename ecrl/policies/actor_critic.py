"""Separate actor and critic networks for Box, Discrete and MultiDiscrete actions.

Box: diagonal Gaussian with a state-independent log-std, neither squashed nor clipped. Discrete and MultiDiscrete:
categoricals, masked by `obs["action_mask"]` where the observation space has one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.errors import ConfigError
from ecrl.policies.core import Policy, flatten
from ecrl.policies.mlp import NetworkConfig, init_mlp, mlp, seeded
from ecrl.registry import register_policy
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, flat_dim

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class ActorCriticConfig(PolicyConfig):
    """Networks of the policy; both must be given."""

    actor: NetworkConfig = Field(description='actor network, such as {"type": "mlp", "network_cfg": {...}}')
    critic: NetworkConfig = Field(description='critic network, such as {"type": "mlp", "network_cfg": {...}}')
    initial_log_std: float = Field(
        0.0, ge=LOG_STD_MIN, le=LOG_STD_MAX, description="log standard deviation of Box actions at the start, -5 to 2"
    )


class _Head(NamedTuple):
    """What an action space makes of the actor's output: every function takes (params, logits or mean, ...)."""

    noise: Callable[[Tensor], Tensor]
    sample: Callable[..., Tensor]
    mode: Callable[..., Tensor]
    log_prob: Callable[..., Tensor]
    entropy: Callable[..., Tensor]


def _bounded(log_std: Tensor) -> Tensor:
    """The value held in its bounds; the gradient passes, so that a parameter outside can come back."""
    return log_std + (log_std.clamp(LOG_STD_MIN, LOG_STD_MAX) - log_std).detach()


def _normal_head(space: Box) -> _Head:
    width = flat_dim(space)

    def shaped(action: Tensor) -> Tensor:
        return action.reshape(*action.shape[:-1], *space.shape)

    def flat(action: Tensor) -> Tensor:
        return action.reshape(*action.shape[: action.ndim - len(space.shape)], width)

    return _Head(
        noise=lambda keys: rng.normal(keys, (width,)),
        sample=lambda p, mean, noise: shaped(k.normal_sample(mean, _bounded(p["log_std"]), noise)),
        mode=lambda p, mean: shaped(k.normal_mode(mean)),
        log_prob=lambda p, mean, action: k.normal_log_prob(mean, _bounded(p["log_std"]), flat(action)),
        entropy=lambda p, mean: k.normal_entropy(mean, _bounded(p["log_std"])),
    )


def _categorical_head(space: Discrete) -> _Head:
    return _Head(
        noise=lambda keys: rng.gumbel(keys, (space.n,)),
        sample=lambda p, logits, noise: k.categorical_sample(logits, noise),
        mode=lambda p, logits: k.categorical_mode(logits),
        log_prob=lambda p, logits, action: k.categorical_log_prob(logits, action),
        entropy=lambda p, logits: k.categorical_entropy(logits),
    )


def _multi_discrete_head(space: MultiDiscrete) -> _Head:
    nvec = space.nvec
    return _Head(
        noise=lambda keys: rng.gumbel(keys, (sum(nvec),)),
        sample=lambda p, logits, noise: k.multi_discrete_sample(logits, noise, nvec=nvec),
        mode=lambda p, logits: k.multi_discrete_mode(logits, nvec=nvec),
        log_prob=lambda p, logits, action: k.multi_discrete_log_prob(logits, action, nvec=nvec),
        entropy=lambda p, logits: k.multi_discrete_entropy(logits, nvec=nvec),
    )


def _head(space: Space) -> _Head:
    match space:
        case Box():
            return _normal_head(space)
        case Discrete():
            return _categorical_head(space)
        case MultiDiscrete():
            return _multi_discrete_head(space)
    raise TypeError(f"actor_critic has no actions for {space}; known: Box, Discrete, MultiDiscrete")


@register_policy("actor_critic")
def actor_critic(cfg: ActorCriticConfig, observation_space: Space, action_space: Space) -> Policy:
    """Params: `actor` and `critic` under `state_dict()` names, and `log_std` `[A]` for Box actions."""
    inputs, width, head = flat_dim(observation_space), flat_dim(action_space), _head(action_space)
    if cfg.action_dim not in (None, width):
        raise ConfigError(
            f"policy.action_dim: {cfg.action_dim} does not match the environment's {width} ({action_space}); "
            f"use {width} or leave it out"
        )
    masked = isinstance(observation_space, Dict) and "action_mask" in dict(observation_space.items)
    if masked and isinstance(action_space, Box):
        raise ConfigError("policy: obs['action_mask'] hides choices of Discrete and MultiDiscrete actions, not of Box")
    actor, critic = mlp(cfg.actor.network_cfg, inputs, width), mlp(cfg.critic.network_cfg, inputs, 1)

    def init(key: Tensor) -> TensorDict:
        with seeded(key):
            params = TensorDict(
                {
                    "actor": init_mlp(cfg.actor.network_cfg, inputs, width),
                    "critic": init_mlp(cfg.critic.network_cfg, inputs, 1),
                },
                [],
            )
        if isinstance(action_space, Box):
            params["log_std"] = torch.full((width,), cfg.initial_log_std)
        return params.to(key.device)

    def output(params: TensorDict, obs: Any) -> Tensor:
        out = actor(params["actor"], flatten(obs, observation_space))
        return k.mask_logits(out, obs["action_mask"]) if masked else out

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        out = output(params, obs)
        action = head.mode(params, out) if noise is None else head.sample(params, out, noise)
        log_prob = head.log_prob(params, out, action)
        return carry, TensorDict({"action": action, "sample_log_prob": log_prob}, out.shape[:-1])

    def evaluate(
        params: TensorDict, carry: TensorDict, obs: Any, action: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = output(params, obs)
        return head.log_prob(params, out, action), head.entropy(params, out)

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        return critic(params["critic"], flatten(obs, observation_space)).squeeze(-1)

    return Policy(init, head.noise, act, evaluate, value)
