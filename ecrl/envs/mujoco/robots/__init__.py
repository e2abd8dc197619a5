"""Robots of MuJoCo tasks: the built-in robots, their drives, and kinematics."""
