"""Built-in robots made of primitive shapes: a cart-pole, an arm, and a finger that moves along x and y.

The arm has the proportions of a UR10, and its tool is a pusher.

The arm follows the Denavit-Hartenberg table of Universal Robots. Joint i turns about the z axis of frame i. Frame i + 1
is at `(a_i, 0, d_i)` in the turned frame i, and is rotated by `alpha_i` about the x axis. At its home position, the arm
faces the direction -x, and the tool of the arm points down.
"""

from collections.abc import Callable
from math import cos, pi, sin
from typing import Any, NamedTuple

from ecrl.envs.mujoco.scene.models import mujoco

_A = (0.0, -0.612, -0.5723, 0.0, 0.0)  # in m
_D = (0.1273, 0.0, 0.0, 0.163941, 0.1157, 0.0922)  # in m; the last offset is from the last joint to the flange
_ALPHA = (pi / 2, 0.0, 0.0, pi / 2, -pi / 2)  # in rad
_MASS = (7.778, 12.93, 3.87, 1.96, 1.96, 0.202)  # in kg
_ARMATURE = (1.0, 1.0, 0.5, 0.1, 0.1, 0.1)  # in kg m^2
_LIMIT = (2 * pi, 2 * pi, pi, 2 * pi, 2 * pi, 2 * pi)  # in rad
_SHAPES = (  # capsule of each link in the frame of the link: start, end and radius, all in m
    ((0.0, 0.0, 0.09), (0.0, 0.0, 0.15), 0.075),
    ((0.0, 0.0, 0.13), (-0.612, 0.0, 0.13), 0.06),  # with an offset from the joint, the link clears the shoulder
    ((0.0, 0.0, 0.03), (-0.5723, 0.0, 0.03), 0.05),
    ((0.0, 0.0, 0.05), (0.0, 0.0, 0.163941), 0.045),
    ((0.0, 0.0, 0.0), (0.0, 0.0, 0.1157), 0.045),
    ((0.0, 0.0, 0.03), (0.0, 0.0, 0.0622), 0.04),
)
_GREY, _BLUE, _DARK = (0.75, 0.76, 0.78, 1.0), (0.35, 0.55, 0.75, 1.0), (0.2, 0.2, 0.22, 1.0)
_TOUCH = {"contype": 2, "conaffinity": 1, "condim": 4}  # a robot does not collide with itself
Matrix = tuple[tuple[float, ...], ...]


class Builtin(NamedTuple):
    """A robot: a function that builds the robot, the names of its joints, and its default settings.

    A robot from a file also has a `Builtin`, whose function `build` does nothing. `build(base, tcp, has_hand)` adds a
    built-in robot to the body `base` of an MjSpec. `tcp` maps each part that has an end effector to the pose of the end
    effector. The pose is in the frame of the flange or, for a robot from a file, in the frame of the link that holds
    the end effector. If `has_hand` is True, the arm gets no tool. `flange` maps each part that has a flange to the
    position (m) of the flange in the frame of the part's last link. `stiffness`, `damping` and `max_effort` are the
    default settings of the drives. `aliases` are EmbodiChain's names of the joints, in the order of `joints`. `grip`
    maps each joint of a gripper to the joint's positions in the open and in the closed gripper.
    """

    build: Callable[[Any, dict[str, Matrix], bool], None]
    joints: tuple[str, ...]
    parts: dict[str, tuple[str, ...]]
    flange: dict[str, tuple[float, float, float]]
    tcp: dict[str, Matrix]
    home: tuple[float, ...]
    stiffness: tuple[float, ...]
    damping: tuple[float, ...]
    max_effort: tuple[float, ...]
    aliases: tuple[str, ...] = ()
    grip: dict[str, tuple[float, float]] = {}  # noqa: RUF012  # never changed


def _geom(body: Any, kind: str, **attributes: Any) -> None:
    body.add_geom(type=getattr(mujoco().mjtGeom, f"mjGEOM_{kind}"), **_TOUCH, **attributes)


def _capsule(body: Any, start: tuple, end: tuple, radius: float, mass: float, rgba: tuple) -> None:
    _geom(body, "CAPSULE", fromto=[*start, *end], size=[radius, 0.0, 0.0], mass=mass, rgba=rgba)


