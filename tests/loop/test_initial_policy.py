"""`trainer.init_from`: the policy of a checkpoint, everything that derives from it, and what does not fit."""

import json
import shutil
import warnings

import pytest
import torch
from support.command_line import called
from support.demos import NET, cloning, recording
from support.dots import reaching
from support.frozen_agent import freezing
from support.off_policy_agents import agent
from support.small_runs import last_state, same

import ecrl
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state
from ecrl.run.resume import resume
from ecrl.run.train import train

ACTOR = {"name": "actor_only", "actor": NET}
BOTH = {"name": "actor_critic", "actor": NET, "critic": NET}
RANDOM = "the checkpoint lacks some parts of the policy, so their initial values are random"
GRPO = {"name": "grpo", "cfg": {"n_epochs": 1, "batch_size": 32, "group_size": 2}}


@pytest.fixture(scope="module")
def cloned(tmp_path_factory):
    """A run folder of behaviour cloning without a critic, and its last state."""
    folder = tmp_path_factory.mktemp("cloned")
    cfg = cloning(policy=ACTOR | {"normalize_obs": True})
    state, _ = train(init_state(cfg), cfg, folder, progress=False)
    return folder, state


def starting(folder, **keys):
    """A config that starts from a folder."""
    policy = keys.pop("policy", ACTOR) | {"normalize_obs": True}
    return recording(**{"trainer.init_from": str(folder), "policy": policy, "algorithm": GRPO, **keys})


def test_parameters_statistics_and_the_reference_are_those_of_the_checkpoint(cloned):
    folder, before = cloned
    state = init_state(starting(folder))
    assert same(state["params"], before["params"]) and same(state["norm", "obs"], before["norm", "obs"])
    assert same(state["ref_params"].exclude("norm"), before["params"])
    assert same(state["ref_params", "norm"], before["norm", "obs"])
    assert all((x == 0).all() for x in state["opt"].flatten_keys("/").values()) and int(state["sample_step"]) == 0
    cfg = starting(folder)
    logs = [record["logs"] for record in ecrl.train_iter(state, cfg) if record["log_type"] == "train"]
    assert len(logs) == 3 and abs(float(logs[0]["kl_ref"])) < 1e-3  # the first minibatches start at the reference


def test_a_checkpoint_and_its_run_folder_give_the_same_policy(cloned):
    folder, _ = cloned
    one, two = (init_state(starting(path)) for path in (folder, folder / "checkpoints" / "step_384"))
    assert same(one, two)


def test_a_missing_critic_starts_at_random_with_one_line(cloned):
    folder, before = cloned
    cfg = starting(folder, policy=BOTH, algorithm={"name": "ppo"})
    line = f"trainer.init_from: {folder}/checkpoints/step_384: {RANDOM}: critic"
    with pytest.warns(UserWarning) as told:
        state = init_state(cfg)
    assert [str(warning.message) for warning in told] == [line]
    assert same(state["params", "actor"], before["params", "actor"])
    other = init_state(cfg.replace(**{"trainer.init_from": None}))
    assert same(state["params", "critic"], other["params", "critic"])


def test_a_critic_that_the_policy_lacks_is_unused_with_one_line(tmp_path):
    cfg = recording()
    before = last_state(cfg)
    folder = str(tmp_path / "ppo")
    ecrl.save(folder, before, cfg)
    with pytest.warns(
        UserWarning, match=r"policy lacks some parts of the checkpoint, so these parts are unused: critic$"
    ):
        state = init_state(
            recording(**{"trainer.init_from": str(tmp_path / "ppo"), "policy": ACTOR, "algorithm": GRPO})
        )
    assert same(state["params"], before["params"].select("actor"))


def test_target_networks_are_copies_of_the_checkpoint(tmp_path):
    cfg = agent("sac")
    before = last_state(cfg)
    ecrl.save(tmp_path / "sac", before, cfg)
    with pytest.warns(UserWarning, match=r"these parts are unused: log_temperature$"):
        state = init_state(cfg.replace(**{"trainer.init_from": str(tmp_path / "sac")}))
    assert same(state["params"].exclude("log_temperature"), before["params"].exclude("log_temperature"))
    assert all(torch.equal(x, before["params"][name]) for name, x in leaves(state["target_params"]))


def leaves(tree):
    return [(tuple(name.split("/")), x) for name, x in tree.flatten_keys("/").items()]


