"""An off-policy algorithm on two ranks: equal weights, own environments and buffers, the same bits after a resume."""

import json
import shutil
from pathlib import Path

import pytest
import support.chunks  # noqa: F401  # registers repeated_pole
import torch
from ranks import PATIENCE_S, ROOT, ended, launched
from safetensors.torch import load_file
from support.off_policy_agents import AGENTS
from support.replay_agent import CAPACITY, T, replaying

from ecrl.config import Config, config_from_dict

N = 2
"""Environments of each rank."""
ITERATIONS = 5
PATHS = f"{ROOT}:{ROOT / 'tests'}"
TRAIN = ["-c", "import sys, support.replay_agent\nfrom ecrl.cli.main import main\nmain()"]


CHUNKS = {
    "env.name": "repeated_pole",
    "algorithm.cfg.exploration_steps": 200,
    "algorithm.cfg.chunks": True,
}


def config(**keys) -> Config:
    """The agent on N environments of each rank. Its ring is overwritten, and it learns from the second iteration on."""
    sizes = {"trainer.num_envs": N, "trainer.iterations": ITERATIONS, "trainer.distributed": True}
    sizes |= {"algorithm.cfg.learning_starts": 2 * N * T, "trainer.enable_eval": False, "trainer.compile": "off"}
    return replaying(**sizes | keys)


def written(folder: Path, cfg: Config) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    return path


def trained(folder: Path, cfg: Config) -> list[dict[str, torch.Tensor]]:
    """What each of two ranks ends with."""
    script = str(Path(__file__).parent / "ranks_interleaved.py")
    ended(launched(2, [script, str(written(folder, cfg)), str(folder)], PYTHONPATH=PATHS))
    return [load_file(folder / f"rank_{i}") for i in range(2)]


def of_kind(end: dict[str, torch.Tensor], *kinds: str) -> dict[str, torch.Tensor]:
    return {name: x for name, x in end.items() if name.split("/")[0] in kinds}


def steps_of(end: dict[str, torch.Tensor]) -> int:
    """Steps of the environments of one rank, from the lengths of its episodes."""
    length, is_finished = end["environment/episode/finished_length"], end["environment/episode/finished"]
    return int(length[is_finished].sum() + end["environment/episode/running_length"].sum())


def check(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """All ranks learn the same, from rows of their own."""
    equal = of_kind(first, "learned", "statistics", "counter", "log")
    assert equal.keys() == of_kind(second, "learned", "statistics", "counter", "log").keys()
    assert all(torch.equal(x, second[name]) for name, x in equal.items())
    assert {"learned/params/critic/0.weight", "learned/target_params/critic/0.weight"} <= equal.keys()
    assert f"log/{ITERATIONS - 1}/loss" in equal and "log/0/loss" not in equal
    decisions, steps = 2 * N * T * ITERATIONS, sum(map(steps_of, (first, second)))
    for end in (first, second):
        assert int(end.get("counter/decision_step", end["counter/sample_step"])) == decisions
        assert int(end["counter/sample_step"]) == steps
        assert steps > decisions or "counter/decision_step" not in end
        assert int(end["counter/replay/cursor"]) == int(end["buffer/replay/written"]) == T * ITERATIONS
        assert len(end["buffer/replay/steps/obs"]) == CAPACITY // N
    for name in ("buffer/replay/steps/obs", "environment/env/obs"):
        assert not torch.equal(first[name], second[name])


OTHER = {"policy.normalize_obs": True, "algorithm.cfg.train_freq": 2}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [pytest.param({}, marks=pytest.mark.long), OTHER])
def test_two_ranks_learn_the_same_from_buffers_of_their_own(tmp_path, keys):
    check(*trained(tmp_path, config(**keys)))


def test_two_ranks_learn_the_same_and_each_turn_has_the_steps_of_all_environments(tmp_path):
    ends = trained(tmp_path, config(**CHUNKS))
    check(*ends)
    before = sum(steps_of(end) - int(end["environment/env/executed"].sum()) for end in ends)  # before the last turn
    for end in ends:
        expected = torch.full((N,), 1.0 - 0.9 * before / 200)
        torch.testing.assert_close(end["environment/exploration/epsilon"], expected)


@pytest.mark.slow
def test_two_ranks_draw_by_priorities_of_their_own(tmp_path):
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
    cfg = {"capacity": 40, "batch_size": 8, "learning_starts": 0, "prioritized": {}, "gradient_steps": 2}
    sizes = {"num_envs": N, "buffer_size": 4, "iterations": 8, "compile": "off", "distributed": True}
    parts = {"env": {"name": "cartpole"}, "policy": {"name": "q_network", "critic": net}}
    algorithm = {"name": "dqn", "cfg": cfg}
    first, second = trained(
        tmp_path, config_from_dict({"trainer": {**sizes, "enable_eval": False}, **parts, "algorithm": algorithm})
    )
    equal = of_kind(first, "learned", "statistics", "counter", "log")
    assert float(equal["statistics/replay/largest"]) != 1.0
    assert all(torch.equal(x, second[name]) for name, x in equal.items())
    assert not torch.equal(first["buffer/replay/tree"], second["buffer/replay/tree"])
    leaves = torch.cat([end["buffer/replay/tree"][64:] for end in (first, second)])
    assert leaves.max() <= equal["statistics/replay/largest"]


