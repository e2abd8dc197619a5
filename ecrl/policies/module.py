"""Build a policy from any `nn.Module` whose `forward` returns distribution parameters or whose methods choose actions.

A module receives observations with one batch axis: `[B, *shape]` for a Box, int64 indices for Discrete and
MultiDiscrete, and a TensorDict for a Dict. The trained weights of the module are stored in `params["module"]`, under
their `state_dict` names. Buffers and weights that require no gradient are constants (see `pure`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.distributions import Distribution

from ecrl import kernels as k
from ecrl import rng
from ecrl.config import PolicyConfig
from ecrl.errors import ConfigError
from ecrl.policies.core import Policy, example, one_batch
from ecrl.policies.heads import head_width, headed, is_masked, make_head
from ecrl.policies.networks import Pure, floats_as, pure, seeded
from ecrl.spaces import Box, Space, element_shape
from ecrl.tracing_state import in_graph


def module_policy(
    make: Callable[[], nn.Module],
    cfg: PolicyConfig,
    observation_space: Space,
    action_space: Space,
    *,
    squash: bool = False,
) -> Policy:
    """Build a policy from the modules that `make` builds.

    Call `module_policy` inside a function that is registered with `register_policy`.

    A module that defines only `forward(obs)` returns `(output, value)` or `(output, value, log_std)`:

    - `output`, of shape `[B, A]`: for Box actions, the mean of the Gaussian, flattened (with `squash`, the mean before
      tanh); for discrete actions, the concatenated logits;
    - `value`, of shape `[B]`, or None for a module without a critic;
    - `log_std`, of shape `[A]` or `[B, A]`, for Box actions, clamped to [-5, 2]. A module parameter named `log_std` may
      be used instead.

    An `action_mask` in the observations masks the logits.

    A module may instead choose its own actions. Each of its methods takes a tensordict with "obs" of shape `[B, ...]`,
    and writes its outputs into this tensordict or returns a new tensordict:

    - `get_action(tensordict, deterministic=False)` writes "action", and "sample_log_prob" of shape `[B]`;
    - `evaluate_actions(tensordict)` also reads "action", and writes "log_prob" and "entropy", each of shape `[B]`;
    - `get_value(tensordict)` writes "value", of shape `[B]`. Define `get_value` only for a module with a critic.

    A module that chooses its own actions draws from torch's global generator. ecrl seeds this generator from the key of
    the first environment, so equal keys give equal actions. ecrl does not compile a run with such a module. To let ecrl
    compile the run, give `get_action` a parameter `noise`, and use no other random numbers. `noise`, of shape `[B, A]`,
    is standard normal for Box actions and standard Gumbel for discrete actions. `noise` is None for a deterministic
    action.

    Args:
        make: function that builds the module with new weights.
        cfg: the policy's config. `module_policy` reads only `bf16`, `action_dim` and, for error messages, `name`.
        observation_space: space of the module's observations.
        action_space: space of the module's actions.
        squash: if True, squash Box actions into their space by tanh. Modules that choose their own actions do not
            support `squash`.

    Raises: ConfigError if a method does not return or write a field, or if a field has a wrong shape. `module_policy`
        also raises ConfigError if the output of a layer is random or depends on the rest of the batch. An example is
        BatchNorm in training mode.

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
    label = f"{name}: {type(net.module).__name__}"
    if not hasattr(net.module, "get_action"):
        return _forward_policy(net, label, observation_space, action_space, width, squash)
    if squash:
        raise ConfigError(f"{label}.get_action chooses its own actions, which squash cannot change; leave squash out")
    return _acting_policy(net, label, observation_space, action_space)


def _initial(net: Pure) -> Callable[[Tensor], TensorDict]:
    """Return the `init` of a policy whose parameters are a module's weights."""

    def init(key: Tensor) -> TensorDict:
        with seeded(key):
            return TensorDict({"module": net.init()}, []).to(key.device)

    return init


def _check_shape(label: str, value: Any, *expected: list[int]) -> None:
    """Raise ConfigError unless a module's output is a tensor of one of the expected shapes."""
    shapes = " or ".join(map(str, expected))
    if not isinstance(value, Tensor):
        raise ConfigError(f"{label} is a {type(value).__name__}, expected a tensor of shape {shapes}; return a tensor")
    if list(value.shape) not in expected:
        raise ConfigError(f"{label} has shape {list(value.shape)}, expected {shapes}; use this shape")


def _forward_policy(
    net: Pure, label: str, observation_space: Space, action_space: Space, width: int, squash: bool
) -> Policy:
    head, masked = make_head(action_space, squash), is_masked(observation_space, action_space)
    critic = _check_forward(net, label, observation_space, action_space, width)

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

    return headed(head, _initial(net), output, value if critic else None)


