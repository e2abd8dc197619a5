"""Recordings: whole episodes in order, equal bits, the metadata, successes, policies with memory, and refusals."""

import json

import pytest
import torch
from safetensors import safe_open
from support import catch, fake_envs  # noqa: F401  they register environments
from support.command_line import called
from support.demos import NET, balancing, cloning, recording
from support.recurrent_agent import remembering
from support.small_runs import last_state

import ecrl
from ecrl.envs import make_env
from ecrl.errors import CheckpointError, ConfigError, UserError
from ecrl.loop.iteration import init_state
from ecrl.run.demonstrations import record_demonstrations
from ecrl.storage.demonstrations import read_about
from ecrl.storage.tensor_files import read_tensors

SHORT = {"env.cfg.max_episode_steps": 12}
SUCCEEDING = {"env": {"name": "point_mass", "cfg": {"max_episode_steps": 8, "success_threshold": 0.6}}}


def test_episodes_are_whole_and_in_order(tmp_path):
    cfg = recording(**SHORT)
    done = record_demonstrations(cfg, tmp_path / "demos", 3, expert={"noise": 1.0}, seed=5)
    tensors = read_tensors(tmp_path / "demos")
    assert done.episodes == 3 and done.steps == len(tensors["done"]) and tensors["done"].sum() == 3
    assert tensors["done"][-1] and done.mean_return == pytest.approx(float(tensors["reward"].sum()) / 3)
    step, rows = make_env(cfg.env).step, zip(tensors["obs"], tensors["action"], tensors["done"], strict=True)
    state = None
    for obs, action, ended in rows:
        if state is None:
            assert obs.abs().max() <= 0.05  # a start
            state = make_env(cfg.env).reset(torch.zeros(1, dtype=torch.int64))
        else:
            torch.testing.assert_close(state["obs"][0], obs)
        state = step(state.copy().set("obs", obs.unsqueeze(0)), action.unsqueeze(0), None)
        assert bool(state["terminated"] | (state["elapsed"] >= 12)) == bool(ended)
        state = None if ended else state


def test_a_seed_gives_the_same_bits_and_the_number_of_environments_does_not_matter(tmp_path):
    cfg = recording(**SHORT)
    files = {}
    for name, keys in {"a": {}, "again": {}, "few": {"num_envs": 2}, "seed": {"seed": 1}}.items():
        done = record_demonstrations(cfg, tmp_path / name, 5, expert={"noise": 0.5}, **keys)
        files[name] = (tmp_path / name).read_bytes(), done.sha256
    assert files["a"] == files["again"] == files["few"] and files["a"][1] != files["seed"][1]


def test_folders_of_the_file_are_created(tmp_path):
    path = tmp_path / "new" / "folder" / "demos"
    assert record_demonstrations(recording(**SHORT), path, 1).path == path and path.exists()


def test_the_file_opens_with_the_library_and_has_its_metadata():
    done = balancing()
    with safe_open(done.path, "pt") as file:
        metadata, names = file.metadata(), {*file.keys()}
        shapes = {name: list(file.get_tensor(name).shape) for name in names}
    about = json.loads(metadata["ecrl.demonstrations"])
    assert shapes == {"obs": [320, 4], "action": [320], "reward": [320], "done": [320]}
    assert (about["env"], about["episodes"], about["steps"], about["success_rate"]) == ("cartpole", 8, 320, None)
    assert about["format"] == 1 and about["config"]["env"]["cfg"]["max_episode_steps"] == 40
    assert read_about(done.path)[0]["obs"] == (torch.float32, (320, 4))