@pytest.mark.long
def test_the_length_of_an_iteration_changes_no_bit_on_two_ranks(tmp_path):
    ends = []
    for size in (T, 2 * T):
        folder = tmp_path / str(size)
        folder.mkdir()
        keys = {"trainer.buffer_size": size, "trainer.iterations": 4 * T // size, "algorithm.cfg.learning_starts": 0}
        ends.append(trained(folder, config(**keys)))
    for one, other in zip(*ends, strict=True):
        kept = of_kind(one, "learned", "buffer")
        assert kept and all(torch.equal(x, other[name]) for name, x in kept.items())


@pytest.mark.long
def test_two_compiled_ranks_learn_the_same(tmp_path):
    ends = []
    for form in ("off", "on"):
        (tmp_path / form).mkdir()
        ends.append(trained(tmp_path / form, config(**{"trainer.compile": form})))
        check(*ends[-1])
    eager, compiled = (of_kind(end[0], "learned") for end in ends)
    assert all(torch.allclose(x.double(), compiled[name].double(), atol=1e-5) for name, x in eager.items())


@pytest.mark.slow
def test_two_ranks_save_their_buffers_and_resume_bit_for_bit(tmp_path):
    path = written(tmp_path, config(**{"trainer.save_freq": 2 * N * T, "trainer.keep_checkpoints": 9}))
    ended(launched(2, [*TRAIN, "train", str(path), "--run-dir", str(tmp_path / "whole")], PYTHONPATH=PATHS))
    steps = [2 * N * T * (i + 1) for i in range(ITERATIONS)]
    folders = sorted((tmp_path / "whole" / "checkpoints").glob("step_*"), key=lambda p: int(p.name[5:]))
    assert [folder.name for folder in folders] == [f"step_{step}" for step in steps]
    own, other = (load_file(folders[-1] / name) for name in ("state.safetensors", "rank_1.safetensors"))
    assert {"replay/steps/obs", "env/obs", "exploration/epsilon"} <= other.keys()
    assert "params/critic/0.weight" not in other
    assert not torch.equal(own["replay/steps/obs"], other["replay/steps/obs"])
    for saved in (1, 3):  # before and after the first gradient step
        half = tmp_path / f"half_{saved}"
        shutil.copytree(tmp_path / "whole", half)
        for step in steps[saved:]:
            shutil.rmtree(half / "checkpoints" / f"step_{step}")
        ended(launched(2, [*TRAIN, "train", "--resume", str(half)], PYTHONPATH=PATHS))
        for name in ("state.safetensors", "rank_1.safetensors"):
            place = Path("checkpoints") / f"step_{steps[-1]}" / name
            assert (tmp_path / "whole" / place).read_bytes() == (half / place).read_bytes(), (saved, name)
    alone = launched(1, [*TRAIN, "train", "--resume", str(tmp_path / "whole")], PYTHONPATH=PATHS)[0]
    assert "was saved by 2 ranks, but this run has 1" in alone.communicate(timeout=PATIENCE_S)[0]


@pytest.fixture(scope="module")
def off_policy_ends(tmp_path_factory):
    """The last states of every off-policy agent by name: of one rank, and of each of two ranks."""
    folder, script = tmp_path_factory.mktemp("off_policy"), str(Path(__file__).parent / "ranks_off_policy.py")
    for size in (1, 2):
        ended(launched(size, [script, str(folder)], PYTHONPATH=PATHS))
    places = [(0, 1), (0, 2), (1, 2)]
    return {name: [load_file(folder / f"{name}_{rank}_of_{size}") for rank, size in places] for name in AGENTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_two_ranks_of_an_off_policy_agent_learn_the_same(name, off_policy_ends):
    one, first, second = off_policy_ends[name]
    equal = of_kind(first, "learned", "statistics", "counter")
    assert all(torch.equal(x, second[path]) for path, x in equal.items())
    learned = of_kind(first, "learned")
    assert all(x.isfinite().all() for x in learned.values())
    assert not all(torch.equal(x, one[path]) for path, x in learned.items() if path.startswith("learned/params"))
    assert int(first["counter/sample_step"]) == 2 * int(one["counter/sample_step"])
    own = ["environment/env/obs", "environment/exploration/std"] if name == "fast_td3" else ["environment/env/obs"]
    own += [] if name == "pqn" else ["buffer/replay/steps/obs", "buffer/replay/steps/action"]
    for path in own:
        assert not torch.equal(first[path], second[path]), path
