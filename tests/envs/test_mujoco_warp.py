"""MuJoCo Warp on its CPU device: near MuJoCo itself, pure, visible when it lost something; on a GPU, captured."""

import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from pydantic import ValidationError
from support.checks import assert_pure
from support.long_cases import long_except
from torch.testing import assert_close

pytest.importorskip("mujoco_warp", reason="needs the extra warp")
pytest.importorskip("mujoco.batch")

import mujoco
import numpy as np
import warp
from support.mujoco_model import XML, none, starts

import ecrl
from ecrl import rng
from ecrl.compile.jit import choose_form
from ecrl.config import config_from_dict
from ecrl.envs import auto_reset, make_env
from ecrl.envs.mujoco import world
from ecrl.envs.mujoco.physics import step_op as physics
from ecrl.envs.mujoco.physics import warp_model
from ecrl.envs.mujoco.physics import warp_step as warp_physics
from ecrl.envs.mujoco.physics.simulation import advance, simulation, start
from ecrl.envs.mujoco.scene import models
from ecrl.envs.mujoco.scene.config import PhysicsConfig, RigidObjectConfig, RobotConfig, SceneConfig, ShapeConfig
from ecrl.envs.validate import check_fields
from ecrl.errors import ConfigError, MissingExtraError
from ecrl.kernels import scan

# The first test of all compiles Warp's kernels, for minutes where they are in no cache (~/.cache/warp), as files
# for each model; with them it is seconds.
pytestmark = pytest.mark.slow
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CONFIG = Path(__file__).parents[2] / "configs" / "push_cube_ppo.json"
CUBE = RigidObjectConfig(
    uid="cube", shape=ShapeConfig(shape_type="Cube", size=(0.1, 0.1, 0.1)), init_pos=(-0.6, -0.4, 0.05)
)
MASS = (("body_mass", "cube"), ("body_inertia", "cube"))


def text_model(xml=XML):
    m = mujoco.MjModel.from_xml_string(xml)
    m.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    return m


def both(m, varied=()):
    return [models.load(m, 0 if backend == "warp" else 1, varied, backend) for backend in ("mujoco", "warp")]


def stepped(handle, rows, control, substeps, parameters=None):
    parameters = none(rows) if parameters is None else parameters
    return physics.step(rows, control, parameters, handle=handle, substeps=substeps)


def sims(varied=(), **changes):
    """The arm and a cube, by MuJoCo and by Warp."""
    fields = {"robot": RobotConfig(), "rigid_object": (CUBE,)} | changes
    configs = [SceneConfig(**fields, physics=PhysicsConfig(backend=backend)) for backend in ("mujoco", "warp")]
    return [simulation(cfg, (), varied) for cfg in configs]


def columns(m, part):
    first = models.size_of(m, *models.STATE[: models.STATE.index(part)])
    return slice(first, first + models.size_of(m, part))


def test_a_body_falls_as_in_closed_form():
    m = text_model(
        '<mujoco><option timestep="0.01"/><worldbody><body><freejoint/><geom size=".1"/></body></worldbody></mujoco>'
    )
    _, handle = both(m)
    row = torch.zeros(2, models.size_of(m, *models.STATE), dtype=torch.float64)
    row[:, 4], row[1, 8] = 1.0, 2.0  # upright; the second is thrown along x
    after, sensors = stepped(handle, row, row.new_zeros(2, m.nv), 50)
    # semi-implicit Euler: v = -g n h, z = -g h^2 n (n + 1) / 2
    assert_close(after[:, 0], torch.full((2,), 0.5, dtype=torch.float64), rtol=1e-6, atol=0)
    assert_close(after[:, 3], torch.full((2,), -9.81 * 1e-4 * 50 * 51 / 2, dtype=torch.float64), rtol=1e-5, atol=0)
    assert_close(after[:, 10], torch.full((2,), -9.81 * 0.5, dtype=torch.float64), rtol=1e-5, atol=0)
    assert_close(after[:, 1], torch.tensor([0.0, 1.0], dtype=torch.float64), rtol=1e-5, atol=1e-12)
    assert sensors.shape == (2, 0) and after.dtype == torch.float64


