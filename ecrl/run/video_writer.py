"""Render the states of MuJoCo tasks as videos, and encode the videos as mp4 files.

The videos of a run are rendered in background threads. During an evaluation, the run passes only views to the threads.
A view consists of the physics state, the model fields that events change, and the targets, each for the
environments that the videos show. A camera records one video at a time and queues at most `_QUEUE_SIZE` views. If the
queue of a camera is full, the evaluation waits instead of dropping frames. `ecrl.run.video` records the rollouts of
training.
"""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Full, Queue
from subprocess import PIPE, Popen
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from tensordict import TensorDict

from ecrl.config import Config, EventConfig
from ecrl.config.model import term_text
from ecrl.envs import make_env
from ecrl.envs.mujoco.camera_config import CameraConfig, RecordCameraConfig
from ecrl.envs.scaling import scale_lengths
from ecrl.errors import ConfigError, extra
from ecrl.run.loggers import tolerate_errors

FPS = 20
"""Frame rate of the videos that events record, in frames per second.

As in EmbodiChain, the frame rate does not depend on the step duration.
"""

_QUEUE_SIZE = 4096
_ENCODER = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", "yuv420p"]
_ENCODER += ["-threads", "1"]  # use one thread, because the run needs the other cores

Put = Callable[[TensorDict], None]


class Camera(NamedTuple):
    """Camera of the config, with its use ("train" or "eval"), its event and the event's parameters."""

    use: str
    event: EventConfig
    params: RecordCameraConfig


def cameras(cfg: Config, use: Literal["train", "eval"]) -> list[Camera]:
    """Return the cameras among the events of training or evaluation, sorted by name.

    The positions of the cameras are multiplied by the scale of the task.
    """
    events = [event for _, event in sorted(getattr(cfg.trainer.events, use).items())]
    found = [(event, event.params) for event in events if isinstance(event.params, RecordCameraConfig)]
    return [Camera(use, event, scale_lengths(params, make_env(cfg.env).scale)) for event, params in found]


def check_cameras(cfg: Config) -> None:
    """Check the cameras under `trainer.events`.

    Raises: ConfigError if the environment has no scene to record, if the mode of a camera is not "interval", or if two
        cameras would write the same file. UserError if there are cameras, and OpenGL or the extra `video` is missing.
    """
    for use in ("train", "eval"):
        names: dict[Path, str] = {}
        for name, event in sorted(getattr(cfg.trainer.events, use).items()):
            if not isinstance(event.params, RecordCameraConfig):
                continue
            place = term_text(f"trainer.events.{use}", name, event.func)
            if make_env(cfg.env).scene is None:
                raise ConfigError(f"{place}: {cfg.env.label} has no scene to record; remove the event")
            if event.mode != "interval":
                raise ConfigError(f"{place}: mode is {event.mode!r}, but a camera needs mode 'interval'")
            other = names.setdefault(event.params.save_path / event.params.name, name)
            if other != name:
                raise ConfigError(f"{place}: params.name and save_path are the same as in {other}; choose another name")
            check_tools()


def check_tools() -> None:
    """Raise UserError if OpenGL or the extra `video` is missing."""
    from ecrl.envs.mujoco.camera import backend

    backend()
    encoder()


def encoder() -> str:
    """Return the path of ffmpeg in the package imageio-ffmpeg. Raise MissingExtraError if the package is missing."""
    with extra("video"):
        import imageio_ffmpeg
    return imageio_ffmpeg.get_ffmpeg_exe()


@contextmanager
def _encoding(path: Path, height: int, width: int, fps: float) -> Iterator[Callable[[np.ndarray], None]]:
    """Yield a function that adds an image to an mp4 file. Raise OSError if the encoder fails.

    The encoder process runs in a new session, so that Ctrl-C does not stop the encoder.
    """
    raw_input = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:.6g}", "-i", "-"]
    command = [encoder(), "-y", "-v", "error", *raw_input, "-an", *_ENCODER, str(path)]
    with Popen(command, stdin=PIPE, stderr=PIPE, start_new_session=True) as process:
        pipe = cast(IO[bytes], process.stdin)
        with suppress(BrokenPipeError):  # the OSError below contains ffmpeg's own message
            yield lambda image: cast(None, pipe.write(image.tobytes()))
            pipe.flush()
        _, message = process.communicate()
    if process.returncode:
        raise OSError(f"{path}: {message.decode(errors='replace').strip() or 'ffmpeg ended'}")


