"""Rows of the keys of tasks that grasp objects or move a joint of the scene, and of scaled tasks."""

from ecrl.envs.mujoco.tasks.gripper_arm import GRIPPER_ARM
from support.mujoco_key_effects import bounds, rejected
from support.mujoco_key_rows import CFG, PUSH_CUBE, at, between, happening, task, term

CUBE, OTHER, BASE = {"uid": "cube"}, {"uid": "other"}, {"uid": "base"}
HOME = [-0.688, -0.164, 0.507]
"""Place between the open fingers at the start, m."""
THERE = {"position_range": [HOME, HOME], "relative_position": False}
THING = {"shape": {"shape_type": "Cube", "size": [0.075, 0.075, 0.05]}, "attrs": {"mass": 0.01}}
CLOSING = {"fingers": term("GripperTerm", open_qpos=[0.04, 0.04], closed_qpos=[0.04, 0.04])}
HELD = task(
    "PickCubeRL",
    robot=GRIPPER_ARM | {"drive_pros": {}},
    rigid_object=[THING | CUBE, THING | OTHER | {"init_pos": [0.5, 0.5, 0.03]}],
    actions=CLOSING,
    observations={
        "at": term("get_eef_to_object", object_cfg=CUBE) | {"name": "at"},
        "held": term("get_object_grasped", object_cfg=CUBE) | {"name": "held"},
        "to": term("get_object_to_target", object_cfg=CUBE) | {"name": "to"},
    },
    rewards={
        "reach": term("reaching_object", object_cfg=CUBE),
        "held": term("grasp_reward", object_cfg=CUBE),
        "lift": term("grasped_object_to_target", object_cfg=CUBE),
    },
    events={
        "cube": happening("reset", "randomize_rigid_object_pose", entity_cfg=CUBE, **THERE),
        "goal": happening("reset", "randomize_target_pose", position_range=[[-0.688, -0.1, 0.507]] * 2),
    },
    extensions={"start_distance": 0.01, "success_threshold": 10.0, "rest_speed": 100.0},
)
"""A light cube between fingers that close at once, so that the first steps grasp it, which is a success."""
NO_GOAL = HELD | {f"{CFG}.extensions.success_threshold": 0.001}
STACKED = task(
    "StackCubeRL",
    actions={"hand": term("GripperTerm")},
    events={
        "base": happening(
            "reset", "randomize_rigid_object_pose", entity_cfg={"uid": "base"}, position_range=[[0.0] * 3] * 2
        ),
        "cube": happening(
            "reset",
            "randomize_rigid_object_pose",
            entity_cfg=CUBE,
            position_range=[[-0.745, -0.2, 0.075]] * 2,
            relative_position=False,
        ),
    },
)
"""A cube that rests on the other one, which is a success."""
ELBOW = "Manipulator/elbow_joint"
DRAWER = task("OpenDrawerRL", rewards={"pull": term("joint_opening_progress", joint="drawer_slide")})
LEG = rejected("(unknown part|no end effector of) 'leg'")
EEF = HELD | {f"{CFG}.actions": {"arm": term("DeltaEefPoseTerm")}}
TURNED = EEF | {f"{CFG}.actions.arm.params.pose_dim": 6}

GRASPS = [
    *between("ScalableTaskConfig", "", PUSH_CUBE, scale=(1.0, 0.5)),
    *between("OpenCloseConfig", "actions.fingers.params", HELD, LEG, part_name=("hand", "leg")),
    *between("OpenCloseConfig", "actions.fingers.params", HELD, open_qpos=([0.04, 0.04], [0.0, 0.0])),
    *between("OpenCloseConfig", "actions.fingers.params", HELD, closed_qpos=([0.04, 0.04], [0.0, 0.0])),
    *at("DeltaEefPoseConfig", "actions.arm.params", EEF, LEG, part_name="leg"),
    *at("DeltaEefPoseConfig", "actions.arm.params", EEF, bounds, pose_dim=6),
    *at("DeltaEefPoseConfig", "actions.arm.params", EEF, scale=0.01),
    *at("DeltaEefPoseConfig", "actions.arm.params", TURNED, rotation_scale=0.2),
    *at("GraspedObjectConfig", "observations.held.params", NO_GOAL, object_cfg=OTHER),
    *at("EefToObjectConfig", "observations.at.params", NO_GOAL, object_cfg=OTHER),
    *at("EefToObjectConfig", "observations.at.params", NO_GOAL, LEG, part_name="leg"),
    *at("ReachingObjectConfig", "rewards.reach.params", NO_GOAL, distance_scale=1.0),
    *at("ObjectToTargetConfig", "observations.to.params", NO_GOAL, object_cfg=OTHER),
    *at("ObjectToTargetConfig", "observations.to.params", NO_GOAL, rejected("no target 'x'"), target_pose_key="x"),
    *between("ObjectToTargetConfig", "observations.to.params", NO_GOAL, target_cfg=(CUBE, OTHER)),
    *at(
        "ObjectToTargetConfig",
        "observations.to.params",
        NO_GOAL | {f"{CFG}.observations.to.params.target_cfg": OTHER},
        offset=[0.0, 0.0, 0.1],
    ),
    *at("NearTargetConfig", "rewards.lift.params", NO_GOAL, distance_scale=1.0),
    *at("PickCubeConfig", "", HELD, extensions={"start_distance": 0.01, "success_threshold": 0.001}),
    *at("PickCubeExtensions", "extensions", HELD, success_threshold=0.001, rest_speed=1e-9),
    *at("PickCubeExtensions", "extensions", HELD, rejected("no acceptable start"), start_distance=5.0),
    *at("PickCubeExtensions", "extensions", HELD, rejected("'box' is not a dynamic object"), object_uid="box"),
    *at("PickCubeExtensions", "extensions", HELD, rejected("no target 'x'"), target_pose_key="x"),
    *at("StackCubeConfig", "", STACKED, extensions={"horizontal_threshold": 1e-9}),
    *at("StackCubeExtensions", "extensions", STACKED, horizontal_threshold=1e-9, vertical_threshold=1e-9),
    *at("StackCubeExtensions", "extensions", STACKED, rest_speed=1e-9, offset=[0.0, 0.0, 0.2]),
    *at("StackCubeExtensions", "extensions", STACKED, rejected("'box' is not"), object_uid="box", base_uid="box"),
    *at("OpenDrawerConfig", "", DRAWER, extensions={"joint": ELBOW, "success_opening": 0.1}),
    *at("OpenDrawerExtensions", "extensions", DRAWER | {f"{CFG}.extensions.joint": ELBOW}, success_opening=0.1),
    *at("OpenDrawerExtensions", "extensions", DRAWER, rejected("not in the scene"), joint="door"),
    *at("SceneJointConfig", "rewards.pull.params", DRAWER, joint=ELBOW),
]
