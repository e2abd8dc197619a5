"""Scale the lengths of a task, so that a small arm can solve the task of a large arm.

In a Config model, each field in units of length has a marker, such as `Annotated[Triple, LENGTH]`.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field

from ecrl.envs.mujoco.robots.robot import described
from ecrl.envs.mujoco.scene.config import ScalesWith
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.task_step import error_prefix

_REACH = 1.3
"""Reach of the built-in arm, m. The default lengths of tasks are chosen for this arm."""
_OWN = ("robot", "physics", "light", "mjcf")
"""Keys of a task's config whose lengths are not scaled."""

Cfg = TypeVar("Cfg", bound="ScalableTaskConfig")


class ScalableTaskConfig(TaskConfig):
    """Config of a task whose lengths can be scaled."""

    scale: Annotated[float, Field(ge=1e-3, le=1e3)] | None = Field(
        None,
        description=(
            "factor for the lengths of objects, events, terms and thresholds; masses are multiplied by its third "
            "power. If absent, the factor of registered arms, and of arms such as example:panda, is their reach "
            "divided by 1.3 m, and otherwise 1"
        ),
    )


def _times(value: Any, factor: float) -> Any:
    """Multiply a number, or all numbers of nested tuples, by `factor`. None stays None."""
    if isinstance(value, tuple):
        return tuple(_times(x, factor) for x in value)
    return value if value is None else value * factor


def _scaled(value: Any, factor: float) -> Any:
    """Multiply the marked fields of a Config model, and of all models in it, by powers of a factor."""
    if isinstance(value, tuple):
        return tuple(_scaled(x, factor) for x in value)
    if isinstance(value, dict):
        return {name: _scaled(x, factor) for name, x in value.items()}
    if not isinstance(value, BaseModel):
        return value
    changes: dict[str, Any] = {}
    for name, info in type(value).model_fields.items():
        marker = next((x for x in info.metadata if isinstance(x, ScalesWith)), None)
        old = getattr(value, name)
        changes[name] = _scaled(old, factor) if marker is None else _times(old, factor**marker.power)
    return value.model_copy(update=changes)


def scale_of(cfg: ScalableTaskConfig) -> float:
    """Return the factor for the lengths of a task: `cfg.scale`, or by default the robot's reach divided by 1.3 m.

    Without `cfg.scale`, the factor is 1 if the robot has no `RobotModel`, which defines the reach.
    """
    with error_prefix("env.cfg"):
        model = None if cfg.robot is None else described(cfg.robot)
    return cfg.scale or (1.0 if model is None else model.reach / _REACH)


def scaled(cfg: Cfg) -> Cfg:
    """Return the config of a task with its lengths multiplied by `scale_of(cfg)`. The robot's size does not change.

        length' = scale length,    mass' = scale^3 mass,    force' = scale^4 force,    1 / length' = 1 / (scale length)

    Times and densities do not change, so velocities and accelerations have the same factor as lengths.
    """
    factor = scale_of(cfg)
    if factor == 1.0:
        return cfg
    return cfg.model_copy(
        update={name: _scaled(getattr(cfg, name), factor) for name in type(cfg).model_fields if name not in _OWN}
    )
