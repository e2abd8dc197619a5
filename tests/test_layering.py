"""The layout of the library: packages import in one direction; compiling and random draws live in one place each."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import ecrl

ROOT = Path(ecrl.__file__).parent
ORDER = [  # a package imports from earlier lines only; the foundation modules at the top of `ecrl/` come before all
    {"kernels", "storage"},
    {"config"},
    {"envs", "policies"},  # not from each other: they meet in `ecrl.spaces`
    {"algorithms"},
    {"compile"},
    {"loop"},
    {"run"},
    {"report", "env_check"},
    {"cli"},
    {"__main__"},
]
FOUNDATION = {"native"}  # a package whose level is that of the foundation modules
LEVEL = {package: level for level, packages in enumerate(ORDER, 1) for package in packages}
MAX_ROOMS, MAX_LEVELS = 24, 12
KERNELS_MAY = {"torch", "tensordict", "math", "typing", "collections", "functools", "dataclasses", "itertools"}
KERNELS_MAY |= {"ecrl.kernels", "ecrl.native", "ecrl.types", "ecrl.errors", "ecrl.pytree", "ecrl.rng"}
EXCEPTIONS = {  # (file, check): why it may do what others may not
    ("__init__.py", "imports"): "the public names come from every package; they are imported when first used",
    ("compile/cpu.py", "compiles"): "the one place that compiles for the CPU",
    ("compile/cuda_graph.py", "compiles"): "the one place that compiles and captures for CUDA",
    ("kernels/sum_tree.py", "forms"): "it writes to its own copy of the tree, which one copy per level would slow down",
    ("tracing_state.py", "private"): "torch has no public name for the transforms in force; it has a fallback",
    ("policies/networks.py", "draws"): "torch initialises modules from its global generator; it is seeded and restored",
}
VAGUE = {"utils", "util", "helpers", "base", "common", "misc"}
RANDOM = {"Generator", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
RANDOM |= {"bernoulli", "multinomial", "poisson", "seed", "random", "default_generator"}  # of the module torch
RANDOM_METHODS = {"manual_seed", "manual_seed_all", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"}
nodes = cache(lambda source: list(ast.walk(ast.parse(source))))
"""All nodes of the syntax tree of a source text."""
FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def room_of(file):
    """Top-level package or module of a file of the library."""
    return file.split("/")[0].removesuffix(".py")


ROOMS = {room_of(file) for file in FILES} - {"__init__"}


def imported_names(file, source, left_out=()):
    """Dotted names of everything imported, at any depth; `from a import b` counts as `a.b`.

    `left_out` has tests of nodes, such as of functions, whose imports do not count.
    """
    package = ["ecrl", *file.split("/")[:-1]]
    late = [node for node in nodes(source) if any(is_left_out(node) for is_left_out in left_out)]
    ignored = {id(inner) for node in late for inner in ast.walk(node)}
    for node in nodes(source):
        if id(node) in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*parents, *filter(None, [node.module]), name.name]) for name in node.names)


def attribute_chain(node):
    """`torch.random.fork_rng` of an attribute chain; empty for chains that start at anything but a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


@cache
def used_names(file, source):
    """Dotted names of everything that a file imports, and of every chain of attributes."""
    chains = {attribute_chain(node) for node in nodes(source) if isinstance(node, ast.Attribute)}
    return chains | set(imported_names(file, source))


def imported_rooms(file, source):
    """(dotted name, room) of everything that a file imports from the library; the public names are room ''."""
    names = [
        name for name in imported_names(file, source) if name.split(".")[0] == "ecrl" and name != "ecrl.__version__"
    ]
    return [(name, room if (room := [*name.split("."), ""][1]) in ROOMS else "") for name in names]


def wrong_imports(file, source):
    """Imports that go upwards, sideways between packages of one level, or from a kernel to more than it needs."""
    room = room_of(file)
    if room == "kernels":
        names = imported_names(file, source)
        return [name for name in names if not any(f"{name}.".startswith(f"{may}.") for may in KERNELS_MAY)]
    own = LEVEL.get(room, 0)
    levels = [(name, to, 99 if to == "" else LEVEL.get(to, 0)) for name, to in imported_rooms(file, source)]
    return [name for name, to, level in levels if level > own or (level == own > 0 and to != room)]


