"""Names of EmbodiChain's functors that ecrl does not have, with advice on what to use instead.

The error for such a name contains the advice. `docs/migration.md` lists all functors of EmbodiChain.
"""

from ecrl.registry import add_advice

_DEMONSTRATION = (
    "the functor prepares EmbodiChain's scripted demonstrations, which training in ecrl does not use; remove the term"
)
_AMBIENT = (
    "images have one ambient color, light.ambient, which no event varies; use randomize_light to vary the direction "
    "and the color of the directional light"
)
_CAMERA_OFFSET = "observe the offset of randomize_camera_extrinsics by target_position with target_pose_key"

ABSENT = {
    "action": {
        "JointPositionAction": "use QposTerm, or DefaultJointPositionTerm for an offset",
        "JointPositionToLimitsAction": "use QposDenormalizedTerm",
        "DefaultJointPositionAction": "use DefaultJointPositionTerm",
        "JointVelocityAction": "use QvelTerm",
        "JointEffortAction": "use QfTerm",
        "EefPoseAction": "use EefPoseTerm",
        "RelativeEefPoseAction": "use DeltaEefPoseTerm with pose_dim 6",
        "ParallelGripperAction": "use JointPositionGripperTerm or EefPoseGripperTerm, which drive the arm and the hand",
    },
    "observation": {
        "get_object_uid": "the functor observes identifiers of a renderer, which are constant; remove the term",
        "get_sensor_intrinsics": "observe the offset of randomize_camera_intrinsics by target_position, with "
        "target_pose_key camera_focal_offset or camera_center_offset",
        "get_sensor_pose_in_robot_frame": f"{_CAMERA_OFFSET} camera_eye_offset or camera_target_offset",
        "compute_semantic_mask": "images have no segmentation; use camera_image, or get_object_pose",
        "compute_exteroception": "EmbodiChain's functor works in one environment only; use camera_image, "
        "get_robot_eef_pose or get_object_pose",
        "get_articulation_joint_drive": "the drives are the same in all environments, so the entry would be constant; "
        "remove the term",
    },
    "reward": {
        "orientation_alignment_reward": "use orientation_alignment",
        "reaching_behind_object_reward": "use reaching_behind_object",
    },
    "event": {
        "randomize_camera": "use randomize_camera_extrinsics",
        "push_articulation_by_setting_velocity": "use push_robot, or randomize_robot_qvel with mode interval",
        "validation_cameras": "use record_camera_data under trainer.events",
        "randomize_emission_light": _AMBIENT,
        "randomize_indirect_lighting": _AMBIENT,
        "set_rigid_object_visual_material": "set color of the object in rigid_object",
        "set_rigid_object_group_visual_material": "set color of each object in rigid_object",
        "randomize_rigid_object_body_scale": "use randomize_rigid_object_scale with scale_factor_range",
        "randomize_rigid_objects_body_scale_sync": "use randomize_rigid_objects_scale with shared_sample",
        "replace_assets_from_group": "every environment has the same objects; use randomize_rigid_object_scale and "
        "randomize_visual_material to vary them",
        "prepare_extra_attr": _DEMONSTRATION,
        "register_entity_attrs": _DEMONSTRATION,
        "register_entity_pose": _DEMONSTRATION,
        "register_info_to_env": _DEMONSTRATION,
        "apply_expansion_profile_reset": _DEMONSTRATION,
        "workspace_sampler": "the functor samples poses for scripted grasps; use scatter_rigid_objects or "
        "planner_grid_cell_sampler",
        "drop_rigid_object_group_sequentially": "objects are listed one by one in rigid_object; place them by an event "
        "such as scatter_rigid_objects",
        "wait_for_dynamic_objects_to_settle": "an event does not step the physics; place the objects at rest by "
        "init_pos and the ranges of randomize_rigid_object_pose",
        "set_detached_uids_for_env_reset": "every episode starts from the scene; use mode startup for an event whose "
        "effect should last",
        "create_rigid_constraint": "put the constraint into an MJCF scene file as an equality weld; see mjcf",
        "remove_rigid_constraint": "put constraints into an MJCF scene file; see mjcf",
    },
}
"""For each kind of term, EmbodiChain's functors that ecrl does not have, with advice."""

for _kind, _advice in ABSENT.items():
    add_advice(_kind, _advice)
