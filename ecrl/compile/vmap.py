"""Functions under `torch.func.vmap` that have to see the whole batch: compiled ones, and the loops of a graph.

Vmap takes a function apart into operations and applies each to the batch. These functions are operations themselves:
they are called once, outside of vmap, with tensors that have the batch in front.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ecrl.pytree import flatten, unflatten
from ecrl.tracing_state import in_forward_mode, transforms

Rule = Callable[..., Sequence[Tensor]]


def vmapped() -> bool:
    """Return True if `torch.func.vmap` is the innermost active transform, or if torch does not report transforms.

    >>> vmapped(), bool(torch.func.vmap(lambda x: x + vmapped())(torch.zeros(1)))
    (False, True)
    """
    return transforms()[-1:] in (("Vmap",), ("unknown",))


def is_forward_mode(leaves: Sequence[Tensor]) -> bool:
    """Return True if forward-mode derivatives of these leaves are taken, by `torch.func.jvp` or dual tensors.

    >>> is_forward_mode([torch.ones(1)])
    False
    """
    return in_forward_mode(leaves) or transforms()[-1:] == ("Jvp",)


def recorded(*leaves: Tensor) -> bool:
    """Return True if gradients of results of these leaves are recorded.

    >>> recorded(torch.ones(1)), recorded(torch.ones(1, requires_grad=True))
    (False, True)
    >>> bool(torch.func.grad(lambda x: x * recorded(x))(torch.tensor(2.0)))
    True
    """
    backward = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    return transforms()[-1:] == ("Grad",) or backward or is_forward_mode(leaves)


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(rule: Rule, *leaves: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(rule((False,) * len(leaves), *leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: Rule, *leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        front = [leaf if dim is None else leaf.movedim(dim, 0) for dim, leaf in zip(in_dims[1:], leaves, strict=True)]
        out = tuple(rule(tuple(dim is not None for dim in in_dims[1:]), *front))
        return out, (0,) * len(out)


def outside(rule: Rule, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Call `rule(batched, *leaves)` outside of the innermost vmap. `batched` is True for leaves with the batch first.

    All tensors that it gives must have the batch as their first axis.

    >>> def both(batched, x, y):
    ...     print(batched, list(x.shape), list(y.shape))
    ...     return [x + y.unsqueeze(1)]
    >>> torch.func.vmap(lambda x, y: outside(both, (x, y))[0], (1, 0))(torch.ones(3, 2), torch.ones(2)).shape
    (True, True) [2, 3] [2]
    torch.Size([2, 3])
    """
    return _Outside.apply(rule, *leaves)  # pyright: ignore


def host_values(number: Tensor) -> list[int]:
    """Return a 0-d integer as a Python number in a list; under vmap, the numbers of the whole batch.

    >>> def shown(x):
    ...     print(host_values(x))
    ...     return x
    >>> torch.func.vmap(torch.func.vmap(shown))(torch.tensor([[1, 2], [3, 4]])).shape
    [1, 2, 3, 4]
    torch.Size([2, 2])
    """
    if not vmapped():
        return number.flatten().tolist()
    found: list[int] = []

    def whole(batched: tuple[bool, ...], numbers: Tensor) -> list[Tensor]:
        found[:] = host_values(numbers)
        return [numbers]

    outside(whole, [number])
    return found


def over_batch(fn: Callable, static: tuple, structure: Hashable, batched: tuple[bool, ...], *leaves: Tensor) -> Any:
    """`fn(*static, *args)`, args of this structure, over the first axis of those leaves that are `batched`.

    Every tensor of the result has the batch in front; its TensorDicts do not say so.
    """
    if not any(batched):
        return fn(*static, *unflatten(structure, leaves))
    found: list[Hashable] = []

    def one(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, made = flatten(fn(*static, *unflatten(structure, leaves)))
        found[:] = [made]
        return tuple(out)

    out = torch.func.vmap(one, tuple(0 if has else None for has in batched))(*leaves)
    return unflatten(found[0], out)
