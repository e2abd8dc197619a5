"""Record videos: `record` films a trained policy, and `with_training_videos` films the rollouts of training."""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Run
from ecrl.algorithms.core import Collect, collect_of, decisions
from ecrl.config import Config
from ecrl.distributed import world_size
from ecrl.envs import Env
from ecrl.envs.gymnasium import GymnasiumConfig, draw, drawing_keys, render_fps
from ecrl.envs.mujoco.camera_config import CameraConfig
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.build import build, with_eval_events
from ecrl.loop.contract import check_batch
from ecrl.loop.iteration import phase_of, with_phase
from ecrl.loop.state_argument import check_state_argument
from ecrl.pytree import mapped
from ecrl.run.evaluation import eval_steps, in_single_steps
from ecrl.run.loggers import ending
from ecrl.run.video_writer import (
    FPS,
    Camera,
    background_worker,
    cameras,
    encoder,
    render_views,
    video_path,
    view,
    write_video,
)
from ecrl.types import LogData


def _overview_camera(sim: Any) -> CameraConfig:
    """Return a camera that shows the whole scene from the initial direction of MuJoCo's viewer."""
    center, size = sim.model.stat.center, float(sim.model.stat.extent)
    eye = center + size * torch.tensor([-1.0, -1.0, 0.9]).double().numpy()
    return CameraConfig.model_validate({"eye": eye.tolist(), "target": center.tolist()})


def _views_until(steps: Iterable[tuple[list[tuple], TensorDict | None]], num_episodes: int) -> Iterator[TensorDict]:
    """Yield the view before each step until every environment has finished `num_episodes` episodes."""
    finished: list[int] = []
    for row, before in steps:
        yield cast(TensorDict, before)
        finished = [n + bool(env[1]) for n, env in zip(finished or [0] * len(row), row, strict=True)]
        if min(finished) >= num_episodes:
            return


def record(state: TensorDict, cfg: Config, path: str | Path, num_envs: int = 4, num_episodes: int = 1) -> int:
    """Record a real-time video of the policy. The policy's actions are deterministic, as in evaluations.

    In a MuJoCo task, the first camera of `trainer.events.eval`, in alphabetical order of the names, takes the video. If
    there is no such camera, the first camera of `trainer.events.train` takes the video. If the config has no camera,
    the video shows the whole scene. A Gymnasium environment is made with the render mode "rgb_array" in this process,
    and renders its own frames.

    If an action is a chunk of actions, events of `trainer.events.eval` with mode "interval" count environment steps
    during the recording. In evaluations, these events count chunks.

    Args:
        state: state of a run.
        cfg: config of the run.
        path: path of the mp4 file.
        num_envs: number of environments that the video shows in a grid.
        num_episodes: number of episodes of each environment. An environment that has finished its episodes continues
            until all environments have finished.

    Returns: the number of frames. The video has one frame per environment step, also if an action is a chunk of
        actions.
    Raises: ConfigError if `num_envs` or `num_episodes` is below 1, or if the environment has no scene and cannot draw
        images; UserError if OpenGL or the extra `video` is missing, or if `state` is not the state of a run.
    """
    check_state_argument(state, "params", "norm", "key")
    for name, count in (("num_envs", num_envs), ("num_episodes", num_episodes)):
        if count < 1:
            raise ConfigError(f"{name}: {count}, expected at least 1")
    with torch.no_grad():
        if isinstance(cfg.env.cfg, GymnasiumConfig):
            return _record_gymnasium(state, cfg, Path(path), num_envs, num_episodes)
        run = in_single_steps(with_eval_events(build(cfg), cfg), cfg)
        sim = run.env.scene
        if sim is None:
            text = "ecrl record is for MuJoCo tasks and Gymnasium environments"
            raise ConfigError(f"{cfg.env.label} has no scene to record; {text}")
        camera = next((c.params for use in ("eval", "train") for c in cameras(cfg, use)), None) or _overview_camera(sim)
        with closing(eval_steps(run, state, cfg, num_envs, [], num_envs)) as steps:
            return write_video(Path(path), render_views(sim, camera, _views_until(steps, num_episodes)), 1.0 / sim.dt)


def _record_gymnasium(state: TensorDict, cfg: Config, path: Path, num_envs: int, num_episodes: int) -> int:
    """Record a video of a Gymnasium environment, and return the number of frames."""
    from ecrl.envs.mujoco.camera import grid

    encoder()  # report a missing package before the environments are made
    cfg = cfg.replace(**drawing_keys(cast(GymnasiumConfig, cfg.env.cfg)))
    fps, run = render_fps(cast(GymnasiumConfig, cfg.env.cfg)), with_eval_events(build(cfg), cfg)
    images: list[np.ndarray] = []

    def step(before: TensorDict, action: Any, noise: Any) -> TensorDict:
        images.append(grid(draw(before)))
        return run.env.step(before, action, noise)

    filmed = run._replace(env=replace(run.env, step=step))
    with closing(eval_steps(filmed, state, cfg, num_envs, [])) as steps:
        return write_video(path, (images.pop() for _ in _views_until(steps, num_episodes)), fps)


