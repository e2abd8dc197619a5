"""Videos: the right frames of the right steps, made in the background, without changing or delaying the run."""

import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import support.chunks  # noqa: F401  # registers repeated_pole
import torch
from support.camera_task import CUBE, TASK, film, filmed_run, gl
from support.off_policy_agents import AGENTS, agent, is_continuous
from support.replay_agent import replaying
from support.small_runs import NET, full_config, same, small
from support.video_files import frames
from tensordict import TensorDict

import ecrl.loop.build
from ecrl.cli import main as cli
from ecrl.config import config_from_dict
from ecrl.envs import Env, make_env
from ecrl.envs.cartpole import CartPoleConfig
from ecrl.envs.mujoco import camera
from ecrl.errors import ConfigError, UserError
from ecrl.loop.buffers import borrowed_leaves, kinds_of
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, make_iteration, phase_of, train_iter, with_phase
from ecrl.registry import register_env
from ecrl.run import video, video_writer
from ecrl.run.checkpoint import save
from ecrl.run.evaluation import evaluate, with_evaluation
from ecrl.run.train import train
from ecrl.run.video import record, rollout_views, with_training_videos
from ecrl.run.video_writer import background_worker, cameras, check_cameras, view, write_video


def grey(*values, size=(32, 48)):
    return [np.full((*size, 3), value, np.uint8) for value in values]


@pytest.fixture
def drawn(monkeypatch):
    """Pictures without OpenGL: tile i is as grey as environment i's time in its episode, 20 per step of 0.04 s."""

    def render_views(sim, camera, views):
        for frame in views:
            times = frame["physics"][:, 0]
            yield np.concatenate([grey(int((20 * time / 0.04).round()), size=(16, 16))[0] for time in times], 1)

    monkeypatch.setattr(video_writer, "render_views", render_views)
    monkeypatch.setattr("ecrl.run.video.render_views", render_views)
    monkeypatch.setattr(camera, "backend", lambda: "none")


def steps_in(path, tiles):
    """Return the steps since the start of the episode in each tile and frame of `drawn`, `[T, tiles]`."""
    film, _ = frames(path)
    return np.stack([film[:, 8, 16 * i + 8].mean(-1) / 20 for i in range(tiles)], -1).round().astype(int)


@pytest.mark.parametrize("size", [(32, 48), (31, 48), (32, 47), (17, 21)])
def test_a_video_has_every_image_in_order(tmp_path, size):
    path = tmp_path / "deep" / "film.mp4"
    assert write_video(path, iter(grey(0, 50, 100, 200, size=size)), 20) == 4
    film, fps = frames(path)
    assert film.shape == (4, size[0] + size[0] % 2, size[1] + size[1] % 2, 3) and fps == 20
    np.testing.assert_allclose(film[:, : size[0], : size[1]].mean((1, 2, 3)), [0, 50, 100, 200], atol=4)
    assert [p.name for p in path.parent.iterdir()] == ["film.mp4"]


def test_a_video_is_there_when_it_is_complete(tmp_path):
    def broken():
        yield from grey(1, 2)
        assert not (tmp_path / "film.mp4").exists()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_video(tmp_path / "film.mp4", broken(), 20)
    assert write_video(tmp_path / "film.mp4", iter([]), 20) == 0
    assert list(tmp_path.iterdir()) == []


def test_output_of_ffmpeg_is_in_the_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(video_writer, "_ENCODER", ["-c:v", "no_such_codec"])
    with pytest.raises(OSError, match=r"\.film\.part\.mp4: .*no_such_codec"):
        write_video(tmp_path / "film.mp4", iter(grey(*range(200), size=(480, 640))), 20)
    assert list(tmp_path.iterdir()) == []


def test_jobs_run_one_after_the_other_and_are_waited_for():
    gate, done = Event(), []
    with background_worker() as start:
        start(lambda: (gate.wait(600), done.append(1)))
        assert not done
        gate.set()
        start(done.append, 2)
        assert done[0] == 1
    assert done == [1, 2]


