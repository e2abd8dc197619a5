"""The policies `actor_only` and `actor_critic`, for Box, Discrete and MultiDiscrete actions.

An `action_mask` in the observations masks the logits of Discrete and MultiDiscrete actions.
"""

from dataclasses import replace
from math import inf
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.policies.core import Policy
from ecrl.policies.fused import EncoderConfig, make_encoder
from ecrl.policies.heads import LOG_STD_MAX, LOG_STD_MIN, head_width, headed, initial_log_std, is_masked, make_head
from ecrl.policies.networks import NetworkConfig, default_network, make_network, seeded
from ecrl.policies.visible import Names, visible_space
from ecrl.registry import InitOnly, register_policy
from ecrl.spaces import Space, box


class ActorOnlyConfig(PolicyConfig):
    """Settings of the actor network and its action distribution."""

    actor: NetworkConfig = Field(
        default_factory=default_network,
        description='actor network, such as {"type": "mlp", "network_cfg": {...}}; two layers of 64 units if absent',
    )
    actor_obs: Names | None = Field(
        default=None,
        description="names of the observations that the actor reads, if the observation space is a Dict; all if absent",
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
    """Settings of the actor and critic networks, and of an encoder that they share, if any."""

    critic: NetworkConfig = Field(
        default_factory=default_network,
        description='critic network, such as {"type": "mlp", "network_cfg": {...}}; two layers of 64 units if absent',
    )
    critic_obs: Names | None = Field(
        default=None,
        description=(
            "names of the observations that the critic reads, if the observation space is a Dict; by default, all "
            "observations or, with a shared encoder, the observations of the actor"
        ),
    )
    encoder: EncoderConfig | None = Field(
        default=None,
        description=(
            "shared encoder, a network whose features both actor and critic read, such as "
            '{"type": "cnn", "features": 512}; none if absent'
        ),
    )

    @model_validator(mode="after")
    def _shared_observations(self) -> Self:
        differs = self.critic_obs is not None and {*self.critic_obs} != {*(self.actor_obs or ())}
        if self.encoder is not None and differs:
            problem = "actor and critic share an encoder, so both read the observations of the actor"
            raise ValueError(f"critic_obs: {problem}; leave critic_obs out, or leave encoder out")
        return self


@register_policy("actor_critic")
def actor_critic(cfg: ActorCriticConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build a policy with a critic.

    The params are the same as for `actor_only`, plus `critic`. If actor and critic share an encoder, the params of the
    encoder are in `encoder`, and actor and critic read its features:

        features = encoder(obs)
        output   = actor(features), critic(features)
    """
    if cfg.encoder is not None:
        return _with_shared_encoder(cfg, cfg.encoder, observation_space, action_space)
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


def _with_shared_encoder(
    cfg: ActorCriticConfig, encoder_cfg: EncoderConfig, observation_space: Space, action_space: Space
) -> Policy:
    """Build a policy whose actor and critic read the features of one encoder."""
    head, width = make_head(action_space, cfg.squash), head_width(action_space, cfg.action_dim)
    has_mask = is_masked(observation_space, action_space)
    encoder = make_encoder(
        encoder_cfg, visible_space(observation_space, cfg.actor_obs, "actor_obs"), cfg.bf16, "policy.encoder"
    )
    features_space = box(-inf, inf, encoder_cfg.features)
    networks = {
        "encoder": encoder,
        "actor": make_network(cfg.actor, features_space, width, cfg.bf16, "policy.actor"),
        "critic": make_network(cfg.critic, features_space, 1, cfg.bf16, "policy.critic"),
    }

    def init(key: Tensor) -> TensorDict:
        params = TensorDict(initial_log_std(action_space, cfg.initial_log_std), []).to(key.device)
        for i, (name, network) in enumerate(networks.items()):
            with seeded(rng.fold_in(key, i)):
                params = params.set(name, network.init().to(key.device))
        return params

    def output_of(params: TensorDict, features: Tensor, obs: Any) -> tuple[Tensor | None, Tensor]:
        out = networks["actor"].forward(params["actor"], features)
        return params.get("log_std", None), k.mask_logits(out, obs["action_mask"]) if has_mask else out

    def value_of(params: TensorDict, features: Tensor) -> Tensor:
        return networks["critic"].forward(params["critic"], features).squeeze(-1)

    def output(params: TensorDict, obs: Any) -> tuple[Tensor | None, Tensor]:
        return output_of(params, encoder.forward(params["encoder"], obs), obs)

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        return value_of(params, encoder.forward(params["encoder"], obs))

    def evaluate_and_value(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        features = encoder.forward(params["encoder"], steps["obs"])
        log_std, out = output_of(params, features, steps["obs"])
        log_prob, entropy = head.log_prob(log_std, out, steps["action"]), head.entropy(log_std, out)
        return log_prob, entropy, value_of(params, features)

    return replace(headed(head, init, output, value), evaluate_and_value=evaluate_and_value)
