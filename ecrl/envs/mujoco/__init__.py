"""MuJoCo environments as pure functions, with a torch operator for the physics and scenes from JSON configs."""
