"""A small robot in URDF: two links with a gripper, whose second finger follows the first."""

from collections.abc import Sequence

INERTIA = '<inertia ixx="0.01" iyy="0.01" izz="0.01" ixy="0" ixz="0" iyz="0"/>'


def link(name: str, shapes: str = "", mass: float = 1.0) -> str:
    """Return a link with mass (kg) and shapes."""
    return f'<link name="{name}"><inertial><mass value="{mass}"/>{INERTIA}</inertial>{shapes}</link>'


def joint(
    name: str,
    parent: str,
    child: str,
    kind: str = "revolute",
    axis: str = "0 0 1",
    limit: str = 'lower="-1" upper="2" effort="50"',
    more: str = "",
) -> str:
    """Return a joint 0.3 m above its parent."""
    limits = "" if kind in ("fixed", "continuous") and not limit else f'<limit {limit} velocity="3"/>'
    ends = f'<parent link="{parent}"/><child link="{child}"/><axis xyz="{axis}"/><origin xyz="0 0 0.3"/>'
    return f'<joint name="{name}" type="{kind}">{ends}{limits}{more}</joint>'


BALL = '<collision><geometry><sphere radius="0.05"/></geometry></collision>'
LINKS = [link("base", BALL), link("upper", BALL), link("lower", BALL), link("tool")]
LINKS += [link("left", BALL, 0.1), link("right", BALL, 0.1)]
FINGER = 'lower="0" upper="0.04" effort="20"'
MIMIC = '<mimic joint="grip_left" multiplier="-1.0" offset="0.01"/>'
JOINTS = [
    joint("turn", "base", "upper"),
    joint("bend", "upper", "lower", axis="0 1 0", limit='lower="0.2" upper="1.5" effort="30"'),
    joint("flange", "lower", "tool", "fixed", limit=""),
    joint("grip_left", "tool", "left", "prismatic", "1 0 0", FINGER),
    joint("grip_right", "tool", "right", "prismatic", "1 0 0", 'lower="-0.04" upper="0.04" effort="20"', MIMIC),
]


ARM_LINKS = [link("base", BALL), link("upper", BALL), link("flange")]
ARM_JOINTS = [joint("turn", "base", "upper"), joint("fixed", "upper", "flange", "fixed", limit="")]
"""An arm without a gripper."""
HAND_LINKS = [link("base", BALL), *LINKS[-2:]]
HAND_JOINTS = [
    joint("grip_left", "base", "left", "prismatic", "1 0 0", FINGER),
    joint("grip_right", "base", "right", "prismatic", "1 0 0", 'lower="-0.04" upper="0.04" effort="20"', MIMIC),
]
"""The gripper alone."""


def robot(links: Sequence[str] = LINKS, joints: Sequence[str] = JOINTS, more: str = "") -> str:
    """Return the text of a URDF file."""
    return f'<?xml version="1.0"?><robot name="two_links">{"".join([*links, *joints])}{more}</robot>'
