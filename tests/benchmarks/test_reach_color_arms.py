"""The benchmark of ReachColorRL: its arms, its files, and the table of the page that reports them."""

import json

import pytest
from support.paths import ROOT

from benchmarks import reach_color
from benchmarks.reach_color import ARMS, config, path_of, records, settings_hash, table

pytest.importorskip("matplotlib")


def written(out, arm, seed, **row):
    path = path_of(arm, seed, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"hash": settings_hash(ARMS[arm]), "success": 0.9, "swapped": 0.0, "train_s": 60} | row))


def test_the_table_has_a_line_per_arm_with_files_and_leaves_out_other_settings(tmp_path):
    written(tmp_path, "grpo", 1, success=0.876, swapped=0.014)
    written(tmp_path, "grpo", 0, success=0.95, train_s=90)
    written(tmp_path, "grpo", 2, hash="of other settings")
    assert list(records("grpo", tmp_path)) == [0, 1] and not records("ppo", tmp_path)
    assert table(tmp_path).splitlines()[2:] == ["| cloning, then GRPO | 0.95, 0.88 | 0.00, 0.01 | 1.2 |"]


def test_every_arm_but_the_first_starts_from_the_clone_of_its_seed(tmp_path):
    demos, clone = str(tmp_path / "demos.safetensors"), str(tmp_path / "clone")
    for name, arm in ARMS.items():
        cfg = config(arm, 3, tmp_path)
        assert cfg.trainer.seed == 3
        assert cfg.trainer.init_from == (None if name == "clone" else clone)
        assert (cfg.algorithm.name == "bc") == (arm.config == "reach_color_bc")
        assert cfg.algorithm.name != "bc" or cfg.algorithm.cfg.demos == demos
    assert config(ARMS["grpo_kl"], 0, tmp_path).algorithm.cfg.kl_coef == 0.02
    assert len({settings_hash(arm) for arm in ARMS.values()}) == len(ARMS)


def test_other_settings_of_the_clone_make_all_records_stale(monkeypatch):
    hashes = {name: settings_hash(arm) for name, arm in ARMS.items() if name != "clone_more"}
    changed = ARMS["clone"]._replace(changes={"trainer.iterations": 3})
    monkeypatch.setitem(ARMS, "clone", changed)
    assert all(settings_hash(ARMS[name]) != before for name, before in hashes.items())


def test_missing_runs_are_trained_after_their_clone_and_a_failure_is_reported(tmp_path, monkeypatch, capsys):
    called = []

    def measure(arm, seed, core, out):
        called.append((arm, seed))
        if (arm, seed) == ("ppo", 1):
            raise reach_color.Failure("died")
        written(out, arm, seed)

    monkeypatch.setattr(reach_color, "measure", measure)
    monkeypatch.setattr(reach_color, "available", lambda: (0,))
    monkeypatch.setattr(reach_color, "WORK", tmp_path / "work")
    assert reach_color.run(("clone", "grpo"), (0, 1), tmp_path)
    assert called == [("clone", 0), ("clone", 1), ("grpo", 0), ("grpo", 1)]
    called.clear()
    left = tmp_path / "work" / "0" / "clone" / "of_a_process_that_died"
    left.mkdir(parents=True)
    assert not reach_color.run(("clone", "grpo", "ppo"), (0, 1), tmp_path)
    assert called == [("clone", 0), ("clone", 1), ("ppo", 0), ("ppo", 1)]  # the folders of the clones are gone
    assert not left.exists()
    assert "ppo, seed 1: died" in capsys.readouterr().out


def test_an_unknown_arm_is_one_line():
    with pytest.raises(reach_color.UserError, match=r"^--arms sac: no such arm; known: clone, grpo, "):
        reach_color.run(("sac",))


def test_the_page_has_the_table_of_the_files():
    assert records("clone")
    page = (ROOT / "docs" / "vla.md").read_text()
    assert f"\n{table()}\n\n" in page, "paste the table of: python -m benchmarks.reach_color"
