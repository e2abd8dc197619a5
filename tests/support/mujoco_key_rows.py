"""Rows of the keys of MuJoCo's tasks: scene, terms, events and cameras."""

from typing import Any

from ecrl.envs.vocabulary import SHIPPED
from support import urdf_robot
from support.key_effects import Changes, See
from support.key_row import Row
from support.mujoco_key_effects import backed, bounds, filmed, frame, model, pictured, rejected, stepped

CFG = "env.cfg"


def at(section: str, path: str, base: Changes, see: See = stepped, /, **values: Any) -> list[Row]:
    """Return rows of the keys of the section at `path` in `env.cfg`."""
    place = f"{CFG}.{path}".rstrip(".")
    return [Row(f"{section}.{name}", value, base, see, f"{place}.{name}") for name, value in values.items()]


def between(section: str, path: str, base: Changes, see: See = stepped, /, **values: Any) -> list[Row]:
    """Rows of keys that may be absent: each from the first of two values to the second."""
    return [
        row
        for name, (first, second) in values.items()
        for row in at(section, path, base | {f"{CFG}.{path}.{name}".replace("..", "."): first}, see, **{name: second})
    ]


def task(name: str, **cfg: Any) -> Changes:
    """An environment."""
    return {"env": {"name": name, "cfg": cfg}}


def term(func: str, **params: Any) -> dict[str, Any]:
    """A term or an event."""
    return {"func": func, "params": params}


def happening(mode: str, func: str, **params: Any) -> dict[str, Any]:
    """Return an event that happens in every episode or in every step."""
    return term(func, **params) | {"mode": mode, "interval_step": 1}


def thing(uid: str = "cube", place: Any = (-0.6, -0.4, 0.05), **changes: Any) -> dict[str, Any]:
    """Return the settings of a cube that tips over, with `changes`."""
    shape = {"shape_type": "Cube", "size": [0.1, 0.1, 0.1]}
    return {"uid": uid, "init_pos": list(place), "init_rot": [15.0, 0.0, 0.0], "shape": shape} | changes


CUBE, OTHER, ROBOT, TOM = {"entity_cfg": {"uid": "cube"}}, {"uid": "other"}, {"uid": "robot"}, {"uid": "tom"}
GOAL = happening(
    "reset", "randomize_target_pose", position_range=[[-0.9, -0.5, 0.2], [-0.5, -0.1, 0.7]], store_key="target_pose"
)
PUSH = happening("interval", "push_rigid_object", **CUBE, force_range=[[5.0, 5.0, 0.0], [9.0, 9.0, 0.0]])
SECOND = thing("other", (0.6, 0.4, 0.05))
POSE = term("get_rigid_object_pose", **CUBE) | {"name": "cube"}
OBSERVED = {
    "cube": POSE,
    "joints": term("normalize_robot_joint_data") | {"name": "robot/qpos", "mode": "modify"},
    "tool": term("get_robot_eef_pose") | {"name": "tool"},
    "tool_speed": term("get_robot_eef_velocity") | {"name": "tool_speed"},
    "speed": term("get_rigid_object_velocity", **CUBE) | {"name": "speed"},
    "target": term("target_position", target_pose_key="target_pose") | {"name": "target"},
}
EVENTS = {"goal": GOAL, "push": PUSH}
REACH = task("ReachRL", rigid_object=[thing(), SECOND], observations=OBSERVED, events=EVENTS, physics={}, robot={})
RESTING = task("ReachRL", rigid_object=[thing()], observations={"cube": POSE}, events={"goal": GOAL})
PUSH_CUBE = task("PushCubeRL")
CART = task("CartPoleRL", rewards={"slow": term("joint_velocity_penalty")})


def scene_file(kp: float) -> str:
    """A rail with a drive and a cube, in MJCF."""
    return f"""<mujoco><option timestep="0.01" integrator="implicitfast"/><worldbody>
    <geom type="plane" size="9 9 .1"/>
    <body pos="0 5 1"><joint name="rail" type="slide" axis="1 0 0" range="-1 1"/><geom size=".1" mass="1"/></body>
    <body name="cube" pos="0 0 .05"><freejoint/><geom type="box" size=".05 .05 .05"/></body></worldbody>
    <actuator><position joint="rail" kp="{kp}" kv="20"/></actuator>
    <keyframe><key name="left" qpos="-.3 0 0 .05 1 0 0 0"/><key name="right" qpos=".3 0 0 .05 1 0 0 0"/></keyframe>
    </mujoco>"""


