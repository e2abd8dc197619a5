"""Make inductor generate C++ for tanh, erf, expm1 and atanh that is accurate for small arguments.

Inductor computes tanh as `2 / (1 + exp(-2 x)) - 1`. For small `x`, this formula subtracts two values near 1, so the
result loses precision: for `x = 1e-9`, the result is 0. Inductor's functions expm1 and atanh, and torch's vectorised
erf in float32, have the same problem. This module computes tanh and erf in float32 as `x` times a ratio of polynomials
in `x**2`. Evaluating the ratio takes as much time as the formula with `exp`. Because `x` is a factor of the result, the
relative error is below 5e-7 for every `x`. For tanh and erf in other dtypes, and for expm1 and atanh, this module calls
torch's vector library.
"""

from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecOverrides

# The tuples below contain the coefficients of the numerator and the denominator, starting with the highest power of
# x**2. The ratios are minimax approximations of tanh for |x| <= 9 and of erf for |x| <= 4. For larger |x|, tanh and erf
# are 1 or -1 in float32. The coefficients of tanh are from `ptanh_float` of Eigen (Eigen/src/Core/MathFunctionsImpl.h).
# Unlike in Eigen, the last coefficients of the numerator and the denominator are equal, so tanh(x) is x for small x.
# The coefficients of erf are from EmitErfF32 of XLA (xla/service/elemental_ir_emitter.cc).
_TANH = (
    (
        "-2.76076847742355e-16f",
        "2.00018790482477e-13f",
        "-8.60467152213735e-11f",
        "5.12229709037114e-08f",
        "1.48572235717979e-05f",
        "6.37261928875436e-04f",
        "4.89352518554385e-03f",
    ),
    ("1.19825839466702e-06f", "1.18534705686654e-04f", "2.26843463243900e-03f", "4.89352518554385e-03f"),
)
_ERF = (
    (
        "-2.72614225801306e-10f",
        "2.77068142495902e-08f",
        "-2.10102402082508e-06f",
        "-5.69250639462346e-05f",
        "-7.34990630326855e-04f",
        "-2.95459980854025e-03f",
        "-1.60960333262415e-02f",
    ),
    (
        "-1.45660718464996e-05f",
        "-2.13374055278905e-04f",
        "-1.68282697438203e-03f",
        "-7.37332916720468e-03f",
        "-1.42647390514189e-02f",
    ),
)


def _polynomial(coefficients: tuple[str, ...]) -> str:
    """Write C++ that evaluates a polynomial in `z` by Horner's scheme. `coefficients` starts with the highest power."""
    total = f"T({coefficients[0]})"
    for coefficient in coefficients[1:]:
        total = f"at::vec::fmadd({total}, z, T({coefficient}))"
    return total


def _ratio(bound: str, numerator: tuple[str, ...], denominator: tuple[str, ...]) -> str:
    """Write a C++ lambda that returns x times a ratio of polynomials in x**2.

    The lambda clamps x to the interval [-bound, bound], and clamps the result to [-1, 1].
    """
    return (
        "[](const auto& x) { using T = std::decay_t<decltype(x)>;"
        f" const T c = at::vec::minimum(at::vec::maximum(x, T(-{bound})), T({bound})), z = c * c;"  # clamping keeps NaN
        f" const T y = c * ({_polynomial(numerator)} / {_polynomial(denominator)});"
        " return at::vec::minimum(at::vec::maximum(y, T(-1.0f)), T(1.0f)); }"
    )


_TANH_CPP, _ERF_CPP = _ratio("9.0f", *_TANH), _ratio("4.0f", *_ERF)


def tanh(a: Any) -> str:
    """Write C++ that computes tanh of a vector: with polynomials for float32, with torch's library for other dtypes."""
    return f"({_TANH_CPP})({a})" if a.dtype == torch.float32 else f"{a}.tanh()"


def erf(x: Any) -> str:
    """Write C++ that computes erf of a vector, in float32 with polynomials, else with torch's vector library."""
    return f"({_ERF_CPP})({x})" if x.dtype == torch.float32 else f"{x}.erf()"


def expm1(x: Any) -> str:
    """Write C++ that computes expm1 of a vector with torch's vector library."""
    return f"{x}.expm1()"


def atanh(x: Any) -> str:
    """Write C++ that computes atanh of a vector with torch's vector library."""
    return f"{x}.atanh()"


CppVecOverrides.tanh = staticmethod(tanh)
CppVecOverrides.erf = staticmethod(erf)
CppVecOverrides.expm1 = staticmethod(expm1)
CppVecOverrides.atanh = staticmethod(atanh)
