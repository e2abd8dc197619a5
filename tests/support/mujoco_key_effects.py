"""What can be seen of a config whose environment is a task of MuJoCo, without any training; see `key_effects`."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensordict import TensorDict

from ecrl import rng
from ecrl.envs import make_env
from ecrl.envs.mujoco.camera import backend
from ecrl.envs.mujoco.scene.models import loaded
from ecrl.errors import ConfigError, UserError
from ecrl.run.video_writer import filming
from support.key_effects import Changes, See, made, remembered


def _steps(changes: Changes) -> list[dict[str, Any]]:
    """What a policy could know of four environments at their start and after each of three steps, to the bit."""
    env, keys = make_env(made(changes).env), rng.split(rng.key(0), 4)
    space: Any = env.action_space
    states, action = [env.reset(keys)], torch.full((4, *space.shape), 0.3)
    for t in range(3):
        states.append(env.step(states[-1], action, env.draw(rng.fold_in(keys, t))))
    compared = [state.select("obs", "reward", "terminated", "truncated", "info").flatten_keys(".") for state in states]
    return [{name: (list(x.shape), x.numpy().tobytes()) for name, x in one.items()} for one in compared]


stepped = remembered(_steps)


def rejected(match: str) -> See:
    """Whether the task is refused, in words that `match`."""

    def refusal(changes: Changes) -> bool:
        try:
            _steps(changes)
        except ConfigError as error:
            assert re.search(match, str(error)), error
            return True
        return False

    return remembered(refusal)


@remembered
def bounds(changes: Changes) -> tuple[list, list]:
    """Of the action."""
    space: Any = make_env(made(changes).env).action_space
    return list(space.low), list(space.high)


@remembered
def model(changes: Changes) -> int:
    """What is loaded to be stepped and drawn: a number made of all of MuJoCo's model and of the threads."""
    return make_env(made(changes).env).scene.handle


@remembered
def backed(changes: Changes) -> str:
    """What steps it."""
    pytest.importorskip("mujoco_warp", reason="needs the extra warp")
    return loaded(make_env(made(changes).env).scene.handle).backend


@remembered
def pictured(changes: Changes) -> list[dict[str, Any]]:
    """`stepped`, where something of it is an image."""
    try:
        backend()
    except UserError as error:
        pytest.skip(str(error))
    return _steps(changes)


@remembered
def filmed(changes: Changes) -> tuple[int, list[str]]:
    """How many environments the videos of an evaluation of eight show, and where they are."""
    cfg, paths, state = made(changes), [], TensorDict({"sample_step": 0})
    with (
        patch("ecrl.run.video_writer.backend"),
        patch("ecrl.run.video_writer.encoder"),
        patch("ecrl.run.video_writer.write_video", lambda path, *_: paths.append(str(path))),
        filming(cfg, Path("videos")) as opened,
        opened(state, 8) as film,
    ):
        many = film.num_envs
    return many, paths
