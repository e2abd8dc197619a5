"""MuJoCo environments as pure functions: a torch operator for the physics, scenes from JSON configs, and tasks."""
