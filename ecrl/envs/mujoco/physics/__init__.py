"""Physics of MuJoCo tasks, computed by MuJoCo on the CPU or by MuJoCo Warp on a GPU."""
