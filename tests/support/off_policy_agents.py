"""Small runs of every algorithm that learns Q-functions, for tests of features that all of them share."""

from typing import Any

from ecrl.config import Config, config_from_dict
from support.small_runs import NET

N, T = 3, 4
"""Number of environments, and number of steps of each environment per iteration."""

_REPLAY = {"capacity": 45, "batch_size": 16, "learning_rate": 0.02, "learning_starts": N * T, "train_freq": 2}
_CATEGORICAL = {"distribution": "categorical", "num_atoms": 5, "v_min": -6.0, "v_max": 4.0}
_Q_NETWORK = {"name": "q_network", "critic": NET}
_DETERMINISTIC = {"name": "deterministic_actor_critic", "actor": NET, "critic": NET}
_SQUASHED = {"name": "squashed_actor_critic", "actor": NET, "critic": NET}
_DISCRETE = {"name": "categorical_actor_critic", "actor": NET, "critic": NET}

_AGENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dqn": ("dqn", _Q_NETWORK, _REPLAY | {"target_update_freq": 18}),
    "prioritized dqn": ("dqn", _Q_NETWORK, _REPLAY | {"target_update_freq": 18, "prioritized": {}}),
    "pqn": ("pqn", _Q_NETWORK, {"batch_size": 4, "learning_rate": 0.02}),
    "ddpg": ("ddpg", _DETERMINISTIC, _REPLAY),
    "td3": ("td3", _DETERMINISTIC, _REPLAY),
    "sac": ("sac", _SQUASHED, _REPLAY),
    "discrete sac": ("sac", _DISCRETE, _REPLAY),
    "fast_td3": ("fast_td3", _DETERMINISTIC | _CATEGORICAL, _REPLAY),
    "fast_sac": ("fast_sac", _SQUASHED | _CATEGORICAL, _REPLAY | {"gradient_steps": 2}),
}
AGENTS = tuple(_AGENTS)
"""Names of the agents: the algorithms, and the variants of DQN and soft actor-critic."""

WITH_REPLAY = tuple(name for name in AGENTS if name != "pqn")
"""Names of the agents with a replay buffer."""


def is_continuous(name: str) -> bool:
    """Return True if the actions of an agent are a Box, and False if they are Discrete."""
    return _AGENTS[name][1]["name"] in (_DETERMINISTIC["name"], _SQUASHED["name"])


def agent(name: str, **changes: Any) -> Config:
    """A small eager run on the pendulum or on CartPole, with dotted keys changed.

    Episodes have a limit of 7 steps. An agent with a replay buffer learns from the second iteration on, in two turns of
    two steps.
    """
    algorithm, policy, cfg = _AGENTS[name]
    base = {
        "trainer": {"num_envs": N, "buffer_size": T, "iterations": 5, "compile": "off", "enable_eval": False},
        "env": {"name": "pendulum" if is_continuous(name) else "cartpole", "cfg": {"max_episode_steps": 7}},
        "policy": policy,
        "algorithm": {"name": algorithm, "cfg": cfg},
    }
    return config_from_dict(base).replace(**changes)
