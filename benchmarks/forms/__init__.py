"""One kernel a file: ours and other libraries' on the same numbers.

Each has `cost(...)`, the bytes that must move and the operations that must be done; `FORMS`, by name a function
`(inputs, device) -> call`; and `inputs(...)`, NumPy arrays. A call gives the same arrays in every form, which a test
proves, and returns when they are there.
"""
