"""A module that acts for itself, by `get_action`, `evaluate_actions` and `get_value`, as a policy.

What `ecrl.policies.module` says of them holds here; its methods are called on weights that come with each call.
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
    """The `init` of a policy whose parameters are a module's."""

    def init(key: Tensor) -> TensorDict:
        with seeded(key):
            return TensorDict({"module": net.init()}, []).to(key.device)

    return init


def has_shape(told: str, value: Any, *expected: list[int]) -> None:
    """Refuse what a module gave if it is no tensor of one of the shapes."""
    given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if given not in expected:
        raise ConfigError(f"{told} has shape {given}, expected {' or '.join(map(str, expected))}")


def _written(told: str, out: Any, fields: dict[str, list[int]]) -> list[Tensor]:
    """What a method should have written."""
    missing = [field for field in fields if not isinstance(out, TensorDictBase) or field not in out]
    if missing:
        wrote = ", ".join(sorted(map(str, out.keys()))) if isinstance(out, TensorDictBase) else type(out).__name__
        raise ConfigError(f"{told}: wrote no {' and no '.join(map(repr, missing))}, only {wrote}")
    for field, shape in fields.items():
        has_shape(f"{told}: {field}", out[field], shape)
    return [out[field] for field in fields]


@contextmanager
def _unchecked() -> Iterator[None]:
    """torch.distributions without looks at the numbers of their arguments, which torch.export cannot write."""
    before = Distribution._validate_args  # pyright: ignore
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def acting_policy(net: Pure, told: str, observation_space: Space, action_space: Space) -> Policy:
    """The policy of a module with methods of its own; `told` names it in messages."""
    takes_noise = "noise" in signature(net.module.get_action).parameters  # pyright: ignore
    shape, head = element_shape(action_space), make_head(action_space, squash=False)

    def ask(params: TensorDict, method: str, given: Any, fields: dict, key: Tensor | None = None, **named: Any) -> Any:
        weights = cast(TensorDict, params["module"])
        one = cast(Tensor, next(iter(weights.values())))
        key = rng.key(0, one.device) if key is None else key
        with nullcontext() if takes_noise else seeded(key), _unchecked() if is_exporting() else nullcontext():
            out = net.call(weights, method, given, **named)
        written = _written(f"{told}.{method}", given if out is None else out, fields)
        return [floats_as(one.dtype, field) for field in written]  # what was written under autocast need not have it

    def act(params: TensorDict, carry: TensorDict, obs: Any, noise: Tensor | None) -> tuple[TensorDict, TensorDict]:
        rows, batch = one_batch(obs, observation_space)
        n, key, named = rows.shape[0], None, {}
        if takes_noise:
            named = {"noise": None if noise is None else noise.reshape(n, noise.shape[-1])}
        elif noise is not None:
            key = noise.reshape(-1)[0]
        fields = {"action": [n, *shape], "sample_log_prob": [n]}
        given = TensorDict({"obs": rows}, [n])
        action, log_prob = ask(params, "get_action", given, fields, key, deterministic=noise is None, **named)
        out = {"action": action.reshape((*batch, *shape)), "sample_log_prob": log_prob.reshape(batch)}
        return carry, TensorDict(out, batch)

    def evaluate(
        params: TensorDict, carry: TensorDict, obs: Any, action: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, batch = one_batch(obs, observation_space)
        n = rows.shape[0]
        given = TensorDict({"obs": rows, "action": action.reshape((n, *shape))}, [n])
        log_prob, entropy = ask(params, "evaluate_actions", given, {"log_prob": [n], "entropy": [n]})
        return log_prob.reshape(batch), entropy.reshape(batch)

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        rows, batch = one_batch(obs, observation_space)
        n = rows.shape[0]
        return ask(params, "get_value", TensorDict({"obs": rows}, [n]), {"value": [n]})[0].reshape(batch)

    draw = head.noise if takes_noise else lambda keys: keys
    critic = value if hasattr(net.module, "get_value") else None
    policy = Policy(initial(net), draw, act, evaluate, critic, compiles=takes_noise)
    _check(policy, told, example(observation_space), isinstance(action_space, Box))
    return policy


def _check(policy: Policy, told: str, obs: Any, is_box: bool) -> None:
    """Call a module's methods once, to say by name what they should have written."""
    params, empty = policy.init(rng.key(0)), TensorDict({}, [])
    with torch.no_grad():
        for noise in (None, policy.draw(torch.arange(2))):
            action = policy.act(params, empty, obs, noise)[1]["action"]
        if action.is_floating_point() != is_box:
            raise ConfigError(f"{told}.get_action: action is {action.dtype}, expected {'float' if is_box else 'int64'}")
        policy.evaluate(params, empty, obs, action, torch.zeros(2, dtype=torch.bool))
        if policy.value is not None:
            policy.value(params, empty, obs)
