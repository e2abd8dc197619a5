"""Demonstrations and configs for the tests of behaviour cloning."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from ecrl.config import Config, config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import Env
from ecrl.loop.iteration import init_state
from ecrl.registry import register_expert
from ecrl.run.checkpoint import save
from ecrl.run.demonstrations import Summary, record_demonstrations
from support.recurrent_agent import remembering

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [32], "activation": "tanh"}}
BASE = {
    "trainer": {"num_envs": 8, "buffer_size": 16, "iterations": 3, "compile": "off"},
    "env": {"name": "cartpole"},
    "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "ppo"},
}


def recording(env: Any = "cartpole", **keys: Any) -> Config:
    """The config of an environment, for recordings."""
    return config_from_dict(BASE | {"env": {"name": env} if isinstance(env, str) else env}, "test", keys)


@cache
def folder() -> Path:
    """A folder for the data sets of one process."""
    return Path(mkdtemp())


def balancing_path(seed: int = 0) -> Path:
    """Path of the data set that `balancing` records."""
    return folder() / f"cartpole_{seed}.safetensors"


def balancing(seed: int = 0) -> Summary:
    """A data set of eight episodes of 40 steps of the expert of CartPole, recorded once per process."""
    return _recorded(seed)


@cache  # with one positional argument, because `f()`, `f(0)` and `f(seed=0)` would be three entries
def _recorded(seed: int) -> Summary:
    cfg = recording(**{"env.cfg.max_episode_steps": 40})
    return record_demonstrations(cfg, balancing_path(seed), 8, expert={"noise": 0.1}, seed=seed)


def start_path(seed: int) -> Path:
    """Path of the checkpoint that `start` saves."""
    return folder() / f"start_{seed}"


def start(seed: int, policy: dict[str, Any]) -> None:
    """Save a checkpoint whose parameters no training has changed."""
    cfg = recording(policy=policy, **{"trainer.seed": seed})
    save(start_path(seed), init_state(cfg), cfg)


@cache
def of_policy(env: str, **keys: Any) -> Path:
    """A data set with the sampled actions of a policy that has not learnt anything."""
    name = "_".join([env, *(f"{key}{value}" for key, value in keys.items())]).replace(":", "_")
    cfg, path = recording(env, **keys), folder() / f"{name}.safetensors"
    record_demonstrations(cfg, path, 6, state=init_state(cfg), sample=True)
    return path


def cloning(demos: str | Path | None = None, **keys: Any) -> Config:
    """Behaviour cloning of CartPole's expert, with dotted keys changed."""
    path = str(balancing().path if demos is None else demos)
    algorithm = {"name": "bc", "cfg": {"demos": path, "batch_size": 32, "learning_rate": 3e-3}}
    return config_from_dict(BASE | {"algorithm": algorithm}, "test", keys)


class CueExpertConfig(ConfigModel):
    """The expert has no settings."""


@register_expert("remember_cue", override=True)
def remember_cue_expert(cfg: CueExpertConfig, env: Env) -> Callable[[TensorDict, Tensor], Tensor]:
    """Read the cue in the state of the environment, which observations do not show in the end."""
    return lambda state, keys: state["cue"]


def cues_path() -> Path:
    """Path of the data set that `cues` records."""
    return folder() / "cues.safetensors"


@cache
def cues() -> Path:
    """A data set of 32 episodes of the expert of the task that needs memory."""
    record_demonstrations(remembering(), cues_path(), 32)
    return cues_path()


def remembering_clone(**keys: Any) -> Config:
    """Behaviour cloning of the expert of the task that needs memory, with dotted keys changed."""
    settings = {"demos": str(cues()), "learning_rate": 0.02, "batch_size": 64}
    return remembering(**{"algorithm": {"name": "bc", "cfg": settings}}).replace(**keys)
