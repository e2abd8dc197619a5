"""Features of a run that every algorithm with a Q-function has, from Gymnasium environments to exported policies."""

import json
from importlib import import_module
from itertools import islice
from typing import Any

import pytest
import support.chunks  # noqa: F401  # registers chunks and repeated_pole
import torch
from support.checks import close
from support.command_line import called
from support.off_policy_agents import AGENTS, WITH_REPLAY, N, T, agent, is_continuous
from support.small_runs import last_state, same
from tensordict import TensorDict

import ecrl
from ecrl.config import Config
from ecrl.errors import ConfigError, NotFiniteError
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import acting_params
from ecrl.run.checkpoint import load, save

SHORT = {"trainer.iterations": 2}
"""One iteration that only collects, if the agent has a replay buffer, and one that learns."""


def assert_learnt(before: TensorDict, after: TensorDict) -> None:
    """Check that the parameters changed and are finite."""
    weights = [*after["params"].values(True, True)]
    assert all(weight.isfinite().all() for weight in weights)
    assert not same(before["params"], after["params"])


def on_gymnasium(name: str, **cfg: Any) -> TensorDict:
    """The last state of an agent on the environment of Gymnasium."""
    env = f"gymnasium:{'Pendulum' if is_continuous(name) else 'CartPole'}-v1"
    cfg = agent(name, **{**SHORT, "env": {"name": env, "cfg": cfg}, "policy.normalize_obs": True})
    start = init_state(cfg)
    state = last_state(cfg, start)
    ecrl.close(state, cfg)
    assert_learnt(start, state)
    return state


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_learns_on_gymnasium(name):
    pytest.importorskip("gymnasium")
    state = on_gymnasium(name)
    assert float(state["norm", "obs", "count"]) == int(state["sample_step"]) == N * T * 2


