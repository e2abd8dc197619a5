"""Runs that another process compiles (`trainer.compile: background`): the switch, the file, resume and crash replay."""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from support.small_runs import last_state, same, small

from ecrl.compile.background import BackgroundJit, switch_of
from ecrl.compile.jit import compilations_of, compiler_fault
from ecrl.errors import CheckpointError, ConfigError, NotFiniteError
from ecrl.loop import background
from ecrl.loop.buffers import kinds_of, with_own_buffers
from ecrl.loop.build import build, form_in_use
from ecrl.loop.iteration import first_state, init_state, iterations, make_iteration, train_iter
from ecrl.run.checkpoint import latest, read_manifest
from ecrl.run.compile_ahead import compile_ahead
from ecrl.run.compiled_from import FILE
from ecrl.run.crash import replay
from ecrl.run.profiler import Times, with_timers
from ecrl.run.resume import resume
from ecrl.run.train import train
from ecrl.run.train_many import train_many

pytestmark = pytest.mark.skipif(compiler_fault() is not None, reason="needs a C++ compiler")
SIX = {"trainer.iterations": 6, "trainer.save_freq": 1}
BACKGROUND = {"trainer.compile": "background"}


class FakeProcess:
    """A process that ends after a number of questions, with a status."""

    polls, status, started = 3, 0, 0

    def __init__(self, command, env, stdout, stderr):
        type(self).started += 1
        self.command, self.asked, self.is_killed = command, 0, False
        if self.status:
            stderr.write(f"Traceback\n{command[5]}: no module named my_envs\n".encode())
            stderr.flush()

    def poll(self):
        self.asked += 1
        return self.status if self.asked > self.polls else None

    def kill(self):
        self.is_killed = True

    def wait(self):
        assert self.is_killed


@pytest.fixture
def process(monkeypatch):
    """Replace the process that compiles. By default it ends after three iterations."""
    fake = type("Process", (FakeProcess,), {})
    monkeypatch.setattr(background, "Popen", fake)
    return fake


def forms_and_states(cfg, run=None):
    """Return the form and the state after each iteration."""
    run = build(cfg) if run is None else run
    state = with_own_buffers(first_state(run, cfg), kinds_of(run))
    return [
        (form_in_use(run), record["state"].clone())
        for record in iterations(run, state, cfg)
        if record["log_type"] == "train"
    ]


@pytest.mark.traced
@pytest.mark.parametrize("log_freq", [1, 2])
def test_the_run_is_eager_until_the_process_ends(process, log_freq):
    cfg = small(**SIX, **BACKGROUND, **{"trainer.log_freq": log_freq})
    run = build(cfg)
    every = forms_and_states(cfg, run)
    forms = ["eager"] * 3 + ["compiled"] * 3
    assert [form for form, _ in every] == forms[log_freq - 1 :: log_freq]
    assert switch_of(run.jit).compiled_from == 3 and len(compilations_of(run.jit)) >= 1
    for (_, state), (_, other) in zip(
        every, forms_and_states(small(**SIX, **{"trainer.log_freq": log_freq})), strict=True
    ):
        torch.testing.assert_close(state["params"].to_dict(), other["params"].to_dict())
    assert process.started == 1


@pytest.mark.slow
def test_iterations_before_the_switch_have_the_bits_of_eager_ones_and_later_ones_of_compiled_ones(process):
    (_, third), *_, (_, last) = forms_and_states(small(**SIX, **BACKGROUND))[2:]
    assert same(third, forms_and_states(small(**SIX))[2][1])
    assert same(last, last_state(small(**SIX, **{"trainer.compile": "on"}), third))
    assert not same(last, last_state(small(**SIX))), "compiled code rounds in another way"


@pytest.mark.traced
def test_eager_iterations_leave_a_thread_to_the_process(process, monkeypatch):
    threads, before, jit_call = [], torch.get_num_threads(), BackgroundJit.__call__

    def counting(self, fn, *static):
        call = jit_call(self, fn, *static)
        return lambda *args: threads.append(torch.get_num_threads()) or call(*args)

    monkeypatch.setattr(BackgroundJit, "__call__", counting)
    torch.set_num_threads(3)
    try:
        for record in train_iter(init_state(small(**SIX, **BACKGROUND)), small(**SIX, **BACKGROUND)):
            assert torch.get_num_threads() == 3 and record
    finally:
        torch.set_num_threads(before)
    eager = threads.index(3)
    assert {*threads[:eager]} == {2} and {*threads[eager:]} == {3}, "two threads, and three from the switch on"


def test_a_process_that_fails_causes_one_warning_and_an_eager_run(process):
    process.status = 2
    text = r"trainer\.compile: background: running eager, slower per step: no module named my_envs"
    with pytest.warns(RuntimeWarning, match=text) as caught:
        every = forms_and_states(small(**SIX, **BACKGROUND))
    assert len(caught) == 1 and caught[0].filename == __file__
    assert [form for form, _ in every] == ["eager"] * 6
    assert same(every[-1][1], last_state(small(**SIX)))


def test_a_short_run_ends_before_the_process_and_stops_it(monkeypatch):
    command = [sys.executable, "-c", "import time; time.sleep(1e6)"]
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(background, "_command", lambda cfg, folder: command)
    monkeypatch.setattr(background, "Popen", lambda *args, **keys: started.append(popen(*args, **keys)) or started[-1])
    cfg = small(**BACKGROUND)
    assert same(last_state(cfg), last_state(small()))
    records = train_iter(init_state(cfg), cfg)
    next(records)
    assert started[1].poll() is None
    records.close()
    assert [one.poll() for one in started] == [-9, -9]


