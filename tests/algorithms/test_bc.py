"""Behaviour cloning: the steps that are drawn, the loss, resuming, memory, and that the clone acts as its expert."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import Field
from support import catch, chunks  # noqa: F401  they register environments
from support.checks import assert_pure, close
from support.demos import NET, balancing, cloning, of_policy, recording, remembering_clone
from support.dots import reaching
from support.small_runs import last_state, same
from tensordict import TensorDict

import ecrl
from ecrl.algorithms.demonstrations import Demonstrations, drawn_batch, rows_to_learn
from ecrl.config import config_from_dict
from ecrl.config.model import ConfigModel
from ecrl.envs import Env, make_env
from ecrl.errors import ConfigError, NotFiniteError
from ecrl.loop.buffers import data_of, sha256_text
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, train_iter
from ecrl.policies import policy_params
from ecrl.registry import register_env
from ecrl.run.crash import replay
from ecrl.run.demonstrations import record_demonstrations
from ecrl.run.resume import resume
from ecrl.run.train import train
from ecrl.storage.demonstrations import read_about, write_demonstrations
from ecrl.storage.tensor_files import read_tensors


def drawn(cfg, **counters):
    """The run, a state and the batch that an iteration from this state learns from."""
    run, state = build(cfg), init_state(cfg)
    state = state.copy().update({name: torch.tensor(x) for name, x in counters.items()})
    data = data_of(run, torch.device("cpu"))
    return run, state, assert_pure(drawn_batch, run, state, data["data", "train"])


def rows_in(path: Path, steps: TensorDict) -> list[int]:
    """The row of the file for each step, found by its observation."""
    obs = read_tensors(path)["obs"]
    return [int((obs == one).all(-1).nonzero()[0, 0]) for one in steps["obs"].reshape(-1, obs.shape[-1])]


# The steps that an iteration draws


def test_steps_are_rows_of_the_file_with_all_their_fields():
    path = balancing().path
    _, _, batch = drawn(cloning())
    steps, tensors = batch["steps"], read_tensors(path)
    index = torch.tensor(rows_in(path, steps))
    assert steps.shape == (8, 17) and {*steps.keys()} == {"obs", "action", "reward", "done"}
    for name in steps.keys():  # noqa: SIM118
        assert torch.equal(steps[name].flatten(0, 1), tensors[name][index])


def test_every_row_is_drawn_about_equally_often():
    path = balancing().path
    run, state, _ = drawn(cloning(**{"trainer.buffer_size": 512}))
    part = data_of(run, torch.device("cpu"))["data", "train"]
    part["steps"]["reward"] = torch.arange(320.0)
    draws = drawn_batch(run, state, part)["steps", "reward"][:, :-1].flatten().long()
    counts = torch.bincount(draws, minlength=len(read_tensors(path)["done"]))
    assert len(counts) == 320 and counts.sum() == 4096
    assert counts.min() > 0 and counts.max() < 35  # 12.8 on average, with a standard deviation of 3.6


def test_iterations_and_seeds_draw_other_steps_and_a_repetition_the_same():
    first, again, later = (drawn(cloning(), sample_step=n)[2]["steps"] for n in (0, 0, 128))
    other = drawn(cloning(**{"trainer.seed": 2}))[2]["steps"]
    assert same(first, again)
    assert not torch.equal(first["obs"], later["obs"]) and not torch.equal(first["obs"], other["obs"])


def test_held_out_episodes_are_never_learnt_from():
    run = build(cloning(**{"algorithm.cfg.holdout": 0.25}))
    data = data_of(run, torch.device("cpu"))["data"]
    assert {*data.keys()} == {"train", "holdout"}
    assert [len(data[part, "starts"]) for part in ("train", "holdout")] == [6, 2]
    tensors = read_tensors(balancing().path)
    both = torch.cat([data[part, "steps", "obs"] for part in ("train", "holdout")])
    assert torch.equal(both, tensors["obs"]) and data["holdout", "starts"].tolist() == [0, 40]
    with pytest.raises(ConfigError, match=r"^algorithm.cfg.holdout: 0.01 of 8 episodes leaves no episode"):
        data_of(build(cloning(**{"algorithm.cfg.holdout": 0.01})), torch.device("cpu"))


# Loss


def test_the_loss_is_the_mean_negative_log_probability():
    cfg = cloning(**{"algorithm.cfg.batch_size": 128})
    run, state, batch = drawn(cfg)
    rows = rows_to_learn(run, policy_params(state), batch)
    log_prob = run.policy.evaluate_rows(policy_params(state), rows)[0]
    logs = make_iteration(cfg)(state)[1]["train"]
    close(logs["loss"], -log_prob.mean())


def test_a_policy_of_soft_actor_critic_learns_demonstrations_which_have_no_latent():
    policy = {"name": "squashed_actor_critic", "actor": NET, "critic": NET}
    demos = of_policy("pendulum", **{"env.cfg.max_episode_steps": 10, "policy.squash": True})
    cfg = cloning(demos, env={"name": "pendulum"}, policy=policy, **{"algorithm.cfg.batch_size": 128})
    run, state, batch = drawn(cfg)
    rows = rows_to_learn(run, policy_params(state), batch)
    assert "latent" not in rows and (rows["action"].abs() < 2.0).all()
    weights = state["params", "actor"].double()
    hidden = torch.tanh(rows["obs"].double() @ weights["0.weight"].T + weights["0.bias"])
    mean, log_std = (hidden @ weights["2.weight"].T + weights["2.bias"]).chunk(2, -1)
    normal = torch.distributions.Normal(mean, log_std.clamp(-5.0, 2.0).exp())
    squashed = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform())
    logs = make_iteration(cfg)(state)[1]["train"]
    close(logs["loss"].double(), -squashed.log_prob(rows["action"].double() / 2.0).sum(-1).mean(), tol=1e-5)


@pytest.mark.parametrize("env", ["pendulum", "cartpole"])
def test_the_critic_does_not_move_and_the_actor_does(env):
    cfg = cloning(of_policy(env, **{"env.cfg.max_episode_steps": 10}), **{"env": {"name": env}})
    before, after = init_state(cfg)["params"], last_state(cfg)["params"]
    assert same(before["critic"], after["critic"]) and not same(before["actor"], after["actor"])


def test_the_log_of_the_held_out_loss_falls():
    cfg = cloning(**{"algorithm.cfg.holdout": 0.25, "trainer.iterations": 20, "algorithm.cfg.n_epochs": 2})
    losses = [r["logs"]["holdout_loss"].item() for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    assert len(losses) == 20 and losses[-1] < 0.75 * losses[0]


def test_a_clone_balances_like_its_expert(tmp_path):
    path = tmp_path / "demos.safetensors"
    cfg = recording()
    assert record_demonstrations(cfg, path, 5, expert={"noise": 0.05}).mean_return == 500.0
    keys = {
        "trainer.iterations": 40,
        "trainer.num_envs": 16,
        "trainer.buffer_size": 64,
        "trainer.num_eval_episodes": 20,
    }
    cfg = cloning(path, **keys, **{"algorithm.cfg.batch_size": 128, "algorithm.cfg.learning_rate": 1e-2})
    start = init_state(cfg)
    assert ecrl.evaluate(start, cfg)["eval/avg_reward"] < 200.0
    assert ecrl.evaluate(last_state(cfg, start), cfg)["eval/avg_reward"] >= 400.0


# The loop


def test_no_environment_steps_and_the_counters_of_drawn_steps():
    cfg = cloning()
    start, end = init_state(cfg), last_state(cfg)
    assert same(start["env"], end["env"]) and same(start["episode"], end["episode"])
    assert int(end["sample_step"]) == 3 * 8 * 16 and int(end["update_step"]) == 3
    assert "data" not in end and sha256_text(end["data_sha256"]) == balancing().sha256


def test_observation_statistics_are_those_of_the_drawn_steps():
    cfg = cloning(**{"policy.normalize_obs": True, "trainer.iterations": 1})
    obs = drawn(cfg)[2]["steps", "obs"][:, :-1].reshape(-1, 4).double()
    norm = last_state(cfg)["norm", "obs"]
    assert norm["count"] == 128
    close(norm["mean"], obs.mean(0))


def test_a_gymnasium_environment_is_not_stepped():
    keys = {"env": {"name": "gymnasium:CartPole-v1"}, "trainer.num_envs": 2}
    cfg = cloning(**keys)
    with pytest.warns(UserWarning, match="are of the environment cartpole, but this run has gymnasium:CartPole-v1"):
        state = init_state(cfg)
    after = last_state(cfg, state)
    assert torch.equal(after["env", "obs"], state["env", "obs"])
    build(cfg).env.close(after["env"])


def test_a_checkpoint_has_the_checksum_and_not_the_data_and_needs_no_file(tmp_path):
    shutil.copy(balancing().path, tmp_path / "demos.safetensors")
    cfg = cloning(tmp_path / "demos.safetensors")
    state, _ = train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    step = tmp_path / "run" / "checkpoints" / "step_384"
    tensors = read_tensors(step / "state.safetensors")
    assert "data_sha256" in tensors and not [name for name in tensors if name.startswith("data/")]
    assert sum(path.stat().st_size for path in step.iterdir()) < 60_000
    (tmp_path / "demos.safetensors").unlink()
    loaded, own = ecrl.load(step)
    assert same(loaded, state) and ecrl.evaluate(loaded, own, 4) == ecrl.evaluate(state, cfg, 4)


@pytest.mark.parametrize("agent", ["feed-forward", "memory"])
def test_a_resumed_run_has_the_same_bits(agent, tmp_path):
    cfg = cloning(**{"policy.normalize_obs": True, "algorithm.cfg.holdout": 0.25, "trainer.iterations": 4})
    cfg = cfg if agent == "feed-forward" else remembering_clone(**{"trainer.iterations": 4})
    ecrl.save(tmp_path / "half", last_state(cfg.replace(**{"trainer.iterations": 2})), cfg)
    state, loaded = ecrl.load(tmp_path / "half")
    assert same(last_state(loaded, state), last_state(cfg))


def test_a_changed_file_is_refused_in_one_line_and_another_path_needs_force(tmp_path):
    path, other = tmp_path / "demos.safetensors", tmp_path / "other.safetensors"
    shutil.copy(balancing().path, path)
    shutil.copy(balancing(seed=1).path, other)
    cfg = cloning(path)
    train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    shutil.copy(other, path)
    with pytest.raises(ConfigError) as refused:
        resume(tmp_path / "run")
    assert str(refused.value) == (
        f"algorithm bc: {path}: differs from the data set of this run, whose SHA-256 is {balancing().sha256}; restore "
        "the file, or start a new run"
    )
    with pytest.raises(ConfigError, match="differs from the data set of this run"):
        make_iteration(cfg)(ecrl.load(tmp_path / "run" / "checkpoints" / "step_384")[0])
    path.unlink()
    with pytest.raises(ConfigError, match=rf"^algorithm.cfg.demos: {path}: cannot be read: No such file"):
        resume(tmp_path / "run")
    changes = {"algorithm.cfg.demos": str(other), "trainer.iterations": 5}
    with pytest.raises(ConfigError, match="to accept the changes, add --force"):
        resume(tmp_path / "run", overrides=changes)
    state, own = resume(tmp_path / "run", overrides=changes, force=True)
    assert sha256_text(state["data_sha256"]) == balancing(seed=1).sha256
    assert int(last_state(own, state)["update_step"]) == 5


def test_an_iteration_is_pure_and_vmaps_over_seeds():
    cfg = cloning(**{"algorithm.cfg.holdout": 0.25})
    states, iteration = [init_state(cfg, key=torch.tensor(seed)) for seed in (1, 2)], make_iteration(cfg)
    single = [assert_pure(iteration, state)[0] for state in states]
    stacked, _ = torch.vmap(iteration, randomness="error")(torch.stack([s.clone() for s in states]))
    for i, state in enumerate(single):
        for name, leaf in state.flatten_keys("/").items():
            close(stacked.flatten_keys("/")[name][i], leaf, tol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize("make", [cloning, remembering_clone])
def test_compiled_equals_eager(make):
    keys = {"algorithm.cfg.holdout": 0.25, "trainer.iterations": 3}
    first, second = (last_state(make(**keys, **{"trainer.compile": form})) for form in ("off", "on"))
    for name, leaf in first.flatten_keys("/").items():
        close(second.flatten_keys("/")[name], leaf, tol=1e-4)


def test_a_crash_is_written_without_the_data_and_repeated(tmp_path):
    cfg = cloning(**{"algorithm.cfg.learning_rate": 3e38})
    with pytest.raises(NotFiniteError, match="NaN or infinity in"):
        train(init_state(cfg), cfg, tmp_path, progress=False)
    assert any("again" in line for line in replay(tmp_path / "crash"))


# Memory


def test_a_policy_with_memory_learns_whole_episodes():
    cfg = remembering_clone()
    _, _, batch = drawn(cfg)
    done = batch["steps", "done"]
    assert done.shape == (16, 9) and torch.equal(done[:, :6], torch.tensor([[False, False, True] * 2]).expand(16, 6))
    logs = [r["logs"] for r in train_iter(init_state(cfg), cfg) if r["log_type"] == "train"]
    end = last_state(cfg)
    assert logs[-1]["loss"] < 0.1 < logs[0]["loss"]
    assert ecrl.evaluate(end, cfg, 64)["eval/avg_reward"] == 1.0


def test_segments_start_with_the_memory_of_the_steps_before():
    whole, parts = remembering_clone(), remembering_clone(**{"algorithm.cfg.segment_length": 4})
    one, two = (drawn(cfg) for cfg in (whole, parts))
    params = policy_params(one[1])
    sequences, segments = (rows_to_learn(run, params, batch) for run, _, batch in (one, two))
    assert sequences["done"].shape == (16, 8) and segments["done"].shape == (32, 4)
    log_prob = [one[0].policy.evaluate_rows(params, rows)[0] for rows in (sequences, segments)]
    close(log_prob[1].reshape(16, 8), log_prob[0])


def test_an_episode_longer_than_a_sequence_is_refused():
    with pytest.raises(ConfigError) as refused:
        last_state(remembering_clone(**{"trainer.buffer_size": 2, "algorithm.cfg.batch_size": 32}))
    assert str(refused.value) == (
        "trainer.buffer_size: 2 is below 3, the length of the longest demonstration, but a policy with memory learns "
        "from whole episodes; use at least 3"
    )


# Refusals


def test_demonstrations_of_another_environment_are_refused():
    with pytest.raises(ConfigError) as refused:
        init_state(cloning(**{"env.cfg.observe_velocity": False}))
    assert str(refused.value) == (
        f"algorithm.cfg.demos: {balancing().path}: obs is float32 [4] per step, but float32 [2] in this environment; "
        "use demonstrations of this environment"
    )
    with pytest.raises(ConfigError, match=r"the file has no obs\.\w+; use demonstrations"):
        cfg = recording("catch", **{"env.cfg.observe": "dict"})
        Demonstrations(str(balancing().path)).check(build(cfg), cfg)


def edited(source, path, about=None, **changes):
    """Write a copy of a data set with other tensors and metadata. A tensor None is left out."""
    tensors = {name: x for name, x in {**read_tensors(source), **changes}.items() if x is not None}
    write_demonstrations(path, tensors, {**read_about(source)[1], **(about or {})})
    return path


def with_value(x, value):
    """A copy of a tensor whose first element is `value`."""
    x = x.clone()
    x.view(-1)[0] = value
    return x


@pytest.mark.parametrize(("value", "text"), [(2, "2"), (-1, "-1")])
def test_an_action_outside_its_space_is_refused(value, text, tmp_path):
    path = edited(balancing().path, tmp_path / "x", action=with_value(read_tensors(balancing().path)["action"], value))
    with pytest.raises(ConfigError) as refused:
        last_state(cloning(path))
    assert str(refused.value) == (
        f"algorithm.cfg.demos: {path}: action has the value {text}, which is outside Discrete(n=2); use demonstrations "
        "of this environment"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_observations_and_actions_that_are_not_finite_are_refused(value, tmp_path):
    path = edited(balancing().path, tmp_path / "x", obs=with_value(read_tensors(balancing().path)["obs"], value))
    with pytest.raises(ConfigError) as refused:
        last_state(cloning(path))
    assert str(refused.value) == (
        f"algorithm.cfg.demos: {path}: obs has NaN or infinity; use demonstrations of this environment"
    )
    keys = {"env.cfg.max_episode_steps": 10}
    source = of_policy("pendulum", **keys)
    path = edited(source, tmp_path / "y", action=with_value(read_tensors(source)["action"], value))
    with pytest.raises(ConfigError, match=r"y: action has NaN or infinity"):
        last_state(cloning(path, **{"env": {"name": "pendulum"}}))


def dots_data(path, chunk=3, **keys):
    """Record the sampled actions of a new policy on `dots`, and return the config of its clone."""
    cfg = reaching("grpo", **{"env.action_chunk": chunk})
    record_demonstrations(cfg, path, 6, state=init_state(cfg), sample=True)
    bc = {"name": "bc", "cfg": {"demos": str(path), "batch_size": 16}}
    return cfg.replace(algorithm=bc, **keys)


def test_a_word_outside_the_vocabulary_is_refused(tmp_path):
    cfg = dots_data(tmp_path / "dots")
    words = with_value(read_tensors(tmp_path / "dots")["obs.instruction"], 25)
    path = edited(tmp_path / "dots", tmp_path / "x", **{"obs.instruction": words})
    with pytest.raises(ConfigError) as refused:
        last_state(cfg.replace(**{"algorithm.cfg.demos": str(path)}))
    assert str(refused.value) == (
        f"algorithm.cfg.demos: {path}: obs.instruction has the value 25, which is outside MultiDiscrete((6,) * 3); use "
        "demonstrations of this environment"
    )


def test_chunks_of_another_length_are_refused_with_the_key(tmp_path):
    cfg = dots_data(tmp_path / "dots")
    for chunk in (1, 2):
        with pytest.raises(ConfigError) as refused:
            init_state(cfg.replace(**{"env.action_chunk": chunk}))
        assert "; the demonstrations have env.action_chunk 3; set env.action_chunk to 3, or use" in str(refused.value)
        assert f"{tmp_path / 'dots'}: action is float32 [3, 2] per step, but float32" in str(refused.value)


def test_executed_must_be_in_the_file_exactly_if_actions_are_chunks(tmp_path):
    cfg = dots_data(tmp_path / "dots")
    path = edited(tmp_path / "dots", tmp_path / "without", executed=None)
    with pytest.raises(
        ConfigError, match=rf"^algorithm.cfg.demos: {path}: the file has no executed; use demonstrations"
    ):
        init_state(cfg.replace(**{"algorithm.cfg.demos": str(path)}))
    executed = read_tensors(tmp_path / "dots")["executed"]
    path = edited(tmp_path / "dots", tmp_path / "four", executed=with_value(executed, 4))
    with pytest.raises(ConfigError, match=rf"^algorithm.cfg.demos: {path}: executed has 4, expected 1 to 3; write"):
        last_state(cfg.replace(**{"algorithm.cfg.demos": str(path)}))
    path = edited(balancing().path, tmp_path / "with", executed=torch.ones(320, dtype=torch.int64))
    problem = "the file has executed, but an action of this environment is always one step; use demonstrations"
    with pytest.raises(ConfigError, match=rf"^algorithm.cfg.demos: {path}: {problem}"):
        init_state(cloning(path))


def test_executed_of_an_environment_that_repeats_actions_is_needed(tmp_path):
    keys = {"env": {"name": "repeated_pole", "cfg": {"max_episode_steps": 20}}}
    cfg = recording(**keys)
    record_demonstrations(cfg, tmp_path / "pole", 4, state=init_state(cfg), sample=True)
    clone = cloning(tmp_path / "pole", **keys)
    run, state, batch = drawn(clone)
    assert rows_to_learn(run, policy_params(state), batch)["mask"].all()  # every action has a meaning
    path = edited(tmp_path / "pole", tmp_path / "without", executed=None)
    with pytest.raises(ConfigError, match=rf"^algorithm.cfg.demos: {path}: the file has no executed"):
        init_state(cloning(path, **keys))


def test_fields_with_other_numbers_of_rows_are_refused(tmp_path):
    path = edited(balancing().path, tmp_path / "x", reward=torch.zeros(319))
    with pytest.raises(ConfigError) as refused:
        init_state(cloning(path))
    assert str(refused.value) == (
        f"algorithm.cfg.demos: {path}: reward is a tensor [319], but done has 320 rows; write one row of each field "
        "per action"
    )


def test_a_field_without_rows_is_refused(tmp_path):
    path = edited(balancing().path, tmp_path / "x", done=torch.tensor(True))
    with pytest.raises(ConfigError, match=f"{path}: done is a 0-d tensor, expected one row per action; use demonstra"):
        init_state(cloning(path))


def test_demonstrations_of_an_environment_with_another_name_warn_in_one_line(tmp_path):
    path = edited(balancing().path, tmp_path / "x", about={"env": "other"})
    with pytest.warns(UserWarning) as told:
        init_state(cloning(path))
    assert [str(warning.message) for warning in told] == [
        f"algorithm.cfg.demos: {path}: the demonstrations are of the environment other, but this run has cartpole; use "
        "demonstrations of cartpole unless the observations and actions of both have the same meaning"
    ]


class TextConfig(ConfigModel):
    """Settings of `cartpole_with_words`, with the setting `tokenizer` of tasks with instructions."""

    tokenizer: str | None = Field(None, description="JSON file that maps words to ids")


@register_env("cartpole_with_words", override=True)
def cartpole_with_words(cfg: TextConfig) -> Env:
    """CartPole with a setting `tokenizer`, which it does not read."""
    return make_env({"name": "cartpole", "cfg": {"max_episode_steps": 12}})


@pytest.mark.parametrize("recorded", [True, False])
def test_demonstrations_with_another_vocabulary_warn_in_one_line(recorded, tmp_path):
    """Without checksums in the file, the paths are compared by their present content."""
    one, copy, other = (tmp_path / name for name in ("one.json", "copy.json", "other.json"))
    one.write_text('{"<pad>": 0, "red": 1, "blue": 2}')
    copy.write_text('{"blue": 2, "<pad>": 0, "red": 1}')
    other.write_text('{"<pad>": 0, "red": 2, "blue": 1}')
    env = {"name": "cartpole_with_words", "cfg": {"tokenizer": str(one)}}
    cfg = recording(env)
    record_demonstrations(cfg, tmp_path / "words", 3, state=init_state(cfg))
    about = {} if recorded else {"vocabularies": None}
    path = edited(tmp_path / "words", tmp_path / "demos", about=about)
    init_state(cloning(path, env=env))
    init_state(cloning(path, env=env, **{"env.cfg.tokenizer": str(copy)}))
    line = (
        f"algorithm.cfg.demos: {path}: env.cfg.tokenizer: the demonstrations have another vocabulary, so that their "
        "ids mean other words; use the vocabulary of the demonstrations"
    )
    with pytest.warns(UserWarning) as told:
        init_state(cloning(path, env=env, **{"env.cfg.tokenizer": str(other)}))
    assert [str(warning.message) for warning in told] == [line]
    one.write_text(other.read_text())
    if recorded:
        with pytest.warns(UserWarning, match="env.cfg.tokenizer: the demonstrations have another vocabulary"):
            init_state(cloning(path, env=env))


# Chunks of which not all actions were taken


@pytest.mark.parametrize("env", ["pendulum", "cartpole"])
def test_actions_after_the_end_of_an_episode_are_not_learnt(env, tmp_path):
    """The actions of a chunk that were not taken change neither the parameters nor the held-out loss."""
    section = {"name": env, "cfg": {"max_episode_steps": 10}, "action_chunk": 4}
    cfg, path = recording(section), tmp_path / "demos"
    record_demonstrations(cfg, path, 6, state=init_state(cfg), sample=True)
    tensors = read_tensors(path)
    cut = tensors["executed"] < 4
    assert 0 < int(cut.sum()) < len(cut)
    late = torch.arange(4) >= tensors["executed"].unsqueeze(1)
    late = late.reshape(*late.shape, *[1] * (tensors["action"].ndim - 2))
    other = edited(path, tmp_path / "other", action=torch.where(late, 1 - tensors["action"], tensors["action"]))
    keys = {"env": section, "algorithm.cfg.holdout": 0.5}
    ends, logs = [], []
    for file in (path, other):
        records = [*train_iter(init_state(cloning(file, **keys)), cloning(file, **keys))]
        ends.append(records[-1]["state"])
        logs.append([float(r["logs"]["holdout_loss"]) for r in records if r["log_type"] == "train"])
    assert same(ends[0]["params"], ends[1]["params"]) and logs[0] == logs[1]
    run, state, batch = drawn(cloning(path, **{"env": section}))
    rows = rows_to_learn(run, policy_params(state), batch)
    assert torch.equal(rows["mask"], rows["executed"] == 4) and not rows["mask"].all()


def test_tokens_that_were_taken_are_learnt_in_chunks_that_are_cut(tmp_path):
    run, state, batch = drawn(dots_data(tmp_path / "dots"))
    rows = rows_to_learn(run, policy_params(state), batch)
    assert (rows["executed"] < 3).any() and rows["mask"].all()


def test_a_file_that_is_no_data_set_is_refused(tmp_path):
    ecrl.save(tmp_path / "run", init_state(recording()), recording())
    path = tmp_path / "run" / "state.safetensors"
    with pytest.raises(ConfigError, match=rf"^algorithm.cfg.demos: {path}: not a data set of demonstrations: it has"):
        init_state(cloning(path))
    (tmp_path / "text").write_text("text")
    with pytest.raises(ConfigError, match=r"^algorithm.cfg.demos: .*text: damaged"):
        init_state(cloning(tmp_path / "text"))


def test_policies_without_log_probabilities_and_adaptive_rates_are_refused():
    with pytest.raises(ConfigError, match=r"^policy.name: this policy has no log-probabilities, which bc needs"):
        init_state(cloning(policy={"name": "q_network", "critic": {"network_cfg": {"hidden_sizes": [8]}}}))
    with pytest.raises(ConfigError, match="lr_scheduler adaptive needs the KL"):
        cloning(**{"algorithm.cfg.lr_scheduler": {"name": "adaptive"}})
    with pytest.raises(ConfigError, match=r"algorithm.cfg.demos: missing"):
        config_from_dict({"env": {"name": "cartpole"}, "policy": {"name": "actor_only"}, "algorithm": {"name": "bc"}})


def test_the_data_set_is_not_copied():
    """All iterations read the same tensors."""
    cfg, seen = cloning(), []

    def watched(run):
        def iterate(run, state, borrowed):
            seen.append(borrowed["data", "train", "steps", "obs"].data_ptr())
            return bc.iterate(run, state, borrowed)

        return run._replace(algorithm=replace(run.algorithm, iterate=iterate))

    bc = build(cfg).algorithm
    last_state(cfg, watch=watched)
    assert len(seen) == 3 and len({*seen}) == 1
