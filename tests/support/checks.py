"""Checks that many tests use: purity, nearly equal values, no second compilation, and the variants of a kernel call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree

CUDA = ["cuda"] if torch.cuda.is_available() else []
SHORT_VARIANTS = ["eager", "compiled", "vmapped", "strided", "double", *CUDA]
_COMPILED = ("compiled", "inductor")
VARIANTS = [
    pytest.param(name, marks=pytest.mark.long) if name in _COMPILED else name for name in (*SHORT_VARIANTS, "inductor")
]
"""Ways to call a kernel. `make test` compiles an example call of every kernel, and `make test-long` every test."""


def _tensordicts(tree: Any) -> list[TensorDictBase]:
    return [
        x
        for x in pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, TensorDictBase))
        if isinstance(x, TensorDictBase)
    ]


def _snapshot(tree: Any) -> list[Any]:
    tensors = [(id(t), t._version) for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    dicts = [(id(td), sorted(map(str, td.keys(True))), td.is_locked) for td in _tensordicts(tree)]
    return [tensors, dicts]


def assert_pure(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call `fn`, check that it changed no input tensor, key set or lock, and return its result."""
    before = _snapshot((args, kwargs))
    out = fn(*args, **kwargs)
    assert _snapshot((args, kwargs)) == before, f"{getattr(fn, '__name__', fn)} wrote on an input"
    return out


def assert_no_retrace(fn: Callable, first: tuple, second: tuple, **kwargs: Any) -> None:
    """Compile `fn` for `first`, and check that `second`, with the same shapes, does not compile it again."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="eager", fullgraph=True)
    compiled(*first, **kwargs)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*second, **kwargs)


def _map(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return pytree.tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, tree)


def _strided(t: Tensor) -> Tensor:
    return torch.stack((t, t), -1)[..., 0]


def _double(t: Tensor) -> Tensor:
    return t.double() if t.is_floating_point() else t


def _vmapped(fn: Callable, args: tuple, kwargs: dict) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    out_spec = []

    def on_tensors(*tensors: Tensor) -> list[Any]:
        filled = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            filled[i] = t
        a, k = pytree.tree_unflatten(filled, spec)
        out, s = pytree.tree_flatten(fn(*a, **k))
        out_spec.append(s)
        return out

    both = torch.vmap(on_tensors)(*[torch.stack((leaves[i], leaves[i])) for i in where])
    for out in both:  # to rounding: the last elements of a tensor may be computed without vector instructions
        torch.testing.assert_close(out[0], out[1], equal_nan=True)
    return pytree.tree_unflatten([out[0] for out in both], out_spec[0])


class Variant:
    """Calls a kernel in one of several ways: `variant(gae)(reward, ..., gamma=0.9)`."""

    def __init__(self, name: str):
        self.name, self.calls = name, 0

    def __call__(self, fn: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self._run(fn, args, kwargs)

        return call

    def _run(self, fn: Callable, args: tuple, kwargs: dict) -> Any:
        match self.name:
            case "eager":
                return assert_pure(fn, *args, **kwargs)
            case "compiled" | "inductor":
                torch._dynamo.reset()
                backend = "aot_eager" if self.name == "compiled" else "inductor"
                return assert_pure(torch.compile(fn, backend=backend, fullgraph=True), *args, **kwargs)
            case "vmapped":
                return _vmapped(lambda *a, **k: assert_pure(fn, *a, **k), args, kwargs)
            case "strided" | "double":
                change = _strided if self.name == "strided" else _double
                args, kwargs = _map(change, (args, kwargs))
                return assert_pure(fn, *args, **kwargs)
            case "cuda":
                args, kwargs = _map(lambda t: t.cuda(), (args, kwargs))
                return _map(lambda t: t.cpu(), assert_pure(torch.compile(fn, fullgraph=True), *args, **kwargs))
        raise AssertionError(self.name)


def close(actual: Any, expected: Any, tol: float = 1e-5) -> None:
    """Check that values are nearly equal and shapes equal, whatever the dtypes; NaN equals NaN."""
    expected = torch.as_tensor(expected)
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tol, atol=tol, equal_nan=True)
