"""Events that change masses, centres of mass, sizes and gravity: MuJoCo's motion agrees with the laws of physics."""

from copy import copy

import pytest
import torch
from support.checks import close

pytest.importorskip("mujoco.batch")

import mujoco
from support.fake_mujoco_task import DT, FORCED, SCENE, UNDAMPED, cube, happening, keys_of, task
from tensordict import TensorDict

from ecrl import rng
from ecrl.config.model import validate_section
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start
from ecrl.envs.mujoco.scene.config import SceneConfig
from ecrl.errors import ConfigError
from ecrl.registry import lookup

pytestmark = pytest.mark.usefixtures("mujoco_test_terms")
CUBE, SLIDER = {"entity_cfg": {"uid": "cube"}}, {"entity_cfg": {"uid": "slider"}}
G = 9.81


def happened(func, batch=(3,), worlds=None, scene=None, **params):
    """The simulation, and the worlds after an event with the keys 0, 1, ..."""
    cfg = validate_section(lookup("event", func).config, params, "params")
    scene = validate_section(SceneConfig, scene or SCENE, "scene")
    sim = simulation(scene, varied=getattr(cfg, "varied", lambda sim: ())(simulation(scene)))
    begin = start(sim, batch) if worlds is None else worlds(sim, start(sim, batch))
    keys = torch.arange(torch.Size(batch).numel()).reshape(batch)
    state = TensorDict({"world": begin, "force": torch.zeros(*batch, sim.nv)}, batch)
    return sim, lookup("event", func).make(cfg, sim)(state, keys)


def stepped(sim, worlds, number=1, force=None):
    for _ in range(number):
        worlds, failed = advance(sim, worlds, torch.zeros(*worlds.batch_size, sim.nu), force)
        assert not failed.any()
    return worlds


# centre of mass


def test_a_force_at_the_origin_turns_a_body_about_its_centre_of_mass():
    """F at the origin, com at c in the body's frame: v_com = F t / m, and omega = I^-1 (-c x F) t, to first order."""
    offset = [0.01, -0.02, 0.03]
    sim, after = happened("randomize_rigid_object_center_of_mass", **CUBE, com_pos_offset_range=[offset, offset])
    com = torch.tensor(offset)
    close(world.parameter(sim, after["world"], "body_ipos", "cube"), com.expand(3, 3), 1e-6)
    force = torch.tensor([1.5, 1.0, 2.0 * G])  # carries its weight
    moved = stepped(sim, after["world"], 1, world.push(sim, "cube", force.expand(3, 3)))
    linear, angular = world.body_velocity(sim, moved, "cube")
    inertia, mass = 2.0 * 0.01 / 6.0, 2.0
    expected = torch.linalg.cross(-com, force) * DT / inertia  # the weight acts at the centre of mass, without a moment
    close(angular, expected.expand(3, 3), 0.02 * float(expected.norm()))
    at_com = linear + torch.linalg.cross(angular, com.expand(3, 3))
    close(at_com, ((force - torch.tensor([0.0, 0.0, mass * G])) * DT / mass).expand(3, 3), 0.02)


def test_the_drag_of_a_fall_acts_at_the_origin_and_turns_a_cube_only_if_there_is_damping():
    """Drag -k m v at the origin, and com at c: the moment about the com is -c x (-k m v), v = -g t, to first order."""
    for rate in (0.0, 2.0):
        scene = SCENE | {"rigid_object": [cube("cube", [0.0, 0.0, 5.0], attrs=UNDAMPED | {"linear_damping": rate})]}
        box = [[0.02, 0.0, 0.0]] * 2
        sim, after = happened("randomize_rigid_object_center_of_mass", scene=scene, **CUBE, com_pos_offset_range=box)
        angular = world.body_velocity(sim, stepped(sim, after["world"], 5), "cube")[1]
        t, m, inertia = 5 * DT, 2.0, 2.0 * 0.01 / 6.0
        close(angular, [[0.0, 0.02 * rate * m * G * t**2 / 2.0 / inertia, 0.0]] * 3, 0.05)


