"""Scripted experts of MuJoCo tasks, for `ecrl.envs.make_expert`."""

from typing import NamedTuple, cast

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel, NonNegative
from ecrl.envs.core import Env
from ecrl.envs.experts import Expert
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import Simulation
from ecrl.envs.mujoco.scene.config import Real
from ecrl.envs.mujoco.scene.models import id_of
from ecrl.envs.mujoco.task_config import ActionConfig, TaskConfig
from ecrl.envs.mujoco.task_scale import scale_of
from ecrl.envs.mujoco.task_step import error_prefix
from ecrl.envs.mujoco.tasks.open_drawer import OpenDrawerConfig
from ecrl.envs.mujoco.tasks.pick_cube import PickCubeConfig
from ecrl.envs.mujoco.tasks.push_cube import PushCubeConfig
from ecrl.envs.mujoco.tasks.reach import ReachConfig
from ecrl.envs.mujoco.tasks.reach_color import ReachColorConfig, block_offsets, is_goal
from ecrl.envs.mujoco.tasks.stack_cube import StackCubeConfig
from ecrl.envs.mujoco.terms.actions import ScaledConfig
from ecrl.envs.mujoco.terms.eef_motion import DeltaEefPoseConfig
from ecrl.envs.mujoco.terms.grasping import is_grasped
from ecrl.envs.mujoco.terms.term import target, tcp_of
from ecrl.errors import ConfigError
from ecrl.registry import register_expert

_KEEP_AWAY = 0.14  # m, distance at which the finger begins to go around a block
_AROUND, _AWAY = 0.12, 2.0  # strength of the motion around a block, m, and factor of the motion away from a block
_DAMPING = 1e-3  # damping of the least-squares problem, m^2
_BEHIND, _BESIDE = 0.13, 0.05  # m, distance behind the cube where a push begins, and largest sideways error of a push
_AHEAD = 0.1  # m, distance from the cube to the target of a push
_HIGH, _LOW = 0.25, 0.06  # m, heights of the end effector on the way to the cube and during a push
_TURN = 0.3  # m, weight of the tool's direction in the least-squares problem
_ALIGNED = 0.015  # m, horizontal error below which a gripper descends to a cube
_ABOVE = 0.1  # m, height of the gripper above the cube before the gripper descends
_CLOSE = 0.02  # m, distance from the end effector to a cube at which the gripper closes
_LEVEL, _DOWN = 0.012, 0.006  # m, largest horizontal and largest vertical error of a placed cube
_LIFT = 0.06  # m, height of a carried cube above its place until the horizontal error is small
_BEHIND_HANDLE = 0.03  # m, distance from a handle to the gap behind the handle
_OVER_HANDLE = 0.08  # m, height of the end effector above the gap before the end effector descends
_IN_LINE = 0.01  # m, horizontal error below which the end effector descends into the gap
_ENTERED = 0.02  # m, vertical error below which the end effector pulls
_PULL = 0.03  # m, length of a motion that pulls


class ExpertConfig(ConfigModel):
    """Settings of an expert: its noise and its bias."""

    noise: NonNegative = Field(
        0.0, description="standard deviation of the noise on the actions, in units of the largest action"
    )
    bias: Real = Field(0.0, description="error along x of the expert's target, m, for biased demonstrations")


def _scale(cfg: TaskConfig) -> float:
    """Return the scale of the task's only action term, which must be DeltaQposTerm on all joints."""
    match list(cfg.actions.values()):
        case [ActionConfig(func="DeltaQposTerm", params=ScaledConfig(part_name=None, joint_ids=None, scale=scale))]:
            return scale
    raise _unsuitable(cfg, "one term, DeltaQposTerm, without part_name and joint_ids")


def _unsuitable(cfg: TaskConfig, needed: str) -> ConfigError:
    """Return the error for a task whose action terms an expert cannot use. `needed` describes suitable terms."""
    given = ", ".join(f"{name} ({term.func})" for name, term in sorted(cfg.actions.items())) or "no term"
    remedy = "change the terms, or record a trained policy with ecrl demo --run-dir"
    return ConfigError(f"env.cfg.actions: {given}, but the expert needs {needed}; {remedy}")


