"""Components of a robot in `robot.urdf_cfg`: an arm, and a hand at the flange of the arm.

EmbodiChain downloads the files of its robots. If the file of its UR10, its cart-pole or its gripper DH_PGI_140_80 is
missing on this machine, a built-in robot or gripper of the same size replaces the file, with one warning. Any other
missing file is an error.
"""

import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ecrl.config.model import format_value
from ecrl.envs.mujoco.robots.arm import NO_OFFSET, Matrix
from ecrl.envs.mujoco.robots.examples import PREFIX, example_file
from ecrl.envs.mujoco.scene.config import RobotConfig
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

KEY = "robot.urdf_cfg.components"
_ARMS = {"UR10": "URRobot", "cart_pole": "CartPole"}
"""Built-in robots that replace missing files of EmbodiChain, by the file's name without suffix."""
_GRIPPER = "DH_PGI_140_80"
BUILTIN_HAND = "builtin:two_finger_gripper"
"""Value of `urdf_path` that selects the built-in gripper."""
HAND = "hand/"
"""Prefix of the names of a hand's links and meshes."""


def _box(size: str, z: float, color: str) -> str:
    shape = f'<origin xyz="0 0 {z}"/><geometry><box size="{size}"/></geometry>'
    return f'<visual>{shape}<material name="{color}"/></visual><collision>{shape}</collision>'


def _link(name: str, mass: float, inertia: float, z: float, shape: str) -> str:
    tensor = f'<inertia ixx="{inertia}" iyy="{inertia}" izz="{inertia}" ixy="0" ixz="0" iyz="0"/>'
    weight = f'<inertial><origin xyz="0 0 {z}"/><mass value="{mass}"/>{tensor}</inertial>'
    return f'<link name="{name}">{weight}{shape}</link>'


def _finger(number: int, x: float) -> str:
    name, inwards = f"gripper_finger{number}", -1 if x > 0 else 1
    ends = f'<parent link="gripper_base"/><child link="{name}_link"/><origin xyz="{x} 0 0"/>'
    travel = f'<axis xyz="{inwards} 0 0"/><limit lower="0" upper="0.04" effort="140" velocity="0.2"/>'
    joint = f'<joint name="{name}_joint_1" type="prismatic">{ends}{travel}</joint>'
    return _link(f"{name}_link", 0.1, 1e-4, 0.125, _box("0.01 0.022 0.07", 0.125, "dark")) + joint


GRIPPER = (
    '<robot name="two_finger_gripper"><material name="dark"><color rgba="0.2 0.2 0.22 1"/></material>'
    '<material name="grey"><color rgba="0.75 0.76 0.78 1"/></material>'
    + _link("gripper_base", 0.8, 1e-3, 0.045, _box("0.1 0.06 0.09", 0.045, "grey"))
    + _finger(1, 0.045)
    + _finger(2, -0.045)
    + "</robot>"
)
"""URDF of a parallel gripper. The fingers are 0.08 m apart at the joint positions 0, and touch at 0.04 m.

The opening and the stroke are as in the gripper PGI-140-80. The tips are 0.16 m from the flange.
"""
GRIPPER_GRIP = {f"gripper_finger{number}_joint_1": (0.0, 0.04) for number in (1, 2)}
"""Positions of the joints of the built-in gripper when it is open and when it is closed, m."""


class Part(NamedTuple):
    """A component of a robot.

    Attributes:
        source: path or text of a URDF file; None for a built-in arm.
        builtin: name of the built-in robot that is the arm; None for a component with a `source`.
        key: config key of the component, for error messages.
        transform: pose of a hand in the frame of the flange.
        is_trusted: True for a file of an installed package, whose meshes may be outside $ECRL_INPUT_FOLDERS.
    """

    source: str | None
    builtin: str | None
    key: str
    transform: Matrix
    is_trusted: bool = False


def found_file(path: str, root: str) -> str | None:
    """Return the path of an existing file, or None. If `root` is not empty, the file is also looked up below `root`."""
    paths = [path, *([os.path.join(root, path)] if root else [])]
    return next(filter(os.path.isfile, paths), None)


