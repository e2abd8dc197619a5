"""Compile the functions of a run.

This package contains all code that uses inductor, Triton or CUDA graphs, except the CUDA graph of MuJoCo Warp in
`ecrl.envs`. No module of ecrl calls torch.compile, but some modules ask whether torch.compile is tracing them.
"""