def _add_view(after: TensorDict, before: TensorDict, count: int) -> TensorDict:
    """Return a copy of `after` whose `info` holds the view of the first `count` environments of `before`."""
    return after.copy().set("info", cast(TensorDict, after["info"]).copy().set("view", view(before, count)))


def _with_views(env: Env, count: int) -> Env:
    """Wrap an environment so that `info` holds the view of the environments before each step."""

    def reset(keys: Tensor) -> TensorDict:
        start = env.reset(keys)
        return _add_view(start, start, count)

    def step(state: TensorDict, action: Any, noise: Any) -> TensorDict:
        return _add_view(env.step(state, action, noise), state, count)

    return replace(env, reset=reset, step=step)


def _first_envs(state: TensorDict, cfg: Config, count: int) -> TensorDict:
    """Reduce a run's state to its first `count` environments, and add the view of these environments to `info`."""
    env_step = decisions(state) // (cfg.trainer.num_envs * world_size())
    episode = cast(TensorDict, state["episode"]).copy()
    episode.update({name: episode[name][:count] for name in ("running_return", "running_length")})
    env = cast(TensorDict, state["env"][:count])
    env = _add_view(env, env, count)
    counter = "decision_step" if "decision_step" in state else "sample_step"
    fields = {"env": env, "episode": episode, counter: env_step * count * world_size()}
    for name in {"carry", "exploration"} & {*state.keys()}:
        fields[name] = mapped(lambda x: x[:count], state[name], batch=lambda size: (count, *size[1:]) if size else size)
    return TensorDict({**dict(state.items()), **fields}, [])


def _collect(run: Run) -> Collect:
    """Return the algorithm's function that takes steps without learning. Raise ConfigError if there is none."""
    collect = collect_of(run.algorithm.iterate)
    if collect is None:
        raise ConfigError(
            f"trainer.events.train: algorithm {run.algorithm.name} cannot take steps without learning, but videos of "
            "training need such steps; add `collect` to its `iterate`, or move the cameras to trainer.events.eval"
        )
    return collect


def rollout_views(run: Run, state: TensorDict, cfg: Config, count: int) -> Generator[TensorDict, None, None]:
    """Repeat the rollout of the iteration that begins at `state`. For each step, yield what a camera needs.

    The yielded TensorDict has the state fields that `video_writer.view` selects, for the first `count` environments.
    Random numbers depend only on the seed, the stream, the environment and the step. The repeated episodes therefore
    equal the run's episodes, except for rounding, which depends on the number of environments. The policy does not
    learn during the repetition. For an interleaved algorithm, the episodes are therefore equal only up to the first
    gradient step.

    Raises: ConfigError if the algorithm cannot take steps without learning.
    """
    run = with_phase(run, phase_of(run, state))
    env, static = _with_views(run.env, count), run.static._replace(num_envs=count)
    run = run._replace(env=env, static=static, jit=partial, scan=scan)
    _, batch = _collect(run)(run, _first_envs(state, cfg, count))
    check_batch(f"algorithm {run.algorithm.name}: collect", batch, run.static)
    views = cast(TensorDict, batch["steps", "info", "view"][:, :-1]).cpu()
    yield from (cast(TensorDict, views[:, t]) for t in range(views.shape[1]))


_ASYNC = "record_camera_data_async"


def _record_rollout(run: Run, state: TensorDict, cfg: Config, camera: Camera, path: Path) -> None:
    count = min(camera.params.max_env_num, cfg.trainer.num_envs)
    views = islice(rollout_views(run, state, cfg, count), 0, None, camera.event.interval_step)
    write_video(path, render_views(run.env.scene, camera.params, views), FPS)


def with_training_videos(
    records: Iterator[LogData], run: Run, cfg: Config, videos: str | Path, state: TensorDict
) -> Iterator[LogData]:
    """Record rollouts in the background with the cameras under `trainer.events.train`.

    A video shows the first `max_env_num` environments during one iteration, with one frame every `interval_step`
    steps. If `trainer.log_freq` is above 1, this iteration is the first after a record. The event `record_camera_data`
    records every such iteration, and training waits until the previous video is complete. The event
    `record_camera_data_async` does not make training wait. Instead, `record_camera_data_async` skips iterations while
    the video of an earlier iteration is still being recorded.

    Args:
        records: records of the run; the function yields each record again.
        run: run built from `cfg`.
        cfg: config of the run.
        videos: folder of the videos.
        state: state before the first record.

    Raises: ConfigError if there are cameras but the algorithm cannot take steps without learning.
    """
    with ExitStack() as stack, ending(records):
        if cameras(cfg, "train"):
            _collect(run)
        started = [(camera, stack.enter_context(background_worker())) for camera in cameras(cfg, "train")]
        jobs: list[Future | None] = [None] * len(started)  # the last job of each camera
        for record in records:
            for i, (camera, start) in enumerate(started) if record["log_type"] == "train" else ():
                last, waits = jobs[i], camera.event.func != _ASYNC
                if waits or last is None or last.done():
                    path = video_path(Path(videos), camera, record["sample_step"])
                    jobs[i] = start(_record_rollout, run, state, cfg, camera, path)
            state = record["state"] if record["log_type"] == "train" else state
            yield record
