"""The operator: MuJoCo's own loop, the same bits in any batch and on any threads, pure, vmapped, in a graph."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.checks import assert_pure

pytest.importorskip("mujoco.batch")

import mujoco
import numpy as np
from support.mujoco_model import STATE, model, none, starts

from ecrl.envs.mujoco.physics import step_op as physics
from ecrl.envs.mujoco.scene import models
from ecrl.errors import ConfigError, MissingExtraError


def test_it_is_mujocos_own_loop_bit_for_bit_warm_start_included():
    m = model()
    rows, control = starts(m, 3)
    handle, now = models.load(m, 1), rows
    for _ in range(25):
        now, sensors = physics.step(now, control, none(now), handle=handle, substeps=4)
    for row, controls, after, sensed in zip(rows, control, now, sensors, strict=True):
        data = mujoco.MjData(m)
        mujoco.mj_setState(m, data, row.numpy(), STATE)
        data.ctrl[:], data.qfrc_applied[:] = controls[: m.nu].numpy(), controls[m.nu :].numpy()
        for _ in range(100):
            mujoco.mj_step(m, data)
        expected = np.empty(len(row))
        mujoco.mj_getState(m, data, expected, STATE)
        assert torch.equal(after, torch.tensor(expected))
        assert torch.equal(sensed, torch.tensor(data.sensordata))
    warm = models.size_of(m, *models.STATE[:5])
    assert now[:, warm : warm + m.nv].abs().max() > 0.0  # the warm start is a part of the state ...
    cold = now.clone()
    cold[:, warm : warm + m.nv] = 0.0
    again, other = (physics.step(x, control, none(x), handle=handle, substeps=1)[0] for x in (now, cold))
    assert not torch.equal(again, other)  # ... that matters


def test_bits_do_not_depend_on_threads_or_on_the_batch():
    m = model()
    rows, control = starts(m, 64)
    one, two = models.load(m, 1), models.load(m, 2)
    assert one != two
    ends = [physics.step(rows, control, none(rows), handle=h, substeps=40) for h in (one, two)]
    assert torch.equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])
    order = torch.arange(63, -1, -1)
    turned, _ = physics.step(rows[order], control[order], none(rows), handle=two, substeps=40)
    assert torch.equal(turned, ends[0][0][order])
    for i in (0, 17, 63):
        single = physics.step(rows[i], control[i], none(rows[i]), handle=one, substeps=40)
        assert torch.equal(single[0], ends[0][0][i]) and torch.equal(single[1], ends[0][1][i])
    parts = rows.clone()
    for _ in range(10):  # forty at once are ten times four
        parts, _ = physics.step(parts, control, none(parts), handle=one, substeps=4)
    assert torch.equal(parts, ends[0][0])


def test_no_substeps_give_the_sensors_of_the_state_and_leave_it():
    m = model()
    rows, control = starts(m, 2)
    after, sensors = physics.step(rows, control, none(rows), handle=models.load(m), substeps=0)
    assert torch.equal(after, rows)
    data = mujoco.MjData(m)
    mujoco.mj_setState(m, data, rows[1].numpy(), STATE)
    data.ctrl[:] = control[1, : m.nu].numpy()
    mujoco.mj_forward(m, data)
    assert torch.equal(sensors[1], torch.tensor(data.sensordata))


def test_it_is_pure_and_takes_any_leading_axes():
    m = model()
    rows, control = starts(m, 6)
    handle = models.load(m)
    flat = assert_pure(physics.step, rows, control, none(rows), handle=handle, substeps=3)
    deep = (rows.reshape(3, 2, -1), control.reshape(3, 2, -1), none(rows).reshape(3, 2, 0))
    shaped = physics.step(*deep, handle=handle, substeps=3)
    assert torch.equal(shaped[0].flatten(0, 1), flat[0]) and torch.equal(shaped[1].flatten(0, 1), flat[1])
    strided = torch.stack((rows, rows), -1)[..., 0]
    assert torch.equal(physics.step(strided, control, none(rows), handle=handle, substeps=3)[0], flat[0])
    empty = physics.step(rows[:0], control[:0], none(rows[:0]), handle=handle, substeps=3)
    assert [list(x.shape) for x in empty] == [[0, rows.shape[1]], [0, m.nsensordata]]


def test_vmap_folds_its_axis_into_the_batch_where_ever_it_is():
    m = model()
    rows, control = starts(m, 6)
    handle = models.load(m)

    def step(state, control_row):
        return physics.step(state, control_row, none(state), handle=handle, substeps=3)

    flat = step(rows, control)
    twice = torch.vmap(step)(rows.reshape(3, 2, -1), control.reshape(3, 2, -1))
    assert torch.equal(twice[0].flatten(0, 1), flat[0]) and torch.equal(twice[1].flatten(0, 1), flat[1])
    shared = torch.vmap(step, in_dims=(1, None))(rows.reshape(3, 2, -1), control[:3])
    for i in range(2):
        assert torch.equal(shared[0][i], step(rows.reshape(3, 2, -1)[:, i], control[:3])[0])
    nested = torch.vmap(torch.vmap(step))(rows.reshape(3, 2, 1, -1), control.reshape(3, 2, 1, -1))
    assert torch.equal(nested[0].flatten(0, 2), flat[0])


def test_the_operator_keeps_torchs_rules():
    m = model()
    rows, control = starts(m, 2)
    torch.library.opcheck(
        torch.ops.ecrl.mujoco_step,
        (rows, control, none(rows), models.load(m), 2),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_equal_models_share_a_handle_and_others_do_not():
    assert models.load(model(), 1) == models.load(model(), 1)
    handles = {models.load(model(), 1), models.load(model(), 3), models.load(model(), 1, (("body_mass", "box"),))}
    other = model()
    other.body_mass[1] = 3.0
    assert len(handles | {models.load(other, 1)}) == 4
    with pytest.raises(ConfigError, match="mujoco model 7 is not loaded in this process"):
        models.loaded(7)


def test_a_model_changed_after_loading_is_another_one():
    m = model()
    rows, control = starts(m, 1)
    handle = models.load(m, 1)
    before, _ = physics.step(rows, control, none(rows), handle=handle, substeps=1)
    m.opt.gravity[2] = 0.0
    assert torch.equal(physics.step(rows, control, none(rows), handle=handle, substeps=1)[0], before)


def test_what_varies_varies_and_leaves_no_trace():
    m = model()
    rows, control = starts(m, 4)
    varied = (("body_mass", "box"), ("body_inertia", "box"), ("geom_friction", "box"), ("dof_damping", "a"))
    handle = models.load(m, 2, varied)
    own = np.concatenate([getattr(m, field).ravel()[models.rows_of(m, field, name)] for field, name in varied])
    assert own.tolist() == [2.0, *m.body_inertia[1], *m.geom_friction[1], 1.0]
    same = torch.tensor(own).repeat(4, 1)
    plain, _ = physics.step(rows, control, none(rows), handle=models.load(m, 1), substeps=20)
    assert torch.equal(physics.step(rows, control, same, handle=handle, substeps=20)[0], plain)
    heavy = same.clone()
    heavy[2, :4] *= 3.0
    heavy[3, 7] = 9.0
    after, _ = physics.step(rows, control, heavy, handle=handle, substeps=20)
    assert torch.equal(after[:2], plain[:2])
    assert (after[2] != plain[2]).any() and (after[3] != plain[3]).any()
    assert torch.equal(physics.step(rows, control, same, handle=handle, substeps=20)[0], plain)
    changed = model()
    changed.body_mass[1], changed.body_inertia[1] = heavy[2, 0], heavy[2, 1:4]
    mujoco.mj_setConst(changed, mujoco.MjData(changed))
    fresh, _ = physics.step(rows[2:3], control[2:3], none(rows[2:3]), handle=models.load(changed, 1), substeps=20)
    assert torch.equal(after[2:3], fresh)


def test_what_is_not_there_is_named():
    m = model()
    for field, name, message in (
        ("body_mass", "bix", "body 'bix' is not in the scene; the scene has: world, box, lid, arm, end"),
        ("mass", "box", "'mass' is not a field of a MuJoCo model that can vary"),
        ("mesh_vert", "box", "'mesh_vert' is not a field of a MuJoCo model that can vary"),
        ("dof_damping", "c", "joint 'c' is not in the scene; the scene has: a, b"),
        ("actuator_gear", "c", "actuator 'c' is not in the scene; the scene has: A"),
    ):
        with pytest.raises(ConfigError, match=message):
            models.load(m, 1, ((field, name),))


@pytest.mark.parametrize("which", ["state", "control", "parameters"])
def test_a_wrong_tensor_is_refused_by_name(which):
    m = model()
    rows, control = starts(m, 2)
    args = {"state": rows, "control": control, "parameters": none(rows)}
    for wrong in (args[which].float(), torch.cat((args[which], args[which], rows), -1), args[which][:1]):
        with pytest.raises(ValueError, match=r"mujoco step: .* is float.*, expected float64"):
            physics.step(*(args | {which: wrong}).values(), handle=models.load(m), substeps=1)


def test_a_gradient_is_never_lost_without_a_word():
    m = model()
    rows, control = starts(m, 2)
    handle = models.load(m)

    def height(inputs):
        return physics.step(rows, inputs, none(rows), handle=handle, substeps=1)[0].sum()

    for run in (torch.func.grad(height), lambda x: height(x.clone().requires_grad_())):
        with pytest.raises(ValueError, match="mujoco step: MuJoCo's physics has no gradient; detach the inputs"):
            run(control)
    with torch.no_grad():
        height(control.clone().requires_grad_())


def test_numbers_that_run_away_touch_nobody_else_and_write_no_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    m = model()
    m.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    rows, control = starts(m, 6)
    handle = models.load(m, 2)
    fine, _ = physics.step(rows, control, none(rows), handle=handle, substeps=4)
    bad = rows.clone()
    bad[1, 1], bad[3, 12] = torch.nan, 1e200
    after, _ = physics.step(bad, control, none(rows), handle=handle, substeps=4)
    sound = [0, 2, 4, 5]
    assert torch.equal(after[sound], fine[sound])
    assert not any(bool((after[i].abs() < 1e10).all()) for i in (1, 3))
    assert torch.equal(physics.step(rows, control, none(rows), handle=handle, substeps=4)[0], fine)
    assert os.listdir(tmp_path) == []


def test_two_python_threads_may_step_one_model():
    m = model()
    rows, control = starts(m, 16)
    handle = models.load(m, 1)
    expected = physics.step(rows, control, none(rows), handle=handle, substeps=20)[0]
    turned = rows.flip(0), control.flip(0)

    def step(other):
        state, controls = turned if other else (rows, control)
        return physics.step(state, controls, none(state), handle=handle, substeps=20)[0]

    with ThreadPoolExecutor(4) as threads:
        for i, actual in enumerate(threads.map(step, [i % 2 for i in range(40)])):
            assert torch.equal(actual.flip(0) if i % 2 else actual, expected)


def test_without_the_package_one_line_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ecrl\[mujoco\]'"):
        models.mujoco()


HANDLE = """
import sys
sys.path.insert(0, "tests")
from support.mujoco_model import model
from ecrl.envs.mujoco.scene import models
import torch
print(models.load(model(), 1), "ecrl.compile.cpu" in sys.modules)
"""


@pytest.mark.slow
def test_a_handle_is_the_same_in_another_process():
    done = subprocess.run([sys.executable, "-c", HANDLE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(models.load(model(), 1)), "False"]


CROWDED = """
import warnings
import torch
from ecrl.envs.mujoco.physics import step_op
from ecrl.envs.mujoco.scene import models
xml = "<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"
m = models.mujoco().MjModel.from_xml_string(xml)
torch.set_num_threads({torch_threads})
row = torch.zeros(2, models.size_of(m, *models.STATE), dtype=torch.float64)
with warnings.catch_warnings(record=True) as caught:
    for _ in range(2):
        step_op.step(row, row[:, :m.nv], row[:, :0], handle=models.load(m, {threads}), substeps=1)
print(*(w.message for w in caught))
"""


@pytest.mark.parametrize(
    ("torch_threads", "threads", "variables", "warned"),
    [
        (2, 0, {}, True),
        (2, 1, {}, False),
        *(
            pytest.param(*case, False, marks=pytest.mark.long)
            for case in [(1, 2, {}), (2, 2, {"GOMP_SPINCOUNT": "4000"}), (2, 2, {"OMP_WAIT_POLICY": "passive"})]
        ),
    ],
)
def test_spinning_threads_on_mujocos_cores_warn_once(torch_threads, threads, variables, warned):
    code = CROWDED.format(torch_threads=torch_threads, threads=threads)
    around = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=around | variables
    )
    assert ("import ecrl before torch, or set GOMP_SPINCOUNT=4000" in done.stdout) == warned
    assert done.stdout.count("GOMP_SPINCOUNT") == int(warned)
