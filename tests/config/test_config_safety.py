"""No string of a config imports, evaluates, starts or writes anything outside of the run folder."""

import json
import sys
from pathlib import Path

import pytest
from support.small_runs import small

from ecrl.cli.commands import check
from ecrl.config import load_config
from ecrl.errors import ConfigError, UserError
from ecrl.run.train import train_from_config

CONFIG = Path(__file__).parents[2] / "configs" / "cartpole_ppo.json"
CODE = "__import__('canary')"
HOSTILE = [CODE, f"eval({CODE!r})", f"lambda: {CODE}", "canary", "canary.run", "canary:run", "canary:Env-v0"]
HOSTILE += ["gymnasium:canary:Env-v0", "$(touch canary)", "`touch canary`", "${canary}", "{canary.run}", "%(canary)s"]
HOSTILE += ["!!python/module:canary", "../canary", "a/../../canary", "~/canary", "/tmp/canary", "cpu; touch canary"]
KEYS = ["trainer.exp_name", "trainer.device", "trainer.compile", "trainer.gym_config", "trainer.best_eval_metric"]
KEYS += ["trainer.wandb_project_name", "trainer.events.train.a.func", "env", "env.name", "env.cfg", "policy.name"]
KEYS += ["policy.actor.type", "policy.actor.network_cfg.activation", "policy.critic_obs", "algorithm.name"]
KEYS += ["algorithm.cfg.optimizer.name", "algorithm.cfg.lr_scheduler.name", "algorithm.cfg.gamma"]
TASK = {"name": "PushCubeRL"}
IN_TASKS = [
    "mjcf",
    "robot.model",
    "robot.robot_type",
    "keyframe",
    "physics.backend",
    "actions.a.func",
    "rewards.a.func",
]
IN_TASKS += ["observations.a.func", "events.a.func", "control_parts"]
TAGS = ["!!python/object/apply:os.system ['touch canary']", "!!python/name:canary.run", "!!python/module:canary"]
TAGS += ["!!python/object/new:canary.Run {}", "!!python/object:canary.Run {}", "!!python/tuple [1]"]
TAGS += [f"!!python/object/apply:eval [{CODE!r}]", "!canary x", "!!map:canary {}"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Yield a working directory with a module `canary` that must not be imported; only `outputs` may appear in it."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "canary.py").write_text("def run():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "work"
    assert "canary" not in sys.modules
    assert {path.name for path in tmp_path.iterdir()} == {"modules", "work"}
    assert {path.name for path in (tmp_path / "work").iterdir()} <= {"outputs", "run.yaml", "run.json"}
    assert not Path("/tmp/canary").exists() and not Path("~/canary").expanduser().exists()


def _checked(path, changes):
    """Return True if `ecrl check` accepts a config; check that a refusal prints one line per fault."""
    try:
        data = load_config(path, changes).model_dump(mode="json")
        Path("run.json").write_text(json.dumps(data))
        check("run.json")
    except UserError as error:
        assert all(line.isprintable() for line in str(error).split("\n"))
        return False
    return True


@pytest.mark.parametrize("key", KEYS)
def test_no_string_is_more_than_a_string(place, key):
    taken = [text for text in HOSTILE if _checked(CONFIG, {key: text})]
    free = {
        "trainer.best_eval_metric": HOSTILE,
        "trainer.wandb_project_name": [t for t in HOSTILE if not {*"/:%"} & {*t}],
    }
    assert taken == free.get(key, ["canary", "canary.run"] if key == "trainer.exp_name" else [])


@pytest.mark.parametrize("key", IN_TASKS)
def test_no_string_of_a_task_is_more_than_a_string(place, key):
    pytest.importorskip("mujoco")
    assert not [text for text in HOSTILE if _checked(CONFIG, {"env": TASK, f"env.cfg.{key}": text})]


@pytest.mark.parametrize("tag", TAGS)
def test_tags_of_yaml_make_nothing(place, tag):
    Path("run.yaml").write_text(f"trainer:\n  seed: {tag}\n")
    with pytest.raises(ConfigError, match=r"^run.yaml:\d+:\d+: not YAML: "):
        load_config("run.yaml")


@pytest.mark.parametrize("value", ["/dev/zero", "/dev/stdin", "/dev", "/proc/self/fd/0"])
def test_a_second_file_is_a_file(place, value):
    with pytest.raises(ConfigError, match=r"gym_config: expected the path of a file, but '.*' is a folder or a "):
        load_config(CONFIG, {"trainer.gym_config": value})


@pytest.mark.parametrize("name", ["..", ".", "...", "-rf", "canary"])
def test_a_run_stays_in_its_folder(place, name):
    changes = {"trainer.exp_name": name, "trainer.seed": 0, "trainer.iterations": 1, "trainer.compile": "off"}
    Path("run.json").write_text(json.dumps(small().replace(**changes).model_dump(mode="json")))
    train_from_config("run.json")
    (run,) = (place / "outputs").iterdir()
    assert run.name.startswith(f"{name}_2") and (run / "config.json").exists()
