"""Action term `RelativeJointPositionAction`, which selects joints by name, or selects all joints of a robot part."""

from typing import Annotated, Self

from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl.config.model import LIST, NUMBER, ConfigModel, Positive, by_kind
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.terms.actions import Scale
from ecrl.envs.mujoco.terms.term import ActionTerm, named_joints, part_of
from ecrl.errors import ConfigError
from ecrl.registry import register_action

_Scales = Annotated[tuple[Scale, ...], Field(strict=False, min_length=1), LIST]


class RelativeJointPositionConfig(ConfigModel):
    """Settings of `RelativeJointPositionAction`: the joints, their order, the scale and the largest action."""

    part_name: str | None = Field(
        None, description="part of the robot whose joints are driven; an alternative to joint_names"
    )
    joint_names: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="names of the driven joints; an alternative to part_name"
    )
    preserve_order: bool = Field(
        False,
        description="true: the actions have the order of joint_names; false: the actions have the order of the robot's "
        "joints; no effect with part_name",
    )
    scale: Annotated[Annotated[Scale, NUMBER] | _Scales, by_kind("a number or a list of numbers")] = Field(
        1.0, description="change of position per unit of action, in rad or m; a number, or a list with one per joint"
    )
    clip: Positive | None = Field(
        None,
        le=1e6,
        description="actions are clamped to [-clip, clip]; if absent, their range is [-1, 1], and they are not clamped",
    )

    @model_validator(mode="after")
    def _one_selection(self) -> Self:
        if (self.part_name is None) == (self.joint_names is None):
            raise ValueError("give either part_name or joint_names, which select the joints")
        return self


def _selected_joints(cfg: RelativeJointPositionConfig, sim: Simulation) -> tuple[str, ...]:
    """Return the joints of the term, in the order of the actions."""
    if cfg.part_name is not None:
        return part_of(sim, cfg.part_name)
    chosen = named_joints(sim, cfg.joint_names or ())
    return chosen if cfg.preserve_order else tuple(sorted(chosen, key=sim.robot.joints.index))


@register_action("RelativeJointPositionAction")
def relative_joint_position(cfg: RelativeJointPositionConfig, sim: Simulation) -> ActionTerm:
    """Set the target positions of joints (rad or m) to `qpos + scale * clamp(a, -clip, clip)`.

    `qpos` contains the current positions of the joints. The action a is in [-clip, clip], or in [-1, 1] without `clip`.
    Without `clip`, the term does not clamp actions.

    Raises: ConfigError if a joint or a part is unknown, if a joint is named twice, if a joint does not have exactly one
        actuator, or if `scale` is a list that does not have one number per joint.
    """
    joints = _selected_joints(cfg, sim)
    world.actuators_of(sim, joints)
    scales = cfg.scale if isinstance(cfg.scale, tuple) else (cfg.scale,) * len(joints)
    if len(scales) != len(joints):
        raise ConfigError(f"params.scale: {len(scales)} numbers for {len(joints)} joints; give one per joint")

    def control(state: TensorDict, action: Tensor) -> Tensor:
        action = action if cfg.clip is None else action.clamp(-cfg.clip, cfg.clip)
        return world.joint_positions(sim, state["world"], joints) + action.new_tensor(scales) * action

    bound = 1.0 if cfg.clip is None else cfg.clip
    return ActionTerm(joints, "position", (-bound,) * len(joints), (bound,) * len(joints), control)