def component(cfg: RobotConfig, kind: str) -> Part | None:
    """Return the component of the type `kind`, "arm" or "hand", or None if the config has no such component.

    Raises: ConfigError if there are several components of the kind, or if a file does not exist and has no built-in
        replacement. ConfigError is also raised if an arm has a transform or is a robot of example-robot-data, or if
        `robot.model` also names an arm.
    """
    listed = () if cfg.urdf_cfg is None else cfg.urdf_cfg.components
    found = [(i, part) for i, part in enumerate(listed) if part.component_type == kind]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"{KEY}: {len(found)} components of the type {kind}, expected at most one; keep one")
    i, part = found[0]
    key = f"{KEY}[{i}]"
    if kind == "arm" and cfg.model is not None:
        raise ConfigError(f"{key}: robot.model also names an arm; remove robot.model or this component")
    if kind == "arm" and part.transform not in (None, NO_OFFSET):
        raise ConfigError(f"{key}.transform: is only for a hand; place the arm with robot.init_pos and robot.init_rot")
    transform, stem = part.transform or NO_OFFSET, Path(part.urdf_path).stem
    if kind == "hand" and part.urdf_path == BUILTIN_HAND:
        return Part(GRIPPER, None, key, transform)
    if part.urdf_path.startswith(PREFIX):
        if kind == "arm":
            remedy = f"set robot.model to {format_value(part.urdf_path)} and remove this component"
            raise ConfigError(f"{key}.urdf_path: an arm of example-robot-data cannot be a component; {remedy}")
        path = example_file(part.urdf_path.removeprefix(PREFIX), f"{key}.urdf_path")
        return Part(str(path), None, key, transform, is_trusted=True)
    if part.urdf_path.lstrip().startswith("<"):
        return Part(part.urdf_path, None, key, transform)
    if path := found_file(part.urdf_path, os.environ.get("MENAGERIE_ROOT", "")):
        return Part(path, None, key, transform)
    known = _ARMS if kind == "arm" else {_GRIPPER: "two-finger gripper"}
    if stem not in known:
        names = ", ".join([*known, *([BUILTIN_HAND] if kind == "hand" else [])])
        raise ConfigError(
            f"{key}.urdf_path: no such file {format_value(part.urdf_path)}, expected a file or one of {names}"
        )
    taken = f"the built-in {known[stem]} of the same size replaces it"
    warnings.warn(f"{key}.urdf_path: no file {format_value(part.urdf_path)}, so {taken}", stacklevel=2)
    return Part(None if kind == "arm" else GRIPPER, _ARMS.get(stem), key, transform)


def quaternion_of(pose: Matrix, key: str) -> np.ndarray:
    """Return the quaternion of the rotation in a 4x4 pose. Raise ConfigError, which names `key`, for invalid poses."""
    quaternion, rotation = np.zeros(4), np.array([row[:3] for row in pose[:3]])
    if not np.allclose(rotation @ rotation.T, np.eye(3), atol=1e-3) or np.linalg.det(rotation) < 0.0:
        raise ConfigError(f"{key}: the first three rows and columns are not a rotation; give a rotation matrix")
    if pose[3] != (0.0, 0.0, 0.0, 1.0):
        raise ConfigError(f"{key}: the last row is {list(pose[3])}, expected [0, 0, 0, 1]")
    mujoco().mju_mat2Quat(quaternion, rotation.flatten())
    return quaternion


def attach_hand(spec: Any, hand: Any, body: Any, position: tuple[float, ...], transform: Matrix, key: str) -> None:
    """Attach the MjSpec of a hand to a body. Links and meshes of the hand get the prefix `hand/`. Joints get no prefix.

    Args:
        spec: the MjSpec of the arm, which the function changes.
        hand: the MjSpec of the hand, which the function changes.
        body: the body of the arm that holds the hand.
        position: position of the flange in the frame of the body, m.
        transform: pose of the hand in the frame of the flange.
        key: config key for error messages.
    """
    joints, taken = [joint.name for joint in hand.joints], {joint.name for joint in spec.joints}
    if twice := [name for name in joints if name in taken]:
        raise ConfigError(f"{key}: joint {twice[0]!r} is in the arm and in the hand; rename it in one of the files")
    place = [a + row[3] for a, row in zip(position, transform[:3], strict=True)]
    spec.attach(hand, frame=body.add_frame(pos=place, quat=quaternion_of(transform, f"{key}.transform")), prefix=HAND)
    names = {HAND + name: name for name in joints}
    for long, short in names.items():
        spec.joint(long).name = short
    for equality in spec.equalities:
        equality.name1 = names.get(equality.name1, equality.name1)
        equality.name2 = names.get(equality.name2, equality.name2)


def flange_of(spec: Any, end_link: str | None, link_key: str, key: str) -> Any:
    """Return the link that holds the hand of an arm from a file: `end_link`, or the only link at the end of the arm.

    For error messages, `link_key` names the setting that gives `end_link`, and `key` names the component of the hand.

    A link is at an end of the arm if no other link is attached to it. An arm without branches has one end.

    Raises: ConfigError if the arm has no link `end_link`, or if `end_link` is None and the arm has several ends.
    """
    links = {body.name: body for body in spec.bodies[1:]}
    if end_link is not None:
        if end_link not in links:
            fault = f"unknown link {end_link!r}, which should hold the hand {key}"
            raise ConfigError(f"{link_key}: {fault}; {did_you_mean(end_link, links)}")
        return links[end_link]
    ends = [body for body in links.values() if not list(body.bodies)]
    if len(ends) != 1:
        names = ", ".join(body.name for body in ends)
        fault = f"the arm has {len(ends)} links at its ends, {names}, expected one, which holds the hand"
        raise ConfigError(f"{key}: {fault}; name the flange with robot.solver_cfg.arm.end_link_name")
    return ends[0]
