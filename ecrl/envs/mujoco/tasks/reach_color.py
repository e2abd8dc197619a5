"""The task ReachColorRL: a finger moves to the block that an instruction names, such as "reach the red block"."""

from functools import partial
from typing import Annotated, Any, cast

import torch
from pydantic import Field, model_validator
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, Count, Positive
from ecrl.envs.core import Env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import RigidObjectConfig, RobotConfig
from ecrl.envs.mujoco.task_config import (
    ActionConfig,
    ObservationConfig,
    RewardConfig,
    TaskConfig,
    TaskEventConfig,
    parse_terms,
)
from ecrl.envs.mujoco.task_step import error_prefix
from ecrl.envs.mujoco.terms.instructions import GOAL, InstructionConfig, Phrasings, goal_index, instruction_term
from ecrl.envs.mujoco.terms.term import tcp_of
from ecrl.envs.vocabulary import read_vocabulary
from ecrl.errors import ConfigError
from ecrl.registry import register_env

_COLORS = {"red": (0.9, 0.1, 0.1, 1.0), "green": (0.1, 0.8, 0.1, 1.0), "blue": (0.1, 0.2, 0.9, 1.0)}
_VERBS = ("reach", "touch", "go to", "move to")
_CHECKED_EPISODES = 256

_ACTIONS: Any = {"delta_qpos": {"func": "DeltaQposTerm", "params": {"scale": 0.03}}}
_VIEW = {"resolution": [64, 64], "intrinsics": [88, 88, 32, 32], "eye": [0.0, -0.9, 1.1], "target": [0.0, 0.0, 0.0]}
_OBSERVATIONS: Any = {
    "camera": {"func": "camera_image", "name": "camera", "params": _VIEW},
    "proprio": {"func": "get_robot_qpos", "name": "proprio", "params": {"range": [-1.0, 1.0]}},
}
_REWARDS: Any = {"success": {"func": "success_reward"}}
_APART = {"min_distance": 0.16, "min_tool_distance": 0.14}
_SQUARE = {"position_range": [[-0.3, -0.3, 0.03], [0.3, 0.3, 0.03]]}
_EVENTS: Any = {  # events run in the order of their names, so the blocks are placed after the finger
    "randomize_finger": {
        "func": "randomize_robot_qpos",
        "mode": "reset",
        "params": {"qpos_range": [-0.3, 0.3], "relative_qpos": False},
    },
    "randomize_instruction": {"func": "randomize_instruction", "mode": "reset"},
    "scatter_blocks": {
        "func": "scatter_rigid_objects",
        "mode": "reset",
        "params": {"entity_cfgs": [{"uid": color} for color in _COLORS]} | _SQUARE | _APART,
    },
}


def _block(uid: str, x: float, color: tuple[float, ...]) -> RigidObjectConfig:
    shape = {"shape_type": "Cube", "size": [0.08, 0.08, 0.06]}
    block = {"uid": uid, "shape": shape, "body_type": "kinematic", "init_pos": [x, 0.2, 0.03], "color": list(color)}
    return RigidObjectConfig.model_validate(block)


def _blocks() -> tuple[RigidObjectConfig, ...]:
    return tuple(_block(uid, 0.2 * i - 0.2, color) for i, (uid, color) in enumerate(_COLORS.items()))


class ReachColorExtensions(ConfigModel):
    """Settings of ReachColorRL: the blocks, the instructions and the success condition."""

    blocks: Annotated[tuple[str, ...], Field(strict=False, min_length=2)] = Field(
        tuple(_COLORS), description="uids of the blocks; the uid of a block is also its word in instructions"
    )
    hit_distance: Positive = Field(
        0.045, description="horizontal distance to a block, m, below which the end effector reaches the block"
    )
    phrasings: Phrasings = Field(
        tuple(f"{verb} the {GOAL} block" for verb in _VERBS),
        description=f"texts of the instruction; the word of the block replaces {GOAL}",
    )
    max_words: Count = Field(6, description="number of observed word ids; shorter instructions end with zeros")
    swap_instructions: bool = Field(
        False,
        description="the instruction names the next block of the list instead of the goal, to test that a policy uses "
        "the instruction",
    )
    instruction_key: str = Field("instruction", description="store_key of the event that draws the instruction")
    part_name: str = Field("arm", description="part of the robot that has the end effector")

    @model_validator(mode="after")
    def _distinct(self) -> "ReachColorExtensions":
        if len(set(self.blocks)) < len(self.blocks):
            raise ValueError(f"blocks: {list(self.blocks)} names a block twice; name each block once")
        return self


