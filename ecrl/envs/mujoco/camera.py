"""Render images of a scene from the `physics` state of its simulation.

On Linux, EGL or OSMesa renders the images, so no display is needed.

The camera is a pinhole camera. Take a point x metres to the right of the camera, y metres below it and z metres in
front of it. The point appears at these pixel coordinates, measured from the upper left corner of the image:

    (fx x / z + cx, fy y / z + cy)
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import numpy as np

from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.camera_config import CameraConfig
from ecrl.envs.mujoco.physics.simulation import Simulation, state_bits
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import UserError

EYE, TARGET, UP = "camera_eye_offset", "camera_target_offset", "camera_up_offset"
FOCAL, CENTER = "camera_focal_offset", "camera_center_offset"
DIRECTION, COLOR = "light_direction", "light_color"
SETTINGS = (EYE, TARGET, UP, FOCAL, CENTER, DIRECTION, COLOR)
"""Names of the vectors in the state's `targets` that move cameras, change their intrinsics or change the light."""
COLOR_OF, SIZE_OF = "color/", "size/"
"""Prefixes of the names of targets that hold the color or the size of an object, such as `color/cube`.

Targets with these prefixes, and the targets in `SETTINGS`, are not positions. Every other target with 3 elements is a
position, which a disc marks in the images.
"""

_GOAL = np.array([0.1, 0.75, 0.3, 0.5], np.float32)
_UPRIGHT = np.eye(3).ravel()
_GOAL_SIZE = np.array([0.1, 0.002, 0.0])  # radius and half thickness of the disc, in m
_PROBE = "import mujoco.{0} as gl; context = gl.GLContext(8, 8); context.make_current(); context.free()"

Draw = Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""Function that draws an image (uint8 `[h, w, 3]`) from one environment's `physics` (`[nstate]`) and named targets.