def robot_file(mass: float) -> str:
    """A beam on a hinge with a drive, in MJCF."""
    return f"""<mujoco><worldbody><body pos="0 0 1"><joint name="hinge" axis="0 1 0"/>
    <geom type="capsule" size=".02" fromto="0 0 0 .5 0 0" mass="{mass}"/></body></worldbody>
    <actuator><position joint="hinge" kp="10" kv="1"/></actuator></mujoco>"""


BARE = {"observations": {}, "rewards": {}}
FROM_URDF = task("ReachRL", robot={"model": urdf_robot.robot(), "solver_cfg": {"arm": {}}})
FILED = task("PushCubeRL", robot=None, rigid_object=[], **BARE)
ANY_ROBOT = task("PushCubeRL", robot={}, **BARE)
TCP = [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.2], [0.0, 0.0, 0.0, 1.0]]
LONGER = [*TCP[:2], [0.0, 0.0, 1.0, 0.3], TCP[3]]
ARM_PART = {"component_type": "arm", "urdf_path": urdf_robot.robot(urdf_robot.ARM_LINKS, urdf_robot.ARM_JOINTS)}
HAND_PART = {"component_type": "hand", "urdf_path": urdf_robot.robot(urdf_robot.HAND_LINKS, urdf_robot.HAND_JOINTS)}
OTHER_ARM = urdf_robot.robot()
WITH_PARTS = task("PushCubeRL", robot={"urdf_cfg": {"components": [ARM_PART]}}, **BARE)
JOINTS = ["shoulder_pan_joint", "shoulder_lift_joint", "elbow_joint"]
FALLEN = [0.0, -1.0, 1.0, -1.5, -1.5, 0.0]


def of_part(part: dict[str, Any], **values: Any) -> list[Row]:
    """Return rows of the keys of a component."""
    place, section = f"{CFG}.robot.urdf_cfg.components", "ComponentConfig"
    base = WITH_PARTS | {place: [part]}
    return [Row(f"{section}.{name}", [part | {name: x}], base, stepped, place) for name, x in values.items()]


SCENE = [
    *between("SceneConfig", "", FILED, mjcf=(scene_file(100.0), scene_file(50.0))),
    *between("SceneConfig", "", FILED | {f"{CFG}.mjcf": scene_file(100.0)}, keyframe=("left", "right")),
    *between("SceneConfig", "", RESTING, robot=({"init_pos": [0.0, 0.0, 0.1]}, {"init_pos": [0.0, 0.0, 0.2]})),
    *between("SceneConfig", "", RESTING, sim_steps_per_control=(2, 3), target_control_frequency=(25.0, 50.0)),
    *between("SceneConfig", "", RESTING, model, light=({"ambient": [0.1, 0.1, 0.1]}, {"ambient": [0.2, 0.2, 0.2]})),
    *at("SceneConfig", "", RESTING, rigid_object=[thing(place=(-0.6, -0.4, 0.5))], physics={"dt": 0.005}),
    *at("SceneConfig", "", RESTING, background=[thing("block", (-0.6, -0.33, 0.05))]),
    *between("PhysicsConfig", "physics", REACH, dt=(0.01, 0.005), iterations=(20, 1)),
    *at("PhysicsConfig", "physics", REACH, model, threads=1),
    *at("PhysicsConfig", "physics", REACH, backed, backend="warp"),
    *between("LightConfig", "light", RESTING, model, direction=([0.0, 0.0, -1.0], [1.0, 0.0, -1.0])),
    *between("LightConfig", "light", RESTING, model, color=([0.1, 0.1, 0.1], [0.2, 0.2, 0.2])),
    *between("LightConfig", "light", RESTING, model, ambient=([0.1, 0.1, 0.1], [0.2, 0.2, 0.2])),
    *at("RobotConfig", "robot", REACH, model, uid="another"),
    *at("RobotConfig", "robot", ANY_ROBOT, robot_type="CartPole"),
    *between("RobotConfig", "robot", ANY_ROBOT, model=(robot_file(1.0), robot_file(2.0))),
    *between("RobotConfig", "robot", ANY_ROBOT, urdf_cfg=({"components": []}, {"components": [ARM_PART]})),
    *at("ComponentsConfig", "robot.urdf_cfg", WITH_PARTS, components=[ARM_PART, HAND_PART]),
    *of_part(ARM_PART, component_type="hand", urdf_path=OTHER_ARM),
    *of_part(HAND_PART | {"transform": TCP}, transform=LONGER),
    *at("RobotConfig", "robot", REACH, init_pos=[0.0, 0.0, 0.1]),
    *between("RobotConfig", "robot", REACH, init_rot=([0.0, 0.0, 0.0], [0.0, 0.0, 10.0])),
    *between("RobotConfig", "robot", REACH, init_qpos=(FALLEN, [0.1, *FALLEN[1:]])),
    *at("RobotConfig", "robot", REACH, drive_pros={"max_effort": 1.0}, solver_cfg={"arm": {"tcp": TCP}}),
    *at("RobotConfig", "robot", REACH, rejected("no end effector of 'arm'"), control_parts={"leg": JOINTS}),
    *between("DriveConfig", "robot.drive_pros", REACH, stiffness=(1e3, 2e3), damping=(10.0, 20.0)),
    *between("DriveConfig", "robot.drive_pros", REACH, max_effort=(1.0, 2.0), max_velocity=(0.1, 0.2)),
    *between("SolverConfig", "robot.solver_cfg.arm", FROM_URDF, end_link_name=("upper", "tool")),
    *at("SolverConfig", "robot.solver_cfg.arm", REACH | {f"{CFG}.robot.solver_cfg": {"arm": {"tcp": TCP}}}, tcp=LONGER),
]