class ReachColorConfig(TaskConfig):
    """Config of ReachColorRL. By default, a finger moves among a red, a green and a blue block, in view of a camera."""

    robot: RobotConfig | None = Field(
        RobotConfig.model_construct(uid="finger", robot_type="Finger"), description="the finger"
    )
    rigid_object: Annotated[tuple[RigidObjectConfig, ...], Field(strict=False)] = Field(
        default_factory=_blocks, description="objects; by default three blocks with a width of 0.08 m"
    )
    max_episode_steps: int = Field(32, ge=1, lt=2**31, description="time limit, steps")
    actions: dict[str, ActionConfig] = Field(
        default_factory=partial(parse_terms, ActionConfig, _ACTIONS),
        description="action terms by name; by default 0.03 m * action is added to the finger's position",
    )
    observations: dict[str, ObservationConfig] = Field(
        default_factory=partial(parse_terms, ObservationConfig, _OBSERVATIONS),
        description="observation terms by name, in addition to the instruction; by default a camera and the finger's "
        "position, scaled to [-1, 1]",
    )
    observe_joints: bool = Field(
        False,
        description="observe robot/qpos, robot/qvel and robot/qf: joint positions, joint velocities and drive forces",
    )
    rewards: dict[str, RewardConfig] = Field(
        default_factory=partial(parse_terms, RewardConfig, _REWARDS),
        description="reward terms by name; by default 1 in the step that reaches the goal",
    )
    events: dict[str, TaskEventConfig] = Field(
        default_factory=partial(parse_terms, TaskEventConfig, _EVENTS),
        description="events by name; by default random positions of finger and blocks, and a random instruction",
    )
    tokenizer: str | None = Field(
        None, description="JSON file that maps the words of instructions to ids; by default, ecrl's own vocabulary"
    )
    extensions: ReachColorExtensions = Field(
        ReachColorExtensions.model_construct(), description="blocks, instructions and condition of success"
    )


def block_offsets(cfg: ReachColorConfig, sim: Simulation, state: TensorDict) -> Tensor:
    """Return the horizontal vectors from the end effector to each block, `[*B, n, 2]` (m)."""
    site = tcp_of(sim, cfg.extensions.part_name, "extensions.part_name")
    tool = world.site_pose(sim, state["world"], site)[..., :2, 3]
    blocks = [world.body_position(sim, state["world"], uid)[..., :2] for uid in cfg.extensions.blocks]
    return torch.stack(blocks, -2) - tool.unsqueeze(-2)


def is_goal(cfg: ReachColorConfig, state: TensorDict) -> Tensor:
    """Return a mask that is True for the goal block of each environment, bool `[*B, n]`."""
    count = len(cfg.extensions.blocks)
    goal = goal_index(state, cfg.extensions.instruction_key, count)
    return goal.unsqueeze(-1) == torch.arange(count, device=goal.device)


def _check_starts(env: Env, cfg: ReachColorConfig) -> None:
    """Raise ConfigError if one of `_CHECKED_EPISODES` episodes starts within `hit_distance` of a block."""
    with torch.no_grad():
        start = cast(Any, env.reset_unobserved or env.reset)(rng.split(rng.key(0), _CHECKED_EPISODES))
        distances = torch.linalg.vector_norm(block_offsets(cfg, env.scene, start), dim=-1)
    if failed := int((distances < cfg.extensions.hit_distance).any(-1).sum()):
        fault = f"{failed} of {_CHECKED_EPISODES} episodes start within extensions.hit_distance of a block"
        raise ConfigError(f"env.cfg.events: {fault}; increase min_tool_distance, or place the blocks by another event")


@register_env("ReachColorRL")
def reach_color(cfg: ReachColorConfig) -> Env:
    """Move a finger to the block that an instruction names. Reaching any other block fails the episode.

        d[i] = horizontal distance from the end effector to block i, m
        success: d[goal] < hit_distance;    failure: d[i] < hit_distance for another block i, and no success
        reward (by default): 1 in the step that succeeds, otherwise 0

    The observation is a Dict. By default, `camera` is an image, and `proprio` is the position of the finger.
    `instruction` has the ids of the instruction's words. No other part of the observation depends on the goal.

    The metric `distance_to_goal` is d[goal]. If `extensions.swap_instructions` is set, the instruction names the next
    block of `extensions.blocks` instead of the goal. A policy that follows instructions then fails.
    """
    ext = cfg.extensions
    texts = InstructionConfig(
        phrasings=ext.phrasings,
        goals=ext.blocks,
        tokenizer=cfg.tokenizer,
        max_words=ext.max_words,
        swap=ext.swap_instructions,
        instruction_key=ext.instruction_key,
    )
    with error_prefix("env.cfg"):
        read_vocabulary(cfg.tokenizer)
    with error_prefix("env.cfg.extensions"):
        instruction = instruction_term(texts)

    def compute_task_state(sim: Simulation, state: TensorDict) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        distances = torch.linalg.vector_norm(block_offsets(cfg, sim, state), dim=-1)
        hit, goal = distances < ext.hit_distance, is_goal(cfg, state)
        success = (hit & goal).any(-1)
        metrics = {"distance_to_goal": torch.where(goal, distances, 0.0).sum(-1)}
        return success, (hit & ~goal).any(-1) & ~success, metrics

    env = task_env(cfg, compute_task_state, own_observations={"instruction": instruction})
    _check_starts(env, cfg)
    return env
