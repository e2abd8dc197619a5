"""Compute the gradient of a loop over time with a second loop in the graph, which runs backwards in time.

    carry[t + 1], y[t] = body(carry[t], x[t], *constants)

The forward loop stores every `carry[t]`. The backward loop repeats each step of the forward loop, from the last step to
the first. In each step, the backward loop applies the vector-Jacobian product of the step to the gradients of
`carry[t + 1]` and `y[t]`. The results are the gradients of `carry[t]` and `x[t]`, and one term of the gradients of the
constants. Memory contains the carries of all steps, but the intermediate results of only one step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ecrl.errors import ConfigError
from ecrl.kernels.scan_loop import Scan

Step = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""Type of a step `(carry, x, constants) -> (carry, y)`, whose arguments and results are lists of tensors."""


@dataclass(frozen=True)
class Loop:
    """Loop over time that supports reverse-mode gradients.

    Attributes:
        step: the body of the loop.
        scan: the function that adds the loop to the graph.
        carried: the number of tensors in the carry.
        rows: the number of tensors to loop over.
        line: the line of the user's code that calls the scan.
    """

    step: Step
    scan: Scan
    carried: int
    rows: int
    line: str

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run the loop. Return the final carry, the stacked outputs `y`, and the carry before each step."""
        at, to = self.carried, self.carried + self.rows

        def body(carry: list[Tensor], x: list[Tensor], *constants: Tensor) -> tuple[list[Tensor], Any]:
            after, y = self.step(carry, x, constants)
            return after, (y, carry)

        after, (ys, before) = self.scan(body, [*leaves[:at]], [*leaves[at:to]], *leaves[to:])
        return (*after, *ys, *before)


@dataclass(frozen=True)
class _Backward:
    """Loop that computes the gradient of another loop."""

    loop: Loop
    needed: Sequence[bool]  # for each tensor of carry, xs and constants, True if the caller needs its gradient
    has_gradient: Sequence[bool]  # for each tensor of the final carry and `y`, True if its gradient is not None

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Compute the needed gradients with respect to the initial carry, `xs` and the constants.

        The argument `leaves` contains the carry before each step, `xs`, the constants, and those gradients of the final
        carry and of `y` that are not None.
        """
        step, at, to = self.loop.step, self.loop.carried, self.loop.carried + self.loop.rows
        start, rows, fixed = self.needed[:at], self.needed[at:to], self.needed[to:]
        count = len(self.needed)
        before, xs, constants, grads = leaves[:at], leaves[at:to], leaves[to:count], iter(leaves[count:])
        floats = [_can_have_gradient(leaf) for leaf in before]
        carry_grads = [
            next(grads) if has else torch.zeros_like(x[0]) for x, has in zip(before, self.has_gradient, strict=False)
        ]
        y_has_gradient = self.has_gradient[at:]

        def body(carry: Any, row: Any, *constants: Tensor) -> Any:
            (carry_grads, sums), (now, x, y_grads) = carry, row
            selected = _select(now, floats), _select(x, rows), _select(constants, fixed)

            def outputs(now_floats: list[Tensor], some_x: list[Tensor], some: list[Tensor]) -> Any:
                after, y = step(
                    _replace_selected(now, floats, now_floats),
                    _replace_selected(x, rows, some_x),
                    _replace_selected(constants, fixed, some),
                )
                return _select(after, floats), _select(y, y_has_gradient)

            vector_jacobian_product = torch.func.vjp(outputs, *selected)[1]
            by_carry, by_x, by_constants = vector_jacobian_product((carry_grads, y_grads))
            return (by_carry, [a + b for a, b in zip(sums, by_constants, strict=True)]), by_x

        sums = [torch.zeros_like(leaf) for leaf in _select(constants, fixed)]
        backwards = [[leaf.flip(0) for leaf in part] for part in (before, xs, [*grads])]
        (carry_grads, sums), by_xs = self.loop.scan(body, (_select(carry_grads, floats), sums), backwards, *constants)
        by_start = _replace_selected([None] * at, floats, carry_grads)
        return (*_select(by_start, start), *[leaf.flip(0) for leaf in by_xs], *sums)


def refusal(line: str, derivatives: str) -> str:
    """Return the error message for a kind of derivative that a loop of a graph does not support."""
    return (
        f"trainer.compile: {line} calls a scan whose {derivatives} are taken, but a compiled loop does not support "
        "them; call ecrl.kernels.scan instead, which adds each iteration to the graph, or set trainer.compile to off"
    )


def _can_have_gradient(leaf: Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _select(leaves: Sequence[Any], selected: Sequence[bool]) -> list[Any]:
    return [leaf for leaf, is_selected in zip(leaves, selected, strict=True) if is_selected]


def _replace_selected(leaves: Sequence[Any], selected: Sequence[bool], others: Sequence[Any]) -> list[Any]:
    """Return `leaves` with the selected leaves replaced by `others`, in order."""
    new = iter(others)
    return [next(new) if is_selected else leaf for leaf, is_selected in zip(leaves, selected, strict=True)]


class _Function(torch.autograd.Function):
    """Autograd function that calls the method `forward` of its first argument with the other arguments."""

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
        has_gradient = [grad is not None for grad in grads]
        if not any(needed) or not any(has_gradient):
            return (None,) * (1 + len(needed))
        part = _Backward(ctx.loop, needed, has_gradient)
        gradients: Any = _BackwardFunction.apply(part, *leaves, *_select(grads, has_gradient))
        return None, *_replace_selected([None] * len(needed), needed, gradients)


class _BackwardFunction(_Function):
    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.line = inputs[0].loop.line

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ConfigError(refusal(ctx.line, "second derivatives"))


def differentiable(loop: Loop, leaves: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Run a loop so that autograd can differentiate it. Return the final carry and the stacked outputs `y`."""
    out: Any = _ForwardFunction.apply(loop, *leaves)
    return [*out[: loop.carried]], [*out[loop.carried : len(out) - loop.carried]]
