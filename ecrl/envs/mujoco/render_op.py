"""Draw images with the torch operator `ecrl::mujoco_image`, which works inside compiled code.

The CPU draws the images one after the other. Each thread keeps one renderer per camera open until the process ends.
Opening a renderer takes as long as drawing dozens of small images.
"""

import atexit
from contextlib import ExitStack
from hashlib import sha256
from threading import local
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.envs.mujoco.camera import COLOR, DIRECTION, EYE, TARGET, CameraConfig, Draw, drawing
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.models import STATE, size_of
from ecrl.errors import ConfigError

_VECTORS = (EYE, TARGET, DIRECTION, COLOR)
_CAMERAS: dict[int, tuple[Simulation, CameraConfig]] = {}


class _Renderers(local):
    def __init__(self) -> None:
        self.draws: dict[int, Draw] = {}


_RENDERERS = _Renderers()

_NAME = "ecrl::mujoco_image"
torch.library.define(_NAME, "(Tensor physics, Tensor vectors, int camera) -> Tensor")


def camera_handle(sim: Simulation, camera: CameraConfig) -> int:
    """Register a camera of a simulation, and return an integer that identifies the camera.

    The returned handle is a hash of the model and of the camera's settings, so it is the same in every process.
    """
    content = sha256(f"{sim.handle} {camera.model_dump_json()}".encode()).digest()
    handle = int.from_bytes(content[:7])
    _CAMERAS[handle] = sim, camera
    return handle


def _camera(handle: int) -> tuple[Simulation, CameraConfig]:
    if handle not in _CAMERAS:
        raise ConfigError(f"camera {handle} is not registered in this process; make its environment first")
    return _CAMERAS[handle]


def _draw(handle: int) -> Draw:
    draws = _RENDERERS.draws
    if handle not in draws:
        stack = ExitStack()
        draws[handle] = stack.enter_context(drawing(*_camera(handle)))
        atexit.register(stack.close)
    return draws[handle]


@torch.library.impl(_NAME, "CPU")
def _image(physics: Tensor, vectors: Tensor, camera: int) -> Tensor:
    width, height = _camera(camera)[1].resolution
    out = torch.empty(len(physics), height, width, 3)
    for i, (row, rows) in enumerate(zip(physics, vectors, strict=True)):
        targets = {name: x for name, x in zip(_VECTORS, rows, strict=False) if not bool(x.isnan().any())}
        marks = {f"mark {j}": x for j, x in enumerate(rows[len(_VECTORS) :])}
        out[i] = torch.from_numpy(_draw(camera)(row, targets | marks).copy()).float() / 255.0
    return out


@torch.library.register_fake(_NAME)
def _(physics: Tensor, vectors: Tensor, camera: int) -> Tensor:
    width, height = _camera(camera)[1].resolution
    return physics.new_empty((len(physics), height, width, 3), dtype=torch.float32)


def _vmap_image(info: Any, in_dims: tuple, physics: Tensor, vectors: Tensor, camera: int) -> tuple[Tensor, int]:
    batched = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip((physics, vectors), in_dims[:2], strict=True)
    ]
    out = torch.ops.ecrl.mujoco_image(*(x.flatten(0, 1) for x in batched), camera)
    return out.unflatten(0, batched[0].shape[:2]), 0


torch.library.register_vmap(_NAME, _vmap_image)


def _vectors(state: TensorDict, batch: torch.Size) -> Tensor:
    """Stack the target vectors that an image depends on, `[*B, V, 3]`.

    The first four vectors set the camera and the light. Each of the four is NaN if the state has no such target. The
    other vectors are the positions that the image marks.
    """
    targets: Any = state.get("targets", {})
    absent = torch.full((*batch, 3), torch.nan)
    rows = [targets.get(name, absent) for name in _VECTORS]
    marks = [name for name in sorted(targets.keys()) if name not in _VECTORS and targets[name].shape[-1] == 3]
    return torch.stack([row.float() for row in (*rows, *(targets[name] for name in marks))], -2)


def image(handle: int, state: TensorDict) -> Tensor:
    """Draw the image that a camera sees in each environment.

        pixel = red, green, blue / 255

    Args:
        handle: the handle of the camera, as returned by `camera_handle`.
        state: the state of a task, `[*B]`.

    Returns: images `[*B, h, w, 3]`, float32 from 0 to 1, with the top row of pixels first.
    Gradient: none.
    Raises: ConfigError if the state is not on the CPU. UserError if neither EGL nor OSMesa works.
    """
    sim, camera = _camera(handle)
    physics, (width, height) = cast(Tensor, state["world", "physics"]), camera.resolution
    if not physics.is_cpu:
        raise ConfigError(f"the state is on {physics.device}, but images need the CPU; set trainer.device to cpu")
    batch = physics.shape[:-1]
    rows, vectors = physics.reshape(-1, size_of(sim.model, *STATE)), _vectors(state, batch)
    images = torch.ops.ecrl.mujoco_image(rows, vectors.reshape(len(rows), -1, 3), handle)
    return images.reshape(*batch, height, width, 3)
