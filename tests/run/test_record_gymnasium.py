"""`ecrl record` of Gymnasium environments: each frame before its step, in a grid, without changing the run."""

import subprocess
import sys

import numpy as np
import pytest
from support import fake_atari, fake_gymnasium_envs
from support.camera_task import gl
from support.checks import assert_pure
from support.recurrent_agent import remembering
from support.small_runs import same, small
from support.video_files import frames

from ecrl.cli import main as cli
from ecrl.envs.gymnasium import handles as live
from ecrl.errors import ConfigError, UserError
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.checkpoint import save
from ecrl.run.evaluation import evaluate
from ecrl.run.video import record

assert fake_gymnasium_envs  # registers Drawn-v0


def drawn(gym_id="Drawn-v0", **changes):
    """A run on an environment that draws its steps; `kwargs` are arguments of the environment."""
    cfg = {"kwargs": changes.pop("kwargs", {}), **changes.pop("cfg", {})}
    return small(env={"name": f"gymnasium:{gym_id}", "cfg": cfg}, **changes)


def tiles(path, columns, rows, size=(20, 16)):
    """Return the step that each tile of each frame shows, `[T, rows, columns]`, and the frames per second."""
    film, fps = frames(path)
    height, width = size
    assert film.shape[1:] == (rows * height, columns * width, 3)
    grey = film.reshape(len(film), rows, height, columns, width, 3)[:, :, 5:15, :, 4:12]
    return (grey.mean((2, 4, 5)) / 40).round().astype(int), fps


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("many", "episodes"), [(1, 1), (3, 2)])
def test_frames_show_the_states_before_the_steps(tmp_path, asynchronous, many, episodes):
    cfg = drawn(**{"cfg": {"asynchronous": asynchronous}})
    state = init_state(cfg)
    opened = len(live._LIVE)
    count = record(state, cfg, tmp_path / "film.mp4", many, episodes)
    side = {1: 1, 3: 2}[many]
    steps, fps = tiles(tmp_path / "film.mp4", side, side)
    assert fps == 12 and len(steps) == count and len(live._LIVE) == opened
    shown = steps.reshape(count, -1)
    lengths = [3 if (shown[:4, i] == [0, 1, 2, 0]).all() else 5 for i in range(many)]
    for i, length in enumerate(lengths):
        assert shown[:, i].tolist() == [t % length for t in range(count)]
    assert count == episodes * max(lengths) and not shown[:, many:].any()


def test_recording_changes_neither_the_run_nor_its_state(tmp_path):
    cfg = drawn(**{"trainer.iterations": 3})

    def states(film):
        for record_ in train_iter(init_state(cfg), cfg):
            if record_["log_type"] == "train":
                yield record_["state"]
                if film:
                    assert_pure(record, record_["state"], cfg, tmp_path / "film.mp4", 2)

    for plain, filmed in zip(states(False), states(True), strict=True):
        assert same(*(state.exclude(("env", "token"), ("env", "info")) for state in (plain, filmed)))
    assert (tmp_path / "film.mp4").exists()


def test_the_config_of_the_run_may_have_another_render_mode(tmp_path):
    cfg = drawn(kwargs={"render_mode": None})
    assert record(init_state(cfg), cfg, tmp_path / "film.mp4", 1) in (3, 5)


def test_a_policy_with_memory_is_recorded(tmp_path):
    cfg = remembering(**{"env": "gymnasium:Drawn-v0"})
    assert record(init_state(cfg), cfg, tmp_path / "film.mp4", 1) in (3, 5)


def test_a_video_of_a_game_shows_all_lives_in_real_time(tmp_path):
    with fake_atari.with_cv2():
        cfg = drawn("FakeAtari-v0", **{"cfg": {"atari": {"clip_reward": False}}})
        state = init_state(cfg)
        count = record(state, cfg, tmp_path / "film.mp4", 1)
        assert evaluate(state, cfg, 1)["eval/avg_length"] == count
    film, fps = frames(tmp_path / "film.mp4")
    assert film.shape == (count, 24, 32, 3) and fps == 60 / 4


