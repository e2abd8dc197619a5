"""Imports point one way; compiling, and randomness outside keys, each live in one file."""

import ast
from pathlib import Path

import pytest

import ecrl

ROOT = Path(ecrl.__file__).parent
LEVELS = [  # a module imports from its own level and earlier ones only
    {"garbage", "graphs", "philox", "rng", "types", "spaces", "errors", "trees", "durable", "stopping", "memory"},
    {"kernels"},
    {"registry", "strict", "sources", "draft", "inert", "gym_config", "translate", "config", "schema", "distributed"},
    {"policies", "envs"},
    {"algorithms"},
    {
        "products",
        "tiles",
        "batching",
        "philox_cpp",
        "cpp_loops",
        "brief_codegen",
        "cpp_builds",
        "packing",
        "graph_loops",
        "tracing",
        "inductor",
        "segments",
        "capture",
        "compile",
    },
    {"parts", "finite", "locating", "refusing", "playing", "faults", "checking"},
    {"logs", "loop"},
    {
        "checkpoint",
        "saving",
        "evaluation",
        "resuming",
        "owed",
        "run_folder",
        "loggers",
        "history",
        "bootstrap",
        "curves",
        "plotting",
        "tracking",
        "export",
        "profiler",
        "ranks",
        "recording",
        "replay",
        "films",
    },
    {"training", "commands"},
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
STRANGERS = {  # of one level, and yet they do not import each other
    ("registry", "strict"): "names know nothing of configs",
    ("strict", "config"): "the rules of a config file know nothing of its keys",
    ("strict", "distributed"): "as above",
    ("strict", "sources"): "what reads files builds on the rules",
    ("sources", "draft"): "syntax knows nothing of keys",
    ("sources", "translate"): "as above",
    ("translate", "config"): "what a config is made of comes before it",
    ("gym_config", "translate"): "a part of the translation",
    ("inert", "translate"): "as above",
    ("inert", "config"): "as above",
    ("config", "schema"): "the schema describes the config",
    ("registry", "config"): "a config is checked by looking its parts up, so the registry comes first",
    ("registry", "distributed"): "names are the same on every rank",
    ("policies", "envs"): "they meet in spaces alone, so that either can be used without the other",
    ("envs", "policies"): "as above",
}
KERNELS_MAY = {"torch", "tensordict", "numpy", "ecrl.graphs", "ecrl.rng", "ecrl.types", "ecrl.trees", "ecrl.kernels"}
KERNELS_MAY |= {"math", "typing", "collections", "functools", "dataclasses", "itertools", "triton"}
EXCEPTIONS = {  # file: what it may do that others may not
    "__init__.py": "the public surface names every part; it resolves them lazily",
    "registry.py": "imports the packages of built-in parts by name at the first look-up",
    "inductor.py": "the one place that compiles for the CPU",
    "capture.py": "the one place that compiles and captures for CUDA",
    "policies/networks.py": "module initialisation draws from torch's global generator, seeded from a key and put back",
}
VAGUE = {"utils", "util", "helpers", "base", "common", "misc"}
RANDOM = {"Generator", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"}
RANDOM |= {"bernoulli", "multinomial", "poisson", "seed", "random", "default_generator"}  # of the module torch
RANDOM_METHODS = {"manual_seed", "manual_seed_all", "random_", "uniform_", "normal_", "bernoulli_", "exponential_"}
FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}


def _part(file):
    return file.split("/")[0].removesuffix(".py")


def _imports(file, source):
    """Dotted names of everything imported, at any depth; `from a import b` counts as `a.b`."""
    package = ["ecrl", *file.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*parents, *filter(None, [node.module]), name.name]) for name in node.names)


