"""Define `ecrl.summary`, which describes a state in a few lines, and `State`, whose text is this summary."""

from math import prod
from typing import Any, cast

from tensordict import TensorDict, TensorDictBase
from tensordict._pytree import _register_td_node
from torch import Tensor

from ecrl.errors import UserError
from ecrl.loop.state_argument import check_state_argument
from ecrl.pytree import flatten


def summary(state: TensorDict) -> str:
    """Describe a state in a few lines: its progress, its size, and the sizes of its TensorDicts, largest first.

    The sizes in bytes count every leaf, even if leaves share memory. The state may have several seeds, and then has the
    batch shape `[S]`. If the numbers of iterations or steps differ between the seeds, the text has the smallest and the
    largest number.

    Args:
        state: state of a run, from `init_state`, `train`, `load` or a record of `train_iter`.

    Raises: UserError if `state` is not the state of a run.

    >>> from ecrl import init_state, load_config
    >>> print(summary(init_state(load_config("configs/cartpole_ppo.json"))))
    iteration 0 of 960, 0 env steps, on cpu
    69 leaves, 112 kB
    opt 73.2 kB, params 36.6 kB, env 1.06 kB, episode 1.03 kB, hyper 56 B
    """
    check_state_argument(state, "sample_step", "update_step", "iterations", "key")
    seeds, done, end = state["sample_step"].shape, _range(state["update_step"]), _range(state["iterations"])
    of_seeds = f"{prod(seeds)} seeds, " if seeds else ""
    progress = (
        f"{of_seeds}iteration {done} of {end}, {_range(state['sample_step'])} env steps, on {state['key'].device}"
    )
    leaves = flatten(state)[0]
    fields = {str(name): field for name, field in cast(Any, state.items()) if isinstance(field, TensorDictBase)}
    sizes = {name: _bytes_of(flatten(field)[0]) for name, field in fields.items()}
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])
    parts = ", ".join(f"{name} {_bytes_text(sizes[name])}" for name in largest)
    return "\n".join([progress, f"{len(leaves)} leaves, {_bytes_text(_bytes_of(leaves))}", parts])


class State(TensorDict):
    """State of a run: a TensorDict that prints as its `summary`.

    `print(state["params"])` lists the tensors of a field with their shapes, and `print(state.to_tensordict())` lists
    all tensors. If a state has no summary, `print(state)` lists all tensors instead. A state has no summary if it lacks
    a field that the summary reads, as `state.select("params")` does, or if its numbers cannot be read, as inside vmap.

    >>> from ecrl import init_state, load_config
    >>> init_state(load_config("configs/cartpole_ppo.json"))
    State: iteration 0 of 960, 0 env steps, on cpu
    69 leaves, 112 kB
    opt 73.2 kB, params 36.6 kB, env 1.06 kB, episode 1.03 kB, hyper 56 B
    """

    def __repr__(self) -> str:
        try:
            return f"State: {summary(self)}"
        except (UserError, RuntimeError):  # a field is missing, or vmap hides the numbers
            return super().__repr__()

    def _maybe_remove_batch_dim(self, *args: Any, **kwargs: Any) -> TensorDict:
        # tensordict calls this method at the end of vmap
        return as_state(super()._maybe_remove_batch_dim(*args, **kwargs))


_register_td_node(State)


def as_state(tree: TensorDict) -> State:
    """Return a `State` with the fields of `tree`. The two share all fields.

    >>> type(as_state(TensorDict({"key": 0}, [])).clone()).__name__
    'State'
    """
    return cast(State, State._new_unsafe(dict(tree.items()), tree.batch_size))


def _bytes_of(leaves: list[Tensor]) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def _bytes_text(size: int) -> str:
    """Return a number of bytes as text, with three significant digits and a decimal unit.

    >>> [_bytes_text(size) for size in (8, 1234, 56_700_000, 12_300_000_000)]
    ['8 B', '1.23 kB', '56.7 MB', '12.3 GB']
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def _range(counts: Tensor) -> str:
    least, most = int(counts.min()), int(counts.max())
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