def test_errors_in_the_background_come_out():
    with pytest.raises(UserError, match="no light"), background_worker() as start:
        start(_raise, UserError("no light"))
    with background_worker() as start:
        start(_raise, UserError("no light"))
        with pytest.raises(UserError, match="no light"):
            start(print)
    message = "videos: disk full; the run goes on and tries again"
    with pytest.warns(UserWarning, match=message), background_worker() as start:
        start(_raise, OSError("disk full"))


def _raise(error):
    raise error


@pytest.mark.parametrize(("func", "tiles"), [("record_camera_data", 4), ("record_camera_data_async", 4)])
def test_a_video_of_each_evaluation(tmp_path, drawn, func, tiles):
    cfg = filmed_run(evaluation={"cam": film(func, name="main", save_path="./outputs/eval")})
    train(init_state(cfg), cfg, tmp_path, progress=False)
    names = {str(p.relative_to(tmp_path / "videos")) for p in (tmp_path / "videos").rglob("*.*")}
    assert names == {"outputs/eval/main_eval_32.mp4", "outputs/eval/main_eval_64.mp4"}
    steps = steps_in(tmp_path / "videos" / "outputs/eval/main_eval_32.mp4", tiles)
    ends = [int(np.argmax(steps[1:, i] == 0)) + 1 if (steps[1:, i] == 0).any() else len(steps) for i in range(tiles)]
    assert sorted(set(ends)) == [6, 9] and len(steps) == 9  # as long as the longest of the first episodes
    for i, end in enumerate(ends):
        assert steps[:, i].tolist() == [*range(end), *range(9 - end)]  # before each step; then the next episode
    assert frames(tmp_path / "videos" / "outputs/eval/main_eval_32.mp4")[1] == 20


def test_fewer_frames_and_environments_of_several_cameras(tmp_path, drawn):
    few = {name: film(name=name, max_env_num=many) for name, many in (("b", 1), ("c", 3))}
    few["a"] = film(name="a", interval_step=4)
    cfg = filmed_run(evaluation=few, **{"trainer.num_eval_envs": 2})
    evaluate(init_state(cfg), cfg, videos=tmp_path)
    assert steps_in(tmp_path / "a_eval_0.mp4", 2)[:, 0].tolist() in ([0, 4, 2], [0, 4, 8])
    one = steps_in(tmp_path / "b_eval_0.mp4", 1)
    assert one[:, 0].tolist() == list(range(len(one))) and len(one) in (6, 9)
    assert frames(tmp_path / "b_eval_0.mp4")[0].shape[2] == 16
    assert frames(tmp_path / "c_eval_0.mp4")[0].shape[2] == 32  # there are only two
    assert len(cameras(cfg, "eval")) == 3 and not cameras(cfg, "train")


@pytest.mark.parametrize(
    "form",
    [
        "off",
        pytest.param("on", marks=[pytest.mark.slow, pytest.mark.traced], id="traced"),
        pytest.param("on", marks=pytest.mark.long),
    ],
)
def test_cameras_change_nothing(tmp_path, drawn, form):
    plain = filmed_run(**{"trainer.compile": form})
    watched = filmed_run({"t": film(name="t")}, {"e": film(name="e")}, **{"trainer.compile": form})
    (state, history), (other, filmed) = (
        train(init_state(cfg), cfg, tmp_path / name, progress=False) for name, cfg in (("a", plain), ("b", watched))
    )
    assert same(state, other) and len(list((tmp_path / "b").rglob("*.mp4"))) == 4
    assert not (tmp_path / "a" / "videos").exists()

    def numbers(rows):
        compared = [{k: v for k, v in row.items() if "SPS" not in k and "seconds" not in k} for row in rows]
        return repr(compared)  # NaN equals NaN

    assert numbers(history) == numbers(filmed) and "eval/avg_reward" in numbers(filmed)


