"""The gradient of a loop over time in a graph: one more loop, that runs backwards.

    carry[t + 1], y[t] = body(carry[t], x[t], *constants)

The forward loop keeps every `carry[t]`. The backward loop takes each step again, and applies the transpose of its
derivative to the gradients of `carry[t + 1]` and `y[t]`. This gives the gradients of `carry[t]` and `x[t]`, and adds to
those of the constants. Memory holds the carries, and the intermediate results of one step only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.kernels.scan_loop import Scan

Step = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""`(carry, x, constants) -> (carry, y)`, each a list of tensors."""


@dataclass(frozen=True)
class Loop:
    """A loop: its step, the loop of the graph, the numbers of tensors in carry and xs, and its line in user code."""

    step: Step
    scan: Scan
    carried: int
    rows: int
    line: str

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the last carry, all `y`, and the carry before each step."""
        at, to = self.carried, self.carried + self.rows

        def body(carry: list[Tensor], x: list[Tensor], *constants: Tensor) -> tuple[list[Tensor], Any]:
            after, y = self.step(carry, x, constants)
            return after, (y, carry)

        after, (ys, before) = self.scan(body, [*leaves[:at]], [*leaves[at:to]], *leaves[to:])
        return (*after, *ys, *before)


@dataclass(frozen=True)
class _Backward:
    """The backward loop. It knows which tensors need a gradient, and which have one: booleans for each."""

    loop: Loop
    needed: Sequence[bool]  # of carry, xs and constants
    given: Sequence[bool]  # of the last carry and all `y`

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients that are needed: of the first carry, of xs and of the constants.

        `leaves` are the carries before each step, xs, the constants and the gradients of the last carry and of `y`.
        """
        step, at, to = self.loop.step, self.loop.carried, self.loop.carried + self.loop.rows
        start, rows, fixed = self.needed[:at], self.needed[at:to], self.needed[to:]
        count = len(self.needed)
        before, xs, constants, grads = leaves[:at], leaves[at:to], leaves[to:count], iter(leaves[count:])
        floats = [_can_have_gradient(leaf) for leaf in before]
        costate = [next(grads) if has else torch.zeros_like(x[0]) for x, has in zip(before, self.given, strict=False)]
        y_given = self.given[at:]

        def body(carry: Any, row: Any, *constants: Tensor) -> Any:
            (costate, sums), (now, x, y_grads) = carry, row
            chosen = _chosen(now, floats), _chosen(x, rows), _chosen(constants, fixed)

            def outputs(now_floats: list[Tensor], some_x: list[Tensor], some: list[Tensor]) -> Any:
                merged = _merged(now, floats, now_floats), _merged(x, rows, some_x), _merged(constants, fixed, some)
                after, y = step(*merged)
                return _chosen(after, floats), _chosen(y, y_given)

            transposed = torch.func.vjp(outputs, *chosen)[1]
            by_carry, by_x, by_constants = transposed((costate, y_grads))
            return (by_carry, [a + b for a, b in zip(sums, by_constants, strict=True)]), by_x

        sums = [torch.zeros_like(leaf) for leaf in _chosen(constants, fixed)]
        backwards = [[leaf.flip(0) for leaf in part] for part in (before, xs, [*grads])]
        (costate, sums), by_xs = self.loop.scan(body, (_chosen(costate, floats), sums), backwards, *constants)
        by_start = _merged([None] * at, floats, costate)
        return (*_chosen(by_start, start), *[leaf.flip(0) for leaf in by_xs], *sums)


def refusal(line: str, what: str) -> str:
    """Return the message of an error: no loop of a graph can do this."""
    return (
        f"trainer.compile: {line} scans where {what}, which no loop of a compiled graph can; use ecrl.kernels.scan "
        "there, whose turns are compiled one by one, or set trainer.compile to off"
    )


def _can_have_gradient(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _chosen(leaves: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, one in zip(leaves, which, strict=True) if one]


def _merged(leaves: Sequence[Any], which: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """`leaves` with the chosen ones replaced by `others`."""
    new = iter(others)
    return [next(new) if one else leaf for leaf, one in zip(leaves, which, strict=True)]


class _Function(torch.autograd.Function):
    """Runs `forward` of its first argument on the tensors that follow."""

    @staticmethod
    def forward(part: Any, *leaves: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return part.forward(*leaves)

    @staticmethod
    def vmap(info: Any, in_dims: Any, part: Any, *leaves: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        out = torch.func.vmap(part.forward, in_dims[1:])(*leaves)
        return out, (0,) * len(out)


class _ForwardFunction(_Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        loop, *leaves = inputs
        before = output[len(output) - loop.carried :]
        ctx.loop, ctx.line = loop, loop.line
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*before, *[leaf for leaf in output if not _can_have_gradient(leaf)])
        ctx.save_for_backward(*before, *leaves[loop.carried :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        leaves = ctx.saved_tensors
        needed = [has and _can_have_gradient(x) for has, x in zip(ctx.needs_input_grad[1:], leaves, strict=True)]
        grads = grads[: len(grads) - ctx.loop.carried]
        given = [grad is not None for grad in grads]
        if not any(needed) or not any(given):
            return (None,) * (1 + len(needed))
        part = _Backward(ctx.loop, needed, given)
        found: Any = _BackwardFunction.apply(part, *leaves, *_chosen(grads, given))
        return None, *_merged([None] * len(needed), needed, found)


class _BackwardFunction(_Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.line = inputs[0].loop.line

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ConfigError(refusal(ctx.line, "second derivatives are taken"))


def differentiable(loop: Loop, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a loop whose gradients are recorded. Return the last carry and all `y`."""
    out: Any = _ForwardFunction.apply(loop, *leaves)
    return [*out[: loop.carried]], [*out[loop.carried : len(out) - loop.carried]]
