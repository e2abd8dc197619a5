"""Generate the kernel reference from docstrings: one page per file of `ecrl.kernels`, and a table of all kernels."""

import inspect
from importlib import import_module

from config_pages import plain

from ecrl import kernels
from ecrl.types import BATCH_FIELDS, ROLLOUT_FIELDS, STATE_FIELDS

TITLES = {
    "ecrl.types": "Rollouts and batches",
    "ecrl.kernels.returns": "Returns and advantages",
    "ecrl.kernels.rollout_estimators": "Rollout estimators",
    "ecrl.kernels.images": "Frame stacks and shifts",
    "ecrl.kernels.q_targets": "Q-value targets",
    "ecrl.kernels.distributional": "Distributional Q-values",
    "ecrl.kernels.groups": "Group-relative advantages",
    "ecrl.kernels.losses": "Losses",
    "ecrl.kernels.sequence_losses": "Sequence losses",
    "ecrl.kernels.sequences": "Sequence means and weights",
    "ecrl.kernels.q_losses": "Off-policy losses",
    "ecrl.kernels.population": "Population-based training",
    "ecrl.kernels.tracking": "Target networks and moving averages",
    "ecrl.kernels.exploration": "Exploration",
    "ecrl.kernels.categorical": "Categorical distributions",
    "ecrl.kernels.normal": "Normal distributions",
    "ecrl.kernels.truncated_normal": "Truncated normal distributions",
    "ecrl.kernels.beta": "Beta distributions",
    "ecrl.kernels.bernoulli": "Bernoulli distributions",
    "ecrl.kernels.flow_matching": "Flow matching",
    "ecrl.kernels.masked_stats": "Masked statistics",
    "ecrl.kernels.rollout": "Rollout collection",
    "ecrl.kernels.replay": "Replay buffer",
    "ecrl.kernels.prioritized_replay": "Prioritised replay",
    "ecrl.kernels.sum_tree": "Sum tree",
    "ecrl.kernels.scan_loop": "Loops over time",
    "ecrl.kernels.moments": "Running moments",
    "ecrl.kernels.optim": "Optimisers and schedules",
}
"""Page title of each module, in the order of the reference. `names_by_file` raises KeyError for any other module."""


def names_by_file() -> dict[str, list[str]]:
    """Map each module to the public names of `ecrl.kernels` that it defines, in the order of the source."""
    by_module: dict[str, list[str]] = {module: [] for module in TITLES}
    for name in kernels.__all__:
        by_module[getattr(kernels, name).__module__].append(name)
    for module, names in by_module.items():
        source = inspect.getsource(import_module(module))
        names.sort(key=lambda name: min(source.find(f"{kind} {name}(") % len(source) for kind in ("def", "class")))
    return by_module


def file_of(module: str) -> str:
    """Return the path of the page for a module, such as `reference/kernels/returns.md`."""
    return f"reference/kernels/{module.rpartition('.')[2]}.md"


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _page(module: str, names: list[str]) -> str:
    members = "\n".join(f"        - {name}" for name in names)
    options = (
        f"    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n      members:\n{members}"
    )
    return f"# {TITLES[module]}\n\n`{_path(module)}`\n\n::: {module}\n{options}\n"


def _fields(title: str, table: dict[str, str]) -> str:
    rows = [f"| `{name}` | {plain(meaning)} |" for name, meaning in table.items()]
    return "\n".join(("", f"## {title}", "", "| field | |", "|---|---|", *rows, ""))


def _row(name: str) -> str:
    summary = (inspect.getdoc(getattr(kernels, name)) or "").splitlines()[0]
    return f"| [`{name}`][ecrl.kernels.{name}] | {summary.replace('|', chr(92) + '|')} |"


_OVERVIEW = """# Kernels

Kernels are pure functions on tensors. You can import a single kernel, for example with
`from ecrl.kernels import gae`.

Shapes are in brackets. `*B` stands for any leading axes, `N` for the number of environments and `T` for the number of
steps. Tensors with one number per step have the shape `[*B, T]`, with time as the last axis. Only the loops `scan` and
`loop` run along the first axis. `Scalar` is a float or a 0-d tensor.

A mask is optional. Without a mask, every entry counts. Flags and masks have dtype bool. If you pass a number or an
array in place of a tensor, estimators and losses raise a TypeError that names the argument.

The entry *Gradient* lists the arguments that gradients flow through. The entry *Source* cites the origin of the
equation. The tests run every example.
"""


def kernel_pages() -> dict[str, str]:
    """Return a dict from the path of each page to its Markdown."""
    by_file = names_by_file()
    tables = [
        "\n".join((f"## {TITLES[module]}\n", f"`{_path(module)}`\n", "| kernel | |", "|---|---|", *map(_row, names)))
        for module, names in by_file.items()
    ]
    pages = {file_of(module): _page(module, names) for module, names in by_file.items()}
    pages[file_of("ecrl.types")] += _fields("The fields of a rollout", ROLLOUT_FIELDS)
    pages[file_of("ecrl.types")] += _fields("The fields of a batch", BATCH_FIELDS)
    pages[file_of("ecrl.types")] += _fields("The fields of a state", STATE_FIELDS)
    return {"reference/kernels/index.md": "\n\n".join((_OVERVIEW, *tables)), **pages}