The next call overwrites the image.
"""


@cache
def backend() -> str:
    """Return the name of an OpenGL backend that works on this machine, either `egl` or `osmesa`.

    If $MUJOCO_GL is `egl` or `osmesa`, the function tries only this backend. Each backend is tried in a separate
    process, because a process cannot unload a backend that failed.

    Raises: UserError if none of the tried backends works.
    """
    requested = os.environ.get("MUJOCO_GL", "").lower()
    names = (requested,) if requested in ("egl", "osmesa") else ("egl", "osmesa")
    for name in names:
        environment = {key: value for key, value in os.environ.items() if key != "PYOPENGL_PLATFORM"}
        command = [sys.executable, "-c", _PROBE.format(name)]
        if not subprocess.run(command, env=environment | {"MUJOCO_GL": name}, capture_output=True).returncode:
            return name
    tried = " and ".join(names) + (", set by MUJOCO_GL" if len(names) == 1 else "")
    fault = f"cameras: no OpenGL backend works on this machine (tried {tried})"
    raise UserError(
        f"{fault}; install a backend, such as: apt-get install libegl1 libgl1-mesa-dri, or remove the camera"
    )


def _context(width: int, height: int) -> Any:
    if sys.platform != "linux":
        return mujoco().GLContext(width, height)
    os.environ["MUJOCO_GL"] = backend()  # MuJoCo reads MUJOCO_GL when it creates an OpenGL context
    if backend() == "egl":
        from mujoco.egl import GLContext
    else:
        from mujoco.osmesa import GLContext
    return GLContext(width, height)


def _drawn_model(model: Any, camera: CameraConfig) -> Any:
    """Return a copy of a model with the visual settings of a camera. The physics does not use the copy."""
    model = copy(model)
    visual = model.vis
    visual.global_.offwidth, visual.global_.offheight = camera.resolution
    visual.quality.shadowsize = 0  # images have no shadows, so do not allocate the shadow texture of 64 MB
    if camera.quality == "fast":
        visual.quality.offsamples = 0
        visual.quality.numslices, visual.quality.numstacks, visual.quality.numquads = 10, 5, 1
    return model


@contextmanager
def _canvas(model: Any, width: int, height: int) -> Iterator[Callable[[Any], np.ndarray]]:
    """Open an offscreen renderer, and yield a function that draws an `MjvScene` with this renderer.

    All calls of the yielded function write to the same array and return a view of it. Call the yielded function only in
    the thread that entered the context manager.
    """
    gl = mujoco()
    window, viewport = _context(width, height), gl.MjrRect(0, 0, width, height)
    try:
        window.make_current()
        context = gl.MjrContext(model, gl.mjtFontScale.mjFONTSCALE_100.value)
        gl.mjr_setBuffer(gl.mjtFramebuffer.mjFB_OFFSCREEN.value, context)

        image = np.empty((height, width, 3), np.uint8)

        def draw(scene: Any) -> np.ndarray:
            window.make_current()  # another OpenGL context may be current in this thread
            gl.mjr_render(viewport, scene, context)
            gl.mjr_readPixels(image, None, viewport, context)
            return image[::-1]

        try:
            yield draw
        finally:
            window.make_current()
            context.free()
    finally:
        window.free()


def intrinsics_of(camera: CameraConfig) -> tuple[float, float, float, float]:
    """Return the intrinsics fx, fy, cx and cy of a camera in pixels."""
    width, height = camera.resolution
    return camera.intrinsics or (600.0, 600.0, width / 2, height / 2)


def _aim(camera: CameraConfig, targets: Mapping[str, np.ndarray], views: Any) -> None:
    """Set the pose and the intrinsics of `views` from the settings of `camera` plus the offsets in `targets`.

    `views` are the left-eye and right-eye cameras of an `MjvScene`.
    """
    zero = np.zeros(3)
    eye, target = (
        np.add(start, targets.get(name, zero), dtype=np.float64)
        for start, name in ((camera.eye, EYE), (camera.target, TARGET))
    )
    distance = float(np.linalg.norm(target - eye))
    forward = (target - eye) / distance
    up = np.add(camera.up if camera.up is not None else (0.0, 0.0, 1.0), targets.get(UP, zero), dtype=np.float64)
    if camera.up is None and np.linalg.norm(np.cross(forward, up)) < 1e-6:
        up = np.array([0.0, 1.0, 0.0])
    up = up - forward * (forward @ up)
    width, height = camera.resolution
    fx, fy, cx, cy = intrinsics_of(camera)
    fx, fy = np.maximum(np.add((fx, fy), targets.get(FOCAL, zero)[:2], dtype=np.float64), 1.0)
    cx, cy = np.add((cx, cy), targets.get(CENTER, zero)[:2], dtype=np.float64)
    for view in views:
        near, view.frustum_far = view.frustum_near, max(view.frustum_far, 10.0 * distance)
        view.pos, view.forward, view.up = eye, forward, up / np.linalg.norm(up)
        view.frustum_width, view.frustum_center = near * width / (2 * fx), near * (width / 2 - cx) / fx
        view.frustum_top, view.frustum_bottom = near * cy / fy, near * (cy - height) / fy


def scene_light(sim: Simulation) -> dict[str, tuple[float, ...]]:
    """Return a dictionary that maps target names to the direction and the color of the scene's first light.

    The dictionary is empty if the scene has no light.
    """
    model = sim.model
    return {DIRECTION: tuple(model.light_dir[0]), COLOR: tuple(model.light_diffuse[0])} if model.nlight else {}


def _set_lights(scene: Any, targets: Mapping[str, np.ndarray], headlight: tuple[np.ndarray, np.ndarray]) -> None:
    """Set the direction and the color of the lights from `targets`.

    `headlight` is the position and the direction of the headlight, which the targets do not change.
    """
    for light in scene.lights[: scene.nlight]:
        if light.headlight:
            light.pos, light.dir = headlight
            continue
        if DIRECTION in targets:
            light.dir = targets[DIRECTION] / np.linalg.norm(targets[DIRECTION])
        if COLOR in targets:
            light.diffuse = targets[COLOR]


@cache
def named_shapes(sim: Simulation) -> tuple[str, ...]:
    """Return the names of the geoms whose color an event can change: the objects' own geoms, and the floor."""
    names = (sim.model.geom(i).name for i in range(sim.model.ngeom))
    bodies = {sim.model.body(i).name for i in range(1, sim.model.nbody)}
    return tuple(name for name in names if name and (name in bodies or name == "floor"))


def scene_colors(sim: Simulation) -> dict[str, tuple[float, ...]]:
    """Return a dictionary that maps names such as `color/cube` to the red, green and blue of the geoms in the scene."""
    return {COLOR_OF + name: tuple(map(float, sim.model.geom(name).rgba[:3])) for name in named_shapes(sim)}


def sizes_of(sim: Simulation, worlds: Any) -> dict[str, Any]:
    """Return a dictionary that maps names such as `size/cube` to MuJoCo's `geom_size` of the object, `[*B, 3]` (m).

    The dictionary contains only the objects whose size differs between environments. `worlds` has the field
    `parameters` if any model field varies.
    """
    uids = (uid for field, uid in sim.varied if field == "geom_size" and uid in named_shapes(sim))
    return {SIZE_OF + uid: world.parameter(sim, worlds, "geom_size", uid) for uid in uids}


