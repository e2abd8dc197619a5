"""Tuned settings of RL Baselines3 Zoo, by the config with the same task.

Source: `hyperparams/*.yml` of github.com/DLR-RM/rl-baselines3-zoo. The commits are 208b6fd (PPO), ce95481 (DQN),
c94924e (SAC), a02f4fb (TD3 on Pendulum), d29756c (TD3 on MuJoCo's tasks) and 1159e28 (DDPG). `n_timesteps` is left out:
here a run has the budget of the config. `normalize` is VecNormalize of observations and rewards, with the gamma of PPO.
A number with "lin_" falls to 0 over the budget. The zoo has LunarLander-v2, HalfCheetah-v4, Hopper-v4 and, for TD3 and
DDPG, Pendulum-v0.
"""

from typing import Any, NamedTuple


class Settings(NamedTuple):
    """Settings of PPO. `ppo` are arguments of Stable-Baselines3's PPO; all other arguments have their defaults."""

    env: str
    n_envs: int
    normalize: bool
    ppo: dict[str, Any]


class ReplaySettings(NamedTuple):
    """Settings of an algorithm that learns from replay, with one environment.

    `arguments` are arguments of Stable-Baselines3's class `algorithm`. `noise_std` is the standard deviation of the
    normal noise that explores, if not None.
    """

    env: str
    algorithm: str
    noise_std: float | None
    arguments: dict[str, Any]


_DQN = {"learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 0, "gamma": 0.99} | {
    "target_update_interval": 250,
    "train_freq": 4,
    "gradient_steps": -1,
    "exploration_fraction": 0.12,
    "exploration_final_eps": 0.1,
    "policy_kwargs": {"net_arch": [256, 256]},
}
_PENDULUM = {"learning_rate": 1e-3, "buffer_size": 200_000, "learning_starts": 10_000, "gamma": 0.98} | {
    "train_freq": (1, "episode"),
    "gradient_steps": -1,
    "policy_kwargs": {"net_arch": [400, 300]},
}

_MUJOCO_SAC = {"learning_rate": 3e-4, "learning_starts": 10_000}
_MUJOCO_TD3 = {"learning_rate": 1e-3, "learning_starts": 10_000, "batch_size": 256, "train_freq": 1} | {
    "gradient_steps": 1,
    "policy_kwargs": {"net_arch": [400, 300]},
}

ZOO: dict[str, Settings | ReplaySettings] = {
    "cartpole_ppo": Settings(
        "CartPole-v1",
        8,
        False,
        {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.8}
        | {"ent_coef": 0.0, "learning_rate": "lin_0.001", "clip_range": "lin_0.2"},
    ),
    "acrobot_ppo": Settings(
        "Acrobot-v1",
        16,
        True,
        {"n_steps": 256, "n_epochs": 4, "gamma": 0.99, "gae_lambda": 0.94, "ent_coef": 0.0},
    ),
    "mountain_car_continuous_ppo": Settings(
        "MountainCarContinuous-v0",
        1,
        True,
        {"n_steps": 8, "batch_size": 256, "n_epochs": 10, "gamma": 0.9999, "gae_lambda": 0.9}
        | {"ent_coef": 0.00429, "learning_rate": 7.77e-05, "clip_range": 0.1, "max_grad_norm": 5, "vf_coef": 0.19}
        | {"use_sde": True, "policy_kwargs": {"log_std_init": -3.29, "ortho_init": False}},
    ),
    "pendulum_ppo": Settings(
        "Pendulum-v1",
        4,
        False,
        {"n_steps": 1024, "n_epochs": 10, "gamma": 0.9, "gae_lambda": 0.95, "ent_coef": 0.0}
        | {"learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4},
    ),
    "lunar_lander_ppo": Settings(
        "LunarLander-v3",
        16,
        False,
        {"n_steps": 1024, "batch_size": 64, "n_epochs": 4, "gamma": 0.999, "gae_lambda": 0.98, "ent_coef": 0.01},
    ),
    "half_cheetah_ppo": Settings(
        "HalfCheetah-v5",
        1,
        True,
        {"n_steps": 512, "batch_size": 64, "n_epochs": 20, "gamma": 0.98, "gae_lambda": 0.92}
        | {"ent_coef": 0.000401762, "learning_rate": 2.0633e-05, "clip_range": 0.1}
        | {"max_grad_norm": 0.8, "vf_coef": 0.58096}
        | {
            "policy_kwargs": {
                "log_std_init": -2,
                "ortho_init": False,
                "activation_fn": "ReLU",
                "net_arch": {"pi": [256, 256], "vf": [256, 256]},
            }
        },
    ),
    "cartpole_dqn": ReplaySettings(
        "CartPole-v1",
        "DQN",
        None,
        {"learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99}
        | {"target_update_interval": 10, "train_freq": 256, "gradient_steps": 128}
        | {"exploration_fraction": 0.16, "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]}},
    ),
    "acrobot_dqn": ReplaySettings("Acrobot-v1", "DQN", None, _DQN),
    "lunar_lander_dqn": ReplaySettings("LunarLander-v3", "DQN", None, _DQN),
    "half_cheetah_sac": ReplaySettings("HalfCheetah-v5", "SAC", None, _MUJOCO_SAC),
    "half_cheetah_td3": ReplaySettings("HalfCheetah-v5", "TD3", 0.1, _MUJOCO_TD3),
    "hopper_sac": ReplaySettings("Hopper-v5", "SAC", None, _MUJOCO_SAC),
    "hopper_td3": ReplaySettings("Hopper-v5", "TD3", 0.1, _MUJOCO_TD3),
    "pendulum_sac": ReplaySettings("Pendulum-v1", "SAC", None, {"learning_rate": 1e-3}),
    "pendulum_td3": ReplaySettings("Pendulum-v1", "TD3", 0.1, _PENDULUM),
    "pendulum_ddpg": ReplaySettings("Pendulum-v1", "DDPG", 0.1, _PENDULUM),
}
