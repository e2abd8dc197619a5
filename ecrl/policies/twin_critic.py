"""Policies with an actor and one or several critics. One batched matrix product per layer evaluates all critics.

`deterministic_actor_critic` and `squashed_actor_critic` are for Box actions with finite bounds. A critic predicts the
mean or the distribution of the return, from an observation and an action. The networks use `unit_action`, the action
scaled to [-1, 1]:

    action = centre + half_width * unit_action

`categorical_actor_critic` is for Discrete actions. A critic predicts the values of all actions from an observation.
"""

from collections.abc import Callable
from functools import partial
from math import log, sqrt
from typing import Any, Literal, NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.config.model import Count
from ecrl.errors import ConfigError
from ecrl.policies.core import Policy, ReturnDistribution
from ecrl.policies.heads import bounded, from_unit, has_finite_bounds, head_width, is_masked, to_unit
from ecrl.policies.networks import NetworkConfig, Pure, default_network, make_network, seeded
from ecrl.policies.return_distribution import ReturnDistributionConfig, return_distribution
from ecrl.policies.visible import Names, visible_space
from ecrl.pytree import flatten, unflatten
from ecrl.registry import register_policy
from ecrl.spaces import Box, Dict, Discrete, Space, box, dict_space


class CriticsConfig(PolicyConfig):
    """Settings of the actor and of the critics. All critics have the same architecture, but different weights."""

    actor: NetworkConfig = Field(
        default_factory=default_network,
        description='actor network, such as {"type": "mlp", "network_cfg": {...}}; two layers of 64 units if absent',
    )
    critic: NetworkConfig = Field(
        default_factory=default_network,
        description='critic network, such as {"type": "mlp", "network_cfg": {...}}; two layers of 64 units if absent',
    )
    actor_obs: Names | None = Field(
        default=None,
        description="names of the observations that the actor reads, if the observation space is a Dict; all if absent",
    )
    critic_obs: Names | None = Field(
        default=None,
        description=(
            "names of the observations that the critics read, if the observation space is a Dict; all if absent"
        ),
    )
    num_critics: Count = Field(default=2, description="number of critics")


class TwinCriticConfig(CriticsConfig, ReturnDistributionConfig):
    """Settings of the policies for Box actions."""

    distribution: Literal["categorical"] | None = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None,
        description="kind of return distribution to predict: categorical (C51); if absent, predict the mean return",
    )


class Networks(NamedTuple):
    """Functions that both policies for Box actions share.

    Attributes:
        space: the action space.
        actions: number A of action dimensions.
        init: 0-d key -> params.
        actor: (params, obs) -> output of the actor network, `[*B, outputs]`.
        q: (params, obs, action, noise) -> Q `[C, *B]` of C critics, or logits `[C, *B, K]` of return distributions
            with K atoms.
        distribution: form of the return distributions; None if the critics predict values.
    """

    space: Box
    actions: int
    init: Callable[[Tensor], TensorDict]
    actor: Callable[[TensorDict, Any], Tensor]
    q: Callable[[TensorDict, Any, Tensor | None, Any], Tensor]
    distribution: ReturnDistribution | None


def _bounded_space(space: Space, name: str) -> Box:
    """Return the action space. Raise ConfigError unless the space is a float32 Box with finite bounds."""
    if not isinstance(space, Box) or space.dtype != torch.float32 or not has_finite_bounds(space):
        raise ConfigError(
            f"policy.name: {name} needs float32 Box actions with finite bounds, got {space}; use another policy"
        )
    return space


def _critic_inputs(space: Space, actions: int) -> Dict:
    """Return the input space of a critic: the observation, and the action scaled to [-1, 1] as the entry `action`."""
    parts = dict(space.items) if isinstance(space, Dict) else {"obs": space}
    if "action" in parts:
        raise ConfigError(
            "policy.critic_obs: a critic adds the entry 'action' to the observations; rename the observation 'action'"
        )
    return dict_space({**parts, "action": box(-1.0, 1.0, actions)})


def _init(actor: Pure, critic: Pure, num_critics: int, key: Tensor) -> TensorDict:
    """Return the weights of the actor and of the critics. Weights of critics have one entry per critic on axis 0."""
    with seeded(key):
        actor_weights = actor.init()
    weights = []
    for i in range(num_critics):
        with seeded(rng.fold_in(key, 1 + i)):
            weights.append(critic.init())
    stacked = {name: torch.stack([one[name] for one in weights]) for name in weights[0].keys()}  # noqa: SIM118
    return TensorDict({"actor": actor_weights, "critic": TensorDict(stacked, [])}, []).to(key.device)


def _of_critics(critic: Pure, weights: TensorDict, inputs: Any) -> Tensor:
    """Return the outputs `[C, *B, outputs]` of all critics, as one batched product per layer."""
    leaves, structure = flatten(weights)

    def of_one(*own: Tensor) -> Tensor:
        return critic.forward(unflatten(structure, own), inputs)

    return torch.func.vmap(of_one)(*leaves)