@pytest.mark.parametrize("func", ["record_camera_data", "record_camera_data_async"])
def test_training_waits_for_each_video_or_for_none(tmp_path, monkeypatch, func):
    cfg, free, filmed = filmed_run({"cam": film(func, name="cam")}), Event(), []

    def slow(run, state, cfg, camera, path):
        assert free.wait(600.0)
        filmed.append(path.name)

    jobs = []

    @contextmanager
    def recorded():
        with background_worker() as start:

            def begin(*job):
                jobs.append(start(*job))
                return jobs[-1]

            yield begin

    monkeypatch.setattr(video, "_record_rollout", slow)
    monkeypatch.setattr(video, "background_worker", recorded)
    kinds = [(kind, n) for n in range(6) for kind in ("collect", "train")]
    records = iter([{"log_type": kind, "sample_step": n, "state": None} for kind, n in kinds])
    videos = video.with_training_videos(records, build(cfg), cfg, tmp_path, None)
    if func == "record_camera_data":
        free.set()
        waiting, expected = 0, range(6)
    else:
        waiting, expected = 10, (0, 5)
    for _ in range(waiting):  # none waits, though the first is not done
        next(videos)
    free.set()
    if waiting:
        jobs[0].result(600.0)
    assert len(list(videos)) == 12 - waiting
    assert filmed == [f"cam_train_{n}.mp4" for n in expected]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_what_training_collects_is_filmed(algorithm):
    nets = {"name": "actor_critic", "actor": TINY, "critic": TINY} if algorithm == "ppo" else ACTOR
    part = {} if algorithm == "ppo" else {"group_size": 2, "reset_every_rollout": True}
    more = {"policy": nets, "algorithm": {"name": algorithm, "cfg": part | {"n_epochs": 1, "batch_size": 16}}}
    short, long = (_run(more, buffer_size=size) for size in (8, 9))
    state = init_state(short)
    for _ in range(2):  # the second iteration starts in mid-episode
        after, _ = make_iteration(short)(state)
        views = list(rollout_views(build(long), state, long, 3))
        assert len(views) == 9 and views[0].batch_size == (3,)
        # with one more step, the last view is the end of the iteration; groups restart in every iteration
        for row, world in ((0, state), (8, after)) if algorithm == "ppo" else ((8, after),):
            expected = view(world["env"], 3)
            torch.testing.assert_close(views[row]["physics"], expected["physics"], rtol=1e-4, atol=1e-5)
            assert torch.equal(views[row]["targets", "goal"], expected["targets", "goal"])
        state = after


@register_env("reporting_pole", override=True)
def reporting_pole(cfg: CartPoleConfig) -> Env:
    """Register CartPole with `info`; a video stores its views there."""
    pole = make_env({"name": "cartpole", "cfg": cfg.model_dump()})

    def with_info(after: TensorDict) -> TensorDict:
        return after.copy().set("info", TensorDict({"angle": after["obs"][..., 2].clone()}, after.batch_size))

    return replace(pole, reset=lambda keys: with_info(pole.reset(keys)), step=lambda *args: with_info(pole.step(*args)))


REPEATED = {"env.name": "repeated_pole"}
PQN = {"policy": {"name": "q_network", "critic": NET}, "algorithm": {"name": "pqn", "cfg": {"batch_size": 16}}}
FILMED = {
    "ppo on chunks": (small(**REPEATED), True),
    "replay on chunks": (
        replaying(**REPEATED, **{"algorithm.cfg.learning_starts": 1000, "algorithm.cfg.chunks": True}),
        True,
    ),
    "apg": (full_config("apg", "off"), True),
    "pqn on chunks": (small(**REPEATED, **PQN), True),
    "replay": (replaying(**{"env.name": "reporting_pole", "algorithm.cfg.learning_starts": 1000}), True),
    "learning replay": (replaying(**{"env.name": "reporting_pole", "policy.normalize_obs": True}), False),
}


