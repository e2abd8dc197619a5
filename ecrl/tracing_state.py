"""Query the state of torch: graph tracing, random draws, active transforms and in-place writes.

Some queries need private names of torch, which this module looks up once, at import. The table in `docs/design.md`
lists the private names, and what happens if one is missing: a run is slower, has fewer checks or cannot be compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The two private names below are optional. The table in `docs/design.md` describes runs that lack one of these names.
try:
    from torch._C._functorch import get_interpreter_stack
except ImportError:
    get_interpreter_stack = None

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:
    TorchDispatchMode = None

_ACTIVE_TRANSFORMS: Callable[[], Any] | None = get_interpreter_stack
_HAS_LEVEL, _COUNTS_WRITES = hasattr(forward_ad, "_current_level"), hasattr(Tensor, "_version")

_IN_GRAPH = ContextVar("_IN_GRAPH", default=False)
_Mode: Any = nullcontext if TorchDispatchMode is None else TorchDispatchMode


class Draws(NamedTuple):
    """Names of the operations of this thread that draw from torch's global random generators.

    Attributes:
        traced: the operations that were traced into a graph, including draws from an explicit generator.
        run: the operations that ran eagerly.
    """

    traced: list[str]
    run: list[str]


_DRAWS: ContextVar[Draws | None] = ContextVar("_DRAWS", default=None)


@contextmanager
def tracing_graph() -> Iterator[None]:
    """Make `in_graph` return True inside this context, where `ecrl.compile.trace` traces functions.

    >>> with tracing_graph():
    ...     in_graph()
    True
    """
    token = _IN_GRAPH.set(True)
    try:
        yield
    finally:
        _IN_GRAPH.reset(token)


def in_graph() -> bool:
    """Return True while `ecrl.compile.jit` traces a graph, but not while `torch.compile` traces.

    >>> in_graph()
    False
    """
    return not torch.compiler.is_compiling() and _IN_GRAPH.get()


class _DrawMode(_Mode):
    """Dispatch mode that records each operation of the current thread that draws from a global generator."""

    supports_higher_order_operators = True  # without this attribute, torch refuses to trace loops

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        noted = _DRAWS.get()
        if noted is not None and not _IN_GRAPH.get() and _draws_globally(func, args, kwargs):
            noted.run.append(str(func))
        return func(*args, **kwargs)


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Map the parameter names of an operation to the arguments of a call, with defaults for omitted arguments."""
    parameters = func._schema.arguments
    values = {x.name: x.default_value for x in parameters}
    return values | {x.name: value for x, value in zip(parameters, args, strict=False)} | kwargs


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if an operation draws random numbers. For example, attention with dropout 0 draws no numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):  # a loop operation has no tags
        return False
    values = _arguments(func, args, kwargs)
    is_off = values.get("dropout_p") == 0.0 or values.get("dropout") == 0.0
    return not is_off and values.get("train") is not False and values.get("training") is not False


def _draws_globally(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if an operation draws random numbers and has no generator among its arguments."""
    return _draws(func, args, kwargs) and _arguments(func, args, kwargs).get("generator") is None


@contextmanager
def _draws_into(noted: Draws | None) -> Iterator[None]:
    token = _DRAWS.set(noted)
    try:
        yield
    finally:
        _DRAWS.reset(token)


@contextmanager
def noting_draws() -> Iterator[Draws]:
    """Record this thread's draws from torch's global generators inside this context.

    The yielded lists contain the names of the operations. An enclosing `noting_draws` does not record these draws.

    >>> with noting_draws() as noted:
    ...     x = torch.rand(2, generator=torch.Generator()) + torch.rand(2)
    >>> noted.run
    ['aten.rand.default']
    """
    noted = Draws([], [])
    is_watched = _IN_GRAPH.get() or _DRAWS.get() is not None  # a thread needs only one dispatch mode
    with nullcontext() if is_watched else _DrawMode(), _draws_into(noted):
        yield noted


def ignoring_draws() -> AbstractContextManager[None]:
    """Return a context manager that pauses the recording of this thread's draws."""
    return _draws_into(None)


def note_if_drawing(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Record an operation that is traced into a graph, if the operation draws random numbers.

    The function also records draws from an explicit generator, because a graph cannot contain a generator.
    """
    noted = _DRAWS.get()
    if noted is not None and _draws(func, args, kwargs):
        noted.traced.append(str(func))


def knows_transforms() -> bool:
    """Return True if this version of torch reports which transforms are active, as `ecrl.compile` requires."""
    return _ACTIVE_TRANSFORMS is not None


def transforms() -> tuple[str, ...]:
    """Return the kinds of the active `torch.func` transforms, with the innermost transform last.

    The result is `("unknown",)` if this version of torch does not report active transforms.

    >>> kinds = []
    >>> _ = torch.func.vmap(torch.func.grad(lambda x: kinds.append(transforms()) or x))(torch.ones(2))
    >>> transforms(), kinds
    ((), [('Vmap', 'Grad')])
    """
    if _ACTIVE_TRANSFORMS is None:
        return ("unknown",)
    active = _ACTIVE_TRANSFORMS()
    return tuple(one.key().name for one in active) if active else ()


@torch.compiler.assume_constant_result
def only_vmap_is_active() -> bool:
    """Return True if no `torch.func` transform other than vmap is active.

    If this version of torch does not report active transforms, return False.

    >>> only_vmap_is_active()
    True
    """
    return all(kind == "Vmap" for kind in transforms())


@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    """Return True if a `torch.func` transform is active, or if this version of torch does not report transforms.

    >>> is_transformed()
    False
    """
    return bool(transforms())


def in_nested_forward_mode() -> bool:
    """Return True if two forward-mode transforms of `torch.func` may be active.

    While two are active, torch computes wrong derivatives of an `autograd.Function` (pytorch issue 197867). If this
    version of torch does not report active transforms, return True.

    >>> in_nested_forward_mode()
    False
    """
    active = transforms()
    return active.count("Jvp") > 1 or "unknown" in active


def in_forward_mode(leaves: Iterable[Tensor]) -> bool:
    """Return True if a level of forward-mode differentiation is open.

    If torch does not report the open level, return True if any leaf has a tangent.

    >>> in_forward_mode([torch.ones(1)])
    False
    """
    if _HAS_LEVEL:
        return forward_ad._current_level >= 0
    return any(forward_ad.unpack_dual(leaf).tangent is not None for leaf in leaves)


def version_of(tensor: Tensor) -> int:
    """Return an integer that changes with every in-place write to a tensor. For an inference tensor, return 0.

    If torch does not count writes, the integer is a hash of the tensor's bytes. A write of equal bytes then does not
    change the integer.

    >>> x = torch.ones(2)
    >>> before = version_of(x)
    >>> version_of(x) == before, version_of(x.add_(1)) == before
    (True, False)
    """
    if tensor.is_inference():
        return 0
    return (
        tensor._version
        if _COUNTS_WRITES
        else hash(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    )
