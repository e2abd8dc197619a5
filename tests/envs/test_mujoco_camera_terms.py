"""Images as observations, and events that move cameras and change lights."""

import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support.camera_task import SMALL, TASK, filmed_run, gl
from support.checks import assert_pure, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.compile.jit import choose_form
from ecrl.config import EventConfig
from ecrl.config.model import validate_section
from ecrl.envs import auto_reset, make_env, with_events
from ecrl.envs.mujoco import camera, render_op
from ecrl.envs.mujoco.camera import drawing
from ecrl.envs.mujoco.scene.config import LightConfig
from ecrl.envs.mujoco.terms.cameras import (
    CameraImageConfig,
    RandomizeCameraConfig,
    RandomizeIntrinsicsConfig,
    RandomizeLightConfig,
    camera_image,
    randomize_camera_extrinsics,
    randomize_light,
)
from ecrl.errors import ConfigError
from ecrl.loop.iteration import init_state, make_iteration
from ecrl.run.video_writer import render_views, view

TINY = SMALL | {"resolution": [12, 8], "intrinsics": [12, 12, 6, 4]}
CONFIG = CameraImageConfig.model_validate(TINY)


def _env(**events):
    return make_env({"name": "film_task", "cfg": TASK["cfg"] | {"events": TASK["cfg"]["events"] | events}})


def _numbers(settings):
    return [getattr(settings, name) for name in dir(settings) if not name.startswith("_")]


def _states(env, n=4):
    return env.reset(rng.split(rng.key(0), n))


@gl
def test_an_image_is_what_the_camera_draws():
    env = _env()
    state = _states(env)
    images = assert_pure(camera_image(CONFIG, env.scene), state, None)
    assert images.shape == (4, 8, 12, 3) and images.dtype == torch.uint8
    with drawing(env.scene, CONFIG) as draw:
        for i in range(4):
            row, place = state["world", "physics"][i].numpy(), state["targets", "goal"][i].numpy()
            assert torch.equal(images[i], torch.from_numpy(draw(row, {"goal": place}).copy()))
    left = state["targets", "goal"][:, 0] < -0.6
    assert 0 < left.sum() < 4
    first, *others = images[left]
    assert all(torch.equal(first, x) for x in others) and not torch.equal(first, images[~left][0])  # the goal is seen


@gl
def test_any_batch_and_vmap_give_the_same_pixels():
    env = _env()
    state, term = _states(env), camera_image(CONFIG, env.scene)
    expected = term(state, None)
    assert torch.equal(term(state.reshape(2, 2), None), expected.unflatten(0, (2, 2)))
    assert torch.equal(term(state[1], None), expected[1])
    physics, goal = state["world", "physics"], state["targets", "goal"]

    def one(row, place):
        fields = {"world": TensorDict({"physics": row}, []), "targets": TensorDict({"goal": place}, [])}
        return term(TensorDict(fields, []), None)

    assert torch.equal(torch.vmap(one)(physics, goal), expected)
    fixed = torch.vmap(one, in_dims=(0, None))(physics, goal[0])
    assert torch.equal(fixed[0], expected[0])


@gl
def test_images_are_drawn_only_where_they_are_needed():
    env = _env()
    state, term = _states(env), camera_image(CONFIG, env.scene)
    needed, all_drawn = torch.tensor([False, True, True, False]), term(state, None)
    drawn = term(state.copy().set("needed", needed), None)
    assert torch.equal(drawn[needed], all_drawn[needed]) and not drawn[~needed].any()
    assert not term(state.copy().set("needed", torch.zeros(4, dtype=torch.bool)), None).any()
    per_copy = torch.vmap(lambda row: term(row, None))(state.select("world", "targets").set("needed", needed))
    assert torch.equal(per_copy, drawn)


@gl
def test_any_number_of_threads_gives_the_same_pixels():
    images, drew = [], []

    def drawing_thread(*args):
        drew.append(threading.current_thread().name)
        return draw_rows(*args)

    draw_rows = render_op._draw_rows
    for threads in (1, 2, 3, 9):  # of five images
        cfg = TASK["cfg"] | {"physics": {"threads": threads}}
        env = make_env({"name": "film_task", "cfg": cfg})
        with patch.object(render_op, "_draw_rows", drawing_thread):
            images.append(camera_image(CONFIG, env.scene)(_states(env, 5), None))
        assert len(drew) == len({*drew}) == min(threads, 5)
        drew.clear()
    assert all(torch.equal(image, images[0]) for image in images) and images[0].any()