def test_frozen_parameters_are_those_of_the_checkpoint(tmp_path):
    cfg = freezing()
    state = init_state(cfg).clone()
    state["frozen_params"] = state["frozen_params"].apply(lambda x: x + 1.0)
    ecrl.save(tmp_path / "frozen", state, cfg)
    new = init_state(cfg.replace(**{"trainer.init_from": str(tmp_path / "frozen")}))
    assert same(new["frozen_params"], state["frozen_params"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"policy.actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}},
            "params/actor/0.bias is float32 [32], but float32 [16] in this config; use the policy of the checkpoint",
        ),
        (
            {"policy.actor": {"type": "mlp", "network_cfg": {"hidden_sizes": [32, 2], "activation": "tanh"}}},
            "params/actor/4.bias is absent, but float32 [2] in this config; use the policy of the checkpoint",
        ),
        (
            {"policy.normalize_obs": False},
            "the checkpoint standardises observations, but the policy does not; set policy.normalize_obs to true",
        ),
        (
            {"policy": {"name": "q_network", "critic": NET, "normalize_obs": True}, "algorithm": {"name": "pqn"}},
            "has the parts actor, but the policy has critic; use a checkpoint of the same policy",
        ),
    ],
)
def test_another_policy_is_refused_in_one_line(cloned, keys, message):
    folder, _ = cloned
    with pytest.raises(ConfigError) as refused:
        init_state(starting(folder).replace(**keys))
    assert str(refused.value) == f"trainer.init_from: {folder}/checkpoints/step_384: {message}"


def other_settings(folder, policy):
    """The warnings about an initial state whose policy starts from a folder."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_state(starting(folder, policy=policy))
    return [str(warning.message) for warning in caught]


def test_other_settings_of_the_policy_with_equal_tensors_are_named_in_one_line(cloned):
    folder, _ = cloned
    relu = {"type": "mlp", "network_cfg": {"hidden_sizes": [32], "activation": "relu"}}
    assert other_settings(folder, ACTOR | {"actor": relu}) == [
        f'trainer.init_from: {folder}/checkpoints/step_384: policy.actor.network_cfg.activation is "tanh", but "relu" '
        "in this config, so the policy may choose other actions; use the policy of the checkpoint"
    ]


def test_settings_of_initial_weights_and_of_the_critic_do_not_warn(cloned, tmp_path):
    orthogonal = {"type": "mlp", "network_cfg": NET["network_cfg"] | {"orthogonal_init": 1.0}}
    assert other_settings(cloned[0], ACTOR | {"actor": orthogonal, "initial_log_std": -1.0, "action_dim": 2}) == []
    cfg = recording()
    ecrl.save(tmp_path / "ppo", init_state(cfg), cfg)
    relu = {"type": "mlp", "network_cfg": {"hidden_sizes": [32], "activation": "relu"}}
    new = recording(**{"trainer.init_from": str(tmp_path / "ppo"), "policy": BOTH | {"critic": relu}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init_state(new)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"policy.vla.heads": 1}, "policy.vla.heads is 2, but 1 in this config"),
        ({"policy.vla.temperature": 0.5}, "policy.vla.temperature is 1.0, but 0.5 in this config"),
        ({"policy.vla.label_smoothing": 0.0, "policy.vla.action_horizon": 3}, None),
    ],
)
def test_other_settings_of_a_vla(changes, line, tmp_path):
    cfg = reaching("grpo")
    ecrl.save(tmp_path / "vla", init_state(cfg), cfg)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        init_state(cfg.replace(**{"trainer.init_from": str(tmp_path / "vla"), **changes}))
    assert [line in str(warning.message) for warning in caught] == [True] * (line is not None)


def test_missing_and_damaged_checkpoints_are_refused(cloned, tmp_path):
    with pytest.raises(ConfigError, match=rf"^trainer.init_from: {tmp_path}: no checkpoint: expected a run folder"):
        init_state(starting(tmp_path))
    cfg = recording()
    ecrl.save(tmp_path / "damaged", init_state(cfg), cfg)
    file = tmp_path / "damaged" / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"damaged/state.safetensors: missing or damaged; use another checkpoint$"):
        init_state(starting(tmp_path / "damaged"))


def test_a_resumed_run_does_not_load_it_again(cloned, tmp_path):
    shutil.copytree(cloned[0], tmp_path / "cloned")
    cfg = starting(tmp_path / "cloned", **{"trainer.iterations": 2})
    train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "cloned")
    state, longer = resume(tmp_path / "run", overrides={"trainer.iterations": 4}, force=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = last_state(longer, state)
    uninterrupted = last_state(starting(cloned[0], **{"trainer.iterations": 4}))
    assert same(resumed, uninterrupted)


def test_check_reports_a_path_without_a_checkpoint(tmp_path, capsys, monkeypatch):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(starting(tmp_path / "none").model_dump(mode="json")))
    assert called(monkeypatch, "check", config) == 2
    assert "trainer.init_from" in capsys.readouterr().err
