"""Make inductor generate C++ for Philox, the random function of `ecrl.rng`.

Inductor has no Philox function that takes a separate key for each element. In C++, a round of Philox takes a few
operations on unsigned integers. In torch, a round of Philox takes about twenty operations on int64 tensors.
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


def _add(name: str, half: str) -> None:
    """Register an operation in inductor that computes two of the four 32-bit words of Philox."""

    def scalar(key: str, low: str, high: str) -> str:
        return f"({_CPP % half})({key}, {low}, {high})"

    scalar.__name__ = name
    vector = CppVecOverrides._scalarize(scalar)
    vector.__name__ = name
    setattr(CppOverrides, name, staticmethod(scalar))
    setattr(CppVecOverrides, name, staticmethod(vector))
    setattr(DtypePropagationOpsHandler, name, staticmethod(lambda *words: torch.int64))
    setattr(DefaultHandler, name, lambda self, *words: self._default(name, words, {}))


_NAMES = "philox_first", "philox_last"
_add(_NAMES[0], "c0 | uint64_t(c1) << 32")
_add(_NAMES[1], "c2 | uint64_t(c3) << 32")


@register_lowering(torch.ops.ecrl.philox.default, type_promotion_kind=None)
def _lower_philox(key: Any, low: Any, high: Any, last: bool) -> Any:
    operation = make_pointwise(lambda *words: getattr(virtualized.ops, _NAMES[last])(*words))
    return operation(*broadcast_tensors(key, low, high))
