"""A MuJoCo model with contacts, a mocap body, actuators and sensors, and states of it."""

import mujoco
import numpy as np
import torch

from ecrl.envs.mujoco.scene import models

XML = """<mujoco><option timestep="0.005"/>
<worldbody><geom type="plane" size="3 3 .1"/>
<body name="box" pos="0 0 .11"><freejoint/><geom name="box" type="box" size=".1 .1 .1" mass="2"/></body>
<body name="lid" mocap="true" pos="1 0 1"><geom type="box" size=".1 .1 .1"/></body>
<body name="arm" pos="0 0 .6"><joint name="a" axis="0 1 0" damping="1"/>
<geom type="capsule" size=".05" fromto="0 0 0 .5 0 0"/>
<body name="end" pos=".5 0 0"><joint name="b" axis="0 1 0" damping=".1"/>
<geom type="capsule" size=".04" fromto="0 0 0 .4 0 0"/>
</body></body></worldbody>
<actuator><position joint="a" kp="50"/><general joint="b" dyntype="integrator" gainprm="1"/></actuator>
<sensor><actuatorfrc actuator="A"/><framepos objtype="body" objname="end"/></sensor></mujoco>"""
XML = XML.replace('<position joint="a"', '<position name="A" joint="a"')
STATE = sum(getattr(mujoco.mjtState, f"mjSTATE_{part}").value for part in models.STATE)


def model():
    return mujoco.MjModel.from_xml_string(XML)


def starts(m, many, seed=0):
    """Rows near the start, thrown about; controls and forces."""
    rng, data = np.random.default_rng(seed), mujoco.MjData(m)
    rows = np.empty((many, mujoco.mj_stateSize(m, STATE)))
    for row in rows:
        mujoco.mj_resetData(m, data)
        data.qvel[:] = rng.normal(size=m.nv)
        data.qpos[7:] = rng.normal(size=2)
        data.mocap_pos[:] = rng.normal(size=(1, 3)) + 2.0
        mujoco.mj_getState(m, data, row, STATE)
    return torch.tensor(rows), torch.tensor(rng.normal(size=(many, m.nu + m.nv)))


def none(rows):
    return rows.new_zeros(*rows.shape[:-1], 0)
