"""The page on MuJoCo tasks: its tables name every term and nothing else, and its example event works."""

import re

import pytest
import torch
from support.paths import ROOT

from ecrl.registry import lookup, registered

PAGE = (ROOT / "docs" / "mujoco_tasks.md").read_text()
*_, TASK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("kind", ["action", "observation", "reward", "event"])
def test_the_tables_name_every_term(kind):
    (table,) = re.findall(rf"^\| {kind} \|.*?\n\n", PAGE, re.DOTALL | re.MULTILINE)
    named = {name for row in table.strip().splitlines()[2:] for name in re.findall(r"`([\w/]+)`", row.split("|")[1])}
    builtin = {name for name in registered(kind) if lookup(kind, name).make.__module__.startswith("ecrl.")}
    terms = builtin - {"randomize_field"}  # of any environment
    assert named - {"robot/qpos", "robot/qvel", "robot/qf"} == terms


def test_the_wind_pushes_the_cube_every_fifth_step(restored_registry, monkeypatch):
    monkeypatch.chdir(ROOT)
    names: dict = {}
    exec(TASK[: TASK.index("data = json")], names)
    from ecrl import make_env, rng
    from ecrl.envs.mujoco import world

    wind = {"func": "wind", "mode": "interval", "interval_step": 5, "params": {"strength": 200.0}}
    goal = {"func": "randomize_target_pose", "mode": "reset", "params": {"position_range": [[2.0, 2.0, 0.0]] * 2}}
    env = make_env({"name": "MyTaskRL", "cfg": {"events": {"wind": wind, "goal": goal}}})
    keys = rng.split(rng.key(0), 16)
    state, places = env.reset(keys), []
    for _ in range(6):
        state = env.step(state, torch.zeros(16, 6), env.draw(keys))
        places.append(world.body_pose(env.scene, state["world"], "cube")[:, 1, 3])
    still, pushed = (places[3] - places[0]).abs(), (places[5] - places[3]).abs()
    assert still.max() < 1e-3 and pushed.median() > 1e-2
