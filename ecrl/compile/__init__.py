"""Compiling: everything that knows torch.compile, inductor, Triton or CUDA graphs."""
