"""Images of a scene from a camera, drawn without a screen from rows of `physics`: by EGL, else by OSMesa.

A camera is a pinhole: what is `(x, y, z)` to the right of it, below and in front of it, m, is seen at the pixel

    (fx x / z + cx, fy y / z + cy)        from the left upper corner
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from ecrl.config.model import ConfigModel, Positive
from ecrl.envs.mujoco.physics.simulation import Simulation, to_data
from ecrl.envs.mujoco.scene.config import Real, Triple
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import UserError

EYE, TARGET, DIRECTION, COLOR = "camera_eye_offset", "camera_target_offset", "light_direction", "light_color"
"""Targets of a state that say how it is seen; every other one of three numbers is a place, and marked."""

_GOAL = np.array([0.1, 0.75, 0.3, 0.5], np.float32)
_GOAL_SIZE = np.array([0.1, 0.002, 0.0])  # a disc: radius and half its thickness, m
_WORKS = "import mujoco.{0} as gl; context = gl.GLContext(8, 8); context.make_current(); context.free()"
_Pixels = Annotated[int, Field(ge=1, le=4096)]

Draw = Callable[[Tensor, Mapping[str, Tensor]], np.ndarray]
"""(row `[nstate]` of `physics`, targets by name `[n]`) -> image, uint8 `[h, w, 3]`."""


class CameraConfig(ConfigModel):
    """Where a camera is and how it sees."""

    resolution: Annotated[tuple[_Pixels, _Pixels], Field(strict=False)] = Field(
        (640, 480), description="width and height, pixels"
    )
    eye: Triple = Field((0.0, 0.0, 2.0), description="where it is, m")
    target: Triple = Field((0.0, 0.0, 0.0), description="what it looks at, m")
    up: Triple | None = Field(
        None, description="which way is up in the image; z if absent, y for a camera that looks straight up or down"
    )
    intrinsics: Annotated[tuple[Positive, Positive, Real, Real], Field(strict=False)] | None = Field(
        None, description="fx, fy, cx, cy, pixels; 600, 600 and the middle of the image if absent"
    )

    @model_validator(mode="after")
    def _looks_somewhere(self) -> "CameraConfig":
        if self.eye == self.target:
            raise ValueError(f"eye and target are one place, {list(self.eye)}; move one")
        if self.up is not None and not np.cross(np.subtract(self.target, self.eye), self.up).any():
            raise ValueError(f"up {list(self.up)} is the way it looks; choose another direction")
        return self


@cache
def backend() -> str:
    """The OpenGL that works here, `egl` or `osmesa`; $MUJOCO_GL if it says one of these.

    One that fails cannot be unloaded, so each is tried in a process of its own.

    Raises: UserError where neither works.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    names = (wanted,) if wanted in ("egl", "osmesa") else ("egl", "osmesa")
    for name in names:
        environment = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
        tried = [sys.executable, "-c", _WORKS.format(name)]
        if not subprocess.run(tried, env=environment | {"MUJOCO_GL": name}, capture_output=True).returncode:
            return name
    tried = " and ".join(names) + (", as MUJOCO_GL says" if len(names) == 1 else "")
    told = f"cameras: neither EGL nor OSMesa works here (tried {tried})"
    raise UserError(f"{told}; install one, such as: apt-get install libegl1 libgl1-mesa-dri, or take the camera out")


def _context(width: int, height: int) -> Any:
    if sys.platform != "linux":
        return mujoco().GLContext(width, height)
    os.environ["MUJOCO_GL"] = backend()  # MuJoCo's own loader reads it, whenever a context is made
    if backend() == "egl":
        from mujoco.egl import GLContext
    else:
        from mujoco.osmesa import GLContext
    return GLContext(width, height)


@contextmanager
def _canvas(model: Any, width: int, height: int) -> Iterator[Callable[[Any], np.ndarray]]:
    """A function that draws a scene of MuJoCo's; used and closed in the thread that opened it."""
    window, where = _context(width, height), mujoco().MjrRect(0, 0, width, height)
    try:
        window.make_current()
        context = mujoco().MjrContext(model, mujoco().mjtFontScale.mjFONTSCALE_100.value)
        mujoco().mjr_resizeOffscreen(width, height, context)
        mujoco().mjr_setBuffer(mujoco().mjtFramebuffer.mjFB_OFFSCREEN.value, context)

        def draw(scene: Any) -> np.ndarray:
            image = np.empty((height, width, 3), np.uint8)
            window.make_current()  # there may be others in this thread
            mujoco().mjr_render(where, scene, context)
            mujoco().mjr_readPixels(image, None, where, context)
            return image[::-1]

        try:
            yield draw
        finally:
            window.make_current()
            context.free()
    finally:
        window.free()