def test_it_is_near_mujoco_for_bodies_actuators_sensors_and_moved_things():
    m = text_model()
    rows, control = starts(m, 4)
    here, there = both(m)
    expected, expected_sensors = stepped(here, rows, control, 20)
    actual, sensors = stepped(there, rows, control, 20)
    # 20 steps of 5 ms in float32 with contacts: rounding of 1e-7 per step, times stiffness
    for part, atol in (("TIME", 1e-6), ("QPOS", 1e-4), ("QVEL", 5e-3), ("ACT", 1e-5), ("MOCAP_POS", 1e-6)):
        assert_close(actual[:, columns(m, part)], expected[:, columns(m, part)], rtol=1e-3, atol=atol)
    assert_close(sensors, expected_sensors, rtol=1e-3, atol=1e-3)
    assert not torch.equal(actual, expected)  # float32 and float64
    assert torch.equal(actual, actual.float().double())


def test_the_arm_follows_a_target_as_in_mujoco():
    here, there = sims()
    joints = here.robot.joints
    for sim, states in ((here, []), (there, (other := []))):
        now = start(sim, (3,))
        goal = torch.tensor(sim.home.ctrl).float() + torch.tensor([[0.1], [-0.2], [0.3]])
        for _ in range(12):  # 48 substeps
            now, failed = advance(sim, now, goal)
            assert not failed.any()
            states.append(now)
        if sim is here:
            mine = states
    for a, b in zip(mine, other, strict=True):
        assert_close(world.joint_positions(there, b, joints), world.joint_positions(here, a, joints), rtol=0, atol=2e-5)
        assert_close(
            world.joint_velocities(there, b, joints), world.joint_velocities(here, a, joints), rtol=0, atol=2e-3
        )
        force, expected = (world.joint_forces(s, w, joints) for s, w in ((there, b), (here, a)))
        assert_close(force, expected, rtol=1e-2, atol=0.5)  # N m, of drives of 20000 N m/rad and up to 330 N m
    moved = world.joint_positions(here, mine[-1], joints) - torch.tensor(here.home.qpos[:6]).float()
    assert moved.abs().min() > 0.02


def test_a_pushed_cube_slides_as_in_mujoco():
    here, there = sims()
    ends = []
    for sim in (here, there):
        now, control = start(sim, (2,)), torch.tensor(sim.home.ctrl).float().expand(2, -1)
        force = world.push(sim, "cube", torch.tensor([[12.0, 0.0, 0.0], [0.0, 2.0, 0.0]]))
        for _ in range(12):
            now, failed = advance(sim, now, control, force)
            assert not failed.any()
        ends.append(world.body_pose(sim, now, "cube")[..., :3, 3])
    travelled = ends[0] - torch.tensor([-0.6, -0.4, 0.05])
    assert travelled[0, 0] > 0.2 and travelled[1].abs().max() < 0.01  # 12 N against friction of 4.9 N; 2 N does not do
    assert_close(ends[1], ends[0], rtol=0, atol=2e-3)


VARIES = {
    "body_mass": ("box", 3.0),
    "body_inertia": ("box", 4.0),
    "body_ipos": ("end", 0.3),
    "body_gravcomp": ("box", 0.5),
    "dof_armature": ("a", 0.3),
    "dof_damping": ("a", 5.0),
    "dof_frictionloss": ("a", 2.0),
    "jnt_stiffness": ("a", 9.0),
    "jnt_range": ("a", 0.2),
    "geom_size": ("box", 0.07),
    "geom_friction": ("box", 3.0),
    "geom_solref": ("box", 0.05),
    "geom_solimp": ("box", 0.6),
    "actuator_gear": ("A", 2.0),
    "actuator_gainprm": ("A", 7.0),
    "actuator_biasprm": ("A", -8.0),
    "actuator_forcerange": ("A", 1.0),
    "actuator_ctrlrange": ("A", 0.1),
}
QUICK = ("body_mass", "dof_damping", "geom_friction", "actuator_gear")
LIMITED = XML.replace('<joint name="a"', '<joint name="a" limited="true" range="-2 2"')
LIMITS = 'ctrllimited="true" ctrlrange="-9 9" forcelimited="true" forcerange="-99 99"'
LIMITED = LIMITED.replace('<position name="A"', f'<position name="A" {LIMITS}')


