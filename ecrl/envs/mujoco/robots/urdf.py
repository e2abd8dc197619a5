"""Read a robot from a URDF file: find its meshes, leave out unreadable visual meshes, and compute drive settings.

MuJoCo reads the links, joints, limits, mimic joints and meshes of a URDF file, and uses the convex hulls of the meshes
for collisions. ecrl converts Collada meshes for MuJoCo if the package `pycollada` is installed. A URDF file has no
drives, so the robot gets position drives by default. The strength of a drive follows from the effort of its joint. The
gravity of all links is compensated, as by the controllers of most arms.
"""

import os
import warnings
from collections.abc import Iterator
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np

from ecrl.config.input_files import check_input
from ecrl.config.model import format_value
from ecrl.envs.mujoco.robots.collada import SUFFIX, can_read_collada, collada_mesh
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError

_MOVING = ("revolute", "continuous", "prismatic")
_READABLE = (".stl", ".obj", ".msh")
_MEANINGFUL = ("link", "joint", "material", "mujoco")
_COMPILER = {"strippath": "false", "fusestatic": "false", "discardvisual": "false"}
_NUMERIC = ("origin", "axis", "mass", "inertia", "box", "sphere", "cylinder", "mesh", "mimic")
"""Elements of links and joints whose numbers MuJoCo reads."""
_NOT_FINITE = ("nan", "inf", "infinity")
_AXES, _ENTRIES = ("xx", "yy", "zz", "xy", "xz", "yz"), ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))
"""Names of the moments of inertia in a URDF file, and their positions in a 3x3 matrix."""
_ROUNDING = 1e-6
"""Largest relative difference of moments of inertia that is treated as rounding."""
_HIDDEN = 3
"""Group of geoms that images do not show: collision shapes of links that also have visual shapes."""
_COLLISION = {"contype": 2, "conaffinity": 1, "condim": 4}  # a robot does not collide with itself

_ERROR = 0.02
"""Position error (rad or m) at which a drive reaches its largest force."""
_RATE = 20.0
"""Stiffness / damping of a drive, 1/s: the rate at which the position error decays."""
_ACCELERATION = 300.0
"""Acceleration (rad/s^2 or m/s^2) of a motor without load at its largest force.

The inertia of the rotor is the largest force divided by this acceleration.
"""


def is_urdf(source: str) -> bool:
    """Return True for the text or the path of a URDF file.

    >>> is_urdf("robots/arm.urdf"), is_urdf("<?xml version='1.0'?><robot name='arm'/>"), is_urdf("arm.xml")
    (True, True, False)
    """
    return "<robot" in source if source.lstrip().startswith("<") else source.lower().endswith(".urdf")


def urdf_spec(text: str, folder: Path, key: str, is_trusted: bool = False) -> Any:
    """Return the MjSpec of a URDF file.

    Args:
        text: the text of the file.
        folder: folder of the file, where relative paths begin.
        key: config key for error messages.
        is_trusted: True for a file of an installed package or of a registered robot. Its meshes may be outside
            $ECRL_INPUT_FOLDERS.

    Raises: ConfigError if the text is not a URDF file, if MuJoCo cannot simulate it, or if a mesh is missing or outside
        $ECRL_INPUT_FOLDERS.
    """
    robot = _parsed(text, key)
    for child in [child for child in robot if child.tag not in _MEANINGFUL]:
        robot.remove(child)
    _check_tree(robot, key)
    _check_joints(robot, key)
    _check_numbers(robot, key)
    _balance_inertias(robot, key)
    meshes = _resolve_meshes(robot, folder, key, is_trusted)
    section = robot.find("mujoco")
    section = ElementTree.SubElement(robot, "mujoco") if section is None else section
    compiler = section.find("compiler")
    compiler = ElementTree.SubElement(section, "compiler") if compiler is None else compiler
    for name, value in _COMPILER.items():
        compiler.set(name, value)
    try:
        spec = mujoco().MjSpec.from_string(ElementTree.tostring(robot, encoding="unicode"))
    except ValueError as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from None
    _set_shapes(spec)
    _add_collada_meshes(spec, meshes)
    for body in spec.bodies[1:]:
        body.gravcomp = 1.0
    return spec


