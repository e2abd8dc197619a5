"""Several ranks are one: the same noise, the same update, the same weights everywhere."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_killed
import torch
from ranks import ENVS, PATIENCE_S, ROOT, STEPS, both, distance, ended, launched

import ecrl
from ecrl import distributed
from ecrl.errors import ConfigError
from ecrl.kernels import masked_mean, moments_init, moments_update, standardize

DESTROYED = "process group destroyed"
SHORT = ["double", "single", "moments", "usual", "groups", "gradients", "values", "chunks", "clones", "tokens"]
SEEING = ["images", "instructions", "memory and frames"]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return both([*SHORT, *SEEING], "off", tmp_path_factory.mktemp("ranks"))


def test_noise_is_that_of_the_global_environment(ends):
    one, first, second = ends["double"]
    for name in ("noise/0", "noise/1"):
        assert torch.equal(torch.cat((first[name], second[name]), 1), one[name])
        assert one[name].std() > 0.5


def test_two_ranks_learn_what_one_does(ends):
    assert distance(*ends["double"][:2], "params") < 1e-9
    assert distance(*ends["values"][:2], "params") < 1e-9
    assert distance(*ends["tokens"][:2], "params") < 1e-6
    assert distance(*ends["single"][:2], "params") < 1e-6
    one, first, _ = ends["moments"]
    assert distance(one, first, "params") < 1e-5
    for name in one:
        if name.startswith(("norm/obs", "norm/reward/moments")):
            torch.testing.assert_close(first[name], one[name], rtol=1e-6, atol=1e-6)
    assert one["norm/obs/count"] == first["norm/obs/count"] == 3 * 2 * 4 * 32
    for ending in (one, first):
        assert ending["sample_step"] == 3 * 2 * 4 * 32 and ending["update_step"] == 3


def test_two_ranks_count_the_steps_of_the_environments_as_one_does(ends):
    one, first, second = ends["chunks"]
    decisions = 2 * 2 * ENVS * STEPS
    for end in (one, first, second):
        assert end["decision_step"] == decisions and end["update_step"] == 2
        assert end["sample_step"] == one["sample_step"] > decisions
    assert distance(one, first, "params") < 1e-6


def test_two_ranks_clone_what_one_does(ends):
    one, first, second = ends["clones"]
    assert distance(one, first, "params") < 1e-6
    assert one["norm/obs/count"] == first["norm/obs/count"] == second["norm/obs/count"] == 3 * 2 * ENVS * STEPS
    torch.testing.assert_close(first["log/holdout_loss"], one["log/holdout_loss"])


@pytest.mark.parametrize("name", SEEING)
def test_two_ranks_that_see_images_learn_what_one_does(ends, name):
    one, first, _ = ends[name]
    assert distance(one, first, "params") < 1e-6
    decisions = one.get("decision_step", one["sample_step"])
    assert decisions == first.get("decision_step", first["sample_step"]) == 3 * 2 * ENVS * STEPS
    assert one["sample_step"] == first["sample_step"] >= decisions


@pytest.mark.parametrize("name", [*SHORT, *SEEING])
def test_all_ranks_hold_the_same_weights(ends, name):
    _, first, second = ends[name]
    assert distance(first, second, "params") == 0.0 and torch.equal(first["sample_step"], second["sample_step"])
    logs = {key for key in first if key.startswith("log/")}
    assert logs and all(torch.equal(first[key], second[key]) or first[key].isnan() for key in logs)
    obs = [key for key in first if key.startswith("norm/obs")]
    assert all(torch.equal(first[key], second[key]) for key in obs)
    assert not torch.equal(first["noise/1"], second["noise/1"])


@pytest.mark.long
def test_compiled_ranks_learn_what_one_does(tmp_path):
    one, first, second = both(["double"], "on", tmp_path)["double"]
    assert distance(one, first, "params") < 1e-9 and distance(first, second, "params") == 0.0


@pytest.mark.long
def test_all_compiled_ranks_hold_the_same_weights(tmp_path):
    results = both(["usual", "gradients"], "on", tmp_path)
    assert all(distance(first, second, "params") == 0.0 for _, first, second in results.values())


SUMS = """
import torch
from ecrl import distributed as d
d.start(True)
r = d.rank()
mean = d.all_mean((torch.tensor([1.0, 2.0]) * (r + 1), torch.tensor(float("nan") if r else 4.0)),
                  weight=torch.tensor(0.0 if r else 3.0))