def changed(field, own, value):
    """Return changed, valid numbers of a field."""
    other = own.copy()
    if field.endswith("range"):
        return np.array([-value, value])
    if field == "body_inertia":
        return own * value
    if field == "actuator_biasprm":
        other[1] = value
    elif field in ("geom_size", "geom_solimp"):
        other[:3] = value
    else:
        other[0] = value
    return other


def test_every_field_that_may_vary_is_tried():
    assert VARIES.keys() == warp_model.VARIES.keys()


@pytest.mark.parametrize("field", long_except(QUICK, VARIES))
def test_what_varies_varies_as_in_mujoco_and_leaves_no_trace(field):
    name, value = VARIES[field]
    m = text_model(LIMITED)
    here, there = both(m, ((field, name),))
    rows, control = starts(m, 3)
    rows[:, 3], rows[:, 8] = 0.095, 1.0  # the box on the floor, the arm lifted
    control[:, 0] = torch.tensor([0.5, 1.0, 1.5])
    own = getattr(m, field).ravel()[models.rows_of(m, field, name)]
    same = torch.tensor(own, dtype=torch.float64).repeat(3, 1)
    other = same.clone()
    other[1] = torch.tensor(changed(field, own, value))
    warp_plain, mujoco_plain = (stepped(handle, rows, control, 10, same)[0] for handle in (there, here))
    actual, expected = (stepped(handle, rows, control, 10, other)[0] for handle in (there, here))
    part = columns(m, "QPOS")
    assert_close(actual[:, part], expected[:, part], rtol=1e-3, atol=2e-4)
    assert torch.equal(actual[[0, 2]], warp_plain[[0, 2]])
    effect, expected_effect = (a[1, part] - b[1, part] for a, b in ((actual, warp_plain), (expected, mujoco_plain)))
    assert expected_effect.abs().max() > 5e-4  # it matters ...
    assert (effect - expected_effect).abs().max() < 0.2 * expected_effect.abs().max()  # ... and as much
    assert_close(warp_plain, stepped(both(m)[1], rows, control, 10)[0], rtol=1e-4, atol=1e-3)
    assert torch.equal(stepped(there, rows, control, 10, same)[0], warp_plain)


def test_no_substeps_give_the_sensors_of_the_state_and_leave_it():
    m = text_model()
    rows, control = starts(m, 2)
    here, there = both(m)
    after, sensors = stepped(there, rows, control, 0)
    assert torch.equal(after, rows)
    assert_close(sensors, stepped(here, rows, control, 0)[1], rtol=1e-5, atol=1e-4)


def test_sensors_are_of_the_last_substep():
    m = text_model()
    rows, control = starts(m, 2)
    _, there = both(m)
    before, _ = stepped(there, rows, control, 3)
    _, sensors = stepped(there, rows, control, 4)
    assert_close(sensors, stepped(there, before, control, 0)[1], rtol=1e-5, atol=1e-5)


def test_the_same_row_gives_the_same_bits_whatever_ran_before_and_in_any_batch():
    m = text_model()
    rows, control = starts(m, 64)
    _, there = both(m)
    first, sensors = stepped(there, rows, control, 10)
    other, pushed = starts(m, 64, seed=1)
    stepped(there, other, 9.0 * pushed, 10)
    broken = other.clone()
    broken[:, 1:8] = torch.nan
    stepped(there, broken, pushed, 2)
    again, sensed = stepped(there, rows, control, 10)
    assert torch.equal(first, again) and torch.equal(sensors, sensed)
    for i in (0, 17, 63):
        single = stepped(there, rows[i], control[i], 10)
        assert torch.equal(single[0], first[i]) and torch.equal(single[1], sensors[i])
    order = torch.arange(63, -1, -1)
    assert torch.equal(stepped(there, rows[order], control[order], 10)[0], first[order])
    parts = rows
    for _ in range(5):  # ten at once are five times two: a row is all that a simulation carries
        parts, _ = stepped(there, parts, control, 2)
    assert torch.equal(parts, first)


