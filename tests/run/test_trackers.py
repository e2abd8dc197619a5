"""TensorBoard and Weights & Biases: the same names over env steps, and the config. Their failures never end a run."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from support.log_records import NAMES, RECORDS, record
from support.paths import ROOT
from support.small_runs import small
from support.wandb_files import logged
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from ecrl.errors import UserError
from ecrl.loop.iteration import init_state
from ecrl.run import loggers
from ecrl.run.trackers import hyperparameters, with_tensorboard, with_wandb
from ecrl.run.train import train


def events_in(folder):
    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_names_and_steps(tmp_path):
    list(with_tensorboard(iter(RECORDS), small(), tmp_path))
    events = events_in(tmp_path)
    assert set(events.Tags()["scalars"]) == NAMES
    assert [(e.step, e.value) for e in events.Scalars("train/policy_loss")] == [(10, 0.5), (20, 0.25)]
    assert [(e.step, e.value) for e in events.Scalars("charts/episode_reward_avg_100")] == [(20, 7.0)]


def test_tensorboard_has_the_config_as_a_table_and_as_hyperparameters_of_this_run(tmp_path):
    cfg = small(**{"algorithm.cfg.clip_coef": 0.125})
    list(with_tensorboard(iter(RECORDS), cfg, tmp_path))
    assert [p.is_file() for p in tmp_path.iterdir()] == [True]  # no separate run folder
    events = events_in(tmp_path)
    table = events.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "|algorithm.cfg.clip_coef|0.125|" in table
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    params = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert params["algorithm.cfg.clip_coef"].number_value == 0.125
    assert params["env.name"].string_value == "cartpole"
    assert params["policy.actor.network_cfg.hidden_sizes"].string_value == "[8]"


def test_hyperparameters_are_every_key_of_the_config_that_is_set():
    flat = hyperparameters(small())
    assert flat["trainer.num_envs"] == 4
    assert flat["trainer.enable_eval"] is False
    assert "trainer.eval_seed" not in flat  # null


def test_a_resumed_tensorboard_hides_what_was_written_beyond_the_checkpoint(tmp_path):
    list(with_tensorboard(iter([record("train", s, policy_loss=1.0) for s in (10, 20, 30)]), small(), tmp_path))
    list(with_tensorboard(iter([record("train", s, policy_loss=2.0) for s in (30, 40)]), small(), tmp_path, start=20))
    points = [(e.step, e.value) for e in events_in(tmp_path).Scalars("train/policy_loss")]
    assert points == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0)]


def test_a_full_disk_under_tensorboard_warns_once_and_loses_nothing(tmp_path, monkeypatch):
    written, append = [], loggers.append

    def full(path, data):
        written.append(len(data))
        if len(written) in (2, 3, 4):
            raise OSError(28, "No space left on device")
        append(path, data)

    monkeypatch.setattr(loggers, "append", full)
    with pytest.warns(UserWarning) as caught:
        assert len(list(with_tensorboard(iter(RECORDS), small(), tmp_path))) == len(RECORDS)
    messages = [str(w.message).split("; ")[0].split(": ")[-1] for w in caught]
    assert messages == ["[Errno 28] No space left on device", "works again, after 3 failures"]
    events = events_in(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("train/policy_loss")] == [(10, 0.5), (20, 0.25)]


def test_tensorboard_has_each_record_when_it_is_passed_on(tmp_path):
    threads = threading.active_count()
    records = with_tensorboard(iter(RECORDS), small(), tmp_path)
    for _ in range(2):
        next(records)
    assert events_in(tmp_path).Scalars("train/entropy")[0].value == 2.0
    assert threading.active_count() == threads


TRACK = """
import json, os, pathlib, sys, time, warnings
import ecrl.run.trackers
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.trackers import with_wandb
from ecrl.run.train import train
from support.paths import ROOT
from support.small_runs import small

cfg = small(**{"trainer.wandb_project_name": "a-project", "trainer.exp_name": "a-name"})

def records(ending):
    for i, record in enumerate(train_iter(init_state(cfg), cfg)):
        if ending == "raise" and i == 4:
            raise RuntimeError("stop")
        yield record

def kill_core():
    for children in pathlib.Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            if "wandb-core" in pathlib.Path("/proc", pid, "cmdline").read_text():
                os.kill(int(pid), 9)
                time.sleep(0.5)

def run(folder, ending):
    os.makedirs(folder)
    if ending == "killed":
        ecrl.run.trackers._RETRY = 0.0
    for i, record in enumerate(with_wandb(records(ending), cfg, folder)):
        if ending == "break" and i == 3:
            break
        if ending == "killed" and i == 3:
            kill_core()
    return record["state"]

