"""From a config file to a run folder, in process and from the shell."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.command_line import called
from support.fake_envs import LadderConfig  # noqa: F401  (registers ladder)
from support.long_cases import long_except
from support.small_runs import last_state, same, small

import ecrl
from ecrl import distributed
from ecrl.errors import CheckpointError, ConfigError, NotSavedError
from ecrl.registry import registered
from ecrl.run.checkpoint import latest, load
from ecrl.run.folder import new_run_dir
from ecrl.run.resume import resume
from ecrl.run.train import train, train_from_config
from ecrl.storage.atomic_files import lock_folder


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(small().model_dump(mode="json")))
    return path


def cli(*args, cwd=None):
    """Run the command line in a separate process."""
    return subprocess.run([sys.executable, "-m", "ecrl", *map(str, args)], capture_output=True, text=True, cwd=cwd)


def test_train_returns_the_last_state_and_a_row_per_iteration():
    cfg = small()
    state, history = train(ecrl.init_state(cfg), cfg, progress=False)
    assert same(state, last_state(cfg))
    assert [row["sample_step"] for row in history] == [32, 64, 96, 128]


def test_a_last_state_that_cannot_be_saved_is_not_lost(tmp_path, monkeypatch):
    def full(path, saved):
        raise CheckpointError(f"{path}: cannot be written: disk full")

    monkeypatch.setattr("ecrl.run.checkpointing.write", full)
    cfg = small()
    with pytest.raises(NotSavedError, match="step_128: cannot be written: disk full; nothing is lost") as error:
        train(ecrl.init_state(cfg), cfg, run_dir=tmp_path / "run", progress=False)
    assert same(error.value.state, last_state(cfg))
    assert [row["sample_step"] for row in error.value.history] == [32, 64, 96, 128]


@pytest.mark.parametrize("shown", [{"progress": True}, {"progress": False, "profile": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.*profile.* No space left on device.* the run goes on")
def test_nor_is_that_of_a_run_that_was_stopped(tmp_path, monkeypatch, shown):
    def full(path, saved):
        raise CheckpointError(f"{path}: cannot be written: disk full")

    def write_text(path, *text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ecrl.run.checkpointing.write", full)
    monkeypatch.setattr("ecrl.run.profiler.Path.write_text", write_text)
    monkeypatch.setattr("ecrl.run.train.asked", lambda: signal.SIGTERM)
    cfg = small()
    with pytest.raises(NotSavedError, match="step_32: cannot be written: disk full; nothing is lost") as error:
        train(ecrl.init_state(cfg), cfg, tmp_path / "run", **shown)
    assert int(error.value.state["sample_step"]) == 32


def test_train_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = small()
    train(ecrl.init_state(cfg), cfg)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_has_everything(config_file, capsys):
    state, history = train_from_config(config_file)
    (run,) = (config_file.parent / "outputs").iterdir()
    assert run.name.startswith("generic_exp_20")
    assert sorted(p.name for p in run.iterdir()) == [".lock", "checkpoints", "config.json", "logs", "metrics.jsonl"]
    assert ecrl.load_config(run / "config.json") == small()
    assert same(load(latest(run))[0], state)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2 * len(history)
    out = capsys.readouterr().out
    assert "cartpole, actor_critic, ppo, seed 1" in out
    assert "cpu, eager (trainer.compile is off), world size 1" in out
    assert "128 env steps, 4 iterations" in out
    envs, *_ = (line for line in out.splitlines() if line.startswith("known    envs "))
    assert re.fullmatch(r"known    envs \S+, \S+, \S+ and \d+ more; algorithms .* more; policies .* more", envs)
    assert "spaces   observations Box(low -inf to -0.41888, high 0.41888 to inf, (4,), float32)" in out


def test_exp_name_names_the_folder(config_file):
    config_file.write_text(json.dumps(small(**{"trainer.exp_name": "mine"}).model_dump(mode="json")))
    train_from_config(config_file)
    (run,) = (config_file.parent / "outputs").iterdir()
    assert run.name.startswith("mine_20")


def test_two_runs_in_one_second_do_not_meet(config_file, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260101_000000")
    claimed = {new_run_dir(small()).name for _ in range(3)}  # none has written anything yet
    assert claimed == {f"generic_exp_20260101_000000{end}" for end in ("", "_2", "_3")}


@pytest.mark.parametrize("existing", ["config.json", "metrics.jsonl", "checkpoints"])
def test_a_folder_that_holds_a_run_is_refused(config_file, tmp_path, existing):
    run = tmp_path / "run"
    run.mkdir()
    (run / existing).write_text("")  # as a killed run leaves it
    advice = "choose another folder, or resume that run"
    advice += " from its beginning, because it has no checkpoint yet" * (existing == "config.json")
    with pytest.raises(ConfigError, match=rf"already holds a run \({existing}\); {advice}$"):
        train_from_config(config_file, run_dir=run)
    with pytest.raises(ConfigError, match="already holds a run"):
        train(ecrl.init_state(small()), small(), run)


def test_a_run_goes_on_in_its_own_folder(tmp_path):
    cfg = small()
    half = [r["state"] for r in ecrl.train_iter(ecrl.init_state(cfg), cfg)][3]
    train(half, cfg, tmp_path / "run", progress=False)  # from a state that was not saved there
    with pytest.raises(ConfigError, match="already holds a run"):  # `resume` would continue from the newer checkpoint
        train(half, cfg, tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(half, cfg, tmp_path / "run", progress=False)
    assert _steps_logged(tmp_path / "run") == [96, 96, 128, 128], "each step is logged once"
    state, _ = load(latest(tmp_path / "run"))
    more = cfg.replace(**{"trainer.iterations": 6})  # another config, with the weights of the checkpoint
    train(state, more, tmp_path / "run", progress=False)
    assert _steps_logged(tmp_path / "run") == [96, 96, 128, 128, 160, 160, 192, 192]


def test_a_run_goes_on_from_its_best_in_its_own_folder(tmp_path):
    cfg = small(**{"trainer.enable_eval": True, "trainer.eval_freq": 32, "trainer.num_eval_episodes": 2})
    train(ecrl.init_state(cfg), cfg, tmp_path, progress=False)
    state, _ = load(tmp_path / "checkpoints" / "best")
    step = int(state["sample_step"])
    shutil.rmtree(tmp_path / "checkpoints" / "step_128")
    more = cfg.replace(**{"trainer.iterations": step // 32 + 1})
    _, history = train(state, more, tmp_path, progress=False)
    assert [row["sample_step"] for row in history] == [step + 32]


def test_a_run_does_not_go_on_from_before_its_newest_checkpoint_unless_that_is_damaged(tmp_path):
    cfg = small(**{"trainer.save_freq": 64})
    train(ecrl.init_state(cfg), cfg, tmp_path, progress=False)
    state, _ = load(tmp_path / "checkpoints" / "step_64")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(state, cfg, tmp_path, progress=False)
    (tmp_path / "checkpoints" / "step_128" / "state.safetensors").write_bytes(b"")
    train(state, cfg, tmp_path, progress=False)
    assert _steps_logged(tmp_path) == [32, 32, 64, 64, 96, 96, 128, 128]
    assert latest(tmp_path).name == "step_128"


def test_a_run_that_was_stopped_before_it_logged_anything_begins_again_in_its_folder(tmp_path):
    cfg = small()
    train(ecrl.init_state(cfg), cfg, tmp_path / "run", progress=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    state, again = resume(tmp_path / "run")
    assert int(state["sample_step"]) == 0
    train(state, again, tmp_path / "run", progress=False)
    assert _steps_logged(tmp_path / "run") == [32, 32, 64, 64, 96, 96, 128, 128]


def _steps_logged(run):
    return [json.loads(row)["sample_step"] for row in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:the state has 128 steps")
@pytest.mark.parametrize("same_steps", [True, False])
@pytest.mark.parametrize("with_cfg_of", ["one", "other"])
def test_a_run_does_not_go_on_in_the_folder_of_another(tmp_path, same_steps, with_cfg_of):
    one, other = small(), small(**{"trainer.seed": 2, "trainer.iterations": 4 if same_steps else 3})
    state, _ = train(ecrl.init_state(one), one, tmp_path / "one", progress=False)
    train(ecrl.init_state(other), other, tmp_path / "other", progress=False)
    more = one.replace(**{"trainer.iterations": 6})
    before = (tmp_path / "other" / "metrics.jsonl").read_bytes()
    if with_cfg_of == "one" or same_steps:  # otherwise it may be an unsaved state of that run
        with pytest.raises(ConfigError, match="other already holds a run"):
            train(state, more if with_cfg_of == "one" else other, tmp_path / "other", progress=False)
    assert (tmp_path / "other" / "metrics.jsonl").read_bytes() == before
    train(state, more, tmp_path / "new", progress=False)
    assert _steps_logged(tmp_path / "new") == [160, 160, 192, 192]


@pytest.mark.parametrize("place", ["small.json", "small.json/below"])
def test_a_folder_that_cannot_be_created_is_reported(config_file, place):
    with pytest.raises(ConfigError, match=f"run_dir: {place}: cannot be created: "):
        train_from_config(config_file, run_dir=place)


def test_enable_eval_adds_evaluations_to_the_history():
    plain = small(**{"trainer.eval_freq": 64})
    cfg = plain.replace(**{"trainer.enable_eval": True})
    rows = [train(ecrl.init_state(c), c, progress=False)[1] for c in (plain, cfg)]
    assert ["eval/avg_reward" in row for row in rows[0]] == [False] * 4
    assert ["eval/avg_reward" in row for row in rows[1]] == [False, True, False, True]


def test_ctrl_c_returns_what_there_is(tmp_path, monkeypatch, capsys):
    cfg = small()
    make, calls = ecrl.loop.build.make_algorithm, []

    def interrupted(block):
        algorithm = make(block)

        def iterate(run, state, borrowed):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return algorithm.iterate(run, state, borrowed)

        return replace(algorithm, iterate=iterate)

    monkeypatch.setattr("ecrl.loop.build.make_algorithm", interrupted)
    state, history = train(ecrl.init_state(cfg), cfg, tmp_path / "run")
    assert int(state["sample_step"]) == 64
    assert len(history) == 2
    assert latest(tmp_path / "run").name == "step_64"
    assert f"interrupted at 64 env steps; the run's checkpoint is in {tmp_path / 'run'}" in capsys.readouterr().out


@pytest.mark.parametrize("number", long_except([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_a_run_saved_and_with_its_exit_status(config_file, number):
    data = small(**{"trainer.iterations": 10**6}).model_dump(mode="json")
    config_file.write_text(json.dumps(data))
    command = [sys.executable, "-m", "ecrl", "train", "small.json", "--run-dir", "run"]
    run = subprocess.Popen(command, cwd=config_file.parent, stdout=subprocess.PIPE, text=True)
    metrics = config_file.parent / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 4):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 128 + number
    assert "the run's checkpoint is in run" in out
    assert int(load(latest(config_file.parent / "run"))[0]["sample_step"]) >= 64


def test_a_distributed_run_needs_what_torchrun_sets(config_file, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"trainer.distributed: RANK is not set; start with torchrun"):
        train_from_config(config_file, distributed=True)
    train_from_config(config_file, distributed=False)
    config_file.write_text(json.dumps(small(**{"trainer.distributed": True}).model_dump(mode="json")))
    with pytest.raises(ConfigError, match="RANK is not set"):
        train_from_config(config_file)


@pytest.mark.parametrize("port", ["99999", "taken"])
def test_an_unreachable_store_is_one_line(port):
    taken = socket.create_server(("localhost", 0))
    port = port if port.isdecimal() else str(taken.getsockname()[1])
    environ = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with (
        taken,
        pytest.raises(
            ConfigError, match=rf"^trainer.distributed: MASTER_ADDR localhost, MASTER_PORT {port}: "
        ) as error,
    ):
        distributed.start(True, environ)
    assert "\n" not in str(error.value) and distributed.world_size() == 1


HOLD_FOLDER = """
import sys, pathlib
from ecrl.storage.atomic_files import lock_folder
with lock_folder(pathlib.Path('run')): print(flush=True), sys.stdin.read()
"""


def test_two_processes_do_not_go_on_in_one_folder(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "train", config_file, "--run-dir", "run") == 0
    rows = Path("run/metrics.jsonl").read_bytes()
    other = subprocess.Popen([sys.executable, "-c", HOLD_FOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert (
        other.stdout is not None and other.stdout.readline() and "the run has finished" not in capsys.readouterr().out
    )
    assert called(monkeypatch, "train", "--resume", "run") == 2
    assert capsys.readouterr().err == "run_dir: run: another process trains in this folder; wait until it ends\n"
    other.communicate(b"")
    assert called(monkeypatch, "train", "--resume", "run") == 0
    assert (
        "the run has finished; to train for longer" in capsys.readouterr().out
        and Path("run/metrics.jsonl").read_bytes() == rows
    )


def test_the_end_of_an_inner_lock_releases_no_outer_lock(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    command = [sys.executable, "-c", HOLD_FOLDER]
    with lock_folder(Path("run")):
        with lock_folder(Path("../", tmp_path.name, "run")):
            pass
        refused = subprocess.run(command, input=b"", capture_output=True)
        assert refused.returncode == 1 and b"BlockingIOError" in refused.stderr
    assert subprocess.run(command, input=b"", capture_output=True).returncode == 0


LOCK_IN_A_FORK = """
import os, pathlib, sys
from ecrl.storage.atomic_files import lock_folder
with lock_folder(pathlib.Path('run')):
    child = os.fork()
    if not child:
        try:
            with lock_folder(pathlib.Path('run')): os._exit(0)
        except BlockingIOError:
            os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_does_not_inherit_the_lock(tmp_path):
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", LOCK_IN_A_FORK]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout == "7\n"


