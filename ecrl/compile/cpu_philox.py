"""Make inductor generate C++ for Philox, the random number generator of `ecrl.rng`.

Inductor has no Philox function that takes a separate key for each element. In C++, a round of Philox takes a few
operations on unsigned integers. In torch, a round of Philox takes about twenty operations on int64 tensors. A CPU with
vector instructions computes several elements at once.
"""

from typing import Any

import torch
from torch._inductor import virtualized
from torch._inductor.codegen.cpp import CppOverrides, CppVecOverrides
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.lowering import broadcast_tensors, make_pointwise, register_lowering
from torch._inductor.ops_handler import DefaultHandler

import ecrl.rng  # noqa: F401  # registers the operator

_CPP = """[](uint64_t key, uint64_t low, uint64_t high) -> int64_t {
    uint32_t c0 = low, c1 = low >> 32, c2 = high, c3 = high >> 32, k0 = key, k1 = key >> 32;
    for (int round = 0; round < 10; round++) {
        uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
        c0 = uint32_t(b >> 32) ^ c1 ^ k0, c1 = uint32_t(b);
        c2 = uint32_t(a >> 32) ^ c3 ^ k1, c3 = uint32_t(a);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return %s;
}""".replace("\n", " ")


_VECTOR_CPP = """[&]() {{
    using Vector = std::decay_t<decltype({key})>;
    static_assert(std::is_same_v<typename Vector::value_type, int64_t>);
    constexpr int size = Vector::size();
    alignas(64) int64_t keys[size], lows[size], highs[size];
    {key}.store(keys), {low}.store(lows), {high}.store(highs);
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
    using Words = __m256i;  // Each 64 bits have a word in their low half. Products ignore the high half.
    #pragma GCC unroll 4
    for (int i = 0; i < size; i += 4) {{
        Words k0 = _mm256_load_si256((Words*)(keys + i)), k1 = _mm256_srli_epi64(k0, 32);
        Words c0 = _mm256_load_si256((Words*)(lows + i)), c1 = _mm256_srli_epi64(c0, 32);
        Words c2 = _mm256_load_si256((Words*)(highs + i)), c3 = _mm256_srli_epi64(c2, 32);
        #pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {{
            Words a = _mm256_mul_epu32(c0, _mm256_set1_epi64x(0xD2511F53));
            Words b = _mm256_mul_epu32(c2, _mm256_set1_epi64x(0xCD9E8D57));
            c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), c1), k0), c1 = b;
            c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), c3), k1), c3 = a;
            k0 = _mm256_add_epi32(k0, _mm256_set1_epi64x(0x9E3779B9));
            k1 = _mm256_add_epi32(k1, _mm256_set1_epi64x(0xBB67AE85));
        }}
        Words pair = _mm256_blend_epi32({first}, _mm256_slli_epi64({second}, 32), 0xAA);
        _mm256_store_si256((Words*)(keys + i), pair);
    }}
#else
    for (int i = 0; i < size; i++) keys[i] = ({one})(keys[i], lows[i], highs[i]);
#endif
    return Vector::loadu(keys);
}}()"""


def _add(name: str, first: str, second: str) -> None:
    """Register an operation in inductor that computes two of the four 32-bit words of Philox."""
    one = _CPP % f"{first} | uint64_t({second}) << 32"

    def scalar(key: str, low: str, high: str) -> str:
        return f"({one})({key}, {low}, {high})"

    def vector(key: str, low: str, high: str) -> str:
        return _VECTOR_CPP.format(key=key, low=low, high=high, first=first, second=second, one=one)

    scalar.__name__ = vector.__name__ = name
    setattr(CppOverrides, name, staticmethod(scalar))
    setattr(CppVecOverrides, name, staticmethod(vector))
    setattr(DtypePropagationOpsHandler, name, staticmethod(lambda *words: torch.int64))
    setattr(DefaultHandler, name, lambda self, *words: self._default(name, words, {}))


_NAMES = "philox_first", "philox_last"
_add(_NAMES[0], "c0", "c1")
_add(_NAMES[1], "c2", "c3")


@register_lowering(torch.ops.ecrl.philox.default, type_promotion_kind=None)
def _lower_philox(key: Any, low: Any, high: Any, last: bool) -> Any:
    operation = make_pointwise(lambda *words: getattr(virtualized.ops, _NAMES[last])(*words))
    return operation(*broadcast_tensors(key, low, high))