def test_a_collect_that_returns_steps_without_a_batch_is_refused(monkeypatch):
    monkeypatch.setattr(video, "view", lambda env, count: TensorDict({"obs": env["obs"][:count]}, [count]))
    cfg = full_config("apg", "off")
    run, state = build(cfg), init_state(cfg)
    steps = TensorDict({"obs": torch.zeros(4, 9, 2)}, [4, 9])
    iterate = run.algorithm.iterate._replace(collect=lambda run, state: (state, steps))
    faulty = run._replace(algorithm=replace(run.algorithm, iterate=iterate))
    message = "^algorithm apg: collect returns a batch without steps, only obs; return TensorDict"
    with pytest.raises(ConfigError, match=message):
        next(rollout_views(faulty, state, cfg, 2))


@pytest.mark.parametrize("case", FILMED)
def test_rank_0_films_alone_so_a_video_waits_for_no_other_rank(case, monkeypatch):
    cfg, is_whole = FILMED[case]
    state, _ = make_iteration(cfg)(init_state(cfg))
    run = with_phase(build(cfg), phase_of(build(cfg), state))
    steps = run.algorithm.iterate(run, *borrowed_leaves(state, kinds_of(run)))[1]["batch", "steps"]
    monkeypatch.setattr(video, "view", lambda env, count: TensorDict({"obs": env["obs"][:count]}, [count]))
    for name in ("apg", "minibatch_sgd"):
        module = sys.modules[f"ecrl.algorithms.{name}"]
        monkeypatch.setattr(module, "all_mean", lambda *_, **__: pytest.fail("it waits for the other ranks"))
    monkeypatch.setattr("ecrl.distributed.all_sum", lambda *_: pytest.fail("it waits for the other ranks"))
    views = list(rollout_views(build(cfg), state, cfg, 2))
    assert len(views) == cfg.trainer.buffer_size
    for t, frame in enumerate(views[: None if is_whole else 2]):  # the policy learns after the first step
        torch.testing.assert_close(frame["obs"], steps["obs"][:2, t])


def test_an_iterate_without_steps_to_film_is_refused_before_training(monkeypatch, tmp_path):
    def with_own_iterate(block, make=ecrl.loop.build.make_algorithm):
        made = make(block)
        return replace(made, iterate=lambda *args: made.iterate(*args))

    monkeypatch.setattr(ecrl.loop.build, "make_algorithm", with_own_iterate)
    cfg = filmed_run({"cam": film(name="cam")})
    message = (
        "^trainer.events.train: algorithm ppo cannot take steps without learning, .* move the cameras to trainer.ev"
    )
    with pytest.raises(ConfigError, match=message):
        next(with_training_videos(iter(()), build(cfg), cfg, tmp_path, init_state(cfg)))


TINY = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh"}}
ACTOR = {"name": "actor_only", "actor": TINY}


def _run(parts, **trainer):
    trainer = {"num_envs": 4, "iterations": 2, "compile": "off"} | trainer
    return config_from_dict({"trainer": trainer, "env": TASK, **parts})


def test_videos_of_training(tmp_path, drawn):
    cfg = filmed_run({"t": film(name="t", interval_step=3, max_env_num=2)}, **{"trainer.enable_eval": False})
    train(init_state(cfg), cfg, tmp_path, progress=False)
    assert {p.name for p in (tmp_path / "videos").iterdir()} == {"t_train_32.mp4", "t_train_64.mp4"}
    first, second = (steps_in(tmp_path / "videos" / f"t_train_{step}.mp4", 2) for step in (32, 64))
    assert first[0].tolist() == [0, 0] and first[1].tolist() == [3, 3] and len(first) == len(second) == 3
    assert second[0].tolist() in ([2, 2], [2, 8], [8, 2], [8, 8])  # 8 steps later: episodes are 6 or 9 long


