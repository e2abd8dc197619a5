"""The benchmark of clones: its tasks and arms, its files, and the tables of the page that reports them."""

import json
from typing import get_args

import pytest
from support.paths import ROOT

from benchmarks import clones
from benchmarks.clones import TASKS, config, path_of, records, settings_hash, table

pytest.importorskip("matplotlib")


TASK = "reach_color"
ARMS = [(task, arm) for task, about in TASKS.items() for arm in about.arms]


def written(out, arm, seed, task=TASK, **row):
    path = path_of(task, arm, seed, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"hash": settings_hash(task, arm), "success": 0.9, "swapped": 0.0, "train_s": 60} | row))


def test_the_table_has_a_line_per_arm_with_files_and_leaves_out_other_settings(tmp_path):
    written(tmp_path, "grpo", 1, success=0.876, swapped=0.014)
    written(tmp_path, "grpo", 0, success=0.95, train_s=90)
    written(tmp_path, "grpo", 2, hash="of other settings")
    assert list(records(TASK, "grpo", tmp_path)) == [0, 1] and not records(TASK, "ppo", tmp_path)
    assert table(TASK, tmp_path).splitlines()[2:] == ["| cloning, then GRPO | 0.95, 0.88 | 0.00, 0.01 | 1.2 |"]
    written(tmp_path, "clone", 0, "push_cube_pixels")
    lines = ["| policy | success of each seed | minutes |", "|---|---|---|", "| cloning | 0.90 | 1.0 |"]
    assert table("push_cube_pixels", tmp_path).splitlines() == lines


@pytest.mark.parametrize("task, name", ARMS)
def test_every_arm_but_the_first_starts_from_the_clone_of_its_seed(task, name, tmp_path):
    arm = TASKS[task].arms[name]
    cfg = config(arm, 3, tmp_path)
    assert cfg.trainer.seed == 3
    assert cfg.trainer.init_from == (None if name == "clone" else str(tmp_path / "clone"))
    assert (cfg.algorithm.name == "bc") == (arm.config == f"{task}_bc")
    assert cfg.algorithm.name != "bc" or cfg.algorithm.cfg.demos == str(tmp_path / "demos.safetensors")


def test_arms_have_their_own_settings(tmp_path):
    assert config(TASKS[TASK].arms["grpo_kl"], 0, tmp_path).algorithm.cfg.kl_coef == 0.02
    assert len({settings_hash(*arm) for arm in ARMS}) == len(ARMS)
    assert all(next(iter(about.arms)) == "clone" for about in TASKS.values())
    assert set(get_args(clones.TaskName)) == set(TASKS)


def test_other_settings_of_the_clone_make_all_records_stale(monkeypatch):
    arms = TASKS[TASK].arms
    hashes = {name: settings_hash(TASK, name) for name in arms if name != "clone_more"}
    changed = arms["clone"]._replace(changes={"trainer.iterations": 3})
    monkeypatch.setitem(arms, "clone", changed)
    assert all(settings_hash(TASK, name) != before for name, before in hashes.items())


def test_missing_runs_are_trained_after_their_clone_and_a_failure_is_reported(tmp_path, monkeypatch, capsys):
    called = []

    def measure(task, arm, seed, core, out):
        called.append((arm, seed))
        if (arm, seed) == ("ppo", 1):
            raise clones.Failure("died")
        written(out, arm, seed, task)

    monkeypatch.setattr(clones, "measure", measure)
    monkeypatch.setattr(clones, "available", lambda: (0,))
    monkeypatch.setattr(clones, "WORK", tmp_path / "work")
    assert clones.run(TASK, ("clone", "grpo"), (0, 1), tmp_path)
    assert called == [("clone", 0), ("clone", 1), ("grpo", 0), ("grpo", 1)]
    called.clear()
    left = tmp_path / "work" / TASK / "0" / "clone" / "of_a_process_that_died"
    left.mkdir(parents=True)
    assert not clones.run(TASK, ("clone", "grpo", "ppo"), (0, 1), tmp_path)
    assert called == [("clone", 0), ("clone", 1), ("ppo", 0), ("ppo", 1)]  # the folders of the clones are gone
    assert not left.exists()
    assert "ppo, seed 1: died" in capsys.readouterr().out
    called.clear()
    assert clones.run("push_cube_pixels", (), (4,), tmp_path)
    assert called == [("clone", 4), ("grpo", 4)]  # all arms


def test_an_unknown_arm_is_one_line():
    message = r"^--arms ppo: push_cube_pixels has no such arm; known: clone, grpo$"
    with pytest.raises(clones.UserError, match=message):
        clones.run("push_cube_pixels", ("ppo",))


@pytest.mark.parametrize("task", TASKS)
def test_the_page_has_the_table_of_the_files(task):
    page = (ROOT / "docs" / "vla.md").read_text()
    assert not records(task, "clone") or f"\n{table(task)}\n\n" in page, f"paste the table of {task}"
    assert f"--task {task}" in page
