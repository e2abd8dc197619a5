"""Build a policy from a module with its own methods `get_action`, `evaluate_actions` and `get_value`.

`ecrl.policies.module` documents these methods. Each call passes the weights to use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.compiler import is_exporting
from torch.distributions import Distribution

from ecrl import rng
from ecrl.errors import ConfigError
from ecrl.policies.core import Policy, example, one_batch
from ecrl.policies.heads import make_head
from ecrl.policies.networks import Pure, floats_as, seeded
from ecrl.spaces import Box, Space, element_shape


def initial(net: Pure) -> Callable[[Tensor], TensorDict]:
    """Return the `init` of a policy whose parameters are a module's weights."""

    def init(key: Tensor) -> TensorDict:
        with seeded(key):
            return TensorDict({"module": net.init()}, []).to(key.device)

    return init


def has_shape(label: str, value: Any, *expected: list[int]) -> None:
    """Raise ConfigError unless a module's output is a tensor of one of the expected shapes."""
    given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if given not in expected:
        raise ConfigError(f"{label} has shape {given}, expected {' or '.join(map(str, expected))}")


def _read_fields(label: str, out: Any, fields: dict[str, list[int]]) -> list[Tensor]:
    """Return the fields that a method wrote into its tensordict. Raise ConfigError for a missing or misshapen field."""
    missing = [field for field in fields if not isinstance(out, TensorDictBase) or field not in out]
    if missing:
        wrote = ", ".join(sorted(map(str, out.keys()))) if isinstance(out, TensorDictBase) else type(out).__name__
        raise ConfigError(f"{label}: did not write {' and '.join(map(repr, missing))}, only {wrote}")
    for field, shape in fields.items():
        has_shape(f"{label}: {field}", out[field], shape)
    return [out[field] for field in fields]


@contextmanager
def _without_argument_checks() -> Iterator[None]:
    """Disable the argument checks of torch.distributions inside the block: torch.export cannot trace them."""
    before = Distribution._validate_args  # pyright: ignore
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def acting_policy(net: Pure, label: str, observation_space: Space, action_space: Space) -> Policy:
    """Build the policy of a module with its own methods; `label` names the module in messages."""
    takes_noise = "noise" in signature(net.module.get_action).parameters  # pyright: ignore
    shape, head = element_shape(action_space), make_head(action_space, squash=False)

    def call_method(
        params: TensorDict, method: str, given: Any, fields: dict, key: Tensor | None = None, **named: Any
    ) -> Any:
        weights = cast(TensorDict, params["module"])
        sample_weight = cast(Tensor, next(iter(weights.values())))
        key = rng.key(0, sample_weight.device) if key is None else key
        with (
            nullcontext() if takes_noise else seeded(key),
            _without_argument_checks() if is_exporting() else nullcontext(),
        ):
            out = net.call(weights, method, given, **named)
        outputs = _read_fields(f"{label}.{method}", given if out is None else out, fields)
        return [floats_as(sample_weight.dtype, field) for field in outputs]  # autocast may have changed the dtype

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        rows, batch = one_batch(obs, observation_space)
        n, key, named = rows.shape[0], None, {}
        if takes_noise:
            named = {"noise": None if noise is None else noise.reshape(n, noise.shape[-1])}
        elif noise is not None:
            key = noise.reshape(-1)[0]
        fields = {"action": [n, *shape], "sample_log_prob": [n]}
        given = TensorDict({"obs": rows}, [n])
        action, log_prob = call_method(params, "get_action", given, fields, key, deterministic=noise is None, **named)
        out = {"action": action.reshape((*batch, *shape)), "sample_log_prob": log_prob.reshape(batch)}
        return carry, TensorDict(out, batch)

    def evaluate(
        params: TensorDict, carry: TensorDict, obs: Any, action: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, batch = one_batch(obs, observation_space)
        n = rows.shape[0]
        given = TensorDict({"obs": rows, "action": action.reshape((n, *shape))}, [n])
        log_prob, entropy = call_method(params, "evaluate_actions", given, {"log_prob": [n], "entropy": [n]})
        return log_prob.reshape(batch), entropy.reshape(batch)

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, observation_space)
        n = rows.shape[0]
        return call_method(params, "get_value", TensorDict({"obs": rows}, [n]), {"value": [n]})[0].reshape(batch)

    draw = head.noise if takes_noise else lambda keys: keys
    critic = value if hasattr(net.module, "get_value") else None
    policy = Policy(initial(net), draw, act, evaluate, critic, compiles=takes_noise)
    _check(policy, label, example(observation_space), isinstance(action_space, Box))
    return policy


def _check(policy: Policy, label: str, obs: Any, is_box: bool) -> None:
    """Call each method of a module once, so that an error names the method and the field at fault."""
    params, empty = policy.init(rng.key(0)), TensorDict({}, [])
    with torch.no_grad():
        for noise in (None, policy.draw(torch.arange(2))):
            action = policy.act(params, empty, obs, noise)[1]["action"]
        if action.is_floating_point() != is_box:
            raise ConfigError(
                f"{label}.get_action: action is {action.dtype}, expected {'float' if is_box else 'int64'}"
            )
        policy.evaluate(params, empty, obs, action, torch.zeros(2, dtype=torch.bool))
        if policy.value is not None:
            policy.value(params, empty, obs)
