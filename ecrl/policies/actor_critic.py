"""The actor of `actor_only` and a separate critic network."""

from dataclasses import replace
from typing import Any

from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.policies.actor_only import ActorOnlyConfig, Names, actor_only, visible_space
from ecrl.policies.core import Policy, flatten
from ecrl.policies.networks import NetworkConfig, make_network, seeded
from ecrl.registry import register_policy
from ecrl.spaces import Space, flat_dim


class ActorCriticConfig(ActorOnlyConfig):
    """The actor and critic networks; both are required."""

    critic: NetworkConfig = Field(description='critic network, such as {"type": "mlp", "network_cfg": {...}}')
    critic_obs: Names | None = Field(
        default=None, description="parts of a Dict observation that the critic gets; all if absent"
    )


@register_policy("actor_critic")
def actor_critic(cfg: ActorCriticConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy. Its params are the params of `actor_only`, and `critic` under the module's names."""
    actor = actor_only(cfg, observation_space, action_space)
    space = visible_space(observation_space, cfg.critic_obs, "critic_obs")
    network = make_network(cfg.critic, flat_dim(space), 1, cfg.bf16, "policy.critic")

    def init(key: Tensor) -> TensorDict:
        params = actor.init(key)
        with seeded(rng.fold_in(key, 1)):
            return params.update({"critic": network.init().to(key.device)})

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        return network.forward(params["critic"], flatten(obs, space)).squeeze(-1)

    return replace(actor, init=init, value=value)