def of_object(section: str, base: Changes, see: See = stepped, /, **things: dict[str, Any]) -> list[Row]:
    """Return rows of the keys of an object in a list."""
    place, (first, *rest) = f"{CFG}.rigid_object", base["env"]["cfg"]["rigid_object"]
    base = base | {place: [first, *rest]}
    return [Row(f"{section}.{name}", [one, *rest], base, see, place) for name, one in things.items()]


def shaped(**shape: Any) -> dict[str, Any]:
    """An object of another shape."""
    return thing(shape=shape)


def round_thing(**shape: Any) -> Changes:
    """Return a scene with this object."""
    return task("ReachRL", rigid_object=[shaped(**shape)], observations={"cube": POSE}, events={"goal": GOAL})


ATTRS = {"mass": 2.0, "static_friction": 2.0, "linear_damping": 5.0, "angular_damping": 5.0}
ATTRS |= {"max_linear_velocity": 1e-3, "max_angular_velocity": 1e-3}
BALL, CAN = {"shape_type": "Sphere", "radius": 0.06}, {"shape_type": "Cylinder", "radius": 0.06, "height": 0.12}
OBJECTS = [
    *of_object("RigidObjectConfig", RESTING, rejected("unknown object 'cube'"), uid=thing("box")),
    *of_object("RigidObjectConfig", RESTING, body_type=thing(body_type="kinematic"), shape=shaped(**BALL)),
    *of_object("RigidObjectConfig", RESTING, init_pos=thing(place=(-0.6, -0.4, 0.5))),
    *of_object("RigidObjectConfig", RESTING, init_rot=thing(init_rot=[0.0, 0.0, 9.0])),
    *of_object("RigidObjectConfig", RESTING, model, color=thing(color=[0.1, 0.2, 0.3, 1.0])),
    *of_object("RigidObjectConfig", REACH, attrs=thing(attrs={"mass": 2.0})),
    *(
        row
        for name, value in ATTRS.items()
        for row in of_object("AttrsConfig", REACH, **{name: thing(attrs={name: value})})
    ),
    *of_object("AttrsConfig", REACH, has_gravity=thing(attrs={"has_gravity": False})),
    *of_object("ShapeConfig", RESTING, shape_type=shaped(**BALL), size=shaped(shape_type="Cube", size=[0.1, 0.1, 0.2])),
    *of_object("ShapeConfig", round_thing(**BALL), radius=shaped(**BALL | {"radius": 0.07})),
    *of_object("ShapeConfig", round_thing(**CAN), height=shaped(**CAN | {"height": 0.14})),
]
TASKS = [
    *at("TaskConfig", "", RESTING, observation_form="parts", observe_joints=False),
    *at("TaskConfig", "", RESTING, max_episode_steps=2, actions={"a": term("QposTerm")}, observations={}, rewards={}),
    *at("TaskConfig", "", REACH, events={"goal": GOAL}),
    *between("TaskConfig", "", CART, control_parts=(["arm"], ["hand"])),
    *at("ActionConfig", "actions.a", REACH | {f"{CFG}.actions": {"a": term("DeltaQposTerm")}}, func="QposTerm"),
    *at("ObservationConfig", "observations.tool", REACH, func="get_robot_eef_velocity", name="a_tool"),
    *at("ObservationConfig", "observations.joints", REACH, rejected("exists already; use mode modify"), mode="add"),
    *at("RewardConfig", "rewards.slow", CART, func="action_smoothness_penalty", mode="replace", weight=2.0),
    Row(
        "TaskEventConfig.func",
        happening("interval", "randomize_rigid_object_pose", **CUBE, position_range=[[0.0] * 3, [0.1] * 3]),
        REACH,
        stepped,
        f"{CFG}.events.push",
    ),
    *at("TaskEventConfig", "events.push", REACH, mode="reset", interval_step=2),
    *at("PushCubeConfig", "", PUSH_CUBE, extensions={"success_threshold": 5.0}),
    *at("PushCubeExtensions", "extensions", PUSH_CUBE, success_threshold=5.0, hold_time=0.1),
    *at("PushCubeExtensions", "extensions", PUSH_CUBE, start_distance=0.7),
    *at("PushCubeExtensions", "extensions", PUSH_CUBE, rejected("'box' is not in the scene"), object_uid="box"),
    *at("PushCubeExtensions", "extensions", PUSH_CUBE, rejected("no target 'there'"), target_pose_key="there"),
    *at("ReachConfig", "", RESTING, extensions={"success_threshold": 5.0}),
    *at("ReachExtensions", "extensions", RESTING, success_threshold=5.0),
    *at("ReachExtensions", "extensions", RESTING, rejected("no target 'there'"), target_pose_key="there"),
    *at("ReachExtensions", "extensions", RESTING, rejected("no end effector of 'leg'"), part_name="leg"),
]
COLORS = task("ReachColorRL", observations={"at": term("get_robot_qpos") | {"name": "at"}})
TASKS += [
    *between("ReachColorConfig", "", COLORS, rejected("no such file 'absent'"), tokenizer=(str(SHIPPED), "absent")),
    *at("ReachColorConfig", "", COLORS, extensions={"max_words": 7}),
    *at("ReachColorExtensions", "extensions", COLORS, blocks=["blue", "green", "red"], swap_instructions=True),
    *at("ReachColorExtensions", "extensions", COLORS, phrasings=["reach {goal}"], max_words=7),
    *at("ReachColorExtensions", "extensions", COLORS, rejected("within extensions.hit_distance"), hit_distance=0.2),
    *at("ReachColorExtensions", "extensions", COLORS, rejected("no instruction 'there'"), instruction_key="there"),
    *at("ReachColorExtensions", "extensions", COLORS, rejected("no end effector of 'leg'"), part_name="leg"),
]
UPRIGHT = CART | {
    f"{CFG}.max_episode_steps": 3,
    f"{CFG}.extensions": {"angle_threshold": 3.0, "velocity_threshold": 100.0},
}
TASKS += at("CartPoleRLConfig", "", UPRIGHT, extensions={})
TASKS += at("CartPoleExtensions", "extensions", UPRIGHT, angle_threshold=1e-6, velocity_threshold=1e-6)