COMPILERS = ("torch.cuda.graph", "torch._inductor.compile_fx")


def compiles(file, source):
    return sorted(name for name in used_names(file, source) if name == "torch.compile" or name.startswith(COMPILERS))


def draws(file, source):
    """Uses of torch's own generators; `ecrl.rng` has functions of the same names, so only torch's are looked for."""
    from_torch = {name for name in used_names(file, source) if name.startswith("torch.")}
    from_torch = {name for name in from_torch if name.split(".")[1] in RANDOM}
    attributes = {node.attr for node in nodes(source) if isinstance(node, ast.Attribute)}
    return sorted(from_torch | attributes & RANDOM_METHODS)


def private(file, source):
    """Uses of private parts of torch outside of `ecrl/compile`."""
    if room_of(file) == "compile":
        return []
    names = (name for name in used_names(file, source) if name.startswith("torch."))
    return sorted(name for name in names if any(re.match("_(?!_)", part) for part in name.split(".")))


def is_inplace(name):
    """Return True for tensor methods that write in place, such as `add_`."""
    return name.endswith("_") and not name.startswith("_") and hasattr(torch.Tensor, name)


def forms(file, source):
    """Uses of graph detection and of writes in place in a kernel; they belong to `ecrl/compile`."""
    if room_of(file) != "kernels":
        return []
    called = {node.func.attr for node in nodes(source) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    detected = {name for name in used_names(file, source) if name.startswith(("torch.compiler", "ecrl.tracing_state"))}
    return sorted(detected | {name for name in called if is_inplace(name)})


CHECKS = {"imports": wrong_imports, "compiles": compiles, "draws": draws, "private": private, "forms": forms}


@pytest.mark.parametrize("file", FILES)
def test_every_file_keeps_to_its_place(file):
    for name, check in CHECKS.items():
        if (file, name) not in EXCEPTIONS:
            assert check(file, FILES[file]) == [], f"{file}: {name}"


def test_exceptions_are_still_needed():
    for file, name in EXCEPTIONS:
        assert CHECKS[name](file, FILES[file]), f"{file} no longer {name}: drop the exception"


def test_every_package_has_a_level_and_every_file_a_plain_name():
    packages = {file.split("/")[0] for file in FILES if "/" in file}
    assert packages | {"__main__"} == set(LEVEL) | FOUNDATION
    assert not VAGUE & {Path(file).stem for file in FILES}


def rooms_imported_by():
    edges = {room: set() for room in ROOMS}
    for file, source in FILES.items():
        if file != "__init__.py":
            edges[room_of(file)] |= {to for _, to in imported_rooms(file, source)} - {room_of(file), ""}
    return edges


def test_a_newcomer_finds_few_rooms_on_few_levels_without_a_circle():
    edges = rooms_imported_by()
    assert len(ROOMS) + 1 <= MAX_ROOMS  # with __init__.py

    @cache
    def level(room):
        return 1 + max(map(level, edges[room]), default=0)  # a circle is a RecursionError

    assert max(map(level, edges)) <= MAX_LEVELS


def is_late(node):
    """Return True for nodes whose code does not run when the module is imported."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    return isinstance(node, functions) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def modules_imported_at_import_time(file, files):
    """Files of the library that a file imports when it is itself imported. The public names resolve later."""
    for name in imported_names(file, files[file], [is_late]):
        if name.startswith("ecrl."):
            path = name.removeprefix("ecrl.").replace(".", "/")
            parent = path.rpartition("/")[0]
            candidates = f"{path}.py", f"{path}/__init__.py", f"{parent}.py", f"{parent}/__init__.py"
            yield from [candidate for candidate in candidates if candidate in files][:1]


def circle_of_imports(files):
    """Return the files of a circle of imports, the first again at the end; an empty list if there is none."""
    edges = {file: sorted({*modules_imported_at_import_time(file, files)}) for file in files}
    done, path = set(), []

    def visit(file):
        if file in path:
            return [*path[path.index(file) :], file]
        if file not in done:
            path.append(file)
            for other in edges[file]:
                if circle := visit(other):
                    return circle
            done.add(path.pop())
        return []

    return next(filter(None, map(visit, files)), [])


def test_no_module_imports_itself_in_a_circle():
    assert circle_of_imports(FILES) == []


@pytest.mark.parametrize(
    "source",
    ["from ecrl import a", "import ecrl.a", "from ecrl.a import f", "from .a import f", "if True:\n    import ecrl.a"],
)
def test_a_circle_of_imports_is_found(source):
    files = {"d.py": "import ecrl.a", "a.py": "from ecrl import b, c", "b.py": "import torch", "c.py": source}
    assert circle_of_imports(files) == ["a.py", "c.py", "a.py"]
    assert circle_of_imports(files | {"c.py": "def f():\n    import ecrl.a"}) == []


def test_only_the_registry_imports_by_name():
    words = {
        file: {getattr(node, "id", getattr(node, "attr", "")) for node in nodes(source)}
        for file, source in FILES.items()
    }
    assert {file for file in FILES if {"import_module", "__import__"} & words[file]} == {"registry.py", "__init__.py"}


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        ("imports", "kernels/returns.py", "from ecrl.config import Config"),
        ("imports", "kernels/returns.py", "import pydantic"),
        ("imports", "kernels/normal.py", "import numpy as np"),
        ("imports", "kernels/returns.py", "def f():\n    from ecrl import envs"),
        ("imports", "kernels/returns.py", "from ..envs import core"),
        ("imports", "kernels/returns.py", "from ecrl.compile import cpu"),
        ("imports", "rng.py", "import ecrl.kernels.returns"),
        ("imports", "registry.py", "from ecrl import config"),
        ("imports", "envs/core.py", "from ecrl.policies import Policy"),
        ("imports", "policies/networks.py", "from ecrl.envs.core import Env"),
        ("imports", "algorithms/ppo.py", "import ecrl"),
        ("imports", "algorithms/ppo.py", "from ecrl.loop.iteration import train_iter"),
        ("imports", "report/plots.py", "from ecrl.cli import commands"),
        ("imports", "loop/iteration.py", "if True:\n    from ..run import evaluation"),
        ("forms", "kernels/returns.py", "import torch\ntorch.compiler.is_compiling()"),
        ("forms", "kernels/returns.py", "from ecrl.tracing_state import in_graph"),
        ("forms", "kernels/returns.py", "x.mul_(2.0)"),
        ("compiles", "loop/iteration.py", "import torch\nstep = torch.compile(print)"),
        ("compiles", "loop/iteration.py", "from torch import compile"),
        ("private", "kernels/returns.py", "from torch._C import _functorch"),
        ("private", "run/train.py", "def f():\n    import torch._inductor.config"),
        ("private", "loop/build.py", "import torch\ntorch.utils._pytree.tree_map(abs, 1)"),
        ("draws", "rng.py", "torch.rand(3)"),
        ("draws", "rng.py", "from torch import randn"),
        ("draws", "envs/core.py", "g = torch.Generator()"),
        ("draws", "loop/iteration.py", "torch.cuda.manual_seed(3)"),
        ("draws", "loop/iteration.py", "x.uniform_()"),
    ],
)
def test_the_checks_find_faults(check, file, source):
    assert CHECKS[check](file, source)


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        ("imports", "kernels/rollout.py", "from math import pi\nfrom ecrl.kernels.returns import gae\nimport torch.nn"),
        ("imports", "distributed.py", "from ecrl.errors import ConfigError"),
        ("imports", "run/train.py", "from ecrl.loop.iteration import train_iter\nfrom ecrl import rng"),
        ("compiles", "loop/iteration.py", "torch.compiler.is_compiling()"),
        ("forms", "kernels/returns.py", "x.mul(2.0)\nF.softmax(x, -1)"),
        ("private", "compile/cpu.py", "import torch._inductor"),
        ("private", "loop/build.py", "torch.__version__\ntorch.ones(1)._version"),
        ("draws", "envs/core.py", "rng.normal(keys)\nrng.randint(keys)"),
    ],
)
def test_the_checks_let_good_code_pass(check, file, source):
    assert CHECKS[check](file, source) == []
