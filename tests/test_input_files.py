"""A config may name only files inside $ECRL_INPUT_FOLDERS, if the variable is set."""

import os
import re
from pathlib import Path

import pytest
from support import demos
from support.key_effects import BASE
from support.small_runs import small
from support.urdf_robot import LINKS, link, robot

import ecrl
from ecrl.config import config_from_dict
from ecrl.config.model import validate_section
from ecrl.envs.mujoco.robots.mjcf_inputs import check_mjcf_inputs
from ecrl.envs.mujoco.scene import scene
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.errors import ConfigError, MissingExtraError
from ecrl.input_files import VARIABLE, check_input
from ecrl.policies.checkpoint_folder import check_folder

MESH = '<visual><geometry><mesh filename="{}"/></geometry></visual>'
TETRAHEDRON = "v 0 0 0\nv 0.1 0 0\nv 0 0.1 0\nv 0 0 0.1\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 3 1 4\n"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders, of which a config may name files in the first."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(inside))
    monkeypatch.chdir(inside)
    return inside, outside


def refused(key, path):
    """Expect the line that refuses a file."""
    advice = "copy it into one of these folders, or add its folder to the variable"
    outside = rf"{re.escape(repr(str(path)))} is outside the folders of \${VARIABLE} \(.*inside\)"
    return pytest.raises(ConfigError, match=f"^{re.escape(key)}: {outside}; {advice}$")


def test_only_files_inside_the_folders_pass(folders, monkeypatch):
    inside, outside = folders
    (inside / "link").symlink_to(outside)
    check_input(inside, "key")
    check_input("deeper/file.json", "key")
    for path in (outside / "a", inside / ".." / "outside" / "a", inside / "link" / "a", f"{inside}side", "/"):
        with refused("key", path):
            check_input(path, "key")
    monkeypatch.setenv(VARIABLE, os.pathsep.join(map(str, folders)))
    check_input(outside / "a", "key")
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(ConfigError, match=rf"the folders of \${VARIABLE} \(none\)"):
        check_input(inside, "key")
    monkeypatch.delenv(VARIABLE)
    check_input("/", "key")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def build(model=None, **cfg):
    """Build a scene with a robot."""
    robot_cfg = {"uid": "r", **({} if model is None else {"model": str(model)}), **cfg.pop("robot", {})}
    return scene.build(validate_section(SceneConfig, {"robot": robot_cfg, **cfg}, "scene"))


def test_files_of_a_urdf_robot(folders):
    pytest.importorskip("mujoco")
    inside, outside = folders
    mesh, far = write(outside / "mesh.obj", TETRAHEDRON), write(outside / "arm.urdf", robot())
    near = write(inside / "arm.urdf", robot([link("base", MESH.format("../outside/mesh.obj")), *LINKS[1:]]))
    with refused("robot.model", far):
        build(far)
    for source in (near, near.read_text()):
        with refused("robot.model", mesh):
            build(source)
    hand = {"components": [{"component_type": "hand", "urdf_path": str(far)}]}
    with refused("robot.urdf_cfg.components[0].urdf_path", far):
        build(robot={"urdf_cfg": hand})
    write(inside / "mesh.obj", TETRAHEDRON)
    build(write(near, robot([link("base", MESH.format("mesh.obj")), *LINKS[1:]])))


MJCF = (
    "<mujoco>{}<worldbody><body><joint name='turn'/><geom {}size='1'/></body></worldbody>"
    "<actuator><position joint='turn' kp='1'/></actuator></mujoco>"
)


@pytest.mark.parametrize("key", ["mjcf", "robot.model"])
def test_files_that_an_mjcf_file_reads(key, folders):
    pytest.importorskip("mujoco")
    inside, outside = folders
    far = write(outside / "far.xml", MJCF.format("", ""))
    mesh = write(outside / "mesh.obj", TETRAHEDRON)
    assets = "<asset><mesh name='m' file='mesh.obj'/></asset>"
    use = "type='mesh' mesh='m' "

    def load(text):
        path = write(inside / "near.xml", text)
        return build(path) if key == "robot.model" else build(mjcf=str(path))

    with refused(key, far):
        build(far) if key == "robot.model" else build(mjcf=str(far))
    write(inside / "second.xml", f"<mujoco><include file='{far}'/></mujoco>")
    with refused(key, far):
        load(MJCF.format("<include file='second.xml'/>", ""))
    with refused(key, mesh):
        load(MJCF.format(f"<compiler meshdir='{outside}'/>{assets}", use))
    write(inside / "mesh.obj", TETRAHEDRON)
    load(MJCF.format(assets, use))
    with pytest.raises(ConfigError, match=rf"^{key}: cannot read '.*near.xml': mismatched tag: line 1, column 13$"):
        load("<mujoco><a></mujoco>")


def test_a_file_that_includes_itself_is_read_once(folders):
    path = write(folders[0] / "loop.xml", "<mujoco><include file='loop.xml'/></mujoco>")
    check_mjcf_inputs(str(path), "mjcf")


def test_robots_of_an_installed_package_are_trusted(folders):
    pytest.importorskip("mujoco")
    try:
        build("example:so101")
    except MissingExtraError:
        pytest.skip("needs the extra robots")


def test_demonstrations(folders):
    path = demos.balancing_path()
    clone = {"name": "bc", "cfg": {"demos": str(path), "batch_size": 32}}
    demos.balancing(0)
    cfg = config_from_dict(BASE, "demos", {"algorithm": clone})
    with refused("algorithm.cfg.demos", path):
        ecrl.init_state(cfg)


def test_the_initial_policy(folders):
    path = demos.start_path(7)
    with refused("trainer.init_from", path):
        ecrl.init_state(small(**{"trainer.init_from": str(path)}))


def test_the_file_of_a_gym_config(folders):
    far = write(folders[1] / "gym.json", '{"id": "pendulum"}')
    base = {name: section for name, section in BASE.items() if name != "env"}
    with pytest.raises(ConfigError, match=rf"^there: trainer.gym_config: '{far}' is outside the folders of"):
        config_from_dict(base, "there", {"trainer.gym_config": str(far)})


def test_pretrained_weights(folders):
    with refused("policy.vla.model_path", folders[1]):
        check_folder(str(folders[1]), "pi0")
