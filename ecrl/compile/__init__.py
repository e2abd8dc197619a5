"""Compile the functions of a run.

This package contains all code that depends on torch.compile, inductor, Triton or CUDA graphs.
"""