@gl
def test_an_error_in_any_thread_is_raised():
    env = make_env({"name": "film_task", "cfg": TASK["cfg"] | {"physics": {"threads": 2}}})
    state, term = _states(env), camera_image(CONFIG, env.scene)
    term(state, None)
    for where in (True, False):
        real, caller = render_op._draw_rows, threading.current_thread()

        def fail(*args, real=real, where=where, caller=caller):
            if (threading.current_thread() is caller) == where:
                raise ValueError("no light")
            real(*args)

        with patch.object(render_op, "_draw_rows", fail), pytest.raises(ValueError, match="no light"):
            term(state, None)
    assert term(state, None).any()  # the threads still work


@gl
def test_a_fast_image_looks_like_a_full_one_and_physics_ignores_both():
    env = _env()
    state, quality = _states(env), _numbers(env.scene.model.vis.quality)
    settings = SMALL | {"resolution": [64, 64], "intrinsics": [60, 60, 32, 32]}
    fast, full = (
        camera_image(CameraImageConfig.model_validate(settings | more), env.scene)(state, None).float()
        for more in ({}, {"quality": "full"})
    )
    difference = (fast - full).abs()
    assert 0.0 < difference.mean() < 5.0 and (difference > 64.0).float().mean() < 0.02
    assert _numbers(env.scene.model.vis.quality) == quality and env.scene.model.vis.quality.offsamples > 0


@gl
@pytest.mark.slow
def test_compiled_as_eager():
    env = _env()
    state, term = _states(env), camera_image(CONFIG, env.scene)

    def mean(state, scale):
        return (term(state, None).float() * scale).mean((1, 2, 3))

    scale = torch.tensor(2.0)
    close(choose_form("on", "cpu").jit(mean)(state, scale), mean(state, scale))


@gl
def test_a_policy_that_sees():
    camera = {"func": "camera_image", "name": "camera", "params": TINY}
    cfg = filmed_run(**{"env.cfg.observations": {"image": camera}, "trainer.enable_eval": False})
    state = init_state(cfg)
    before = state["env", "obs"]
    assert {name: x.shape[1:] for name, x in before.items()} == {
        "camera": (8, 12, 3), "robot_qpos": (6,), "robot_qvel": (6,), "robot_qf": (6,)
    }  # fmt: skip
    after = make_iteration(cfg)(state)[0]["env", "obs"]
    assert after["camera"].dtype == torch.uint8 and not torch.equal(after["camera"], before["camera"])


def test_draws_lie_between_the_bounds():
    box = ((-0.1, 0.0, 0.5), (0.1, 0.0, 1.0))
    both = RandomizeCameraConfig(eye_range=box, target_range=((0.0, 0.0, 0.0), (1.0, 2.0, 3.0)))
    assert both.stores == {camera.EYE: (0.0, 0.0, 0.0), camera.TARGET: (0.0, 0.0, 0.0)}
    keys = rng.split(rng.key(1), 500)
    state = TensorDict({"targets": {name: torch.zeros(500, 3) for name in both.stores}}, [500])
    after = assert_pure(randomize_camera_extrinsics(both, None), state, keys)["targets"]
    low, high = after[camera.EYE].min(0).values, after[camera.EYE].max(0).values
    close(low, [-0.1, 0.0, 0.5], 0.02)
    close(high, [0.1, 0.0, 1.0], 0.02)
    close(after[camera.TARGET].mean(0), [0.5, 1.0, 1.5], 0.15)
    one = randomize_camera_extrinsics(both, None)(state[3], keys[3])
    assert torch.equal(one["targets", camera.EYE], after[camera.EYE][3])
    u = rng.uniform(rng.fold_in(keys, 1), (3,))
    close(after[camera.TARGET], u * torch.tensor([1.0, 2.0, 3.0]))


def test_a_light_is_what_is_drawn():
    light = RandomizeLightConfig(direction_range=((1.0, 2.0, 3.0),) * 2, color_range=((0.1, 0.2, 0.3),) * 2)
    assert light.stores == {camera.DIRECTION: (0.3, 0.4, -1.0), camera.COLOR: (0.7, 0.7, 0.7)}
    state = TensorDict({"targets": {name: torch.zeros(2, 3) for name in light.stores}}, [2])
    after = randomize_light(light, None)(state, rng.split(rng.key(0), 2))["targets"]
    close(after[camera.DIRECTION], torch.tensor([[1.0, 2.0, 3.0]] * 2))
    close(after[camera.COLOR], torch.tensor([[0.1, 0.2, 0.3]] * 2))
    assert RandomizeLightConfig(color_range=((0.0, 0.0, 0.0),) * 2).stores == {camera.COLOR: (0.7, 0.7, 0.7)}


