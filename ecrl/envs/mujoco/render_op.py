"""Draw images with the torch operator `ecrl::mujoco_image`, which works inside compiled code.

The CPU draws the images, on as many threads as the physics uses (`physics.threads`). The calling thread draws its share
of the images. Further threads, which live until the process ends, draw the other images. In each thread, one renderer
per camera remains open. Opening a renderer takes as long as drawing dozens of small images.

An image does not depend on the thread that draws it, so the images are bitwise equal for any number of threads.
"""

import atexit
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache
from hashlib import sha256
from queue import SimpleQueue
from threading import Thread, local
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco.camera import (
    COLOR_OF,
    SETTINGS,
    SIZE_OF,
    Draw,
    backend,
    drawing,
    named_shapes,
    sizes_of,
)
from ecrl.envs.mujoco.camera_config import CameraConfig
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.models import STATE, loaded, size_of
from ecrl.errors import ConfigError

NEEDED = "needed"
"""Name of an optional state field, bool `[*B]`. Images are drawn only where the field is True, and are black elsewhere.

`ecrl.envs.mujoco.task_step.observe_where` sets this field.
"""

_CAMERAS: dict[int, tuple[Simulation, CameraConfig]] = {}


class _Renderers(local):
    def __init__(self) -> None:
        self.draws: dict[int, Draw] = {}
        self.stack = ExitStack()
        self.close: Callable[[], None] = self.stack.close


_RENDERERS = _Renderers()

_NAME = "ecrl::mujoco_image"
torch.library.define(_NAME, "(Tensor physics, Tensor vectors, Tensor needed, int camera) -> Tensor")


def camera_handle(sim: Simulation, camera: CameraConfig) -> int:
    """Register a camera of a simulation, and return an integer that identifies the camera.

    The returned handle is a hash of the model and of the camera's settings, so it is the same in every process.

    Raises: UserError if no OpenGL backend works, see `camera.backend`.
    """
    # Mesa's own threads cannot share the work on a small image, and would compete with the threads of this module
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if sys.platform == "linux":  # elsewhere, MuJoCo's default OpenGL context draws the images
        backend()
    content = sha256(f"{sim.handle} {camera.model_dump_json()}".encode()).digest()
    handle = int.from_bytes(content[:7])
    _CAMERAS[handle] = sim, camera
    return handle


def _camera(handle: int) -> tuple[Simulation, CameraConfig]:
    if handle not in _CAMERAS:
        raise ConfigError(f"camera {handle} is not registered in this process; make its environment first")
    return _CAMERAS[handle]


@cache
def _vector_names(sim: Simulation) -> tuple[str, ...]:
    """Return the names of the vectors that an image depends on, except for the marked positions."""
    shapes = named_shapes(sim)
    return (*SETTINGS, *(COLOR_OF + name for name in shapes), *(SIZE_OF + name for name in shapes))


def _draw(handle: int) -> Draw:
    """Return the function that draws images of a camera in this thread. The first call opens the renderer."""
    if handle not in _RENDERERS.draws:
        draw = _RENDERERS.stack.enter_context(drawing(*_camera(handle)))
        if not _RENDERERS.draws:
            # register after the first renderer has opened, because exit functions run in reverse order
            atexit.register(_RENDERERS.close)
        _RENDERERS.draws[handle] = draw
    return _RENDERERS.draws[handle]


_Job = Callable[[], None]


@cache
def _queue(number: int) -> SimpleQueue[tuple[_Job, Future[None]] | None]:
    """Return the job queue of thread `number`. The first call starts the thread, and the job None ends it."""
    queue: SimpleQueue[tuple[_Job, Future[None]] | None] = SimpleQueue()

    def end() -> None:
        queue.put(None)
        thread.join()

    def work() -> None:
        _RENDERERS.close = end  # an OpenGL context must be closed in the thread that used it
        with _RENDERERS.stack:
            while entry := queue.get():
                job, future = entry
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)

    thread = Thread(target=work, name=f"ecrl-camera-{number}", daemon=True)
    thread.start()
    return queue


def _run_together(jobs: list[_Job]) -> None:
    """Run the first job in this thread and each other job in a thread of its own, and wait for all jobs."""
    futures: list[Future[None]] = []
    for number, job in enumerate(jobs[1:]):
        future: Future[None] = Future()
        _queue(number).put((job, future))
        futures.append(future)
    try:
        for job in jobs[:1]:
            job()
    finally:
        errors = [future.exception() for future in futures]  # waits, because the jobs write into shared memory
    for error in errors:
        if error is not None:
            raise error