def _aim(camera: CameraConfig, eye: np.ndarray, target: np.ndarray, views: Any) -> None:
    """Put both of the scene's eyes, for those who have two screens, where the camera is."""
    far = float(np.linalg.norm(target - eye))
    ahead = (target - eye) / far
    up = np.array(camera.up if camera.up is not None else (0.0, 0.0, 1.0))
    if camera.up is None and np.linalg.norm(np.cross(ahead, up)) < 1e-6:
        up = np.array([0.0, 1.0, 0.0])
    up = up - ahead * (ahead @ up)
    (width, height), given = camera.resolution, camera.intrinsics
    fx, fy, cx, cy = given or (600.0, 600.0, width / 2, height / 2)
    for view in views:
        near, view.frustum_far = view.frustum_near, max(view.frustum_far, 10.0 * far)
        view.pos, view.forward, view.up = eye, ahead, up / np.linalg.norm(up)
        view.frustum_width, view.frustum_center = near * width / (2 * fx), near * (width / 2 - cx) / fx
        view.frustum_top, view.frustum_bottom = near * cy / fy, near * (cy - height) / fy


def lit(sim: Simulation) -> dict[str, tuple[float, ...]]:
    """What targets say of the light that a scene has, its first one; nothing if it has none."""
    model = sim.model
    return {DIRECTION: tuple(model.light_dir[0]), COLOR: tuple(model.light_diffuse[0])} if model.nlight else {}


def _light(scene: Any, seen: Mapping[str, np.ndarray]) -> None:
    for light in (light for light in scene.lights[: scene.nlight] if not light.headlight):
        if DIRECTION in seen:
            light.dir = seen[DIRECTION] / np.linalg.norm(seen[DIRECTION])
        if COLOR in seen:
            light.diffuse = seen[COLOR]


def _mark(scene: Any, place: np.ndarray) -> None:
    """A green disc, to be seen through."""
    if scene.ngeom < scene.maxgeom:
        kind = int(mujoco().mjtGeom.mjGEOM_CYLINDER)
        mujoco().mjv_initGeom(scene.geoms[scene.ngeom], kind, _GOAL_SIZE, place, np.eye(3).ravel(), _GOAL)
        scene.ngeom += 1


@contextmanager
def drawing(sim: Simulation, camera: CameraConfig) -> Iterator[Draw]:
    """A function that draws states of a simulation, to be used in the thread that opened it.

    Places among the targets are marked by discs; those that `randomize_camera` and `randomize_light` store move the
    camera and change the light.

    Raises: UserError where there is no OpenGL that works.
    """
    gl, model = mujoco(), sim.model
    data, scene = gl.MjData(model), gl.MjvScene(model, 1000)
    option, free, everything = gl.MjvOption(), gl.MjvCamera(), gl.mjtCatBit.mjCAT_ALL.value
    for flag in ("SHADOW", "REFLECTION"):  # each makes an image several times as expensive
        scene.flags[int(getattr(gl.mjtRndFlag, f"mjRND_{flag}"))] = 0
    none = np.zeros(3)
    with _canvas(model, *camera.resolution) as paint:

        def draw(row: Tensor, targets: Mapping[str, Tensor]) -> np.ndarray:
            seen = {name: value.double().cpu().numpy() for name, value in targets.items()}
            gl.mjv_updateScene(model, to_data(sim, row, data), option, None, free, everything, scene)
            eye, target = np.add(camera.eye, seen.get(EYE, none)), np.add(camera.target, seen.get(TARGET, none))
            _aim(camera, eye, target, scene.camera)
            _light(scene, seen)
            for name in seen.keys() - {EYE, TARGET, DIRECTION, COLOR}:
                if len(seen[name]) == 3:
                    _mark(scene, seen[name])
            return paint(scene)

        yield draw


def grid(images: list[np.ndarray]) -> np.ndarray:
    """Images of one size beside and below each other, nearly as many columns as rows; missing ones are black.

    >>> grid([np.ones((2, 4, 3), np.uint8)] * 3).shape
    (4, 8, 3)
    """
    columns = int(np.ceil(np.sqrt(len(images))))
    missing = [np.zeros_like(images[0])] * (-len(images) % columns)
    every = [*images, *missing]
    return np.concatenate([np.concatenate(every[i : i + columns], 1) for i in range(0, len(every), columns)], 0)
