"""Stable-Baselines3's PPO on a game of the package MinAtar, with the settings of a shipped config.

Both libraries have the same layers and initial weights, separate networks for actor and critic, and compute the
critic's value at a time limit. Stable-Baselines3 standardises the advantages over each minibatch, and ecrl's config
over each rollout.
"""

from typing import Any

from gymnasium import Env, spaces
from gymnasium.wrappers import TimeLimit
from minatar.gym import BaseEnv
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.utils import LinearSchedule
from torch import Tensor, nn

from benchmarks.learning import Report, Row, followed
from benchmarks.minatar import SIZES
from benchmarks.other_libraries.sb3_zoo import Reporting, ppo_numbers
from benchmarks.tasks import task_of
from ecrl import Config, load_config
from ecrl.algorithms.optimizer_config import OptimizerKwargs
from ecrl.config import total_steps


class Convolution(BaseFeaturesExtractor):
    """A convolution and a layer, with relu, of images with the channels last."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, SIZES.features)
        height, width, channels = observation_space.shape
        cells = (height - SIZES.kernel + 1) * (width - SIZES.kernel + 1)
        self.layers = nn.Sequential(
            nn.Conv2d(channels, SIZES.channels, SIZES.kernel),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(SIZES.channels * cells, SIZES.features),
            nn.ReLU(),
        )

    def forward(self, observations: Tensor) -> Tensor:
        """Return features `[B, features]` of images `[B, h, w, c]`."""
        return self.layers(observations.movedim(-1, 1))


def game(cfg: Config) -> Env:
    """Make the package's game with the settings of the config's environment."""
    name = cfg.env.name.removeprefix("minatar_")
    numbers: Any = cfg.env.cfg
    settings: dict[str, Any] = {"sticky_action_prob": numbers.sticky_action_prob}
    if hasattr(numbers, "difficulty_ramping"):
        settings["difficulty_ramping"] = numbers.difficulty_ramping
    env = BaseEnv(name, use_minimal_action_set=True, **settings)
    return env if numbers.max_episode_steps is None else TimeLimit(env, numbers.max_episode_steps)


def make_model(cfg: Config, seed: int) -> PPO:
    """Return a model with the environments of its training."""
    numbers: Any = cfg.algorithm.cfg
    return PPO(
        "MlpPolicy",
        make_vec_env(lambda: game(cfg), cfg.trainer.num_envs, seed),
        learning_rate=LinearSchedule(numbers.learning_rate, 0.0, 1.0),
        **ppo_numbers(cfg),
        policy_kwargs={
            "features_extractor_class": Convolution,
            "share_features_extractor": False,
            "net_arch": [],
            "activation_fn": nn.ReLU,
            "optimizer_kwargs": {"eps": OptimizerKwargs().eps},
        },
        seed=seed,
        device="cpu",
    )


def learn(config: str, seed: int, started: float | None = None) -> Row:
    """Train with a config's settings for its whole budget and return the learning curve."""
    cfg = load_config(config)

    def train(report: Report) -> None:
        model = make_model(cfg, seed)
        reporting = Reporting(report, lambda: game(cfg), seed)
        model.learn(total_steps(cfg, 1), callback=reporting)
        reporting.now()

    return followed(train, task_of(config), total_steps(cfg, 1), started)
