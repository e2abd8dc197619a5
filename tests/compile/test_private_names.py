"""Private parts of torch: the sources and the table in `docs/design.md` agree, and a run without one still trains."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.private_torch import Part, is_private, names_in, private_parts
from support.without_a_name import owner_of

DESIGN = Path(__file__).parents[2] / "docs/design.md"
TORCH_NEEDS = {
    "torch._ops.OpOverload": "torch.library.register_fake and register_vmap",
    "torch.autograd.forward_ad._current_level": "its module reads it; tests/test_tracing_state.py hides it from ecrl",
    "torch._ops.OpOverload._schema": "torch cannot register an operation without it",
}
"""Names that cannot be removed, because public functions of torch use them."""
SAMPLE = ("tracing_state.py", "compile/trace.py", "compile/cpu_philox.py")
"""Files of a name that eager runs use, of one of the tracer and of one of the code generation."""


@pytest.fixture(scope="module")
def parts() -> dict[str, Part]:
    return private_parts()


@pytest.fixture(scope="module")
def removed(parts) -> dict[str, Part]:
    """Return the names that can be removed."""
    return {name: part for name, part in parts.items() if name not in TORCH_NEEDS}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch._inductor import config as c\nc.patch(1)", {"torch._inductor.config.patch": "attribute"}),
        ("from torch._guards import tracing", {"torch._guards.tracing": "import"}),
        ("def f():\n    import torch._inductor.config", {"torch._inductor.config": "attribute"}),
        ("import torch\ntorch._C._DisableAutocast()", {"torch._C._DisableAutocast": "attribute"}),
        ("x._version + x._own + self._other + pair._replace()", {"torch.Tensor._version": "attribute"}),
        ('getattr(torch, "_foreach_copy_", None)', {"torch._foreach_copy_": "attribute"}),
        (
            "from torch.fx.experimental.proxy_tensor import make_fx",
            {"torch.fx.experimental.proxy_tensor.make_fx": "import"},
        ),
        ("import os\nimport torch\nos._exit(0)\ntorch.nn.Linear.__call__", {}),
    ],
)
def test_private_names_are_found_in_a_source(source, expected):
    assert names_in(source, {"_own"}) == expected


def test_every_private_name_is_known(parts, removed):
    assert len(parts) > 40 and all(map(is_private, parts))
    assert not [name for name in parts if name.startswith("unknown owner")], "add its class to OWNERS"
    assert TORCH_NEEDS.keys() <= parts.keys()
    if torch.__version__ >= "2.13":
        importlib.import_module("torch._inductor.compile_fx")  # first: others import one another in circles
        assert [name for name in removed if not hasattr(owner_of(name), name.split(".")[-1])] == []


def test_the_table_names_the_private_parts_of_the_sources(parts):
    section = DESIGN.read_text(encoding="utf-8").split("## Private parts of torch\n")[1].split("\n## ")[0]
    listed = {}
    for row in re.findall(r"^\| (`torch.*)\|$", section, re.M):
        names, files = (re.findall("`([^`]+)`", cell) for cell in row.split(" | ")[:2])
        prefix = ""
        for name in names:  # `a.b.c`, `.d` is short for `a.b.c` and `a.b.d`
            full = prefix + name if name.startswith(".") else name
            prefix = full.rpartition(".")[0]
            assert full not in listed, f"{full} is in two rows"
            listed[full] = {*files}
    assert listed.keys() == parts.keys()
    for name, part in parts.items():
        assert {file.removeprefix("compile/") for file in part.files} <= listed[name], name


def check_runs(parts, names, cache):
    """Train without each name: eager with one warning, or compiled without the part."""
    script = Path(__file__).parents[1] / "support/without_a_name.py"
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    env |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0"}  # code is written again, so that each part is used
    args = [f"{parts[name].kind}:{name}" for name in names]
    done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, env=env)
    runs = [line.split()[:4] for line in done.stdout.splitlines()]
    assert [run[0] for run in runs] == names, done.stderr[-3000:]
    assert [run for run in runs if run[1:] not in (["eager", "1", "16"], ["compiled", "0", "16"])] == [], done.stderr


@pytest.mark.slow
def test_runs_without_a_private_name_train(removed, tmp_path):
    names = [next(name for name, part in removed.items() if file in part.files) for file in SAMPLE]
    check_runs(removed, names, tmp_path)


@pytest.mark.long
def test_runs_without_any_one_private_name_train(removed, tmp_path):
    check_runs(removed, list(removed), tmp_path)
