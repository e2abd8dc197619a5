"""A run is built once, and passed along."""

import json
import sys
from importlib import import_module
from pkgutil import walk_packages

import pytest
from support.replay_agent import replaying
from support.small_runs import small

import ecrl
from ecrl.cli import main as command_line
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state
from ecrl.run.checkpoint import load, save
from ecrl.run.resume import resume
from ecrl.run.train import train, train_from_config

CHANGES = {
    "trainer.enable_eval": True,
    "trainer.eval_freq": 30,
    "trainer.num_eval_episodes": 2,
    "trainer.save_freq": 32,
}


@pytest.fixture
def builds(monkeypatch):
    """Return a list that grows with every call of `build`, in any module."""
    calls = []

    def counted(cfg):
        calls.append(cfg)
        return build(cfg)

    for module in walk_packages(ecrl.__path__, "ecrl."):
        if module.name.split(".")[1] in ("loop", "run", "cli", "report", "env_check"):
            import_module(module.name)
    for module in [m for name, m in sys.modules.items() if name.startswith("ecrl.")]:
        if getattr(module, "build", None) is build:
            monkeypatch.setattr(module, "build", counted)
    return calls


def config_file(folder, cfg):
    path = folder / "config.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    return path


@pytest.mark.parametrize("cfg", [small(**CHANGES), replaying(**CHANGES)])
def test_a_run_with_evaluations_and_checkpoints_is_built_once(tmp_path, builds, cfg):
    train_from_config(config_file(tmp_path, cfg), run_dir=tmp_path / "run")
    assert len(builds) == 1
    assert len([*(tmp_path / "run" / "checkpoints").glob("step_*")]) > 1
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


def test_a_resumed_run_is_built_once(tmp_path, builds):
    cfg = small(**CHANGES)
    train(init_state(cfg), cfg.replace(**{"trainer.iterations": 2}), tmp_path / "run", progress=False)
    del builds[:]
    train_from_config(resume_from=tmp_path / "run")
    assert len(builds) == 1
    train_from_config(resume_from=tmp_path / "run", overrides={"trainer.iterations": 6}, force=True)
    assert len(builds) == 3, "one of the run's config, and one of the changed config"


def test_every_public_function_builds_at_most_once(tmp_path, builds, monkeypatch):
    cfg = small(**CHANGES)
    state = init_state(cfg)
    uses = {
        "make_iteration": lambda: ecrl.make_iteration(cfg)(state),
        "train_iter": lambda: list(ecrl.train_iter(state, cfg)),
        "train": lambda: train(state, cfg, tmp_path / "run", progress=False),
        "evaluate": lambda: ecrl.evaluate(state, cfg, 2),
        "save": lambda: save(tmp_path / "saved", state, cfg),
        "load": lambda: load(tmp_path / "saved"),
        "resume": lambda: resume(tmp_path / "run"),
        "close": lambda: ecrl.close(state, cfg),
        "check": lambda: command_line.check(str(config_file(tmp_path, cfg))),
    }
    for name, use in uses.items():
        del builds[:]
        use()
        assert len(builds) == 1, name
