"""MuJoCo environments as pure functions. A torch operator steps the physics, and JSON configs describe the scenes."""
