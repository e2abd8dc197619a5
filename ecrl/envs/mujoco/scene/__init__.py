"""Scenes of MuJoCo tasks: their config and the model that is built from it."""
