"""Write tanh as a ratio of polynomials in inductor's C++. It is as fast as by `exp`, and accurate for small arguments.

Inductor's own fast form is `2 / (1 + exp(-2 x)) - 1`. It subtracts two numbers near 1, so a small result loses all its
digits: `x = 1e-9` gives 0. The ratio is odd in `x`, so its relative error is below 5e-7 for every `x`.
"""

from typing import Any

import torch
from torch._inductor.codegen.cpp import CppVecOverrides

# The minimax fit of Eigen's `ptanh_float` (Eigen/src/Core/MathFunctionsImpl.h), for |x| <= 9 in powers of x**2. Beyond
# 9 tanh is 1 in float32. The first two coefficients are equal here, so that tanh(x) is x for small x.
_NUMERATOR = (
    "-2.76076847742355e-16f",
    "2.00018790482477e-13f",
    "-8.60467152213735e-11f",
    "5.12229709037114e-08f",
    "1.48572235717979e-05f",
    "6.37261928875436e-04f",
    "4.89352518554385e-03f",
)
_DENOMINATOR = "1.19825839466702e-06f", "1.18534705686654e-04f", "2.26843463243900e-03f", "4.89352518554385e-03f"


def _polynomial(coefficients: tuple[str, ...]) -> str:
    """Return the C++ of a polynomial in `z` by Horner's scheme. The highest power comes first."""
    total = f"T({coefficients[0]})"
    for coefficient in coefficients[1:]:
        total = f"at::vec::fmadd({total}, z, T({coefficient}))"
    return total


_CPP = (
    "[](const auto& x) { using T = std::decay_t<decltype(x)>;"
    " const T c = at::vec::minimum(at::vec::maximum(x, T(-9.0f)), T(9.0f)), z = c * c;"  # NaN stays
    f" const T y = c * ({_polynomial(_NUMERATOR)} / {_polynomial(_DENOMINATOR)});"
    " return at::vec::minimum(at::vec::maximum(y, T(-1.0f)), T(1.0f)); }"
)


def tanh(a: Any) -> str:
    """Return the C++ of tanh of a vector: the ratio for float32, the library's function for other types."""
    return f"({_CPP})({a})" if a.dtype == torch.float32 else f"{a}.tanh()"


CppVecOverrides.tanh = staticmethod(tanh)
