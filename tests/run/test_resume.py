"""Resuming: bit for bit what an uninterrupted run is, in a new process; a config that differs is shown and refused."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from support.small_runs import full_config, same, small

from ecrl.config import Config
from ecrl.errors import CheckpointError, ConfigError
from ecrl.loop.build import build
from ecrl.loop.iteration import close, init_state, train_iter
from ecrl.native.library import is_available
from ecrl.run import evaluation
from ecrl.run.checkpoint import latest, load, save, snapshot, write
from ecrl.run.resume import resume
from ecrl.run.train import train, train_from_config

STOP = """
import sys
from ecrl.config import load_config
from ecrl.loop.iteration import init_state
from ecrl.run.train import train, train_from_config
class Enough(Exception): pass
import ecrl.run.train, ecrl.loop.iteration
cfg = load_config(sys.argv[1])
inner = ecrl.run.train.iterations
def ten(run, state, cfg):
    for record in inner(run, state, cfg):
        yield record
        if record["log_type"] == "train" and int(record["state"]["update_step"]) == 10:
            raise KeyboardInterrupt
ecrl.run.train.iterations = ten
train(init_state(cfg), cfg, sys.argv[2], progress=False)
"""


def interrupted(cfg: Config, folder) -> None:
    """Run ten of twenty iterations in a separate process, and end it like Ctrl-C."""
    path = folder.with_suffix(".json")
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    command = [sys.executable, "-c", STOP, str(path), str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=ONE_THREAD)


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
"""As many threads as the process of the tests has: equal bits need equal numbers of threads."""

FORMS = [("ppo", "off")] + [
    pytest.param(algorithm, form, marks=pytest.mark.long)
    for algorithm, form in [("grpo", "off"), ("apg", "off"), ("ppo", "on"), ("grpo", "on"), ("apg", "on")]
]


@pytest.mark.parametrize(("algorithm", "form"), FORMS)
def test_ten_and_ten_iterations_are_twenty(tmp_path, algorithm, form):
    cfg = full_config(algorithm, form)
    interrupted(cfg, tmp_path / "run")
    assert latest(tmp_path / "run").name == "step_320"
    command = [sys.executable, "-m", "ecrl", "train", "--resume", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    resumed, _ = load(latest(tmp_path / "run"))
    *_, record = train_iter(init_state(cfg), cfg)
    assert int(resumed["update_step"]) == 20
    assert same(resumed, record["state"])


def finished(tmp_path, **changes):
    cfg = small(**{"trainer.iterations": 2, "trainer.save_freq": 32, **changes})
    train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    return tmp_path / "run", cfg


def test_a_config_that_differs_is_shown_and_refused_unless_forced(tmp_path):
    run, cfg = finished(tmp_path)
    changes = {"trainer.iterations": 4, "algorithm.cfg.clip_coef": 0.3}
    with pytest.raises(ConfigError) as error:
        resume(run, overrides=changes)
    assert "trainer.iterations: 2 -> 4" in str(error.value) and "algorithm.cfg.clip_coef: 0.2 -> 0.3" in str(
        error.value
    )
    state, forced = resume(run, overrides=changes, force=True)
    assert forced == cfg.replace(**changes)
    assert float(state["hyper", "clip_coef"]) == pytest.approx(0.3), "the number of the new config, not the state's"
    state, history = train(state, forced, run, progress=False)
    assert int(state["update_step"]) == 4 and [row["sample_step"] for row in history] == [96, 128]


def test_a_forced_config_that_was_not_saved_is_warned_of(tmp_path, monkeypatch):
    run, cfg = finished(tmp_path)
    changes = {"trainer.iterations": 4, "algorithm.cfg.clip_coef": 0.3}
    state, forced = resume(run, overrides=changes, force=True)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ecrl.loop.iteration._iteration", interrupted)  # before the first iteration with the change ends
        train(state, forced, run, progress=False)
    with pytest.warns(UserWarning, match=r"without the change: trainer\.iterations: 2 -> 4, .*clip_coef: 0\.2 -> 0\.3"):
        assert resume(run)[1] == cfg
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, again = resume(run, overrides=changes, force=True)
        assert again == forced
        train(state, again, run, progress=False)
        assert resume(run)[1] == forced


def test_a_config_file_may_be_given_too(tmp_path):
    run, cfg = finished(tmp_path)
    path = tmp_path / "same.json"
    path.write_text(json.dumps(cfg.model_dump(mode="json")))
    assert resume(run, path)[1] == cfg
    path.write_text(json.dumps(cfg.replace(**{"trainer.seed": 5}).model_dump(mode="json")))
    with pytest.raises(ConfigError, match=r"trainer\.seed: 1 -> 5"):
        resume(run, path)


def test_what_was_logged_after_the_checkpoint_is_logged_once(tmp_path):
    run, cfg = finished(tmp_path, **{"trainer.iterations": 3})
    (run / "checkpoints" / "step_96").rename(tmp_path / "gone")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"log_type": "collect", "sample_st')  # cut off by a kill
    state, cfg = resume(run)
    assert int(state["sample_step"]) == 64
    train(state, cfg, run, progress=False)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["log_type"], row["sample_step"]) for row in rows] == [
        (kind, step) for step in (32, 64, 96) for kind in ("collect", "train")
    ]


def test_other_threads_are_warned_of(tmp_path):
    run, _ = finished(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match=rf"threads changed from {threads} to {threads + 1}"):
            resume(run)
    finally:
        torch.set_num_threads(threads)


def test_a_machine_without_a_compiler_is_warned_of(tmp_path, monkeypatch):
    run, _ = finished(tmp_path)
    used = is_available("recurrences")
    monkeypatch.setattr("ecrl.run.checkpoint.is_available", lambda source: not used)
    words = ("used", "missing") if used else ("missing", "used")
    with pytest.warns(UserWarning, match=r"C\+\+ functions changed from {} to {}".format(*words)):
        resume(run)


def test_a_run_resumes_on_a_machine_without_its_device(tmp_path):
    run, cfg = finished(tmp_path)
    state, elsewhere = load(latest(run))[0], cfg.replace(**{"trainer.device": "cuda:77"})
    made = snapshot(build(cfg), state, cfg)
    write(latest(run), made._replace(cfg=elsewhere, conditions=made.conditions | {"device": "cuda"}))
    with pytest.raises(ConfigError, match=r"trainer\.device: cuda:77 is not available; available: cpu"):
        resume(run)
    here = {"trainer.device": "cpu"}
    with pytest.raises(ConfigError, match=r'trainer\.device: "cuda:77" -> "cpu"'):
        resume(run, overrides=here)
    with pytest.warns(
        UserWarning, match="may differ by rounding from an uninterrupted run: device changed from cuda to cpu"
    ):
        resumed, forced = resume(run, overrides={**here, "trainer.iterations": 3}, force=True)
    assert same(resumed, state)
    assert [row["sample_step"] for row in train(resumed, forced, run, progress=False)[1]] == [96]


def test_a_manifest_without_a_device_is_read(tmp_path):
    run, cfg = finished(tmp_path)
    made = snapshot(build(cfg), load(latest(run))[0], cfg)
    write(latest(run), made._replace(conditions={name: x for name, x in made.conditions.items() if name != "device"}))
    assert same(resume(run)[0], load(latest(run))[0])


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        resume(tmp_path)


def test_a_finished_run_has_nothing_to_do(tmp_path):
    run, _ = finished(tmp_path)
    state, cfg = resume(run)
    assert len(train(state, cfg, run, progress=False)[1]) == 0


def test_a_resumed_gymnasium_run_starts_new_episodes_with_a_warning(tmp_path):
    cfg = small(**{"env": "gymnasium:CartPole-v1", "trainer.iterations": 2})
    state = init_state(cfg)
    first = next(iter(train_iter(state, cfg)))["state"]
    save(tmp_path / "saved", first, cfg)
    loaded, _ = load(tmp_path / "saved")
    with pytest.warns(UserWarning, match="episodes restart"):
        *_, record = train_iter(loaded, cfg)
    assert int(record["state"]["update_step"]) == 2


def test_a_checkpoint_folder_is_not_a_run(tmp_path):
    run, cfg = finished(tmp_path)
    checkpoint = latest(run)
    with pytest.raises(ConfigError, match="is a checkpoint; to resume, pass the folder of its run"):
        resume(checkpoint)
    with pytest.raises(ConfigError, match="is a checkpoint; choose the folder of its run"):
        train(init_state(cfg), cfg, checkpoint, progress=False)
    load(checkpoint)  # undamaged


def test_a_forced_seed_and_adaptive_rate_take_effect(tmp_path):
    run, _ = finished(tmp_path, **{"algorithm.cfg.lr_scheduler": {"name": "adaptive"}})
    resumed, _ = resume(run, overrides={"trainer.iterations": 9}, force=True)
    state, cfg = resume(run, overrides={"trainer.seed": 77, "algorithm.cfg.learning_rate": 0.009}, force=True)
    assert torch.equal(state["key"], init_state(cfg)["key"]) and not torch.equal(state["key"], resumed["key"])
    assert float(state["learning_rate"]) == pytest.approx(0.009)
    assert torch.equal(resumed["learning_rate"], load(latest(run))[0]["learning_rate"])


def test_a_forced_rate_of_one_group_takes_effect_and_the_other_rate_stays(tmp_path):
    changes = {"algorithm.cfg.lr_scheduler": {"name": "adaptive"}, "algorithm.cfg.critic_learning_rate": 0.001}
    run, _ = finished(tmp_path, **changes)
    before, _ = resume(run)
    state, _ = resume(run, overrides={"algorithm.cfg.critic_learning_rate": 0.009}, force=True)
    assert float(state["critic_learning_rate"]) == pytest.approx(0.009)
    assert torch.equal(state["learning_rate"], before["learning_rate"])


def test_unreadable_rows_are_forgotten(tmp_path):
    run, _ = finished(tmp_path)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n[]\n")
    resume(run)
    assert all(json.loads(line)["sample_step"] <= 64 for line in (run / "metrics.jsonl").read_text().splitlines())


def test_training_from_any_gymnasium_state_starts_new_episodes():
    cfg = small(**{"env": "gymnasium:CartPole-v1", "trainer.iterations": 3})
    start = init_state(cfg)
    first, _, second, *_ = [record["state"] for record in train_iter(start, cfg)]
    for state in (start, first, second):  # behind the environments
        with pytest.warns(UserWarning, match="episodes restart"):
            *_, record = train_iter(state, cfg)
        assert int(record["state"]["update_step"]) == 3
    close(record["state"], cfg)
    with pytest.warns(UserWarning, match="episodes restart"):  # they are closed
        list(train_iter(first, cfg))


def test_a_pure_state_is_not_one_of_gymnasium():
    state = init_state(small())
    with pytest.raises(ConfigError, match="it has no environments of gymnasium"):
        next(train_iter(state, small(**{"env": "gymnasium:CartPole-v1"})))


def test_a_damaged_checkpoint_is_skipped_and_what_was_logged_after_is_dropped(tmp_path):
    run, cfg = finished(tmp_path, **{"trainer.iterations": 3})
    expected = load(latest(run))[0]
    (run / "checkpoints" / "step_96" / "manifest.json").write_bytes(b"{}")
    with pytest.warns(UserWarning, match=r"step_96/manifest.json: damaged .*; using step_64 instead"):
        state, cfg = resume(run)
    assert int(state["sample_step"]) == 64
    state, _ = train(state, cfg, run, progress=False)
    assert same(state, expected) and same(load(latest(run))[0], expected), "the damaged one is replaced"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path, monkeypatch):
    run, cfg = finished(tmp_path)
    expected = load(latest(run))[0]
    for path in (run / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    monkeypatch.setattr("ecrl.run.train._announce", lambda *args: None)
    state, _ = train_from_config(resume_from=run)
    assert same(state, expected) and same(load(latest(run))[0], expected)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    with pytest.raises(ConfigError, match="already holds a run"):
        train(init_state(cfg), cfg, run, progress=False)


def test_a_resume_that_is_refused_changes_nothing(tmp_path):
    cfg = small(**{"trainer.save_freq": 32})
    train(init_state(cfg), cfg, tmp_path, progress=False)
    shutil.rmtree(tmp_path / "checkpoints" / "step_128")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"^state: env/\w+ is \[4\], the config makes it \[8\]"):
        train_from_config(resume_from=tmp_path, force=True, overrides={"trainer.num_envs": 8})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


EVALUATED = {"trainer.enable_eval": True, "trainer.eval_freq": 32, "trainer.num_eval_episodes": 2}


def run_outcome(run):
    """Return the rows of a run without times, and the logs and the state of its best checkpoint."""
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    compared = [{name: x for name, x in row.items() if name not in ("seconds", "charts/SPS")} for row in rows]
    best = json.loads((run / "checkpoints" / "best" / "manifest.json").read_text())
    return compared, best["logs"], load(run / "checkpoints" / "best")[0]


def test_an_interrupted_evaluation_is_made_when_the_run_resumes(tmp_path, monkeypatch):
    cfg = small(**EVALUATED, **{"trainer.iterations": 3})
    train(init_state(cfg), cfg, tmp_path / "whole", progress=False)
    inner, calls = evaluation._evaluate_run, []

    def interrupt_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return inner(*args)

    monkeypatch.setattr(evaluation, "_evaluate_run", interrupt_second)
    train(init_state(cfg), cfg, tmp_path / "run", progress=False)
    state, again = resume(tmp_path / "run")
    assert int(state["sample_step"]) == 64 and "evaluate" not in (tmp_path / "run" / "metrics.jsonl").read_text()[-400:]
    _, history = train(state, again, tmp_path / "run", progress=False)
    rows, best, state = run_outcome(tmp_path / "whole")
    assert [row["sample_step"] for row in rows if row["log_type"] == "evaluate"] == [32, 64, 96]
    assert run_outcome(tmp_path / "run")[:2] == (rows, best) and same(run_outcome(tmp_path / "run")[2], state)
    assert len(calls) == 4 and len(history) == 2
    train(load(latest(tmp_path / "run"))[0], again, tmp_path / "run", progress=False)
    assert len(calls) == 4 and run_outcome(tmp_path / "run")[0] == rows, "no evaluation is pending at the end"


def test_an_evaluation_whose_best_was_not_saved_is_made_again(tmp_path):
    cfg = small(**EVALUATED).replace(**{"trainer.iterations": 2, "trainer.eval_freq": 64})
    state, _ = train(init_state(cfg), cfg, tmp_path, progress=False)
    before = run_outcome(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "best")
    train(state, cfg, tmp_path, progress=False)
    assert run_outcome(tmp_path)[:2] == before[:2] and same(run_outcome(tmp_path)[2], before[2])


def test_a_pending_evaluation_that_cannot_run_is_one_line(tmp_path, monkeypatch):
    cfg = small(**EVALUATED).replace(**{"trainer.iterations": 2, "trainer.eval_freq": 64})
    state, _ = train(init_state(cfg), cfg, tmp_path, progress=False)
    shutil.rmtree(tmp_path / "checkpoints" / "best")

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ecrl.run.folder.replace_file", full)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: cannot be written: No space left on device; make room"):
        train(state, cfg, tmp_path, progress=False)