def test_it_is_pure_takes_any_axes_and_vmaps():
    m = text_model()
    rows, control = starts(m, 6)
    _, there = both(m)
    flat = assert_pure(physics.step, rows, control, none(rows), handle=there, substeps=2)
    shaped = stepped(there, rows.reshape(3, 2, -1), control.reshape(3, 2, -1), 2)
    mapped = torch.vmap(lambda r, c: stepped(there, r, c, 2), in_dims=(1, 1))(
        rows.reshape(3, 2, -1), control.reshape(3, 2, -1)
    )
    for a, b, c in zip(flat, shaped, mapped, strict=True):
        assert torch.equal(b.flatten(0, 1), a) and torch.equal(c.transpose(0, 1).flatten(0, 1), a)
    assert torch.equal(stepped(there, torch.stack((rows, rows), -1)[..., 0], control, 2)[0], flat[0])
    assert [len(x) for x in stepped(there, rows[:0], control[:0], 2)] == [0, 0]


def test_the_solver_gives_the_same_bits_by_a_loop_or_all_its_iterations():
    """The former on the CPU and in captures, the latter on a GPU outside of them."""
    m = text_model()
    rows, control = starts(m, 3)
    _, there = both(m)
    looped, _ = stepped(there, rows, control, 5)
    option = warp_physics._worlds(there, 3, rows.device).model.opt
    option.graph_conditional = False
    try:
        assert torch.equal(stepped(there, rows, control, 5)[0], looped)
    finally:
        option.graph_conditional = True


def test_numbers_that_run_away_touch_nobody_else():
    m = text_model()
    rows, control = starts(m, 6)
    _, there = both(m)
    fine, _ = stepped(there, rows, control, 4)
    bad = rows.clone()
    bad[1, 1], bad[3, 12] = torch.nan, 1e200
    after, _ = stepped(there, bad, control, 4)
    sound = [0, 2, 4, 5]
    assert torch.equal(after[sound], fine[sound])
    assert not any(bool((after[i].abs() < 1e10).all()) for i in (1, 3))


def test_more_contacts_than_there_is_room_for_are_seen(monkeypatch):
    m = text_model(XML.replace('timestep="0.005"', 'timestep="0.004"'))  # a separate model with less room
    assert warp_model.capacity(m) == (8 * 4, 4 * 32 + m.nv + 2 * m.njnt)
    monkeypatch.setattr(warp_physics, "capacity", lambda m: (3, 11))
    rows, control = starts(m, 2)
    rows[:, columns(m, "QPOS")] = torch.tensor(m.qpos0)
    rows[:, 3] = 0.09  # the box lies on the floor: four contacts each
    rows[0, 3] = 5.0  # the first is in the air
    _, there = both(m)
    for substeps in (0, 2):
        after, sensors = stepped(there, rows, control, substeps)
        assert after[1].isnan().all() and sensors[1].isnan().all()
        assert not after[0].isnan().any() and not sensors[0].isnan().any()


def test_more_contacts_than_there_is_room_for_together_are_those_of_all(monkeypatch):
    """Nobody knows whose were dropped: the one in the air may have had some too."""
    m = text_model(XML.replace('timestep="0.005"', 'timestep="0.0045"'))
    rows, control = starts(m, 3)
    rows[:, columns(m, "QPOS")] = torch.tensor(m.qpos0)
    rows[:, 3] = torch.tensor([5.0, 0.09, 0.09])  # none, four and four
    _, there = both(m)
    for room, fails in ((3, False), (2, True)):
        monkeypatch.setattr(warp_physics, "capacity", lambda m, room=room: (room, 60))
        warp_physics._worlds.cache_clear()
        for substeps in (0, 2):
            after, _ = stepped(there, rows, control, substeps)
            assert after.isnan().any(1).tolist() == [fails] * 3
    warp_physics._worlds.cache_clear()


def test_a_lost_simulation_ends_its_episode_and_keeps_its_state(monkeypatch):
    monkeypatch.setattr(warp_physics, "capacity", lambda m: (1, 2))
    _, sim = sims(rigid_object=(CUBE, CUBE.model_copy(update={"uid": "more", "init_pos": (1.0, 1.0, 0.05)})))
    now = start(sim, (2,))
    after, failed = advance(sim, now, torch.tensor(sim.home.ctrl).float().expand(2, -1))
    assert failed.all() and torch.equal(after["physics"], now["physics"])


