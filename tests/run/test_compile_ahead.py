"""`ecrl compile`: the code of every phase and of the evaluation is on disk before the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import called
from support.graphs import traced_only
from support.small_runs import small

from ecrl.compile.jit import compiler_fault
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state
from ecrl.run.compile_ahead import compile_ahead
from ecrl.run.train import train

DQN = {"name": "dqn", "cfg": {"capacity": 256, "batch_size": 8, "learning_starts": 64}}
EVALUATION = {"trainer.enable_eval": True, "trainer.eval_freq": 64, "trainer.num_eval_episodes": 2}
RUN = """
import json, sys
from ecrl import init_state, train
from ecrl.config import config_from_dict
cfg = config_from_dict(json.loads(sys.argv[2]))
if sys.argv[1] == "compile":
    from ecrl.loop.iteration import init_state
from ecrl.run.compile_ahead import compile_ahead
from ecrl.run.train import train
    print(len(compile_ahead(cfg)))
else:
    train(init_state(cfg), cfg, progress=False)
"""


def stored(folder: Path) -> set[str]:
    """Return the files of compiled graphs and of their libraries."""
    return {str(path) for path in folder.rglob("*") if path.suffix in (".so", ".cpp") or "fxgraph" in path.parts}


RUNS = {
    "ppo: iteration and evaluation": ({}, 2),
    "dqn: before learning, learning and evaluation": ({"algorithm": DQN, "policy": {"name": "q_network"}}, 3),
}
OTHER = {"trainer.seed": 7, "algorithm.cfg.learning_rate": 0.01, "trainer.iterations": 5}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_no_other_functions_than_those_compiled_ahead(name):
    changes, graphs = RUNS[name]
    cfg = small(**changes, **EVALUATION, **{"trainer.compile": "on"})
    with traced_only() as functions:
        assert len(compile_ahead(cfg)) == len(functions) == graphs
        later = cfg.replace(**OTHER)
        train(init_state(later), later, progress=False)
        assert len(functions) == graphs


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.skipif(compiler_fault() is not None, reason="needs a C++ compiler")
def test_a_run_compiles_nothing_that_was_compiled_ahead(name, tmp_path):
    changes, graphs = RUNS[name]
    cfg = small(**changes, **EVALUATION, **{"trainer.compile": "on"})
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(task, cfg):
        command = [sys.executable, "-c", RUN, task, cfg.model_dump_json()]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert int(run("compile", cfg)) >= graphs
    files = stored(tmp_path)
    assert files
    run("train", cfg.replace(**OTHER))
    assert stored(tmp_path) == files


def test_a_run_that_cannot_be_compiled_ahead_is_one_line(monkeypatch, capsys):
    with pytest.raises(ConfigError, match=r"trainer\.compile: off, but the run is eager: trainer.compile is off"):
        compile_ahead(small())
    with pytest.raises(ConfigError, match=r"trainer\.compile: auto, but the run is eager: compiling takes about 30 s"):
        compile_ahead(small(**{"trainer.compile": "auto"}))
    with pytest.raises(ConfigError, match=r"trainer\.distributed: only runs of one process can be compiled ahead"):
        compile_ahead(small(**{"trainer.distributed": True}))
    assert called(monkeypatch, "compile", "cartpole_ppo", "--trainer.compile", "off") == 2
    assert capsys.readouterr().err.startswith("cartpole_ppo: trainer.compile: off, but the run is eager")


def test_a_failed_compilation_is_one_line(monkeypatch):
    def fail(*args):
        raise RuntimeError("no space left")

    monkeypatch.setattr("ecrl.compile.cpu.compiled", fail)
    monkeypatch.setattr("ecrl.loop.build._COMPILING_S", 0.0)  # auto compiles
    with (
        pytest.warns(RuntimeWarning, match="no space left"),
        pytest.raises(ConfigError, match=r"trainer\.compile: .*no space left"),
    ):
        compile_ahead(small(**{"trainer.compile": "auto"}))
