"""One kernel per file: implementations of ecrl and of other libraries on the same numbers.

Each file has `inputs(...)`, which returns NumPy arrays, and `cost(...)`, the bytes and operations of a call. Its
tables `ECRL` and `OTHERS` map a name to a function `(inputs, device) -> call`. A call returns when its arrays are
ready. A test checks that all calls of a kernel return equal arrays. In `draws`, which has a pair of tables for each
distribution, only the moments are equal.
"""
