"""Videos of MuJoCo tasks: drawn from states and written as mp4 in the background, apart from the run that is filmed.

The run gives away rows of `physics` and targets of its first environments, nothing else. A camera keeps at most
`_WAITING` of these rows, and one video that is not finished; the run waits for it rather than losing a frame.
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
from ecrl.envs.mujoco.camera import CameraConfig, backend, drawing, grid
from ecrl.envs.mujoco.terms.cameras import RecordCameraConfig
from ecrl.errors import ConfigError, extra
from ecrl.run.loggers import never_fatal

FPS = 20
"""Frames per second of the videos of events, as in EmbodiChain, whatever a step takes."""

_WAITING = 4096
_ENCODER = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-pix_fmt", "yuv420p"]
_ENCODER += ["-threads", "1"]  # the run needs the other cores

Put = Callable[[TensorDict], None]


class Camera(NamedTuple):
    """A camera of the config: its event, and the videos' folder and name."""

    use: str
    event: EventConfig
    params: RecordCameraConfig


def cameras(cfg: Config, use: Literal["train", "eval"]) -> list[Camera]:
    """The cameras among the events of training or evaluation, in the order of their names."""
    events = sorted(getattr(cfg.trainer.events, use).items())
    return [Camera(use, e, e.params) for _, e in events if isinstance(e.params, RecordCameraConfig)]


def check_cameras(cfg: Config) -> None:
    """Refuse, before a run begins, cameras that cannot record: no scene, one name twice, no OpenGL, no encoder."""
    for use in ("train", "eval"):
        names: dict[Path, str] = {}
        for name, event in sorted(getattr(cfg.trainer.events, use).items()):
            if not isinstance(event.params, RecordCameraConfig):
                continue
            told = term_text(f"trainer.events.{use}", name, event.func)
            if make_env(cfg.env).scene is None:
                raise ConfigError(f"{told}: {cfg.env.name} has no scene to be seen; take the event out")
            if event.mode != "interval":
                raise ConfigError(f"{told}: mode is {event.mode!r}, cameras record at mode 'interval'")
            other = names.setdefault(event.params.save_path / event.params.name, name)
            if other != name:
                raise ConfigError(f"{told}: params.name and save_path are those of {other}; name it differently")
            backend()
            encoder()


def encoder() -> str:
    """The ffmpeg that the package imageio-ffmpeg brings; MissingExtraError says how to install it."""
    with extra("video"):
        import imageio_ffmpeg
    return imageio_ffmpeg.get_ffmpeg_exe()


@contextmanager
def _encoding(path: Path, height: int, width: int, fps: float) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that adds an image to an mp4, by a process that Ctrl-C does not reach; OSError where it fails."""
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:.6g}", "-i", "-"]
    command = [encoder(), "-y", "-v", "error", *given, "-an", *_ENCODER, str(path)]
    with Popen(command, stdin=PIPE, stderr=PIPE, start_new_session=True) as process:
        pipe = cast(IO[bytes], process.stdin)
        with suppress(BrokenPipeError):  # ffmpeg itself says why it ended
            yield lambda image: cast(None, pipe.write(image.tobytes()))
            pipe.flush()
        _, told = process.communicate()
    if process.returncode:
        raise OSError(f"{path}: {told.decode(errors='replace').strip() or 'ffmpeg ended'}")


def write_video(path: Path, images: Iterable[np.ndarray], fps: float) -> int:
    """Write images as mp4 and count them; the file appears when it is complete, and not without any image.

    Args:
        path: of the file; its folder is made.
        images: uint8 `[h, w, 3]`, of one size; an odd height or width gets a black row or column more.
        fps: frames per second.

    Raises: OSError where the disk is full; MissingExtraError without the extra `video`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside, count, add = path.with_name(f".{path.stem}.part.mp4"), 0, None
    try:
        with ExitStack() as stack:
            for image in images:
                image = np.pad(image, [(0, size % 2) for size in image.shape[:2]] + [(0, 0)])
                height, width, _ = image.shape
                add = add or stack.enter_context(_encoding(aside, height, width, fps))
                add(image)
                count += 1
        if count:
            aside.replace(path)
        return count
    finally:
        aside.unlink(missing_ok=True)