def _networks(cfg: TwinCriticConfig, observation_space: Space, action_space: Space, per_action: int) -> Networks:
    """Build the networks. The actor network has `per_action` outputs for each dimension of an action."""
    space = _bounded_space(action_space, cfg.name)
    if not cfg.clip_actions:
        raise ConfigError(
            f"policy.clip_actions: the actions of {cfg.name} are always inside their bounds; leave it out"
        )
    actions = head_width(space, cfg.action_dim)
    seen = visible_space(observation_space, cfg.actor_obs, "actor_obs")
    inputs_space = _critic_inputs(visible_space(observation_space, cfg.critic_obs, "critic_obs"), actions)
    actor = make_network(cfg.actor, seen, per_action * actions, cfg.bf16, "policy.actor")
    distribution = return_distribution(cfg)
    atoms = 1 if distribution is None else distribution.atoms
    critic = make_network(cfg.critic, inputs_space, atoms, cfg.bf16, "policy.critic")
    observed = [name for name, _ in inputs_space.items if name != "action"]

    def q(params: TensorDict, obs: Any, action: Tensor | None, noise: Any) -> Tensor:
        if action is None:
            raise ValueError(
                f"the critics of {cfg.name} need an action, because Box actions cannot be listed; pass one"
            )
        unit = to_unit(action, space)
        of_obs = {name: obs[name] for name in observed} if isinstance(observation_space, Dict) else {"obs": obs}
        inputs = TensorDict({**of_obs, "action": unit}, unit.shape[:-1])
        out = _of_critics(critic, params["critic"], inputs)
        return out.squeeze(-1) if distribution is None else out

    init = partial(_init, actor, critic, cfg.num_critics)
    return Networks(space, actions, init, lambda params, obs: actor.forward(params["actor"], obs), q, distribution)


def _uniform(noise: Tensor) -> Tensor:
    """Convert standard normal noise to uniform noise on [-1, 1], by the normal cumulative distribution function.

    >>> _uniform(torch.tensor([-9.0, 0.0, 9.0])).tolist()
    [-1.0, 0.0, 1.0]
    """
    return torch.erf(noise / sqrt(2.0))


