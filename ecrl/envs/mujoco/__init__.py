"""MuJoCo environments as pure functions. A torch operator steps the physics, and configs describe the scenes."""
