"""Robots of MuJoCo tasks: the built-in arm, drives and kinematics."""