def test_a_distributed_run_without_torchrun_warns(config_file, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.warns(
        UserWarning,
        match=r"^trainer.distributed: torchrun did not start this process, so .* one process; start it with torchrun$",
    ):
        train_from_config(config_file, distributed=True)


def test_a_run_whose_config_is_lost_goes_on_with_that_of_its_checkpoint(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "train", config_file, "--run-dir", "run") == 0
    whole = Path("run/config.json").read_bytes()
    for damaged in (b"{", None):
        Path("run/config.json").unlink() if damaged is None else Path("run/config.json").write_bytes(damaged)
        assert called(monkeypatch, "train", "--resume", "run") == 0
        assert Path("run/config.json").read_bytes() == whole


def test_device_auto_is_cuda_where_there_is_one():
    state = ecrl.init_state(small(**{"trainer.device": "auto"}))
    assert state["key"].is_cuda == torch.cuda.is_available()


def test_the_shell_trains_and_evaluates(config_file):
    cwd = config_file.parent
    done = cli("train", "small.json", "--run-dir", "run", cwd=cwd)
    assert done.returncode == 0, done.stderr
    done = cli("eval", "run", "--num-episodes", "4", cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "step_128 on cartpole, 4 episodes" in done.stdout
    assert "eval/avg_reward" in done.stdout


def test_the_device_of_an_evaluation_is_given_once(tmp_path, monkeypatch, capsys):
    cfg = small()
    train(ecrl.init_state(cfg), cfg, tmp_path / "run", progress=False)
    assert called(monkeypatch, "eval", tmp_path / "run", "--num-episodes", 2, "--trainer.device", "cpu") == 2
    assert capsys.readouterr().err == "--trainer.device: use --device to set the device\n"
    assert called(monkeypatch, "eval", tmp_path / "run", "--num-episodes", 2, "--device", "cpu") == 0


@pytest.mark.parametrize(("flag", "message"), [("--distributed", "RANK is not set"), ("--no-distributed", "")])
def test_the_shell_decides_over_the_config(config_file, flag, message, monkeypatch, capsys):
    config_file.write_text(json.dumps(small(**{"trainer.distributed": not message}).model_dump(mode="json")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert called(monkeypatch, "train", "--config", config_file, flag) == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_eval_on_gymnasium_from_the_shell(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "train", config_file, "--run-dir", "run") == 0
    assert called(monkeypatch, "eval", "run", "--env", "gymnasium:CartPole-v1", "--num-episodes", "2") == 0
    assert "on gymnasium:CartPole-v1, 2 episodes" in capsys.readouterr().out


def test_eval_under_other_keys_of_the_environment(config_file, monkeypatch, capsys):
    def evaluated(*keys):
        status = 0 if keys[0].startswith("--env") else 2
        assert called(monkeypatch, "eval", "run", "--num-episodes", "4", *keys) == status
        return capsys.readouterr()

    assert called(monkeypatch, "train", config_file, "--run-dir", "run") == 0
    capsys.readouterr()
    short = evaluated("--env.cfg.max_episode_steps", "5").out
    assert "eval/avg_length    5.00" in short
    assert "avg_length    5.00" not in evaluated("--env.cfg.max_episode_steps=400").out
    assert evaluated("--policy.name", "mine").err.startswith(
        "--policy.name: with a trained policy, you can only set keys of env and trainer"
    )
    page = "docs/migration.md#abcdrl-benchmarks-sweeps-and-saved-models"
    assert evaluated("--evaluater.seed", "1").err.endswith(f"; use an option instead (see {page})\n")
    misspelt = evaluated("--trianer.seed", "1").err
    assert misspelt.endswith("you can only set keys of env and trainer; did you mean 'trainer'?\n")
    assert evaluated("--trainer.tau", "0.5").err.endswith("; this is a flag of abcdRL; remove it\n")
    assert "trainer.num_eval_envs: " in evaluated("--trainer.num_eval_envs", "0").err
    assert called(monkeypatch, "eval", "run", "--env.name", "pendulum") == 2
    assert "env: the environment with these keys has observation_space" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"trainer": {"sede": 1, "num_envs": 0}}, ["trainer.sede: unknown key", "trainer.num_envs: "]),
        ({"trainer": {"device": "cuda:99"}}, ["trainer.device: cuda:99 is not available; available: cpu"]),
        ({"trainer": {"device": "tpu"}}, ["trainer.device: not a device: 'tpu'; expected cpu, cuda"]),
        ({"policy": {"action_dim": 3}}, ["small.json: policy.action_dim: 3 does not match the environment's 2"]),
        ({"policy": {"critic": None}}, ["policy.critic: "]),
    ],
)
def test_faults_exit_2_with_one_line_each(config_file, change, lines, monkeypatch, capsys):
    data = small().model_dump(mode="json")
    for section, keys in change.items():
        data[section] |= keys
    config_file.write_text(json.dumps(data))
    assert called(monkeypatch, "train", config_file) == 2
    stderr = capsys.readouterr().err
    assert len(stderr.splitlines()) == len(lines), stderr
    assert all(line in stderr for line in lines), stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train",), "ecrl train needs a config, such as"),
        (("train", "x.json", "--config", "x.json"), "two configs; pass only one"),
        (("train", "--distributed", "--no-distributed", "x.json"), "use only one"),
        (("eval", "nowhere"), "no checkpoint"),
        (("train", "--nonsense"), "nonsense"),
        (("train", "--resume", "run", "--run-dir", "other"), "continues in the folder of the run"),
        (("train", "x.json", "--force"), "--force works only with --resume"),
        (("train", "--resume", "nowhere"), "no checkpoint"),
        (
            ("export", "run", "--trainer.seed", "3"),
            "only these commands accept config keys: train, check, check-env, compile, eval",
        ),
        (("check",), "required"),
        (("export", "nowhere"), "no checkpoint"),
        (("fly",), "fly"),
    ],
)
def test_wrong_calls_exit_2(args, message, monkeypatch, capsys):
    assert called(monkeypatch, *args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("env.name", "cartpol", "unknown env 'cartpol'; did you mean 'cartpole'? If the env is your own"),
        ("policy.name", "qqq", "unknown policy 'qqq'; known: "),
        ("algorithm.name", "qqq", "unknown algorithm 'qqq'; known: "),
        ("policy.actor.type", "qqq", "unknown network 'qqq'; known: "),
    ],
)
def test_an_unknown_part_gives_a_hint_about_your_own_parts(key, name, message, config_file, monkeypatch, capsys):
    assert called(monkeypatch, "check", config_file, f"--{key}", name) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{config_file}: {key}: {message}")
    assert line.endswith("import its module first: import MODULE in Python, --import MODULE in a shell")


