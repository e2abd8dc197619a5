"""Compile the functions of a run.

This package contains all code that calls torch.compile, or that uses inductor, Triton or CUDA graphs, except the CUDA
graph of MuJoCo Warp in `ecrl.envs`. Some other modules ask whether torch.compile is tracing them.
"""