def test_what_warp_cannot_do_is_one_line():
    for xml, varied, message in (
        ('<mujoco><option solver="PGS"/><worldbody><body><geom size="1"/></body></worldbody></mujoco>', (), "PGS"),
        (
            XML,
            (("body_pos", "box"),),
            "body_pos that varies; use mujoco; fields that may vary: body_mass, body_inertia",
        ),
    ):
        with pytest.raises(
            ConfigError, match=f"^physics.backend: warp does not support this scene: .*{message}"
        ) as error:
            warp_model.check(text_model(xml), varied)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^env\.cfg: physics\.backend: warp does not support this scene"):
        scene = '<mujoco><option solver="PGS"/><worldbody><geom type="plane" size="1 1 1"/></worldbody></mujoco>'
        make_env({"name": "ReachRL", "cfg": {"mjcf": scene, "physics": {"backend": "warp"}}})
    with pytest.raises(ValidationError, match="threads applies only to backend mujoco"):
        PhysicsConfig(backend="warp", threads=2)


def test_without_the_package_one_line_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_warp", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ecrl\[warp\]'"):
        warp_model.check(text_model(), ())


def test_nothing_is_printed_and_nothing_of_warp_stays_changed(capfd):
    with warp_model.packages():
        printed = capfd.readouterr()  # without a GPU, Warp's library prints that it found none
    assert "initialized" not in printed.out + printed.err
    before = warp.config.log_level, warp.get_device()
    m = text_model(XML.replace('mass="2"', 'mass="2.5"'))
    rows, control = starts(m, 2)
    stepped(both(m)[1], rows, control, 1)
    assert (warp.config.log_level, warp.get_device()) == before
    assert capfd.readouterr() == ("", "")


def config(**changes):
    raw = ecrl.config.load_config(CONFIG).model_dump(mode="json", exclude_unset=True)
    cfg = config_from_dict(raw)
    small = {
        "trainer.num_envs": 4,
        "trainer.buffer_size": 8,
        "trainer.iterations": 1,
        "trainer.compile": "off",
        "algorithm.cfg.batch_size": 16,
        "env.cfg.physics": {"backend": "warp"},
    }
    return cfg.replace(**(small | changes))


def env_states(env, steps=3):
    keys, action = rng.split(rng.key(3), 4), torch.full((4, 6), 0.3)
    states = [env.reset(keys)]
    for t in range(steps):
        states.append(env.step(states[-1], action, env.draw(rng.fold_in(keys, t))))
    return states


def test_push_cube_is_an_environment_on_either_backend():
    own, other = (make_env(config(**{"env.cfg.physics": {"backend": b}}).env) for b in ("warp", "mujoco"))
    check_fields(own, "PushCubeRL")
    warp_states, mujoco_states = env_states(own), env_states(other)
    assert torch.equal(warp_states[0]["obs"], mujoco_states[0]["obs"])  # starts take no step
    for a, b in zip(warp_states[1:], mujoco_states[1:], strict=True):
        assert_close(a["obs"], b["obs"], rtol=1e-2, atol=1e-2)
        assert torch.equal(a["terminated"], b["terminated"]) and not torch.equal(a["obs"], b["obs"])
        assert_close(a["reward"], b["reward"], rtol=1e-2, atol=1e-3)
    again = env_states(own)
    assert all(
        torch.equal(a["world", "physics"], b["world", "physics"]) for a, b in zip(warp_states, again, strict=True)
    )


def test_training_on_warp_runs_and_resumes_in_mid_episode_bit_for_bit(tmp_path):
    cfg = config(**{"trainer.iterations": 2})
    state, history = ecrl.train(ecrl.init_state(cfg), cfg)
    assert np.isfinite(history[-1]["value_loss"])
    half, _ = ecrl.train(ecrl.init_state(cfg), cfg.replace(**{"trainer.iterations": 1}))
    ecrl.save(tmp_path / "half", half, cfg)
    read, _ = ecrl.load(tmp_path / "half")
    resumed, _ = ecrl.train(read, cfg)
    assert torch.equal(resumed["env", "world", "physics"], state["env", "world", "physics"])
    for name, leaf in state["params"].items(True, True):
        assert torch.equal(resumed["params"].get(name), leaf)