def _arm(base: Any, tcp: dict[str, Matrix], has_hand: bool) -> None:
    body, frames = base, [(0.0, 0.0, 0.0), *zip(_A, _D, _ALPHA, strict=False)]
    for i, (name, (a, d, alpha)) in enumerate(zip(ROBOTS["URRobot"].joints, frames, strict=True)):
        quaternion = [cos(alpha / 2), sin(alpha / 2), 0.0, 0.0]
        body = body.add_body(name=name.replace("joint", "link"), pos=[a, 0.0, d], quat=quaternion, gravcomp=1.0)
        body.add_joint(name=name, axis=[0.0, 0.0, 1.0], range=[-_LIMIT[i], _LIMIT[i]], armature=_ARMATURE[i])
        _capsule(body, *_SHAPES[i], _MASS[i], _GREY if i in (1, 2, 5) else _BLUE)
    if has_hand:
        return
    tool = tcp.get("arm", ROBOTS["URRobot"].tcp["arm"])  # use the default pose if no part has the name "arm"
    x, y, z = (row[3] for row in tool[:3])
    _geom(body, "BOX", size=[0.035, 0.035, 0.015], pos=[0.0, 0.0, _D[5] + 0.015], mass=0.3, rgba=_DARK)
    _capsule(body, (0.0, 0.0, _D[5] + 0.02), (x, y, _D[5] + z - 0.02), 0.02, 0.5, _DARK)


def _cart_pole(base: Any, tcp: dict[str, Matrix], has_hand: bool) -> None:
    kinds = mujoco().mjtJoint
    _geom(base, "BOX", size=[0.015, 4.0, 0.015], mass=1.0, rgba=_DARK)
    cart = base.add_body(name="cart")
    cart.add_joint(name="slider_to_cart", type=kinds.mjJNT_SLIDE, axis=[0.0, 1.0, 0.0], range=[-4.0, 4.0])
    _geom(cart, "BOX", size=[0.1, 0.125, 0.1], mass=1.0, rgba=_BLUE)
    pole = cart.add_body(name="pole")
    pole.add_joint(name="cart_to_pole", axis=[1.0, 0.0, 0.0])
    _geom(pole, "BOX", size=[0.02, 0.03, 0.5], pos=[0.0, 0.0, 0.47], mass=1.0, rgba=_GREY)


def _finger(base: Any, tcp: dict[str, Matrix], has_hand: bool) -> None:
    finger, kinds = base.add_body(name="finger", gravcomp=1.0), mujoco().mjtJoint
    for name, axis in zip(ROBOTS["Finger"].joints, ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]), strict=True):
        finger.add_joint(name=name, type=kinds.mjJNT_SLIDE, axis=axis, range=[-0.4, 0.4])
    shape = {"size": [0.02, 0.05, 0.0], "pos": [0.0, 0.0, 0.05], "mass": 0.1, "rgba": _DARK}
    # the finger does not collide, so it can enter a block
    finger.add_geom(type=mujoco().mjtGeom.mjGEOM_CYLINDER, contype=0, conaffinity=0, **shape)


_ARM_JOINTS = ("shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3")
_CART_JOINTS = ("slider_to_cart", "cart_to_pole")
_FINGER_JOINTS = ("finger_x", "finger_y")
NO_OFFSET = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0))
ROBOTS = {
    "URRobot": Builtin(
        _arm,
        joints=tuple(f"{name}_joint" for name in _ARM_JOINTS),
        parts={"arm": tuple(f"{name}_joint" for name in _ARM_JOINTS)},
        flange={"arm": (0.0, 0.0, _D[5])},
        tcp={"arm": ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0), (0.0, 0.0, 1.0, 0.16), (0.0, 0.0, 0.0, 1.0))},
        home=(0.0, -1.57, 1.57, -1.57, -1.57, 0.0),
        stiffness=(20_000.0, 20_000.0, 8_000.0, 1_000.0, 1_000.0, 1_000.0),
        damping=(1_000.0, 1_000.0, 300.0, 30.0, 30.0, 30.0),
        max_effort=(330.0, 330.0, 150.0, 56.0, 56.0, 56.0),
        aliases=tuple(f"joint{i}" for i in range(1, 7)),
    ),
    "CartPole": Builtin(
        _cart_pole,
        joints=_CART_JOINTS,
        parts={"arm": _CART_JOINTS[:1], "hand": _CART_JOINTS[1:]},
        flange={},
        tcp={},
        home=(0.0, 0.0),
        stiffness=(10.0, 0.01),
        damping=(1.0, 0.001),
        max_effort=(100.0, 0.1),
    ),
    "Finger": Builtin(
        _finger,
        joints=_FINGER_JOINTS,
        parts={"arm": _FINGER_JOINTS},
        flange={"arm": (0.0, 0.0, 0.0)},
        tcp={"arm": NO_OFFSET},
        home=(0.0, 0.0),
        # stiffness / damping is one over the time step of 0.01 s, so a physics step moves the finger to its target
        stiffness=(100_000.0, 100_000.0),
        damping=(1_000.0, 1_000.0),
        max_effort=(100_000.0, 100_000.0),
    ),
}
"""Built-in robots by name. The cart-pole has the same drives as in EmbodiChain's CartPoleRL."""
