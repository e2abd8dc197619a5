"""Events that record videos, events that vary cameras, colors or the light, and an observation term for images."""

from typing import Annotated, cast

from pydantic import AfterValidator, Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Fraction
from ecrl.envs.events import Apply
from ecrl.envs.mujoco.camera import (
    CENTER,
    COLOR,
    COLOR_OF,
    DIRECTION,
    EYE,
    FOCAL,
    TARGET,
    UP,
    named_shapes,
)
from ecrl.envs.mujoco.camera_config import CameraConfig, Quality, RecordCameraAsyncConfig, RecordCameraConfig
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.render_op import camera_handle, image
from ecrl.envs.mujoco.scene.config import LightConfig, Triple
from ecrl.envs.mujoco.terms.ranges import Span
from ecrl.envs.mujoco.terms.term import EntityConfig, Observe, new_entry
from ecrl.envs.scaling import LENGTH
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean, register_event, register_observation


def _ordered(bounds: tuple[tuple[float, ...], tuple[float, ...]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    for low, high in zip(*bounds, strict=True):
        if low > high:
            raise ValueError(f"lowest {low} is above highest {high}; give the lowest value first")
    return bounds


_Box = Annotated[tuple[Triple, Triple], Field(strict=False), AfterValidator(_ordered)]
_Shade = Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)]
_Colors = Annotated[tuple[_Shade, _Shade], Field(strict=False), AfterValidator(_ordered)]


def _refuse_in_task(cfg: RecordCameraConfig, sim: Simulation) -> Apply:
    reason = "a camera that records videos cannot be an event of a task"
    raise ConfigError(f"{reason}; put the event under trainer.events.train or trainer.events.eval")


@register_event("record_camera_data")
def record_camera_data(cfg: RecordCameraConfig, sim: Simulation) -> Apply:
    """Record an mp4 video of every evaluation or of rollouts, at 20 frames per second.

    Under `trainer.events.eval`, the event records every evaluation. Under `trainer.events.train`, the event records the
    rollout of every iteration. If `trainer.log_freq` is n, the event records the rollout of only one in n iterations.
    The video is written in the background. If writing is slower than training, training waits for the video. Recording
    does not change the environments. The event's `interval_step` is the number of environment steps from one frame to
    the next. If actions are chunks of steps, `interval_step` is a number of chunks.
    """
    return _refuse_in_task(cfg, sim)


@register_event("record_camera_data_async")
def record_camera_data_async(cfg: RecordCameraAsyncConfig, sim: Simulation) -> Apply:
    """Record an mp4 video like `record_camera_data`, but never make training wait for the video of a rollout.

    By default, a video shows at most 4 environments. If an earlier video is still being recorded when the rollout of an
    iteration ends, this iteration has no video. Videos of evaluations are recorded as by `record_camera_data`, so
    training may wait for them.
    """
    return _refuse_in_task(cfg, sim)


class CameraImageConfig(CameraConfig):
    """Settings of `camera_image`: a camera. By default, its images have the quality `fast`."""

    quality: Quality = Field(
        "fast",
        description="fast: no anti-aliasing and shapes with few faces; full: smooth edges and round shapes, but "
        "much slower",
    )


@register_observation("camera_image")
def camera_image(cfg: CameraImageConfig, sim: Simulation) -> Observe:
    """Observe the image of a camera. Discs in the image mark the target positions. Use this term in mode add.

    The image is `[*B, h, w, 3]`, uint8, with the top row of pixels first. The last axis is red, green and blue. The
    observation is then a Dict, because an image cannot be part of a float vector. The CPU draws the images, so use a
    small resolution.

    Raises: ConfigError if the mode is modify. UserError if no OpenGL backend works.
    """
    handle = camera_handle(sim, cfg)
    return lambda state, value: new_entry(value, image(handle, state))


_Ranges = dict[str, tuple[tuple[float, ...], tuple[float, ...]]]


def _zeros(ranges: _Ranges) -> dict[str, tuple[float, ...]]:
    """Return a dictionary that maps the name of each target in `ranges` to three zeros, the target's initial value."""
    return dict.fromkeys(ranges, (0.0, 0.0, 0.0))


