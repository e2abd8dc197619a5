"""Physics of MuJoCo tasks: MuJoCo on the CPU, MuJoCo Warp on a GPU."""