@pytest.mark.long
def test_another_process_compiles_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cfg = small(**BACKGROUND, **{"trainer.iterations": 10**6})
    run = build(cfg)
    number = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the process must not fail
        records = iterations(run, first_state(run, cfg), cfg)
        while form_in_use(run) == "eager" or number < 10:
            next(records)
            number += 1
    assert form_in_use(run) == "compiled" and switch_of(run.jit).compiled_from > 0
    assert any(tmp_path.rglob("*.so"))


def in_folder(cfg, folder: Path):
    """Train in a run folder and return the last state."""
    return train(init_state(cfg), cfg, folder, progress=False)[0]


@pytest.mark.traced
def test_a_resumed_run_switches_after_the_same_iteration(process, tmp_path):
    cfg = small(**SIX, **BACKGROUND)
    last = in_folder(cfg, tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / FILE).read_text()) == {"compiled_from": 3}
    forms = [read_manifest(path)["form"] for path in sorted((tmp_path / "whole/checkpoints").glob("step_*"))]
    assert sorted(forms) == ["compiled"] * 3 + ["eager"] * 3
    for iteration in (1, 3, 4):
        folder = tmp_path / str(iteration)
        shutil.copytree(tmp_path / "whole", folder)
        for path in (folder / "checkpoints").glob("step_*"):
            if int(path.name.removeprefix("step_")) > 32 * iteration:
                shutil.rmtree(path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # the form of the run has not changed
            state, own = resume(folder)
            assert int(state["sample_step"]) == 32 * iteration
            state, _ = train(state, own, folder, progress=False)
        assert same(state, last)
        forms = {
            int(p.name.removeprefix("step_")): read_manifest(p)["form"] for p in (folder / "checkpoints").iterdir()
        }
        assert forms == {32 * n: "eager" if n <= 3 else "compiled" for n in range(1, 7)}
    assert process.started == 1, "a resumed run knows its iteration"


@pytest.mark.traced
def test_a_run_that_stopped_before_the_switch_compiles_in_the_background_again(process, tmp_path):
    cfg = small(**SIX, **BACKGROUND)
    in_folder(cfg.replace(**{"trainer.iterations": 2}), tmp_path)
    assert not (tmp_path / FILE).exists()
    state, _ = resume(tmp_path, overrides={"trainer.iterations": 6}, force=True)
    train(state, cfg, tmp_path, progress=False)
    assert json.loads((tmp_path / FILE).read_text()) == {"compiled_from": 5}
    assert read_manifest(latest(tmp_path))["form"] == "compiled" and process.started == 2


def test_a_damaged_file_and_a_full_disk_are_one_line(process, tmp_path, monkeypatch):
    cfg = small(**SIX, **BACKGROUND)
    in_folder(cfg.replace(**{"trainer.iterations": 2}), tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CheckpointError, match=r"compiled_from\.json: damaged; delete the file"):
        resume(tmp_path)

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ecrl.run.compiled_from.replace_file", full)
    with pytest.raises(CheckpointError, match=r"compiled_from\.json: cannot be written: No space left"):
        in_folder(cfg, tmp_path / "full")


def test_runs_that_cannot_be_compiled_in_the_background_are_one_line(monkeypatch):
    monkeypatch.setattr("ecrl.loop.build.world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"trainer\.compile: background, but the run has 2 processes"):
        build(small(**BACKGROUND))
    monkeypatch.undo()
    monkeypatch.setattr("ecrl.loop.build.device_of", lambda cfg: torch.device("cuda"))
    monkeypatch.setattr("ecrl.compile.jit.gpu_fault", lambda: None)
    with pytest.raises(ConfigError, match=r"trainer\.compile: background, but trainer\.device is cuda"):
        build(small(**BACKGROUND))


@pytest.mark.traced
def test_other_functions_of_the_run_are_compiled_at_once(process):
    cfg = small(**BACKGROUND)
    make_iteration(cfg)(init_state(cfg))
    assert len(compile_ahead(cfg)) >= 1 and process.started == 0


@pytest.mark.traced
def test_train_many_trains_such_runs_one_after_the_other(process):
    members = train_many(small(**BACKGROUND), seeds=[0, 1], progress=False)
    assert process.started == 2
    for seed in (0, 1):
        alone = last_state(small(**{"trainer.seed": seed}))
        torch.testing.assert_close(members[seed].state["params"].to_dict(), alone["params"].to_dict())


def test_a_profiled_run_is_compiled_at_once():
    run = build(small(**BACKGROUND))
    switch_of(run.jit).eager = True  # as in a resumed run
    with_timers(Times(), run)
    assert form_in_use(run) == "compiled"


@pytest.mark.traced
@pytest.mark.parametrize(("polls", "form"), [(0, "compiled"), (99, "eager")])
def test_a_crash_is_repeated_in_the_form_of_its_iteration(process, tmp_path, polls, form):
    process.polls = polls
    cfg = small(**SIX, **BACKGROUND, **{"algorithm.cfg.learning_rate": 3e38})
    with pytest.raises(NotFiniteError, match="ecrl replay"):
        in_folder(cfg, tmp_path)
    assert json.loads((tmp_path / "crash/report.json").read_text())["form"] == form
    lines = list(replay(tmp_path / "crash"))
    assert lines[1].startswith(f"{form}: NaN or infinity in") and "again" in lines[1]
    assert process.started == 1
