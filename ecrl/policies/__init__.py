"""Policies as records of pure functions; importing this package registers the built-in ones."""

from ecrl.config import PolicyConfig
from ecrl.policies.actor_critic import ActorCriticConfig, actor_critic
from ecrl.policies.core import Policy, flatten
from ecrl.policies.mlp import MLPConfig, NetworkConfig, build_mlp
from ecrl.registry import lookup
from ecrl.spaces import Space
from ecrl.strict import checked

__all__ = [
    "ActorCriticConfig",
    "MLPConfig",
    "NetworkConfig",
    "Policy",
    "actor_critic",
    "build_mlp",
    "flatten",
    "make_policy",
]


def make_policy(cfg: PolicyConfig | dict, observation_space: Space, action_space: Space) -> Policy:
    """The policy of a config's `policy` section for these spaces; equal settings give the same object.

    >>> from ecrl import rng
    >>> from ecrl.envs import make_env
    >>> env = make_env("cartpole")
    >>> net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}
    >>> cfg = {"name": "actor_critic", "actor": net, "critic": net}
    >>> policy = make_policy(cfg, env.observation_space, env.action_space)
    >>> sorted(policy.init(rng.key(0)).keys())
    ['actor', 'critic']
    """
    cfg = checked(PolicyConfig, cfg, "policy")
    return lookup("policy", cfg.name).make(cfg, observation_space, action_space)
