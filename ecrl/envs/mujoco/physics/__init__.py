"""Physics of MuJoCo tasks, by MuJoCo on the CPU or MuJoCo Warp on a GPU."""
