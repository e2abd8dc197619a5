"""A config may name only files inside $ECRL_INPUT_FOLDERS, if the variable is set."""

import os
import re
import shutil
from pathlib import Path

import pytest
from support import demos
from support.key_effects import BASE
from support.small_runs import small
from support.urdf_robot import LINKS, link, robot

import ecrl
from ecrl.config import config_from_dict
from ecrl.config.input_files import VARIABLE, check_input
from ecrl.config.model import validate_section
from ecrl.envs.mujoco.robots.mjcf_inputs import check_mjcf_inputs
from ecrl.envs.mujoco.robots.model import RobotModel
from ecrl.envs.mujoco.scene import scene
from ecrl.envs.mujoco.scene.config import RobotConfig, SceneConfig
from ecrl.envs.vocabulary import read_vocabulary
from ecrl.errors import ConfigError, MissingExtraError
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
    write(folders[0] / "sub" / "a.xml", "<mujoco/>")
    for name in ("loop.xml", "sub/../loop.xml"):
        text = f"<mujoco><include file='{name}'/><asset><model file='{name}'/></asset></mujoco>"
        check_mjcf_inputs(str(write(folders[0] / "loop.xml", text)), "mjcf")


ASSETS = "<asset><mesh name='m' file='mesh.obj'/></asset>"
SEEN_OUTSIDE = {  # the main file and other files in the folder, with {out} for the folder outside
    "the folder is in an included file": (f"<include file='a.xml'/>{ASSETS}", {"a.xml": "<compiler meshdir='{out}'/>"}),
    "the mesh is in an included file": ("<compiler meshdir='{out}'/><include file='a.xml'/>", {"a.xml": ASSETS}),
    "the folder of the main file counts": (
        "<include file='sub/a.xml'/>",
        {"sub/a.xml": "<asset><mesh name='m' file='../outside/mesh.obj'/></asset>"},
    ),
    "an include in an included file": (
        "<include file='sub/a.xml'/>",
        {"sub/a.xml": "<include file='../outside/far.xml'/>"},
    ),
    "the folder of the name is left out": (
        "<compiler meshdir='{out}' strippath='true'/><asset><mesh name='m' file='{in}/mesh.obj'/></asset>",
        {},
    ),
    "a model in the model": (
        "<asset><model file='a.xml'/></asset>",
        {"a.xml": f"<compiler meshdir='{{out}}'/>{ASSETS}"},
    ),
    "a picture": ("<asset><texture name='t' type='cube' fileleft='{out}/mesh.obj'/></asset>", {}),
}


@pytest.mark.parametrize("case", SEEN_OUTSIDE)
def test_an_mjcf_file_cannot_lead_outside(case, folders):
    inside, outside = folders
    main, others = SEEN_OUTSIDE[case]
    write(outside / "far.xml", "<mujoco/>")
    for folder in folders:
        write(folder / "mesh.obj", TETRAHEDRON)
    for name, text in {"main.xml": main, **others}.items():
        filled = text.replace("{out}", str(outside)).replace("{in}", str(inside))
        write(inside / name, f"<mujoco>{filled}</mujoco>")
    with pytest.raises(ConfigError, match=r"^mjcf: '.*outside/(mesh.obj|far.xml)' is outside the folders of"):
        check_mjcf_inputs(str(inside / "main.xml"), "mjcf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<robot name='r'/>", "the first element of the text is <robot>, expected <mujoco>"),
        (
            "<mujoco><include xmlns='x' file='a.xml'/></mujoco>",
            "the text has an XML namespace, in <{x}include>; remove",
        ),
        ("<mujoco><extension/></mujoco>", "the text has plugins, whose files cannot be checked; remove <extension>"),
    ],
)
def test_what_cannot_be_checked_is_refused(text, message, folders):
    with pytest.raises(ConfigError, match=f"^mjcf: {re.escape(message)}"):
        check_mjcf_inputs(text, "mjcf")


def test_robots_of_an_installed_package_are_trusted(folders):
    pytest.importorskip("mujoco")
    try:
        made = build("example:so101")
    except MissingExtraError:
        pytest.skip("needs the extra robots")
    assert made.model.nmesh > 0


def test_files_that_code_registers_are_trusted(folders, restored_registry):
    pytest.importorskip("mujoco")
    write(folders[1] / "mesh.obj", TETRAHEDRON)
    far = write(folders[1] / "arm.urdf", robot([link("base", MESH.format("mesh.obj")), *LINKS[1:]]))

    @ecrl.register_robot("far_arm")
    def far_arm(cfg: RobotConfig) -> RobotModel:
        return RobotModel(str(far))

    assert build(robot={"robot_type": "far_arm"}).model.nmesh == 1


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


def test_links_and_names_in_a_checkpoint_do_not_lead_outside(folders, monkeypatch):
    inside, outside = folders
    demos.start(7, BASE["policy"])
    shutil.copytree(demos.start_path(7), inside / "copy")
    cfg = small(**{"trainer.init_from": "copy"})
    ecrl.init_state(cfg)
    (weights,) = (path for path in (inside / "copy").rglob("*.safetensors") if not path.name.startswith("rank_"))
    with monkeypatch.context() as patched:
        manifest = {"sha256": {f"../copy/{weights.name}": "checksum"}}
        patched.setattr("ecrl.loop.initial_policy.read_manifest", lambda path: manifest)
        with pytest.raises(ConfigError, match=r"^trainer.init_from: .*manifest.json: names the file '\.\./copy/"):
            ecrl.init_state(cfg)
    weights.rename(outside / weights.name)
    weights.symlink_to(outside / weights.name)
    with refused("trainer.init_from", weights.relative_to(inside)):
        ecrl.init_state(cfg)


def test_a_vocabulary(folders):
    far = write(folders[1] / "words.json", '{"<pad>": 0, "secret": 1}')
    with refused("tokenizer", far):
        read_vocabulary(str(far))


def test_a_path_that_is_none_is_one_line(folders):
    with pytest.raises(ConfigError, match=r"^key: 'a\\x00b' is not a path: embedded null byte$"):
        check_input("a\0b", "key")


def test_the_file_of_a_gym_config(folders):
    far = write(folders[1] / "gym.json", '{"id": "pendulum"}')
    base = {name: section for name, section in BASE.items() if name != "env"}
    with pytest.raises(ConfigError, match=rf"^there: trainer.gym_config: '{far}' is outside the folders of"):
        config_from_dict(base, "there", {"trainer.gym_config": str(far)})


def test_pretrained_weights(folders):
    inside, outside = folders
    with refused("policy.vla.model_path", outside):
        check_folder(str(outside), "pi0")
    write(outside / "config.json", '{"model_type": "pi0"}')
    (inside / "config.json").symlink_to(outside / "config.json")
    with refused("policy.vla.model_path", inside / "config.json"):
        check_folder(str(inside), "pi0")
