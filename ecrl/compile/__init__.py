"""Compilation: all code that depends on torch.compile, inductor, Triton or CUDA graphs."""