def test_a_cube_tips_over_the_edge_only_if_its_mass_is_beyond_the_edge():
    tall = cube("cube", [0.0, 0.0, 0.2], shape={"shape_type": "Cube", "size": [0.1, 0.1, 0.4]})
    scene = SCENE | {"rigid_object": [tall]}
    for shift, tips in ((0.03, False), (0.08, True)):
        box = [[shift, 0.0, 0.0]] * 2
        sim, after = happened("randomize_rigid_object_center_of_mass", scene=scene, **CUBE, com_pos_offset_range=box)
        up = world.body_pose(sim, stepped(sim, after["world"], 60), "cube")[:, 2, 2]
        assert ((up < 0.5) == tips).all() and (tips or (up > 0.999).all())


def test_a_body_without_an_offset_moves_as_in_the_plain_scene():
    none = [[0.0] * 3] * 2
    sim, after = happened("randomize_rigid_object_center_of_mass", **CUBE, com_pos_offset_range=none)
    plain = simulation(validate_section(SceneConfig, SCENE, "scene"))
    turning = [
        world.with_body_velocity(one, worlds, "cube", torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
        for one, worlds in ((sim, after["world"]), (plain, start(plain, (3,))))
    ]
    moved, expected = (
        world.body_pose(one, stepped(one, worlds, 20), "cube")
        for one, worlds in zip((sim, plain), turning, strict=True)
    )
    close(moved, expected, 1e-6)


@pytest.mark.filterwarnings("ignore:compiler attribute 'settotalmass' is deprecated")
@pytest.mark.parametrize("compiler", ['inertiafromgeom="true"', 'settotalmass="8"'])
def test_options_of_the_files_compiler_apply_once_beside_a_moved_centre_of_mass(compiler):
    option = f'<compiler {compiler} boundmass="1e-3"/>'
    inert = '<inertial pos="1 0 0" mass="9" diaginertia="5 5 5"/><geom size=".1" mass=".3"/>'
    text = SCENE["mjcf"].replace("<worldbody>", f'{option}<worldbody><body pos="0 9 0">{inert}</body>', 1)
    plain = simulation(validate_section(SceneConfig, SCENE | {"mjcf": text}, "scene"))
    still = [[0.0] * 3] * 2
    event = "randomize_rigid_object_center_of_mass"
    sim, after = happened(event, scene=SCENE | {"mjcf": text}, **CUBE, com_pos_offset_range=still)
    for field in ("body_mass", "body_inertia", "body_ipos", "dof_damping"):
        close(torch.tensor(getattr(sim.model, field)), torch.tensor(getattr(plain.model, field)), 1e-9)
    assert ("total" in compiler) == (abs(plain.model.body_mass.sum() - 8.0) < 1e-9)
    worlds = world.with_body_velocity(sim, after["world"], "cube", torch.ones(3), torch.ones(3))
    expected = world.with_body_velocity(plain, start(plain, (3,)), "cube", torch.ones(3), torch.ones(3))
    moved, expected = stepped(sim, worlds), stepped(plain, expected)
    close(world.qpos(sim, moved), world.qpos(plain, expected), 1e-6)
    shifted = world.with_parameter(sim, worlds, "body_ipos", "cube", torch.tensor([0.02, 0.0, 0.0]))
    assert not torch.equal(world.qpos(sim, stepped(sim, shifted)), world.qpos(sim, moved))


def test_centres_of_mass_are_drawn_in_the_box_around_the_scenes():
    box = [[-0.02, 0.0, 0.01], [0.02, 0.03, 0.01]]
    sim, after = happened("randomize_rigid_object_center_of_mass", (500,), **CUBE, com_pos_offset_range=box)
    com = world.parameter(sim, after["world"], "body_ipos", "cube")
    assert (com.amin(0) >= torch.tensor(box[0]) - 1e-7).all() and (com.amax(0) <= torch.tensor(box[1]) + 1e-7).all()
    assert com[:, 0].max() - com[:, 0].min() > 0.039 and len(com[:, 0].unique()) == 500


# gravity


def test_a_fall_covers_half_g_t_squared():
    box = [[-2.0, 0.0, -12.0], [2.0, 0.0, -3.0]]
    sim, after = happened("randomize_gravity", (4,), gravity_range=box)
    gravity = torch.tensor(box[0]) + rng.uniform(torch.arange(4), (3,)) * (torch.tensor(box[1]) - torch.tensor(box[0]))
    close(world.parameter(sim, after["world"], "opt.gravity", "world"), gravity, 1e-6)
    begin, moved = world.body_pose(sim, after["world"], "cube"), stepped(sim, after["world"], 20)
    fallen = (world.body_pose(sim, moved, "cube") - begin)[:, :3, 3]
    steps = 80  # of 5 ms, semi-implicit: x = g dt^2 n (n + 1) / 2
    close(fallen, gravity * 0.005**2 * steps * (steps + 1) / 2.0, 1e-5)
    close(fallen, gravity * (20 * DT) ** 2 / 2.0, 0.02)
    assert len(gravity[:, 2].unique()) == 4


def test_the_built_in_arm_does_not_feel_gravity():
    up = [[0.0, 0.0, 5.0]] * 2
    sim, after = happened("randomize_gravity", scene=SCENE | FORCED, gravity_range=up)
    control = world.hold_controls(sim, after["world"])
    moved, _ = advance(sim, after["world"], control)
    close(
        world.joint_positions(sim, moved, sim.robot.joints),
        world.joint_positions(sim, after["world"], sim.robot.joints),
    )
    assert (world.body_velocity(sim, moved, "cube")[0][:, 2] > 0.09).all()  # but the cube rises


# sizes


def test_a_larger_cube_rests_higher_and_turns_more_slowly_at_the_same_mass():
    sim, after = happened("randomize_rigid_object_scale", (4,), **CUBE, scale_factor_range=[[0.5], [2.0]])
    factor = 0.5 + 1.5 * rng.uniform(torch.arange(4), (1,))
    close(world.parameter(sim, after["world"], "geom_size", "cube"), (0.05 * factor).expand(4, 3), 1e-6)
    torque = torch.zeros(4, sim.nv)
    torque[:, sim.model.joint("cube").dofadr[0] + 5] = 0.01
    spinning = stepped(sim, after["world"], 1, torque)
    inertia = 2.0 * (0.1 * factor[:, 0]) ** 2 / 6.0
    close(world.body_velocity(sim, spinning, "cube")[1][:, 2], 0.01 * DT / inertia, 1e-5)
    close(world.body_velocity(sim, spinning, "cube")[0][:, 2], [-G * DT] * 4, 1e-5)  # the mass is the same
    on_floor = world.with_body_pose(sim, after["world"], "cube", torch.tensor([0.0, 0.0, 0.11]))
    height = world.body_pose(sim, stepped(sim, on_floor, 100), "cube")[:, 2, 3]
    close(height, 0.05 * factor[:, 0], 2e-3)
    assert height.max() > 1.3 * height.min()


def test_axes_may_have_factors_of_their_own():
    """A cube of edges (0.1, 0.2, 0.05): I_z = m (0.1^2 + 0.2^2) / 12, and so on."""
    each = {"scale_factor_range": [[1.0, 2.0, 0.5]] * 2, "same_scale_all_axes": False}
    sim, after = happened("randomize_rigid_object_scale", **CUBE, **each)
    x, y, z = 0.1, 0.2, 0.05
    expected = torch.tensor([y * y + z * z, x * x + z * z, x * x + y * y]) * 2.0 / 12.0
    close(world.parameter(sim, after["world"], "body_inertia", "cube"), expected.expand(3, 3), 1e-6)
    close(world.parameter(sim, after["world"], "geom_size", "cube"), [[0.05, 0.1, 0.025]] * 3, 1e-6)


@pytest.mark.parametrize(
    ("shape", "inertia"),
    [
        ({"shape_type": "Sphere", "radius": 0.1}, lambda m, s: [0.4 * m * (0.1 * s) ** 2] * 3),
        (
            {"shape_type": "Cylinder", "radius": 0.1, "height": 0.3},
            lambda m, s: [m * s * s * (3 * 0.01 + 0.09) / 12] * 2 + [0.5 * m * (0.1 * s) ** 2],
        ),
    ],
)
def test_round_shapes_have_the_inertia_of_their_new_size_and_mass_in_either_order(shape, inertia):
    scene = SCENE | {"rigid_object": [cube("cube", [0.0, 0.0, 5.0], shape=shape)]}
    heavy = happening("randomize_rigid_object_mass", **CUBE, mass_range=[3.0, 3.0])
    large = happening("randomize_rigid_object_scale", **CUBE, scale_factor_range=[[1.5], [1.5]])
    for events in ({"a": heavy, "b": large}, {"a": large, "b": heavy}):
        env = task(rigid_object=scene["rigid_object"], events=events)
        worlds = env.reset(keys_of(2))["world"]
        close(world.parameter(env.scene, worlds, "body_inertia", "cube"), [inertia(3.0, 1.5)] * 2, 1e-5)
        assert (world.parameter(env.scene, worlds, "body_mass", "cube") == 3.0).all()


def test_damping_follows_the_size_so_that_a_turn_decays_at_the_same_rate():
    objects = [cube("cube", [0.0, 0.0, 5.0], attrs=UNDAMPED | {"angular_damping": 3.0})]
    scene = SCENE | {"rigid_object": objects}
    sim, after = happened("randomize_rigid_object_scale", (4,), scene=scene, **CUBE, scale_factor_range=[[0.5], [2.0]])
    turning = world.with_body_velocity(sim, after["world"], "cube", torch.zeros(3), torch.tensor([0.0, 0.0, 1.0]))
    angular = world.body_velocity(sim, stepped(sim, turning), "cube")[1][:, 2]
    close(angular, [(1.0 + 3.0 * 0.005) ** -4] * 4, 1e-5)


def thing(geoms, body='<freejoint name="thing"/>'):
    """A scene with one more body, of the given geoms."""
    text = SCENE["mjcf"].replace("</worldbody>", f'<body name="thing" pos="0 2 5">{body}{geoms}</body></worldbody>')
    return SCENE | {"mjcf": text.replace("<worldbody>", f"<asset>{TETRAHEDRON}</asset><worldbody>", 1)}


TETRAHEDRON = '<mesh name="m" vertex="0 0 0 .1 0 0 0 .1 0 0 0 .1"/>'
THING = {"entity_cfg": {"uid": "thing"}}


def test_a_capsule_has_the_inertia_that_mujoco_gives_to_its_new_size():
    scene = thing('<geom name="thing" type="capsule" size=".05 .1" mass="2"/>')
    sim, after = happened("randomize_rigid_object_scale", scene=scene, **THING, scale_factor_range=[[1.5], [1.5]])
    large = mujoco.MjModel.from_xml_string(scene["mjcf"].replace('size=".05 .1"', 'size=".075 .15"'))
    expected = torch.tensor(large.body("thing").inertia).float()
    close(world.parameter(sim, after["world"], "body_inertia", "thing"), expected.expand(3, 3), 1e-6)
    close(world.body_scale(sim, after["world"], "thing"), torch.full((3, 3), 1.5), 1e-6)
    on_floor = world.with_body_pose(sim, after["world"], "thing", torch.tensor([0.0, 2.0, 0.226]))
    close(world.body_pose(sim, stepped(sim, on_floor, 20), "thing")[:, 2, 3], [0.225] * 3, 2e-3)  # it stands


@pytest.mark.parametrize(
    ("scene", "message"),
    [
        (
            thing('<geom name="thing" type="mesh" mesh="m"/>'),
            "body 'thing' has the type mesh, expected one geom",
        ),
        (
            thing('<geom name="thing" size=".1"/><geom size=".2"/>'),
            "body 'thing' has 2 geoms, expected one geom",
        ),
        (thing('<geom name="ball" size=".1"/>'), "has the name 'ball'; give it the name of its body"),
        (
            thing('<geom name="thing" size=".1"/>', '<joint name="thing"/>'),
            "body 'thing' moves with joints or with another body",
        ),
        (
            thing('<inertial pos=".1 0 0" mass="1" diaginertia="1 1 1"/><geom name="thing" size=".1"/>'),
            "the inertial frame of body 'thing' is not the frame of its geom",
        ),
    ],
)
def test_a_body_whose_inertia_does_not_follow_from_its_size_is_not_scaled(scene, message):
    with pytest.raises(ConfigError, match=rf"^params.entity_cfg.uid: .*{message}"):
        happened("randomize_rigid_object_scale", scene=scene, **THING, scale_factor_range=[[1.5], [1.5]])


def test_several_objects_share_their_factors_or_not():
    both = {"entity_cfgs": [{"uid": "cube"}, {"uid": "wall"}], "scale_factor_range": [[0.5], [2.0]]}
    for shared in (False, True):
        sim, after = happened("randomize_rigid_objects_scale", (8,), **both, shared_sample=shared)
        first, second = (
            world.parameter(sim, after["world"], "geom_size", uid)[:, 0] / 0.05 for uid in ("cube", "wall")
        )
        assert torch.allclose(first, second) == shared and len(second.unique()) == 8
        one = happened("randomize_rigid_object_scale", (8,), **CUBE, scale_factor_range=[[0.5], [2.0]])
        assert not shared or torch.equal(
            world.parameter(one[0], one[1]["world"], "geom_size", "cube")[:, 0] / 0.05, first
        )


# links


def arm_masses(**params):
    sim, after = happened("randomize_articulation_mass", scene=SCENE | FORCED, entity_cfg={"uid": "ur"}, **params)
    links = [name for field, name in sim.varied if field == "body_mass"]
    return sim, after, {name: world.parameter(sim, after["world"], "body_mass", name)[:, 0] for name in links}


def test_links_are_chosen_by_expression_by_name_or_all():
    masses = arm_masses(mass_range=[2.0, 4.0], link_names="wrist_.*")[2]
    assert sorted(masses) == [f"ur/wrist_{i}_link" for i in (1, 2, 3)]
    assert all(((x >= 2.0) & (x < 4.0)).all() and len(x.unique()) == 3 for x in masses.values())
    assert not torch.equal(masses["ur/wrist_1_link"], masses["ur/wrist_2_link"])
    assert len(arm_masses(mass_range=[2.0, 4.0])[2]) == 6
    named = arm_masses(mass_range={"elbow_link": [5.0, 5.0]})[2]
    assert list(named) == ["ur/elbow_link"] and (named["ur/elbow_link"] == 5.0).all()
    (more,) = arm_masses(mass_range=[0.5, 0.5], relative=True, link_names=["elbow_link"])[2].values()
    close(more, [3.87 + 0.5] * 3, 1e-5)


def test_a_force_moves_a_heavier_link_less():
    """MuJoCo's own mass matrix: the shoulder's acceleration under a torque is (M^-1 tau) with the drawn masses."""
    sim, after, masses = arm_masses(mass_range=[1.0, 20.0], link_names=["elbow_link", "wrist_1_link"])
    force = torch.zeros(3, sim.nv)
    force[:, 0] = 100.0
    moved, _ = advance(sim, after["world"], world.hold_controls(sim, after["world"]), force)
    for i in range(3):
        model = copy(sim.model)
        for name, values in masses.items():
            body, scene_body = model.body(name), sim.model.body(name)
            body.inertia[:] = scene_body.inertia * float(values[i]) / scene_body.mass[0]
            body.mass[:] = float(values[i])
        mujoco.mj_setConst(model, mujoco.MjData(model))
        data = mujoco.MjData(model)
        data.qpos[:], data.ctrl[:], data.qfrc_applied[0] = sim.home.qpos, sim.home.ctrl, 100.0
        mujoco.mj_step(model, data, sim.substeps)
        close(world.qvel(sim, moved)[i, :6], data.qvel[:6], 1e-5)
    assert len(world.qvel(sim, moved)[:, 0].unique()) == 3


# velocities


def test_velocities_are_set_or_added():
    span = {"linear_range": [[0.0, 1.0, 2.0]] * 2, "angular_range": [[1.0, -2.0, 0.5]] * 2}
    quarter = torch.tensor([1.0, 0.0, 0.0, 1.0]) / 2**0.5

    def moving(sim, worlds):
        turned = world.with_body_pose(sim, worlds, "cube", None, quarter)
        return world.with_body_velocity(sim, turned, "cube", torch.ones(3), torch.ones(3))

    for relative, add in ((False, 0.0), (True, 1.0)):
        sim, after = happened("randomize_rigid_object_velocity", worlds=moving, **CUBE, **span, relative=relative)
        linear, angular = world.body_velocity(sim, after["world"], "cube")
        close(linear, (torch.tensor([0.0, 1.0, 2.0]) + add).expand(3, 3), 1e-6)
        close(angular, (torch.tensor([1.0, -2.0, 0.5]) + add).expand(3, 3), 1e-6)
    x = world.body_pose(sim, stepped(sim, after["world"]), "cube")[:, :2, 3]
    close(x, [[1.0 * DT, 2.0 * DT]] * 3, 1e-5)


def test_a_thrown_cube_lands_where_a_parabola_does():
    thrown = {"linear_range": [[2.0, 0.0, 3.0]] * 2}
    sim, after = happened("randomize_rigid_object_velocity", **CUBE, **thrown)
    moved = world.body_pose(sim, stepped(sim, after["world"], 25), "cube")[:, :3, 3]
    close(moved[:, 0], [2.0 * 0.5] * 3, 1e-4)
    close(moved[:, 2], [5.0 + 3.0 * 0.5 - G * 0.5**2 / 2.0] * 3, 0.02)


# what is refused


@pytest.mark.parametrize(
    ("func", "params", "message"),
    [
        (
            "randomize_rigid_object_center_of_mass",
            {"entity_cfg": {"uid": "hand"}, "com_pos_offset_range": [[0.0] * 3] * 2},
            "params.entity_cfg.uid: body 'hand' is kinematic, expected dynamic",
        ),
        (
            "randomize_rigid_object_scale",
            {**CUBE, "scale_factor_range": [[1.0], [2.0]], "same_scale_all_axes": False},
            "params: same_scale_all_axes is false; give three lowest and three highest factors",
        ),
        (
            "randomize_rigid_object_scale",
            {**CUBE, "scale_factor_range": [[1.0, 1.0], [2.0, 2.0]]},
            r"scale_factor_range\[0\]: 2 factors; give one factor, or three for x, y and z",
        ),
        (
            "randomize_rigid_objects_scale",
            {"entity_cfgs": [{"uid": "cube"}, {"uid": "cube"}], "scale_factor_range": [[1.0], [2.0]]},
            "entity_cfgs: names 'cube' twice; name each object once",
        ),
        (
            "scatter_rigid_objects",
            {"entity_cfgs": [{"uid": "cube"}, {"uid": "cube"}], "position_range": [[0.0] * 3, [1.0] * 3]},
            "entity_cfgs: names 'cube' twice; name each object once",
        ),
        ("randomize_rigid_object_scale", {**CUBE, "scale_factor_range": [[0.0], [2.0]]}, "must be above 0.0"),
        (
            "randomize_rigid_object_scale",
            {"entity_cfg": {"uid": "cub"}, "scale_factor_range": [[1], [2]]},
            "params.entity_cfg.uid: unknown object 'cub'; did you mean 'cube'",
        ),
        ("randomize_articulation_mass", {"entity_cfg": {"uid": "ur"}, "mass_range": [1, 2]}, "no robot 'ur'"),
        ("randomize_gravity", {"gravity_range": [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]}, "lowest 1.0 is above highest 0.0"),
        ("randomize_rigid_object_velocity", {"entity_cfg": {"uid": "wall"}}, "body 'wall' is not free"),
    ],
)
def test_settings_that_do_not_fit_are_refused(func, params, message):
    with pytest.raises(ConfigError, match=message) as error:
        task(events={"it": happening(func, **params)})
    assert str(error.value).startswith(("env.cfg.events.it", "env.cfg: events.it.params"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"mass_range": [1, 2], "link_names": "elbw_link"},
            "params.link_names: no link fits 'elbw_link'; did you mean",
        ),
        ({"mass_range": [1, 2], "link_names": "("}, r"params.link_names: '\(' is not a regular expression"),
        ({"mass_range": {"elbw_link": [1, 2]}}, "params.mass_range: unknown link 'elbw_link'; did you mean"),
        ({"mass_range": [-9, 2], "relative": True}, "params.mass_range: the lowest mass of 'ur/shoulder_pan_link' is"),
        ({"mass_range": {}}, "it.params.mass_range: expected at least 1 entries, got an object"),
        ({"mass_range": {"elbow_link": [1, 2]}, "link_names": "a"}, "both choose links; keep one"),
    ],
)
def test_links_that_are_not_there_are_refused(params, message):
    event = happening("randomize_articulation_mass", entity_cfg={"uid": "ur"}, **params)
    with pytest.raises(ConfigError, match=message):
        task(**FORCED, actions={"all": {"func": "rig_drive"}}, events={"it": event})