def test_before_the_first_draw_the_light_is_the_scenes():
    ranges = {"direction_range": [[-1, -1, -1], [1, 1, -0.5]], "color_range": [[0, 0, 0], [0.5, 0.5, 0.5]]}
    event = {"func": "randomize_light", "mode": "interval", "interval_step": 5, "params": ranges}
    light = {"direction": [1.0, 0.0, -1.0], "color": [0.2, 0.4, 0.6]}
    for settings, (direction, color) in (
        ({"light": light}, light.values()),
        ({}, LightConfig.model_construct().model_dump(include={"direction", "color"}).values()),
    ):
        cfg = TASK["cfg"] | {"events": TASK["cfg"]["events"] | {"z": event}} | settings
        targets = _states(make_env({"name": "film_task", "cfg": cfg}), 2)["targets"]
        along = torch.nn.functional.normalize(torch.tensor(direction), dim=0)
        close(torch.nn.functional.normalize(targets[camera.DIRECTION], dim=-1), along.expand(2, 3), 1e-6)
        close(targets[camera.COLOR], torch.tensor(color).expand(2, 3), 1e-6)


@gl
@pytest.mark.parametrize(
    ("func", "params"),
    [
        ("randomize_camera_extrinsics", {"eye_range": [[-0.3, -0.3, -0.3], [0.3, 0.3, 0.3]]}),
        ("randomize_camera_extrinsics", {"target_range": [[-0.3, -0.3, -0.3], [0.3, 0.3, 0.3]]}),
        ("randomize_camera_extrinsics", {"up_range": [[-0.9, -0.9, 0.0], [0.9, 0.9, 0.0]]}),
        ("randomize_camera_intrinsics", {"focal_x_range": [-4.0, 4.0], "cy_range": [-3.0, 3.0]}),
        ("randomize_visual_material", {"entity_cfg": {"uid": "floor"}, "base_color_range": [[0, 0, 0], [0.5, 1, 1]]}),
        ("randomize_light", {"direction_range": [[-1, -1, -1], [1, 1, -0.5]]}),
        ("randomize_light", {"color_range": [[0, 0, 0], [0.5, 0.5, 0.5]]}),
    ],
)
def test_events_of_a_task_change_what_is_seen_and_nothing_else(func, params):
    plain, changed = _env(), _env(z={"func": func, "mode": "reset", "params": params})
    before, after = _states(plain), _states(changed)
    assert torch.equal(before["world", "physics"], after["world", "physics"])
    a, b = (camera_image(CONFIG, env.scene)(state, None) for env, state in ((plain, before), (changed, after)))
    assert all(not torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(b[0], b[1])


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (RandomizeCameraConfig, {}, "no range is set; give at least one of eye_range, target_range and up_range"),
        (RandomizeLightConfig, {}, "give direction_range, color_range or both"),
        (RandomizeCameraConfig, {"eye_range": [[0, 1, 0], [0, 0, 0]]}, "lowest 1.0 is above highest 0.0"),
        (RandomizeLightConfig, {"color_range": [[0, 0, 0], [0, 0, 2]]}, "color_range"),
        (
            RandomizeLightConfig,
            {"direction_range": [[0, 0, 0], [0, 0, 0]]},
            "contains only 0, which is not a direction",
        ),
    ],
)
def test_settings_without_effect_are_refused(model, settings, message):
    with pytest.raises(ConfigError, match=message):
        validate_section(model, settings, "params")


def _drawn_cube(env, state, settings=SMALL):
    """Red, green and blue of the pixels of the cube, which is the only red thing, for each environment."""
    images = camera_image(CameraImageConfig.model_validate(settings), env.scene)(state, None).int()
    red, green, blue = images.unbind(-1)
    return images, (red > 1.5 * green) & (red > 1.5 * blue) & (red > 60)