def test_other_errors_give_no_hint_about_your_own_parts(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "check", config_file, "--trainer.sede", "1") == 2
    assert "--import" not in capsys.readouterr().err


def test_a_fault_has_no_traceback_in_a_real_shell():
    done = cli("train", "nowhere.json")
    assert done.returncode == 2
    assert done.stderr.startswith("nowhere.json: no such file")
    assert len(done.stderr.splitlines()) == 1


def test_any_key_can_be_set_from_the_shell(config_file, monkeypatch, capsys):
    keys = ("--trainer.seed", "7", "--algorithm.cfg.gamma=0.9", "--trainer.enable-eval", "true")
    assert called(monkeypatch, "train", config_file, "--run-dir", "run", *keys) == 0
    _, cfg = load(latest("run"))
    assert (cfg.trainer.seed, cfg.algorithm.cfg.gamma, cfg.trainer.enable_eval) == (7, 0.9, True)
    assert called(monkeypatch, "train", config_file, "--trainer.sede", "7") == 2
    stderr = capsys.readouterr().err
    assert "trainer.sede: unknown key; did you mean 'seed'?" in stderr and len(stderr.splitlines()) == 1


def test_resume_from_the_shell(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "train", config_file, "--run-dir", "run", "--trainer.iterations", "2") == 0
    assert called(monkeypatch, "train", "--resume", "run", "--trainer.iterations", "4") == 2
    stderr = capsys.readouterr().err
    assert "trainer.iterations: 2 -> 4" in stderr and "--force" in stderr
    assert called(monkeypatch, "train", "--resume", "run", "--trainer.iterations", "4", "--force") == 0
    state, _ = load(latest("run"))
    assert same(state, last_state(small()))