print(mean[0].tolist(), float(mean[1]), d.all_sum(torch.tensor([r + 1])).tolist())
print(float(d.all_mean(torch.tensor(2.0 + r), weight=torch.tensor(1.0 + 2 * r))))
print(float(d.all_mean(torch.tensor(5.0), weight=torch.tensor(0.0))), d.any_rank(r == 1), d.any_rank(False))
x = torch.arange(6.0).reshape(3, 2) + 10 * r
print(torch.func.vmap(d.all_sum)(x).tolist())
print([part.decode() for part in d.gather_on_rank_0(b"ab" * (r + 1))], d.value_of_rank_0("name", lambda: f"of {r}"))
d.stop()
print(d.world_size())
"""


def test_sums_and_means_over_ranks():
    first, second = (text.splitlines() for text in ended(launched(2, ["-c", SUMS])))
    assert first[0] == second[0] == "[1.0, 2.0] 4.0 [3]"
    assert first[1] == second[1] == "2.75"
    assert first[2] == second[2] == "0.0 True False"
    assert first[3] == second[3] == "[[10.0, 12.0], [14.0, 16.0], [18.0, 20.0]]"
    assert (first[4], second[4]) == ("['ab', 'abab'] of 0", "[] of 0")
    assert first[5] == second[5] == "1"


def test_a_rank_that_ends_is_reported_by_the_others_in_one_line():
    code = """
import os, torch
from ecrl import distributed as d
from ecrl.errors import UserError
d.start(True)
try:
    d.all_sum(torch.ones(1))
    if d.rank():
        os._exit(3)
    d.all_sum(torch.ones(1))
except UserError as error:
    print(error)
"""
    first, second = launched(2, ["-c", code])
    text, other = (process.communicate(timeout=PATIENCE_S)[0] for process in (first, second))
    assert text.startswith("rank 0: another rank ended (") and text.count("\n") == 1  # gloo's words differ
    assert text.endswith("; read its last message for the reason\n")
    assert (other, second.returncode) == ("", 3)


def endings(*ways):
    """Rows of `endings.py`: way, rank, exit status, last line."""
    command = [sys.executable, str(ROOT / "tests" / "reliability" / "endings.py"), *ways]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [tuple(json.loads(line)) for line in run.stdout.splitlines()]


STATUSES = {
    "success": 0,
    "UserError": 2,
    "NotFiniteError": 2,
    "KeyboardInterrupt": 130,
    "SystemExit": 3,
    "RuntimeError": 1,
}


def test_the_process_group_is_destroyed_before_the_interpreter_exits_in_every_way_out():
    expected = [(way, rank, status, DESTROYED) for way, status in STATUSES.items() for rank in range(2)]
    assert endings(*STATUSES) == expected


def test_a_rank_leaves_the_process_group_without_waiting_for_one_that_died_or_is_stuck():
    statuses = {"rank 1 dies in all_sum": 7, "rank 1 dies in gather_on_rank_0": 7, "rank 1 is stuck": -9}
    rows = [[(way, 0, 2, DESTROYED), (way, 1, status, "")] for way, status in statuses.items()]
    assert endings(*statuses) == [row for pair in rows for row in pair]


SPOILT = """
import sys
from dataclasses import replace
import torch
import ecrl
from ecrl import distributed as d
from ecrl.cli.main import main
from ecrl.envs import make_env, time_limit
from ecrl.config.model import ConfigModel

class SpoiltConfig(ConfigModel):
    pass

@ecrl.register_env("spoilt")
def spoilt(cfg: SpoiltConfig):
    env = make_env("pendulum")
    def step(state, action, noise):
        after = env.step(state, action, noise)
        faulty = (after["elapsed"] == 7) & (d.rank() == 1)
        return after.copy().update({"reward": torch.where(faulty, torch.nan, after["reward"])})
    return replace(env, step=step)

