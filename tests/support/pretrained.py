"""Policies and runs of the policy `vla` with a tiny pretrained model, on the task `dots`."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, config_from_dict
from ecrl.policies import Policy, make_policy
from ecrl.spaces import Space, box
from support import dots
from support.checks import assert_pure

ACTIONS = box(-1.0, 1.0, 3, 2)
EMPTY = TensorDict({}, [])


def policy_of(
    backend: str, path: str, observations: Space, actions: Space = ACTIONS, section: Any = None, **changes: Any
) -> Policy:
    """Return a policy of a checkpoint. `changes` are settings of the backend, and `section` has other settings."""
    settings = {"name": "vla", "vla": {"backend": backend, "model_path": path} | changes}
    return make_policy(settings | (section or {}), observations, actions)


def params_of(policy: Policy, seed: int = 0) -> TensorDict:
    """Return trained and frozen parameters."""
    params = policy.init(rng.key(seed))
    return params.update(policy.init_frozen(torch.device("cpu")))


def acted(
    policy: Policy, params: TensorDict, size: int, n: int = 12, is_sampled: bool = True
) -> tuple[TensorDict, Tensor | TensorDict | None]:
    """Act on `n` scenes with images of `size` pixels. Return rows with the observations, and the noise."""
    obs = dots.scenes(rng.key(3), n, size)[0]
    noise = policy.draw(rng.split(rng.key(4), n)) if is_sampled else None
    carry, out = assert_pure(policy.act, params, EMPTY, obs, noise)
    assert carry.is_empty()
    return out.copy().update({"obs": obs, "done": torch.zeros(n, dtype=torch.bool)}), noise


def run_of(backend: str, path: str, algorithm: str, changes: dict[str, Any]) -> Config:
    """Return a short run on `dots` with chunks of 3 actions, with changes by dotted key. PPO has a critic."""
    settings: dict[str, Any] = {"n_epochs": 2, "batch_size": 16, "learning_rate": 1e-3}
    settings |= {"grpo": {"group_size": 4, "kl_coef": 0.02}, "bc": {"demos": "demos"}}.get(algorithm, {})
    vla = {"backend": backend, "model_path": path} | ({"critic": "mlp"} if algorithm == "ppo" else {})
    data = {
        "trainer": {"num_envs": 8, "buffer_size": 4, "iterations": 2, "compile": "off"},
        "env": {"name": dots.dots.__name__, "action_chunk": 3},
        "policy": {"name": "vla", "vla": vla},
        "algorithm": {"name": algorithm, "cfg": settings},
    }
    return config_from_dict(data, backend, changes)