@pytest.mark.parametrize(
    ("gym_id", "kwargs", "message"),
    [
        (
            "Unseen-v0",
            {},
            r"env: gymnasium:Unseen-v0: cannot draw images: expected the render mode 'rgb_array', but it",
        ),
        ("Drift-v0", {}, r"Drift-v0: cannot draw images: .* but it has \[\]"),
        ("Drawn-v0", {"draws": "text"}, r"Drawn-v0: drew str, expected an image uint8 \[h, w, 3\]"),
        ("Drawn-v0", {"draws": "float"}, r"Drawn-v0: drew float64 \[20, 16, 3\], expected an image uint8 \[h, w, 3\]"),
        ("Drawn-v0", {"draws": "grey"}, r"Drawn-v0: drew uint8 \[20, 16\], expected an image uint8 \[h, w, 3\]"),
        ("Drawn-v0", {"draws": "error"}, r"Drawn-v0: raised RuntimeError: no screen"),
    ],
)
def test_an_environment_that_cannot_draw_is_refused(tmp_path, gym_id, kwargs, message):
    cfg = drawn("Drawn-v0")
    state = init_state(cfg)
    other = cfg.replace(**{"env": {"name": f"gymnasium:{gym_id}", "cfg": {"kwargs": kwargs}}})
    with pytest.raises(ConfigError, match=message) as error:
        record(state, other, tmp_path / "film.mp4")
    assert "\n" not in str(error.value) and not (tmp_path / "film.mp4").exists()


def test_an_image_that_fails_in_mid_episode_names_the_environment(tmp_path, monkeypatch):
    cfg = drawn()
    state, draw = init_state(cfg), fake_gymnasium_envs.Drawn.render
    monkeypatch.setattr(fake_gymnasium_envs.Drawn, "render", lambda env: draw(env) if env._since < 2 else None)
    fault = r"env 0 \(gymnasium:Drawn-v0\) drew NoneType, expected an image uint8 \[h, w, 3\]"
    message = f"while drawing an image: {fault}"
    with pytest.raises(UserError, match=message):
        record(state, cfg, tmp_path / "film.mp4", 2)
    assert list(tmp_path.iterdir()) == []


def test_closed_environments_cannot_be_drawn():
    cfg = drawn()
    state = init_state(cfg)["env"]
    with pytest.raises(UserError, match="the envs of this state are not open in this process"):
        live.draw(state.clone().set("token", state["token"] * 0))


def test_a_missing_package_is_reported_with_its_extra():
    code = (
        "import sys; sys.modules['pygame'] = None; import ecrl\n"
        "cfg = ecrl.load_config('cartpole_ppo').replace(**{'env': 'gymnasium:CartPole-v1'})\n"
        "from ecrl.run.video import record; record(ecrl.init_state(cfg), cfg, 'film.mp4')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    text = (
        "env: gymnasium:CartPole-v1: raised ModuleNotFoundError: No module named 'pygame': install it with: pip install"
    )
    assert done.stderr.splitlines()[-1].endswith(f"{text} 'ecrl[video]'")


@gl
def test_mujoco_environments_need_no_display(tmp_path, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "")
    cfg = small(env={"name": "gymnasium:HalfCheetah-v5", "cfg": {"max_episode_steps": 4}})
    state = init_state(cfg)
    assert record(state, cfg, tmp_path / "film.mp4", 2) == 4
    assert frames(tmp_path / "film.mp4")[0].std() > 10


def test_the_command_line(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pygame", reason="CartPole draws with pygame")
    cfg = small(env="gymnasium:CartPole-v1")
    save(tmp_path / "checkpoints" / "step_0", init_state(cfg), cfg)
    monkeypatch.setattr(sys, "argv", ["ecrl", "record", str(tmp_path), "--num-envs", "2", "--num-episodes", "2"])
    cli.main()
    film, fps = frames(tmp_path / "videos" / "record_0.mp4")
    assert film.shape[1:] == (400, 1200, 3) and fps == 50
    assert f"record_0.mp4: {len(film)} frames of 2 environments" in capsys.readouterr().out
    assert (np.abs(np.diff(film.astype(int), axis=0)).sum((1, 2, 3)) > 200).all()  # it moves
