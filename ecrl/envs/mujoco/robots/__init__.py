"""Robots of MuJoCo tasks: built-in robots, robots from files, their drives, and kinematics."""