ONE = torch.tensor(1.0)
WRONG_LOSSES = {  # what the loss returns, and the line
    "no logs": (ONE, "returns float32 [], expected 2: (loss, logs); return these values"),
    "logs of None": ((ONE, None), "returns NoneType None as logs, expected a dict of 0-d tensors; return one"),
    "a number": ((ONE, {"x": 0.5}), "returns the log x as float 0.5, expected a 0-d tensor; return one"),
    "rows": ((torch.ones(2), {}), "returns the loss as float32 [2], expected a 0-d tensor; return its mean"),
    "a number as the loss": ((0.5, {}), "returns the loss as float 0.5, expected a 0-d tensor; return one"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_a_loss_of_a_group_that_breaks_its_contract(case, monkeypatch):
    out, line = WRONG_LOSSES[case]
    monkeypatch.setattr(import_module("ecrl.algorithms.dqn"), "loss", lambda *args: out)
    with pytest.raises(ConfigError) as error:
        last_state(agent("dqn", **SHORT))
    assert str(error.value) == f"algorithm dqn: loss {line}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "td3", "fast_td3", "fast_sac"])
def test_an_agent_learns_the_same_from_worker_processes(name):
    pytest.importorskip("gymnasium")
    here, in_workers = (on_gymnasium(name, asynchronous=parallel).exclude("env") for parallel in (False, True))
    assert same(here, in_workers)


@pytest.mark.parametrize("name", AGENTS)
def test_vmapped_seeds_equal_single_ones(name):
    cfg = agent(name)
    iteration = make_iteration(cfg)
    states = [init_state(cfg.replace(**{"trainer.seed": seed})) for seed in range(2)]
    many: Any = torch.stack([state.clone() for state in states])
    for _ in range(2):
        many, _ = torch.func.vmap(iteration, randomness="error")(many)
        states = [iteration(state)[0] for state in states]
    assert not same(states[0]["params"], states[1]["params"])
    for seed, single in enumerate(states):
        for path, leaf in single.items(True, True):
            torch.testing.assert_close(many[seed][path], leaf, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", WITH_REPLAY)
def test_an_action_that_takes_several_steps_is_stored_with_its_steps(name, tmp_path):
    env = {"name": "chunks" if is_continuous(name) else "repeated_pole"}
    cfg = agent(name, **{**SHORT, "env": env, "trainer.save_replay": False})
    start = init_state(cfg)
    state = last_state(cfg, start)
    assert_learnt(start, state)
    executed = state["replay", "steps", "executed"]
    assert executed.shape == (cfg.algorithm.cfg.capacity // N, N) and not executed[2 * T :].any()
    assert int(executed.sum()) == int(state["sample_step"]) > int(state["decision_step"]) == N * T * 2
    save(tmp_path / "without", state.exclude("replay"), cfg)
    again, _ = load(tmp_path / "without")
    empty = start["replay"].clone().set("written", torch.tensor(2 * T))
    assert same(again["replay"], empty) and same(again["params"], state["params"])


@pytest.mark.parametrize("name", WITH_REPLAY)
def test_the_statistics_are_those_of_the_raw_observations_in_the_buffer(name):
    cfg = agent(name, **{**SHORT, "policy.normalize_obs": True})
    state = last_state(cfg)
    norm, stored = state["norm", "obs"], state["replay", "steps", "obs"][: 2 * T].flatten(0, 1)
    assert float(norm["count"]) == len(stored)
    close(norm["mean"], stored.mean(0), tol=1e-5)


@pytest.mark.parametrize("name", AGENTS)
def test_an_iteration_with_nan_is_left_out(name):
    cfg = agent(name, **{"trainer.finite_guard": "skip", "policy.normalize_obs": True})
    state = last_state(cfg.replace(**SHORT)).clone()
    state["env", "obs"][1] = torch.nan
    with pytest.warns(UserWarning, match="NaN or infinity in observation.*: the update is left out"):
        _, record = islice(train_iter(state, cfg), 2)
    after = record["state"]
    assert float(record["logs"]["skipped_updates"]) == 1.0
    learnt = [field for field in ("params", "target_params", "opt", "norm") if field in state]
    assert all(same(after[field], state[field]) for field in learnt)
    assert int(after["update_step"]) == 2 and int(after["sample_step"]) == 3 * N * T
    assert "replay" not in after or int(after["replay", "cursor"]) == 2 * T


@pytest.mark.parametrize("name", AGENTS)
def test_the_crash_folder_repeats_the_iteration(name, tmp_path, monkeypatch, capsys):
    cfg = agent(name, **SHORT)
    state = next(r["state"] for r in train_iter(init_state(cfg), cfg)).clone()
    state["hyper", "gamma"] = torch.tensor(torch.nan)
    with pytest.warns(UserWarning, match="hyperparameters are used"), pytest.raises(NotFiniteError) as error:
        ecrl.train(state, cfg, tmp_path / "run", progress=False)
    crash = tmp_path / "run" / "crash"
    assert same(load(crash)[0].exclude("hyper"), state.exclude("hyper"))
    with pytest.warns(UserWarning, match="hyperparameters are used"):
        assert called(monkeypatch, "replay", crash) == 0
    message = error.value.args[0].partition("; repeat the iteration")[0]
    assert "first q_loss = nan in " in message
    assert capsys.readouterr().out.splitlines()[-1] == f"eager, step by step: {message}"


def scheduled(name: str, **lengths: int) -> tuple[TensorDict, list[float]]:
    """The parameters and the logged learning rates of three iterations. A logged rate is the mean of an iteration."""
    kwargs = {"start_factor": 1.0, "end_factor": 0.2, **lengths}
    schedule = {"algorithm.cfg.lr_scheduler": {"name": "linear", "kwargs": kwargs}}
    cfg = agent(name, **schedule, **{"trainer.iterations": 3})
    records = [r for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    return records[-1]["state"]["params"], [float(r["logs"].get("learning_rate", 0.0)) for r in records]


@pytest.mark.parametrize("name", AGENTS)
def test_a_schedule_of_the_whole_run_ends_with_the_run(name):
    """A turn of 2 steps is half an iteration, and has a learning rate of its own."""
    params, rates = scheduled(name)
    middle = 0.0 if name == "pqn" else 1.0 / 4.0  # mean time in an iteration of one or two turns, in iterations
    assert rates[1:] == pytest.approx([0.02 * (1.0 - 0.8 * (i + middle) / 3.0) for i in (1, 2)], rel=1e-5)
    assert same(params, scheduled(name, total_iters=3)[0])
    rates = scheduled(name, total_iters=2)[1]
    assert rates[1:] == pytest.approx([0.02 * (1.0 - 0.8 * (1.0 + middle) / 2.0), 0.02 * 0.2], rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "name",
    [name if name in ("dqn", "pqn", "sac") else pytest.param(name, marks=pytest.mark.long) for name in AGENTS],
)
def test_the_commands_train_resume_evaluate_plot_and_export_a_run(name, tmp_path, monkeypatch, capsys):
    evaluation = {"trainer.enable_eval": True, "trainer.eval_freq": N * T, "trainer.num_eval_envs": 2}
    cfg = agent(name, **{**SHORT, **evaluation, "trainer.save_freq": N * T, "policy.normalize_obs": True})
    (tmp_path / "config.json").write_text(json.dumps(cfg.model_dump(mode="json")))
    run = tmp_path / "run"
    assert called(monkeypatch, "train", tmp_path / "config.json", "--run-dir", run) == 0
    assert called(monkeypatch, "train", "--resume", run, "--trainer.iterations", "3", "--force") == 0
    capsys.readouterr()
    state, _ = load(run / "checkpoints" / f"step_{3 * N * T}")
    assert called(monkeypatch, "eval", run, "--num-episodes", "4") == 0
    expected = ecrl.evaluate(state, cfg, num_episodes=4)["eval/avg_reward"]
    assert f"avg_reward    {expected:.2f}" in capsys.readouterr().out
    assert called(monkeypatch, "plot", run, "--out", tmp_path / "curves.png") == 0
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert called(monkeypatch, "export", run, "--out", tmp_path / "policy") == 0
    program, params = (
        torch.export.load(tmp_path / "policy" / "policy.pt2"),
        acting_params(state["params"], state["norm"]),
    )
    obs = state["env", "obs"]
    action = build(cfg).policy.act(params, TensorDict({}, []), obs, None)[1]["action"]
    close(program.module()(obs=obs), action, tol=1e-5)


def train_logs(cfg: Config, steps: int) -> list[dict[str, torch.Tensor]]:
    """The logs of the updates in 12 steps of each environment, in iterations of some steps."""
    cfg = cfg.replace(**{"trainer.buffer_size": steps, "trainer.iterations": 12 // steps})
    return [record["logs"] for record in train_iter(init_state(cfg), cfg) if record["log_type"] == "train"]


@pytest.mark.parametrize("name", ["td3", "sac", "discrete sac", "fast_td3", "fast_sac"])
def test_the_logs_of_the_actor_are_means_over_the_steps_that_move_it(name):
    changes = {"learning_starts": 0, "gradient_steps": 1, "policy_delay": 3}
    cfg = agent(name, **{f"algorithm.cfg.{key}": value for key, value in changes.items()})
    turns, (whole,) = train_logs(cfg, 2), train_logs(cfg, 12)
    present = [{log for log, value in logs.items() if not value.isnan()} for logs in turns]
    assert present[2] == present[5] == {*whole} and present[0] == present[1] == present[3] == present[4]
    assert {*whole} - present[0] == {*build(cfg).algorithm.delayed} & {*whole} >= {"policy_loss", "grad_norm"}
    for log, value in whole.items():
        close(value, torch.stack([logs[log] for logs in turns]).nanmean())
