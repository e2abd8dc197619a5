"""The code of the README, of CONTRIBUTING and of every page in docs/ runs as printed, on configs that are made small.

Blocks of a page run in order, in one folder and one namespace: Python in this process, commands line by line, JSON as a
config. What cannot run here is a list with reasons.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import doc_pages
from support.camera_task import opengl_works
from support.doc_pages import PAGES, Block, blocks, commands
from support.paths import ROOT
from tensordict import TensorDict

import ecrl
from ecrl.config import config_from_dict, presets
from ecrl.kernels import ppo_loss_clipped_value, standardize

SKIPPED = {
    r"git clone ": "there is no network",
    r"cd ecrl": "goes with the clone",
    r"python -m pip install ": "there is no network",
    r"pre-commit install": "writes into the checkout's .git",
    r"torchrun ": "tests/reliability/test_ranks.py starts ranks, and takes this line from the page",
    r"ffmpeg ": "is a program of its own",
    r"ecrl bench": "takes minutes to days; the tests in tests/benchmarks run its parts",
    r"ecrl replay ": "needs a run that failed; tests/loop/test_finite_guard.py replays one",
    r"ecrl check-env <name>": "a template",
}
"""Commands that are not run, and why. Of `make` the target is looked up and of this suite's own tests the file, which
would run this again; `ecrl record`, and code that records, needs OpenGL."""

BARE = {"", "toml"}
"""Languages of blocks that are for reading: what a command prints, a file of another project."""


def _after_python(names: dict[str, Any]) -> None:
    assert len(names["history"]) == 2
    assert names["cfg"].trainer.seed == 3
    after, logs = names["iteration"](names["state"])
    assert int(after["update_step"]) == 3 and set(logs) == {"collect", "train"}
    assert names["states"].batch_size == (8,) == names["logs"]["train"]["policy_loss"].shape


def _after_readme(names: dict[str, Any]) -> None:
    assert len(names["history"]) == 2 and names["cfg"].trainer.seed == 3
    assert int(names["after"]["update_step"]) == 1 and set(names["logs"]) == {"collect", "train"}
    assert [run.cfg.trainer.seed for run in names["runs"]] == [*range(8)]


def _after_kernels(names: dict[str, Any]) -> None:
    torch.testing.assert_close(names["out"].advantage, names["advantages"])
    torch.testing.assert_close(names["out"].value_target, names["returns"])
    following, advantage = torch.cat([names["values"][1:], names["next_value"]]), torch.zeros(4)
    dones = torch.cat([names["dones"], names["next_done"][None]])
    for t in reversed(range(128)):  # as in CleanRL's ppo.py
        delta = names["rewards"][t] + 0.99 * following[t] * (1 - dones[t + 1]) - names["values"][t]
        advantage = delta + 0.99 * 0.95 * (1 - dones[t + 1]) * advantage
        torch.testing.assert_close(names["advantage"][t], advantage)
    assert 0 < dones.sum() < dones.numel()
    draws = torch.randn(6, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_prob, old, raw, value, old_value, target = 0.3 * draws
    advantage = (raw - raw.mean()) / (raw.std() + 1e-8)  # this and the next lines are those of ppo.py
    ratio = (log_prob - old).exp()
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    clipped = old_value + (value - old_value).clamp(-0.2, 0.2)
    value_loss = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
    loss, _ = ppo_loss_clipped_value(
        log_prob=log_prob,
        old_log_prob=old,
        advantage=standardize(raw, eps=1e-8),
        entropy=torch.zeros_like(value),
        value=value,
        old_value=old_value,
        value_target=target,
        clip_coef=0.2,
        vf_coef=0.5 * 0.5,
        ent_coef=0.0,
    )
    torch.testing.assert_close(loss, policy_loss + 0.5 * value_loss)


def _after_migration(names: dict[str, Any]) -> None:
    assert Path("run/checkpoints/step_128").is_dir() and Path("run/logs").is_dir()
    for seed in (1, 2):
        folder = Path(f"benchmark/dqn_CartPole-v1_{seed}")
        cfg = json.loads((folder / "config.json").read_text())
        assert cfg["trainer"]["seed"] == seed and cfg["algorithm"]["cfg"]["capacity"] == 10_000
        steps = [int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*")]
        assert max(steps) >= 2_000
    assert Path("curves.svg").is_file()
    rates = {names["ecrl"].load_config(f"sweep/{i}/config.json").algorithm.cfg.learning_rate for i in range(3)}
    assert len(rates) > 1 and names["scores"].keys() == {0, 1, 2}


def _after_mujoco_tasks(names: dict[str, Any]) -> None:
    logs = names["history"][-1]
    assert names["cfg"].env.name == "MyTaskRL" and names["cfg"].env.cfg.extensions.success_threshold == 0.05
    assert math.isfinite(logs["value_loss"])
    assert logs["rewards/height"] < 0.0
    assert logs["rewards/height_weighted"] == pytest.approx(0.5 * logs["rewards/height"])


def _after_getting_started(names: dict[str, Any]) -> None:
    assert json.loads(Path("outputs/platform/config.json").read_text())["env"]["name"] == "platform"
    assert Path("outputs/platform/checkpoints/step_128").is_dir()
    assert "eval/avg_reward" in ecrl.evaluate(names["state"], names["cfg"], num_episodes=2)


def _after_callbacks(names: dict[str, Any]) -> None:
    rows = Path("update.csv").read_text().splitlines()
    assert rows[0] == "step,entropy,value_loss" and len(rows) == 3
    logged = [json.loads(row) for row in Path("outputs/distance/metrics.jsonl").read_text().splitlines()]
    assert 0.0 < logged[1]["train/distance"] < logged[3]["train/distance"]
    assert sorted(path.name for path in Path("outputs/mine").iterdir()) == ["checkpoints", "metrics.jsonl"]
    assert int(names["state"]["update_step"]) == 2
    assert float(names["state"]["hyper", "clip_coef"]) == pytest.approx(0.2)


def _after_gymnasium(names: dict[str, Any]) -> None:
    assert names["report"].findings == []
    assert json.loads(Path("outputs/room/config.json").read_text())["env"]["cfg"]["id"] == "my_rooms:Room-v0"
    assert sorted(names["observation"].keys()) == ["pole", "steps"]
    assert names["state"]["env", "obs"].shape == (4, 4)


AFTER = {
    "docs/callbacks.md": _after_callbacks,
    "docs/gymnasium.md": _after_gymnasium,
    "README.md": _after_readme,
    "docs/python.md": _after_python,
    "docs/kernels.md": _after_kernels,
    "docs/migration.md": _after_migration,
    "docs/mujoco_tasks.md": _after_mujoco_tasks,
    "docs/getting_started.md": _after_getting_started,
}
"""Checks of a page's code, after it ran."""


