"""The page on custom parts runs as printed, each example for two iterations."""

import json
import re

import pytest
import torch
from support.paths import ROOT
from tensordict import TensorDict

from ecrl import registry
from ecrl.config import presets
from ecrl.kernels import compute_gae
from ecrl.registry import registered

PAGE = (ROOT / "docs" / "custom_parts.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(TASK,) = re.findall(r'```json title="my_task.json"\n(.*?)```', PAGE, re.DOTALL)
ENV_AS_PRINTED_UPSTREAM = """
"env": {
    "id": "MyTaskRL",
    "cfg": {
        "num_envs": 4,
        "actions": {
            "delta_qpos": {
                "func": "DeltaQposTerm",
                "params": { "scale": 0.1 }
            }
        },
        "extensions": {
            "success_threshold": 0.05
        }
    }
}
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Run the page once, eager and on small configs. Return a function that returns the names after `count` blocks."""
    data = json.loads((ROOT / "configs" / "cartpole_ppo.json").read_text())
    task = json.loads(TASK)
    for section in (data, task):
        section["trainer"] |= {"compile": "off", "num_envs": 8, "buffer_size": 32}
        section["algorithm"] |= {"cfg": section["algorithm"].get("cfg", {}) | {"batch_size": 64}}
    folder = tmp_path_factory.mktemp("custom_parts")
    (folder / "configs").mkdir()
    (folder / "configs" / "cartpole_ppo.json").write_text(json.dumps(data))
    (folder / "my_task.json").write_text(json.dumps(task))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_ENTRIES", {kind: dict(parts) for kind, parts in registry._ENTRIES.items()})
        patch.setattr(presets, "preset_folder", lambda: folder / "configs")
        patch.chdir(folder)
        names, after = {}, [{}]
        for block in BLOCKS:
            exec(block, names)  # text of this repository's own page
            after.append(dict(names))
        yield lambda count: dict(after[count])


def _moved(names):
    """Two iterations were run, and they changed the parameters."""
    first = names["ecrl"].init_state(names["cfg"])["params"].flatten_keys("/")
    last = names["state"]["params"].flatten_keys("/")
    assert int(names["state"]["update_step"]) == 2
    return all(not torch.equal(last[name], first[name]) for name in last.keys() if "critic" not in name)  # noqa: SIM118


def test_a_reward(page):
    names = page(1)
    env = names["centered_cartpole"](names["CenteredConfig"](weight=0.5))
    start = env.reset(torch.arange(6))
    after = env.step(start, torch.ones(6, dtype=torch.int64), torch.arange(6))
    torch.testing.assert_close(after["reward"], 1.0 - 0.5 * after["obs"][:, 0].abs())
    assert names["cfg"].env.name == "centered_cartpole" and _moved(names)


def test_an_event(page):
    names = page(2)
    bumped, keys = names["bumped"].trainer.events.train["bump"], torch.arange(500)
    start = TensorDict({"obs": torch.zeros(500, 4)}, [500])
    pushed = names["bump"](bumped.params)(start, keys)["obs"]
    assert -0.3 <= pushed[:, 3].min() < -0.25 and 0.25 < pushed[:, 3].max() <= 0.3 and bumped.interval_step == 10
    assert not pushed[:, :3].any()
    losses = [rows[-1]["policy_loss"] for rows in (names["history"], names["bumped_history"])]
    assert losses[0] != losses[1], "the pole was pushed"


def test_an_environment(page):
    names = page(5)
    assert names["report"].findings == []
    assert names["cfg"].env.name == "MyTaskRL" and _moved(names)
    assert int(names["state"]["sample_step"]) == 2 * 4 * 64, "num_envs stands in env.cfg"
    logs = {name for row in names["history"] for name in row}
    assert {"metrics/distance", "metrics/error", "rewards/near", "rewards/success"} <= logs
    assert 0.0 <= names["ecrl"].evaluate(names["state"], names["cfg"])["eval/success_rate"] <= 1.0
    printed = json.loads(f"{{{ENV_AS_PRINTED_UPSTREAM}}}")["env"]
    assert printed == json.loads(TASK)["env"], "the page shows it unchanged"


def test_settings_of_the_environment_do_what_they_say(page):
    names = page(3)
    data = json.loads(TASK)["env"]["cfg"]
    del data["num_envs"]
    config, env_of = names["MyTaskConfig"], names["my_task"]
    env, keys = env_of(config(**data)), torch.arange(5)
    start = env.reset(keys)
    turned = env.step(start, torch.ones(5, 2), keys)
    torch.testing.assert_close(turned["qpos"], start["qpos"] + 0.1)
    wide = env_of(config(**data | {"extensions": {"success_threshold": 5.0}})).step(start, torch.ones(5, 2), keys)
    assert wide["info", "success"].all() and wide["terminated"].all()
    assert torch.equal(wide["reward"], -wide["info", "metrics", "distance"] + 10.0)
    with pytest.raises(ValueError, match="expected 'DeltaQposTerm'"):
        config(**data | {"actions": {"delta_qpos": {"func": "QposTerm"}}})


def test_policies(page):
    names = page(7)
    assert names["cfg"].policy.name == "my_policy" and _moved(names)
    module = names["MyPolicy"](4, 2, names["cfg"].policy)
    module.load_state_dict(dict(names["state"]["params", "module"].items()))
    names = page(8)
    assert names["cfg"].policy.name == "my_network" and names["cfg"].env.name == "MyTaskRL" and _moved(names)


def test_algorithms(page):
    names = page(11)
    assert names["cfg"].algorithm.name == "my_algo" and _moved(names)
    assert names["history"][-1]["loss"] != 0.0
    size = {"trainer.num_envs": 64, "trainer.iterations": 80}
    cfg = names["ecrl"].load_config("cartpole_ppo", {"algorithm.name": "my_algo", **size})
    state, _ = names["ecrl"].train(names["ecrl"].init_state(cfg), cfg, progress=False)
    assert names["ecrl"].evaluate(state, cfg, num_episodes=10)["eval/avg_reward"] > 60.0, (
        "it learns; chance gives 9 to 25"
    )
    names = page(12)
    batch, policy = names["batch"], names["run"].policy
    params = names["ecrl"].init_state(names["cfg"])["params"]
    own, others = (names["advantages_of"](policy, p, batch, 0.99, 0.95) for p in (params, names["other_params"]))
    torch.testing.assert_close(own, compute_gae(batch["steps"], 0.99, 0.95).advantage)
    assert own.shape == others.shape and not torch.allclose(own, others)
    names = page(13)
    assert len(BLOCKS) == 13 and names["cfg"].policy.name == "my_q" and _moved(names)


@pytest.mark.long
def test_running_the_page_again_is_fine_and_its_parts_are_those_it_names(page):
    names = page(len(BLOCKS))
    for block in BLOCKS:
        exec(block, names)
    assert {"my_algo", "my_q_learning"} <= {*registered("algorithm")} and "bump" in registered("event")
    assert {"my_policy", "my_network", "my_cell"} <= {*registered("policy")}
    assert {"centered_cartpole", "MyTaskRL"} <= {*registered("env")}
