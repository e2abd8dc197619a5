"""Leaving out inductor's redundant work does not change the code that it writes."""

from contextlib import nullcontext

import pytest
import sympy
import torch
from torch._inductor import config, cpu_vec_isa, sizevars
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX512, VecAVX512VNNI, VecISA
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from ecrl.compile import cpu as inductor
from ecrl.compile import cpu_loops as cpp_loops
from ecrl.compile.cpu_codegen import skip_redundant_codegen
from ecrl.compile.jit import choose_form

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="compiled loops need torch 2.13")
X, Y, S = sympy.symbols("x y s", integer=True, nonnegative=True)
SUMS = [sympy.Integer(0), sympy.Integer(7), X, 4 * X, X - Y, 129 * X + Y + 3, 64 * X + 2 * Y - 1]
OTHERS = [
    sympy.Gt(S, 3),
    sympy.true,
    S * X,
    X**2,
    FloorDiv(X, 4) + 32 * ModularIndexing(X, 1, 128),
    ModularIndexing(X, 1, 32),
    FloorDiv(X, 4),
]


def _forget():
    for cached in (sizevars.stride_at_vec_range, sizevars.stride_at):
        cached.cache_clear()


@pytest.mark.parametrize("index", SUMS + OTHERS, ids=str)
def test_strides_are_the_same(index):
    def strides():
        _forget()
        return [sizevars.stride_at_vec_range(index, var, length) for var in (X, Y) for length in (16, 8, None)]

    usual = strides()
    with skip_redundant_codegen():
        assert strides() == usual


@pytest.mark.parametrize(("index", "times"), [(SUMS[-2], 0), (FloorDiv(X, 4), 1)], ids=str)
def test_only_sums_are_left_unchanged(index, times, monkeypatch):
    calls = []
    monkeypatch.setattr(sizevars, "simplify_index_in_vec_range", lambda *args: calls.append(args) or args[0])
    with skip_redundant_codegen():
        sizevars.simplify_index_in_vec_range(index, X, 16)
    assert len(calls) == times


def test_only_what_every_compiler_knows_is_not_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(VecISA, "check_build", lambda self, code: tried.append(code) or False)
    isa = VecAVX512()
    with skip_redundant_codegen():
        assert isa.check_build(VecAVX512._avx512_bf16_code) and isa.check_build(VecAVX512VNNI._avx512_vnni_code)
        assert not isa.check_build(VecAMX._amx_fp16_code)
    assert tried == [VecAMX._amx_fp16_code]


def test_inductor_is_as_before_afterwards():
    before = sizevars.simplify_index_in_vec_range, cpu_vec_isa.VecISA.check_build
    with pytest.raises(ZeroDivisionError), skip_redundant_codegen():
        raise ZeroDivisionError
    assert (sizevars.simplify_index_in_vec_range, cpu_vec_isa.VecISA.check_build) == before


def _step(carry, x, weight):
    after = torch.tanh(carry @ weight) + x.flip(-1)
    return after, after.reshape(8, -1, 2).transpose(0, 1).sum(-1)


def _steps(loop, start, xs, weight):
    end, ys = loop(_step, start, xs, weight)
    return end.t().contiguous(), ys.flatten(1).roll(3, -1).cumsum(0), xs[::2, ..., 1::3].softmax(-1)


@pytest.mark.slow
def test_the_same_code_is_written(monkeypatch):
    def written():
        codes, rewrite = [], cpp_loops.rewritten
        _forget()
        with monkeypatch.context() as patch, config.patch(force_disable_caches=True):
            patch.setattr(cpp_loops, "rewritten", lambda code: codes.append(rewrite(code)) or codes[-1])
            form = choose_form("on", "cpu")
            form.jit(lambda *args: _steps(form.scan, *args))(
                torch.ones(16, 32), torch.ones(5, 16, 32), torch.ones(32, 32)
            )
        return codes

    expected = written()
    monkeypatch.setattr(inductor, "skip_redundant_codegen", nullcontext)
    assert len(expected) == 1 and written() == expected
