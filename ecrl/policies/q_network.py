"""The policy `q_network`, which chooses the action with the largest value.

The policy explores with random actions, with noise in the weights of its network, or with both.

An `action_mask` in the observations excludes actions.
"""

from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import Positive
from ecrl.errors import ConfigError
from ecrl.kernels import epsilon_greedy
from ecrl.policies.core import Policy
from ecrl.policies.heads import head_width, is_masked
from ecrl.policies.networks import NetworkConfig, default_network, make_network, seeded
from ecrl.policies.noisy_network import noisy_network
from ecrl.policies.return_distribution import ReturnDistributionConfig, return_distribution
from ecrl.policies.visible import Names, visible_space
from ecrl.registry import InitOnly, register_policy
from ecrl.spaces import Discrete, Space


class QNetworkConfig(ReturnDistributionConfig):
    """Settings of the Q-network."""

    critic: NetworkConfig = Field(
        default_factory=default_network,
        description='Q-network, such as {"type": "mlp", "network_cfg": {...}}; two layers of 64 units if absent',
    )
    critic_obs: Names | None = Field(
        default=None,
        description=(
            "names of the observations that the Q-network reads, if the observation space is a Dict; all if absent"
        ),
    )
    dueling: bool = Field(
        default=False,
        description="predict the state's value and the advantages of the actions separately (dueling network)",
    )
    noisy: bool = Field(
        default=False, description="explore through noise with a learnt scale in the linear layers (noisy networks)"
    )
    noisy_std: Annotated[Positive | None, InitOnly()] = Field(
        default=None,
        description="initial scale of the noise, before the division by sqrt(inputs of a layer); 0.5 if absent",
    )

    @model_validator(mode="after")
    def _noise_settings(self) -> Self:
        if self.noisy_std is not None and not self.noisy:
            raise ValueError("noisy_std has no effect, because noisy is false; leave it out")
        return self


@register_policy("q_network")
def q_network(cfg: QNetworkConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build a policy for Discrete actions from a Q-network. The parameters are `critic`.

        action = argmax_a(Q(obs, a))
        Q(obs, a) = V(obs) + advantage(obs, a) - mean_b(advantage(obs, b))        if `dueling`

    With the probability `exploration["epsilon"]`, `explore` replaces the action of an environment by a uniformly random
    action. The output of `act` has the field `q`, the values of the actions, which `explore` reads. In this field,
    actions that the `action_mask` excludes have the value -inf, so `explore` does not take these actions.

    If `noisy` is True, the linear layers of the network have noise. The policy explores through this noise, so set
    epsilon to 0, as in the paper. `act` gives each environment its own noise in each step. Without noise, `act` and `q`
    use the means of the weights.

    Source: Mnih et al. 2013, arXiv:1312.5602; Wang et al. 2016, arXiv:1511.06581, eq. 9 (dueling); Fortunato et al.
    2018, arXiv:1706.10295 (noisy).
    """
    if not isinstance(action_space, Discrete):
        raise ConfigError(f"policy.name: q_network needs Discrete actions, got {action_space}; use another policy")
    if not cfg.clip_actions:
        raise ConfigError("policy.clip_actions: q_network has no Box actions to clip; leave it out")
    actions, distribution = head_width(action_space, cfg.action_dim), return_distribution(cfg)
    atoms = 1 if distribution is None else distribution.atoms
    has_mask = is_masked(observation_space, action_space)
    space = visible_space(observation_space, cfg.critic_obs, "critic_obs")
    outputs, key = (actions + cfg.dueling) * atoms, "policy.critic"
    noisy = noisy_network(cfg.critic, space, outputs, cfg.bf16, cfg.noisy_std or 0.5, key) if cfg.noisy else None
    network = make_network(cfg.critic, space, outputs, cfg.bf16, key) if noisy is None else noisy.mean

    def init(key: Tensor) -> TensorDict:
        with seeded(key):
            return TensorDict({"critic": network.init()}, []).to(key.device)

    def draw(keys: Tensor) -> Any:
        """Return the noise for random actions and, if `noisy`, for the network."""
        if noisy is None:
            return rng.gumbel(keys, (actions,))
        action_keys, network_keys = rng.split(keys)
        noise = {"action": rng.gumbel(action_keys, (actions,)), "network": noisy.draw(network_keys)}
        return TensorDict(noise, keys.shape)

    def of_all_actions(params: TensorDict, obs: Any, noise: Any) -> Tensor:
        """Return the values of all actions, or the atoms of their distributions: `[*B, actions, atoms]`."""
        if noisy is None or noise is None:
            out = network.forward(params["critic"], obs)
        else:
            out = noisy.forward(params["critic"], obs, noise["network"])
        out = out.reshape(*out.shape[:-1], actions + cfg.dueling, atoms)
        if not cfg.dueling:
            return out
        value, advantage = out.split([1, actions], -2)
        return value + advantage - advantage.mean(-2, keepdim=True)

    def q(params: TensorDict, obs: Any, action: Tensor | None, noise: Any) -> Tensor:
        out = of_all_actions(params, obs, noise)
        if action is not None:
            index = action[..., None, None].expand(*action.shape, 1, atoms)
            out = out.gather(-2, index).squeeze(-2)
        return (out.squeeze(-1) if distribution is None else out).unsqueeze(0)

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Any) -> tuple[TensorDict, TensorDict]:
        out = of_all_actions(params, obs, noise)
        values = out.squeeze(-1) if distribution is None else distribution.mean(out)
        if has_mask:
            values = values.masked_fill(~obs["action_mask"], -torch.inf)
        return carry, TensorDict({"action": values.argmax(-1), "q": values}, values.shape[:-1])

    def explore(
        params: TensorDict, exploration: TensorDict, out: TensorDict, noise: Any
    ) -> tuple[TensorDict, TensorDict]:
        gumbel = noise if noisy is None else noise["action"]
        action = epsilon_greedy(out["q"], gumbel, epsilon=exploration["epsilon"])
        return exploration, out.copy().set("action", action)

    return Policy(init, draw, act, None, None, explore=explore, q=q, distribution=distribution, noisy=cfg.noisy)