def _action(motion: Tensor, scale: float, noise: float, keys: Tensor) -> Tensor:
    """Return actions that move the joints by `motion`, plus noise. A motion too long for one step is scaled down."""
    action = motion / scale
    action = action / action.abs().amax(-1, keepdim=True).clamp(min=1.0)
    if noise:
        action = action + noise * rng.normal(keys, (motion.shape[-1],))
    return action.clamp(-1.0, 1.0)


@register_expert("ReachRL")
def reach_expert(cfg: ExpertConfig, env: Env, task: ReachConfig) -> Expert:
    """Move the end effector straight to its target, with damped least squares on the joint positions."""
    sim, scale, site = env.scene, _scale(task), tcp_of(env.scene, task.extensions.part_name)

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        position = world.site_pose(sim, worlds, site)[..., :3, 3]
        offset = target(state, task.extensions.target_pose_key) - position
        offset = offset + offset.new_tensor([cfg.bias, 0.0, 0.0])
        jacobian = world.site_jacobian(sim, worlds, site, sim.robot.joints)[..., :3, :]
        return _action(_least_squares(jacobian, offset), scale, cfg.noise, keys)

    return act


def _least_squares(jacobian: Tensor, offset: Tensor) -> Tensor:
    """Return the joint motion J^T (J J^T + damping)^-1 offset."""
    gram = jacobian @ jacobian.mT + _DAMPING * torch.eye(offset.shape[-1], device=offset.device)
    return (jacobian.mT @ torch.linalg.solve(gram, offset.unsqueeze(-1))).squeeze(-1)


@register_expert("PushCubeRL")
def push_cube_expert(cfg: ExpertConfig, env: Env, task: PushCubeConfig) -> Expert:
    """Move the end effector to the side of the cube opposite to the goal, lower the end effector, and push.

        u      = horizontal unit vector from the cube to the goal;    start = cube - 0.13 u
        back   = (cube - p) . u;    side = |cube - p - back u|        horizontally, for the end effector at p
        pushes = p_z < 0.12 m and back > 0 and side < 0.05 m
        place  = cube + 0.1 u    if pushes
                 start           otherwise
        z      = 0.06 m          if pushes, or if p is horizontally within 0.05 m of start
                 0.25 m          otherwise

    The lengths are multiplied by the scale of the task. Damped least squares compute the joint motion that moves the
    end effector to (place, z), and points the tool down. `bias` shifts the cube along x in these equations.
    """
    sim, scale, ext, site = env.scene, _scale(task), task.extensions, tcp_of(env.scene, "arm", "env.cfg.robot")
    behind, beside, in_front, high, low = (scale_of(task) * x for x in (_BEHIND, _BESIDE, _AHEAD, _HIGH, _LOW))

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        pose = world.site_pose(sim, worlds, site)
        tool, cube = pose[..., :3, 3], world.body_position(sim, worlds, ext.object_uid)[..., :2]
        cube = cube + cube.new_tensor([cfg.bias, 0.0])
        path = target(state, ext.target_pose_key)[..., :2] - cube
        ahead = path / torch.linalg.vector_norm(path, dim=-1, keepdim=True).clamp(min=1e-6)
        to_cube, start = cube - tool[..., :2], cube - behind * ahead
        back = (to_cube * ahead).sum(-1, keepdim=True)
        side = torch.linalg.vector_norm(to_cube - back * ahead, dim=-1, keepdim=True)
        pushes = (tool[..., 2:] < 2 * low) & (back > 0.0) & (side < beside)
        above = torch.linalg.vector_norm(start - tool[..., :2], dim=-1, keepdim=True) < beside
        place = torch.where(pushes, cube + in_front * ahead, start)
        height = torch.where(pushes | above, low, high)
        offset = torch.cat((place, height), -1) - tool
        jacobian = world.site_jacobian(sim, worlds, site, sim.robot.joints)
        down = pose[..., :3, 2]
        turn = _TURN * torch.linalg.cross(down, down.new_tensor([0.0, 0.0, -1.0]).expand_as(down))
        jacobian = torch.cat((jacobian[..., :3, :], _TURN * jacobian[..., 3:, :]), -2)
        return _action(_least_squares(jacobian, torch.cat((offset, turn), -1)), scale, cfg.noise, keys)

    return act