def _parsed(text: str, key: str) -> ElementTree.Element:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ConfigError(f"{key}: the URDF file has a document type, which ecrl does not read; remove it")
    try:
        robot = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{key}: not a URDF file: {error}") from None
    if robot.tag != "robot":
        raise ConfigError(f"{key}: the first element is <{robot.tag}>, expected <robot>")
    return robot


def _check_tree(robot: ElementTree.Element, key: str) -> None:
    """Raise ConfigError for a missing, duplicate or unknown name, a link with two parents, or a loop of links."""
    for tag in ("link", "joint"):
        names = [part.get("name") for part in robot.findall(tag)]
        for i, name in enumerate(names):
            if not name or name in names[:i]:
                problem = f"has two {tag}s {format_value(name)}" if name else f"has a {tag} without a name"
                raise ConfigError(f"{key}: the URDF file {problem}; give each a name of its own")
    links, parents = [link.get("name") for link in robot.findall("link")], dict[Any, Any]()
    for joint in robot.findall("joint"):
        name = format_value(joint.get("name"))
        ends = {side: None if (end := joint.find(side)) is None else end.get("link") for side in ("parent", "child")}
        for side, link in ends.items():
            if link not in links:
                raise ConfigError(f"{key}: joint {name} has the {side} {format_value(link)}, but no link has this name")
        child, parent = ends["child"], ends["parent"]
        if child in parents:
            raise ConfigError(f"{key}: link {format_value(child)} has two parents; remove one of the two joints")
        parents[child] = parent
    for start in links:
        link, steps = start, 0
        while (link := parents.get(link)) is not None:
            steps += 1
            if steps > len(links):
                fault = f"the parents of link {format_value(start)} form a loop"
                raise ConfigError(f"{key}: {fault}; remove a joint of the loop")


def _check_joints(robot: ElementTree.Element, key: str) -> None:
    """Raise ConfigError for an unsupported kind of joint, or an invalid limit or `mimic`."""
    joints = robot.findall("joint")
    leaders = [joint.get("name") for joint in joints if joint.get("type") in _MOVING and joint.find("mimic") is None]
    for joint in joints:
        kind, where = joint.get("type"), f"{key}: joint {format_value(joint.get('name'))}"
        if kind not in (*_MOVING, "fixed"):
            raise ConfigError(
                f"{where} has the type {format_value(kind)}, expected one of {', '.join((*_MOVING, 'fixed'))}"
            )
        mimic = joint.find("mimic")
        if kind == "fixed":
            continue
        if mimic is not None and mimic.get("joint") not in leaders:
            problem = f"follows {format_value(mimic.get('joint'))}, expected a joint that moves and has no mimic"
            raise ConfigError(f"{where} {problem}; known: {', '.join(map(str, leaders)) or 'none'}")
        low, high, effort = _limits(joint, where)
        if kind != "continuous" and not low < high:
            raise ConfigError(f"{where} has the limits {low:g} to {high:g}, expected lower < upper")
        if effort < 0.0:
            raise ConfigError(f"{where} has the effort {effort:g}, expected at least 0")


def _limits(joint: ElementTree.Element, where: str) -> tuple[float, float, float]:
    """Return `lower`, `upper` and `effort` of a joint, or 0 if absent. Raise ConfigError if one is not finite."""
    limit, numbers = joint.find("limit"), list[float]()
    for name in ("lower", "upper", "effort"):
        text = "0" if limit is None else limit.get(name, "0")
        try:
            numbers.append(float(text))
        except ValueError:
            numbers.append(nan)
        if not isfinite(numbers[-1]):
            raise ConfigError(f"{where} has the {name} {format_value(text)}, expected a finite number")
    low, high, effort = numbers
    return low, high, effort


def _check_numbers(robot: ElementTree.Element, key: str) -> None:
    """Raise ConfigError if a position, a size or another number of a link or a joint is not finite."""
    for part in (*robot.findall("link"), *robot.findall("joint")):
        for element in (one for one in part.iter() if one.tag in _NUMERIC):
            for name, text in element.items():
                if any(word.lstrip("+-") in _NOT_FINITE for word in text.lower().split()):
                    where = f"{key}: the {element.tag} of {part.tag} {format_value(part.get('name'))}"
                    raise ConfigError(f"{where} has the {name} {format_value(text)}, expected finite numbers")


