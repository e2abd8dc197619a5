"""C++ functions for kernels whose loops are slow as a sequence of torch operations.

The C++ files are compiled once per machine, at the first use. Without a C++ compiler, the kernels run torch operations.
The results then differ only by rounding, and random bits are the same.
"""