@register_expert("ReachColorRL")
def reach_color_expert(cfg: ExpertConfig, env: Env, task: ReachColorConfig) -> Expert:
    """Move the finger to the goal, and go around every other block that is nearer than 0.14 m.

        motion = goal - p + sum_i (0.12 t[i] + 2 (0.14 - d[i]) u[i])        over other blocks with d[i] < 0.14

    All lengths are in m. The finger is at p, and d[i] is its distance to block i. `bias` shifts the goal along x. The
    unit vector u[i] points away from block i. The unit vector t[i] is perpendicular to u[i], and points towards the
    goal.
    """
    sim, scale = env.scene, _scale(task)

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        offsets, goal = block_offsets(task, sim, state), is_goal(task, state).unsqueeze(-1)
        motion = torch.where(goal, offsets, 0.0).sum(-2) + offsets.new_tensor([cfg.bias, 0.0])
        distance = torch.linalg.vector_norm(offsets, dim=-1, keepdim=True).clamp(min=1e-3)
        away = -offsets / distance
        around = torch.stack((-away[..., 1], away[..., 0]), -1)
        same_side = (around * motion.unsqueeze(-2)).sum(-1, keepdim=True) >= 0.0
        around = torch.where(same_side, around, -around)
        push = _AROUND * around + _AWAY * (_KEEP_AWAY - distance) * away
        motion = motion + torch.where((distance < _KEEP_AWAY) & ~goal, push, 0.0).sum(-2)
        return _action(motion, scale, cfg.noise, keys)

    return act


class _Gripper(NamedTuple):
    """An arm with a gripper that `DeltaEefPoseTerm` and `GripperTerm` drive.

    Attributes:
        site: end effector of the arm.
        step: motion of the end effector per unit of action, m.
        is_first: True if the action of the gripper comes before the actions of the arm.
    """

    site: str
    step: float
    is_first: bool

    def position(self, sim: Simulation, worlds: TensorDict) -> Tensor:
        """Return the position of the end effector, `[*B, 3]` (m)."""
        return world.site_pose(sim, worlds, self.site)[..., :3, 3]

    def action(self, motion: Tensor, closes: Tensor, noise: float, keys: Tensor) -> Tensor:
        """Return actions `[*B, 4]` that move the end effector by `motion` (m), plus noise.

        The gripper closes if `closes`, bool `[*B, 1]`, is True, and otherwise opens.
        """
        arm = motion / self.step
        arm, hand = arm / arm.abs().amax(-1, keepdim=True).clamp(min=1.0), torch.where(closes, -1.0, 1.0)
        return _action(torch.cat((hand, arm) if self.is_first else (arm, hand), -1), 1.0, noise, keys)


def _gripper(cfg: TaskConfig, sim: Simulation, scale: float) -> _Gripper:
    """Return the gripper of a task whose lengths are multiplied by `scale`.

    Raises: ConfigError if the action terms are not `DeltaEefPoseTerm` with `pose_dim` 3 and `GripperTerm`.
    """
    terms = [term for _, term in sorted(cfg.actions.items())]
    arms = [term.params for term in terms if isinstance(term.params, DeltaEefPoseConfig) and term.params.pose_dim == 3]
    if len(terms) != 2 or len(arms) != 1 or "GripperTerm" not in (term.func for term in terms):
        raise _unsuitable(cfg, "two terms, DeltaEefPoseTerm with pose_dim 3 and GripperTerm")
    return _Gripper(tcp_of(sim, arms[0].part_name), arms[0].scale * scale, terms[0].func == "GripperTerm")


def _distance(offset: Tensor) -> Tensor:
    return torch.linalg.vector_norm(offset, dim=-1, keepdim=True)


def _from_above(offset: Tensor, height: float, aligned: float) -> Tensor:
    """Return `offset` (m), plus `height` upwards if the horizontal part of `offset` is longer than `aligned`."""
    upwards = offset.new_tensor([0.0, 0.0, height])
    return offset + torch.where(_distance(offset[..., :2]) > aligned, upwards, 0.0)


