"""Write tanh, erf, expm1 and atanh in inductor's vector C++ so that small arguments keep their digits.

Inductor's own fast form of tanh is `2 / (1 + exp(-2 x)) - 1`. It subtracts two numbers near 1, so a small result loses
all its digits and 0 comes out for `x = 1e-9`. Its forms of expm1 and atanh, and torch's vector form of erf in float32,
do the same. Here tanh and erf in float32 are ratios of polynomials, as fast as by `exp`. A ratio is odd in `x`, so its
relative error is below 5e-7 for every `x`. The other functions are those of torch's vector library.
"""

from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecOverrides

# Minimax fits of Eigen and XLA, for |x| <= 9 and |x| <= 4, numerator and denominator in powers of x**2. Beyond these
# bounds the functions are 1 in float32. Eigen/src/Core/MathFunctionsImpl.h has `ptanh_float`. Its last coefficients are
# equal here, so that tanh(x) is x for small x. XLA's is EmitErfF32 (xla/service/elemental_ir_emitter.cc).
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
    """Return the C++ of a polynomial in `z` by Horner's scheme. The highest power comes first."""
    total = f"T({coefficients[0]})"
    for coefficient in coefficients[1:]:
        total = f"at::vec::fmadd({total}, z, T({coefficient}))"
    return total


def _ratio(bound: str, above: tuple[str, ...], below: tuple[str, ...]) -> str:
    """Return a C++ function: an odd ratio of polynomials up to `bound`, and 1 beyond."""
    return (
        "[](const auto& x) { using T = std::decay_t<decltype(x)>;"
        f" const T c = at::vec::minimum(at::vec::maximum(x, T(-{bound})), T({bound})), z = c * c;"  # NaN stays
        f" const T y = c * ({_polynomial(above)} / {_polynomial(below)});"
        " return at::vec::minimum(at::vec::maximum(y, T(-1.0f)), T(1.0f)); }"
    )


_TANH_CPP, _ERF_CPP = _ratio("9.0f", *_TANH), _ratio("4.0f", *_ERF)


def tanh(a: Any) -> str:
    """Return the C++ of tanh of a vector: the ratio for float32, the library's function for other types."""
    return f"({_TANH_CPP})({a})" if a.dtype == torch.float32 else f"{a}.tanh()"


def erf(x: Any) -> str:
    """Return the C++ of erf of a vector: the ratio for float32, the library's function for other types."""
    return f"({_ERF_CPP})({x})" if x.dtype == torch.float32 else f"{x}.erf()"


def expm1(x: Any) -> str:
    """Return the C++ of expm1 of a vector, by the library's function."""
    return f"{x}.expm1()"


def atanh(x: Any) -> str:
    """Return the C++ of atanh of a vector, by the library's function."""
    return f"{x}.atanh()"


CppVecOverrides.tanh = staticmethod(tanh)
CppVecOverrides.erf = staticmethod(erf)
CppVecOverrides.expm1 = staticmethod(expm1)
CppVecOverrides.atanh = staticmethod(atanh)
