"""Stable-Baselines3's PPO over its DummyVecEnv of Gymnasium's CartPole."""

from collections.abc import Callable, Iterator

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.other_libraries import STEPS, as_work


def iterations(num_envs: int, seed: int = 0) -> Iterator[float]:
    """Yield the mean return of the last 100 episodes after each rollout and its update."""
    model = PPO(
        "MlpPolicy",  # separate 64x64 tanh networks
        make_vec_env("CartPole-v1", n_envs=num_envs, seed=seed),
        learning_rate=1e-3,
        n_steps=STEPS,
        batch_size=num_envs * STEPS // 4,
        n_epochs=4,
        ent_coef=0.01,
        device="cpu",
        seed=seed,
    )
    while True:
        model.learn(num_envs * STEPS, reset_num_timesteps=False)
        yield float(np.mean([episode["r"] for episode in model.ep_info_buffer or []] or [np.nan]))


def make(num_envs: int) -> Callable[[], int]:
    """Return a function that runs one rollout and its update, and returns the number of environment steps."""
    return as_work(iterations(num_envs), num_envs * STEPS)