def test_the_start_prints_what_runs_and_what_is_registered(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "train", config_file, "--run-dir", "run") == 0
    printed = capsys.readouterr().out
    for part in ("device   cpu, eager", "world size 1", "128 env steps, 4 iterations", "cartpole, "):
        assert part in printed, part
    known = re.search(r"known    envs (.*); algorithms (.*); policies (.*)", printed).groups()
    for kind, text in zip(("env", "algorithm", "policy"), known, strict=True):
        names = registered(kind)
        assert text == f"{', '.join(names[:3])} and {len(names) - 3} more"


def test_check_prints_what_would_run_or_every_fault(config_file, monkeypatch, capsys):
    assert called(monkeypatch, "check", config_file, "--trainer.num_envs", "8") == 0
    stdout = capsys.readouterr().out
    assert "256 env steps, 4 iterations" in stdout and stdout.endswith("small.json: ok\n")
    assert called(monkeypatch, "check", config_file, "--trainer.num_envs", "0", "--trainer.sede", "1") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert called(monkeypatch, "check", config_file, "--policy.action_dim", "5") == 2
    assert "policy.action_dim: 5 does not match" in capsys.readouterr().err
    assert list(config_file.parent.iterdir()) == [config_file], "nothing is written"


def test_schema_prints_json_with_every_part(monkeypatch, capsys):
    assert called(monkeypatch, "schema") == 0
    text = capsys.readouterr().out
    assert json.loads(text)["type"] == "object"
    assert all(name in text for name in ("cartpole", "actor_only", "grpo", "group_size"))


def test_a_warning_is_one_line_in_a_real_shell(config_file):
    done = cli("check", config_file, "--trainer.headless", "true")
    assert done.returncode == 0
    assert (
        done.stderr.startswith("warning: trainer.headless has no meaning here") and len(done.stderr.splitlines()) == 1
    )


@pytest.mark.parametrize("command", ["", "train", "eval", "check-env", "bench"])
def test_help_imports_neither_torch_nor_pydantic(command):
    args = ["ecrl", *command.split(), "--help"]
    code = f"import sys; sys.argv = {args}\nfrom ecrl.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'tensordict', 'numpy', 'pydantic', 'gymnasium') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "usage: ecrl" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
