"""Actions that are chunks of steps: `executed` discounts the returns and counts the steps, and 1 changes nothing."""

import json
import shutil
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch
from support.checks import close
from support.chunks import chunked, next_place, step_reward
from support.small_runs import last_state, same, small
from tensordict import TensorDict

import ecrl
from ecrl.algorithms.core import collect, scaled_rewards
from ecrl.env_check.check import check_env
from ecrl.envs import auto_reset, make_env
from ecrl.errors import NotFiniteError
from ecrl.kernels import compute_gae, grpo_advantages
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, is_due, train_iter
from ecrl.run import evaluation
from ecrl.run.resume import pending_evaluation

GRPO = {"name": "grpo", "cfg": {"group_size": 2, "n_epochs": 1, "batch_size": 16, "gamma": 0.9, "kl_coef": 0.0}}
APG = {"name": "apg", "cfg": {"gamma": 0.9, "learning_rate": 0.01}}


def by_steps(rollout: TensorDict, env: int, gamma: float, last: float) -> list[float]:
    """Returns of the decisions of one environment, from its single steps: each is discounted by `gamma`."""
    reward, starts = [], []
    for t in range(rollout.shape[1] - 1):
        place = rollout["obs"][env, t, 0]
        ending = rollout["truncated"][env, t], rollout["terminated"][env, t], float(rollout["final_value"][env, t])
        starts.append(len(reward))
        count = min(3, int(rollout["obs"][env, t, 1]))
        for i in range(count):
            action = rollout["action"][env, t, i].clamp(-2.0, 2.0)  # the bounds of the space
            reward.append((float(step_reward(place, action)), ending if i == count - 1 else (False, False, 0.0)))
            place = next_place(place, action)
    after, returns = last, [0.0] * len(reward)
    for t in reversed(range(len(reward))):
        now, (truncated, terminated, final) = reward[t]
        after = final if truncated else 0.0 if terminated else after
        after = returns[t] = now + gamma * after
    return [returns[t] for t in starts]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_value_targets_of_chunks_are_those_of_the_single_steps(end):
    cfg = chunked(**{"env.cfg": {"gamma": 0.9, "end": end}, "trainer.buffer_size": 20})
    run, state = build(cfg), last_state(cfg)
    rollout = collect(run, state)[1]["steps"]
    executed = rollout["executed"]
    assert executed.shape == (4, 21) and executed.dtype == torch.int64 and not executed[:, -1].any()
    assert executed[:, :-1].min() < 3 and executed.max() == 3 and rollout["done"].any()
    targets = compute_gae(rollout, 0.9, 1.0).value_target
    for env in range(4):
        close(targets[env], by_steps(rollout, env, 0.9, float(rollout["value"][env, -1])), tol=1e-4)


def test_the_trace_of_gae_decays_once_for_each_action():
    cfg = chunked()
    rollout = collect(build(cfg), last_state(cfg))[1]["steps"]
    value, expected = rollout["value"], torch.zeros(4, 9)
    for t in reversed(range(8)):
        gamma = 0.9 ** rollout["executed"][:, t]
        reached = torch.where(rollout["terminated"][:, t], 0.0, value[:, t + 1])
        delta = rollout["reward"][:, t] + gamma * reached - value[:, t]
        expected[:, t] = delta + torch.where(rollout["done"][:, t], 0.0, gamma * 0.5 * expected[:, t + 1])
    close(compute_gae(rollout, 0.9, 0.5).advantage, expected[:, :-1])


def test_grpo_discounts_by_the_steps_of_an_action():
    no, executed = torch.zeros(2, 3, dtype=torch.bool), torch.tensor([[2, 3, 0], [1, 1, 0]])
    reward = torch.tensor([[1.0, 1.0, 0.0], [1.0, 4.0, 0.0]])
    fields = {"reward": reward, "terminated": no, "truncated": no, "done": no, "executed": executed}
    advantage, _ = grpo_advantages(TensorDict(fields, [2, 3]), gamma=0.5, group_size=2, eps=1.0)
    close(advantage[0], [-0.875 / 1.875, -1.5 / 2.5])  # the returns are 1.25 and 3, 1 and 4