def _dotted(node):
    """`torch.random.fork_rng` of an attribute chain; empty for chains that start at anything but a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def _used(file, source):
    chains = {_dotted(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return chains | set(_imports(file, source))


def wrong_imports(file, source):
    part, names = _part(file), list(_imports(file, source))
    if part == "kernels":
        return [name for name in names if not any(f"{name}.".startswith(f"{may}.") for may in KERNELS_MAY)]
    targets = [(name, [*name.split("."), "__init__"][1]) for name in names if name.split(".")[0] == "ecrl"]
    return [name for name, to in targets if LEVEL.get(to, 99) > LEVEL[part] or (part, to) in STRANGERS]


COMPILERS = ("torch.cuda.graph", "torch._inductor.compile_fx")


def compiles(file, source):
    return sorted(name for name in _used(file, source) if name == "torch.compile" or name.startswith(COMPILERS))


def draws(file, source):
    """Uses of torch's own generators; `ecrl.rng` has functions of the same names, so only torch's are looked for."""
    torchs = {name for name in _used(file, source) if name.startswith("torch.") and name.split(".")[1] in RANDOM}
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return sorted(torchs | attributes & RANDOM_METHODS)


CHECKS = {"imports": wrong_imports, "compiles": compiles, "draws": draws}
ALLOWED = {
    ("__init__.py", "imports"),
    ("inductor.py", "compiles"),
    ("capture.py", "compiles"),
    ("policies/networks.py", "draws"),
}


@pytest.mark.parametrize("file", FILES)
def test_every_file_keeps_to_its_place(file):
    for name, check in CHECKS.items():
        if (file, name) not in ALLOWED:
            assert check(file, FILES[file]) == [], f"{file}: {name}"


def test_every_part_has_a_level_and_a_plain_name():
    assert {_part(file) for file in FILES} - {"__init__"} == set(LEVEL)
    assert not VAGUE & {Path(file).stem for file in FILES}


def test_exceptions_are_still_needed():
    assert {file for file, _ in ALLOWED} | {"registry.py"} == set(EXCEPTIONS)
    for file, name in ALLOWED - {("__init__.py", "imports")}:
        assert CHECKS[name](file, FILES[file]), f"{file} no longer {name}: drop the exception"


def test_imports_by_name_happen_in_the_registry_alone():
    words = {
        file: {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(ast.parse(source))}
        for file, source in FILES.items()
    }
    assert {file for file in FILES if {"import_module", "__import__"} & words[file]} == {"registry.py", "__init__.py"}


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        ("imports", "kernels/returns.py", "from ecrl.config import Config"),
        ("imports", "kernels/returns.py", "import pydantic"),
        ("imports", "kernels/returns.py", "def f():\n    from ecrl import envs"),
        ("imports", "kernels/returns.py", "from ..envs import core"),
        ("imports", "rng.py", "import ecrl.kernels.returns"),
        ("imports", "registry.py", "from ecrl import config"),
        ("imports", "envs/core.py", "from ecrl.policies import Policy"),
        ("imports", "policies/networks.py", "from ecrl.envs.core import Env"),
        ("imports", "algorithms/ppo.py", "import ecrl"),
        ("imports", "algorithms/ppo.py", "from ecrl.loop import train_iter"),
        ("imports", "loop.py", "if True:\n    from . import evaluation"),
        ("compiles", "loop.py", "import torch\nstep = torch.compile(print)"),
        ("compiles", "loop.py", "from torch import compile"),
        ("draws", "rng.py", "torch.rand(3)"),
        ("draws", "rng.py", "from torch import randn"),
        ("draws", "envs/core.py", "g = torch.Generator()"),
        ("draws", "loop.py", "torch.cuda.manual_seed(3)"),
        ("draws", "loop.py", "x.uniform_()"),
    ],
)
def test_the_checks_find_faults(check, file, source):
    assert CHECKS[check](file, source)


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        (
            "imports",
            "kernels/rollout.py",
            "from math import pi\nfrom ecrl.kernels.returns import gae\nimport torch.nn",
        ),
        ("imports", "distributed.py", "from ecrl.strict import ConfigError"),
        ("imports", "training.py", "from ecrl.loop import train_iter\nfrom ecrl import rng"),
        ("compiles", "kernels/returns.py", "torch.compiler.is_compiling()"),
        ("draws", "envs/core.py", "rng.normal(keys)\nrng.randint(keys)"),
    ],
)
def test_the_checks_let_good_code_pass(check, file, source):
    assert CHECKS[check](file, source) == []
