"""Stable-Baselines3's DQN, TD3 and SAC on one of Gymnasium's environments."""

from collections.abc import Callable
from typing import Any

from stable_baselines3 import DQN, SAC, TD3
from stable_baselines3.common.env_util import make_vec_env
from torch.nn import ReLU

from benchmarks.off_policy import BATCH, GAMMA, LEARNING_RATE, LEARNING_STARTS, TASK

_STEPS = 100


def model(name: str, units: int, capacity: int, seed: int) -> Any:
    """Return the model with the settings that all libraries share."""
    algorithm: Any = {"dqn": DQN, "td3": TD3, "sac": SAC}[name]
    return algorithm(
        "MlpPolicy",
        make_vec_env(f"{TASK[name]}-v1", n_envs=1, seed=seed),
        learning_rate=LEARNING_RATE,
        buffer_size=capacity,
        learning_starts=LEARNING_STARTS,
        batch_size=BATCH,
        gamma=GAMMA,
        train_freq=1,
        gradient_steps=1,
        policy_kwargs={"net_arch": [units, units], "activation_fn": ReLU},
        device="cpu",
        seed=seed,
    )


def make(name: str, units: int, capacity: int, seed: int = 0) -> Callable[[], int]:
    """Return a function that takes 100 environment steps with an update after each, and returns their number."""
    learner = model(name, units, capacity, seed)
    learner.learn(2 * LEARNING_STARTS)

    def work() -> int:
        learner.learn(_STEPS, reset_num_timesteps=False)
        return _STEPS

    return work