def _balance_inertias(robot: ElementTree.Element, key: str) -> None:
    """Replace physically impossible moments of inertia, with one warning.

    The principal moments A <= B <= C of a body satisfy `A + B >= C`, and MuJoCo refuses other moments. If A > 0 and
    `A + B < C`, ecrl replaces the moments by `(A + B + C) / 3` about all axes, as MuJoCo's option `balanceinertia`
    does. The moments of a plate satisfy `A + B = C`. Due to rounding, MuJoCo refuses some plates, so A and B of a plate
    are multiplied by 1 + 2e-6. If A is 0 or negative, the moments are not changed.
    """
    changed: list[str] = []
    for link in robot.findall("link"):
        inertia = link.find("inertial/inertia")
        if inertia is None or (moments := _moments(inertia)) is None:
            continue
        (a, b, c), axes = np.linalg.eigh(moments)
        if a <= 0.0 or a + b > (1.0 + _ROUNDING) * c:
            continue
        if a + b >= (1.0 - _ROUNDING) * c:
            moments = axes @ np.diag([a * (1.0 + 2.0 * _ROUNDING), b * (1.0 + 2.0 * _ROUNDING), c]) @ axes.T
        else:
            moments = np.eye(3) * (a + b + c) / 3.0
            changed.append(link.get("name", ""))
        for (i, j), name in zip(_ENTRIES, _AXES, strict=True):
            inertia.set(f"i{name}", f"{moments[i, j]:.17g}")
    if changed:
        many = f"{len(changed)} links such as {format_value(changed[0])} have moments of inertia that no body has"
        many += " (principal moments with A + B < C)"
        warnings.warn(f"{key}: {many}, so the mean of the moments replaces them", stacklevel=2)


def _moments(inertia: ElementTree.Element) -> np.ndarray | None:
    """Return the 3x3 matrix of an `inertia` element, or None for invalid numbers, which MuJoCo reports."""
    try:
        numbers = [float(inertia.get(f"i{name}", "0")) for name in _AXES]
    except ValueError:
        return None
    moments = np.zeros((3, 3))
    for (i, j), number in zip(_ENTRIES, numbers, strict=True):
        moments[i, j] = moments[j, i] = number
    return moments if np.isfinite(moments).all() else None


Meshes = dict[str, tuple[np.ndarray, np.ndarray]]
"""Vertices and faces of Collada meshes, by path."""


def _add_collada_meshes(spec: Any, meshes: Meshes) -> None:
    """Add the Collada meshes to an MjSpec. Visual shapes with these meshes get the mass 0."""
    read = [mesh for mesh in spec.meshes if mesh.file in meshes]
    for mesh in read:
        vertices, faces = meshes[mesh.file]
        mesh.file, mesh.uservert, mesh.userface = "", vertices.flatten(), faces.flatten()
    names = {mesh.name for mesh in read}
    solid = {geom.meshname for geom in spec.geoms if geom.contype}
    for mesh in read:
        if mesh.name not in solid:  # a flat mesh, such as a sticker, has no volume
            mesh.inertia = mujoco().mjtMeshInertia.mjMESH_INERTIA_SHELL
    for geom in spec.geoms:
        if geom.meshname in names and not geom.contype:
            geom.mass = 0.0


def _shapes(robot: ElementTree.Element, tag: str) -> Iterator[tuple[ElementTree.Element, ElementTree.Element, Any]]:
    """Yield the link, the element and the mesh of each shape of the kind `tag`, which is `visual` or `collision`.

    The mesh is None if the shape has no mesh.
    """
    for link in robot.findall("link"):
        for shape in link.findall(tag):
            yield link, shape, shape.find("geometry/mesh")


def _resolve_meshes(robot: ElementTree.Element, folder: Path, key: str, is_trusted: bool) -> Meshes:
    """Replace the file names of meshes with paths, and read the Collada meshes.

    Visual meshes that cannot be read are removed, with one warning.
    """
    dropped, meshes = list[str](), Meshes()
    for link, shape, mesh in [*_shapes(robot, "visual"), *_shapes(robot, "collision")]:
        if mesh is None:
            continue
        name = mesh.get("filename", "")
        is_collada = name.lower().endswith(SUFFIX)
        if not (name.lower().endswith(_READABLE) or (is_collada and can_read_collada())):
            if shape.tag == "visual":
                link.remove(shape)
                dropped.append(name)
                continue
            problem = f"the collision mesh {format_value(name)} has a format that MuJoCo cannot read"
            install = ', or install pycollada with pip install "ecrl[robots]"' if is_collada else ""
            raise ConfigError(f"{key}: {problem}; convert it to one of {', '.join(_READABLE)}{install}")
        path = _mesh_path(name, folder, key)
        if not is_trusted:
            check_input(path, key)
        mesh.set("filename", str(path))
        if is_collada and str(path) not in meshes:
            try:
                meshes[str(path)] = collada_mesh(path, key)
            except ConfigError:
                if shape.tag == "collision":
                    raise
                link.remove(shape)
                dropped.append(name)
    if dropped:
        many = f"{len(dropped)} visual meshes such as {format_value(dropped[0])} cannot be read"
        warnings.warn(f"{key}: {many}, so images show the shapes for collisions instead", stacklevel=2)
    return meshes