def test_rewards_are_scaled_by_returns_that_discount_the_steps_of_an_action():
    cfg = chunked(**{"algorithm.cfg.normalize_reward": True, "trainer.iterations": 1})
    run, state = build(cfg), init_state(cfg)
    _, batch = collect(run, state)
    after, _ = scaled_rewards(state, batch)
    rollout = batch["steps"]
    running = torch.zeros(4)
    for t in range(8):
        running = rollout["reward"][:, t] + 0.9 ** rollout["executed"][:, t] * running
        running = torch.where(rollout["done"][:, t], 0.0, running)
    close(after["norm", "reward", "running"], running)


@pytest.mark.parametrize("algorithm", [{}, {"algorithm": GRPO}, {"algorithm": APG}])
def test_counters_and_lengths_count_the_steps_of_the_environment(algorithm):
    actor = {"policy": {"name": "actor_only", "actor": chunked().policy.actor.model_dump()}} if algorithm else {}
    cfg = chunked(**algorithm, **actor)
    records = [r for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    steps, state, total = [r["sample_step"] for r in records], init_state(cfg), 0
    assert [r["taken"] for r in records] == [b - a for a, b in pairwise([0, *steps])]
    assert [int(r["state"]["sample_step"]) for r in records] == steps
    assert [int(r["state"]["decision_step"]) for r in records] == [32, 64, 96]
    assert all(32 < r["taken"] < 96 for r in records)
    if not algorithm:
        run, ends = build(cfg), []
        running = torch.zeros(4, dtype=torch.int64)
        for record in records:
            after, batch = collect(run, state)
            rollout = batch["steps"]
            total += int(rollout["executed"].sum())
            assert record["sample_step"] == total
            for t in range(8):
                running = running + rollout["executed"][:, t]
                ends += running[rollout["done"][:, t]].tolist()
                running = running.masked_fill(rollout["done"][:, t], 0)
            assert after["episode", "running_length"].tolist() == running.tolist()
            state = record["state"]
        finished = state["episode", "finished_length"][state["episode", "finished"]]
        assert finished.tolist() == ends and min(ends) >= 4 and max(ends) <= 9


def test_actions_of_one_step_change_no_bit():
    plain = chunked(**{"env.cfg": {"chunk": 1, "reports": False}, "algorithm.cfg.normalize_reward": True})
    counted = plain.replace(**{"env.cfg.reports": True})
    one, other = last_state(plain), last_state(counted)
    assert int(other["sample_step"]) == int(other["decision_step"]) == int(one["sample_step"]) == 96
    assert "decision_step" not in one and "executed" in other["env"]
    assert same(other.exclude("decision_step", ("env", "executed")), one)


def test_frequencies_count_the_steps_of_the_environment(tmp_path):
    cfg = chunked(**{"trainer.save_freq": 150, "trainer.enable_eval": True, "trainer.eval_freq": 150})
    cfg = cfg.replace(**{"trainer.num_eval_episodes": 2, "trainer.iterations": 5, "trainer.keep_checkpoints": 9})
    state, _ = ecrl.train(init_state(cfg), cfg, run_dir=tmp_path, progress=False)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [0, *(row["sample_step"] for row in rows if row["log_type"] == "train")]
    crossing = [b for a, b in pairwise(steps) if b // 150 > a // 150]
    assert crossing and [row["sample_step"] for row in rows if row["log_type"] == "evaluate"] == crossing
    saved = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == sorted({*crossing, steps[-1]}) and int(state["decision_step"]) == 5 * 32
    assert is_due({"sample_step": 160, "taken": 11}, cfg, 150) and not is_due(
        {"sample_step": 160, "taken": 10}, cfg, 150
    )


def test_a_pending_evaluation_has_the_steps_of_its_iteration(tmp_path):
    cfg = chunked(**{"trainer.enable_eval": True, "trainer.eval_freq": 1, "trainer.num_eval_episodes": 2})
    state, _ = ecrl.train(init_state(cfg), cfg, run_dir=tmp_path, progress=False)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    *_, before, last = [row["sample_step"] for row in rows if row["log_type"] == "train"]
    shutil.rmtree(tmp_path / "checkpoints" / "best")
    record = pending_evaluation(state, cfg, tmp_path)
    assert record is not None and (record["sample_step"], record["taken"]) == (last, last - before)


def test_the_report_of_nan_counts_actions_of_an_environment():
    cfg = chunked()
    state = last_state(cfg.replace(**{"trainer.iterations": 1})).clone()
    state["env", "place"][1] = torch.nan
    with pytest.raises(
        NotFiniteError, match="reward = nan in env 1, step 0 of the rollout, action 8 of that env"
    ) as error:
        next(train_iter(state, cfg))
    assert error.value.report["found"]["place"] == {"env": 1, "step": 0, "env_action": 8}


def test_a_resumed_run_has_the_same_bits(tmp_path):
    cfg = chunked()
    first = last_state(cfg.replace(**{"trainer.iterations": 2}))
    ecrl.save(tmp_path / "middle", first, cfg)
    state, loaded = ecrl.load(tmp_path / "middle")
    assert same(last_state(loaded, state), last_state(cfg))


def test_evaluations_count_the_steps_of_the_environment():
    cfg = chunked(**{"trainer.num_eval_episodes": 8})
    length = ecrl.evaluate(init_state(cfg), cfg)["eval/avg_length"]
    assert 4 <= length <= 9 and chunked(**{"env.cfg.chunk": 9}).env.cfg.chunk == 9
    whole = cfg.replace(**{"env.cfg.chunk": 9})
    assert ecrl.evaluate(init_state(whole), whole)["eval/avg_length"] >= 4


def test_views_of_an_evaluation_are_one_for_each_action_and_its_lengths_are_steps(monkeypatch):
    """The reward of this environment is 1 per step, so the return of an episode is its length."""
    cfg = small(**{"env.name": "repeated_pole", "trainer.num_eval_episodes": 4})
    state = init_state(cfg)
    logs = ecrl.evaluate(state, cfg)
    assert logs["eval/avg_length"] == logs["eval/avg_reward"] > 4.0
    monkeypatch.setattr(evaluation, "view", lambda env, count: TensorDict({"obs": env["obs"][:count]}, [count]))
    views, rewards, counts = [], torch.zeros(4), torch.zeros(4)
    for row, shown in islice(evaluation.eval_steps(build(cfg), state, cfg, 4, [], 2), 12):
        views.append(shown["obs"])
        rewards, counts = (total + torch.tensor([env[i] for env in row]) for i, total in ((0, rewards), (2, counts)))
    assert torch.equal(rewards, counts) and (counts <= 24).all() and counts.max() > 12
    assert len(views) == 12 and views[0].shape == (2, 4) and all(not torch.equal(*pair) for pair in pairwise(views))


def test_check_env_and_the_run_check_executed():
    env = make_env("chunks")
    assert check_env("chunks", num_steps=40).findings == check_env("repeated_pole", num_steps=40).findings == []

    def none(state, action, noise):
        return env.step(state, action, noise).update({"executed": torch.zeros_like(state["executed"])})

    def as_float(state):
        return state.update({"executed": state["executed"].float()})

    findings = check_env(replace(env, step=none), num_steps=8).findings
    assert findings[0].startswith("executed is 0 in env 0 after step 1; an action takes at least 1 step")
    wrong = replace(env, reset=lambda keys: as_float(env.reset(keys)), step=lambda *args: as_float(env.step(*args)))
    assert check_env(wrong).findings == ["reset returns field 'executed' as float32 [2], expected int64 [2]"]
    assert "executed" in auto_reset(env).reset(torch.arange(2))
    with pytest.raises(ValueError, match=r"^executed is float32 \[1, 2\], expected int64 \[1, 2\]"):
        fields = {name: torch.zeros(1, 3, dtype=torch.bool) for name in ("terminated", "truncated", "done")}
        fields |= {name: torch.zeros(1, 3) for name in ("reward", "value", "executed")}
        compute_gae(TensorDict(fields, [1, 3]), 0.9, 0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
def test_a_compiled_run_on_chunks_equals_an_eager_one():
    eager, compiled = (last_state(chunked(**{"trainer.compile": form})) for form in ("off", "on"))
    assert int(eager["sample_step"]) == int(compiled["sample_step"])
    for name, leaf in eager["params"].items(True, True):
        close(compiled["params"][name], leaf, tol=1e-4)
