"""Stable-Baselines3's PPO on a Gymnasium task, with the settings of a config of ecrl.

Arguments that the config does not set have the defaults of Stable-Baselines3. In particular, Adam has `eps` 1e-5 unless
the config has a block `optimizer`. The networks have the same layers and the
same distribution of initial weights in both libraries.
"""

from collections.abc import Callable
from typing import Any, cast

from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule

from benchmarks.other_libraries.sb3_zoo import Reporting, ppo_numbers
from ecrl.algorithms.optimizer_config import optimizer_of
from ecrl.config import Config, total_steps


def make_model(cfg: Config) -> PPO:
    """Return a model with the environments of its training."""
    numbers: Any = cfg.algorithm.cfg
    adam = optimizer_of(numbers)
    return PPO(
        "MlpPolicy",  # separate 64x64 tanh networks with orthogonal weights
        make_vec_env(_id_of(cfg), cfg.trainer.num_envs, cfg.trainer.seed),
        learning_rate=LinearSchedule(adam.learning_rate, 0.0, 1.0),
        **ppo_numbers(cfg),
        policy_kwargs={} if numbers.optimizer is None else {"optimizer_kwargs": {"eps": adam.kwargs.eps}},
        seed=cfg.trainer.seed,
        device="cpu",
    )


def _id_of(cfg: Config) -> str:
    """Return the id of the config's Gymnasium environment."""
    return cast(Any, cfg.env.cfg).id


def train(cfg: Config, report: Callable[[int, Callable[[Any], Any]], None]) -> None:
    """Train, and call `report` before the training and after every update.

    The arguments of `report` are the env steps so far, and a function that maps observations to deterministic actions.
    """
    model = make_model(cfg)

    def act(obs: Any) -> Any:
        return model.predict(obs, deterministic=True)[0]

    reporting = Reporting(lambda steps, _: report(steps, act), _id_of(cfg), cfg.trainer.seed)
    model.learn(total_steps(cfg, 1), callback=reporting)
    reporting.now()
