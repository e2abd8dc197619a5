"""Stable-Baselines3's algorithms with its zoo's settings, on the budget of one of the shipped configs."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import stable_baselines3
import torch
from gymnasium import Env
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from benchmarks.learning import Report, Row, followed
from benchmarks.other_libraries.zoo import ZOO, ReplaySettings, Settings
from benchmarks.tasks import task_of
from ecrl.config import Config, load_config, total_steps

MakeEnv = str | Callable[[], Env]
"""The id of an environment of Gymnasium, or a function that makes one."""
_EVAL_ENVS = 10


def arguments(zoo: dict[str, Any]) -> dict[str, Any]:
    """Convert the zoo's settings to arguments of a model.

    >>> made = arguments({"learning_rate": "lin_0.001", "gamma": 0.9, "policy_kwargs": {"activation_fn": "ReLU"}})
    >>> made["learning_rate"](0.25), made["gamma"], made["policy_kwargs"]["activation_fn"].__name__
    (0.00025, 0.9, 'ReLU')
    """
    settings: dict[str, Any] = {
        name: _linear(value) if str(value).startswith("lin_") else value for name, value in zoo.items()
    }
    policy: dict[str, Any] = dict(settings.pop("policy_kwargs", {}))
    if "activation_fn" in policy:
        policy["activation_fn"] = getattr(torch.nn, policy["activation_fn"])
    return settings | {"policy_kwargs": policy}


def _linear(text: str) -> LinearSchedule:
    return LinearSchedule(float(text.removeprefix("lin_")), 0.0, 1.0)


def make_model(settings: Settings | ReplaySettings, seed: int) -> BaseAlgorithm:
    """Return a model with the environments of its training."""
    if isinstance(settings, Settings):
        envs: VecEnv = make_vec_env(settings.env, settings.n_envs, seed)
        envs = VecNormalize(envs, gamma=settings.ppo["gamma"]) if settings.normalize else envs
        return PPO("MlpPolicy", envs, seed=seed, device="cpu", **arguments(settings.ppo))
    envs, more = make_vec_env(settings.env, 1, seed), arguments(settings.arguments)
    if settings.noise_std is not None:
        zeros = np.zeros(cast(Any, envs.action_space).shape)
        more["action_noise"] = NormalActionNoise(zeros, zeros + settings.noise_std)
    return getattr(stable_baselines3, settings.algorithm)("MlpPolicy", envs, seed=seed, device="cpu", **more)


def evaluated(model: BaseAlgorithm, env: MakeEnv, seed: int, episodes: int) -> Row:
    """Return the mean return of episodes with deterministic actions and the observation statistics of training."""
    envs: VecEnv = make_vec_env(env, _EVAL_ENVS, seed)
    if isinstance(model.env, VecNormalize):
        envs = VecNormalize(envs, training=False, norm_reward=False)
        envs.obs_rms = model.env.obs_rms
    mean, _ = cast(tuple[float, float], evaluate_policy(model, envs, episodes, deterministic=True))
    envs.close()
    return {"return": float(mean)}


def ppo_numbers(cfg: Config) -> dict[str, Any]:
    """Return the settings of a PPO config of ecrl as keyword arguments of SB3's `PPO`, without the learning rate."""
    numbers: Any = cfg.algorithm.cfg
    return {
        "n_steps": cfg.trainer.buffer_size,
        "batch_size": numbers.batch_size,
        "n_epochs": numbers.n_epochs,
        "gamma": numbers.gamma,
        "gae_lambda": numbers.gae_lambda,
        "clip_range": numbers.clip_coef,
        "ent_coef": numbers.ent_coef,
        "vf_coef": numbers.vf_coef,
        "max_grad_norm": numbers.max_grad_norm,
    }


class Reporting(BaseCallback):
    """Callback that reports before every rollout, after the update of the previous one."""

    def __init__(self, report: Report, env: MakeEnv, seed: int):
        super().__init__()
        self.report, self.env, self.seed_of_run = report, env, seed

    def _on_rollout_start(self) -> None:
        self.now()

    def _on_step(self) -> bool:
        return True

    def now(self) -> None:
        """Report the env steps so far, with a function that evaluates the model."""

        def scores(episodes: int) -> Row:
            return evaluated(self.model, self.env, self.seed_of_run + 10_000, episodes)

        self.report(self.num_timesteps, scores)


def learn(config: str, seed: int, started: float | None = None) -> Row:
    """Train on a config's task until a rollout reaches the budget, and return the learning curve."""
    task = task_of(config)
    settings, budget = ZOO[task.config], total_steps(load_config(config), 1)

    def train(report: Report) -> None:
        model = make_model(settings, seed)
        reporting = Reporting(report, settings.env, seed)
        model.learn(budget, callback=reporting)
        reporting.now()

    return followed(train, task, budget, started)
