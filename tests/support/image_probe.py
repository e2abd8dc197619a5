"""An environment with images, in tensors and in Gymnasium, and a convolutional network, as a user writes them."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor, nn

from ecrl import rng
from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel, Count
from ecrl.envs import NEVER, Env, state_of
from ecrl.registry import register_env, register_network
from ecrl.spaces import Box, Dict, Discrete, Space, box, dict_space

PLACES = ((1, 1), (1, 6), (6, 1), (6, 6))
IMAGE = box(0, 255, 1, 8, 8, dtype=torch.uint8)
PARTS = dict_space({"camera": IMAGE, "state": box(-1.0, 1.0, 1)})


class ImageProbeConfig(ConfigModel):
    """The observation of the environment."""

    parts: bool = Field(False, description="observe a Dict of the image and a vector")


def image(place: Tensor) -> Tensor:
    """Images `[*B, 1, 8, 8]` with one bright pixel, at the place `[*B]`."""
    row, column = torch.tensor(PLACES)[place].unbind(-1)
    pixel = torch.nn.functional.one_hot(8 * row + column, 64)
    return (200 * pixel).to(torch.uint8).reshape(*place.shape, 1, 8, 8)


@register_env("image_probe")
def image_probe(cfg: ImageProbeConfig) -> Env:
    """A bright pixel is at one of four places. The action of its number gets 1, others 0. One step.

    With parts, the right action is 2 if the pixel is in the lower half, plus 1 if the vector is positive.
    """

    def reset(keys):
        place = rng.randint(keys, low=0, high=4)
        sign = 2.0 * rng.randint(rng.fold_in(keys, 1), low=0, high=2) - 1.0
        sign = sign.to(torch.float32).unsqueeze(-1)
        right = 2 * (place // 2) + (sign[..., 0] > 0) if cfg.parts else place
        obs = TensorDict({"camera": image(place), "state": sign}, keys.shape) if cfg.parts else image(place)
        return state_of(obs, keys.shape, right=right)

    def step(state, action, noise):
        reward = (action == state["right"]).to(torch.float32)
        return state.copy().update({"reward": reward, "terminated": torch.ones_like(state["terminated"])})

    return Env(reset, step, PARTS if cfg.parts else IMAGE, Discrete(4), min_truncation_gap=NEVER)


class TinyConvConfig(ConfigModel):
    """Size of the network."""

    channels: Count = Field(8, description="channels of the convolution")


class TinyConv(nn.Module):
    """A convolution on the image, and a linear layer on its features and the vectors."""

    def __init__(self, space: Space, channels: int, outputs: int):
        super().__init__()
        parts = dict(space.items) if isinstance(space, Dict) else {"": space}
        (self.camera,) = (name for name, part in parts.items() if isinstance(part, Box) and len(part.shape) == 3)
        self.vectors = [name for name in parts if name != self.camera]
        colors, height, width = parts[self.camera].shape
        numbers = sum(parts[name].shape[0] for name in self.vectors)
        self.conv = nn.Conv2d(colors, channels, 3, stride=2)
        pixels = channels * ((height - 1) // 2) * ((width - 1) // 2)
        self.body, self.output = nn.Linear(pixels + numbers, 32), nn.Linear(32, outputs)

    def forward(self, obs):
        camera = obs[self.camera] if self.camera else obs
        assert camera.dtype == torch.uint8, camera.dtype
        features = self.conv(camera / 255.0).relu().flatten(1)
        return self.output(self.body(torch.cat([features, *(obs[name] for name in self.vectors)], -1)).tanh())


@register_network("tiny_conv")
def tiny_conv(cfg: TinyConvConfig, space: Space, outputs: int) -> nn.Module:
    """Build TinyConv."""
    return TinyConv(space, cfg.channels, outputs)


class ImageProbe(gymnasium.Env):
    """The environment of tensors, for one. It shows all images in one memory."""

    observation_space, action_space = spaces.Box(0, 255, (1, 8, 8), np.uint8), spaces.Discrete(4)

    def __init__(self, parts=False):
        self._image = np.zeros((1, 8, 8), np.uint8)
        self._parts = parts
        if parts:
            state = spaces.Box(-1.0, 1.0, (1,), np.float64)
            self.observation_space = spaces.Dict({"camera": self.observation_space, "state": state})

    def _show(self):
        self._image[:] = 0
        self._image[0][PLACES[self._place]] = 200
        return {"camera": self._image, "state": np.array([self._sign])} if self._parts else self._image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._place, self._sign = int(self.np_random.integers(4)), float(2 * self.np_random.integers(2) - 1)
        return self._show(), {}

    def step(self, action):
        right = 2 * (self._place // 2) + (self._sign > 0) if self._parts else self._place
        return self._show(), float(action == right), True, False, {}


gymnasium.register("ImageProbe-v0", ImageProbe)
CONV = {"type": "tiny_conv", "network_cfg": {}}
MLP = {"type": "mlp", "network_cfg": {"hidden_sizes": [32]}}


def seeing(env="image_probe", parts=False, net=CONV, **changes) -> Config:
    """PPO on images, eager, with dotted keys changed."""
    where = {"kwargs": {"parts": parts}} if env.startswith("gymnasium:") else {"parts": parts}
    learning = {"n_epochs": 4, "batch_size": 128, "learning_rate": 0.005, "ent_coef": 0.02}
    base = {
        "trainer": {"num_envs": 128, "buffer_size": 2, "iterations": 25, "compile": "off", "enable_eval": False},
        "env": {"name": env, "cfg": where},
        "policy": {"name": "actor_critic", "actor": net, "critic": net},
        "algorithm": {"name": "ppo", "cfg": learning},
    }
    return config_from_dict(base).replace(**changes)
