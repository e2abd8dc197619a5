"""Films of a policy: `record` on its own, and what training collects, collected again for the camera."""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict

from ecrl.algorithms.core import OnPolicy
from ecrl.config import Config
from ecrl.distributed import world_size
from ecrl.envs import Env, make_env
from ecrl.envs.mujoco.camera import CameraConfig
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.buffers import borrowed_leaves, kinds_of
from ecrl.loop.build import build
from ecrl.run.evaluation import eval_steps
from ecrl.run.loggers import ending
from ecrl.run.video_writer import FPS, Camera, background, cameras, pictures, video_path, view, write_video
from ecrl.types import LogData


def _whole(sim: Any) -> CameraConfig:
    """A camera that sees all of a scene, from the side that MuJoCo's own viewer looks from."""
    middle, size = sim.model.stat.center, float(sim.model.stat.extent)
    eye = middle + size * torch.tensor([-1.0, -1.0, 0.9]).double().numpy()
    return CameraConfig.model_validate({"eye": eye.tolist(), "target": middle.tolist()})


def _until(steps: Iterable[tuple[list[tuple], TensorDict | None]], num_episodes: int) -> Iterator[TensorDict]:
    """What is seen before each step until every environment ended `num_episodes`."""
    ended: list[int] = []
    for row, seen in steps:
        yield cast(TensorDict, seen)
        ended = [n + bool(env[1]) for n, env in zip(ended or [0] * len(row), row, strict=True)]
        if min(ended) >= num_episodes:
            return


def record(state: TensorDict, cfg: Config, path: str | Path, num_envs: int = 4, num_episodes: int = 1) -> int:
    """A video of the policy with deterministic actions, as in evaluations, in real time.

    The camera is the first of `trainer.events.eval`, then of `trainer.events.train`; without one, it sees everything.

    Args:
        state: of a run.
        cfg: of the run.
        path: of the mp4.
        num_envs: environments, side by side and below each other.
        num_episodes: of each environment; one that is done before the others goes on.

    Returns: the number of frames, one per step.
    Raises: ConfigError for an environment without a scene; UserError without OpenGL or the extra `video`.
    """
    for name, count in (("num_envs", num_envs), ("num_episodes", num_episodes)):
        if count < 1:
            raise ConfigError(f"{name}: {count}, expected at least 1")
    run = build(cfg, "eval")
    sim = run.env.scene
    if sim is None:
        raise ConfigError(f"{cfg.env.name} has no scene to be seen; ecrl record is for MuJoCo tasks")
    camera = next((c.params for use in ("eval", "train") for c in cameras(cfg, use)), None) or _whole(sim)
    with torch.no_grad(), closing(eval_steps(run, state, cfg, num_envs, [], num_envs)) as steps:
        return write_video(Path(path), pictures(sim, camera, _until(steps, num_episodes)), 1.0 / sim.dt)


def _seeing(env: Env, many: int) -> Env:
    """An environment that reports in `info` what is seen of it before each step."""

    def step(state: TensorDict, action: Any, noise: Any) -> TensorDict:
        after = env.step(state, action, noise)
        return after.copy().set("info", cast(TensorDict, after["info"]).copy().set("seen", view(state, many)))

    return replace(env, step=step)


def _first(state: TensorDict, cfg: Config, many: int) -> TensorDict:
    """The state of the first `many` environments alone, at the same step."""
    taken = state["sample_step"] // (cfg.trainer.num_envs * world_size())
    episode = cast(TensorDict, state["episode"]).copy()
    episode.update({name: episode[name][:many] for name in ("running_return", "running_length")})
    fields = {"env": state["env"][:many], "episode": episode, "sample_step": taken * many * world_size()}
    return TensorDict({**dict(state.items()), **fields}, [])


def collected(state: TensorDict, cfg: Config, many: int) -> Generator[TensorDict, None, None]:
    """What is seen, step by step, of the first environments in the iteration that begins at `state`, collected again.

    Randomness is a function of (seed, stream, environment, step) alone, so their episodes are those of the run, as far
    as rounding allows, which differs with the number of environments.
    """
    run = build(cfg)
    env, static = _seeing(run.env, many), run.static._replace(num_envs=many)
    run, iterate = run._replace(env=env, static=static, jit=partial, scan=scan), run.algorithm.iterate
    first = _first(state, cfg, many)
    if isinstance(iterate, OnPolicy):
        _, steps = iterate.collect(run, first)
    else:
        steps = cast(TensorDict, iterate(run, *borrowed_leaves(first, kinds_of(run)))[1]["steps"])
    seen = cast(TensorDict, steps["info", "seen"][:, :-1]).cpu()
    yield from (cast(TensorDict, seen[:, t]) for t in range(seen.shape[1]))


_ASYNC = "record_camera_data_async"


def _film(state: TensorDict, cfg: Config, camera: Camera, path: Path) -> None:
    many = min(camera.params.max_env_num, cfg.trainer.num_envs)
    views = islice(collected(state, cfg, many), 0, None, camera.event.interval_step)
    write_video(path, pictures(make_env(cfg.env).scene, camera.params, views), FPS)


def with_training_videos(
    records: Iterator[LogData], cfg: Config, videos: str | Path, state: TensorDict
) -> Iterator[LogData]:
    """Film what iterations collect with the cameras under `trainer.events.train`, while training goes on.

    A video is of the first environments of one iteration, every `interval_step`-th step. `record_camera_data` films
    every iteration: the one after the next waits for it. `record_camera_data_async` makes none wait: an iteration that
    comes while it still films an earlier one is left out.

    Args:
        records: to pass on.
        cfg: of the run.
        videos: folder of the videos.
        state: before the first record.
    """
    with ExitStack() as stack, ending(records):
        found = [(camera, stack.enter_context(background())) for camera in cameras(cfg, "train")]
        films: list[Future | None] = [None] * len(found)  # the last of each camera
        for record in records:
            for i, (camera, start) in enumerate(found) if record["log_type"] == "train" else ():
                last, waits = films[i], camera.event.func != _ASYNC
                if waits or last is None or last.done():
                    path = video_path(Path(videos), camera, record["sample_step"])
                    films[i] = start(_film, state, cfg, camera, path)
            state = record["state"] if record["log_type"] == "train" else state
            yield record
