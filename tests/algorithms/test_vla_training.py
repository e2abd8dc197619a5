"""PPO and GRPO train the policy `vla` on chunks of actions, and log the gap between acting and learning."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.checks import close
from support.dots import reaching, scenes
from support.long_cases import long_except
from support.small_runs import last_state, same
from support.token_agent import speaking
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.algorithms.core import collect
from ecrl.algorithms.logprob_gap import logprob_gap
from ecrl.algorithms.rows import rows_of
from ecrl.compile.jit import compilations_of
from ecrl.config import load_config
from ecrl.errors import ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import sum_tokens
from ecrl.policies.contract import checked_policy, checking
from ecrl.run.export import export

DECODINGS = ("parallel", "autoregressive")
ALGORITHMS = ("ppo", "grpo")


def logs_of(cfg):
    """Return the training logs of each iteration."""
    records = [record for record in train_iter(init_state(cfg), cfg) if record["log_type"] == "train"]
    return [record["logs"] for record in records]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("decoding", DECODINGS)
def test_two_iterations_change_every_group_and_log_the_gap(algorithm, decoding):
    cfg = reaching(algorithm, **{"policy.vla.decoding": decoding})
    logs, before, after = logs_of(cfg), init_state(cfg)["params"], last_state(cfg)["params"]
    assert len(logs) == 2 and all(float(log["logprob_gap"]) < 1e-5 for log in logs)
    assert all(weight.isfinite().all() for weight in after.values(True, True))
    assert all(not same(before[name], after[name]) for name in before.keys())  # noqa: SIM118
    assert ecrl.check_policy(cfg).findings == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_executed_tokens_reach_the_loss(algorithm):
    cfg = reaching(algorithm)
    run, state = build(cfg), init_state(cfg)
    _, batch = collect(run, state)
    steps = batch["steps"][:, :-1]
    assert steps["sample_log_prob"].shape == steps["action_tokens"].shape == (8, 4, 3, 2)
    executed = steps["executed"]
    assert executed.min() >= 1 and (executed < 3).any(), "some chunks end early"
    assert steps["obs", "camera"].dtype == torch.uint8
    rows = rows_of(run, batch)
    expected = [steps["sample_log_prob"].flatten(0, 1)[i, :n].sum() for i, n in enumerate(executed.flatten())]
    close(rows["sample_log_prob"], torch.stack(expected), tol=1e-5)
    other = rows.copy()
    late = torch.arange(3) >= rows["executed"].unsqueeze(-1)
    other["action_tokens"] = torch.where(late.unsqueeze(-1), 0, rows["action_tokens"])
    for one, two in zip(*(run.policy.evaluate_rows(state["params"], x) for x in (rows, other)), strict=True):
        close(one, two, tol=1e-6)


def test_executed_masks_the_first_of_several_token_axes_only():
    x = torch.arange(1.0, 13.0).reshape(2, 3, 2)
    rows = TensorDict({"done": torch.zeros(2).bool(), "executed": torch.tensor([2, 0])}, [2])
    close(sum_tokens(x, rows), [1.0 + 2.0 + 3.0 + 4.0, 0.0])
    close(sum_tokens(x[..., 0], rows), [1.0 + 3.0 + 5.0, 7.0 + 9.0 + 11.0])
    mask = torch.tensor([[[True, False], [False, True], [True, True]]] * 2)
    close(sum_tokens(x, rows.copy().set("token_mask", mask)), [1.0 + 4.0, 0.0])
    y = torch.where(torch.arange(3)[:, None] < rows["executed"][:, None, None], x, torch.nan).requires_grad_()
    sum_tokens(y, rows).sum().backward()
    assert y.grad is not None
    close(y.grad.sum((1, 2)), [4.0, 0.0])


def test_the_first_token_axis_must_be_the_chunk():
    run, state = build(reaching("ppo")), init_state(reaching("ppo"))
    rows = rows_of(run, collect(run, state)[1])

    def evaluate(params, carry, steps):
        made: Any = run.policy.evaluate
        return tuple(x.transpose(-2, -1) for x in made(params, carry, steps))

    spaces = run.env.observation_space, run.env.action_space
    wrong, right = (checked_policy(policy, *spaces) for policy in (replace(run.policy, evaluate=evaluate), run.policy))
    message = r"^policy vla: evaluate returns log_prob as float32 \[32, 2, 3\] for actions \[32, 3, 2\]; make the "
    with checking():
        right.evaluate_rows(state["params"], rows)
        with pytest.raises(ConfigError, match=message + "first token axis the axis of the 3 steps of a chunk$"):
            wrong.evaluate_rows(state["params"], rows)


def test_the_gap_is_the_largest_difference_of_a_token_that_counts():
    cfg = speaking()
    run, state = build(cfg), init_state(cfg)
    _, batch = collect(run, state)
    close(logprob_gap(run, state, batch)["logprob_gap"], 0.0, tol=1e-6)
    mask = batch["steps", "token_mask"]
    for counts, expected in ((True, 0.25), (False, 0.0)):
        env, step, token = (mask[:, :-1] == counts).nonzero()[0].tolist()
        wrong = batch["steps", "sample_log_prob"].clone()
        wrong[env, step, token] += 0.25
        other = batch.clone().set(("steps", "sample_log_prob"), wrong)
        close(logprob_gap(run, state, other)["logprob_gap"], expected, tol=1e-6)


def test_the_gap_leaves_out_the_steps_after_the_first_episode():
    vla = {"layers": 1, "width": 8, "heads": 2}
    data = {
        "trainer": {"num_envs": 4, "buffer_size": 8, "iterations": 1, "compile": "off"},
        "env": {"name": "pendulum", "action_chunk": 2, "frame_stack": 3, "cfg": {"max_episode_steps": 8}},
        "policy": {"name": "vla", "vla": vla},
        "algorithm": {"name": "grpo", "cfg": {"group_size": 4, "n_epochs": 1, "batch_size": 32}},
    }
    assert float(logs_of(load_config(data))[0]["logprob_gap"]) < 1e-5


def test_policies_without_token_axes_log_no_gap():
    cfg = load_config("cartpole_ppo", {"trainer.num_envs": 32, "trainer.buffer_size": 8, "trainer.iterations": 1})
    assert "logprob_gap" not in logs_of(cfg.replace(**{"trainer.compile": "off"}))[0]


def test_the_gap_of_a_large_batch_is_of_some_of_its_steps():
    cfg = reaching("ppo", **{"trainer.num_envs": 64})
    assert float(logs_of(cfg)[0]["logprob_gap"]) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("decoding", DECODINGS)
def test_compiled_equals_eager(algorithm, decoding):
    cfg = reaching(algorithm, **{"policy.vla.decoding": decoding})
    compiled = cfg.replace(**{"trainer.compile": "on"})
    assert all(float(log["logprob_gap"]) < 1e-4 for log in logs_of(compiled))
    one, other = last_state(cfg)["params"], last_state(compiled)["params"]
    for name, weight in one.items(True, True):
        close(other[name], weight, tol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("decoding", long_except(["parallel"], DECODINGS))
@pytest.mark.usefixtures("traced_or_compiled")
def test_one_graph_that_is_traced_once(decoding):
    cfg = reaching("grpo", **{"policy.vla.decoding": decoding, "trainer.compile": "on"})
    runs, state = [], init_state(cfg)
    iterate = make_iteration(cfg, lambda run: runs.append(run) or run)
    for _ in range(3):
        state, _ = iterate(state)
    (compilation,) = compilations_of(runs[0].jit)
    assert compilation.text.endswith("first call") and compilation.fault is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_resumed_run_has_the_same_bits(algorithm, tmp_path):
    cfg = reaching(algorithm)
    ecrl.save(tmp_path / "middle", last_state(cfg.replace(**{"trainer.iterations": 1})), cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


def test_grpo_and_ppo_need_what_they_say():
    with pytest.raises(ConfigError, match=r"^policy.name: this policy has no critic, which ppo needs"):
        init_state(reaching("ppo", **{"policy.vla.critic": None}))
    with pytest.raises(
        ConfigError, match=r"^policy.vla.action_horizon: 2, but an action of the environment has 3 steps"
    ):
        init_state(reaching("grpo", **{"policy.vla.action_horizon": 2}))
    assert init_state(reaching("grpo", **{"policy.vla.action_horizon": 3})) is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("decoding", DECODINGS)
def test_an_exported_policy_takes_the_actions_of_the_policy(decoding, tmp_path, monkeypatch):
    monkeypatch.setattr("ecrl.run.export._write_onnx", lambda *args: None)  # `policy.pt2` needs no extra
    cfg = reaching("grpo", **{"policy.vla.decoding": decoding})
    state = init_state(cfg)
    export(state, cfg, tmp_path)
    obs, _, _ = scenes(rng.key(1), 5, 16)
    action = torch.export.load(tmp_path / "policy.pt2").module()(**dict(obs.items()))
    policy = build(cfg).policy
    close(action, policy.act(state["params"], TensorDict({}, []), obs, None)[1]["action"], tol=1e-6)
    inputs = json.loads((tmp_path / "policy.json").read_text())["inputs"]
    assert [(one["name"], one["dtype"]) for one in inputs] == [
        ("camera", "uint8"),
        ("instruction", "int64"),
        ("proprio", "float32"),
    ]
