"""Compile functions. This package has all code that depends on torch.compile, inductor, Triton or CUDA graphs."""
