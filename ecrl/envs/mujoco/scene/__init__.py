"""Scenes of MuJoCo tasks: their configs, and the models that are built from the configs."""