class RandomizeCameraConfig(ConfigModel):
    """Settings of `randomize_camera_extrinsics`: ranges of the random offsets."""

    eye_range: Annotated[_Box | None, LENGTH] = Field(
        None, description="[lowest, highest] offset x y z added to the eye of cameras, m"
    )
    target_range: Annotated[_Box | None, LENGTH] = Field(
        None, description="[lowest, highest] offset x y z added to the target of cameras, m"
    )
    up_range: _Box | None = Field(
        None, description="[lowest, highest] offset x y z added to the up direction of cameras"
    )

    @model_validator(mode="after")
    def _has_a_range(self) -> "RandomizeCameraConfig":
        if not self.ranges:
            raise ValueError("no range is set; give at least one of eye_range, target_range and up_range")
        return self

    @property
    def ranges(self) -> _Ranges:
        """Dictionary that maps the name of each offset in the state's `targets` to the range of the offset."""
        ranges = {EYE: self.eye_range, TARGET: self.target_range, UP: self.up_range}
        return {name: box for name, box in ranges.items() if box is not None}

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of each offset to the initial value 0, which does not move the cameras."""
        return _zeros(self.ranges)


class RandomizeIntrinsicsConfig(ConfigModel):
    """Settings of `randomize_camera_intrinsics`: ranges of the random offsets, pixels."""

    focal_x_range: Span = Field((0.0, 0.0), description="[lowest, highest] offset added to the focal length fx, pixels")
    focal_y_range: Span = Field((0.0, 0.0), description="[lowest, highest] offset added to the focal length fy, pixels")
    cx_range: Span = Field((0.0, 0.0), description="[lowest, highest] offset added to the principal point cx, pixels")
    cy_range: Span = Field((0.0, 0.0), description="[lowest, highest] offset added to the principal point cy, pixels")

    @property
    def ranges(self) -> _Ranges:
        """Dictionary that maps the name of each offset in the state's `targets` to the range of the offset."""
        focal = zip(self.focal_x_range, self.focal_y_range, (0.0, 0.0), strict=True)
        center = zip(self.cx_range, self.cy_range, (0.0, 0.0), strict=True)
        (low, high), (low_center, high_center) = focal, center
        return {FOCAL: (low, high), CENTER: (low_center, high_center)}

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of each offset to the initial value 0, which changes nothing."""
        return _zeros(self.ranges)


class RandomizeMaterialConfig(ConfigModel):
    """Settings of `randomize_visual_material`: an object, and the range of its random color."""

    entity_cfg: EntityConfig = Field(description="the object; the uid floor selects the floor")
    base_color_range: _Colors = Field(
        ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), description="[lowest, highest] red, green, blue, 0 to 1"
    )

    @property
    def ranges(self) -> _Ranges:
        """Dictionary that maps the name of the target to the range of the color."""
        return {COLOR_OF + self.entity_cfg.uid: self.base_color_range}

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of the target to zeros, which the task replaces with the scene's color."""
        return _zeros(self.ranges)


class RandomizeLightConfig(ConfigModel):
    """Settings of `randomize_light`: ranges of the random direction and color."""

    direction_range: _Box | None = Field(None, description="[lowest, highest] x y z of the light's direction")
    color_range: _Colors | None = Field(None, description="[lowest, highest] red, green, blue, 0 to 1")

    @model_validator(mode="after")
    def _has_a_range(self) -> "RandomizeLightConfig":
        if self.direction_range is None and self.color_range is None:
            raise ValueError("give direction_range, color_range or both")
        if self.direction_range is not None and not any(x for bound in self.direction_range for x in bound):
            raise ValueError("direction_range contains only 0, which is not a direction; widen it")
        return self

    @property
    def ranges(self) -> _Ranges:
        """Dictionary that maps the name of each target to the range of the target's random values."""
        ranges = {DIRECTION: self.direction_range, COLOR: self.color_range}
        return {name: box for name, box in ranges.items() if box is not None}

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Dictionary that maps the name of each target to its initial value in a scene without a light."""
        default = LightConfig.model_construct()
        return {name: {DIRECTION: default.direction, COLOR: default.color}[name] for name in self.ranges}


_Stored = RandomizeCameraConfig | RandomizeIntrinsicsConfig | RandomizeMaterialConfig | RandomizeLightConfig


def _draw_targets(cfg: _Stored) -> Apply:
    """Return the `apply` function of an event that draws each target from its range."""

    def apply(state: TensorDict, keys: Tensor) -> TensorDict:
        known = cast(TensorDict, state["targets"]).keys() if "targets" in state else ()
        if missing := [name for name in cfg.ranges if name not in known]:
            fault = f"the task does not keep {missing[0]!r}, so this event cannot vary it"
            raise ConfigError(f"{fault}; put the event under env.cfg.events")
        targets = cast(TensorDict, state["targets"]).copy()
        for i, (name, (low, high)) in enumerate(cfg.ranges.items()):
            u = rng.uniform(rng.fold_in(keys, i), (3,))
            targets.set(name, u.new_tensor(low) + (u.new_tensor(high) - u.new_tensor(low)) * u)
        return state.copy().set("targets", targets)

    return apply


@register_event("randomize_camera_extrinsics")
def randomize_camera_extrinsics(cfg: RandomizeCameraConfig, sim: Simulation) -> Apply:
    """Move all cameras by random offsets. The event also moves the cameras that record videos.

        eye' = eye + draw,  target' = target + draw;    draw uniform between lowest and highest, m

    If `up_range` is set, the event also adds a draw to the up direction of the cameras. This draw has no unit.
    """
    return _draw_targets(cfg)


@register_event("randomize_camera_intrinsics")
def randomize_camera_intrinsics(cfg: RandomizeIntrinsicsConfig, sim: Simulation) -> Apply:
    """Change the intrinsics of all cameras by random offsets. The event also changes the cameras that record videos.

        fx' = fx + draw,  fy' = fy + draw,  cx' = cx + draw,  cy' = cy + draw;    pixels

    A focal length is at least 1 pixel.
    """
    return _draw_targets(cfg)


@register_event("randomize_visual_material")
def randomize_visual_material(cfg: RandomizeMaterialConfig, sim: Simulation) -> Apply:
    """Set the color of an object in images to a random color. The opacity and the physics do not change.

    color' = draw,    draw uniform between lowest and highest red, green and blue, 0 to 1
    """
    if (uid := cfg.entity_cfg.uid) not in (known := named_shapes(sim)):
        raise ConfigError(f"params.entity_cfg.uid: no object {uid!r} with a color; {did_you_mean(uid, known)}")
    return _draw_targets(cfg)


@register_event("randomize_light")
def randomize_light(cfg: RandomizeLightConfig, sim: Simulation) -> Apply:
    """Set the direction or the color of the light in images, or both, to random values. The physics does not change.

        direction = draw, of any length;  color = draw;    draw uniform between lowest and highest

    Without `direction_range`, the direction does not change. Without `color_range`, the color does not change.
    """
    return _draw_targets(cfg)
