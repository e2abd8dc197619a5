"""One kernel per file: implementations of ecrl and of other libraries on the same numbers.

Each file has `inputs(...)`, which returns NumPy arrays, and `cost(...)`, the bytes and operations of a call. Its
tables `ECRL` and `OTHERS` map a name to a function `(inputs, device) -> call`. All calls of a kernel return equal
arrays, which a test proves, and return when the arrays are ready.
"""
