"""Skip steps of inductor that do not change the generated code. This shortens a first compilation by a tenth."""

from collections.abc import Iterator
from contextlib import contextmanager

import sympy
from torch._inductor import sizevars
from torch._inductor.cpu_vec_isa import VecAVX512, VecAVX512VNNI, VecISA

_ALWAYS_COMPILES = (VecAVX512._avx512_bf16_code, VecAVX512VNNI._avx512_vnni_code)
"""Test programs that every C++20 compiler accepts.

Inductor compiles a test program only on CPUs that have the tested instructions.
"""


def is_sum(index: sympy.Basic) -> bool:
    """Return True if an index is a sum of integers and integer multiples of variables.

    Inductor cannot simplify such an index.

    >>> x, y = sympy.symbols("x y", integer=True)
    >>> is_sum(4 * x + y + 3), is_sum(4 * x * y), is_sum(x % 4), is_sum(x + sympy.floor(y / 4))
    (True, False, False, False)
    """
    if not isinstance(index, sympy.Expr):  # the index is a comparison
        return False
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(index)]
    return all(number.is_Integer and (rest.is_Symbol or rest == 1) for number, rest in terms)


@contextmanager
def skip_redundant_codegen() -> Iterator[None]:
    """Make inductor skip the simplification of sums (`is_sum`) and the test programs in `_ALWAYS_COMPILES`."""
    simplify, check_build = sizevars.simplify_index_in_vec_range, VecISA.check_build

    def simplify_others(index: sympy.Expr, var: sympy.Expr, vec_length: int) -> sympy.Expr:
        return index if is_sum(index) else simplify(index, var, vec_length)

    def check_others(self: VecISA, code: str) -> bool:
        return code in _ALWAYS_COMPILES or check_build(self, code)

    sizevars.simplify_index_in_vec_range, VecISA.check_build = simplify_others, check_others
    try:
        yield
    finally:
        sizevars.simplify_index_in_vec_range, VecISA.check_build = simplify, check_build
