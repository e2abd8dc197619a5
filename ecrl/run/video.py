"""Videos of a policy: `record` for a trained one, and a consumer that records the rollouts of training."""

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
from torch import Tensor

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
    """Return a camera that shows the whole scene, from the default direction of MuJoCo's viewer."""
    center, size = sim.model.stat.center, float(sim.model.stat.extent)
    eye = center + size * torch.tensor([-1.0, -1.0, 0.9]).double().numpy()
    return CameraConfig.model_validate({"eye": eye.tolist(), "target": center.tolist()})


def _until(steps: Iterable[tuple[list[tuple], TensorDict | None]], num_episodes: int) -> Iterator[TensorDict]:
    """Yield the view before each step until every environment has ended `num_episodes` episodes."""
    ended: list[int] = []
    for row, seen in steps:
        yield cast(TensorDict, seen)
        ended = [n + bool(env[1]) for n, env in zip(ended or [0] * len(row), row, strict=True)]
        if min(ended) >= num_episodes:
            return


def record(state: TensorDict, cfg: Config, path: str | Path, num_envs: int = 4, num_episodes: int = 1) -> int:
    """Record a real-time video of the policy with deterministic actions, as in evaluations.

    The camera is the first of `trainer.events.eval`, else of `trainer.events.train`. Without one, the video shows the
    whole scene.

    Args:
        state: state of a run.
        cfg: config of the run.
        path: mp4 file.
        num_envs: number of environments, shown in a grid.
        num_episodes: episodes of each environment; an environment that ends earlier continues.

    Returns: the number of frames, one per step.
    Raises: ConfigError if the environment has no scene; UserError without OpenGL or the extra `video`.
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


def _with_view(after: TensorDict, before: TensorDict, many: int) -> TensorDict:
    """Add the view of the first `many` environments of `before` to the `info` of `after`."""
    return after.copy().set("info", cast(TensorDict, after["info"]).copy().set("seen", view(before, many)))


def _seeing(env: Env, many: int) -> Env:
    """Return an environment that also reports, in `info`, the view before each step."""

    def reset(keys: Tensor) -> TensorDict:
        start = env.reset(keys)
        return _with_view(start, start, many)

    def step(state: TensorDict, action: Any, noise: Any) -> TensorDict:
        return _with_view(env.step(state, action, noise), state, many)

    return replace(env, reset=reset, step=step)


def _first(state: TensorDict, cfg: Config, many: int) -> TensorDict:
    """The state of the first `many` environments alone, at the same step, with their view in `info`."""
    taken = state["sample_step"] // (cfg.trainer.num_envs * world_size())
    episode = cast(TensorDict, state["episode"]).copy()
    episode.update({name: episode[name][:many] for name in ("running_return", "running_length")})
    env = cast(TensorDict, state["env"][:many])
    env = _with_view(env, env, many)
    fields = {"env": env, "episode": episode, "sample_step": taken * many * world_size()}
    fields |= {"carry": state["carry"][:many]} if "carry" in state else {}
    return TensorDict({**dict(state.items()), **fields}, [])


def collected(state: TensorDict, cfg: Config, many: int) -> Generator[TensorDict, None, None]:
    """Repeat the rollout of the iteration that begins at `state`, and yield the views of its first environments.

    Randomness depends only on (seed, stream, environment, step), so the episodes equal those of the run, except for
    rounding, which depends on the number of environments.
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


def _record_rollout(state: TensorDict, cfg: Config, camera: Camera, path: Path) -> None:
    count = min(camera.params.max_env_num, cfg.trainer.num_envs)
    views = islice(collected(state, cfg, count), 0, None, camera.event.interval_step)
    write_video(path, pictures(make_env(cfg.env).scene, camera.params, views), FPS)


def with_training_videos(
    records: Iterator[LogData], cfg: Config, videos: str | Path, state: TensorDict
) -> Iterator[LogData]:
    """Record rollouts with the cameras under `trainer.events.train`, in the background.

    A video shows the first environments of one iteration, with a frame every `interval_step` steps.
    `record_camera_data` records every iteration, and training waits for the previous video. With
    `record_camera_data_async` training does not wait: iterations are skipped while an earlier one is being recorded.

    Args:
        records: records to pass on.
        cfg: config of the run.
        videos: folder of the videos.
        state: state before the first record.
    """
    with ExitStack() as stack, ending(records):
        started = [(camera, stack.enter_context(background())) for camera in cameras(cfg, "train")]
        jobs: list[Future | None] = [None] * len(started)  # the last job of each camera
        for record in records:
            for i, (camera, start) in enumerate(started) if record["log_type"] == "train" else ():
                last, waits = jobs[i], camera.event.func != _ASYNC
                if waits or last is None or last.done():
                    path = video_path(Path(videos), camera, record["sample_step"])
                    jobs[i] = start(_record_rollout, state, cfg, camera, path)
            state = record["state"] if record["log_type"] == "train" else state
            yield record
