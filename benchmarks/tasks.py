"""The target of each shipped config: its score, the threshold of a solved task, and the environment of the evaluation.

The learning tests, the figures in docs/results.md and `ecrl bench results` all use this table of thresholds.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.pairs import ROOT
from ecrl.config import Config

CONFIGS = ROOT / "configs"
POINTS = 40
"""Maximum number of evaluations in a run, about evenly spaced over its budget."""
EPISODES = {"return": (20, 100), "success": (100, 500)}
"""Number of episodes per evaluation for each score: during training, and after it. Actions are deterministic."""


class Task(NamedTuple):
    """Config and its target. `env` is Gymnasium's environment for evaluation, or None for the training environment."""

    config: str
    score: Literal["return", "success"]
    threshold: float | None
    env: str | None = None


TASKS = {
    task.config: task
    for task in (
        Task("cartpole_ppo", "return", 475.0, "gymnasium:CartPole-v1"),
        Task("cartpole_dqn", "return", 475.0, "gymnasium:CartPole-v1"),
        Task("cartpole_pqn", "return", 475.0, "gymnasium:CartPole-v1"),
        Task("cartpole_grpo", "return", 450.0, "gymnasium:CartPole-v1"),
        Task("pendulum_ppo", "return", -200.0, "gymnasium:Pendulum-v1"),
        Task("pendulum_ddpg", "return", -200.0, "gymnasium:Pendulum-v1"),
        Task("pendulum_td3", "return", -200.0, "gymnasium:Pendulum-v1"),
        Task("pendulum_sac", "return", -200.0, "gymnasium:Pendulum-v1"),
        Task("point_mass_ppo", "success", 0.95),
        Task("point_mass_apg", "success", 0.95),
        Task("point_mass_fast_td3", "success", 0.95),
        Task("point_mass_fast_sac", "success", 0.95),
        Task("t_maze_ppo", "success", 0.99),
        Task("repeat_previous_ppo", "return", 0.9),
        Task("cartpole_no_velocity_ppo", "return", 450.0),
        Task("pendulum_no_velocity_ppo", "return", -230.0),
        Task("minatar_breakout_ppo", "return", None),
        Task("minatar_breakout_dqn", "return", None),
        Task("minatar_asterix_ppo", "return", None),
        Task("minatar_freeway_ppo", "return", None),
        Task("minatar_space_invaders_ppo", "return", None),
        Task("minatar_seaquest_ppo", "return", None),
        Task("acrobot_ppo", "return", -100.0),
        Task("acrobot_dqn", "return", -90.0),
        Task("mountain_car_continuous_ppo", "return", 90.0),
        Task("lunar_lander_ppo", "return", 200.0),
        Task("lunar_lander_dqn", "return", 150.0),
        Task("half_cheetah_ppo", "return", 1500.0),
        Task("half_cheetah_sac", "return", 4000.0),
        Task("half_cheetah_td3", "return", 4000.0),
        Task("hopper_sac", "return", 2000.0),
        Task("hopper_td3", "return", 2000.0),
        Task("reach_pixels_ppo", "success", 0.8),
        Task("push_cube_ppo", "success", 0.95),
        Task("push_cube_sac", "success", 0.95),
        Task("push_cube_gripper_ppo", "success", 0.95),
        Task("push_cube_grpo", "success", None),
        Task("push_cube_upstream", "success", None),
        Task("pick_cube_ppo", "success", 0.9),
        Task("stack_cube_ppo", "success", 0.6),
        Task("open_drawer_ppo", "success", 0.9),
    )
}


MEMORY = tuple(name for name in TASKS if name.startswith(("t_maze", "repeat_previous")) or "no_velocity" in name)
"""The configs whose tasks need memory."""

MINATAR_PPO = tuple(name for name in TASKS if name.startswith("minatar") and name.endswith("_ppo"))
"""The configs of PPO on MinAtar's games."""


def without_memory(cfg: Config) -> Config:
    """Return a config with separate networks of two layers of 64 units with tanh in place of recurrent networks."""
    layers = {"type": "mlp", "network_cfg": {"hidden_sizes": [64, 64], "activation": "tanh"}}
    normalize = cfg.policy.normalize_obs
    return cfg.replace(policy={"name": "actor_critic", "actor": layers, "critic": layers, "normalize_obs": normalize})


_HAND = {"component_type": "hand", "urdf_path": "builtin:two_finger_gripper"}
ARMS: dict[str, dict[str, Any]] = {
    "panda": {"model": "example:panda"},
    "so101": {"model": "example:so101"},
    "ur10": {"model": "example:ur10", "urdf_cfg": {"components": [_HAND]}},
}
"""Arms of the package example-robot-data that do the task of `push_cube_ppo`, in place of the built-in arm."""


def with_arm(cfg: Config, arm: str) -> Config:
    """Return a config with the robot `arm` of `ARMS`."""
    return cfg.replace(**{"env.cfg.robot": ARMS[arm]})


def task_of(config: str | Path) -> Task:
    """Return the task of a config file.

    >>> task_of("configs/push_cube_ppo.json").threshold
    0.95
    """
    return TASKS[Path(config).stem]
