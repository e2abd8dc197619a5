"""Scale the lengths of a task, so that a small arm can solve the task of a large arm."""

from typing import Annotated, TypeVar

from pydantic import Field

from ecrl.envs.mujoco.robots.robot import described
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.task_step import error_prefix
from ecrl.envs.scaling import scale_lengths

_REACH = 1.3
"""Reach of the built-in arm, m. The default lengths of tasks are chosen for this arm."""
_OWN = ("robot", "physics", "light", "mjcf")
"""Keys of a task's config whose lengths are not scaled."""

FALLEN_HEIGHT = -0.1
"""Height of an object, m, below which the object has fallen off the floor, in a task with a scale of 1."""

Cfg = TypeVar("Cfg", bound="ScalableTaskConfig")


class ScalableTaskConfig(TaskConfig):
    """Config of a task whose lengths can be scaled."""

    scale: Annotated[float, Field(ge=1e-3, le=1e3)] | None = Field(
        None,
        description=(
            "factor for the lengths of objects, events, terms and thresholds; masses are multiplied by the third "
            "power of the factor. By default, the factor is the arm's reach divided by 1.3 m for a registered arm and "
            "for an arm such as example:panda, and 1 for any other robot"
        ),
    )


def scale_of(cfg: ScalableTaskConfig) -> float:
    """Return the factor for the lengths of a task: `cfg.scale`, or by default the robot's reach divided by 1.3 m.

    Without `cfg.scale`, the factor is 1 if there is no robot, or if the robot has no `RobotModel`, which defines the
    reach.
    """
    with error_prefix("env.cfg"):
        model = None if cfg.robot is None else described(cfg.robot)
    return cfg.scale or (1.0 if model is None else model.reach / _REACH)


def scaled(cfg: Cfg) -> Cfg:
    """Return the config of a task with its lengths multiplied by `scale_of(cfg)`. The robot's size does not change."""
    factor = scale_of(cfg)
    if factor == 1.0:
        return cfg
    names = [name for name in type(cfg).model_fields if name not in _OWN]
    return cfg.model_copy(update={name: scale_lengths(getattr(cfg, name), factor) for name in names})