def test_only_successes(tmp_path):
    cfg = recording(**SUCCEEDING)
    state = init_state(cfg)
    every = record_demonstrations(cfg, tmp_path / "every", 20, state=state, sample=True)
    good = record_demonstrations(cfg, tmp_path / "good", 5, state=state, sample=True, successes_only=True)
    assert every.success_rate is not None and good.success_rate is not None
    assert 0.0 < every.success_rate < 1.0 and 0.0 < good.success_rate < 1.0
    assert good.episodes == int(read_tensors(tmp_path / "good")["done"].sum()) == 5
    ends = read_tensors(tmp_path / "good")["done"].nonzero().flatten().diff()
    assert (ends <= 8).all()
    with pytest.raises(UserError, match=r"only 0 of 200 episodes of policy actor_critic succeeded, expected 2; use a"):
        hard = cfg.replace(**{"env.cfg.success_threshold": 1e-6})
        record_demonstrations(hard, tmp_path / "none", 2, state=state, successes_only=True)
    assert not (tmp_path / "none").exists()


def test_a_policy_acts_with_its_memory_and_deterministically_unless_it_samples(tmp_path):
    cfg = remembering()
    state = last_state(cfg)
    best = record_demonstrations(cfg, tmp_path / "best", 32, state=state, num_envs=8)
    assert best.mean_return == 1.0
    start = init_state(cfg)
    sampled = [record_demonstrations(cfg, tmp_path / str(i), 8, state=start, sample=True, seed=i) for i in (0, 1)]
    assert sampled[0].sha256 != sampled[1].sha256


def test_images_and_observations_with_several_parts(tmp_path):
    cfg = recording("catch", **{"env.cfg.observe": "dict"})
    record_demonstrations(cfg, tmp_path / "demos", 4, state=init_state(cfg), sample=True)
    tensors = read_tensors(tmp_path / "demos")
    images = [name for name, x in tensors.items() if x.dtype == torch.uint8]
    assert images and all(name.startswith("obs.") for name in images)
    clone = cloning(tmp_path / "demos", env={"name": "catch", "cfg": {"observe": "dict"}})
    assert int(last_state(clone)["update_step"]) == 3


def test_actions_are_stored_as_the_environment_receives_them(tmp_path):
    cfg = recording("pendulum", **{"env.cfg.max_episode_steps": 50})
    record_demonstrations(cfg, tmp_path / "demos", 8, state=init_state(cfg), sample=True)
    action = read_tensors(tmp_path / "demos")["action"]
    assert action.abs().max() == cfg.env.cfg.max_torque  # pyright: ignore


