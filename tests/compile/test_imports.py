"""Each module that uses inductor can be imported first. Modules of inductor import one another in circles."""

import subprocess
import sys
from pathlib import Path

import pytest

import ecrl

NEEDS_CUDA = {"reverse_triton"}
PATHS = (Path(ecrl.__file__).parent / "compile").glob("*.py")
MODULES = sorted({path.stem for path in PATHS if "torch._inductor" in path.read_text(encoding="utf-8")} - NEEDS_CUDA)
IMPORTS = """
import os, sys
import tensordict, torch

for name in sys.argv[1:]:
    if not os.fork():
        __import__(f"ecrl.compile.{name}")
        print(name, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_each_module_that_uses_inductor_can_be_imported_first():
    assert "cpu_matmul" in MODULES and "cpu_philox" in MODULES
    done = subprocess.run([sys.executable, "-c", IMPORTS, *MODULES], capture_output=True, text=True)
    assert done.stdout.split() == MODULES, done.stderr[-3000:]
