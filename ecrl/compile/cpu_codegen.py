"""Skip work of inductor that does not change its output. It takes a tenth of a first compilation."""

from collections.abc import Iterator
from contextlib import contextmanager

import sympy
from torch._inductor import sizevars
from torch._inductor.cpu_vec_isa import VecAVX512, VecAVX512VNNI, VecISA

_KNOWN = (VecAVX512._avx512_bf16_code, VecAVX512VNNI._avx512_vnni_code)
"""Code that every C++20 compiler accepts. Inductor tests it only on processors with these instructions."""


def is_sum(index: sympy.Basic) -> bool:
    """Return True if an index only adds multiples of variables. Then nothing in it can be simplified.

    >>> x, y = sympy.symbols("x y", integer=True)
    >>> is_sum(4 * x + y + 3), is_sum(4 * x * y), is_sum(x % 4), is_sum(x + sympy.floor(y / 4))
    (True, False, False, False)
    """
    if not isinstance(index, sympy.Expr):  # a comparison
        return False
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(index)]
    return all(number.is_Integer and (rest.is_Symbol or rest == 1) for number, rest in terms)


@contextmanager
def brief_codegen() -> Iterator[None]:
    """While this lasts, sums are not simplified and known instructions not tried."""
    simplify, trial = sizevars.simplify_index_in_vec_range, VecISA.check_build

    def simplified(index: sympy.Expr, var: sympy.Expr, vec_length: int) -> sympy.Expr:
        return index if is_sum(index) else simplify(index, var, vec_length)

    def known(self: VecISA, code: str) -> bool:
        return code in _KNOWN or trial(self, code)

    sizevars.simplify_index_in_vec_range, VecISA.check_build = simplified, known
    try:
        yield
    finally:
        sizevars.simplify_index_in_vec_range, VecISA.check_build = simplify, trial