def test_a_run_without_a_folder_makes_no_videos(drawn, monkeypatch):
    begun = []
    monkeypatch.setattr(video_writer, "write_video", lambda *args: begun.append(args))
    cfg = filmed_run({"t": film(name="t")}, {"e": film(name="e")})
    with pytest.warns(UserWarning, match="cameras in trainer.events: nothing is written without a run folder"):
        train(init_state(cfg), cfg, progress=False)
    assert not begun


def test_training_does_not_wait_for_a_video_but_the_next_evaluation_does(tmp_path, drawn, monkeypatch):
    gate, fast = Event(), video_writer.render_views

    def slow(sim, camera, views):
        for frame in views:
            assert gate.wait(30)
            yield from fast(sim, camera, [frame])

    monkeypatch.setattr(video_writer, "render_views", slow)
    cfg = filmed_run(evaluation={"e": film(name="e")})
    records = with_evaluation(train_iter(init_state(cfg), cfg), cfg, tmp_path)
    kinds = [next(records)["log_type"] for _ in range(5)]
    assert kinds == ["collect", "train", "evaluate", "collect", "train"] and not list(tmp_path.rglob("e_*.mp4"))
    gate.set()
    assert [r["log_type"] for r in records] == ["evaluate"]
    assert [len(frames(tmp_path / f"e_eval_{step}.mp4")[0]) for step in (32, 64)] == [9, 9]


def test_a_full_queue_loses_nothing_and_a_dead_camera_stops_the_run(tmp_path, drawn, monkeypatch):
    monkeypatch.setattr(video_writer, "_QUEUE_SIZE", 1)
    cfg = filmed_run(evaluation={"e": film(name="e")})
    evaluate(init_state(cfg), cfg, videos=tmp_path)
    assert len(frames(tmp_path / "e_eval_0.mp4")[0]) == 9

    def blind(sim, camera, views):
        yield from grey(0)
        raise UserError("the screen is gone")

    monkeypatch.setattr(video_writer, "render_views", blind)
    with pytest.raises(UserError, match="the screen is gone"):
        evaluate(init_state(cfg), cfg, videos=tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_an_evaluation_that_fails_leaves_no_thread_waiting(tmp_path, drawn, monkeypatch):
    monkeypatch.setattr("ecrl.run.evaluation._MAX_STEPS", 3)
    cfg = filmed_run(evaluation={"e": film(name="e")})
    with pytest.raises(UserError, match="give the environment a time limit"):
        evaluate(init_state(cfg), cfg, videos=tmp_path)


CARTPOLE = {"name": "cartpole"}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (
            {"cam": film() | {"mode": "reset"}},
            r"eval.cam \(record_camera_data\): mode is 'reset', but a camera needs mode",
        ),
        ({"a": film(name="x"), "b": film("record_camera_data_async", name="x")}, r"eval.b .* the same as in a; choose"),
    ],
)
def test_cameras_that_cannot_record_are_refused(events, message, drawn):
    with pytest.raises(ConfigError, match=message):
        check_cameras(filmed_run(evaluation=events))
    check_cameras(filmed_run({"cam": film(name="x")}, {"cam": film(name="x")}))  # their files differ


@pytest.mark.parametrize("path", ["/tmp/videos", "../videos", "a/../../b"])
def test_videos_stay_in_the_run_folder(path):
    with pytest.raises(ConfigError, match=rf"params.save_path: '{path}' is absolute or contains '..'; give"):
        filmed_run(evaluation={"cam": film(save_path=path)})


