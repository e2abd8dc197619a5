"""A policy on random features that do not learn: for tests of frozen parameters."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config, PolicyConfig
from ecrl.policies import Policy
from ecrl.policies.heads import headed, make_head
from ecrl.registry import register_policy
from ecrl.spaces import Space, flat_dim
from support.small_runs import small

FEATURES = 16


def body_for(inputs: int, device: torch.device) -> TensorDict:
    return TensorDict({"body": {"weight": rng.normal(rng.key(3), (inputs, FEATURES)).to(device)}}, [])


@register_policy("frozen_body", override=True)
def frozen_body(cfg: PolicyConfig, observation_space: Space, action_space: Space) -> Policy:
    """Linear actor and critic on tanh(obs @ W), with a fixed W."""
    inputs, outputs = flat_dim(observation_space), flat_dim(action_space)

    def init(key: Tensor) -> TensorDict:
        keys = rng.split(key, 2)
        actor, critic = (0.1 * rng.normal(k, (FEATURES, n)) for k, n in zip(keys, (outputs, 1), strict=True))
        return TensorDict({"actor": actor, "critic": critic}, [])

    def features(params: TensorDict, obs: Tensor) -> Tensor:
        return torch.tanh(obs @ params["body", "weight"])

    def output(params: TensorDict, obs: Any) -> tuple[None, Tensor]:
        return None, features(params, obs) @ params["actor"]

    def value(params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
        return (features(params, obs) @ params["critic"]).squeeze(-1)

    policy = headed(make_head(action_space, squash=False), init, output, value)
    return Policy(**{**vars(policy), "init_frozen": lambda device: body_for(inputs, device)})


def freezing(**changes: Any) -> Config:
    """PPO on CartPole with the frozen features, eager, with dotted keys changed."""
    return small(**{"policy": {"name": "frozen_body"}, **changes})
