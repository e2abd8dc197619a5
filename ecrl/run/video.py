"""Videos: `record` shows a trained policy, and a consumer records the rollouts of training."""

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

from ecrl.algorithms import Run
from ecrl.algorithms.core import Collect, collect_of, decisions
from ecrl.config import Config
from ecrl.distributed import world_size
from ecrl.envs import Env
from ecrl.envs.mujoco.camera import CameraConfig
from ecrl.errors import ConfigError
from ecrl.kernels import scan
from ecrl.loop.build import build, with_eval_events
from ecrl.loop.iteration import phase_of, with_phase
from ecrl.pytree import mapped
from ecrl.run.evaluation import eval_steps
from ecrl.run.loggers import ending
from ecrl.run.video_writer import FPS, Camera, background_worker, cameras, render_views, video_path, view, write_video
from ecrl.types import LogData


def _overview_camera(sim: Any) -> CameraConfig:
    """Return a camera that shows the whole scene, from the default direction of MuJoCo's viewer."""
    center, size = sim.model.stat.center, float(sim.model.stat.extent)
    eye = center + size * torch.tensor([-1.0, -1.0, 0.9]).double().numpy()
    return CameraConfig.model_validate({"eye": eye.tolist(), "target": center.tolist()})


def _views_until(steps: Iterable[tuple[list[tuple], TensorDict | None]], num_episodes: int) -> Iterator[TensorDict]:
    """Yield the view before each step until every environment has ended `num_episodes` episodes."""
    ended: list[int] = []
    for row, seen in steps:
        yield cast(TensorDict, seen)
        ended = [n + bool(env[1]) for n, env in zip(ended or [0] * len(row), row, strict=True)]
        if min(ended) >= num_episodes:
            return


def record(state: TensorDict, cfg: Config, path: str | Path, num_envs: int = 4, num_episodes: int = 1) -> int:
    """Record a real-time video of the policy with deterministic actions, as in evaluations.

    The camera is the first one of `trainer.events.eval`, or else of `trainer.events.train`. Without cameras, the video
    shows the whole scene.

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
    run = with_eval_events(build(cfg), cfg)
    sim = run.env.scene
    if sim is None:
        raise ConfigError(f"{cfg.env.name} has no scene to be seen; ecrl record is for MuJoCo tasks")
    camera = next((c.params for use in ("eval", "train") for c in cameras(cfg, use)), None) or _overview_camera(sim)
    with torch.no_grad(), closing(eval_steps(run, state, cfg, num_envs, [], num_envs)) as steps:
        return write_video(Path(path), render_views(sim, camera, _views_until(steps, num_episodes)), 1.0 / sim.dt)


def _add_view(after: TensorDict, before: TensorDict, count: int) -> TensorDict:
    """Add the view of the first `count` environments of `before` to the `info` of `after`."""
    return after.copy().set("info", cast(TensorDict, after["info"]).copy().set("seen", view(before, count)))


def _with_views(env: Env, count: int) -> Env:
    """Return an environment that also reports the view before each step, in `info`."""

    def reset(keys: Tensor) -> TensorDict:
        start = env.reset(keys)
        return _add_view(start, start, count)

    def step(state: TensorDict, action: Any, noise: Any) -> TensorDict:
        return _add_view(env.step(state, action, noise), state, count)

    return replace(env, reset=reset, step=step)


def _first_envs(state: TensorDict, cfg: Config, count: int) -> TensorDict:
    """Return the state of the first `count` environments, at the same step, with their view in `info`."""
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
    """Return the function that takes the steps of an iteration without learning."""
    collect = collect_of(run.algorithm.iterate)
    if collect is None:
        raise ConfigError(
            f"trainer.events.train: the iterate of algorithm {run.algorithm.name} has no `collect`, which takes its "
            "steps without learning, for videos; add it, or move the cameras to trainer.events.eval"
        )
    return collect


def rollout_views(run: Run, state: TensorDict, cfg: Config, count: int) -> Generator[TensorDict, None, None]:
    """Repeat the rollout of the iteration that begins at `state`, and yield the views of its first environments.

    Randomness depends only on (seed, stream, environment, step), so the episodes equal those of the run up to
    rounding. Rounding depends on the number of environments. The policy does not learn on the way, so the episodes of
    an interleaved algorithm equal those of the run up to its first gradient step.

    Raises: ConfigError if the algorithm cannot take steps without learning.
    """
    run = with_phase(run, phase_of(run, [int(state["sample_step"])]))
    env, static = _with_views(run.env, count), run.static._replace(num_envs=count)
    run = run._replace(env=env, static=static, jit=partial, scan=scan)
    _, steps = _collect(run)(run, _first_envs(state, cfg, count))
    seen = cast(TensorDict, steps["info", "seen"][:, :-1]).cpu()
    yield from (cast(TensorDict, seen[:, t]) for t in range(seen.shape[1]))


_ASYNC = "record_camera_data_async"


def _record_rollout(run: Run, state: TensorDict, cfg: Config, camera: Camera, path: Path) -> None:
    count = min(camera.params.max_env_num, cfg.trainer.num_envs)
    views = islice(rollout_views(run, state, cfg, count), 0, None, camera.event.interval_step)
    write_video(path, render_views(run.env.scene, camera.params, views), FPS)


def with_training_videos(
    records: Iterator[LogData], run: Run, cfg: Config, videos: str | Path, state: TensorDict
) -> Iterator[LogData]:
    """Record rollouts with the cameras under `trainer.events.train`, in the background.

    A video shows the first environments of one iteration, with a frame every `interval_step` steps.
    `record_camera_data` records every iteration, and training waits for the previous video. With
    `record_camera_data_async` training does not wait: iterations are skipped while an earlier one is being recorded.

    Args:
        records: records to pass on.
        run: run built from `cfg`.
        cfg: config of the run.
        videos: folder of the videos.
        state: state before the first record.

    Raises: ConfigError if there are cameras, and the algorithm cannot take steps without learning.
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
