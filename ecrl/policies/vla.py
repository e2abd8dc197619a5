"""The policy `vla`, which sees images, reads an instruction and chooses chunks of actions.

A backend builds the policy. `policy.vla.backend` is the name of the backend: `builtin`, `openvla`, `pi0`, or a backend
that another package registers with `ecrl.registry.register_vla_backend`.
"""

from ecrl.errors import ConfigError
from ecrl.policies.core import Policy
from ecrl.policies.heads import has_finite_bounds, head_width, is_masked
from ecrl.policies.vla_config import VLAPolicyConfig
from ecrl.registry import lookup, register_policy
from ecrl.spaces import Box, Space


@register_policy("vla")
def vla(cfg: VLAPolicyConfig, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy of the backend that the config names.

    Raises: ConfigError if the actions are not a Box of shape `[A]` or `[k, A]` with finite bounds, or if
        `action_horizon` is set and is not k. For the shape `[A]`, k is 1.
    """
    if not isinstance(action_space, Box) or len(action_space.shape) not in (1, 2) or 0 in action_space.shape:
        kind = f"{type(action_space).__name__} {list(getattr(action_space, 'shape', []))}"
        raise ConfigError(f"policy vla: expected Box actions [A] or chunks [k, A], got {kind}; use actor_critic")
    if not has_finite_bounds(action_space):
        raise ConfigError("policy vla: not all bounds of the action space are finite; give each entry finite bounds")
    head_width(action_space, cfg.action_dim)
    is_masked(observation_space, action_space)
    k = action_space.shape[0] if len(action_space.shape) == 2 else 1
    if cfg.vla.action_horizon not in (None, k):
        raise ConfigError(
            f"policy.vla.action_horizon: {cfg.vla.action_horizon}, but an action of the environment has {k} "
            f"step{'s' * (k > 1)}; set env.action_chunk to {cfg.vla.action_horizon}, or leave action_horizon out"
        )
    return lookup("vla_backend", cfg.vla.backend).make(cfg.vla, observation_space, action_space, cfg)
