"""A trained policy as files that run without ecrl: `policy.pt2` (torch.export), `policy.onnx`, and `policy.json`.

What is written maps raw observations to the action that the environment sees in evaluation: deterministic, with the
normaliser's statistics inside, Box actions held in their space. The first dimension of every input is any batch size.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ecrl.config import Config
from ecrl.envs import make_env
from ecrl.errors import UserError, extra
from ecrl.policies import acting_params, make_policy
from ecrl.spaces import Box, Dict, Space

_ROWS = 3  # of the example batch; torch.export would take 0 and 1 for constants


def _parts(obs: Any) -> dict[str, Tensor]:
    """Inputs by name: the parts of a Dict observation, nested ones as "outer/inner"; else one called obs."""
    return {"obs": obs} if isinstance(obs, Tensor) else dict(obs.flatten_keys("/").items())


def _spaces(space: Space, name: str = "") -> dict[str, Space]:
    """The space of every input, by the same names."""
    if not isinstance(space, Dict):
        return {name or "obs": space}
    inner = (_spaces(part, f"{name}/{key}" if name else key) for key, part in space.items)
    return {key: part for parts in inner for key, part in parts.items()}


class _Acting(nn.Module):
    """`action(params, obs)` of named tensors; parameters are constants, so that only those it uses are written."""

    def __init__(self, action: Callable[[TensorDict, Any], Tensor], params: TensorDict):
        super().__init__()
        self.action, self.params = action, params

    def forward(self, /, **inputs: Tensor) -> Tensor:
        if inputs.keys() == {"obs"}:
            return self.action(self.params, inputs["obs"])
        obs = {tuple(name.split("/")): part for name, part in inputs.items()}
        return self.action(self.params, TensorDict(obs, [len(next(iter(inputs.values())))]))
