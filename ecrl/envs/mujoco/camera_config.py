"""Settings of cameras that render images, and of events that record videos."""

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.mujoco.scene.config import Real, Triple
from ecrl.envs.scaling import LENGTH

_Pixels = Annotated[int, Field(ge=1, le=4096)]

Quality = Literal["fast", "full"]
"""Quality of the images of a camera, see `CameraConfig`."""


class CameraConfig(ConfigModel):
    """Config of a camera: its pose, resolution, intrinsics and quality."""

    resolution: Annotated[tuple[_Pixels, _Pixels], Field(strict=False)] = Field(
        (640, 480), description="width and height, pixels"
    )
    eye: Annotated[Triple, LENGTH] = Field((0.0, 0.0, 2.0), description="position of the camera, m")
    target: Annotated[Triple, LENGTH] = Field((0.0, 0.0, 0.0), description="point that the camera looks at, m")
    up: Triple | None = Field(
        None, description="up direction of the image; by default z, or y if the camera looks straight up or down"
    )
    intrinsics: Annotated[tuple[Positive, Positive, Real, Real], Field(strict=False)] | None = Field(
        None, description="fx, fy, cx, cy, pixels; by default 600, 600 and the middle of the image"
    )
    quality: Quality = Field(
        "full",
        description=(
            "full: smooth edges and round shapes; fast: no anti-aliasing, and shapes with few faces, for small images"
        ),
    )

    @model_validator(mode="after")
    def _looks_somewhere(self) -> "CameraConfig":
        if self.eye == self.target:
            raise ValueError(f"eye and target are the same point, {list(self.eye)}; move the eye or the target")
        if self.up is not None and not np.cross(np.subtract(self.target, self.eye), self.up).any():
            raise ValueError(f"up {list(self.up)} is parallel to the viewing direction; choose another direction")
        return self


class RecordCameraConfig(CameraConfig):
    """Settings of `record_camera_data`: a camera, and the videos that the camera records."""

    name: str = Field("camera", pattern=r"^[\w-]+$", description="first part of the file names of the videos")
    max_env_num: Count = Field(16, description="maximum number of environments in a video, which shows them in a grid")
    save_path: Annotated[Path, Field(strict=False)] = Field(
        Path(), description="folder within videos/ of the run folder"
    )

    @field_validator("save_path")
    @classmethod
    def _within(cls, path: Path) -> Path:
        if path.is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"{str(path)!r} is absolute or contains '..'; give a path below videos/ of the run folder")
        return path


class RecordCameraAsyncConfig(RecordCameraConfig):
    """Settings of `record_camera_data_async`. By default, a video shows at most 4 environments."""

    max_env_num: Count = Field(4, description="maximum number of environments in a video, which shows them in a grid")
