"""The commands that need no run: the version, the presets, and options that are keys of the config."""

import errno
import os
import re

import pytest
from support.command_line import called

import ecrl
from ecrl.config.presets import preset_names


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert called(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"ecrl {ecrl.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", ecrl.__version__)


def test_every_preset_has_a_line(monkeypatch, capsys):
    assert called(monkeypatch, "presets") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == list(preset_names()) and all(len(row) == 3 for row in rows)
    assert ["cartpole_ppo", "ppo", "cartpole"] in rows and ["acrobot_dqn", "dqn", "gymnasium:Acrobot-v1"] in rows


def test_a_file_system_without_writes_is_one_line(monkeypatch, capsys):
    def read_only():
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/media/disc/run")

    monkeypatch.setattr("ecrl.config.presets.preset_names", read_only)
    assert called(monkeypatch, "presets") == 2
    assert capsys.readouterr().err == "/media/disc/run: Read-only file system; choose another place\n"


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (["train", "cartpole_ppo", "--seed", "3"], "--trainer.seed"),
        (["train", "cartpole_ppo", "--lr=1e-3"], "--algorithm.cfg.learning_rate"),
        (["train", "cartpole_ppo", "--n_steps", "3"], "--trainer.buffer_size"),
        (["train", "cartpole_ppo", "--num-steps", "3"], "--trainer.buffer_size"),
        (["check", "cartpole_ppo", "--gamma", "0.9"], "--algorithm.cfg.gamma"),
        (["check", "cartpole_ppo", "--normalize-obs", "true"], "--policy.normalize_obs"),
        (["train", "cartpole_ppo", "--train-frequency", "4"], "--trainer.train_frequency"),  # of abcdRL
        (["train", "cartpole_ppo", "--no-cuda"], "--trainer.no_cuda"),
        (["train", "cartpole_ppo", "--eval-frequency", "4"], "--evaluator.eval_frequency"),
    ],
)
def test_an_option_without_its_section_is_one_line_with_the_key(monkeypatch, capsys, args, key):
    assert called(monkeypatch, *args) == 2
    option = args[2].partition("=")[0]
    expected = f"{option}: no option of ecrl {args[0]}; set the key of the config: {key}\n"
    assert capsys.readouterr().err == expected


def test_options_of_the_command_itself_are_left_alone(monkeypatch, capsys):
    assert called(monkeypatch, "check-env", "probe_match", "--num-steps", "8", "--seed", "3") == 0
    assert called(monkeypatch, "train", "cartpole_ppo", "--nothing", "3") == 2
    assert "Unrecognized options: --nothing" in capsys.readouterr().err


def test_flags_of_abcdrl_need_no_value(monkeypatch, capsys):
    flags = ("--trainer.no-cuda", "--trainer.capture-video", "cartpole_ppo", "--trainer.anneal-lr")
    with pytest.warns(UserWarning, match=r"^trainer\.capture_video has no meaning here"):
        assert called(monkeypatch, "check", *flags) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "cartpole_ppo: ok"