def _grasp(offset: Tensor, is_held: Tensor, carry: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the motion (m) of a gripper that grasps a cube from above, and then carries the cube by `carry` (m).

    `offset` is the vector from the end effector to the cube (m). The second result is the flag `closes` of the gripper,
    bool `[*B, 1]`.
    """
    motion = torch.where(is_held, carry, _from_above(offset, _ABOVE * scale, _ALIGNED * scale))
    return motion, is_held | (_distance(offset) < _CLOSE * scale)


@register_expert("PickCubeRL")
def pick_cube_expert(cfg: ExpertConfig, env: Env, task: PickCubeConfig) -> Expert:
    """Grasp the cube from above, and move it straight to the goal.

        offset = cube - p, for the end effector at p
        motion = goal - cube          if the cube is grasped
                 offset + (0, 0, 0.1) if |offset_xy| > 0.015 m
                 offset               otherwise
        closes = the cube is grasped or |offset| < 0.02 m

    The lengths are multiplied by the scale of the task. `bias` shifts the cube along x in `offset`.
    """
    sim, ext, scale = env.scene, task.extensions, scale_of(task)
    gripper = _gripper(task, sim, scale)

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        cube, held = world.body_position(sim, worlds, ext.object_uid), is_grasped(sim, worlds, ext.object_uid)
        offset = cube + cube.new_tensor([cfg.bias, 0.0, 0.0]) - gripper.position(sim, worlds)
        motion, closes = _grasp(offset, held.unsqueeze(-1), target(state, ext.target_pose_key) - cube, scale)
        return gripper.action(motion, closes, cfg.noise, keys)

    return act


@register_expert("StackCubeRL")
def stack_cube_expert(cfg: ExpertConfig, env: Env, task: StackCubeConfig) -> Expert:
    """Grasp the cube from above as in PickCubeRL, carry it over the other cube, put it down, and let it go.

        e      = base + extensions.offset - cube, from the cube to its place on the other cube
        motion = e + (0, 0, 0.06)  if the cube is grasped and |e_xy| > 0.012 m
                 e                 if the cube is grasped and |e_xy| <= 0.012 m
        placed = |e_xy| < 0.012 m and |e_z| < 0.006 m; the gripper then opens and stays where it is

    The lengths are multiplied by the scale of the task. `bias` shifts the cube along x until the cube is grasped.
    """
    sim, ext, scale = env.scene, task.extensions, scale_of(task)
    gripper, place = _gripper(task, sim, scale), [x * scale for x in ext.offset]

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        cube, base = (world.body_position(sim, worlds, uid) for uid in (ext.object_uid, ext.base_uid))
        offset = cube + cube.new_tensor([cfg.bias, 0.0, 0.0]) - gripper.position(sim, worlds)
        error, held = base + base.new_tensor(place) - cube, is_grasped(sim, worlds, ext.object_uid).unsqueeze(-1)
        motion, closes = _grasp(offset, held, _from_above(error, _LIFT * scale, _LEVEL * scale), scale)
        placed = (_distance(error[..., :2]) < _LEVEL * scale) & (error[..., 2:].abs() < _DOWN * scale)
        return gripper.action(torch.where(placed, 0.0, motion), closes & ~placed, cfg.noise, keys)

    return act


@register_expert("OpenDrawerRL")
def open_drawer_expert(cfg: ExpertConfig, env: Env, task: OpenDrawerConfig) -> Expert:
    """Move the closed gripper from above into the gap behind the handle, and pull.

        gap    = handle - 0.03 u, for the x axis u of the handle, which points out of the cabinet
        offset = gap - p, for the end effector at p
        motion = 0.03 u                if |offset_z| < 0.02 m
                 offset + (0, 0, 0.08) if |offset_xy| > 0.01 m
                 offset                otherwise

    `bias` shifts the handle along x in these equations.

    Raises: ConfigError if the scene has no body `handle`.
    """
    sim, gripper = env.scene, _gripper(task, env.scene, 1.0)
    with error_prefix("env.cfg.mjcf"):
        id_of(sim.model, "body", "handle")

    def act(state: TensorDict, keys: Tensor) -> Tensor:
        worlds = cast(TensorDict, state["world"])
        pose = world.body_pose(sim, worlds, "handle")
        outwards = pose[..., :3, 0]
        gap = pose[..., :3, 3] + pose.new_tensor([cfg.bias, 0.0, 0.0]) - _BEHIND_HANDLE * outwards
        offset = gap - gripper.position(sim, worlds)
        pulls = offset[..., 2:].abs() < _ENTERED
        motion = torch.where(pulls, _PULL * outwards, _from_above(offset, _OVER_HANDLE, _IN_LINE))
        return gripper.action(motion, torch.ones_like(pulls), cfg.noise, keys)

    return act