sys.argv = ["ecrl", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_the_iteration_that_ends_all_ranks_is_repeated_by_as_many(tmp_path):
    name, crash = "configs/pendulum_ppo.json", tmp_path / "run" / "crash"
    keys = {"env.name": "spoilt", "trainer.num_envs": 2, "trainer.buffer_size": 5, "trainer.compile": "off"}
    keys |= {"env.cfg": {}, "trainer.enable_eval": False}
    (tmp_path / "x.json").write_text(json.dumps(ecrl.load_config(name).model_dump(mode="json")))
    args = [text for key, value in keys.items() for text in (f"--{key}", json.dumps(value))]
    train = ["-c", SPOILT, "train", str(tmp_path / "x.json"), "--distributed", "--run-dir", str(crash.parent), *args]
    processes = launched(2, train)
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    again = f"torchrun --nproc-per-node 2 -m ecrl replay {crash} --distributed"
    assert again in outputs[0] and json.loads((crash / "report.json").read_text())["command"] == again
    assert "first reward = nan in env 2, step 1 of the rollout, step 6 of that env" in outputs[1]
    first, second = ended(launched(2, ["-c", SPOILT, "replay", str(crash), "--distributed"]))
    assert (
        "rank 0: eager: NaN or infinity in reward, loss" in first
        and "rank 1: eager, step by step: iteration 1" in second
    )
    assert "first reward = nan in env 2, step 1 of the rollout, step 6 of that env" in second
    (output,) = ended(launched(1, ["-c", SPOILT, "replay", str(crash)]))
    assert (
        output.splitlines()[-1]
        == f"the iteration had 2 ranks, but this command has 1; repeat the iteration with: {again}"
    )


ON_THE_HOST = """
import os, sys
import gymnasium
import numpy as np
from ecrl.cli.main import main

class Spoilt(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        faulty = self.steps == 7 and os.environ["RANK"] == "1"
        return np.zeros(1, np.float32), np.nan if faulty else 1.0, False, False, {}

gymnasium.register("Spoilt-v0", Spoilt)
sys.argv = ["ecrl", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
def test_all_ranks_stop_where_an_environment_on_the_host_of_one_pays_nan(tmp_path):
    crash, path = tmp_path / "run" / "crash", tmp_path / "x.json"
    path.write_text(json.dumps(ecrl.load_config("configs/pendulum_ppo.json").model_dump(mode="json")))
    keys = {"env.name": "gymnasium", "env.cfg": {"id": "Spoilt-v0"}, "trainer.num_envs": 2, "trainer.buffer_size": 5}
    keys |= {"trainer.compile": "off", "trainer.enable_eval": False}
    args = [text for key, value in keys.items() for text in (f"--{key}", json.dumps(value))]
    train = ["-c", ON_THE_HOST, "train", str(path), "--distributed", "--run-dir", str(crash.parent), *args]
    processes = launched(2, train)
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2], outputs
    assert "the iteration has only finite values on this rank; mend the environment" in outputs[0]
    assert str(crash) in outputs[0]
    assert "first reward = nan in env 2, step 1 of the rollout, step 6 of that env, last finite value 1" in outputs[1]
    assert json.loads((crash / "report.json").read_text())["met"][0] == "reward"


@pytest.mark.long
def test_restarted_ranks_refuse_the_folder_of_another_run(tmp_path):
    path, old = ranks_killed.config(tmp_path), {"config.json": "{}", "metrics.jsonl": '{"sample_step": 1}\n'}
    (tmp_path / "run").mkdir()
    for name, text in old.items():
        (tmp_path / "run" / name).write_text(text)
    torchrun = ranks_killed.begun(path, tmp_path / "run")
    output = torchrun.communicate(timeout=PATIENCE_S)[0]
    assert torchrun.returncode and output.count("already holds a run (config.json); choose another folder") == 4, output
    assert {entry.name: entry.read_text() for entry in (tmp_path / "run").iterdir()} == old


ONE_RANK = """
from ecrl import distributed as d
d.start(True)
print(d.world_size(), d.restarts(), d.value_of_rank_0("name", lambda: "made"), d.has_flag("word"))
d.set_flag("word")
print(d.has_flag("word"), d.value_of_rank_0("name", lambda: "again"))
d._ranks.store.set("ecrl/word", "0")
print(d.has_flag("word"))
"""


def test_one_rank_of_torchrun_knows_that_it_was_restarted():
    (text,) = ended(launched(1, ["-c", ONE_RANK], TORCHELASTIC_RESTART_COUNT="1"))
    assert text.splitlines() == ["1 1 made False", "False made", "True"]


def test_one_rank_gets_back_its_own_values():
    x = torch.ones(2)
    assert distributed.all_sum(x) is x and distributed.all_mean(x, weight=torch.tensor(2.0)) is x
    assert distributed.value_of_rank_0("name", lambda: "made") == "made" and distributed.restarts({}) == 0


def test_the_hooks_of_kernels_take_parts_of_a_batch_for_the_whole():
    x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) != 3
    whole, moments = standardize(x, mask, eps=1e-8), moments_update(moments_init(()), x, mask)
    calls = []

    def total(number):  # the other half's numbers, in the order of the calls
        calls.append(number)
        return number + others.pop(0) if others else number

    rest, rest_mask = x[4:], mask[4:]
    mean = masked_mean(x, mask)
    centred = rest - mean
    others = [rest_mask.sum(), rest.sum(), torch.stack((centred.square().sum(), centred.sum()))]
    torch.testing.assert_close(standardize(x[:4], mask[:4], eps=1e-8, total=total), whole[:4], rtol=1e-12, atol=1e-12)
    others = [rest_mask.sum().double(), rest.sum(), (rest - mean).square().sum()]
    half = moments_update(moments_init(()), x[:4], mask[:4], total=total)
    for name in ("count", "mean", "m2"):
        torch.testing.assert_close(half[name], moments[name], rtol=1e-12, atol=1e-12)
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set; start with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "x", "MASTER_PORT": "1"}, "RANK is 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "1"}, "RANK is 2, expected less than WORLD_SIZE, 2"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_PORT is not set"),
    ],
)
def test_variables_that_torchrun_did_not_set_are_named(environ, message):
    with pytest.raises(ConfigError, match=f"^trainer.distributed: {message}"):
        distributed.start(True, environ)
    assert distributed.world_size() == 1


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(distributed, "_ranks", distributed._Ranks(3, 4, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.local_device("cuda", {"LOCAL_RANK": "1"}) == "cuda:1"
    assert distributed.local_device("cpu", {"LOCAL_RANK": "9"}) == "cpu"
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is 3, but this machine has cuda:0, cuda:1; start at most 2"):
        distributed.local_device("auto", {"LOCAL_RANK": "3"})


def run_config(folder: Path, **keys) -> Path:
    """A small run of two iterations per checkpoint."""
    sizes = {"trainer.num_envs": 4, "trainer.buffer_size": 16, "trainer.iterations": 6, "trainer.save_freq": 256}
    sizes |= {"algorithm.cfg.batch_size": 32, "trainer.compile": "off", "trainer.distributed": True}
    sizes |= {"trainer.eval_freq": 256, "trainer.num_eval_episodes": 2, "trainer.enable_eval": True}
    cfg = ecrl.load_config(ROOT / "configs" / "cartpole_ppo.json", sizes | keys)
    path = folder / "small.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    return path


@pytest.mark.slow
def test_rank_0_alone_writes_and_a_run_resumes_bit_for_bit(tmp_path):
    path = run_config(tmp_path)
    train = ["-m", "ecrl", "train", str(path), "--run-dir"]
    outputs = ended(launched(2, [*train, str(tmp_path / "whole")]))
    assert "world size 2" in outputs[0] and outputs[1] == ""
    checkpoints = sorted(p.name for p in (tmp_path / "whole" / "checkpoints").glob("step_*"))
    assert "step_256" in checkpoints and "step_768" in checkpoints
    rows = [json.loads(row) for row in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["sample_step"] for row in rows if row["log_type"] == "train"]
    assert steps == [128 * (i + 1) for i in range(6)]
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for later in ("step_512", "step_768"):
        shutil.rmtree(tmp_path / "half" / "checkpoints" / later)
    resume = ["-m", "ecrl", "train", "--resume", str(tmp_path / "half")]
    ended(launched(2, resume))
    for name in ("state.safetensors", "rank_1.safetensors"):
        ends = [(tmp_path / run / "checkpoints" / "step_768" / name).read_bytes() for run in ("whole", "half")]
        assert ends[0] == ends[1], name
    one = launched(1, resume)
    text = one[0].communicate(timeout=PATIENCE_S)[0]
    assert one[0].returncode == 2 and "was saved by 2 ranks, but this run has 1" in text


def test_the_page_on_several_processes_is_true():
    import re

    page = (ROOT / "docs" / "distributed.md").read_text()
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), names)  # text of this repository's own page
    assert names["distributed"].world_size() == 1
    processes = launched(2, ["-m", "ecrl", *re.search(r"-m ecrl (check|train) (\S+)", page).groups(), "--help"])
    assert all("--distributed" in process.communicate(timeout=PATIENCE_S)[0] for process in processes)