plain, _ = train(init_state(cfg), cfg, "plain", progress=False)
out = {"imported": "wandb" in sys.modules, "warnings": {}}
for ending in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            state = run(ending, ending)
        except RuntimeError as error:
            assert str(error) == "stop"
    out["warnings"][ending] = [str(w.message) for w in caught if "W&B" in str(w.message)]
    if ending == "end":
        same = [(a == b).all().item() for a, b in zip(plain.values(True, True), state.values(True, True))]
        out["same"] = len(same) > 20 and all(same)
print("OUT" + json.dumps(out))
"""


def tracked(folder, *endings, **env):
    """Train under W&B in a process with its own home, each run in a folder named by its ending. Return its output."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    env = keep | {"HOME": str(folder), "PYTHONPATH": path, "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"} | env
    run = [sys.executable, "-c", TRACK, *endings]
    done = subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("OUT")[1])


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("wandb")
    return folder, tracked(folder, "end", "break", "raise")


@pytest.mark.parametrize(("ending", "code", "count"), [("end", 0, 8), ("break", 0, 4), ("raise", 1, 4)])
def test_wandb_offline_has_names_steps_config_and_how_the_run_ended(offline, ending, code, count):
    folder, output = offline
    assert len(output["warnings"][ending]) == 1
    assert "no API key is configured (wandb login); tracking offline" in output["warnings"][ending][0]
    name, config, rows, exits = logged(folder / ending)
    assert name == ("a-project", "a-name")
    assert config["algorithm"]["cfg"]["batch_size"] == 10
    assert exits == [code]
    assert [row["sample_step"] for row in rows] == [32, 32, 64, 64, 96, 96, 128, 128][:count]
    names = {key for row in rows for key in row if not key.startswith("_")}
    assert {"train/policy_loss", "train/entropy", "charts/SPS"} <= names
    assert {name.split("/")[0] for name in names} <= {"train", "charts", "sample_step"}


def test_wandb_is_not_imported_unless_used_and_leaves_training_as_it_is(offline):
    assert offline[1]["imported"] is False
    assert offline[1]["same"] is True


@pytest.mark.long
@pytest.mark.parametrize("server", ["refuses", "is silent"])
def test_a_server_that_does_not_answer_leaves_the_run_as_it_is(server, tmp_path):
    pytest.importorskip("wandb")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if server == "is silent":
            listener.listen(50)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        output = tracked(tmp_path, "end", WANDB_BASE_URL=url, WANDB_API_KEY="a" * 40)
    assert len(output["warnings"]["end"]) == 1
    assert "tracking offline" in output["warnings"]["end"][0]
    assert output["same"]
    assert len(logged(tmp_path / "end")[2]) == 8


def test_a_missing_wandb_is_reported_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'ecrl\[wandb\]'"):
        next(with_wandb(iter(RECORDS), small(), tmp_path))
    cfg = small(**{"trainer.use_wandb": True})
    with pytest.raises(UserError, match=r"^trainer.use_wandb: .* pip install 'ecrl\[wandb\]'"):
        train(init_state(cfg), cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists(), "the folder is free for the run that follows"


class Tracker:
    """A run of W&B whose process dies after some rows."""

    def __init__(self, lives):
        self.lives, self.rows = lives, []

    def define_metric(self, *args, **kwargs):
        pass

    def log(self, row):
        if len(self.rows) == self.lives:
            raise ConnectionResetError("Connection lost")
        self.rows.append(row["sample_step"])

    def finish(self, code):
        self.rows.append(f"exit {code}")


@pytest.mark.parametrize(("retry", "more"), [(60.0, []), (0.0, [10, 20, 20, "exit 0"])])
def test_a_tracker_that_dies_is_begun_again_later_and_never_ends_the_run(tmp_path, monkeypatch, retry, more):
    trackers = [Tracker(1), Tracker(9)]
    made = iter(trackers)
    monkeypatch.setattr("ecrl.run.trackers._wandb_run", lambda cfg, folder: next(made))
    monkeypatch.setattr("ecrl.run.trackers._RETRY", retry)
    with pytest.warns(UserWarning) as caught:
        assert len(list(with_wandb(iter(RECORDS), small(), tmp_path))) == len(RECORDS)
    messages = [str(w.message) for w in caught]
    assert messages[0] == "W&B: Connection lost; the run goes on and tries again"
    assert messages[1:] == (["W&B: works again, after 1 failure"] if more else [])
    assert [t.rows for t in trackers] == [[10], more]


@pytest.mark.slow
def test_wandb_goes_on_in_a_new_process_when_its_own_is_killed(tmp_path):
    pytest.importorskip("wandb")
    output = tracked(tmp_path, "killed")
    lost, again = [line for line in output["warnings"]["killed"] if "no API key" not in line]
    assert "Connection" in lost and lost.endswith("; the run goes on and tries again")
    assert again == "W&B: works again, after 1 failure"