def pictures(sim: Any, camera: CameraConfig, views: Iterable[TensorDict]) -> Iterator[np.ndarray]:
    """Each view, `[k]` worlds from `view`, as one image of k tiles."""
    with drawing(sim, camera) as draw:
        for seen in views:
            rows: list[Any] = [seen[i] for i in range(seen.batch_size[0])]
            yield grid([draw(row["physics"], row.get("targets", {})) for row in rows])


def view(state: TensorDict, many: int) -> TensorDict:
    """What videos need of the first `many` environments: `physics`, and `targets` where there are any."""
    seen = {"physics": state["world", "physics"][:many]}
    if "targets" in state:
        seen["targets"] = TensorDict({name: x[:many] for name, x in cast(TensorDict, state["targets"]).items()}, [many])
    return TensorDict(seen, [many])


def video_path(folder: Path, camera: Camera, step: int) -> Path:
    """Where a camera's video goes: `<folder>/<save_path>/<name>_<train or eval>_<env steps>.mp4`."""
    return folder / camera.params.save_path / f"{camera.params.name}_{camera.use}_{step}.mp4"


def _behind_all_else() -> None:
    """Where threads have a priority of their own, on Linux, this one and those it starts run when no other wants to."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


@contextmanager
def background() -> Iterator[Callable[..., Future]]:
    """A function that runs `job(*args)` in a thread of its own after the one before, for which it waits.

    An OSError, as of a full disk, is said and the run goes on; other errors are raised by the next call or at the end.
    """
    guarded, last = never_fatal("videos"), []
    with ThreadPoolExecutor(1, "ecrl-video", _behind_all_else) as thread:

        def start(job: Callable[..., Any], *args: Any) -> Future:
            while last:
                last.pop().result()
            last.append(thread.submit(guarded, torch.no_grad()(job), *args))
            return last[0]

        yield start
        while last:
            last.pop().result()


class Film(NamedTuple):
    """Videos of one evaluation: of how many environments, and how often and where each camera's frames go."""

    num_envs: int
    takes: tuple[tuple[int, int, Put], ...]  # interval_step, environments, put


def _put(queue: Queue, job: Future, item: TensorDict | None) -> None:
    """Wait for a place in the queue, unless nobody empties it any more."""
    while not job.done():
        try:
            return queue.put(item, timeout=0.2)
        except Full:
            pass
    job.result()


@contextmanager
def _take(start: Callable[..., Future], path: Path, sim: Any, camera: CameraConfig) -> Iterator[Put]:
    """A function that takes the frames of one video."""
    queue: Queue = Queue(_WAITING)
    job = start(lambda: write_video(path, pictures(sim, camera, iter(queue.get, None)), FPS))
    try:
        yield partial(_put, queue, job)
    finally:
        _put(queue, job, None)


@contextmanager
def filming(cfg: Config, folder: Path | None) -> Iterator[Callable[[TensorDict, int], Any]]:
    """A function that opens the videos of an evaluation, `(state of the run, environments) -> context of Film`.

    Args:
        cfg: of the run; its cameras are those of `trainer.events.eval`.
        folder: of the videos; None makes none.
    """
    found = cameras(cfg, "eval") if folder is not None else []
    if found:  # said before the evaluation, not by its end
        backend()
        encoder()
    sim = make_env(cfg.env).scene if found else None
    with ExitStack() as stack:
        threads = [stack.enter_context(background()) for _ in found]

        @contextmanager
        def opened(state: TensorDict, num_envs: int) -> Iterator[Film]:
            with ExitStack() as takes:
                made = []
                for camera, start in zip(found, threads, strict=True):
                    many = min(camera.params.max_env_num, num_envs)
                    path = video_path(folder or Path(), camera, int(state["sample_step"]))
                    put = takes.enter_context(_take(start, path, sim, camera.params))
                    made.append((camera.event.interval_step, many, put))
                yield Film(max([many for _, many, _ in made], default=0), tuple(made))

        yield opened


def with_film(steps: Iterator[tuple[list[tuple], TensorDict | None]], film: Film) -> Generator[list[tuple], None, None]:
    """The rows of an evaluation's steps; what is seen before each goes to the film until its episodes are over.

    Those are the first of each environment; one that ends before the others goes on in its next.
    """
    running = set(range(film.num_envs))
    for count, (row, seen) in enumerate(steps):
        for interval, many, put in film.takes if running else ():
            if seen is not None and count % interval == 0 and running & set(range(many)):
                put(seen[:many])
        running -= {i for i in running if row[i][1]}
        yield row
