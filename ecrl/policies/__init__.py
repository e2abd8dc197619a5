"""Policies as records of pure functions. `make_policy` makes a policy from its name and its settings.

Each built-in policy and network is defined in a module such as `ecrl.policies.actor_critic` or `ecrl.policies.mlp`. The
registry imports the module when the policy or the network is first looked up.
"""

from ecrl.config import PolicyConfig
from ecrl.config.model import validate_section
from ecrl.policies.checkpoint_folder import encode_instructions
from ecrl.policies.contract import check_functions
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
from ecrl.policies.module import module_policy
from ecrl.policies.networks import NetworkConfig, make_network
from ecrl.policies.observation_norm import normalized
from ecrl.policies.vla_config import VLAConfig
from ecrl.registry import lookup
from ecrl.spaces import Space

__all__ = [
    "NetworkConfig",
    "Policy",
    "VLAConfig",
    "acting_params",
    "counted_tokens",
    "encode_instructions",
    "fixed_params",
    "flatten",
    "make_network",
    "make_policy",
    "module_policy",
    "normalized",
    "policy_params",
    "stacked_space",
    "sum_tokens",
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
    return policy if frame_stack == 1 else with_frame_stack(policy, observation_space, frame_stack)