def acting(func: str) -> Changes:
    """Return a task with one term of the action."""
    return RESTING | {f"{CFG}.actions": {"a": term(func)}}


def handling(func: str) -> Changes:
    """Return a task of an arm with a hand, with one term of the action."""
    robot = {"urdf_cfg": {"components": [ARM_PART, HAND_PART]}, "solver_cfg": {"arm": {}}}
    return task("PushCubeRL", robot=robot, actions={"a": term(func)}, **BARE)


DEFAULT_OF_TWO = RESTING | {f"{CFG}.actions": {"a": term("DefaultJointPositionTerm", offset=[0.1, 0.2])}}
POSED = "actions.a.params"
RELATIVE = "RelativeJointPositionAction"
NAMED = RESTING | {f"{CFG}.actions": {"a": term(RELATIVE, joint_names=JOINTS[::-1], scale=[0.1, 0.2, 0.3])}}
ACTIONS = [
    *at("RelativeJointPositionConfig", POSED, NAMED, preserve_order=True, scale=[0.3, 0.2, 0.1]),
    *between("RelativeJointPositionConfig", POSED, acting(RELATIVE), joint_names=(JOINTS[1:], JOINTS)),
    *between("RelativeJointPositionConfig", POSED, NAMED, bounds, clip=(0.5, 0.25)),
    *between(
        "RelativeJointPositionConfig", POSED, acting(RELATIVE), rejected("unknown part 'l"), part_name=("arm", "leg")
    ),
    *at("ScaledConfig", POSED, acting("DeltaQposTerm"), scale=0.5),
    *at("DenormalizedConfig", POSED, acting("QposDenormalizedTerm"), range=[0.0, 1.0]),
    *between("EefSearchConfig", POSED, acting("EefPoseTerm"), rejected("no robot 'tom'"), robot_uid=("robot", "tom")),
    *at("EefSearchConfig", POSED, acting("EefPoseTerm"), rejected("unknown part 'leg'"), part_name="leg"),
    *at("EefPoseConfig", POSED, acting("EefPoseTerm"), pose_dim=6),
    *at("EefSearchConfig", POSED, acting("EefPoseTerm"), scale=1.5, iterations=1),
    *at("EefSearchConfig", POSED, acting("EefPoseTerm"), bounds, reach=1.0),
    *at("EefSearchConfig", POSED, acting("EefPoseTerm"), position_tolerance=1e-12, rotation_tolerance=1e-12),
    *at("DefaultPositionConfig", POSED, acting("DefaultJointPositionTerm"), scale=0.5),
    *between("DefaultPositionConfig", POSED, acting("DefaultJointPositionTerm"), bounds, clip=(0.5, 2.0)),
    *between("DefaultPositionConfig", POSED, acting("DefaultJointPositionTerm"), offset=(0.1, 0.2)),
    *between("DefaultPositionConfig", POSED, DEFAULT_OF_TWO, joint_names=(JOINTS[:2], JOINTS[1::-1])),
    *at("GripperConfig", POSED, handling("JointPositionGripperTerm"), rejected("unknown part 'leg'"), part_name="leg"),
    *at("GripperConfig", POSED, handling("JointPositionGripperTerm"), rejected("unknown part 'leg'"), hand_name="leg"),
    *at("EefPoseGripperConfig", POSED, handling("EefPoseGripperTerm"), rejected("unknown part 'leg'"), hand_name="leg"),
    *between("JointsConfig", "rewards.slow.params", CART, part_name=("arm", "hand"), joint_ids=([0], [1])),
    *between("JointsConfig", "rewards.slow.params", CART, rejected("no robot 'tom'"), robot_uid=("Cart", "tom")),
]
TERMS = "observations"
OBSERVATIONS = [
    *at("NormalizeJointsConfig", f"{TERMS}.joints.params", REACH, range=[-1.0, 1.0]),
    *at("EefConfig", f"{TERMS}.tool.params", REACH, rejected("no end effector of 'leg'"), part_name="leg"),
    *at("RobotEefPoseConfig", f"{TERMS}.tool.params", REACH, position_only=True),
    *at("ObjectConfig", f"{TERMS}.cube.params", REACH, entity_cfg=OTHER),
    *at("EntityConfig", f"{TERMS}.cube.params.entity_cfg", REACH, uid="other"),
    *at("ObjectPoseConfig", f"{TERMS}.cube.params", REACH, position_only=True, to_matrix=False),
    *at(
        "TargetPositionConfig", f"{TERMS}.target.params", REACH, rejected("no target 'there'"), target_pose_key="there"
    ),
    *between("RobotQposConfig", f"{TERMS}.at.params", COLORS, range=([-1.0, 1.0], [0.0, 1.0])),
]
TEXT = f"{TERMS}.text.params"
SAID = COLORS | {
    f"{CFG}.observations.text": term("instruction", phrasings=["reach the {goal}"], goals=["red", "blue"])
    | {"name": "text"}
}
OBSERVATIONS += [
    *at("InstructionConfig", TEXT, SAID, phrasings=["touch the {goal}"], goals=["blue", "red"], max_words=4, swap=True),
    *between("InstructionConfig", TEXT, SAID, rejected("no such file 'absent'"), tokenizer=(str(SHIPPED), "absent")),
    *at("InstructionConfig", TEXT, SAID, rejected("no instruction 'there'"), instruction_key="there"),
]

