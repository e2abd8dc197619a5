"""PPO, GRPO and cloning fine-tune a tiny OpenVLA, and the result is a checkpoint in the same format."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import tiny_openvla
from support.checks import close
from support.long_cases import long_except
from support.small_runs import last_state, same
from support.tiny_openvla import checkpoint, choosing, write_checkpoint
from tensordict import TensorDict

import ecrl
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import policy_params
from ecrl.policies.openvla import save_openvla
from ecrl.run.export import export

EMPTY = TensorDict({}, [])
ADAPTERS = {"policy.vla.adapters": {"rank": 2, "scale": 2.0}}
IN_TURN = {"policy.vla.decoding": "autoregressive"}
TOKENS = {"algorithm.cfg.ratio": "token"}
GENTLE = {"algorithm.cfg.learning_rate": 1e-4}


def logs_of(cfg):
    return [record["logs"] for record in train_iter(init_state(cfg), cfg) if record["log_type"] == "train"]


def weights_in(path):
    return {name: x for file in sorted(path.glob("*.safetensors")) for name, x in load_file(file).items()}


def actions_of(cfg, state, obs):
    return build(cfg).policy.act(policy_params(state), EMPTY, obs, None)[1]["action"]


RUNS = {
    "grpo by token": ("grpo", TOKENS),
    "grpo in turn": ("grpo", IN_TURN),
    "ppo by token": ("ppo", TOKENS),
    "ppo in turn": ("ppo", IN_TURN),
    "grpo with adapters": ("grpo", ADAPTERS),
}


@pytest.mark.parametrize("name", long_except(["grpo by token", "ppo in turn", "grpo with adapters"], RUNS))
def test_two_iterations_learn_and_log_the_gap(name):
    algorithm, changes = RUNS[name]
    cfg = choosing(algorithm, **changes)
    logs, before, after = logs_of(cfg), init_state(cfg)["params"], last_state(cfg)["params"]
    assert len(logs) == 2 and all(float(log["logprob_gap"]) < 1e-5 for log in logs)
    assert all(not same(before[part], after[part]) for part in before.keys())  # noqa: SIM118
    assert all(weight.isfinite().all() for weight in after.values(True, True))


@pytest.mark.parametrize("changes", [{}, IN_TURN], ids=["parallel", "in turn"])
def test_bc_clones_actions(tmp_path, changes):
    """The demonstrations are actions of another checkpoint, whose tokens are read from the actions."""
    teacher = choosing("grpo", **{"policy.vla.model_path": checkpoint(1)})
    path = tmp_path / "demos.safetensors"
    ecrl.record_demonstrations(teacher, path, 20, state=init_state(teacher))
    cfg = choosing("bc", **changes, **{"algorithm.cfg.demos": str(path), "trainer.iterations": 12})
    losses = [float(log["loss"]) for log in logs_of(cfg)]
    assert losses[-1] < 0.7 * losses[0]


def test_a_tuned_model_is_a_checkpoint(tmp_path):
    cfg = choosing("grpo", **GENTLE)
    state = last_state(cfg)
    save_openvla(tmp_path / "tuned", state, cfg)
    mine = {name.removeprefix("openvla."): x for name, x in policy_params(state)["model"].items()}
    theirs, first = weights_in(tmp_path / "tuned"), weights_in(write_checkpoint(tmp_path / "first"))
    assert theirs.keys() == first.keys() and mine.keys() < theirs.keys()
    assert all(torch.equal(x, mine.get(name, first[name])) for name, x in theirs.items())
    assert not torch.equal(theirs["language_model.lm_head.weight"], first["language_model.lm_head.weight"])
    other = choosing("grpo", **{"policy.vla.model_path": str(tmp_path / "tuned")})
    obs = state["env", "obs"]
    assert torch.equal(actions_of(cfg, state, obs), actions_of(other, init_state(other), obs))
    names = {path.name for path in (tmp_path / "tuned").iterdir()}
    assert {"config.json", "preprocessor_config.json", "tokenizer.json", "model-00002-of-00002.safetensors"} <= names


def test_merged_adapters_act_like_adapters(tmp_path):
    cfg = choosing("grpo", **ADAPTERS)
    state = last_state(cfg)
    save_openvla(tmp_path / "tuned", state, cfg)
    plain = choosing("grpo", **{"policy.vla.model_path": str(tmp_path / "tuned")})
    start, obs = choosing("grpo"), state["env", "obs"]
    close(actions_of(cfg, state, obs), actions_of(plain, init_state(plain), obs), tol=1e-5)
    run, log_probs = build(cfg), []
    steps = TensorDict({"obs": obs, "action": actions_of(start, init_state(start), obs)}, obs.batch_size)
    for c, s in ((cfg, state), (plain, init_state(plain)), (start, init_state(start))):
        log_probs.append(build(c).policy.evaluate(policy_params(s), EMPTY, steps)[0])
    close(log_probs[0], log_probs[1], tol=1e-4)
    assert not torch.allclose(log_probs[0], log_probs[2], atol=1e-3) and run.policy.value is None


def test_a_resumed_run_has_the_same_bits(tmp_path):
    cfg = choosing("ppo", **ADAPTERS, **TOKENS)
    ecrl.save(tmp_path / "middle", last_state(cfg.replace(**{"trainer.iterations": 1})), cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


def test_an_existing_folder_and_another_policy_are_refused(tmp_path):
    cfg = choosing("grpo")
    state = init_state(cfg)
    with pytest.raises(ConfigError, match=r"exists; give the path of a new folder$"):
        save_openvla(tmp_path, state, cfg)
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match=r"note/tuned' cannot be made: \w+: .*; give another path$"):
        save_openvla(tmp_path / "note" / "tuned", state, cfg)
    with pytest.raises(ConfigError, match=r"^policy: save_openvla needs the policy vla with the backend openvla; use"):
        save_openvla(tmp_path / "new", state, ecrl.load_config("cartpole_ppo"))
    path = write_checkpoint(tmp_path / "other", state=0)
    other = choosing("grpo", **{"policy.vla.model_path": str(path)})
    with pytest.raises(ConfigError, match=r"no weight 'proprio_projector.fc1.bias', which the run has; use the check"):
        save_openvla(tmp_path / "new", state, other)
    path = write_checkpoint(tmp_path / "wide", state=3)
    other = choosing("grpo", **{"policy.vla.model_path": str(path)})
    message = r"proprio_projector.fc1.weight has another shape than in the run; use the run's own checkpoint$"
    with pytest.raises(ConfigError, match=message):
        save_openvla(tmp_path / "new", state, other)
    statistics = tiny_openvla.STATISTICS | {"action": {"q01": [0.0, 0.0], "q99": [2.0, 2.0]}}
    path = write_checkpoint(tmp_path / "changed", norm_stats={"dots": statistics})
    other = choosing("grpo", **{"policy.vla.model_path": str(path)})
    with pytest.raises(ConfigError, match=r"changed': the bounds of action differ from those of the run; use the ch"):
        save_openvla(tmp_path / "new", state, other)
    assert not (tmp_path / "new").exists()


def test_the_export_is_a_checkpoint(tmp_path):
    cfg = choosing("grpo", **{"policy.vla.model_path": checkpoint()})
    files = export(init_state(cfg), cfg, tmp_path / "exported")
    assert files == sorted((tmp_path / "exported").iterdir())
    theirs, first = weights_in(tmp_path / "exported"), weights_in(Path(checkpoint()))
    assert theirs.keys() == first.keys() and all(torch.equal(x, first[name]) for name, x in theirs.items())


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo by token", "ppo in turn"])
def test_compiled_equals_eager(name):
    """Compiling takes minutes."""
    algorithm, changes = RUNS[name]
    cfg = choosing(algorithm, **changes, **GENTLE)
    iterate, trained = make_iteration(cfg.replace(**{"trainer.compile": "on"})), []
    state = init_state(cfg.replace(**{"trainer.compile": "on"}))
    for _ in range(2):
        state, logs = iterate(state)
        trained.append(logs["train"])
    assert all(float(log["logprob_gap"]) < 1e-4 for log in trained)
    for path, weight in last_state(cfg)["params"].items(True, True):
        close(state["params"][path], weight, tol=1e-4)