def test_in_a_compiled_loop_it_is_as_in_an_eager_one():
    _, sim = sims()
    form = choose_form("on", "cpu")

    def body(now, goal):
        after, failed = advance(sim, now, goal)
        return after, failed

    def run(scan, now, goals):
        return scan(body, now, goals)

    spread = 0.1 * torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0))
    begun, goals = start(sim, (4,)), torch.tensor(sim.home.ctrl).float() + spread
    after, failed = form.jit(run, form.scan)(begun, goals)
    expected, _ = run(scan, begun, goals)
    assert failed.shape == (3, 4) and not failed.any()
    assert torch.equal(after["physics"], expected["physics"]) and torch.equal(after["sensors"], expected["sensors"])


def test_varied_mass_and_friction_of_a_task():
    raw = config().model_dump(mode="json", exclude_unset=True)
    for name, span in (("mass", [1.0, 5.0]), ("friction", [0.1, 0.9])):
        params = {"entity_cfg": {"uid": "cube"}, f"{name}_range": span}
        event = {"func": f"randomize_rigid_object_{name}", "mode": "reset", "params": params}
        raw["env"]["cfg"]["events"][name] = event
    along, still = torch.tensor([0.0, 1.0, 0.0]).expand(4, 3), torch.zeros(4, 3)
    ends = []
    for backend in ("mujoco", "warp"):
        raw["env"]["cfg"]["physics"] = {"backend": backend}
        env = make_env(config_from_dict(raw).env)
        state = env.reset(rng.split(rng.key(0), 4))
        state["world"] = world.with_body_velocity(env.scene, state["world"], "cube", along, still)
        for _ in range(5):
            state = env.step(state, torch.zeros(4, 6), env.draw(rng.split(rng.key(1), 4)))
        ends.append(world.body_pose(env.scene, state["world"], "cube")[..., :3, 3])
    assert_close(ends[1], ends[0], rtol=0, atol=2e-3)
    assert ends[0][:, 1].unique().numel() == 4


def test_a_gpu_needs_the_warp_backend(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**12))
    ecrl.loop.build._env_and_policy(config(**{"trainer.device": "cuda:0"}))
    with pytest.raises(ConfigError, match=r'set it to cpu, or env\.cfg\.physics\.backend to "warp"$'):
        ecrl.loop.build._env_and_policy(config(**{"trainer.device": "cuda:0", "env.cfg.physics": {}}))
    m = text_model()
    rows, control = starts(m, 2)
    for handle in both(m):
        with pytest.raises(ValueError, match="expected float64"):
            stepped(handle, rows.to("meta"), control, 1)


CUBES = {"entity_cfg": {"uid": "cube"}, "mass_range": [1.0, 5.0]}
GOALS = {"position_range": [[-0.9, -0.7, 0.05], [-0.3, -0.1, 0.05]], "store_key": "goal_pose"}
DRAWN = {
    "heavy": {"func": "randomize_rigid_object_mass", "mode": "reset", "params": CUBES},
    "goal": {"func": "randomize_target_pose", "mode": "reset", "params": GOALS},
}
TASKS = [
    ("PushCubeRL", {}),
    ("PushCubeRL", {"events": DRAWN}),
    ("ReachRL", {"actions": {"a": {"func": "EefPoseTerm"}}}),
    ("CartPoleRL", {}),
]


@pytest.mark.parametrize(("name", "changes"), TASKS)
def test_a_task_makes_every_tensor_where_its_keys_are(monkeypatch, name, changes):
    """Run on torch's device without data, which cannot be mixed with the CPU, like a GPU."""

    def somewhere(state, control, parameters, *, handle, substeps):
        rows, batch = (state, control, parameters), state.shape[:-1]
        flat = (row.reshape(batch.numel(), row.shape[-1]) for row in rows)
        out, sensors = torch.ops.ecrl.mujoco_step(*flat, handle, substeps)
        return out.reshape(state.shape), sensors.reshape(*batch, sensors.shape[-1])

    env = auto_reset(make_env({"name": name, "cfg": changes}))
    monkeypatch.setattr(physics, "step", somewhere)
    keys = torch.zeros(4, dtype=torch.int64, device="meta")
    with torch.no_grad():
        state = env.step(env.reset(keys), torch.zeros(4, *env.action_space.shape, device="meta"), env.draw(keys))
    assert {leaf.device.type for leaf in state.values(True, True)} == {"meta"}


