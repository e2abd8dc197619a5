"""The finite guard: what it finds, where, what is left of a run, and that a finite run never feels it."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Literal

import pytest
import torch
from pydantic import Field
from support import fake_gymnasium_envs
from support.recurrent_agent import remembering
from support.replay_agent import replaying
from support.small_runs import NET, same, small
from support.small_runs import last_state as end_of
from tensordict import TensorDict

import ecrl
from ecrl import rng
from ecrl.algorithms import interleaved
from ecrl.algorithms.core import Algorithm, collect, on_policy, start_keys
from ecrl.algorithms.state_kinds import Kind
from ecrl.cli import main as __main__
from ecrl.config import Config
from ecrl.config.model import ConfigModel
from ecrl.envs.core import Env, state_of
from ecrl.errors import CheckpointError, NotFiniteError, UserError
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build
from ecrl.loop.finite_guard import flags, undo_update
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.loop.nonfinite_report import Collected, nonfinite_error, with_checked_actions
from ecrl.registry import register_algorithm, register_env
from ecrl.run.checkpoint import load
from ecrl.run.crash import replay
from ecrl.run.train import train
from ecrl.spaces import box

assert fake_gymnasium_envs  # registers them
FORMS = [
    "off",
    pytest.param("on", marks=[pytest.mark.slow, pytest.mark.traced], id="traced"),
    pytest.param("on", marks=pytest.mark.long),
]
ALGORITHMS = {
    "ppo": {"n_epochs": 2, "batch_size": 10},
    "grpo": {"n_epochs": 2, "batch_size": 10, "reset_every_rollout": False, "truncate_at_first_done": False},
    "apg": {},
}
RUNS = [
    *((algorithm, "off") for algorithm in ALGORITHMS),
    pytest.param("ppo", "on", marks=[pytest.mark.slow, pytest.mark.traced], id="ppo-traced"),
    *(pytest.param(name, "on", marks=pytest.mark.long) for name in ALGORITHMS),
]


class FaultyConfig(ConfigModel):
    """Faults in the sixth step of env 2."""

    fault: Literal["none", "observation", "reward", "end"] = Field("none", description="what is wrong then")


@register_env("faulty")
def faulty(cfg: FaultyConfig) -> Env:
    """Return an environment with x' = 0.9 x + a, reward -x'^2 and observation x; env 2 fails in its sixth step."""

    def reset(keys):
        index = torch.arange(keys.shape[-1]).expand(keys.shape).clone()
        x = rng.uniform(keys, (1,))
        return state_of(x, keys.shape, x=x.clone(), age=torch.zeros_like(keys), index=index)

    def step(state, action, noise):
        x = 0.9 * state["x"] + action
        reward, now = -x.square()[..., 0], (state["age"] == 5) & (state["index"] == 2)
        reward = torch.where(now, torch.nan, reward) if cfg.fault == "reward" else reward
        spoilt = {"observation": torch.inf, "end": torch.nan}
        obs = torch.where(now.unsqueeze(-1), spoilt.get(cfg.fault, x), x)
        late = state["age"] == 5 if cfg.fault == "end" else torch.zeros_like(now)
        return state.copy().update({"x": x, "obs": obs, "reward": reward, "truncated": late, "age": state["age"] + 1})

    return Env(reset, step, box(-9.0, 9.0, 1), box(-9.0, 9.0, 1), lockstep=True)


def run(algorithm: str, fault: str = "none", form: str = "off", **changes) -> Config:
    policy = {"name": "actor_critic", "actor": NET, "critic": NET} if algorithm == "ppo" else {"name": "actor_only"}
    base = {
        "env": {"name": "faulty", "cfg": {"fault": fault}},
        "policy": policy | {"actor": NET},
        "algorithm": {"name": algorithm, "cfg": ALGORITHMS[algorithm]},
        "trainer.buffer_size": 4,
        "trainer.compile": form,
    }
    return small(**base).replace(**changes)


def train_states(cfg: Config, state=None) -> list:
    records = train_iter(init_state(cfg) if state is None else state, cfg)
    return [record["state"] for record in records if record["log_type"] == "train"]


def met(cfg: Config, state=None) -> tuple[NotFiniteError, list]:
    """The error, and the states before it."""
    states = []
    with pytest.raises(NotFiniteError) as error:
        for record in train_iter(init_state(cfg) if state is None else state, cfg):
            states.append(record["state"])
    return error.value, states


def spoilt(cfg: Config, *path: str, value: float = torch.nan):
    """The state after an iteration, with the first number of a field set."""
    state = train_states(cfg.replace(**{"trainer.iterations": 1, "trainer.finite_guard": "off"}))[0].clone()
    leaf = state[path].clone()
    leaf.reshape(-1)[0] = value
    state[path] = leaf
    return state


@pytest.mark.parametrize(("algorithm", "form"), RUNS)
def test_what_the_environment_gives_is_found_in_its_iteration(algorithm, form):
    cfg = run(algorithm, "reward", form)
    error, states = met(cfg)
    entry = error.report["found"]
    assert (entry["what"], entry["key"], entry["place"]) == ("reward", "reward", {"env": 2, "step": 1, "env_step": 5})
    assert error.report["met"][0] == "reward" and error.report["sample_step"] == 16 and len(states) == 2
    made = build(cfg)
    batch = made.algorithm.iterate(made, states[-1], TensorDict({}, []))[1]["batch", "steps"]
    assert entry["before"] == pytest.approx(float(batch["reward"][2, 0]), rel=1e-5)
    where = "first reward = nan in env 2, step 1 of the rollout, step 5 of that env"
    assert f"{where}, last finite value {entry['before']:.6g}; mend the environment" in str(error)
    error, states = met(run(algorithm, "observation", form))
    entry = error.report["found"]
    assert (entry["key"], entry["place"]) == ("obs", {"env": 2, "step": 2, "env_step": 6})
    assert entry["value"] == [torch.inf] and entry["before"] == pytest.approx(batch["obs"][2, 1].tolist(), rel=1e-5)
    assert error.report["met"][0] == "observation" and same(error.state, states[-1])


@pytest.mark.parametrize("form", FORMS)
def test_the_faulty_iteration_of_a_record_of_several_iterations_is_found(form):
    cfg = run("ppo", "reward", form)
    alone, states = met(cfg)
    error, earlier = met(cfg.replace(**{"trainer.log_freq": 4}))
    assert str(error) == str(alone) and same(error.state, alone.state)
    assert error.report["sample_step"] == 16, "the second of four iterations"
    assert len(earlier) == 2 and same(earlier[-1], states[-1]), "the record of the first iteration is not lost"


def test_an_observation_at_a_time_limit_is_found_by_its_value():
    error, _ = met(run("ppo", "end"))
    entry = error.report["found"]
    assert (entry["key"], entry["place"], entry["before"]) == (
        "final_value",
        {"env": 2, "step": 1, "env_step": 5},
        None,
    )
    assert "final_value = nan in env 2, step 1 of the rollout, step 5 of that env, no value before it; " in str(error)
    assert (
        "final_value is the value of the observation at a time limit: mend the environment if the observation is not "
        "finite" in str(error)
    )


def test_the_last_value_before_the_first_step_of_a_rollout_is_of_the_state():
    cfg = run("ppo", "reward", **{"trainer.buffer_size": 5})
    error, states = met(cfg)
    assert error.report["found"]["place"] == {"env": 2, "step": 0, "env_step": 5}
    assert error.report["found"]["before"] == float(states[-1]["env", "reward"][2])


@pytest.mark.parametrize(("algorithm", "form"), RUNS)
def test_what_the_policy_gives_is_found(algorithm, form):
    cfg = run(algorithm, form=form)
    error, states = met(cfg, spoilt(cfg, "params", "actor", "2.bias"))
    assert {"action", "parameters"} <= set(error.report["met"])
    assert error.report["found"]["key"] == "action" and states == []
    assert error.report["found"]["place"] == {"env": 0, "step": 0, "env_step": 4}
    assert "action = [nan] in env 0, step 0 of the rollout" in str(error)
    assert error.state["params", "actor", "2.bias"].isnan().any() and int(error.state["sample_step"]) == 16


LOSS = ["loss", "gradient", "parameters"]
CASES = {
    "ppo-loss": ("ppo", ("hyper", "ent_coef"), torch.nan, LOSS, "loss"),
    "ppo-gradient": ("ppo", ("hyper", "ent_coef"), 3e37, ["gradient"], "grad_norm"),
    "ppo-parameters": ("ppo", ("hyper", "learning_rate"), torch.inf, ["parameters"], "params.actor"),
    "grpo-loss": ("grpo", ("hyper", "ent_coef"), torch.nan, LOSS, "loss"),
    "grpo-gradient": ("grpo", ("hyper", "ent_coef"), 3e37, ["gradient"], "grad_norm"),
    "grpo-reference": (
        "grpo",
        ("ref_params", "actor", "2.bias"),
        torch.nan,
        ["loss"],
        "kl_ref",
    ),  # no gradient beyond the bound of a log-ratio
    "apg-loss": ("apg", ("hyper", "ent_coef"), torch.nan, LOSS, "gradient.log_std"),
}


@pytest.mark.filterwarnings("ignore:the state's hyperparameters are used")
@pytest.mark.parametrize("case", CASES)
def test_what_learning_gives_is_found(case):
    algorithm, path, value, what, key = CASES[case]
    steps = {} if algorithm == "apg" else {"algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 16}
    cfg = run(algorithm, **steps)
    error, _ = met(cfg, spoilt(cfg, *path, value=value))
    entry = error.report["found"]
    assert error.report["met"] == what and entry["key"] == key
    assert entry["place"] == ({"step": 3} if algorithm == "apg" else {"epoch": 0, "minibatch": 0})
    assert f"first {key} = " in str(error) and "lower the learning rate" in str(error)


def test_a_loss_is_found_by_epoch_and_minibatch_with_the_value_before():
    cfg = run("ppo", **{"algorithm.cfg.learning_rate": 1e30, "algorithm.cfg.n_epochs": 3})
    error, _ = met(cfg)
    entry = error.report["found"]
    assert entry["place"]["epoch"] == 0 and entry["place"]["minibatch"] == 1 and entry["what"] == "loss"
    assert torch.isfinite(torch.tensor(entry["before"])) and "in epoch 0, minibatch 1, last finite value" in str(error)


def test_masked_steps_and_what_is_not_used_do_not_count():
    """GRPO learns from the first episode of a rollout only; what comes behind it may be anything."""
    cfg = run("grpo", "observation", **{"trainer.buffer_size": 8, "trainer.iterations": 1})
    error, _ = met(cfg)
    assert error.report["found"]["place"] == {"env": 2, "step": 6, "env_step": 6}
    parts, state = build(cfg), init_state(cfg)
    state, batch = parts.algorithm.iterate.collect(parts, state)
    steps = batch["steps"]
    steps["mask"] = torch.arange(9).expand(4, 9) < 6
    logs = {"loss": torch.tensor(0.0)}
    assert not flags(steps, logs, state["params"]).any()
    steps["mask"] = torch.arange(9).expand(4, 9) < 7
    assert flags(steps, logs, state["params"])[0].tolist() == [True] + 5 * [False]


@pytest.mark.parametrize(("algorithm", "form"), RUNS)
def test_a_finite_run_is_the_same_to_the_bit_whatever_the_guard(algorithm, form):
    ends = [end_of(run(algorithm, form=form, **{"trainer.finite_guard": guard})) for guard in ("stop", "skip", "off")]
    assert same(ends[0], ends[2]) and same(ends[1], ends[2])


def test_off_looks_at_nothing():
    cfg = run("ppo", "reward", **{"trainer.finite_guard": "off"})
    assert not all(x.isfinite().all() for x in train_states(cfg)[-1]["params"].values(True, True))


@pytest.mark.parametrize("fault", ["reward", "observation"])
@pytest.mark.parametrize(("algorithm", "form"), RUNS)
def test_skip_leaves_the_update_out_and_continues_without_it(algorithm, fault, form):
    more = {"policy.normalize_obs": True} | ({"algorithm.cfg.normalize_reward": True} if algorithm == "ppo" else {})
    cfg = run(algorithm, fault, form, **more, **{"trainer.finite_guard": "skip", "trainer.iterations": 5})
    with pytest.warns(
        UserWarning, match=r"^after 16 env steps: NaN or infinity in .*\(this warning appears once\)$"
    ) as caught:
        records = list(train_iter(init_state(cfg), cfg))
    states = [r["state"] for r in records if r["log_type"] == "train"]
    counted = [float(r["logs"]["skipped_updates"]) for r in records if r["log_type"] == "train"]
    assert len(caught) == 1 and counted == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert [int(s["update_step"]) for s in states] == [1, 1, 2, 3, 4]
    unchanged = ("params", "opt", "norm", "hyper", "update_step")
    old, new = (state.select(*unchanged).exclude(("norm", "reward", "running")) for state in states[:2])
    assert same(old, new)
    fields = [x for x in states[-1].values(True, True) if x.is_floating_point()]
    assert all(x.isfinite().all() for x in fields) and not same(states[1]["params"], states[2]["params"])
    off = cfg.replace(**{"trainer.finite_guard": "off"})
    world = train_states(off, states[0])[0]  # the same iteration, learnt from
    assert same(world["env"], states[1]["env"])
    without = states[1].copy().update({"env": world["env"]})
    assert same(train_states(off, without)[0], states[2])


def test_running_returns_move_on_with_the_environments_of_a_skipped_iteration():
    """After two iterations of 4 steps. The reward of env 2 is NaN in the second step of the second iteration.

    Expected are the discounted rewards of all 8 steps, from a loop over the collected batches.
    """
    changes = {"algorithm.cfg.normalize_reward": True, "trainer.iterations": 2, "trainer.finite_guard": "skip"}
    cfg = run("ppo", "reward", **changes)
    made, state = build(cfg), init_state(cfg)
    expected = torch.zeros(4)
    with pytest.warns(UserWarning, match="NaN or infinity in reward"):
        states = train_states(cfg, state)
    for start in (state, states[0]):
        _, batch = made.algorithm.iterate.collect(made, start)
        for reward in batch["steps", "reward"][:, :-1].unbind(1):
            expected = reward + cfg.algorithm.cfg.gamma * expected
    assert expected.isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(states[1]["norm", "reward", "running"], expected.nan_to_num(0.0))
    assert same(states[0]["norm", "reward", "moments"], states[1]["norm", "reward", "moments"])


def test_only_the_kind_of_a_leaf_decides_what_a_skipped_iteration_leaves_out():
    cfg = run("ppo")
    start, flags_set = init_state(cfg), torch.tensor([False, False, False, True, False, False])
    fields = {"noise": torch.zeros(4), "rate": torch.zeros(4)}
    start = TensorDict({**dict(start.items()), "explore": TensorDict(fields, [])}, [])
    end = start.copy().set("explore", start["explore"] + 1.0)
    named: dict = kinds_of(build(cfg))
    for kinds, moved in (
        ({"explore": Kind.COUNTER, ("explore", "noise"): Kind.ENVIRONMENT}, (1.0, 0.0)),
        ({"explore": Kind.ENVIRONMENT, ("explore", "rate"): Kind.COUNTER}, (1.0, 0.0)),
        ({"explore": Kind.ENVIRONMENT}, (1.0, 1.0)),
        ({"explore": Kind.STATISTICS}, (0.0, 0.0)),
    ):
        after = undo_update(flags_set, start, end, {**named, **kinds})["explore"]
        assert (float(after["noise"][0]), float(after["rate"][0])) == moved


def test_skip_leaves_out_single_gradient_steps_and_warns_once(monkeypatch):
    def once_per_epoch(run, params, batch, mask, hyper):
        """The loss; NaN for the minibatch with the largest advantage, which is in one minibatch of each epoch."""
        value, logs = right(run, params, batch, mask, hyper)
        return value * torch.where((batch["advantage"] == largest[0]).any(), torch.nan, 1.0), logs

    def advantages(run, hyper, rollout):
        fields = made(run, hyper, rollout)
        largest[:] = [fields["advantage"].max()]
        return fields

    ppo = sys.modules["ecrl.algorithms.ppo"]  # the package has the function of that name
    right, made, largest = ppo.loss, ppo.advantages, []
    monkeypatch.setattr(ppo, "loss", once_per_epoch)
    monkeypatch.setattr(ppo, "advantages", advantages)
    cfg = run("ppo", **{"trainer.finite_guard": "skip", "trainer.iterations": 3})
    with pytest.warns(
        UserWarning, match=r"^after 0 env steps: .* 2 gradient steps are left out; .*appears once\)$"
    ) as caught:
        records = [r for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert len(caught) == 1
    for record in records:
        logs = record["logs"]
        assert (float(logs["skipped_steps"]), float(logs["skipped_updates"])) == (2.0, 0.0)
        assert all(log.isfinite() for log in logs.values())
    assert [int(r["state"]["update_step"]) for r in records] == [1, 2, 3]


def test_an_iteration_of_its_own_leaves_updates_out_and_never_stops():
    cfg = run("ppo", "reward", **{"trainer.finite_guard": "skip"})
    iteration, state = make_iteration(cfg), init_state(cfg)
    first, _ = iteration(state)
    second, logs = iteration(first)
    assert float(logs["train"]["skipped_updates"]) == 1.0 and same(first["params"], second["params"])
    _, logs = torch.vmap(iteration)(torch.stack([first.clone(), first.clone()]))
    assert logs["train"]["skipped_updates"].tolist() == [1.0, 1.0]
    stops = make_iteration(cfg.replace(**{"trainer.finite_guard": "stop"}))
    assert stops(first)[1]["train"]["value_loss"].isnan()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", ["reward", "gradient"])
def test_the_crash_folder_repeats_the_iteration(fault, form, tmp_path, monkeypatch, capsys):
    cfg, folder = run("ppo", fault if fault == "reward" else "none", form), tmp_path / "run"
    state = init_state(cfg)
    if fault == "gradient":
        state = train_states(cfg.replace(**{"trainer.iterations": 1}))[0].clone()
        state["hyper", "ent_coef"] = torch.tensor(3e37)
    else:
        before = train_states(cfg.replace(**{"trainer.iterations": 1}))[0]
    warned = pytest.warns(UserWarning) if fault == "gradient" else nullcontext()
    # --import, because this module registers the environment
    repeat = rf"; repeat the iteration with: ecrl replay {folder}/crash --import test_finite_guard$"
    with warned, pytest.raises(NotFiniteError, match=repeat) as error:
        train(state, cfg, folder, progress=False)
    report = json.loads((folder / "crash" / "report.json").read_text())
    assert report["met"] == error.value.report["met"] and report["form"] == ("eager" if form == "off" else "compiled")
    if fault == "reward":
        saved = [load(folder / name)[0] for name in ("crash", "checkpoints/step_16")]
        assert all(same(state.exclude("iterations"), before.exclude("iterations")) for state in saved)
    monkeypatch.setattr(sys, "argv", ["ecrl", "replay", str(folder / "crash")])
    with pytest.warns(UserWarning) if fault == "gradient" else nullcontext():
        __main__.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == f"{report['form']}: NaN or infinity in {', '.join(report['met'])} again"
    assert lines[-1] == f"eager, step by step: {error.value.args[0].partition('; repeat the iteration')[0]}"


def test_a_folder_that_is_no_crash_is_refused(tmp_path):
    with pytest.raises(NotFiniteError):
        train(init_state(cfg := run("ppo", "reward")), cfg, tmp_path / "run", progress=False)
    report = tmp_path / "run" / "crash" / "report.json"
    for folder in (tmp_path, report, tmp_path / "run" / "checkpoints" / "step_16"):
        with pytest.raises(UserError, match=r"no report.json: expected the crash folder of a run, such as RUN/crash"):
            list(replay(folder))
    report.write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"report.json: damaged: its checksum differs from the checksum in the manifest"
    ):
        list(replay(report.parent))


def drifting(fault: str, guard: str, **kwargs) -> Config:
    """Environments with odd seeds fail at step 3, the first of the second iteration."""
    env = {"name": "gymnasium", "cfg": {"id": "Drift-v0", "kwargs": {"fault": fault, **kwargs}}}
    more = {"env": env, "trainer.buffer_size": 2, "trainer.finite_guard": guard, "trainer.iterations": 5}
    return run("ppo", **more).replace(**{"algorithm.cfg.batch_size": 8})


def envs_with_odd_seeds(cfg: Config) -> list[int]:
    """Return the environments whose reset gets an odd seed."""
    seeds = rng.bits(start_keys(rng.key(cfg.trainer.seed), 4, 0)) & 0x7FFFFFFF
    return [i for i, seed in enumerate(seeds.tolist()) if seed % 2]


@pytest.mark.parametrize("fault", ["obs", "reward"])
def test_gymnasium_stops_in_the_same_iteration_and_reports_what_cannot_be_repeated(fault, tmp_path):
    cfg = drifting(fault, "stop", strict=True)  # what it observes is NaN, so is the next action: it is not taken
    with pytest.raises(NotFiniteError, match="; the state before the iteration is in ") as error:
        train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    entry, before = error.value.report["found"], load(tmp_path / "run" / "checkpoints" / "step_8")[0]
    env, reached = envs_with_odd_seeds(cfg)[0], {"obs": (1, 3), "reward": (0, 2)}[fault]
    place = dict(zip(("env", "step", "env_step"), (env, *reached), strict=True))
    last = {"obs": before["env", "obs"][env].tolist(), "reward": float(before["env", "reward"][env])}[fault]
    assert (entry["key"], entry["place"], entry["before"]) == (fault, place, last)
    assert error.value.report["met"][0] == {"obs": "observation", "reward": "reward"}[fault]
    crash = load(tmp_path / "run" / "crash")[0]
    assert same(crash.exclude("env"), before.exclude("env")) and torch.equal(crash["env", "obs"], before["env", "obs"])
    assert "; mend the environment, or set" in str(error.value)
    *_, last = replay(tmp_path / "run" / "crash")
    assert (
        last == "environments of gymnasium:Drift-v0 keep data outside of the state, so their steps cannot be repeated"
    )


def test_an_action_that_no_environment_is_given_is_found_in_the_middle_of_a_rollout():
    cfg = drifting("obs", "stop", strict=True).replace(**{"trainer.buffer_size": 8})
    error, states = met(cfg)
    place = {"env": envs_with_odd_seeds(cfg)[0], "step": 3, "env_step": 3}
    entry = error.report["found"]
    assert (entry["place"], entry["value"][0] != entry["value"][0], entry["before"]) == (place, True, [2.0])
    assert "nan] in env" in str(error) and "step 3 of the rollout, step 3 of that env" in str(error) and not states


@pytest.mark.parametrize("fault", ["obs", "reward"])
def test_gymnasium_goes_on_where_updates_are_left_out_and_where_nothing_looks(fault):
    cfg = drifting(fault, "skip")
    with pytest.warns(UserWarning, match=r"^after 8 env steps: NaN or infinity in .*\(this warning appears once\)$"):
        records = [r for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert [float(r["logs"]["skipped_updates"]) for r in records] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert same(records[0]["state"]["params"], records[1]["state"]["params"])
    assert all(x.isfinite().all() for x in records[-1]["state"]["params"].values(True, True))
    off = drifting(fault, "off")
    assert not all(x.isfinite().all() for x in train_states(off)[-1]["params"].values(True, True))


@pytest.mark.parametrize("what", ["action", "log_prob", "loss"])
def test_on_gymnasium_what_policy_and_learning_give_is_found_in_the_batch_itself(what):
    name = "Pendulum-v1" if what == "action" else "Count-v0"
    cfg = run("ppo", **{"env": f"gymnasium:{name}"})
    state = init_state(cfg).clone()
    path = ("hyper", "ent_coef") if what == "loss" else ("params", "actor", "2.bias")
    state[path] = torch.full_like(state[path], torch.nan)
    with pytest.warns(UserWarning) if what == "loss" else nullcontext():
        error, _ = met(cfg, state)
    entry = error.report["found"]
    expected = {
        "action": ("action", {"env": 0, "step": 0, "env_step": 0}),
        "log_prob": ("sample_log_prob", {"env": 0, "step": 0, "env_step": 0}),
        "loss": ("loss", {"epoch": 0, "minibatch": 0}),
    }
    assert (entry["key"], entry["place"]) == expected[what] and int(error.state["sample_step"]) == 0


def test_the_check_of_actions_leaves_compiled_functions_valid_for_the_next_iteration():
    made = build(small(**{"env": "gymnasium:CartPole-v1"}))
    checked = with_checked_actions(made)
    assert checked == with_checked_actions(made) and hash(checked) == hash(with_checked_actions(made))
    assert checked != made


def test_the_search_needs_no_names_of_logs(monkeypatch):
    """The loss of the second of 7 minibatches is NaN. Its first log is `u`. A log of the first minibatch overflows."""
    ppo, calls = sys.modules["ecrl.algorithms.ppo"], []
    right = ppo.loss

    def loss(run, params, batch, mask, hyper):
        value, logs = right(run, params, batch, mask, hyper)
        calls.append(None)
        factor = torch.nan if len(calls) % 7 == 2 else 1.0
        overflow = torch.tensor(torch.inf if len(calls) % 7 == 1 else 1.0)
        parts = {f"x{i}": log * factor for i, log in enumerate(logs.values())}
        return value * factor, {"u": value.detach() * factor, **parts, "w": overflow, "approx_kl": logs["approx_kl"]}

    monkeypatch.setattr(ppo, "loss", loss)
    cfg = run("ppo", **{"trainer.buffer_size": 16, "algorithm.cfg.n_epochs": 1, "algorithm.cfg.batch_size": 10})
    error, _ = met(cfg)
    found = error.report["found"]
    assert (found["key"], found["place"], found["what"]) == ("u", {"epoch": 0, "minibatch": 1}, "loss")
    assert found["value"] != found["value"] and torch.isfinite(torch.tensor(found["before"]))
    assert "first u = nan in epoch 0, minibatch 1, last finite value" in str(error)


class LoopConfig(ConfigModel):
    """An algorithm with a loop of its own."""

    bad_step: int = Field(2, description="step of the loop whose number is NaN")


def own_loop(cfg: LoopConfig) -> Algorithm:
    """Move the parameters in a loop of 4 steps. Its log `q` becomes NaN with them. Another log is always NaN."""

    def init(run, key):
        return {"params": run.policy.init(key), "opt": TensorDict({}, []), "hyper": TensorDict({}, [])}

    def step(params, x):
        size = torch.where(x == cfg.bad_step, torch.nan, 1e-3)
        return params.apply(lambda p: p + size), (x, {"always_nan": size * torch.nan, "q": size.clone()})

    def update(run, state, batch):
        params, (_, logs) = run.scan(step, state["params"], torch.arange(4))
        return state.copy().update({"params": params}), {name: log.mean() for name, log in logs.items()}

    return Algorithm((), init, on_policy(collect, update))


def test_a_loop_of_an_algorithm_is_searched_step_by_step():
    register_algorithm("own_loop", override=True)(own_loop)
    error, _ = met(run("ppo").replace(algorithm={"name": "own_loop", "cfg": {}}))
    found = error.report["found"]
    assert error.report["met"] == ["parameters"]
    assert (found["key"], found["place"], found["before"]) == ("q", {"loop_step": 2}, pytest.approx(1e-3))
    assert "first q = nan in step 2 of a loop, last finite value 0.001" in str(error)


def test_a_turn_of_an_off_policy_algorithm_is_found():
    cfg = replaying(**{"algorithm.cfg.batch_size": 8, "trainer.iterations": 2})
    state = train_states(cfg.replace(**{"trainer.iterations": 1}))[0].clone()
    state["hyper", "gamma"] = torch.tensor(torch.nan)
    with pytest.warns(UserWarning, match="the state's hyperparameters are used"):
        error, _ = met(cfg, state)
    found = error.report["found"]
    assert found["key"] == "loss" and found["place"] == {"turn": 0, "epoch": 0, "minibatch": 0}
    assert "first loss = nan in turn 0, epoch 0, minibatch 0" in str(error)


def test_a_log_that_is_nan_in_good_turns_is_not_the_first_nan(monkeypatch):
    """Only the slow weights become NaN in the first turn; the loss does in the second turn."""
    cfg = replaying(**{"trainer.iterations": 1})
    inner = build(cfg).algorithm

    def turn(run, state, noise, replay):
        state, replay, steps, logs = inner.iterate.turn(run, state, noise, replay)
        return state, replay, steps, {"episode_q": torch.tensor(torch.nan), **logs}

    def build_with_log(cfg):
        return build(cfg)._replace(algorithm=replace(inner, iterate=interleaved(turn)))

    monkeypatch.setattr("ecrl.loop.iteration.build", build_with_log)
    assert len(train_states(cfg)) == 1, "a run with this log is a good run"
    state = init_state(cfg).clone()
    state["hyper", "tau"] = torch.tensor(torch.nan)
    with pytest.warns(UserWarning, match="the state's hyperparameters are used"):
        error, _ = met(cfg, state)
    found = error.report["found"]
    assert found["key"].startswith("target_params.critic") and found["place"] == {"turn": 0}
    assert torch.isfinite(torch.tensor(found["before"]))


@pytest.mark.parametrize(
    ("number", "value", "key"), [("gamma", torch.nan, "loss"), ("learning_rate", torch.inf, "loss")]
)
def test_an_off_policy_iteration_on_gymnasium_is_reported_from_its_results(number, value, key, tmp_path):
    cfg = replaying(**{"env": "gymnasium:CartPole-v1", "trainer.enable_eval": False})
    state = init_state(cfg).clone()
    state["hyper", number] = torch.tensor(value)
    with (
        pytest.warns(UserWarning, match="the state's hyperparameters are used"),
        pytest.raises(NotFiniteError, match=f"first {key} = nan, no value before it; lower the learning rate") as error,
    ):
        train(state, cfg, tmp_path / "run", progress=False)
    assert error.value.report["met"] == LOSS and error.value.report["found"]["place"] == {}
    assert int(load(tmp_path / "run" / "crash")[0]["sample_step"]) == 0


def test_an_update_from_the_memories_of_a_batch_is_repeated_on_gymnasium():
    sizes = {"trainer.num_envs": 2, "algorithm.cfg.segment_length": 4, "algorithm.cfg.batch_size": 8}
    cfg = remembering(**{"env": "gymnasium:CartPole-v1", **sizes})
    state = init_state(cfg).clone()
    state["hyper", "clip_coef"] = torch.tensor(torch.nan)
    with pytest.warns(UserWarning, match="the state's hyperparameters are used"):
        error, _ = met(cfg, state)
    assert error.report["repeated"] and error.report["found"]["key"] == "policy_loss"
    assert error.report["found"]["place"] == {"epoch": 0, "minibatch": 0}
    ecrl.close(state, cfg)


def test_a_reward_in_an_off_policy_iteration_on_gymnasium_is_found_in_its_steps():
    env = {"name": "gymnasium", "cfg": {"id": "Count-v0"}}
    cfg = replaying(**{"env": env})
    run, state = build(cfg), init_state(cfg)
    _, batch = run.algorithm.iterate.collect(run, state)
    steps = batch["steps"]
    steps["reward"][1, 2] = torch.nan
    nonfinite = flags(steps, {}, state["params"])
    error = nonfinite_error(run, state, nonfinite, Collected(state, batch, {}))
    assert error.report["found"]["place"] == {"env": 1, "step": 2, "env_step": 2}
    assert "first reward = nan in env 1, step 2 of the rollout" in str(error)
    steps["reward"][1, 2] = 0.0
    error = nonfinite_error(run, state, nonfinite, Collected(state, batch, {}))
    assert "; the results of the iteration are finite on this rank; mend the environment" in str(error)
