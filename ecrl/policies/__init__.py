"""Policies as records of pure functions. Importing this package registers the built-in policies."""

from ecrl.config import PolicyConfig
from ecrl.config.model import validate_section
from ecrl.policies.actor_critic import ActorCriticConfig, ActorOnlyConfig, actor_critic, actor_only
from ecrl.policies.contract import check_functions
from ecrl.policies.core import Policy, acting_params, fixed_params, flatten, policy_params, sum_tokens
from ecrl.policies.mlp import MLPConfig, build_mlp
from ecrl.policies.module import module_policy
from ecrl.policies.networks import NetworkConfig, make_network
from ecrl.policies.observation_norm import normalized
from ecrl.policies.q_network import QNetworkConfig, q_network
from ecrl.policies.recurrent import RecurrentConfig, recurrent
from ecrl.policies.twin_critic import (
    TwinCriticConfig,
    categorical_actor_critic,
    deterministic_actor_critic,
    squashed_actor_critic,
)
from ecrl.registry import lookup
from ecrl.spaces import Space

__all__ = [
    "ActorCriticConfig",
    "ActorOnlyConfig",
    "MLPConfig",
    "NetworkConfig",
    "Policy",
    "QNetworkConfig",
    "RecurrentConfig",
    "TwinCriticConfig",
    "acting_params",
    "actor_critic",
    "actor_only",
    "build_mlp",
    "categorical_actor_critic",
    "deterministic_actor_critic",
    "fixed_params",
    "flatten",
    "make_network",
    "make_policy",
    "module_policy",
    "normalized",
    "policy_params",
    "q_network",
    "recurrent",
    "squashed_actor_critic",
    "sum_tokens",
]


def make_policy(cfg: PolicyConfig | dict, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy that a config's `policy` section describes. Equal settings and spaces give equal policies.

    >>> from ecrl import rng
    >>> from ecrl.envs import make_env
    >>> env = make_env("cartpole")
    >>> net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    >>> cfg = {"name": "actor_critic", "actor": net, "critic": net}
    >>> policy = make_policy(cfg, env.observation_space, env.action_space)
    >>> sorted(policy.init(rng.key(0)).keys())
    ['actor', 'critic']
    """
    cfg = validate_section(PolicyConfig, cfg, "policy")
    policy = lookup("policy", cfg.name).make(cfg, observation_space, action_space)
    check_functions(policy)
    return normalized(policy, observation_space) if cfg.normalize_obs else policy
