"""Description of a robot that has its own file."""

from typing import NamedTuple


class RobotModel(NamedTuple):
    """A robot with its file, its parts and its home position. `ecrl.register_robot` gives the robot a name.

    Attributes:
        source: path or text of a URDF or MJCF file.
        parts: joints of each part, as names or patterns. By default, all joints are the part `arm`.
        end_links: map from a part to the link that holds the end effector of the part.
        home: positions of the joints at the start (m or rad), in the order of the joints in the file, without joints
            that follow another joint (`mimic` in a URDF file). By default, an MJCF file defines the positions, and
            joints of a URDF file start at the position nearest to 0 within their limits.
        reach: largest horizontal distance from the base to the end effector, m. Tasks scale their lengths with the
            reach; see the key `env.cfg.scale`. By default, the reach of the built-in arm.
        init_rot: default rotation of the base (degrees). The config key `robot.init_rot` overrides this rotation. Tasks
            expect an arm that faces the direction -x.
        grip: map from each joint of the gripper to its positions in the open and in the closed gripper (m or rad).
    """

    source: str
    parts: dict[str, tuple[str, ...]] = {}  # noqa: RUF012  # never changed
    end_links: dict[str, str] = {}  # noqa: RUF012  # never changed
    home: tuple[float, ...] = ()
    reach: float = 1.3
    init_rot: tuple[float, float, float] = (0.0, 0.0, 0.0)
    grip: dict[str, tuple[float, float]] = {}  # noqa: RUF012  # never changed
