"""Configs by name: from a checkout, from an installed wheel, next to files and folders of the same name."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.paths import ROOT

from ecrl.config import load_config
from ecrl.config.presets import preset_names
from ecrl.errors import ConfigError

CONFIGS = sorted((ROOT / "configs").glob("*.json"))
CARTPOLE = ROOT / "configs" / "cartpole_ppo.json"


def test_every_shipped_config_is_a_preset():
    assert list(preset_names()) == [path.stem for path in CONFIGS]
    for path in CONFIGS:
        assert load_config(path.stem, {"trainer.seed": 3}) == load_config(path, {"trainer.seed": 3})


def test_presets_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("cartpole_ppo") == load_config(str(CARTPOLE))


def test_a_file_wins_over_a_preset_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pendulum_ppo").mkdir()
    Path("cartpole_ppo").write_text(json.dumps(json.loads(CARTPOLE.read_text()) | {"trainer": {"seed": 77}}))
    assert load_config("cartpole_ppo").trainer.seed == 77
    assert load_config("pendulum_ppo").env.name == "pendulum"
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(Path("pendulum_ppo"))  # a Path is always a path


def test_an_unknown_name_lists_the_presets_in_one_line():
    names = ", ".join(path.stem for path in CONFIGS)
    for name, middle in (("Cartpol_ppo", "did you mean 'cartpole_ppo'? "), ("zzz", "")):
        with pytest.raises(ConfigError) as error:
            load_config(name)
        assert str(error.value) == f"{name}: no preset or file has this name; {middle}presets: {names}"


def test_a_missing_file_named_like_a_preset_gets_a_hint():
    for path in ("nowhere/cartpole_ppo.json", Path("nowhere/cartpole_ppo.yaml")):
        with pytest.raises(ConfigError, match=r"^nowhere/cartpole_ppo.*: no such file; .*preset: cartpole_ppo$"):
            load_config(path)


def test_a_fault_in_an_override_starts_with_the_name():
    with pytest.raises(ConfigError, match=r"^cartpole_ppo: trainer\.sede: unknown key; did you mean 'seed'\?$"):
        load_config("cartpole_ppo", {"trainer.sede": 3})


def test_a_dict_is_a_config_and_stays_as_it_is():
    data = json.loads(CARTPOLE.read_text())
    cfg = load_config(data, {"trainer.seed": 5, "algorithm.cfg.gamma": 0.5})
    assert (cfg.trainer.seed, cfg.algorithm.cfg.gamma) == (5, 0.5)  # pyright: ignore[reportAttributeAccessIssue]
    assert cfg == load_config(CARTPOLE, {"trainer.seed": 5, "algorithm.cfg.gamma": 0.5})
    assert data == json.loads(CARTPOLE.read_text())
    with pytest.raises(ConfigError, match=r"^config: trainer\.sede: unknown key; did you mean 'seed'\?$"):
        load_config(data | {"trainer": {"sede": 1}})


@pytest.mark.slow
def test_a_wheel_carries_the_presets(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(ROOT)]
    done = subprocess.run([*build, "--wheel-dir", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + "\nthe build needs hatchling: pip install -e '.[dev]'"
    (wheel,) = tmp_path.glob("ecrl-*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"ecrl"}
    shipped = {path.name: path.read_bytes() for path in (site / "ecrl" / "configs").iterdir()}
    assert shipped == {path.name: path.read_bytes() for path in (ROOT / "configs").iterdir()}
    sources = {path.name for path in (ROOT / "ecrl" / "native").glob("*.cpp")}
    assert {path.name for path in (site / "ecrl" / "native").glob("*.cpp")} == sources != set()
    code = f"""
import json, ecrl
assert ecrl.__file__.startswith({str(site)!r}), ecrl.__file__
names = {[path.stem for path in CONFIGS]}
print(json.dumps({{name: ecrl.load_config(name).model_dump(mode="json") for name in names}}))
"""
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {path.stem: load_config(path).model_dump(mode="json") for path in CONFIGS}
    command = [sys.executable, "-m", "ecrl", "check", "cartpole_ppo", "--trainer.device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=elsewhere)
    assert done.returncode == 0 and done.stdout.endswith("cartpole_ppo: ok\n"), done.stderr
