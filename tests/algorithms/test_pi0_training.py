"""PPO and GRPO fine-tune a tiny pi0, the result is a checkpoint of transformers, and nothing uses the network."""

import re
import socket
from pathlib import Path

import pytest
import torch
from support.checks import close
from support.command_line import called
from support.long_cases import long_except
from support.small_runs import last_state, same
from support.tiny_pi0 import CHUNK, NUMBERS, checkpoint, flowing, write_checkpoint, write_statistics
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.algorithms.core import collect
from ecrl.algorithms.demonstrations import drawn_batch
from ecrl.algorithms.reference import reference_log_prob
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import policy_params
from ecrl.policies.pi0 import save_pi0
from ecrl.policies.pi0_checkpoint import write_model

EMPTY = TensorDict({}, [])
HEAD = {"policy.vla.noise_head": {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}}
ADAPTERS = {"policy.vla.adapters": {"rank": 2, "scale": 2.0}}
TOKENS = {"algorithm.cfg.ratio": "token"}
GENTLE = {"algorithm.cfg.learning_rate": 1e-4}


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a connection to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def logs_of(cfg):
    return [record["logs"] for record in train_iter(init_state(cfg), cfg) if record["log_type"] == "train"]


def reloaded(path):
    from transformers import PI0ForConditionalGeneration

    return PI0ForConditionalGeneration.from_pretrained(path, local_files_only=True).eval()


RUNS = {
    "grpo": ("grpo", {}),
    "grpo by token": ("grpo", TOKENS),
    "ppo": ("ppo", {}),
    "ppo by token with a noise head": ("ppo", TOKENS | HEAD),
    "grpo with adapters": ("grpo", ADAPTERS),
}


@pytest.mark.parametrize("name", long_except([name for name in RUNS if " " in name], RUNS))
def test_two_iterations_learn_and_log_the_gap(name):
    algorithm, changes = RUNS[name]
    cfg = flowing(algorithm, **changes)
    logs, before, after = logs_of(cfg), init_state(cfg)["params"], last_state(cfg)["params"]
    assert len(logs) == 2 and all(float(log["logprob_gap"]) < 1e-5 for log in logs)
    assert all(not same(before[part], after[part]) for part in before.keys())  # noqa: SIM118
    assert all(weight.isfinite().all() for weight in after.values(True, True))


def distance_to_teacher(cfg, state, teacher):
    """Return the mean distance between the deterministic actions of both policies on new observations."""
    obs, policies = init_state(cfg.replace(**{"trainer.seed": 7}))["env", "obs"], ((cfg, state), teacher)
    one, two = (build(c).policy.act(policy_params(s), EMPTY, obs, None)[1]["action"] for c, s in policies)
    return float((one - two).abs().mean())


@pytest.mark.parametrize("changes", long_except([{}], [{}, ADAPTERS]), ids=["all weights", "adapters"])
def test_bc_clones_actions_with_flow_matching(tmp_path, changes):
    """The demonstrations are actions of another checkpoint."""
    teacher = flowing("grpo", **{"policy.vla.model_path": checkpoint(1)})
    path = tmp_path / "demos.safetensors"
    ecrl.record_demonstrations(teacher, path, 20, state=init_state(teacher))
    keys = {"algorithm.cfg.demos": str(path), "algorithm.cfg.holdout": 0.2, "trainer.iterations": 15}
    cfg = flowing("bc", **changes, **keys, **{"algorithm.cfg.learning_rate": 3e-3})
    logs = logs_of(cfg)
    assert float(logs[-1]["loss"]) < 0.7 * float(logs[0]["loss"])
    assert float(logs[-1]["holdout_loss"]) < 0.8 * float(logs[0]["holdout_loss"])
    pair, states = (teacher, init_state(teacher)), (init_state(cfg), last_state(cfg))
    first, last = (distance_to_teacher(cfg, state, pair) for state in states)
    assert last < 0.7 * first


def test_bc_draws_other_noise_in_each_iteration_and_the_same_after_resuming(tmp_path):
    teacher, path = flowing("grpo"), tmp_path / "demos.safetensors"
    ecrl.record_demonstrations(teacher, path, 6, state=init_state(teacher))
    cfg = flowing("bc", **{"algorithm.cfg.demos": str(path)})
    run, iterate = build(cfg), make_iteration(cfg)
    data = run.algorithm.data.read(run, torch.device("cpu"))["train"]
    state = init_state(cfg)
    first = drawn_batch(run, state, data)["steps", "imitation_noise"]
    second = drawn_batch(run, iterate(state)[0], data)["steps", "imitation_noise"]
    assert first["t"].shape == (8, 5) and first["start"].shape == (8, 5, CHUNK, NUMBERS)
    assert first["t"][:, :-1].unique().numel() == 32 and not torch.isin(first["t"], second["t"]).any()
    ecrl.save(tmp_path / "middle", last_state(cfg.replace(**{"trainer.iterations": 1})), cfg)
    middle, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, middle), last_state(cfg))


