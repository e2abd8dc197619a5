"""Run functions eagerly while another process compiles them, and switch to the compiled functions later.

A run with `trainer.compile` set to "background" uses `BackgroundJit`. Its `Switch` decides at every call whether
functions run eagerly or compiled. `ecrl.loop.background` starts the other process and changes the switch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ecrl.compile.jit import Compilation, Jit
from ecrl.tracing_state import in_graph


@dataclass
class Switch:
    """Form (eager or compiled) of a run that is compiled in the background.

    The field `eager` is True while functions run eagerly. The field `compiled_from` is the number of iterations before
    the first compiled iteration, or None if this number is not known yet.
    """

    eager: bool = False
    compiled_from: int | None = None


@dataclass(frozen=True)
class BackgroundJit:
    """Callable `jit(fn, *static)` like `Jit`. The returned function runs eagerly only while `switch.eager` is True.

    Initially, `switch.eager` is False, so functions outside of a training loop are compiled at their first call. Two
    instances with equal `jit` are equal, and share compiled functions, even if their switches differ.
    """

    jit: Jit = field(default_factory=Jit)
    switch: Switch = field(default_factory=Switch, compare=False)

    @property
    def compilations(self) -> list[Compilation]:
        """Compilations that calls of this instance have caused."""
        return self.jit.compilations

    def __call__(self, fn: Callable, *static: Any) -> Callable[..., Any]:
        """Bind the static arguments of `fn`, and return a function that runs eagerly or compiled."""
        compiled, bound, switch = self.jit(fn, *static), partial(fn, *static), self.switch

        def call(*args: Any) -> Any:
            return (bound if switch.eager and not in_graph() else compiled)(*args)

        return call


def switch_of(jit: Callable) -> Switch | None:
    """Return the switch of a `BackgroundJit`, or None for any other `jit`.

    >>> switch_of(BackgroundJit()), switch_of(Jit())
    (Switch(eager=False, compiled_from=None), None)
    """
    return jit.switch if isinstance(jit, BackgroundJit) else None
