"""Robots of the package `example-robot-data`. The key `robot.model` selects one by a name such as `example:panda`.

The package has URDF files with meshes. A robot in `EXAMPLES` has parts, an end effector and a home position. All other
robots have the names of their files, such as `example:go2`, and one part with all joints.
"""

from importlib.metadata import distribution
from pathlib import Path

from ecrl.envs.mujoco.robots.model import RobotModel
from ecrl.errors import ConfigError, extra
from ecrl.registry import did_you_mean

PREFIX = "example:"
_FOLDER = "cmeel.prefix/share/example-robot-data/robots"


_HALF_TURN = (0.0, 0.0, 180.0)  # the arms of the package face +x, and ecrl's arms face -x


def _ur(number: int, reach: float) -> RobotModel:
    home = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)
    return RobotModel(f"ur{number}_robot", {"arm": (".*",)}, {"arm": "tool0"}, home, reach, _HALF_TURN)


EXAMPLES = {
    "panda": RobotModel(
        "panda",
        {"arm": ("panda_joint[1-7]",), "hand": ("panda_finger_joint1",)},
        {"arm": "panda_hand_tcp"},
        (0.0, -0.785, 0.0, -2.356, 0.0, 1.571, 0.785, 0.04),
        0.855,
        _HALF_TURN,
        {"panda_finger_joint1": (0.04, 0.0)},
    ),
    "ur3": _ur(3, 0.5),
    "ur5": _ur(5, 0.85),
    "ur10": _ur(10, 1.3),
    "so101": RobotModel(
        "so101",
        {"arm": ("shoulder_.*", "elbow_flex", "wrist_.*"), "hand": ("gripper",)},
        {"arm": "gripper_frame_link"},
        (0.0, -0.6, 0.6, 1.57, 0.0, 0.5),
        0.42,
        _HALF_TURN,
    ),
}
"""Robots with parts, end effectors and home positions, by name. Each `source` is a file's name without `.urdf`."""


def example_file(name: str, key: str) -> Path:
    """Return the path of the URDF file of a robot in the package.

    Raises: ConfigError, which names `key`, if the package has no robot or several robots of this name.
        MissingExtraError if the package is not installed.
    """
    with extra("robots"):
        folder = Path(str(distribution("example-robot-data").locate_file(_FOLDER)))
    files = sorted(folder.rglob("*.urdf"))
    stem = EXAMPLES[name].source if name in EXAMPLES else name
    found = [path for path in files if path.stem == stem]
    if not found:
        known = did_you_mean(name, sorted({*EXAMPLES, *(path.stem for path in files)}))
        raise ConfigError(f"{key}: example-robot-data has no robot {name!r}; {known}")
    if len(found) > 1:
        paths = ", ".join(map(str, found))
        raise ConfigError(f"{key}: example-robot-data has several robots {name!r}; give one of the paths {paths}")
    return found[0]