def _set_shapes(model: Any, scene_model: Any, targets: Mapping[str, np.ndarray]) -> None:
    """Set the colors and the sizes of the geoms of `model` to the values in `targets`.

    Colors and sizes that are not in `targets` are copied from `scene_model`.
    """
    model.geom_rgba[:], model.geom_size[:] = scene_model.geom_rgba, scene_model.geom_size
    for name, values in targets.items():
        if name.startswith(COLOR_OF):
            model.geom(name.removeprefix(COLOR_OF)).rgba[:3] = values
        elif name.startswith(SIZE_OF):
            model.geom(name.removeprefix(SIZE_OF)).size[:] = values


def _add_mark(gl: Any, scene: Any, position: np.ndarray) -> None:
    """Add a translucent green disc at `position` to an `MjvScene`, unless the scene is full."""
    if scene.ngeom < scene.maxgeom:
        kind = gl.mjtGeom.mjGEOM_CYLINDER.value
        gl.mjv_initGeom(scene.geoms[scene.ngeom], kind, _GOAL_SIZE, position, _UPRIGHT, _GOAL)
        scene.ngeom += 1


@contextmanager
def drawing(sim: Simulation, camera: CameraConfig) -> Iterator[Draw]:
    """Open a renderer for a camera, and yield a function that draws states of a simulation.

    Call the yielded function only in the thread that entered the context manager.

    Discs in the images mark the targets that are positions. The targets of `randomize_camera_extrinsics` and
    `randomize_camera_intrinsics` change the camera, and the targets of `randomize_light` change the light. The targets
    of `randomize_visual_material` change colors. An image depends only on its state and targets, and not on the images
    that were drawn before.

    Raises: UserError if no OpenGL backend works, see `backend`.
    """
    gl, model = mujoco(), _drawn_model(sim.model, camera)
    data, scene = gl.MjData(model), gl.MjvScene(model, 1000)
    option, view, everything = gl.MjvOption(), gl.MjvCamera(), gl.mjtCatBit.mjCAT_ALL.value
    for flag in ("SHADOW", "REFLECTION"):  # shadows and reflections each make drawing several times slower
        scene.flags[int(getattr(gl.mjtRndFlag, f"mjRND_{flag}"))] = 0
    gl.mjv_updateScene(model, data, option, None, view, everything, scene)
    view.type = gl.mjtCamera.mjCAMERA_USER.value  # later updates keep the pose that `_aim` sets
    near_far = [(side.frustum_near, side.frustum_far) for side in scene.camera]
    headlight = scene.lights[0].pos.copy(), scene.lights[0].dir.copy()  # at MuJoCo's default camera
    positions = gl.mj_kinematics, gl.mj_comPos, gl.mj_camlight, gl.mj_flex, gl.mj_tendon
    bits, pose = state_bits(), b""
    with _canvas(model, *camera.resolution) as paint:

        def draw(row: np.ndarray, targets: Mapping[str, np.ndarray]) -> np.ndarray:
            nonlocal pose
            _set_shapes(model, sim.model, targets)
            gl.mj_setState(model, data, row, bits)
            for compute in positions:  # faster than `mj_forward`, which also computes contacts, forces and sensors
                compute(model, data)
            gl.mjv_updateScene(model, data, option, None, view, everything, scene)
            offsets = [targets[name].tobytes() if name in targets else b"" for name in SETTINGS[:5]]
            if pose != (pose := b"|".join(offsets)):
                for side, (near, far) in zip(scene.camera, near_far, strict=True):
                    side.frustum_near, side.frustum_far = near, far
                _aim(camera, targets, scene.camera)
            _set_lights(scene, targets, headlight)
            for name in targets.keys() - {*SETTINGS}:
                if len(targets[name]) == 3 and not name.startswith((COLOR_OF, SIZE_OF)):
                    _add_mark(gl, scene, targets[name])
            return paint(scene)

        yield draw


def grid(images: list[np.ndarray]) -> np.ndarray:
    """Arrange images of the same size in a nearly square grid. Empty cells are black.

    >>> grid([np.ones((2, 4, 3), np.uint8)] * 3).shape
    (4, 8, 3)
    """
    columns = int(np.ceil(np.sqrt(len(images))))
    empty = [np.zeros_like(images[0])] * (-len(images) % columns)
    cells = [*images, *empty]
    return np.concatenate([np.concatenate(cells[i : i + columns], 1) for i in range(0, len(cells), columns)], 0)
