"""Cameras: what is seen where, by hand from the pinhole's equation; marks, lights, OpenGL that is missing."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from support.camera_task import gl

from ecrl.config.model import validate_section
from ecrl.envs.mujoco import camera
from ecrl.envs.mujoco.camera import drawing, grid
from ecrl.envs.mujoco.camera_config import CameraConfig
from ecrl.envs.mujoco.physics.simulation import simulation, start
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.errors import ConfigError, UserError


def _sim(*places, color=(1.0, 0.0, 0.0, 1.0)):
    shape = {"shape_type": "Sphere", "radius": 0.03}
    fixed = {"shape": shape, "body_type": "static", "color": list(color)}
    objects = [fixed | {"uid": f"ball{i}", "init_pos": list(place)} for i, place in enumerate(places)]
    empty = "<mujoco><worldbody/></mujoco>"  # nothing else is visible
    return simulation(SceneConfig.model_validate({"mjcf": empty, "light": {}, "rigid_object": objects}))


def _image(sim, targets=None, **camera):
    with drawing(sim, CameraConfig.model_validate({"resolution": [80, 60]} | camera)) as draw:
        arrays = {name: x.numpy() for name, x in (targets or {}).items()}
        return draw(start(sim, (1,))["physics"][0].numpy(), arrays).astype(int)


def _middle(image, channel=0):
    """Return the mean position of the coloured pixels: x from the left, y from the top, of pixel centres."""
    lit = image[..., channel] > image.sum(-1) - image[..., channel] + 20
    assert lit.any()
    return np.argwhere(lit).mean(0)[::-1] + 0.5


@gl
@pytest.mark.parametrize(
    ("place", "settings", "expected"),
    [
        # from (0, -2, 0) along y: x is right, z is up, 2 m away; 100 / 2 = 50 pixels per metre
        ([0, 0, 0], {"intrinsics": [100, 100, 40, 30]}, (40, 30)),
        ([0.4, 0, 0.2], {"intrinsics": [100, 100, 40, 30]}, (60, 20)),
        ([0.4, 0, 0.2], {"intrinsics": [50, 200, 40, 30]}, (50, 10)),
        ([0.4, 0, 0.2], {"intrinsics": [100, 100, 10, 50]}, (30, 40)),
        ([0.4, 2, 0.2], {"intrinsics": [100, 100, 40, 30]}, (50, 25)),  # 4 m away
        ([0.05, 0, 0.02], {}, (55, 24)),  # 600 pixels: 300 per metre, 15 to the right, 6 up
        ([0.4, 0, 0.2], {"intrinsics": [100, 100, 40, 30], "up": [1, 0, 0]}, (30, 10)),  # x is up, -z is right
        ([0.4, 0, 0.2], {"intrinsics": [100, 100, 40, 30], "up": [0, 7, -3]}, (20, 40)),  # upside down
        ([0.4, 0.2, 0], {"intrinsics": [100, 100, 40, 30], "eye": [0, 0, 2]}, (60, 20)),  # straight down: y is up
        ([0.4, 0.2, 0], {"intrinsics": [100, 100, 40, 30], "eye": [0.4, 0.2, 2], "target": [0.4, 0.2, 0]}, (40, 30)),
        ([0.4, 0, 0.2], {"intrinsics": [100, 100, 20, 30], "resolution": [60, 61]}, (40, 20)),
    ],
)
def test_where_a_ball_is_seen(place, settings, expected):
    settings = {"eye": [0, -2, 0], "target": [0, 0, 0]} | settings
    image = _image(_sim(place), **settings)
    assert image.shape == (*settings.get("resolution", (80, 60))[::-1], 3)
    np.testing.assert_allclose(_middle(image), expected, atol=0.6)


@gl
def test_goals_are_marked_and_vectors_of_cameras_and_lights_are_not():
    sim, camera_cfg = _sim([9, 9, 9]), {"eye": [0, 0, 2], "target": [0, 0, 0], "intrinsics": [100, 100, 40, 30]}
    place = torch.tensor([0.4, 0.2, 0.0])
    np.testing.assert_allclose(_middle(_image(sim, {"goal": place}, **camera_cfg), 1), (60, 20), atol=0.6)
    empty = _image(sim, **camera_cfg)
    assert np.array_equal(_image(sim, {"speed": torch.ones(1), camera.COLOR: place}, **camera_cfg), empty)
    assert not np.array_equal(_image(sim, {"goal": place}, **camera_cfg), empty)


@gl
def test_targets_move_the_camera_and_change_the_light():
    sim, camera_cfg = _sim([0, 0, 0], color=(0.5, 0.5, 0.5, 1)), {"eye": [0, -2, 0], "intrinsics": [900, 900, 40, 30]}
    plain = _image(sim, **camera_cfg)
    moved = {camera.EYE: torch.tensor([0.5, 0.25, 1.0]), camera.TARGET: torch.tensor([0.0, 0.0, 0.01])}
    other = camera_cfg | {"eye": [0.5, -1.75, 1.0], "target": [0.0, 0.0, 0.01]}
    assert np.abs(_image(sim, moved, **camera_cfg) - _image(sim, **other)).max() <= 1
    assert not np.array_equal(_image(sim, moved, **camera_cfg), plain)
    left, right = ({camera.DIRECTION: torch.tensor([x, 0.5, 0.0])} for x in (1.0, -1.0))  # which way it shines
    bright = [_image(sim, light, **camera_cfg)[25:35] for light in (left, right)]
    assert bright[0][:, :40].sum() > 1.2 * bright[0][:, 40:].sum()
    assert bright[1][:, 40:].sum() > 1.2 * bright[1][:, :40].sum()
    red = _image(sim, {camera.COLOR: torch.tensor([1.0, 0.0, 0.0])}, **camera_cfg)
    assert red[..., 0].sum() > 1.2 * red[..., 1].sum() and plain[..., 0].sum() == plain[..., 1].sum()
    assert np.array_equal(_image(sim, **camera_cfg), plain)  # nothing of it lasts


@gl
def test_two_cameras_at_once_see_the_same_as_single_cameras():
    sim = _sim([0, 0, 0])
    near, far = (CameraConfig(resolution=(40, 30), eye=(0.0, y, 0.0)) for y in (-1.0, -3.0))
    row = start(sim, (1,))["physics"][0].numpy()
    with drawing(sim, near) as one:
        single = one(row, {}).copy()
        with drawing(sim, far) as two:
            assert not np.array_equal(two(row, {}), single)
            assert np.array_equal(one(row, {}), single)
        assert np.array_equal(one(row, {}), single)


def test_a_grid_is_filled_row_by_row():
    images = [np.full((2, 3, 3), i, np.uint8) for i in range(1, 6)]
    expected = np.kron([[1, 2, 3], [4, 5, 0]], np.ones((2, 3)))
    assert np.array_equal(grid(images)[..., 0], expected)
    assert np.array_equal(grid(images[:1]), images[0])
    assert grid(images[:2]).shape == (2, 6, 3) and grid(images[:4]).shape == (4, 6, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"eye": [1, 2, 3], "target": [1, 2, 3]},
            r"eye and target are the same point, \[1.0, 2.0, 3.0\]; move the eye or the target",
        ),
        ({"up": [0, 0, 1]}, r"up \[0.0, 0.0, 1.0\] is parallel to the viewing direction; choose another"),
        ({"up": [0, 0, 0]}, r"up \[0.0, 0.0, 0.0\] is parallel to the viewing direction"),
        ({"resolution": [0, 480]}, r"resolution"),
        ({"intrinsics": [600, 600]}, r"intrinsics"),
        ({"fov": 60}, r"unknown key"),
    ],
)
def test_cameras_that_cannot_see_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        validate_section(CameraConfig, settings, "camera")


@pytest.mark.parametrize(
    ("set_to", "works", "tried"),
    [
        (None, ("egl", "osmesa"), ["egl"]),
        (None, ("osmesa",), ["egl", "osmesa"]),
        ("osmesa", ("egl", "osmesa"), ["osmesa"]),
        ("glfw", ("egl",), ["egl"]),
        (None, (), ["egl", "osmesa"]),
        ("egl", ("osmesa",), ["egl"]),
    ],
)
def test_the_first_opengl_that_works_is_taken(monkeypatch, set_to, works, tried):
    tried_kinds = []

    def run(command, env, **_):
        tried_kinds.append(env["MUJOCO_GL"])
        assert f"mujoco.{tried_kinds[-1]} as gl" in command[-1] and "PYOPENGL_PLATFORM" not in env
        return subprocess.CompletedProcess(command, int(tried_kinds[-1] not in works))

    monkeypatch.setenv("MUJOCO_GL", set_to) if set_to else monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    monkeypatch.setattr(camera.subprocess, "run", run)
    choose = camera.backend.__wrapped__
    if tried[-1] in works:
        assert choose() == tried[-1]
    else:
        named = " and ".join(tried) + (", set by MUJOCO_GL" if set_to else "")
        with pytest.raises(UserError, match=rf"no OpenGL backend .* \(tried {named}\); install a backend, such as"):
            choose()
    assert tried_kinds == tried


@pytest.mark.parametrize(
    "error", ["AttributeError: 'NoneType' object has no attribute 'glGetError'", "RuntimeError: no"]
)
def test_an_opengl_that_breaks_mujocos_import_is_named(monkeypatch, tmp_path, error):
    kind, reason = error.split(": ")
    (tmp_path / "mujoco").mkdir()
    (tmp_path / "mujoco" / "__init__.py").write_text(f'raise {kind}("{reason}")')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "mujoco"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    with pytest.raises(UserError) as raised:
        mujoco()
    message = "unset MUJOCO_GL, or install the library with apt-get: libosmesa6 for osmesa, libegl1 for egl"
    assert str(raised.value) == f"MUJOCO_GL=osmesa does not work here ({reason}); {message}"
    monkeypatch.delenv("MUJOCO_GL")
    with pytest.raises((AttributeError, RuntimeError), match=reason):  # not its doing
        mujoco()