def _check_forward(net: Pure, label: str, observation_space: Space, action_space: Space, width: int) -> bool:
    """Call a module once and check its outputs. Return True if the module has a critic."""
    weights, forward_label = cast(TensorDict, _initial(net)(rng.key(0))["module"]), f"{label}.forward"
    with torch.no_grad(), seeded(rng.key(0)):
        out = net.forward(weights, example(observation_space))
    if not isinstance(out, tuple) or len(out) not in (2, 3):
        returned = f"{len(out)} values" if isinstance(out, tuple) else type(out).__name__
        raise ConfigError(
            f"{forward_label} returns {returned}, expected (output, value) or (output, value, log_std); without a "
            "critic, return None as the value"
        )
    _check_shape(f"{forward_label}: output", out[0], [2, width])
    if out[1] is not None:
        _check_shape(f"{forward_label}: value", out[1], [2])
    if len(out) == 3:
        if not isinstance(action_space, Box):
            raise ConfigError(
                f"{forward_label}: log_std is for Box actions, not {action_space}; return (output, value)"
            )
        _check_shape(f"{forward_label}: log_std", out[2], [width], [2, width])
    elif isinstance(action_space, Box):
        if "log_std" not in weights:
            advice = (
                f"give the module `self.log_std = nn.Parameter(torch.zeros({width}))`, or return it as third output"
            )
            raise ConfigError(f"{label}: no log_std for Box actions; {advice}")
        _check_shape(f"{label}.log_std", weights["log_std"], [width])
    return out[1] is not None


def _read_fields(label: str, out: Any, fields: dict[str, list[int]]) -> list[Tensor]:
    """Return the fields that a method wrote into its tensordict.

    Raises: ConfigError if a field is missing or has a wrong shape.
    """
    if not isinstance(out, TensorDictBase):
        needed = " and ".join(map(repr, fields))
        raise ConfigError(f"{label} returns a {type(out).__name__}, expected a TensorDict with {needed}; return one")
    missing = [field for field in fields if field not in out]
    if missing:
        wrote = ", ".join(sorted(map(str, out.keys())))
        raise ConfigError(f"{label}: did not write {' and '.join(map(repr, missing))}, only {wrote}; write all fields")
    for field, shape in fields.items():
        _check_shape(f"{label}: {field}", out[field], shape)
    return [out[field] for field in fields]


@contextmanager
def _without_argument_checks() -> Iterator[None]:
    """Disable the argument checks of torch.distributions inside the block. Graphs cannot run these checks."""
    before = getattr(Distribution, "_validate_args", __debug__)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _acting_policy(net: Pure, label: str, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy of a module that chooses its own actions. `label` names the module in error messages."""
    takes_noise = "noise" in signature(net.module.get_action).parameters  # pyright: ignore
    shape, head = element_shape(action_space), make_head(action_space, squash=False)

    def call_method(
        params: TensorDict, method: str, inputs: TensorDict, fields: dict, key: Tensor | None = None, **named: Any
    ) -> Any:
        weights = cast(TensorDict, params["module"])
        sample_weight = cast(Tensor, next(iter(weights.values())))
        key = rng.key(0, sample_weight.device) if key is None else key
        with (
            nullcontext() if takes_noise else seeded(key),
            _without_argument_checks() if is_exporting() or in_graph() else nullcontext(),
        ):
            out = net.call(weights, method, inputs, **named)
        outputs = _read_fields(f"{label}.{method}", inputs if out is None else out, fields)
        return [floats_as(sample_weight.dtype, field) for field in outputs]  # autocast may have changed the dtype

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        rows, batch = one_batch(obs, observation_space)
        n, key, named = rows.shape[0], None, {}
        if takes_noise:
            named = {"noise": None if noise is None else noise.reshape(n, noise.shape[-1])}
        elif noise is not None:
            key = noise.reshape(-1)[0]
        fields = {"action": [n, *shape], "sample_log_prob": [n]}
        inputs = TensorDict({"obs": rows}, [n])
        action, log_prob = call_method(params, "get_action", inputs, fields, key, deterministic=noise is None, **named)
        out = {"action": action.reshape((*batch, *shape)), "sample_log_prob": log_prob.reshape(batch)}
        return carry, TensorDict(out, batch)

    def evaluate(params: TensorDict, carry: TensorDict, steps: TensorDict) -> tuple[Tensor, Tensor]:
        rows, batch = one_batch(steps["obs"], observation_space)
        n = rows.shape[0]
        inputs = TensorDict({"obs": rows, "action": steps["action"].reshape((n, *shape))}, [n])
        log_prob, entropy = call_method(params, "evaluate_actions", inputs, {"log_prob": [n], "entropy": [n]})
        return log_prob.reshape(batch), entropy.reshape(batch)

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, observation_space)
        n = rows.shape[0]
        return call_method(params, "get_value", TensorDict({"obs": rows}, [n]), {"value": [n]})[0].reshape(batch)

    draw = head.noise if takes_noise else lambda keys: keys
    critic = value if hasattr(net.module, "get_value") else None
    policy = Policy(_initial(net), draw, act, evaluate, critic, compiles=takes_noise)
    _check_methods(policy, label, example(observation_space), isinstance(action_space, Box))
    return policy


def _check_methods(policy: Policy, label: str, obs: Any, is_box: bool) -> None:
    """Call each method of a module on example observations, so that an error names the faulty method and field."""
    params, empty = policy.init(rng.key(0)), TensorDict({}, [])
    with torch.no_grad():
        for noise in (None, policy.draw(torch.arange(2))):
            action = policy.act(params, empty, obs, noise)[1]["action"]
        if action.is_floating_point() != is_box:
            raise ConfigError(
                f"{label}.get_action: action is {action.dtype}, expected {'float' if is_box else 'int64'}; "
                "use this dtype"
            )
        cast(Any, policy.evaluate)(params, empty, TensorDict({"obs": obs, "action": action}, [2]))
        if policy.value is not None:
            policy.value(params, empty, obs)