def test_an_environment_of_gymnasium(tmp_path):
    cfg = recording("gymnasium:CartPole-v1")
    done = record_demonstrations(cfg, tmp_path / "demos", 3, state=init_state(cfg), num_envs=2)
    assert done.episodes == 3 and done.mean_return == done.steps / 3
    assert read_tensors(tmp_path / "demos")["done"].sum() == 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_episodes": 0}, "num_episodes: 0, expected at least 1"),
        ({"num_envs": 0}, "num_envs: 0, expected at least 1"),
        ({"successes_only": True}, "successes_only: cartpole reports no success; leave it out"),
        ({"sample": True}, "sample: only a trained policy samples its actions; leave it out, or pass a run"),
        ({"expert": {"nois": 0.1}}, "expert: nois: unknown key; did you mean 'noise'?"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(keys, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        record_demonstrations(recording(**SHORT), tmp_path / "demos", **keys)
    assert str(refused.value) == message and not [*tmp_path.iterdir()]


def test_an_existing_file_and_a_missing_expert_are_refused(tmp_path, monkeypatch):
    (tmp_path / "demos").write_text("mine")
    with pytest.raises(ConfigError, match=r"demos: exists; choose another name, or remove it first$"):
        record_demonstrations(recording(), tmp_path / "demos")
    assert (tmp_path / "demos").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"^env.name: 'pendulum' has no scripted expert; known: .*cartpole"):
        record_demonstrations(recording("pendulum"), tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^expert.noise: a trained policy has no such settings; leave it out$"):
        record_demonstrations(recording(), tmp_path / "other", state=init_state(recording()), expert={"noise": 0.1})

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ecrl.storage.demonstrations.replace_file", full)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; make room"):
        record_demonstrations(recording(**SHORT), tmp_path / "other", 1)


def test_the_command_records_an_expert_and_a_run(tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(recording(**SHORT).model_dump(mode="json")))
    out = tmp_path / "demos"
    args = "--out", out, "--num-episodes", 4
    assert called(monkeypatch, "demo", config, *args, "--expert.noise", "0.2", "--seed", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = record_demonstrations(recording(**SHORT), tmp_path / "same", 4, expert={"noise": 0.2}, seed=3)
    assert lines == [
        f"{out}: 4 episodes, {expected.steps} steps, mean return {expected.mean_return:.2f}",
        f"sha256 {expected.sha256}",
    ]
    assert called(monkeypatch, "demo", config, *args) == 2
    assert capsys.readouterr().err == f"{out}: exists; choose another name, or remove it first\n"
    assert called(monkeypatch, "demo") == called(monkeypatch, "demo", config, "--run-dir", tmp_path) == 2
    assert "needs either a config, as in ecrl demo cartpole_ppo, or --run-dir" in capsys.readouterr().err
    cfg = recording(**SUCCEEDING, policy={"name": "actor_only", "actor": NET}, algorithm={"name": "grpo"})
    ecrl.save(tmp_path / "run", init_state(cfg), cfg)
    run = "demo", "--run-dir", tmp_path / "run", "--out", tmp_path / "of_run", "--num-episodes", 2, "--sample"
    assert called(monkeypatch, *run, "--env.cfg.max_episode_steps", 3) == 0
    assert "success rate" in capsys.readouterr().out
    assert read_about(tmp_path / "of_run")[1]["config"]["env"]["cfg"]["max_episode_steps"] == 3
    assert called(monkeypatch, "demo", "--run-dir", tmp_path / "none", "--out", tmp_path / "x") == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_steps_that_do_not_count_are_left_out(tmp_path):
    """Each episode of `pausing` begins with a step that pays 1000 and is masked."""
    cfg = recording("pausing")
    done = record_demonstrations(cfg, tmp_path / "demos", 3, state=init_state(cfg))
    tensors = read_tensors(tmp_path / "demos")
    assert done.steps == 9 and tensors["obs"][:, 0].tolist() == [1.0, 2.0, 3.0] * 3 and "mask" not in tensors
    assert tensors["reward"].tolist() == [1.0] * 9 and tensors["done"].tolist() == [False, False, True] * 3


def test_sampling_without_random_actions_is_refused(tmp_path):
    actor = {"name": "deterministic_actor_critic", "actor": NET, "critic": NET}
    cfg = recording("pendulum", policy=actor, algorithm={"name": "td3", "cfg": {"learning_starts": 0}})
    message = "^sample: the policy deterministic_actor_critic explores only in training; leave it out$"
    with pytest.raises(ConfigError, match=message):
        record_demonstrations(cfg, tmp_path / "demos", 2, state=init_state(cfg), sample=True)


def test_an_expert_plans_chunks_of_actions(tmp_path):
    """Each row has the actions that the expert would take one at a time, because CartPole has no noise."""
    single = record_demonstrations(recording(**SHORT), tmp_path / "single", 4)
    chunked = record_demonstrations(recording(**SHORT, **{"env.action_chunk": 5}), tmp_path / "chunked", 4)
    assert chunked.mean_return == single.mean_return == 12.0
    one, many = (read_tensors(tmp_path / name) for name in ("single", "chunked"))
    assert many["executed"].tolist() == [5, 5, 2] * 4 and many["reward"].tolist() == [5.0, 5.0, 2.0] * 4
    taken = torch.arange(5) < many["executed"].unsqueeze(1)
    assert torch.equal(many["action"][taken], one["action"])
    assert torch.equal(many["obs"][1::3], one["obs"][5::12])
    clone = cloning(tmp_path / "chunked", **{"env.action_chunk": 5})
    state = last_state(clone)
    assert int(state["decision_step"]) == 3 * 8 * 16 < int(state["sample_step"]) < 5 * 3 * 8 * 16
