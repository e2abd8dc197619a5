"""A small task of MuJoCo that only tests need: a rail with a drive, far from a cube in the air and one on the floor."""

from contextlib import contextmanager

import torch
from pydantic import Field

from ecrl import registry, rng
from ecrl.config import EventConfig
from ecrl.config.model import ConfigModel, validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.make_task import task_env
from ecrl.envs.mujoco.task_config import TaskConfig
from ecrl.envs.mujoco.terms import events, physics_events, robot_events
from ecrl.envs.mujoco.terms.term import ActionTerm, JointsConfig, joints_of

assert events and physics_events and robot_events  # their events are registered

RAIL = """<mujoco><option timestep="0.005" integrator="implicitfast" cone="elliptic" iterations="50"/><worldbody>
<geom name="floor" type="plane" size="9 9 .1"/>
<body name="cart" pos="0 5 1"><joint name="rail" type="slide" axis="1 0 0" range="-1 1"/>
<geom type="box" size=".1 .1 .1" mass="1"/>
<body name="arm"><joint name="elbow" axis="0 1 0"/><geom type="capsule" size=".02" fromto="0 0 .2 0 0 .5" mass=".1"/>
</body></body></worldbody>
<actuator><position name="rail" joint="rail" kp="100" kv="20"/>
<motor name="elbow" joint="elbow"/></actuator></mujoco>"""
UNDAMPED = {"mass": 2.0, "static_friction": 0.5, "linear_damping": 0.0, "angular_damping": 0.0}


def cube(uid, place, **changes):
    shape = {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}
    return {"uid": uid, "shape": shape, "init_pos": place, "attrs": UNDAMPED} | changes


SCENE = {
    "mjcf": RAIL,
    "sim_steps_per_control": 4,
    "rigid_object": [
        cube("cube", [0.0, 0.0, 5.0]),
        cube("slider", [2.0, 0.0, 0.02], shape={"shape_type": "Cube", "size": [0.3, 0.3, 0.04]}),  # it does not tip
        cube("hand", [-2.0, 0.0, 1.0], body_type="kinematic"),
        cube("wall", [-4.0, 0.0, 1.0], body_type="static"),
    ],
}
DT = 0.02
FORCED = {"mjcf": None, "robot": {"uid": "ur"}}
"""The same objects beside the built-in arm."""


class DriveConfig(JointsConfig):
    drive: str = Field("position", description="kind")


class NothingConfig(ConfigModel):
    """No settings."""


def drive(cfg: DriveConfig, sim) -> ActionTerm:
    """Targets or forces between -1 and 1."""
    joints = joints_of(cfg, sim)
    return ActionTerm(joints, cfg.drive, (-1.0,) * len(joints), (1.0,) * len(joints), lambda state, action: action)


def height(cfg: NothingConfig, sim):
    """Return the height of the cube, m."""
    return lambda state, value: world.body_pose(sim, state["world"], "cube")[..., 2:3, 3]


def twice(cfg: NothingConfig, sim):
    return lambda state, value: 2.0 * value


def target_position(cfg: NothingConfig, sim):
    return lambda state, value: state["targets", "goal_pose"]


def fall(cfg: NothingConfig, sim):
    """Return how far the cube fell in the step, m."""

    def term(before, after):
        high, low = (world.body_pose(sim, state["world"], "cube")[..., 2, 3] for state in (before, after))
        return high - low

    return term


def effort(cfg: NothingConfig, sim):
    return lambda before, after: after["action"].abs().sum(-1)


class SpotConfig(ConfigModel):
    size: int = Field(2, description="how many numbers")

    @property
    def stores(self):
        return {"spot": (0,) * self.size}


def spot(cfg: SpotConfig, sim):
    """Stores numbers that need not be a position."""

    def apply(state, keys):
        return state.copy().set("targets", state["targets"].copy().set("spot", rng.uniform(keys, (cfg.size,))))

    return apply


class RigConfig(TaskConfig):
    """The scene of these tests."""


def rig_task(cfg: RigConfig):
    """The task by its name."""
    return task_env(cfg, nothing_yet)


TERMS = (
    ("env", "rig_task", rig_task),
    ("action", "rig_drive", drive),
    ("observation", "rig_height", height),
    ("observation", "rig_twice", twice),
    ("observation", "rig_target", target_position),
    ("event", "rig_spot", spot),
    ("reward", "rig_fall", fall),
    ("reward", "rig_effort", effort),
)


@contextmanager
def known_terms():
    """Register the terms inside a `with` block only, because other tests look at all registered terms."""
    registry.registered("event")
    for kind, name, make in TERMS:
        registry._register(kind, name)(make)
    try:
        yield
    finally:
        for kind, name, _ in TERMS:
            del registry._ENTRIES[kind][name]


def nothing_yet(sim, state):
    """Return neither success nor failure, and the height of the cube as a metric."""
    no = torch.zeros_like(state["elapsed"], dtype=torch.bool)
    return no, no, {"height": world.body_pose(sim, state["world"], "cube")[..., 2, 3]}


CUBE_MASS = {"entity_cfg": {"uid": "cube"}, "mass_range": [1.0, 3.0]}
ACTIONS = {"rail": {"func": "rig_drive", "params": {"joint_ids": [0]}}}


def task(compute=nothing_yet, **changes):
    """A task of the scene; `changes` are keys of its config, or functions that `task_env` takes."""
    hooks = {name: changes.pop(name) for name in ("check_truncated", "get_reward", "acceptable") if name in changes}
    cfg = validate_section(TaskConfig, SCENE | {"actions": ACTIONS} | changes, "env.cfg")
    return task_env(cfg, compute, **hooks)


def happening(func, mode="reset", interval_step=1, **params):
    return {"func": func, "mode": mode, "interval_step": interval_step, "params": params}


def outside(events):
    """The same events as `trainer.events` has them."""
    return {
        name: validate_section(EventConfig, event, f"trainer.events.train.{name}") for name, event in events.items()
    }


def keys_of(number=4, seed=0):
    return rng.stream(rng.key(seed), rng.START, torch.arange(number), 0)


def rollout(env, number=4, length=8, seed=0, index=None, action=0.0):
    """States `[number, length + 1]` of an environment that resets itself, from the reset on."""
    index = torch.arange(number) if index is None else index
    noise = env.draw(rng.stream(rng.key(seed), rng.ENV, index, torch.arange(length).unsqueeze(1)))
    states = [env.reset(rng.stream(rng.key(seed), rng.START, index, 0))]
    actions = torch.full((len(index), *env.action_space.shape), action)
    for t in range(length):
        states.append(env.step(states[-1], actions, noise[t]))
    return torch.stack(states, 1)