def _mesh_path(name: str, folder: Path, key: str) -> Path:
    """Return the path of a mesh. `package://NAME/...` is looked up above `folder` and below $ROS_PACKAGE_PATH.

    Raises: ConfigError if the file does not exist.
    """
    if not name.startswith("package://"):
        path = folder / name.removeprefix("file://")
        if not os.path.isfile(path):
            raise ConfigError(f"{key}: no such mesh {format_value(str(path))}")
        return path.resolve()
    package, _, rest = name.removeprefix("package://").partition("/")
    above = [folder.resolve(), *folder.resolve().parents]
    named = [path / rest for path in above if path.name == package]
    roots = [*above, *map(Path, filter(None, os.environ.get("ROS_PACKAGE_PATH", "").split(os.pathsep)))]
    for path in (*named, *(root / package / rest for root in roots)):
        if os.path.isfile(path):
            return path
    where = f"in a folder above {folder} or below $ROS_PACKAGE_PATH"
    raise ConfigError(f"{key}: no such mesh {format_value(name)}; expected the package {format_value(package)} {where}")


def _set_shapes(spec: Any) -> None:
    """Set collision attributes of the shapes, and hide the collision shapes of links that also have visual shapes."""
    for body in spec.bodies:
        visuals = [geom for geom in body.geoms if geom.contype == 0]
        for geom in (geom for geom in body.geoms if geom.contype):
            geom.contype, geom.conaffinity, geom.condim = _COLLISION.values()
            geom.group = _HIDDEN if visuals else geom.group


class Follower(NamedTuple):
    """A joint that follows another joint: position = offset + multiplier * position of the leader (m or rad)."""

    name: str
    leader: str
    offset: float
    multiplier: float


def followers(spec: Any) -> tuple[Follower, ...]:
    """Return the joints of a URDF file that follow another joint (`mimic`). These joints have no drive."""
    return tuple(Follower(e.name1, e.name2, float(e.data[0]), float(e.data[1])) for e in spec.equalities if e.name2)


def efforts_of(spec: Any, joints: tuple[str, ...]) -> tuple[float, ...]:
    """Return the largest force of each joint, `limit effort` in the file, or 0 if the file has none (N or N m)."""
    return tuple(float(spec.joint(name).actfrcrange[1]) for name in joints)


def default_gains(efforts: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the stiffness and the damping of drives, given their largest forces.

        stiffness = effort / 0.02,    damping = stiffness / 20

    >>> default_gains((330.0,))
    ((16500.0,), (825.0,))
    """
    stiffness = tuple(effort / _ERROR for effort in efforts)
    return stiffness, tuple(x / _RATE for x in stiffness)


def add_rotors(spec: Any, joints: tuple[str, ...], efforts: tuple[float, ...]) -> None:
    """Set the inertia of a rotor, `effort / 300`, for each joint without an armature.

    The force limits of the joints are removed, because the drives limit the forces.
    """
    for name, effort in zip(joints, efforts, strict=True):
        joint = spec.joint(name)
        joint.actfrclimited = mujoco().mjtLimited.mjLIMITED_FALSE
        joint.armature = joint.armature or effort / _ACCELERATION


def start_of(spec: Any, joints: tuple[str, ...]) -> tuple[float, ...]:
    """Return, for each joint, the position within the joint's limits that is nearest to 0 (m or rad)."""
    positions = []
    for name in joints:
        joint = spec.joint(name)
        low, high = joint.range
        positions.append(float(min(max(0.0, low), high)) if low < high else 0.0)
    return tuple(positions)
