"""What a config says of cameras: events that record videos, and what is seen as an observation."""

from pathlib import Path, PurePosixPath
from typing import Annotated, cast

from pydantic import AfterValidator, Field, field_validator, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Fraction
from ecrl.envs.events import Apply
from ecrl.envs.mujoco.camera import COLOR, DIRECTION, EYE, TARGET, CameraConfig, backend
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.render_op import camera_handle, image
from ecrl.envs.mujoco.scene.config import LightConfig, Triple
from ecrl.envs.mujoco.terms.term import Observe
from ecrl.errors import ConfigError
from ecrl.registry import register_event, register_observation


def _ordered(bounds: tuple[tuple[float, ...], tuple[float, ...]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    for low, high in zip(*bounds, strict=True):
        if low > high:
            raise ValueError(f"lowest {low} is above highest {high}")
    return bounds


_Box = Annotated[tuple[Triple, Triple], Field(strict=False), AfterValidator(_ordered)]
_Shade = Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)]
_Colors = Annotated[tuple[_Shade, _Shade], Field(strict=False), AfterValidator(_ordered)]


class RecordCameraConfig(CameraConfig):
    """A camera that makes videos."""

    name: str = Field("camera", pattern=r"^[\w-]+$", description="of the videos")
    max_env_num: Count = Field(16, description="environments that are seen, the first ones, side by side; at most")
    save_path: Annotated[Path, Field(strict=False)] = Field(
        Path(), description="folder within videos/ of the run folder"
    )

    @field_validator("save_path")
    @classmethod
    def _within(cls, path: Path) -> Path:
        if path.is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"{str(path)!r} leads out of the run folder; give a path below its videos/")
        return path


class RecordCameraAsyncConfig(RecordCameraConfig):
    """A camera that makes videos, of fewer environments if nothing is said."""

    max_env_num: Count = Field(4, description="environments that are seen, the first ones, side by side; at most")


def _apart(cfg: RecordCameraConfig, sim: Simulation) -> Apply:
    told = "cameras watch environments and are no part of them"
    raise ConfigError(f"{told}; put the event under trainer.events.train or trainer.events.eval")


@register_event("record_camera_data")
def record_camera_data(cfg: RecordCameraConfig, sim: Simulation) -> Apply:
    """Make an mp4 of every evaluation, or of what every iteration collects, 20 frames per second.

    It is written in the background and changes nothing of what it shows; training waits where it goes ahead of it.
    `interval_step` of the event: steps from one frame to the next.
    """
    return _apart(cfg, sim)


@register_event("record_camera_data_async")
def record_camera_data_async(cfg: RecordCameraAsyncConfig, sim: Simulation) -> Apply:
    """The same as `record_camera_data`, of 4 environments at most if nothing is said; training does not wait for it.

    An iteration that is collected while an earlier one is still drawn has no video.
    """
    return _apart(cfg, sim)


@register_observation("camera_image")
def camera_image(cfg: CameraConfig, sim: Simulation) -> Observe:
    """What a camera sees, with targets marked; mode add.

        pixel = red, green, blue / 255

    `[*B, h, w, 3]` float32 in 0 to 1, the upper row first; flat in the observation. Drawn on the host, one environment
    after the other: a small resolution is worth its time.
    """
    backend()
    handle = camera_handle(sim, cfg)
    return lambda state, value: image(handle, state)


class RandomizeCameraConfig(ConfigModel):
    """Where cameras are moved."""

    eye_range: _Box | None = Field(None, description="[lowest, highest] x y z added to where cameras are, m")
    target_range: _Box | None = Field(None, description="[lowest, highest] x y z added to what they look at, m")

    @model_validator(mode="after")
    def _something(self) -> "RandomizeCameraConfig":
        if self.eye_range is None and self.target_range is None:
            raise ValueError("give eye_range, target_range or both")
        return self

    @property
    def ranges(self) -> dict[str, tuple[Triple, Triple]]:
        """What is drawn, by the name of its target."""
        found = {EYE: self.eye_range, TARGET: self.target_range}
        return {name: box for name, box in found.items() if box is not None}

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Targets that are set, and what they are before: nothing is moved."""
        return dict.fromkeys(self.ranges, (0.0, 0.0, 0.0))


class RandomizeLightConfig(ConfigModel):
    """How the light of the images changes."""

    direction_range: _Box | None = Field(None, description="[lowest, highest] x y z of which way it shines")
    color_range: _Colors | None = Field(None, description="[lowest, highest] red, green, blue, 0 to 1")

    @model_validator(mode="after")
    def _something(self) -> "RandomizeLightConfig":
        if self.direction_range is None and self.color_range is None:
            raise ValueError("give direction_range, color_range or both")
        if self.direction_range is not None and not any(x for bound in self.direction_range for x in bound):
            raise ValueError("direction_range holds no direction but 0")
        return self

    @property
    def ranges(self) -> dict[str, tuple[Triple, Triple]]:
        """What is drawn, by the name of its target."""
        found = {DIRECTION: self.direction_range, COLOR: self.color_range}
        return {name: box for name, box in found.items() if box is not None}

    @property
    def stores(self) -> dict[str, tuple[float, ...]]:
        """Targets that are set, and what they are before, in a scene without a light of its own."""
        usual = LightConfig.model_construct()
        return {name: {DIRECTION: usual.direction, COLOR: usual.color}[name] for name in self.ranges}


def _stored(cfg: RandomizeCameraConfig | RandomizeLightConfig) -> Apply:
    """Draw each of the ranges into its target."""

    def apply(state: TensorDict, keys: Tensor) -> TensorDict:
        targets = cast(TensorDict, state["targets"]).copy()
        for i, (name, (low, high)) in enumerate(cfg.ranges.items()):
            u = rng.uniform(rng.fold_in(keys, i), (3,))
            targets.set(name, u.new_tensor(low) + (u.new_tensor(high) - u.new_tensor(low)) * u)
        return state.copy().set("targets", targets)

    return apply


@register_event("randomize_camera")
def randomize_camera(cfg: RandomizeCameraConfig, sim: Simulation) -> Apply:
    """Move all cameras, those of videos and of `camera_image`.

    eye' = eye + draw,  target' = target + draw;    draw uniform between lowest and highest, m
    """
    return _stored(cfg)


@register_event("randomize_light")
def randomize_light(cfg: RandomizeLightConfig, sim: Simulation) -> Apply:
    """Change direction and color of the light in images; the physics knows nothing of it.

    direction = draw, of any length;  color = draw;    draw uniform between lowest and highest
    """
    return _stored(cfg)
