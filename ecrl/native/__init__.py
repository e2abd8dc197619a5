"""Functions in C++ for kernels whose loops are slow as a sequence of torch operations.

The C++ files are compiled once per machine, at the first use. Without a C++ compiler, the kernels run their definitions
in torch. The results then differ by rounding, and random bits do not differ.
"""