FROM = {"source_entity_cfg": {"uid": "cube"}}
REWARDED = REACH | {
    f"{CFG}.rewards": {
        "between": term("distance_between_objects", **FROM, target_entity_cfg=OTHER, exponential=True),
        "far": term("distance_to_target", **FROM, exponential=True),
        "nearer": term("incremental_distance_to_target", **FROM),
        "limits": term("joint_limit_penalty", margin=0.5),
        "behind": term("reaching_behind_object", object_cfg={"uid": "cube"}, target_pose_key="target_pose"),
    }
}


def rewarding(section: str, name: str, see: See = stepped, /, **values: Any) -> list[Row]:
    """Rows of the settings of a term of the reward."""
    return at(section, f"rewards.{name}.params", REWARDED, see, **values)


REWARDS = [
    *rewarding("ObjectsConfig", "between", source_entity_cfg=OTHER, target_entity_cfg={"uid": "cube"}),
    *rewarding("DistanceBetweenObjectsConfig", "between", exponential=False, sigma=2.0),
    *rewarding("TargetConfig", "far", source_entity_cfg=OTHER, use_xy_only=True),
    *rewarding("TargetConfig", "far", rejected("no target 'there'"), target_pose_key="there"),
    *rewarding("DistanceToTargetConfig", "far", exponential=False, sigma=2.0),
    *rewarding("IncrementalDistanceConfig", "nearer", tanh_scale=1.0, positive_weight=2.0, negative_weight=2.0),
    *rewarding("JointLimitConfig", "limits", margin=0.2),
    *rewarding("ReachingBehindConfig", "behind", object_cfg=OTHER, behind_offset=0.1, height_offset=0.1),
    *rewarding("ReachingBehindConfig", "behind", distance_scale=1.0),
    *rewarding("ReachingBehindConfig", "behind", rejected("no target 'there'"), target_pose_key="there"),
    *rewarding("ReachingBehindConfig", "behind", rejected("no end effector of 'leg'"), part_name="leg"),
]