@pytest.mark.usefixtures("offline")
def test_ten_iterations_are_saved_and_loaded_by_transformers(tmp_path):
    cfg = flowing("grpo", **GENTLE, **{"trainer.iterations": 10})
    state = last_state(cfg)
    save_pi0(tmp_path / "tuned", state, cfg)
    theirs, first = (
        dict(reloaded(tmp_path / "tuned").named_parameters()),
        dict(reloaded(checkpoint()).named_parameters()),
    )
    params = policy_params(state)
    mine = {name: x for part in ("model", "base") for name, x in params[part].items()}
    assert sorted(mine) == sorted(f"pi0.{name}" for name in theirs)
    assert all(torch.equal(mine[f"pi0.{name}"], weight) for name, weight in theirs.items())
    assert not torch.equal(theirs["action_out_proj.weight"], first["action_out_proj.weight"])
    other = flowing("grpo", **{"policy.vla.model_path": str(tmp_path / "tuned")})
    obs = state["env", "obs"]
    actions = [
        build(c).policy.act(policy_params(s), EMPTY, obs, None)[1]["action"]
        for c, s in ((cfg, state), (other, init_state(other)))
    ]
    assert torch.equal(*actions)
    names = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names


def test_merged_adapters_act_like_adapters(tmp_path):
    cfg = flowing("grpo", **ADAPTERS)
    state = last_state(cfg)
    save_pi0(tmp_path / "tuned", state, cfg)
    plain = flowing("grpo", **{"policy.vla.model_path": str(tmp_path / "tuned")})
    obs, start = state["env", "obs"], flowing("grpo")
    one, two, base = (
        build(c).policy.act(policy_params(s), EMPTY, obs, None)[1]["action"]
        for c, s in ((cfg, state), (plain, init_state(plain)), (start, init_state(start)))
    )
    close(one, two, tol=1e-5)
    assert not torch.allclose(one, base)


def test_only_adapters_are_trained_and_the_reference_is_the_pretrained_model():
    cfg, plain = flowing("grpo", **ADAPTERS), flowing("grpo")
    run, first = build(cfg), init_state(cfg)
    *_, record = train_iter(first, cfg)
    last = record["state"]
    assert set(last["params"].keys()) == {"adapters"}
    weight = ("frozen_params", "base", "pi0.action_out_proj.weight")
    assert last[weight].data_ptr() == first[weight].data_ptr(), "no copy of the pretrained weights"
    size = sum(x.numel() for x in last["params"].values(True, True))
    for field in ("opt", "ref_params"):
        tensors = [x for x in last[field].values(True, True) if x.is_floating_point()]
        assert sum(x.numel() for x in tensors) == (2 if field == "opt" else 1) * size
    _, batch = collect(run, last)
    pretrained = init_state(plain)
    steps = batch["steps"][:, :-1]
    expected, _ = build(plain).policy.evaluate(policy_params(pretrained), EMPTY, steps)
    expected = expected.sum(-1)
    close(reference_log_prob(run, last, batch), expected, tol=1e-4)
    now, _ = run.policy.evaluate_rows(policy_params(last), steps)
    assert (now - expected).abs().max() > 1e-3