def _tensors() -> dict[str, Any]:
    """Return the arguments of the kernels in docs/kernels.md."""
    no, of = torch.zeros(2, 4, dtype=torch.bool), torch.Generator().manual_seed(1)
    fields = {key: torch.randn(2, 4, generator=of) for key in ("reward", "value")}
    fields |= {"terminated": no, "truncated": no, "done": no}
    steps = {key: tensor[:, :-1] for key, tensor in fields.items()}
    return steps | {"rollout": TensorDict(fields, [2, 4]), "next_value": fields["value"][:, 1:]}


NAMES_OF_PAGE = {"docs/kernels.md": _tensors}
"""Names that a page's code uses without defining them."""


@pytest.fixture
def folder(restored_registry, tmp_path, monkeypatch):
    """Return a folder with small configs; forget the parts and modules of a page afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    doc_pages.small_configs(tmp_path)
    monkeypatch.setattr(presets, "preset_folder", lambda: tmp_path / "configs")
    known = set(sys.modules)
    yield tmp_path
    for name in [name for name in sys.modules if name not in known and name.startswith("my_")]:
        del sys.modules[name]


def _why_not(line: str) -> str | None:
    return next((why for start, why in SKIPPED.items() if re.match(start, line.replace("'", ""))), None)


def _command(line: str) -> None:
    if _why_not(line) or (line.startswith("ecrl record ") and not opengl_works()):
        return
    program, *words = line.split()
    if program == "make":
        assert all(re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for word in words), line
    elif program == "ecrl":
        doc_pages.ecrl(line)
    elif line.startswith("python -m pytest "):
        doc_pages.pytest_run(line)
    elif program == "python" and Path(words[0]).is_file():
        doc_pages.script_run(words)
    else:
        raise AssertionError(f"{line}: nothing runs it; say how, or why not, in SKIPPED")


def _merged(base: Any, part: Any) -> Any:
    """Merge `part` into `base`; an object that names another part replaces it."""
    if not (isinstance(base, dict) and isinstance(part, dict)):
        return part
    return base | {key: _merged(base.get(key), value) for key, value in part.items()}


def _config(text: str) -> None:
    """Check a config, or a part of one where the rest does not matter."""
    part = json.loads(text if text.startswith("{") else f"{{{text}}}")
    part = {"trainer": part} if "events" in part else part
    cameras = "record_camera" in text or "camera_image" in text
    base = json.loads((ROOT / "configs" / f"{'push_cube' if cameras else 'cartpole'}_ppo.json").read_text())
    if "name" in part.get("policy", {}):
        del base["policy"]
    algorithm = base["algorithm"]
    if part.get("algorithm", {}).get("name", algorithm["name"]) != algorithm["name"]:
        algorithm["cfg"] = {"learning_rate": algorithm["cfg"]["learning_rate"]}
    if "optimizer" in part.get("algorithm", {}).get("cfg", {}):
        del base["algorithm"]["cfg"]["learning_rate"]
    config_from_dict(_merged(base, part))


def _run(block: Block, names: dict[str, Any]) -> None:
    if block.title:
        doc_pages.write(block)
    elif block.language == "python":
        if "ecrl.run.video" in block.text and not opengl_works():
            return
        text = re.sub(r'("trainer.iterations": )\d+', r"\g<1>2", block.text)
        exec(text, names)  # text of this repository's own pages
    elif block.language == "json":
        _config(block.text)
    elif block.language == "bash":
        for line in commands(block):
            _command(line)
    else:
        assert block.language in BARE, f"{block.language}: nothing runs it; say how, or add it to BARE"


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, folder, capsys):
    names = NAMES_OF_PAGE.get(page, dict)()
    for block in blocks(page):
        _run(block, names)
    AFTER.get(page, id)(names)


def test_what_is_skipped_is_still_there():
    lines = [line for page in PAGES for block in blocks(page) if block.language == "bash" for line in commands(block)]
    lines_without_quotes = [line.replace("'", "") for line in lines]
    assert all(any(re.match(start, line) for line in lines_without_quotes) for start in SKIPPED), (
        "remove what is in no page any more"
    )
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages - {"python", "json", "bash"} == BARE


def test_no_fence_is_overlooked():
    for page in PAGES:
        fences = re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page)), f"{page}: a fence is indented, or none of ours"