def write_video(path: Path, images: Iterable[np.ndarray], fps: float) -> int:
    """Write images to an mp4 file, and return the number of images. The file appears only when it is complete.

    If there are no images, no file is written.

    Args:
        path: path of the mp4 file; its folder is created if missing.
        images: uint8 images of shape `[h, w, 3]`, all of the same size. If the height or width is odd, a black row or
            column of pixels is added.
        fps: frames per second.

    Raises: OSError if the encoder fails, for example because the disk is full; MissingExtraError if the extra `video`
        is missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, count, add = path.with_name(f".{path.stem}.part.mp4"), 0, None
    try:
        with ExitStack() as stack:
            for image in images:
                image = np.pad(image, [(0, size % 2) for size in image.shape[:2]] + [(0, 0)])
                height, width, _ = image.shape
                add = add or stack.enter_context(_encoding(temporary, height, width, fps))
                add(image)
                count += 1
        if count:
            temporary.replace(path)
        return count
    finally:
        temporary.unlink(missing_ok=True)


def render_views(sim: Any, camera: CameraConfig, views: Iterable[TensorDict]) -> Iterator[np.ndarray]:
    """Render each view as one image, with one tile for each environment in the view."""
    from ecrl.envs.mujoco.camera import drawing, grid, sizes_of

    with drawing(sim, camera) as draw:
        for worlds in views:
            arrays: Any = worlds.cpu().numpy()
            targets = {
                **arrays.get("targets", {}),
                **{name: x.numpy() for name, x in sizes_of(sim, worlds.cpu()).items()},
            }
            rows = ((row, {name: x[i] for name, x in targets.items()}) for i, row in enumerate(arrays["physics"]))
            yield grid([draw(*row).copy() for row in rows])


def view(state: TensorDict, count: int) -> TensorDict:
    """Return the state fields that a camera needs, for the first `count` environments.

    The fields are `physics`, `parameters` if model fields vary, and `targets` if the task has targets.
    """
    worlds = cast(TensorDict, state["world"])
    parts: dict[str, Any] = {n: worlds[n][:count] for n in ("physics", "parameters") if n in worlds}
    if "targets" in state:
        targets = cast(TensorDict, state["targets"])
        parts["targets"] = TensorDict({name: x[:count] for name, x in targets.items()}, [count])
    return TensorDict(parts, [count])


def video_path(folder: Path, camera: Camera, step: int) -> Path:
    """Return the path of a camera's video: `<folder>/<save_path>/<name>_<train or eval>_<env steps>.mp4`."""
    return folder / camera.params.save_path / f"{camera.params.name}_{camera.use}_{step}.mp4"


def _lower_priority() -> None:
    """Give this thread and its child processes the lowest priority.

    Only Linux can set the priority of a single thread, so the function does nothing on other systems.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@contextmanager
def background_worker() -> Iterator[Callable[..., Future]]:
    """Yield a function `start(job, *args)` that calls `job(*args)` in a background thread and returns a Future.

    `start` first waits until the previous job has ended.

    If a job raises OSError, for example because the disk is full, the worker warns and accepts further jobs (see
    `tolerate_errors`). Any other error of a job is raised by the next call or at the end of the block.
    """
    guarded, last = tolerate_errors("videos"), []
    with ThreadPoolExecutor(1, "ecrl-video", _lower_priority) as thread:

        def start(job: Callable[..., Any], *args: Any) -> Future:
            while last:
                last.pop().result()
            last.append(thread.submit(guarded, torch.no_grad()(job), *args))
            return last[0]

        yield start
        while last:
            last.pop().result()


class Film(NamedTuple):
    """Videos of one evaluation.

    Attributes:
        num_envs: number of recorded environments.
        cameras: for each camera, a tuple of its `interval_step`, its number of environments and the function that adds
            a view.
    """

    num_envs: int
    cameras: tuple[tuple[int, int, Put], ...]


def _put(queue: Queue, job: Future, item: TensorDict | None) -> None:
    """Wait until the queue has room, and add an item.

    If the job that reads the queue has ended, drop the item. If the job has raised an error, raise this error.
    """
    while not job.done():
        try:
            return queue.put(item, timeout=0.2)
        except Full:
            pass
    job.result()


@contextmanager
def _open_video(start: Callable[..., Future], path: Path, sim: Any, camera: CameraConfig) -> Iterator[Put]:
    """Yield a function that adds a view to one video. The video is complete after the block, when its job ends."""
    queue: Queue = Queue(_QUEUE_SIZE)
    job = start(lambda: write_video(path, render_views(sim, camera, iter(queue.get, None)), FPS))
    try:
        yield partial(_put, queue, job)
    finally:
        _put(queue, job, None)


@contextmanager
def filming(cfg: Config, folder: Path | None) -> Iterator[Callable[[TensorDict, int], Any]]:
    """Yield a function `open_film(state, num_envs)` that returns a context manager.

    The context manager opens the videos of one evaluation, and yields a Film.

    Args:
        cfg: config of the run, with the cameras under `trainer.events.eval`.
        folder: folder of the videos; if None, no videos are recorded.
    """
    eval_cameras = cameras(cfg, "eval") if folder is not None else []
    if eval_cameras:  # report a missing package before the evaluation, not at its end
        check_tools()
    sim = make_env(cfg.env).scene if eval_cameras else None
    with ExitStack() as stack:
        threads = [stack.enter_context(background_worker()) for _ in eval_cameras]

        @contextmanager
        def open_film(state: TensorDict, num_envs: int) -> Iterator[Film]:
            with ExitStack() as videos:
                receivers = []
                for camera, start in zip(eval_cameras, threads, strict=True):
                    count = min(camera.params.max_env_num, num_envs)
                    path = video_path(folder or Path(), camera, int(state["sample_step"]))
                    put = videos.enter_context(_open_video(start, path, sim, camera.params))
                    receivers.append((camera.event.interval_step, count, put))
                yield Film(max([count for _, count, _ in receivers], default=0), tuple(receivers))

        yield open_film


def with_film(steps: Iterator[tuple[list[tuple], TensorDict | None]], film: Film) -> Generator[list[tuple], None, None]:
    """Yield the values of each evaluation step.

    Every `interval_step` steps of a camera, the function adds the view before the step to the camera's video. A video
    ends when all environments that it shows have finished their first episode. Environments that finish before the
    others show their next episode in the video.
    """
    running = set(range(film.num_envs))
    for step, (row, before) in enumerate(steps):
        for interval, count, put in film.cameras if running else ():
            if before is not None and step % interval == 0 and running & set(range(count)):
                put(before[:count])
        running -= {i for i in running if row[i][1]}
        yield row