@gl
def test_an_object_has_the_drawn_color_in_images_and_the_scenes_color_before():
    color = {"entity_cfg": {"uid": "cube"}, "base_color_range": [[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]]}
    event = {"func": "randomize_visual_material", "mode": "interval", "interval_step": 2, "params": color}
    env = _env(z=event)
    state = _states(env, 2)
    close(state["targets", "color/cube"], [[0.85, 0.35, 0.2]] * 2, 1e-6)
    images, red = _drawn_cube(env, state)
    assert (red.sum((1, 2)) > 3).all() and torch.equal(images, _drawn_cube(_env(), _states(_env(), 2))[0])
    for _ in range(2):
        state = env.step(state, torch.zeros(2, 6), env.draw(rng.split(rng.key(0), 2)))
    images, _ = _drawn_cube(env, state)
    blue = (images[..., 2] > 60) & (images[..., 0] < 40)
    assert (blue.sum((1, 2)) > 3).all()
    assert torch.equal(_drawn_cube(env, _states(env, 2))[1], red)  # the earlier color is gone


@gl
def test_an_object_has_its_drawn_size_in_images_and_in_videos():
    shown = {"eye": [-0.6, -0.4, 1.0], "target": [-0.6, -0.4, 0.0], "up": [0.0, 1.0, 0.0]}
    shown |= {"resolution": [64, 48], "intrinsics": [240, 240, 32, 24]}
    pixels = []
    for factor in (0.5, 1.0):
        cube = {"entity_cfg": {"uid": "cube"}, "scale_factor_range": [[factor], [factor]]}
        env = _env(z={"func": "randomize_rigid_object_scale", "mode": "reset", "params": cube})
        state = _states(env, 2)
        images, red = _drawn_cube(env, state, shown)
        pixels.append(red.sum((1, 2)).float())
        film = next(render_views(env.scene, CameraImageConfig.model_validate(shown), [view(state, 1)]))
        assert torch.equal(torch.from_numpy(film).int(), images[0])
    close(pixels[0] / pixels[1], [0.25 * (0.9 / 0.925) ** 2] * 2, 0.05)  # the smaller cube's top is lower


def test_a_longer_focal_length_moves_points_away_from_the_principal_point():
    """(fx x / z + cx) of the module's description, by the frustum that MuJoCo gets."""
    ranges = {"focal_x_range": [10.0, 10.0], "cx_range": [5.0, 5.0], "cy_range": [-2.0, -2.0]}
    cfg = validate_section(RandomizeIntrinsicsConfig, ranges, "params")
    targets = {name: torch.zeros(3).numpy() for name in cfg.stores}
    plain, changed = (SimpleNamespace(frustum_near=0.1, frustum_far=1.0) for _ in range(2))
    settings = CameraImageConfig.model_validate(SMALL)
    camera._aim(settings, targets, [plain])
    camera._aim(settings, {name: torch.tensor(low).numpy() for name, (low, _) in cfg.ranges.items()}, [changed])
    fx, _, cx, _ = settings.intrinsics
    width, _ = settings.resolution
    close(torch.tensor(changed.frustum_width), 0.1 * width / (2 * (fx + 10.0)), 1e-6)
    close(torch.tensor(changed.frustum_center), 0.1 * (width / 2 - cx - 5.0) / (fx + 10.0), 1e-6)
    close(torch.tensor(plain.frustum_top - changed.frustum_top), 0.1 * 2.0 / 60.0, 1e-6)
    assert plain.frustum_width > changed.frustum_width and (changed.forward == plain.forward).all()


@pytest.mark.parametrize("func", ["randomize_visual_material", "randomize_camera_intrinsics", "randomize_light"])
def test_under_trainer_events_the_error_names_the_right_place(func):
    params = {
        "randomize_visual_material": {"entity_cfg": {"uid": "cube"}},
        "randomize_camera_intrinsics": {"cx_range": [-1.0, 1.0]},
        "randomize_light": {"color_range": [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]},
    }
    event = {"func": func, "mode": "reset", "params": params[func]}
    outer = {"it": validate_section(EventConfig, event, "trainer.events.train.it")}
    keys = rng.split(rng.key(0), 2)
    with pytest.raises(ConfigError, match=rf"trainer.events.it \({func}\): .*put the event under env.cfg.events$"):
        with_events(auto_reset(_env()), outer).reset(keys)
    own = auto_reset(_env(own=event))
    ours, theirs = (e.reset(keys)["targets"] for e in (own, with_events(own, outer)))
    assert not all(torch.equal(value, theirs[name]) for name, value in ours.items())
    with pytest.raises(ConfigError, match="no object 'cub' with a color; did you mean 'cube'"):
        _env(z={"func": "randomize_visual_material", "params": {"entity_cfg": {"uid": "cub"}}})
