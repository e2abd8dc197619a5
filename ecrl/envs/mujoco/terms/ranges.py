"""Ranges of random values in the config of an event, and functions that draw values from the ranges.

Each time an event happens, the event draws new values uniformly between two bounds:

    draw = low + (high - low) u,    u uniform over the multiples of 2**-24 in [0, 1)
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from ecrl import rng
from ecrl.config.model import LIST, NUMBER, ConfigModel, NonNegative, Positive, by_kind
from ecrl.envs.mujoco.scene.config import Real, Triple
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.envs.mujoco.terms.term import EntityConfig
from ecrl.envs.scaling import LENGTH
from ecrl.errors import ConfigError


def numbers(bound: Any) -> tuple[float, ...]:
    """Return a bound, which is a number or a tuple of numbers, as a tuple."""
    return bound if isinstance(bound, tuple) else (bound,)


def _ordered(bounds: Any) -> Any:
    low, high = (numbers(bound) for bound in bounds)
    if len(low) != len(high) and 1 not in (len(low), len(high)):
        raise ValueError(f"{len(low)} lowest values, but {len(high)} highest values; give equally many of both")
    length = max(len(low), len(high))
    for a, b in zip(low * (length // len(low)), high * (length // len(high)), strict=True):
        if a > b:
            raise ValueError(f"lowest {a} is above highest {b}; give the lowest value first")
    return bounds


def _one_or_three(factors: tuple[float, ...]) -> tuple[float, ...]:
    if len(factors) == 2:
        raise ValueError("2 factors; give one factor, or three for x, y and z")
    return factors


_List = Annotated[tuple[Real, ...], Field(strict=False, min_length=1), LIST]
_Row = Annotated[Annotated[Real, NUMBER] | _List, by_kind("a number or a list of numbers")]
_Factors = Annotated[
    tuple[Positive, ...], Field(strict=False, min_length=1, max_length=3), AfterValidator(_one_or_three)
]
_Pair = Annotated[tuple[Real, Real], Field(strict=False)]
Span = Annotated[tuple[Real, Real], Field(strict=False), AfterValidator(_ordered)]
"""Range of a number: [lowest, highest]."""
Rectangle = Annotated[tuple[_Pair, _Pair], Field(strict=False), AfterValidator(_ordered)]
"""Range of a vector in the plane: [lowest x y, highest x y]."""
Box = Annotated[tuple[Triple, Triple], Field(strict=False), AfterValidator(_ordered)]
"""Range of a vector: [lowest x y z, highest x y z]."""
Rows = Annotated[tuple[_Row, _Row], Field(strict=False), AfterValidator(_ordered)]
"""Range of a list of numbers: [lowest, highest]. Each of the two bounds is a number or a list of numbers."""
Factors = Annotated[tuple[_Factors, _Factors], Field(strict=False), AfterValidator(_ordered)]
"""Range of one factor or of three factors: [lowest, highest], each a list of one or three positive numbers."""
NonNegativeSpan = Annotated[tuple[NonNegative, NonNegative], Field(strict=False), AfterValidator(_ordered)]
"""Range of a number that is at least 0: [lowest, highest]."""


class PoseRangeConfig(ConfigModel):
    """Ranges of a random pose."""

    position_range: Annotated[Box | None, LENGTH] = Field(
        None, description="[lowest, highest] x y z, m; if absent, the position does not change"
    )
    rotation_range: Box | None = Field(
        None,
        description="[lowest, highest] angles about x, the rotated y and the rotated z, degrees; if absent, the "
        "rotation does not change",
    )

    @model_validator(mode="after")
    def _has_a_range(self) -> "PoseRangeConfig":
        if self.position_range is None and self.rotation_range is None:
            raise ValueError("give position_range, rotation_range or both")
        return self


class ScenePoseConfig(PoseRangeConfig):
    """Settings of an event that moves an object or a robot to a random pose."""

    entity_cfg: EntityConfig = Field(description="the object or the robot")
    relative_position: bool = Field(True, description="add the draw to the position in the scene config")
    relative_rotation: bool = Field(False, description="combine the draw with the rotation in the scene config")


def draw(keys: Tensor, bounds: tuple[Any, Any], count: int, *rows: int) -> Tensor:
    """Draw values, float32 `[*B, *rows, count]`, uniformly between two bounds.

    Each bound has one value or `count` values.
    """
    u = rng.uniform(keys, (*rows, count))
    low, high = (u.new_tensor(numbers(bound)) for bound in bounds)
    return low + (high - low) * u


class Pose(NamedTuple):
    """Constant pose: a position (m) and a quaternion (w, x, y, z)."""

    position: tuple[float, ...]
    quaternion: tuple[float, ...]


def pose_of(matrix: Tensor) -> Pose:
    """Convert a pose `[4, 4]` to a position and a quaternion."""
    quaternion = np.zeros(4)
    mujoco().mju_mat2Quat(quaternion, matrix[:3, :3].double().numpy().flatten())
    return Pose(tuple(matrix[:3, 3].tolist()), tuple(quaternion.tolist()))


def draw_scene_pose(cfg: ScenePoseConfig, keys: Tensor, home: Pose) -> tuple[Tensor | None, Tensor | None]:
    """Draw a position `[*B, 3]` (m) and a quaternion `[*B, 4]`, as the settings of an event describe.

    `home` is the pose in the scene config. Without `position_range`, the position is None. Without `rotation_range`,
    the quaternion is None.
    """
    position, quaternion = None, None
    if cfg.position_range is not None:
        position = draw(keys, cfg.position_range, 3)
        position = position + position.new_tensor(home.position) if cfg.relative_position else position
    if cfg.rotation_range is not None:
        quaternion = quaternion_of_angles(draw(rng.fold_in(keys, 1), cfg.rotation_range, 3))
        if cfg.relative_rotation:
            quaternion = multiply(quaternion.new_tensor(home.quaternion).expand_as(quaternion), quaternion)
    return position, quaternion


def look_up(parameter: str, find: Callable[[], Any]) -> Any:
    """Call `find` and return its result. If `find` raises ConfigError, prefix the message with `params.{parameter}`."""
    try:
        return find()
    except ConfigError as error:
        raise ConfigError(f"params.{parameter}: {error}") from None


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply quaternions (w, x, y, z), `[*B, 4]`. The product rotates by `b` first and then by `a`."""
    (aw, av), (bw, bv) = (q.split((1, 3), -1) for q in (a, b))
    real = aw * bw - (av * bv).sum(-1, keepdim=True)
    return torch.cat((real, aw * bv + bw * av + torch.linalg.cross(av, bv)), -1)


def quaternion_of_angles(degrees: Tensor) -> Tensor:
    """Convert rotation angles `[*B, 3]` (degrees) about x, the rotated y and the rotated z to quaternions `[*B, 4]`."""
    half = torch.deg2rad(degrees) / 2.0
    real, axes = half.cos().unsqueeze(-1), half.sin().unsqueeze(-1) * torch.eye(3, device=half.device)
    x, y, z = torch.cat((real, axes), -1).unbind(-2)
    return multiply(x, multiply(y, z))
