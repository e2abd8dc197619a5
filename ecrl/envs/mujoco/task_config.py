"""Config models of a MuJoCo task: its scene, and its action, observation, reward and event terms."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, SerializeAsAny, ValidatorFunctionWrapHandler, model_validator

from ecrl.config import EventConfig, validate_settings
from ecrl.config.model import ConfigModel, Count
from ecrl.envs.mujoco.scene.config import Real, SceneConfig


class _Term(ConfigModel):
    """Config of a term, with the name of a registered function and the settings of this function."""

    part_kind: ClassVar[str]

    @model_validator(mode="wrap")
    @classmethod
    def _registered(cls, data: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(data, dict):
            return handler(data)
        return validate_settings(cls.part_kind, data, "func", "params", handler)


class ActionConfig(_Term):
    """Config of an action term."""

    part_kind = "action"
    inert: ClassVar = {"mode": "every action term acts before the step, as mode pre does"}

    func: str = Field(description='registered name of the term, such as "DeltaQposTerm"')
    params: SerializeAsAny[BaseModel] = Field(description="settings of the term")


class ObservationConfig(_Term):
    """Config of a term that adds or changes an entry of the observation."""

    part_kind = "observation"
    func: str = Field(description='registered name of the term, such as "get_rigid_object_pose"')
    mode: Literal["add", "modify"] = Field("add", description="add: add a new entry; modify: change an existing entry")
    name: str = Field(
        pattern=r"^[\w-]+(/[\w-]+)*$", description='name of the entry, such as "robot/qpos", with / between its parts'
    )
    params: SerializeAsAny[BaseModel] = Field(description="settings of the term")


class RewardConfig(_Term):
    """Config of a reward term."""

    part_kind = "reward"
    func: str = Field(description='registered name of the term, such as "distance_to_target"')
    mode: Literal["add", "replace"] = Field(
        "add",
        description="add: add to the other terms; replace: replace the sum of the task's own reward and all other "
        "terms",
    )
    weight: Real = Field(1.0, description="factor that multiplies the term's value")
    params: SerializeAsAny[BaseModel] = Field(description="settings of the term")


class TaskEventConfig(EventConfig):
    """Config of an event that belongs to a task. The event happens in training and in evaluation."""

    interval_step: Count = Field(10, description="mode interval: environment steps between two events")


ObservationForm = Literal["auto", "vector", "parts"]
"""Structure of a task's observation, see `TaskConfig`."""


class TaskConfig(SceneConfig):
    """Config of a task: a scene and terms.

    Terms of the same kind and mode are applied in the order of their names.
    """

    max_episode_steps: Count = Field(300, description="time limit, steps")
    control_parts: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        None, description="parts of the robot that actions drive and observations include; by default, the whole robot"
    )
    actions: dict[str, ActionConfig] = Field(default_factory=dict, description="action terms by name")
    observations: dict[str, ObservationConfig] = Field(
        default_factory=dict,
        description="observation terms by name; see observe_joints for the entries that exist without a term",
    )
    observation_form: ObservationForm = Field(
        "auto",
        description="vector: one vector of all entries of the observation; parts: a Dict with one vector or image per "
        "entry; auto: parts if an entry is an image or has integers, otherwise vector",
    )
    observe_joints: bool = Field(
        True,
        description="observe robot/qpos, robot/qvel and robot/qf: joint positions, joint velocities and drive forces",
    )
    rewards: dict[str, RewardConfig] = Field(default_factory=dict, description="reward terms by name")
    events: dict[str, TaskEventConfig] = Field(
        default_factory=dict, description="events by name, for training and evaluation"
    )


def parse_terms(kind: type[ConfigModel], terms: dict[str, Any]) -> dict[str, Any]:
    """Validate terms that are given as dictionaries, as in a config file.

    The Config models of tasks use this function to define their default terms.
    """
    return {name: kind.model_validate(term) for name, term in terms.items()}
