"""Commands that take a run folder refuse a missing, foreign or damaged folder in one line per fault."""

import shutil
from pathlib import Path

import pytest
from support.command_line import called
from support.small_runs import small

import ecrl
from ecrl.run.checkpoint import latest

COMMANDS = {
    "eval": ("eval",),
    "record": ("record",),
    "export": ("export",),
    "demo": ("demo", "--run-dir"),
    "resume": ("train", "--resume"),
    "plot": ("plot",),
    "replay": ("replay",),
}
FROM_CHECKPOINT = ("eval", "record", "export", "demo", "resume")
EXPECTED = "expected {}/checkpoints/step_<N>, or a checkpoint folder"
EACH = f": no checkpoint: {EXPECTED}"
NO_RUN = {  # kind of path, what the commands that read checkpoints print after the path
    "missing": f": no checkpoint: the folder does not exist, {EXPECTED}",
    "empty": EACH,
    "file": f": no checkpoint: this is a file, {EXPECTED}",
    "run/checkpoints": EACH,
    "x" * 300: "/manifest.json: cannot be read: File name too long",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of two checkpoints, an empty folder and a file."""
    folder, cfg = tmp_path_factory.mktemp("runs"), small(**{"trainer.iterations": 2, "trainer.save_freq": 32})
    ecrl.train(ecrl.init_state(cfg), cfg, folder / "run", progress=False)
    (folder / "empty").mkdir()
    (folder / "file").write_text("no run")
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def lines_of(monkeypatch, capsys, command, path):
    capsys.readouterr()
    assert called(monkeypatch, *COMMANDS[command], path) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_without_a_run_is_refused_in_one_line(runs, monkeypatch, capsys, command):
    for path, message in NO_RUN.items():
        (line,) = lines_of(monkeypatch, capsys, command, path)
        assert line.startswith(path) and len(line) < 1100
        if command in FROM_CHECKPOINT and not (command == "resume" and len(path) == 300):
            assert line == path + message.format(path)
        else:
            assert any(word in line for word in ("; expected ", ": expected ", "; choose another place"))


@pytest.mark.parametrize("command", FROM_CHECKPOINT)
@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: (path / "state.safetensors").write_bytes(b"short"), "/state.safetensors: damaged: its checksum"),
        (lambda path: (path / "state.safetensors").unlink(), "/state.safetensors: missing"),
        (lambda path: (path / "config.json").write_text("{"), "/config.json: damaged: its checksum differs"),
        (lambda path: (path / "manifest.json").write_text("{"), "/manifest.json: damaged (Expecting"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"), "/manifest.json: damaged ("),
        (lambda path: (path / "manifest.json").unlink(), ": not a checkpoint: it has no manifest.json"),
        (lambda path: [file.unlink() for file in path.iterdir()], ": not a checkpoint: it has no manifest.json"),
    ],
)
def test_a_run_whose_checkpoints_are_damaged_has_a_line_for_each(runs, monkeypatch, capsys, command, damage, fault):
    for path in Path("run/checkpoints").iterdir():
        damage(path)
    *faults, last = lines_of(monkeypatch, capsys, command, "run")
    assert last == "run: every checkpoint is damaged; start a new run"
    assert [line[: len(f"run/checkpoints/step_32{fault}")] for line in faults] == [
        f"run/checkpoints/step_{step}{fault}" for step in (64, 32)
    ]


@pytest.mark.parametrize("command", [name for name in FROM_CHECKPOINT if name != "resume"])
def test_a_damaged_checkpoint_that_is_given_itself_is_refused(runs, monkeypatch, capsys, command):
    path = Path("run/checkpoints/step_64")
    (path / "state.safetensors").write_bytes(b"short")
    (line,) = lines_of(monkeypatch, capsys, command, str(path))
    assert line.startswith(f"{path}/state.safetensors: damaged: its checksum differs")


def test_the_checkpoint_before_a_damaged_one_is_evaluated(runs, monkeypatch, capsys):
    Path("run/checkpoints/step_64/state.safetensors").write_bytes(b"short")
    with pytest.warns(
        UserWarning, match="^run/checkpoints/step_64/state.safetensors: damaged.*; using step_32 instead"
    ):
        assert called(monkeypatch, "eval", "run", "--num-episodes", "4") == 0
    assert capsys.readouterr().out.startswith("run/checkpoints/step_32 on cartpole, 4 episodes")


def test_a_checkpoint_whose_replacement_was_interrupted_is_found(runs):
    """A kill between the two renames of `write_folder` leaves only the old folder."""
    Path("run/checkpoints/step_64").rename("run/checkpoints/.step_64.old")
    state, _ = ecrl.load(latest("run/checkpoints/step_64"))
    assert int(state["sample_step"]) == 64


def test_a_checkpoint_without_its_manifest_is_not_resumed_as_a_new_run(runs, monkeypatch, capsys):
    path = Path("run/checkpoints/step_64")
    (path / "manifest.json").unlink()
    (line,) = lines_of(monkeypatch, capsys, "resume", str(path))
    assert line == f"{path}: is a checkpoint; to resume, pass the folder of its run"
    assert {file.name for file in path.iterdir()} <= {"config.json", "state.safetensors"}


FOREIGN = {
    "empty": [],
    "another config": ["config.json"],
    "other checkpoints": ["config.json", "checkpoints/step_8/weights.bin"],
    "a checkpoint": ["manifest.json"],
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_resume_writes_nothing_to_a_folder_without_a_run(tmp_path, monkeypatch, capsys, kind):
    for name in FOREIGN[kind]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"layers": 3}')
    before = sorted(tmp_path.rglob("*"))
    lines_of(monkeypatch, capsys, "resume", str(tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", '{"trainer": 3}', "expected the config of a run"),
        ("config.json", "{", "not JSON: "),
        ("config.json", None, "Is a directory; choose another place"),
        ("metrics.jsonl", "{\n", "not JSON: "),
        ("metrics.jsonl", None, "Is a directory; choose another place"),
    ],
)
def test_plot_names_a_damaged_file_of_a_run(runs, monkeypatch, capsys, name, content, message):
    file = Path("run", name)
    file.unlink()
    file.mkdir() if content is None else file.write_text(content)
    (line,) = lines_of(monkeypatch, capsys, "plot", "run")
    assert line.startswith(f"run/{name}:") and message in line