@register_policy("deterministic_actor_critic")
def deterministic_actor_critic(cfg: TwinCriticConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy of DDPG and TD3. The parameters are `actor` and `critic`.

    The first axis of each tensor in `critic` has one entry per critic.

        unit_action = tanh(actor(obs))

    `explore` adds Gaussian noise with the standard deviation `exploration["std"]`, float `[N]`, in units of half the
    range of an action:

        unit_action = clip(unit_action + std * noise, -1, 1)

    If `exploration["random"]`, bool `[N]`, is True for an environment, the action of this environment is uniformly
    random instead.

    Source: Lillicrap et al. 2016, arXiv:1509.02971; Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1.
    """
    net = _networks(cfg, observation_space, action_space, 1)

    def draw(keys: Tensor) -> Tensor:
        return rng.normal(keys, (net.actions,))

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Any) -> tuple[TensorDict, TensorDict]:
        unit = torch.tanh(net.actor(params, obs))
        return carry, TensorDict({"action": from_unit(unit, net.space)}, unit.shape[:-1])

    def explore(
        params: TensorDict, exploration: TensorDict, out: TensorDict, noise: Tensor
    ) -> tuple[TensorDict, TensorDict]:
        unit = k.gaussian_action(to_unit(out["action"], net.space), noise, -1.0, 1.0, std=exploration["std"])
        unit = torch.where(exploration["random"].unsqueeze(-1), _uniform(noise), unit)
        return exploration, out.copy().set("action", from_unit(unit, net.space))

    return Policy(net.init, draw, act, None, None, explore=explore, q=net.q, distribution=net.distribution)


@register_policy("squashed_actor_critic")
def squashed_actor_critic(cfg: TwinCriticConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy of soft actor-critic. The parameters are `actor` and `critic`.

    The first axis of each tensor in `critic` has one entry per critic.

        mean, log_std = actor(obs)
        latent        = mean + exp(log_std) * noise        or `mean` without noise
        unit_action   = tanh(latent)

    `log_std` is clamped to [-5, 2]. The gradient of `act` flows through the action and `sample_log_prob`.
    `sample_log_prob` is the log-density of `unit_action`, in nats. `act` and `evaluate` compute this log-density from
    the latent, which is a field of the steps. Demonstrations have no latent, so `evaluate` then recovers the latent
    from the action. Near the bounds, a latent recovered from a float32 action is not exact. The entropy is the entropy
    of `unit_action`.

    If `exploration["random"]`, bool `[N]`, is True for an environment, `explore` takes a uniformly random action.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, app. C.
    """
    net = _networks(cfg, observation_space, action_space, 2)

    def draw(keys: Tensor) -> Tensor:
        return rng.normal(keys, (net.actions,))

    def latents(params: TensorDict, obs: Any) -> tuple[Tensor, Tensor]:
        """Return the mean and the log standard deviation of the latent, each `[*B, A]`."""
        mean, log_std = net.actor(params, obs).chunk(2, -1)
        return mean, bounded(log_std)

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        mean, log_std = latents(params, obs)
        unit, latent = k.tanh_normal_sample(mean, log_std, torch.zeros_like(mean) if noise is None else noise)
        log_prob = k.tanh_normal_log_prob(mean, log_std, latent)
        out = {"action": from_unit(unit, net.space), "sample_log_prob": log_prob, "latent": latent}
        return carry, TensorDict(out, log_prob.shape)

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        mean, log_std = latents(params, steps["obs"])
        latent = steps["latent"] if "latent" in steps else k.tanh_normal_latent(to_unit(steps["action"], net.space))
        return k.tanh_normal_log_prob(mean, log_std, latent), k.tanh_normal_entropy(mean, log_std)

    def explore(
        params: TensorDict, exploration: TensorDict, out: TensorDict, noise: Tensor
    ) -> tuple[TensorDict, TensorDict]:
        is_random, uniform = exploration["random"], _uniform(noise)
        where = is_random.reshape(*is_random.shape, *[1] * len(net.space.shape))
        new = {
            "action": torch.where(where, from_unit(uniform, net.space), out["action"]),
            "sample_log_prob": out["sample_log_prob"].masked_fill(is_random, -net.actions * log(2.0)),
            "latent": torch.where(is_random.unsqueeze(-1), k.tanh_normal_latent(uniform), out["latent"]),
        }
        return exploration, out.copy().update(new)

    return Policy(net.init, draw, act, evaluate, None, explore=explore, q=net.q, distribution=net.distribution)


@register_policy("categorical_actor_critic")
def categorical_actor_critic(cfg: CriticsConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy of soft actor-critic for Discrete actions.

    The parameters are `actor` and `critic`. The first axis of each tensor in `critic` has one entry per critic.

        logits = actor(obs)
        action = argmax_a(logits[a] + noise[a])        or argmax_a(logits[a]) without noise

    The output of `act` has the field `logits`, `[*B, A]`. The logits of actions that an `action_mask` excludes are set
    to the lowest finite value, so these actions have the probability 0.

    If `exploration["random"]`, bool `[N]`, is True for an environment, `explore` takes a uniformly random allowed
    action.

    Source: Christodoulou 2019, arXiv:1910.07207.
    """
    if not isinstance(action_space, Discrete):
        raise ConfigError(f"policy.name: {cfg.name} needs Discrete actions, got {action_space}; use another policy")
    if not cfg.clip_actions:
        raise ConfigError(f"policy.clip_actions: {cfg.name} has no Box actions to clip; leave it out")
    actions, has_mask = head_width(action_space, cfg.action_dim), is_masked(observation_space, action_space)
    actor_space = visible_space(observation_space, cfg.actor_obs, "actor_obs")
    critic_space = visible_space(observation_space, cfg.critic_obs, "critic_obs")
    actor = make_network(cfg.actor, actor_space, actions, cfg.bf16, "policy.actor")
    critic = make_network(cfg.critic, critic_space, actions, cfg.bf16, "policy.critic")

    def draw(keys: Tensor) -> Tensor:
        return rng.gumbel(keys, (actions,))

    def logits_of(params: TensorDict, obs: Any) -> Tensor:
        logits = actor.forward(params["actor"], obs)
        return k.mask_logits(logits, obs["action_mask"]) if has_mask else logits

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        logits = logits_of(params, obs)
        action = k.categorical_mode(logits) if noise is None else k.categorical_sample(logits, noise)
        out = {"action": action, "sample_log_prob": k.categorical_log_prob(logits, action), "logits": logits}
        return carry, TensorDict(out, action.shape)

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        logits = logits_of(params, steps["obs"])
        return k.categorical_log_prob(logits, steps["action"]), k.categorical_entropy(logits)

    def explore(
        params: TensorDict, exploration: TensorDict, out: TensorDict, noise: Tensor
    ) -> tuple[TensorDict, TensorDict]:
        logits = cast(Tensor, out["logits"])
        uniform = logits.masked_fill(logits > torch.finfo(logits.dtype).min, 0.0)
        logits = torch.where(exploration["random"].unsqueeze(-1), uniform, logits)
        action = k.categorical_sample(logits, noise)
        log_prob = k.categorical_log_prob(logits, action)
        return exploration, out.copy().update({"action": action, "sample_log_prob": log_prob})

    def q(params: TensorDict, obs: Any, action: Tensor | None, noise: Any) -> Tensor:
        values = _of_critics(critic, params["critic"], obs)
        if action is None:
            return values
        index = action.unsqueeze(-1).expand(*values.shape[:-1], 1)
        return values.gather(-1, index).squeeze(-1)

    return Policy(partial(_init, actor, critic, cfg.num_critics), draw, act, evaluate, None, explore=explore, q=q)
