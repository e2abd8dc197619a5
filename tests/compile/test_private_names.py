"""A torch without one of its private parts: runs warn and are eager."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ecrl.compile

FIRST = {"jit.py", "vmap.py"}
"""Modules that eager runs import too, at their top: they do not work without the private names there."""
NEEDED = {
    ("torch.fx.experimental.proxy_tensor", "get_proxy_mode"),
    ("torch._C._functorch", "peek_interpreter_stack"),
}
"""Eager runs need these names too, in `ecrl.tracing_state` and `ecrl.kernels.reverse_scan`."""


def private_names():
    """The private names of torch that the compiler imports after a run has begun: (module, name)."""
    found = set()
    for file in Path(ecrl.compile.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        for node in tree.body if file.name not in FIRST else [n for n in ast.walk(tree) if n not in tree.body]:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("torch._", "torch.fx.")):
                found |= {(node.module, alias.name) for alias in node.names}
    return sorted(found - NEEDED)


RUN = """
import importlib, os, sys, warnings
import torch._inductor.compile_fx  # first: other modules of inductor import one another in circles
names = [name.split(":") for name in sys.argv[1:]]
modules = {module: importlib.import_module(module) for module, _ in names}
for module, name in names:
    if os.fork():
        assert os.wait()[1] == 0, (module, name)
        continue
    if hasattr(modules[module], name):
        delattr(modules[module], name)
    if f"{module}.{name}" in sys.modules:
        sys.modules[f"{module}.{name}"] = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from ecrl.compile.jit import choose_form
        jitted = choose_form("auto", "cpu").jit(torch.sin)
        found = jitted(torch.zeros(2)).tolist()
    told = [str(one.message) for one in caught if "running eager" in str(one.message)]
    print(module, name, found, len(told), name in "".join(told), flush=True)
    os._exit(0)
"""


def test_the_private_names_are_found():
    names = private_names()
    assert ("torch._C._dynamo.guards", "TensorGuards") in names and len(names) > 20
    assert all(hasattr(importlib.import_module(m), n) or importlib.import_module(f"{m}.{n}") for m, n in names)


@pytest.mark.slow
def test_a_run_without_one_private_name_is_eager_with_one_warning(tmp_path):
    names = private_names()
    given = [f"{module}:{name}" for module, name in names]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", RUN, *given], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    expected = [f"{module} {name} [0.0, 0.0] 1 True" for module, name in names]
    assert done.stdout.splitlines() == expected
