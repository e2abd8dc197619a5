"""Find the private parts of torch that the sources of the package name."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import ecrl

ROOT = Path(ecrl.__file__).parent
OWNERS = {"_version": "torch.Tensor", "_cdata": "torch.UntypedStorage", "_schema": "torch._ops.OpOverload"}
"""The classes of private attributes that are read from objects."""
PUBLIC = {"_replace", "_fields", "_asdict", "_make"}
"""Attributes of named tuples."""
EXPERIMENTAL = "torch.fx.experimental."
"""Torch has no underscore here, but promises nothing."""


def is_private(name: str) -> bool:
    """Return True if a dotted name of torch has a part that begins with one underscore.

    >>> is_private("torch._inductor.config.patch"), is_private("torch.nn.Module.__call__")
    (True, False)
    """
    return name.startswith(EXPERIMENTAL) or any(re.match("_(?!_)", part) for part in name.split("."))


def _chain(node: ast.AST) -> list[str]:
    """Return the names of an attribute chain. The first is empty if the chain does not begin with a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(names)]


def _own_names(trees: list[ast.AST]) -> set[str]:
    """Return the attributes and functions that the package itself defines."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    assigned = [n.attr for n in nodes if isinstance(n, ast.Attribute) and _chain(n)[0] == "self"]
    return {*assigned, *(n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef))}


def names_in(source: str, own: set[str]) -> dict[str, str]:
    """Return the full names of the private parts of torch in a source, each with "import" or "attribute".

    `own` are attributes that are not torch's.
    """
    tree, imported, others, names = ast.parse(source), {"torch": "torch"}, {"self", "cls"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            imported |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            others |= {name.asname or name.name for name in node.names}
            whole_modules = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names |= {name for name in whole_modules if name.startswith("torch.") and is_private(name)}
    names |= {name for name in imported.values() if is_private(name)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                first, *rest = _chain(node)
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[owner, ast.Constant(str(attribute)), *_]):
                first, *rest = *_chain(owner), attribute
            case _:
                continue
        if first in imported:
            name = ".".join((imported[first], *rest))
            names |= {name} if is_private(name) and "__" not in name else set()
        elif first not in others and is_private(rest[-1]) and rest[-1] not in own | PUBLIC:
            names.add(f"{OWNERS.get(rest[-1], 'unknown owner')}.{rest[-1]}")
    whole = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    return {name: "import" if name in imported.values() else "attribute" for name in whole}


class Part(NamedTuple):
    """The kind of use of a private name of torch, and the files that use it."""

    kind: str
    files: list[str]


def private_parts() -> dict[str, Part]:
    """Return each private name of torch in the package, and its use."""
    sources = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
    own, parts = _own_names([ast.parse(source) for source in sources.values()]), {}
    for file, source in sources.items():
        for name, kind in names_in(source, own | {"_new_unsafe"}).items():  # tensordict's
            parts.setdefault(name, Part(kind, [])).files.append(file)
    return dict(sorted(parts.items()))