def test_a_kernel_of_the_operator_is_there_for_gpus():
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("ecrl::mujoco_step", key)


@pytest.mark.parametrize("capturing", [True, False])
def test_warp_is_notified_of_the_start_and_the_end_of_a_capture(monkeypatch, capturing):
    """A stand-in has Warp's names and arguments, because a capture needs a GPU."""
    names = "capture_begin", "capture_end", "stream_to_torch", "device_from_torch", "is_conditional_graph_supported"
    stand_in = MagicMock(spec=warp, **{name: create_autospec(getattr(warp, name)) for name in names})
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(warp_physics, "_stream", MagicMock())
    worlds, done = MagicMock(graphs=[]), []
    with pytest.raises(ZeroDivisionError), warp_physics._on_gpu(worlds, stand_in, torch.device("cuda:0")):
        done += [name for name in names if getattr(stand_in, name).called]
        raise ZeroDivisionError
    assert ("capture_begin" in done) == capturing and "capture_end" not in done
    assert stand_in.capture_end.called == capturing and len(worlds.graphs) == capturing
    assert bool(worlds.model.opt.graph_conditional) == capturing
    if capturing:
        assert stand_in.capture_begin.call_args.kwargs["external"] is True
        assert stand_in.ScopedStream.call_args.kwargs == {"sync_enter": False}  # which would wait for another stream


@cuda
def test_on_a_gpu_it_is_near_the_cpu_and_waits_for_nothing():
    m = text_model()
    rows, control = starts(m, 64)
    _, there = both(m)
    expected, expected_sensors = stepped(there, rows, control, 10)
    inputs = rows.cuda(), control.cuda()
    stepped(there, *inputs, 10)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual, sensors = stepped(there, *inputs, 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert actual.is_cuda and sensors.is_cuda
    part = columns(m, "QPOS")
    assert_close(actual.cpu()[:, part], expected[:, part], rtol=1e-3, atol=1e-3)
    assert_close(sensors.cpu(), expected_sensors, rtol=1e-2, atol=1e-2)


@cuda
@pytest.mark.parametrize("varied", [(), MASS], ids=["one model", "masses that vary"])
def test_on_a_gpu_it_is_captured_and_replayed(varied):
    _, sim = sims(varied)
    now = start(sim, (32,), "cuda")
    offset = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).cuda()
    goal = torch.tensor(sim.home.ctrl).float().cuda() + 0.1 * offset
    plain, _ = advance(sim, now, goal)
    inputs, graph, stream = (now.clone(), goal.clone()), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output, _ = advance(sim, *inputs)
    part = columns(sim.model, "QPOS")
    for _ in range(3):
        graph.replay()
        assert_close(output["physics"][:, part], plain["physics"][:, part], rtol=1e-4, atol=1e-4)
        inputs[0].update_(output)  # on from there
        plain, _ = advance(sim, plain, goal)
    more, goals = start(sim, (33,), "cuda"), goal[:1].expand(33, -1)
    refused = pytest.raises(RuntimeError, match="33 simulations during a CUDA graph capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        advance(sim, more, goals)


@cuda
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_on_a_gpu_it_trains(compiled):
    sizes = {
        "trainer.num_envs": 64,
        "trainer.buffer_size": 16,
        "trainer.iterations": 3,
        "algorithm.cfg.batch_size": 256,
    }
    cfg = config(**sizes, **{"trainer.device": "cuda:0", "trainer.compile": compiled})
    state, history = ecrl.train(ecrl.init_state(cfg), cfg)
    assert state["env", "world", "physics"].is_cuda and np.isfinite(history[-1]["value_loss"])
