"""Policies as records of pure functions. Import this package to register the built-in policies."""

from dataclasses import replace

from ecrl.config import PolicyConfig
from ecrl.config.model import validate_section
from ecrl.policies.actor_critic import ActorCriticConfig, ActorOnlyConfig, actor_critic, actor_only
from ecrl.policies.checkpoint_folder import encode_instructions
from ecrl.policies.contract import check_functions
from ecrl.policies.convolutions import CNNConfig, ImpalaConfig, KeypointsConfig
from ecrl.policies.core import (
    Policy,
    acting_params,
    counted_tokens,
    fixed_params,
    flatten,
    policy_params,
    sum_tokens,
)
from ecrl.policies.frame_stack import stacked_space, with_frame_stack
from ecrl.policies.fused import EncoderConfig, FusedConfig
from ecrl.policies.low_rank import AdaptersConfig
from ecrl.policies.mlp import MLPConfig, build_mlp
from ecrl.policies.module import module_policy
from ecrl.policies.networks import NetworkConfig, make_network
from ecrl.policies.observation_norm import normalized
from ecrl.policies.openvla import OpenVLAConfig, save_openvla
from ecrl.policies.pi0 import Pi0Config, save_pi0
from ecrl.policies.q_network import QNetworkConfig, q_network
from ecrl.policies.recurrent import RecurrentConfig, recurrent
from ecrl.policies.twin_critic import (
    TwinCriticConfig,
    categorical_actor_critic,
    deterministic_actor_critic,
    squashed_actor_critic,
)
from ecrl.policies.vla import vla
from ecrl.policies.vla_builtin import BuiltinVLAConfig
from ecrl.policies.vla_config import VLAConfig, VLAPolicyConfig
from ecrl.registry import lookup
from ecrl.spaces import Space

__all__ = [
    "ActorCriticConfig",
    "ActorOnlyConfig",
    "AdaptersConfig",
    "BuiltinVLAConfig",
    "CNNConfig",
    "EncoderConfig",
    "FusedConfig",
    "ImpalaConfig",
    "KeypointsConfig",
    "MLPConfig",
    "NetworkConfig",
    "OpenVLAConfig",
    "Pi0Config",
    "Policy",
    "QNetworkConfig",
    "RecurrentConfig",
    "TwinCriticConfig",
    "VLAConfig",
    "VLAPolicyConfig",
    "acting_params",
    "actor_critic",
    "actor_only",
    "build_mlp",
    "categorical_actor_critic",
    "counted_tokens",
    "deterministic_actor_critic",
    "encode_instructions",
    "fixed_params",
    "flatten",
    "make_network",
    "make_policy",
    "module_policy",
    "normalized",
    "policy_params",
    "q_network",
    "recurrent",
    "save_openvla",
    "save_pi0",
    "squashed_actor_critic",
    "stacked_space",
    "sum_tokens",
    "vla",
    "with_frame_stack",
]


def make_policy(
    cfg: PolicyConfig | dict, observation_space: Space, action_space: Space, frame_stack: int = 1
) -> Policy:
    """Build the policy that a config's `policy` section describes. Equal settings and spaces give equal policies.

    If `frame_stack` is above 1, the networks of the policy see a stack of the latest `frame_stack` observations.

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
    seen = observation_space if frame_stack == 1 else stacked_space(observation_space, frame_stack)
    policy = lookup("policy", cfg.name).make(cfg, seen, action_space)
    check_functions(policy)
    policy = normalized(policy, observation_space) if cfg.normalize_obs else policy
    if frame_stack == 1:
        return policy
    stacked = with_frame_stack(policy, observation_space, frame_stack)
    return replace(stacked, init=policy.init, init_frozen=policy.init_frozen)  # equality ignores these two functions