def one_more(func: str, base: Changes = REACH, /, **params: Any) -> Changes:
    """A further event of every start."""
    return base | {f"{CFG}.events.more": happening("reset", func, **params)}


def event(section: str, base: Changes, see: See = stepped, /, **values: Any) -> list[Row]:
    """Rows of the settings of this event."""
    return at(section, "events.more.params", base, see, **values)


def event_between(section: str, base: Changes, see: See = stepped, /, **values: Any) -> list[Row]:
    """Return rows of optional keys of the section at `path`."""
    return between(section, "events.more.params", base, see, **values)


NEAR, FAR = [[-0.1, -0.1, 0.0], [0.1, 0.1, 0.0]], [[0.2, 0.2, 0.0], [0.3, 0.3, 0.0]]
BOTH = {"position_range": NEAR, "rotation_range": [[0.0] * 3, [0.0, 0.0, 90.0]]}
MOVED = one_more("randomize_rigid_object_pose", **CUBE, **BOTH)
REFERRED = {"position_range": FAR, "store_key": "target_pose", "relative_position": True}
AIMED = one_more("randomize_target_pose", **REFERRED, reference_entity_cfg={"uid": "cube"})
POSTURE = one_more("randomize_robot_qpos", qpos_range=[-0.1, 0.1])
HEAVY = one_more("randomize_rigid_object_mass", **CUBE, mass_range=[1.0, 3.0])
ROUGH = one_more("randomize_rigid_object_friction", **CUBE, friction_range=[0.1, 0.5])
SWINGING = one_more("randomize_robot_qvel", qvel_range=[-0.1, 0.1])
SWUNG_AGAIN = one_more("randomize_robot_qvel", qvel_range=[0.1, 0.1]) | {
    f"{CFG}.events.before": happening("reset", "randomize_robot_qvel", qvel_range=[0.5, 0.5], relative_qvel=False)
}
REACHING = one_more("randomize_robot_eef_pose", entity_cfg={"uid": "robot"}, position_range=NEAR, rotation_range=NEAR)
SHOVED = one_more("push_robot", force_range=NEAR)
LATE = one_more("randomize_action_delay", delay_range=[1, 1])
LOPSIDED = one_more("randomize_rigid_object_center_of_mass", **CUBE, com_pos_offset_range=[[0.01] * 3, [0.02] * 3])
LOADED = one_more("randomize_articulation_mass", entity_cfg={"uid": "robot"}, mass_range=[1.0, 3.0])
GROWN = one_more("randomize_rigid_object_scale", **CUBE, scale_factor_range=[[0.5, 1.0, 1.0], [0.9, 1.0, 1.0]])
ALL_GROWN = one_more(
    "randomize_rigid_objects_scale", entity_cfgs=[{"uid": "cube"}, OTHER], scale_factor_range=[[0.5], [0.9]]
)
LIGHTER = one_more("randomize_gravity", gravity_range=[[0.0, 0.0, -9.0], [0.0, 0.0, -8.0]])
THROWN = one_more("randomize_rigid_object_velocity", **CUBE, linear_range=NEAR)
THROWN_AGAIN = THROWN | {
    f"{CFG}.events.before": happening("reset", "randomize_rigid_object_velocity", **CUBE, linear_range=FAR)
}
GRID = {"position_range": [[-0.6, -0.6], [0.6, 0.6]], "reference_height": 0.2, "grid_size": [2, 2]}
GRIDDED = one_more("planner_grid_cell_sampler", object_uid_list=["cube"], **GRID)
RAISED = one_more("randomize_anchor_height", anchor_uid="cube", height_delta_range=[0.1, 0.2])
RAISED_WITH_OTHER = one_more("randomize_anchor_height", anchor_uid="other", height_delta_range=[0.1, 0.2])
CHOSEN = one_more("randomize_anchor_height", anchor_uid="cube", height_delta_candidates=[0.1, 0.2])
APART = {"entity_cfgs": [{"uid": "cube"}, OTHER], "position_range": [[-0.4, -0.4, 0.1], [0.4, 0.4, 0.1]]}
SCATTERED = one_more("scatter_rigid_objects", **APART)
KEPT_AWAY = one_more("scatter_rigid_objects", **APART, min_tool_distance=0.1)
SPOKEN = COLORS | {f"{CFG}.events": {"say": happening("reset", "randomize_instruction")}}
SCENE_EVENTS = [
    *event("ScenePoseConfig", MOVED, entity_cfg=OTHER, relative_position=False, relative_rotation=True),
    *event_between("PoseRangeConfig", MOVED, position_range=(NEAR, FAR), rotation_range=(NEAR, FAR)),
    *event("RandomizeTargetPoseConfig", AIMED, position_range=NEAR),
    *event("RandomizeTargetPoseConfig", AIMED, rejected("go together"), relative_position=False),
    *event_between("RandomizeTargetPoseConfig", AIMED, reference_entity_cfg=({"uid": "cube"}, OTHER)),
    *event("RandomizeTargetPoseConfig", AIMED, store_key="another"),
    *event("RandomizeRobotQposConfig", POSTURE, qpos_range=[-0.2, 0.2], relative_qpos=False),
    *event_between("RobotJointsConfig", POSTURE, rejected("no robot 'tom'"), entity_cfg=(ROBOT, TOM)),
    *event("RandomizeRobotQvelConfig", SWINGING, qvel_range=[-0.2, 0.2]),
    *event("RandomizeRobotQvelConfig", SWUNG_AGAIN, relative_qvel=False),
    *event("RandomizeEefPoseConfig", REACHING, rejected("no robot 'tom'"), entity_cfg=TOM),
    *event("RandomizeEefPoseConfig", REACHING, iterations=1, position_tolerance=1e-12),
    *event("RandomizeEefPoseConfig", REACHING, rotation_tolerance=1e-12),
    *at("RobotPartsConfig", "events.more.params.entity_cfg", REACHING, rejected("no robot 'tom'"), uid="tom"),
    *at(
        "RobotPartsConfig",
        "events.more.params.entity_cfg",
        REACHING,
        rejected("unknown part 'leg'"),
        control_parts=["leg"],
    ),
    *event("PushRobotConfig", SHOVED, force_range=FAR),
    *event("PushRobotConfig", SHOVED, rejected("no end effector of 'leg'"), part_name="leg"),
    *event("RandomizeDelayConfig", LATE, delay_range=[2, 2]),
    *event("RandomizeCenterOfMassConfig", LOPSIDED, entity_cfg=OTHER, com_pos_offset_range=NEAR),
    *event("RandomizeArticulationMassConfig", LOADED, rejected("no robot 'tom'"), entity_cfg=TOM),
    *event("RandomizeArticulationMassConfig", LOADED, mass_range=[20.0, 30.0], relative=True),
    *event_between("RandomizeArticulationMassConfig", LOADED, link_names=(["elbow_link"], ["shoulder_.*"])),
    *event("ScaleConfig", GROWN, scale_factor_range=[[1.1, 1.0, 1.0], [1.5, 1.0, 1.0]]),
    *event("ScaleConfig", GROWN, same_scale_all_axes=False),
    *event("RandomizeScaleConfig", GROWN, entity_cfg=OTHER),
    *event("RandomizeScalesConfig", ALL_GROWN, entity_cfgs=[OTHER], shared_sample=True),
    *event("RandomizeGravityConfig", LIGHTER, gravity_range=[[0.0, 0.0, -3.0], [0.0, 0.0, -1.0]]),
    *event("RandomizeVelocityConfig", THROWN, entity_cfg=OTHER, linear_range=FAR, angular_range=FAR),
    *event("RandomizeVelocityConfig", THROWN_AGAIN, relative=True),
    *event("GridConfig", GRIDDED, object_uid_list=["other"], position_range=[[-0.5, -0.5], [0.0, 0.0]]),
    *event("GridConfig", GRIDDED, reference_height=0.3, grid_size=[3, 1]),
    *event("AnchorHeightConfig", RAISED, rejected("'box' is not in the scene"), anchor_uid="box"),
    *event("AnchorHeightConfig", RAISED_WITH_OTHER, exclude_uids=["cube"]),
    *event_between("AnchorHeightConfig", RAISED, height_delta_range=([0.1, 0.2], [0.3, 0.4])),
    *event_between("AnchorHeightConfig", CHOSEN, height_delta_candidates=([0.1, 0.2], [0.3])),
    *event("RandomizeRigidObjectMassConfig", HEAVY, entity_cfg=OTHER, mass_range=[1.0, 2.0], relative=True),
    *event("RandomizeRigidObjectFrictionConfig", ROUGH, entity_cfg=OTHER, friction_range=[0.1, 0.2]),
    *event("ScatterConfig", SCATTERED, entity_cfgs=[OTHER], position_range=NEAR, min_distance=0.35),
    *event("ScatterConfig", SCATTERED, min_tool_distance=0.8),
    *event("ScatterConfig", KEPT_AWAY, rejected("no end effector of 'leg'"), part_name="leg"),
    *at(
        "RandomizeInstructionConfig",
        "events.say.params",
        SPOKEN,
        rejected("no instruction 'instruction'"),
        store_key="x",
    ),
    *at("PushRigidObjectConfig", "events.push.params", REACH, entity_cfg=OTHER, force_range=FAR),
]

