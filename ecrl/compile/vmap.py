"""Run a compiled function, or a loop of a graph, once for a whole batch under `torch.func.vmap`.

By default, `torch.func.vmap` batches each operation of a function separately. This module makes vmap treat a compiled
function, or a loop of a graph, as a single operation. The operation runs once, outside vmap, on tensors whose first
axis is the batch axis.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ecrl.pytree import flatten, unflatten
from ecrl.tracing_state import in_forward_mode, transforms

BatchRule = Callable[..., Sequence[Tensor]]


def vmapped() -> bool:
    """Return True if `torch.func.vmap` is the innermost active transform, or if torch does not report transforms.

    >>> vmapped(), bool(torch.func.vmap(lambda x: x + vmapped())(torch.zeros(1)))
    (False, True)
    """
    return transforms()[-1:] in (("Vmap",), ("unknown",))


def is_forward_mode(leaves: Sequence[Tensor]) -> bool:
    """Return True if forward mode is active: inside `torch.func.jvp`, or at an open level of forward-mode autograd.

    If torch does not report open levels, a tangent of any leaf counts as an open level.

    >>> is_forward_mode([torch.ones(1)])
    False
    """
    return in_forward_mode(leaves) or transforms()[-1:] == ("Jvp",)


def records_gradients(*leaves: Tensor) -> bool:
    """Return True if operations on these leaves may be differentiated, in reverse or forward mode.

    In forward mode, and if `torch.func.grad` is the innermost active transform, the result is True for any leaves.

    >>> records_gradients(torch.ones(1)), records_gradients(torch.ones(1, requires_grad=True))
    (False, True)
    >>> bool(torch.func.grad(lambda x: x * records_gradients(x))(torch.tensor(2.0)))
    True
    """
    backward = torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)
    return transforms()[-1:] == ("Grad",) or backward or is_forward_mode(leaves)


class _OutsideVmap(torch.autograd.Function):
    @staticmethod
    def forward(rule: BatchRule, *leaves: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(rule((False,) * len(leaves), *leaves))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: BatchRule, *leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        front = [leaf if dim is None else leaf.movedim(dim, 0) for dim, leaf in zip(in_dims[1:], leaves, strict=True)]
        out = tuple(rule(tuple(dim is not None for dim in in_dims[1:]), *front))
        return out, (0,) * len(out)


def outside_vmap(rule: BatchRule, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Call `rule(batched, *leaves)` outside the innermost vmap.

    The argument `batched` of `rule` is a tuple with one bool per leaf, which is True if the leaf's first axis is the
    batch axis. The first axis of every result of `rule` must be the batch axis.

    >>> def add(batched, x, y):
    ...     print(batched, list(x.shape), list(y.shape))
    ...     return [x + y.unsqueeze(1)]
    >>> torch.func.vmap(lambda x, y: outside_vmap(add, (x, y))[0], (1, 0))(torch.ones(3, 2), torch.ones(2)).shape
    (True, True) [2, 3] [2]
    torch.Size([2, 3])
    """
    return _OutsideVmap.apply(rule, *leaves)  # pyright: ignore


def host_values(number: Tensor) -> list[int]:
    """Return a list with the value of a 0-d integer tensor. Under vmap, return the values of the whole batch.

    >>> def shown(x):
    ...     print(host_values(x))
    ...     return x
    >>> torch.func.vmap(torch.func.vmap(shown))(torch.tensor([[1, 2], [3, 4]])).shape
    [1, 2, 3, 4]
    torch.Size([2, 2])
    """
    if not vmapped():
        return number.flatten().tolist()
    values: list[int] = []

    def read_batch(batched: tuple[bool, ...], numbers: Tensor) -> list[Tensor]:
        values[:] = host_values(numbers)
        return [numbers]

    outside_vmap(read_batch, [number])
    return values


def over_batch(fn: Callable, static: tuple, structure: Hashable, batched: tuple[bool, ...], *leaves: Tensor) -> Any:
    """Call `fn(*static, *args)` for each entry of a batch, where `structure` and `leaves` are the flattened `args`.

    The batch axis is the first axis of each leaf whose entry in `batched` is True. The batch axis is also the first
    axis of every tensor in the result. The `batch_size` of a TensorDict in the result does not include the batch axis.
    If no leaf has a batch axis, the function calls `fn` once, and the result has no batch axis.
    """
    if not any(batched):
        return fn(*static, *unflatten(structure, leaves))
    output_structure: list[Hashable] = []

    def call_one(*leaves: Tensor) -> tuple[Tensor, ...]:
        out, structure_of_out = flatten(fn(*static, *unflatten(structure, leaves)))
        output_structure[:] = [structure_of_out]
        return tuple(out)

    out = torch.func.vmap(call_one, tuple(0 if has_batch else None for has_batch in batched))(*leaves)
    return unflatten(output_structure[0], out)
