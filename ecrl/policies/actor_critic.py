"""The policies `actor_only` and `actor_critic`, for Box, Discrete and MultiDiscrete actions.

An `action_mask` in the observations masks the logits of Discrete and MultiDiscrete actions.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.policies.core import Policy
from ecrl.policies.heads import LOG_STD_MAX, LOG_STD_MIN, head_width, headed, initial_log_std, is_masked, make_head
from ecrl.policies.networks import NetworkConfig, make_network, seeded
from ecrl.policies.visible import Names, visible_space
from ecrl.registry import InitOnly, register_policy
from ecrl.spaces import Space


class ActorOnlyConfig(PolicyConfig):
    """Settings of the actor network and its action distribution."""

    actor: NetworkConfig = Field(description='actor network, such as {"type": "mlp", "network_cfg": {...}}')
    actor_obs: Names | None = Field(
        default=None, description="names of the observations in a Dict that the actor reads; all if absent"
    )
    initial_log_std: Annotated[float, InitOnly()] = Field(
        default=0.0,
        ge=LOG_STD_MIN,
        le=LOG_STD_MAX,
        description="initial log standard deviation of Box actions, -5 to 2",
    )
    squash: bool = Field(default=False, description="squash Box actions into their space by tanh")


@register_policy("actor_only")
def actor_only(cfg: ActorOnlyConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build a policy without a critic. The params are `actor` and, for Box actions, `log_std` of shape `[A]`."""
    head, width = make_head(action_space, cfg.squash), head_width(action_space, cfg.action_dim)
    has_mask = is_masked(observation_space, action_space)
    space = visible_space(observation_space, cfg.actor_obs, "actor_obs")
    network = make_network(cfg.actor, space, width, cfg.bf16, "policy.actor")

    def init(key: Tensor) -> TensorDict:
        with seeded(key):
            params = TensorDict({"actor": network.init()}, [])
        return params.update(initial_log_std(action_space, cfg.initial_log_std)).to(key.device)

    def output(params: TensorDict, obs: Any) -> tuple[Tensor | None, Tensor]:
        out = network.forward(params["actor"], obs)
        return params.get("log_std", None), k.mask_logits(out, obs["action_mask"]) if has_mask else out

    return headed(head, init, output)


class ActorCriticConfig(ActorOnlyConfig):
    """Settings of the actor and critic networks. Both networks are required."""

    critic: NetworkConfig = Field(description='critic network, such as {"type": "mlp", "network_cfg": {...}}')
    critic_obs: Names | None = Field(
        default=None, description="names of the observations in a Dict that the critic reads; all if absent"
    )


@register_policy("actor_critic")
def actor_critic(cfg: ActorCriticConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build a policy with a critic. The params are the same as for `actor_only`, plus `critic`."""
    actor = actor_only(cfg, observation_space, action_space)
    space = visible_space(observation_space, cfg.critic_obs, "critic_obs")
    network = make_network(cfg.critic, space, 1, cfg.bf16, "policy.critic")

    def init(key: Tensor) -> TensorDict:
        params = actor.init(key)
        with seeded(rng.fold_in(key, 1)):
            return params.update({"critic": network.init().to(key.device)})

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        return network.forward(params["critic"], obs).squeeze(-1)

    return replace(actor, init=init, value=value)
