"""Raise ConfigError if a function that is being traced is impure. The error names the line of the user's code."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ecrl.compile.user_line import user_line
from ecrl.errors import ConfigError
from ecrl.tracing_state import note_if_drawing

_NOT_IN_CPU_LOOPS = ("_linalg_solve_ex", "linalg_inv_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex", "randperm")
"""Operators that inductor translates to wrong C++ inside a loop, but to correct C++ outside loops."""


class _WriteCheck:
    """Dispatcher for tensors without data. It raises ConfigError for operations that cannot be compiled.

    The dispatcher rejects in-place writes to protected tensors, and to tensors that the function captures from outside.
    In a loop on the CPU, the dispatcher also rejects the operators in `_NOT_IN_CPU_LOOPS`.
    """

    def __init__(self, mode: FakeTensorMode):
        self._dispatch: Callable[..., Any] = mode.dispatch
        self._protected: list[set[int]] = []

    @contextmanager
    def protected(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Raise ConfigError for each in-place write to `leaves` or their views inside this context."""
        self._protected.append({leaf.untyped_storage()._cdata for leaf in leaves})
        try:
            yield
        finally:
            self._protected.pop()

    def __call__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not hasattr(func, "_schema"):  # a loop or a condition; its operations were checked when it was traced
            return self._dispatch(func, types, args, kwargs)
        if (
            self._protected and func._schema.is_mutable and func.namespace != "prims"
        ):  # operators of the namespace prims declare views as writes
            for tensor in _tensors_written(func._schema, args, kwargs):
                self._check(tensor, func)
        note_if_drawing(func, args, kwargs)
        out = self._dispatch(func, types, args, kwargs)
        if len(self._protected) > 1 and func._schema.name.removeprefix("aten::") in _NOT_IN_CPU_LOOPS:
            _refuse_in_cpu_loop(func, out)
        return out

    def _check(self, tensor: Tensor, func: Any) -> None:
        from_outside = not isinstance(tensor, FakeTensor)
        if from_outside or any(tensor.untyped_storage()._cdata in known for known in self._protected):
            owner = "captured from outside of the function" if from_outside else "that is an argument"
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"trainer.compile: {user_line(traceback.extract_stack())} writes in place ({func}) on a {kind} tensor "
                f"{list(tensor.shape)} {owner}; compiled functions must be pure: return a new tensor, such as x + 1 "
                "instead of x.add_(1), or set trainer.compile to off"
            )


def _refuse_in_cpu_loop(func: Any, out: Any) -> None:
    """Raise ConfigError if `func`, an operator of `_NOT_IN_CPU_LOOPS`, returned a tensor on the CPU in a loop."""
    first = out if isinstance(out, Tensor) else out[0]
    if first.device.type == "cpu":
        raise ConfigError(
            f"trainer.compile: {user_line(traceback.extract_stack())} calls {func} in a loop over time, but torch "
            "writes wrong C++ for this operator in a loop; call it outside of the loop, or set trainer.compile to off"
        )


def _tensors_written(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield each tensor argument that an operation writes to in place."""
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (x for x in (value if isinstance(value, list | tuple) else [value]) if isinstance(x, Tensor))


@contextmanager
def checking_writes(mode: FakeTensorMode) -> Iterator[_WriteCheck]:
    """Check each operation on tensors of the fake-tensor mode `mode` inside this context.

    The function replaces the method `dispatch` of `mode`. A subclass of `FakeTensorMode` would not work, because torch
    looks up rules by the type of the mode.
    """
    check = mode.dispatch = _WriteCheck(mode)  # pyright: ignore
    try:
        yield check
    finally:
        del mode.dispatch


def protected(leaves: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Return a context that raises ConfigError for each in-place write to `leaves`, the arguments of a loop's body.

    Outside a trace, the context has no effect.
    """
    context = TracingContext.try_get()
    check = getattr(context and context.fake_mode, "dispatch", None)
    return check.protected(leaves) if isinstance(check, _WriteCheck) else nullcontext()
