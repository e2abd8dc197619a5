"""Robots of the package `example-robot-data`, named `example:panda` in `robot.model`.

The package has URDF files with meshes. A robot in `EXAMPLES` has parts, an end effector and a home position. All other
robots of the package are named by their files, such as `example:go2`, and have one part with all joints.
"""

from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

from ecrl.errors import ConfigError, extra
from ecrl.registry import did_you_mean

PREFIX = "example:"
_FOLDER = "cmeel.prefix/share/example-robot-data/robots"


class Example(NamedTuple):
    """A robot of the package.

    Attributes:
        file: name of its URDF file, without `.urdf`.
        parts: patterns of the joints of each part.
        end_links: link that holds the end effector of a part, by part.
        home: positions of the joints at the start (m or rad), in the order of the joints in the file.
        reach: largest distance from the base to the end effector, m.
        grip: positions of the joints of the gripper when it is open and when it is closed (m or rad).
    """

    file: str
    parts: dict[str, tuple[str, ...]]
    end_links: dict[str, str]
    home: tuple[float, ...]
    reach: float
    grip: dict[str, tuple[float, float]] = {}  # noqa: RUF012  # never changed


def _ur(number: int, reach: float) -> Example:
    home = (0.0, -1.57, 1.57, -1.57, -1.57, 0.0)
    return Example(f"ur{number}_robot", {"arm": (".*",)}, {"arm": "tool0"}, home, reach)


EXAMPLES = {
    "panda": Example(
        "panda",
        {"arm": ("panda_joint[1-7]",), "hand": ("panda_finger_joint1",)},
        {"arm": "panda_hand_tcp"},
        (0.0, -0.785, 0.0, -2.356, 0.0, 1.571, 0.785, 0.04),
        0.855,
        {"panda_finger_joint1": (0.04, 0.0)},
    ),
    "ur3": _ur(3, 0.5),
    "ur5": _ur(5, 0.85),
    "ur10": _ur(10, 1.3),
    "so101": Example(
        "so101",
        {"arm": ("shoulder_.*", "elbow_flex", "wrist_.*"), "hand": ("gripper",)},
        {"arm": "gripper_frame_link"},
        (0.0, -0.6, 0.6, 1.57, 0.0, 0.5),
        0.42,
        {"gripper": (1.2, -0.17)},
    ),
}
"""Robots with parts, end effectors and home positions, by name."""


def example_file(name: str, key: str) -> Path:
    """Return the path of the URDF file of a robot in the package.

    Raises: ConfigError that begins with `key`, if there is no such robot. MissingExtraError if the package is not
        installed.
    """
    with extra("robots"):
        folder = Path(str(distribution("example-robot-data").locate_file(_FOLDER)))
    files = sorted(folder.rglob("*.urdf"))
    stem = EXAMPLES[name].file if name in EXAMPLES else name
    found = [path for path in files if path.stem == stem]
    if not found:
        known = did_you_mean(name, sorted({*EXAMPLES, *(path.stem for path in files)}))
        raise ConfigError(f"{key}: example-robot-data has no robot {name!r}; {known}")
    if len(found) > 1:
        paths = ", ".join(map(str, found))
        raise ConfigError(f"{key}: example-robot-data has several robots {name!r}; give one of the paths {paths}")
    return found[0]