def test_cameras_are_no_events_of_an_environment(drawn):
    with pytest.raises(ConfigError, match=r"put the event under trainer\.events\.train or trainer\.events\.eval"):
        events = TASK["cfg"]["events"] | {"cam": {"func": "record_camera_data"}}
        init_state(filmed_run(**{"env.cfg.events": events}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = filmed_run(evaluation={"cam": film()}, **{"env": CARTPOLE})
    assert (
        "trainer.events.eval.cam has no meaning here (record_camera_data: this environment has no scene to film)"
        in str(caught[0].message)
    )
    assert cfg.trainer.events.eval == {} and CUBE["uid"] == "cube"
    with pytest.raises(ConfigError, match="cartpole has no scene to record; ecrl record is for MuJoCo tasks"):
        record(init_state(small()), small(), "film.mp4")


@pytest.mark.parametrize(("many", "episodes"), [(1, 1), (3, 2)])
def test_record(tmp_path, drawn, many, episodes):
    cfg = filmed_run()
    count = record(init_state(cfg), cfg, tmp_path / "film.mp4", many, episodes)
    steps = steps_in(tmp_path / "film.mp4", many)
    ends = [[*np.flatnonzero(np.diff(steps[:, i]) < 0) + 1, len(steps)] for i in range(many)]
    assert len(steps) == count == max(end[episodes - 1] for end in ends)
    assert min(len(end) for end in ends) >= episodes and frames(tmp_path / "film.mp4")[1] == 25
    with pytest.raises(ConfigError, match="num_envs: 0, expected at least 1"):
        record(init_state(cfg), cfg, tmp_path / "film.mp4", 0)


@pytest.mark.parametrize("name", [name for name in AGENTS if is_continuous(name)])
def test_record_of_an_off_policy_agent(name, tmp_path, drawn):
    own = agent(name).model_dump(mode="json")
    cfg = filmed_run(**{"policy": own["policy"], "algorithm": own["algorithm"]})
    count = record(init_state(cfg), cfg, tmp_path / "film.mp4", 1, 1)
    assert steps_in(tmp_path / "film.mp4", 1)[:, 0].tolist() == list(range(count)) and count in (6, 9)


def test_a_video_of_action_chunks_shows_every_step(tmp_path, drawn):
    cfg = filmed_run(**{"env.action_chunk": 4})
    count = record(init_state(cfg), cfg, tmp_path / "film.mp4", 1, 1)
    assert steps_in(tmp_path / "film.mp4", 1)[:, 0].tolist() == list(range(count)) and count in (6, 9)
    assert frames(tmp_path / "film.mp4")[1] == 25


@gl
def test_the_command_line(tmp_path, monkeypatch, capsys):
    cfg = filmed_run(evaluation={"cam": film(name="main")})
    save(tmp_path / "checkpoints" / "step_0", init_state(cfg), cfg)
    for command in (["record", "--num-envs", "3"], ["eval", "--num-episodes", "2"], ["record", "--output", "x.mp4"]):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ecrl", command[0], str(tmp_path), *command[1:]])
        cli.main()
    film_, fps = frames(tmp_path / "videos" / "record_0.mp4")
    assert film_.shape[1:] == (96, 128, 3) and fps == 25 and len(film_) in (6, 9)
    assert f"record_0.mp4: {len(film_)} frames of 3 environments" in capsys.readouterr().out
    assert film_[-1, 50:, 70:].max() < 5  # of three environments, the last of four tiles is empty
    assert (np.abs(np.diff(film_[:, :48, :64].astype(int), axis=0)).sum((1, 2, 3)) > 200).all()  # it moves
    assert frames(tmp_path / "x.mp4")[0].shape[1:] == (96, 128, 3)
    assert frames(tmp_path / "videos" / "main_eval_0.mp4")[0].shape[1:] == (48, 128, 3)


def test_what_is_seen_is_small():
    cfg = filmed_run()
    frame = view(init_state(cfg)["env"], 2)
    assert isinstance(frame, TensorDict) and sorted(frame.keys()) == ["physics", "targets"]
    assert sum(x.numel() * x.element_size() for x in frame.values(True, True)) < 2000
