"""Any `nn.Module` as a policy: one whose `forward` gives what a distribution is made of, or one that acts for itself.

A module sees observations as their space has them, `[B, *shape]` of a Box, int64 of choices, a TensorDict of a Dict,
always with one batch axis. Its weights are `params["module"]`, under the names of its `state_dict`.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.errors import ConfigError
from ecrl.policies.acting_module import acting_policy, has_shape, initial
from ecrl.policies.core import Policy, example, one_batch
from ecrl.policies.heads import head_width, headed, is_masked, make_head
from ecrl.policies.networks import Pure, pure, seeded
from ecrl.spaces import Box, Space


def module_policy(
    make: Callable[[], nn.Module],
    cfg: PolicyConfig,
    observation_space: Space,
    action_space: Space,
    *,
    squash: bool = False,
) -> Policy:
    """The policy of the modules that `make` builds, for a function registered with `register_policy`.

    A module with `forward(obs)` alone returns `(output, value)` or `(output, value, log_std)`: `output` `[B, A]` is
    the mean of Box actions, flattened, or the logits of choices, one after another; `value` `[B]`, or None without a
    critic; `log_std` `[A]` or `[B, A]`, held within -5 and 2, is that of Box actions, and may instead be a parameter of
    the module by this name. Choices are masked by `obs["action_mask"]` where there is one.

    A module with `get_action(tensordict, deterministic=False)` and `evaluate_actions(tensordict)`, and `get_value(
    tensordict)` if it has a critic, acts for itself. They read "obs" (and "action") `[B, ...]`, and write into the
    tensordict, or return in one, "action" and "sample_log_prob"; "log_prob" and "entropy"; "value", each `[B]`. What it
    draws from torch's global generator is seeded from the key of the first environment, so that equal keys give equal
    actions; this runs eager. If `get_action` takes `noise` too, it gets `[B, A]` standard normal numbers for Box
    actions and Gumbel ones for choices (None if deterministic), must draw nothing else, and runs compiled.

    Args:
        make: builds the module with fresh weights.
        cfg: of the policy; `bf16` and `action_dim` are used here.
        observation_space: what the module sees.
        action_space: what it acts in.
        squash: squash Box actions by tanh into their space; for modules with `forward` alone.

    Raises: ConfigError naming the method and field that is missing or has another shape, or a layer in training mode
        that makes outputs depend on the batch or on chance, such as BatchNorm.

    >>> from ecrl import rng, spaces
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.body, self.logits, self.value = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 1)
    ...     def forward(self, obs):
    ...         h = self.body(obs).tanh()
    ...         return self.logits(h), self.value(h).squeeze(-1)
    >>> cfg, obs_space = PolicyConfig.model_construct(name="net"), spaces.box(-1.0, 1.0, 3)
    >>> policy = module_policy(Net, cfg, obs_space, spaces.Discrete(2))
    >>> policy.value(policy.init(rng.key(0)), TensorDict({}, []), torch.zeros(5, 3)).shape
    torch.Size([5])
    """
    name = f"policy {cfg.name!r}"
    net, width = pure(make, name, cfg.bf16), head_width(action_space, cfg.action_dim)
    told = f"{name}: {type(net.module).__name__}"
    if not hasattr(net.module, "get_action"):
        return _forward_policy(net, told, observation_space, action_space, width, squash)
    if squash:
        raise ConfigError(f"{told}.get_action makes its own actions; squash is for modules with forward alone")
    return acting_policy(net, told, observation_space, action_space)


def _forward_policy(
    net: Pure, told: str, observation_space: Space, action_space: Space, width: int, squash: bool
) -> Policy:
    head, masked = make_head(action_space, squash), is_masked(observation_space, action_space)
    critic = _check_forward(net, told, observation_space, action_space, width)

    def outputs(params: TensorDict, obs: Any) -> tuple[Tensor, Any, Tensor | None]:
        rows, batch = one_batch(obs, observation_space)
        out, value, *third = net.forward(params["module"], rows)
        out = out.reshape((*batch, width))
        if not isinstance(action_space, Box):
            return k.mask_logits(out, obs["action_mask"]) if masked else out, value, None
        log_std = third[0] if third else cast(TensorDict, params["module"])["log_std"]
        return out, value, log_std.reshape((*batch, width)) if log_std.ndim == 2 else log_std

    def output(params: TensorDict, obs: Any) -> tuple[Tensor | None, Tensor]:
        out, _, log_std = outputs(params, obs)
        return log_std, out

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        out, value, _ = outputs(params, obs)
        return value.reshape(out.shape[:-1])

    return headed(head, initial(net), output, value if critic else None)


def _check_forward(net: Pure, told: str, observation_space: Space, action_space: Space, width: int) -> bool:
    """Call a module once, to say by name what it should have returned; whether it has a critic."""
    weights, told_forward = cast(TensorDict, initial(net)(rng.key(0))["module"]), f"{told}.forward"
    with torch.no_grad(), seeded(rng.key(0)):
        out = net.forward(weights, example(observation_space))
    if not isinstance(out, tuple) or len(out) not in (2, 3):
        given = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
        raise ConfigError(f"{told_forward} returns {given}, expected (output, value) or (output, value, log_std)")
    has_shape(f"{told_forward}: output", out[0], [2, width])
    if out[1] is not None:
        has_shape(f"{told_forward}: value", out[1], [2])
    if len(out) == 3:
        if not isinstance(action_space, Box):
            raise ConfigError(f"{told_forward}: log_std is for Box actions, not {action_space}; return (output, value)")
        has_shape(f"{told_forward}: log_std", out[2], [width], [2, width])
    elif isinstance(action_space, Box):
        if "log_std" not in weights:
            advice = f"give the module `self.log_std = nn.Parameter(torch.zeros({width}))`, or return it third"
            raise ConfigError(f"{told}: no log_std for Box actions; {advice}")
        has_shape(f"{told}.log_std", weights["log_std"], [width])
    return out[1] is not None
