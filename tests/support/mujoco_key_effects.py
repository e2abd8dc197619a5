"""Observable effects of a config of a MuJoCo task, without training; see `key_effects`."""

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
from ecrl.run.video_writer import cameras, filming, render_views, view
from support.key_effects import Changes, See, made, remembered


def _steps(changes: Changes) -> list[dict[str, Any]]:
    """Return all that a policy observes of four environments at the start and after each of three steps, as bits."""
    env, keys = make_env(made(changes).env), rng.split(rng.key(0), 4)
    space: Any = env.action_space
    states, action = [env.reset(keys)], torch.full((4, *space.shape), 0.3)
    for t in range(3):
        states.append(env.step(states[-1], action, env.draw(rng.fold_in(keys, t))))
    compared = [state.select("obs", "reward", "terminated", "truncated", "info").flatten_keys(".") for state in states]
    return [{name: (list(x.shape), x.numpy().tobytes()) for name, x in one.items()} for one in compared]


stepped = remembered(_steps)


def rejected(match: str) -> See:
    """Return an effect: True if the task is refused with a message that `match` fits."""

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
    """Return the bounds of the action."""
    space: Any = make_env(made(changes).env).action_space
    return list(space.low), list(space.high)


@remembered
def model(changes: Changes) -> int:
    """Return the handle of the loaded model, a number that depends on MuJoCo's model and on the threads."""
    return make_env(made(changes).env).scene.handle


@remembered
def backed(changes: Changes) -> str:
    """Return the physics backend."""
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
def frame(changes: Changes) -> bytes:
    """Return the first frame of a video of an evaluation."""
    try:
        backend()
    except UserError as error:
        pytest.skip(str(error))
    cfg = made(changes)
    env, (camera,) = make_env(cfg.env), cameras(cfg, "eval")
    (image,) = render_views(env.scene, camera.params, [view(env.reset(rng.split(rng.key(0), 1)), 1)])
    return image.tobytes()


@remembered
def filmed(changes: Changes) -> tuple[int, list[str]]:
    """Return the number of environments in the videos of an evaluation with eight, and the paths of the videos."""
    cfg, paths, state = made(changes), [], TensorDict({"sample_step": 0})
    with (
        patch("ecrl.envs.mujoco.camera.backend"),
        patch("ecrl.run.video_writer.encoder"),
        patch("ecrl.run.video_writer.write_video", lambda path, *_: paths.append(str(path))),
        filming(cfg, Path("videos")) as opened,
        opened(state, 8) as film,
    ):
        many = film.num_envs
    return many, paths