CAMERA = {"resolution": [16, 12], "eye": [-1.4, 1.4, 2.0], "intrinsics": [12.0, 12.0, 8.0, 6.0]}
PICTURED = RESTING | {f"{CFG}.observations": {"cam": term("camera_image", **CAMERA) | {"name": "cam"}}}
IMAGE = "observations.cam.params"
CAMERAS = [
    *at("CameraConfig", IMAGE, PICTURED, pictured, resolution=[12, 12], eye=[-1.0, 1.4, 2.0], target=[0.5, 0.0, 0.0]),
    *between("CameraConfig", IMAGE, PICTURED, pictured, up=([0.0, 0.0, 1.0], [0.0, 1.0, 0.0])),
    *at("CameraConfig", IMAGE, PICTURED, pictured, quality="full"),
    *between("CameraConfig", IMAGE, PICTURED, pictured, intrinsics=(CAMERA["intrinsics"], [6.0, 6.0, 8.0, 6.0])),
]
SWAYING = one_more("randomize_camera_extrinsics", PICTURED, eye_range=NEAR, target_range=NEAR)
LIT = one_more("randomize_light", PICTURED, direction_range=[[-1.0] * 3, [0.0] * 3], color_range=[[0.0] * 3, [1.0] * 3])
CAMERAS += event_between("RandomizeCameraConfig", SWAYING, pictured, eye_range=(NEAR, FAR), target_range=(NEAR, FAR))
CAMERAS += event_between(
    "RandomizeLightConfig",
    LIT,
    pictured,
    direction_range=([[-1.0] * 3, [0.0] * 3], [[0.0, 0.0, -1.0], [1.0, 1.0, -1.0]]),
    color_range=([[0.0] * 3, [1.0] * 3], [[0.5] * 3, [1.0] * 3]),
)
CAMERAS += event_between(
    "RandomizeCameraConfig", SWAYING, pictured, up_range=(NEAR, [[0.2, 0.2, 0.0], [0.9, 0.9, 0.0]])
)
ZOOMED = one_more("randomize_camera_intrinsics", PICTURED, focal_x_range=[-1.0, 1.0])
SHIFTED = {"focal_x_range": [4.0, 6.0], "focal_y_range": [4.0, 6.0], "cx_range": [3.0, 4.0], "cy_range": [3.0, 4.0]}
CAMERAS += event("RandomizeIntrinsicsConfig", ZOOMED, pictured, **SHIFTED)
PAINTED = one_more("randomize_visual_material", PICTURED, entity_cfg={"uid": "floor"})
CAMERAS += event("RandomizeMaterialConfig", PAINTED, pictured, base_color_range=[[0.0] * 3, [0.1] * 3])
CAMERAS += event("RandomizeMaterialConfig", PAINTED, pictured, entity_cfg={"uid": "cube"})
FILM = "trainer.events.eval.film"
FILMED = RESTING | {FILM: {"func": "record_camera_data"}}
CAMERAS.append(Row("CameraConfig.quality", "fast", FILMED, frame, f"{FILM}.params.quality"))
CAMERAS += [
    Row(f"RecordCameraConfig.{name}", value, FILMED, filmed, f"{FILM}.params.{name}")
    for name, value in {"name": "another", "max_env_num": 3, "save_path": "outputs"}.items()
]

MUJOCO = [*SCENE, *OBJECTS, *TASKS, *ACTIONS, *OBSERVATIONS, *REWARDS, *SCENE_EVENTS, *CAMERAS]