def _draw_rows(out: np.ndarray, physics: np.ndarray, vectors: np.ndarray, rows: np.ndarray, camera: int) -> None:
    """Draw the images of the environments with the indices `rows` into `out`, in this thread."""
    names = _vector_names(_camera(camera)[0])
    draw, is_absent = _draw(camera), np.isnan(vectors[:, : len(names), 0])
    marks = {f"mark {j}": len(names) + j for j in range(vectors.shape[1] - len(names))}
    for i in rows:
        targets = {name: vectors[i, j] for j, name in enumerate(names) if not is_absent[i, j]}
        targets |= {name: vectors[i, j] for name, j in marks.items()}
        out[i] = draw(physics[i], targets)


@torch.library.impl(_NAME, "CPU")
def _image(physics: Tensor, vectors: Tensor, needed: Tensor, camera: int) -> Tensor:
    sim, cfg = _camera(camera)
    width, height = cfg.resolution
    out = torch.zeros(len(physics), height, width, 3, dtype=torch.uint8)
    arrays = out.numpy(), np.ascontiguousarray(physics.numpy()), vectors.numpy()
    rows = np.flatnonzero(needed.numpy())
    threads = min(loaded(sim.handle).threads or torch.get_num_threads(), len(rows))
    _run_together([lambda share=rows[i::threads]: _draw_rows(*arrays, share, camera) for i in range(threads)])
    return out


@torch.library.register_fake(_NAME)
def _(physics: Tensor, vectors: Tensor, needed: Tensor, camera: int) -> Tensor:
    width, height = _camera(camera)[1].resolution
    return physics.new_empty((len(physics), height, width, 3), dtype=torch.uint8)


def _vmap_image(
    info: Any, in_dims: tuple, physics: Tensor, vectors: Tensor, needed: Tensor, camera: int
) -> tuple[Tensor, int]:
    batched = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip((physics, vectors, needed), in_dims[:3], strict=True)
    ]
    out = torch.ops.ecrl.mujoco_image(*(x.flatten(0, 1) for x in batched), camera)
    return out.unflatten(0, batched[0].shape[:2]), 0


torch.library.register_vmap(_NAME, _vmap_image)


def _vectors(sim: Simulation, state: TensorDict, batch: torch.Size) -> Tensor:
    """Stack the vectors that an image depends on, `[*B, V, 3]`.

    The first vectors set the camera, the light, and the colors and sizes of objects; see `_vector_names`. A vector that
    the state lacks is NaN. The other vectors are the positions that the image marks.
    """
    targets: Any = state.get("targets", {})
    names, sizes, absent = _vector_names(sim), sizes_of(sim, state["world"]), torch.full((*batch, 3), torch.nan)
    rows = [sizes.get(name, targets.get(name, absent)) for name in names]
    marks = [name for name in sorted(targets.keys()) if name not in names and targets[name].shape[-1] == 3]
    return torch.stack([row.float() for row in (*rows, *(targets[name] for name in marks))], -2)


def image(handle: int, state: TensorDict) -> Tensor:
    """Draw the image that a camera sees in each environment.

    Args:
        handle: the handle of the camera, as returned by `camera_handle`.
        state: the state of a task, `[*B]`. If the state has the bool field `needed`, `[*B]`, images are drawn only for
            environments with True. All pixels of other images are 0.

    Returns: images `[*B, h, w, 3]`, uint8, with the top row of pixels first. The last axis is red, green and blue.
    Gradient: none.
    Raises: ConfigError if the state is not on the CPU. UserError if no OpenGL backend works.
    """
    sim, camera = _camera(handle)
    physics, (width, height) = cast(Tensor, state["world", "physics"]), camera.resolution
    if not physics.is_cpu:
        raise ConfigError(f"the state is on {physics.device}, but images need the CPU; set trainer.device to cpu")
    batch = physics.shape[:-1]
    rows, vectors = physics.reshape(-1, size_of(sim.model, *STATE)), _vectors(sim, state, batch)
    needed = state.get(NEEDED, torch.ones(batch, dtype=torch.bool))
    images = torch.ops.ecrl.mujoco_image(rows, vectors.reshape(len(rows), -1, 3), needed.reshape(-1), handle)
    return images.reshape(*batch, height, width, 3)