@pytest.mark.parametrize("changes", [{}, HEAD | ADAPTERS], ids=["all weights", "adapters"])
def test_a_resumed_run_has_the_same_bits(tmp_path, changes):
    cfg = flowing("grpo", **changes)
    ecrl.save(tmp_path / "middle", last_state(cfg.replace(**{"trainer.iterations": 1})), cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


def test_the_state_keeps_the_statistics_of_the_checkpoint(tmp_path):
    """A later change of the file changes no action of the run, also if another process loads it."""
    path = write_checkpoint(tmp_path / "pi0")
    numbers = {"state_mean": [0.1, 0.2], "state_std": [0.5, 2.0], "actions_mean": [0.1, 0.2], "actions_std": [2.0, 3.0]}
    write_statistics(path, **numbers)
    cfg = flowing("grpo", **{"policy.vla.model_path": str(path)})
    state = init_state(cfg)
    kept = state["frozen_params", "statistics"]
    assert {f"{name}_{part}": x for name in kept.keys() for part, x in kept[name].items()}.keys() == numbers.keys()  # noqa: SIM118
    close(kept["state", "std"], torch.tensor([0.5, 2.0]), tol=0.0)
    ecrl.save(tmp_path / "run", state, cfg)
    before = build(cfg).policy.act(policy_params(state), EMPTY, state["env", "obs"], None)[1]["action"]
    write_statistics(path, **numbers | {"actions_std": [1.0, 1.0], "state_std": [1.0, 1.0]})
    loaded, saved = ecrl.load(tmp_path / "run")
    again = saved.replace(**{"policy.vla.noise_level": 0.4})  # another config, whose policy is built anew
    after = build(again).policy.act(policy_params(loaded), EMPTY, loaded["env", "obs"], None)[1]["action"]
    assert torch.equal(before, after)


def test_an_existing_folder_and_another_policy_are_refused(tmp_path):
    cfg = flowing("grpo")
    state = init_state(cfg)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match=r"exists; give the path of a new folder$"):
        save_pi0(tmp_path, state, cfg)
    assert (tmp_path / "note").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"note/tuned' cannot be made: \w+: .*; give another path$") as caught:
        save_pi0(tmp_path / "note" / "tuned", state, cfg)
    assert "\n" not in str(caught.value)
    other = ecrl.load_config("cartpole_ppo")
    with pytest.raises(ConfigError, match=r"^policy: save_pi0 needs the policy vla with the backend pi0; use"):
        save_pi0(tmp_path / "new", state, other)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("shape", [(3, 5), (1, 1)])  # (1, 1) could be broadcast to the shape of the checkpoint
def test_weights_of_another_shape_are_refused(tmp_path, shape):
    weights = {name: x.detach() for name, x in reloaded(checkpoint()).named_parameters()}
    name = "action_out_proj.weight"
    weights[name], old = torch.ones(shape), list(weights[name].shape)
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {list(shape)} in the run and {old} in")) as error:
        write_model(tmp_path / "new", Path(checkpoint()), weights)
    assert str(error.value).endswith("; restore the checkpoint that the run began with")
    assert not (tmp_path / "new").exists()


def test_the_command_exports_a_checkpoint(tmp_path, monkeypatch, capsys):
    cfg = flowing("grpo")
    ecrl.save(tmp_path / "run", init_state(cfg), cfg)
    assert called(monkeypatch, "export", tmp_path / "run", "--out", tmp_path / "tuned") == 0
    assert str(tmp_path / "tuned" / "model.safetensors") in capsys.readouterr().out.splitlines()
    theirs, first = (dict(reloaded(path).named_parameters()) for path in (tmp_path / "tuned", checkpoint()))
    assert theirs.keys() == first.keys() and all(torch.equal(x, first[name]) for name, x in theirs.items())
    assert called(monkeypatch, "export", tmp_path / "run", "--out", tmp_path / "tuned") == 2
    assert capsys.readouterr().err.endswith("tuned' exists; give the path of a new folder\n")


def test_evaluations_act_without_noise():
    cfg = flowing("grpo")
    policy, state = build(cfg).policy, init_state(cfg)
    obs, params = state["env", "obs"], policy_params(init_state(cfg))
    one, two = (policy.act(params, EMPTY, obs, None)[1]["action"] for _ in range(2))
    drawn = policy.act(params, EMPTY, obs, policy.draw(rng.split(rng.key(1), 8)))[1]["action"]
    assert torch.equal(one, two) and not torch.allclose(one, drawn)
    logs = ecrl.evaluate(state, cfg.replace(**{"trainer.num_eval_episodes": 4, "trainer.num_eval_envs": 4}))
    assert all(value == value for value in logs.values() if isinstance(value, float))


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "ppo by token with a noise head"])
def test_compiled_equals_eager(name):
    """Compiling takes minutes."""
    algorithm, changes = RUNS[name]
    cfg = flowing(algorithm, **changes, **GENTLE)
    compiled = cfg.replace(**{"trainer.compile": "on"})
    state, trained = init_state(compiled), []
    iterate = make_iteration(compiled)
    for _ in range(2):
        state, logs = iterate(state)
        trained.append(logs["train"])
    assert all(float(log["logprob_gap"]) < 1e-4 for log in trained)
    for path, weight in last_state(cfg)["params"].items(True, True):
        close(state["params"][path], weight, tol=1e-4)
