"""A task as it stands in a config: a scene, and terms that say how it is acted on, observed, rewarded and disturbed."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, SerializeAsAny, model_validator

from ecrl.config import EventConfig, resolved
from ecrl.config.model import ConfigModel, Count
from ecrl.envs.mujoco.scene.config import Real, SceneConfig


class _Term(ConfigModel):
    """A registered function and its settings."""

    part_kind: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _registered(cls, data: Any) -> Any:
        return resolved(cls.part_kind, data, "func", "params") if isinstance(data, dict) else data


class ActionConfig(_Term):
    """A part of the action."""

    part_kind = "action"
    inert: ClassVar = {"mode": "terms of the action act before the step, which is mode pre"}

    func: str = Field(description='registered name of the term, such as "DeltaQposTerm"')
    params: SerializeAsAny[BaseModel] = Field(description="settings of the term")


class ObservationConfig(_Term):
    """An entry of the observation."""

    part_kind = "observation"
    func: str = Field(description='registered name of the term, such as "get_rigid_object_pose"')
    mode: Literal["add", "modify"] = Field("add", description="a new entry, or a change of one that is there")
    name: str = Field(pattern=r"^[\w-]+(/[\w-]+)*$", description='of the entry, with / between its parts: "robot/qpos"')
    params: SerializeAsAny[BaseModel] = Field(description="settings of the term")


class RewardConfig(_Term):
    """A part of the reward."""

    part_kind = "reward"
    func: str = Field(description='registered name of the term, such as "distance_to_target"')
    mode: Literal["add", "replace"] = Field(
        "add", description="added to the others, or instead of all that are added, the task's own reward too"
    )
    weight: Real = Field(1.0, description="what it is multiplied by")
    params: SerializeAsAny[BaseModel] = Field(description="settings of the term")


class TaskEventConfig(EventConfig):
    """Something that happens to the environments of a task, in training and in evaluation."""

    interval_step: Count = Field(10, description="steps of an environment between two events of mode interval")


class TaskConfig(SceneConfig):
    """A scene and its terms. Those of a kind take effect in the order of their names."""

    max_episode_steps: Count = Field(300, description="time limit, steps")
    control_parts: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="parts of the robot that are acted on and observed; all of it if absent"
    )
    actions: dict[str, ActionConfig] = Field(default_factory=dict, description="terms of the action by name")
    observations: dict[str, ObservationConfig] = Field(
        default_factory=dict, description="entries beside robot/qpos, robot/qvel and robot/qf, or changes of these"
    )
    rewards: dict[str, RewardConfig] = Field(default_factory=dict, description="terms of the reward by name")
    events: dict[str, TaskEventConfig] = Field(
        default_factory=dict, description="events by name, in training and evaluation"
    )


def parsed(kind: type[ConfigModel], terms: dict[str, Any]) -> dict[str, Any]:
    """Terms by name, as a config file has them, checked: what a task's Config has by default."""
    return {name: kind.model_validate(term) for name, term in terms.items()}
