"""C++ functions for kernels with loops that are slow as a sequence of torch operations.

The C++ files are compiled once per machine, at the first use. Without a C++ compiler, the kernels run their definitions
in torch. The results then differ only by rounding, and random bits are the same.
"""
