"""What of a scene MuJoCo Warp can do, how much room it needs there, and the packages themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from threading import RLock
from typing import Any

from ecrl.envs.mujoco.scene.models import Varied, mujoco, size_of
from ecrl.errors import ConfigError, extra

_FIXED = ("body_subtreemass", "geom_aabb", "geom_rbound")
_INERT0 = ("dof_invweight0", "body_invweight0", "tendon_invweight0", "actuator_acc0")
_KIN0 = (
    "tendon_length0",
    "eq_data",
    "cam_pos0",
    "cam_poscom0",
    "cam_mat0",
    "light_pos0",
    "light_poscom0",
    "light_dir0",
)
GROUPS = {"FIXED": _FIXED, "KIN0": _KIN0, "INERT0": _INERT0}
"""Constants of a model that follow from others, by Warp's names of what works them out."""

VARIES = {
    "body_mass": ("FIXED", "KIN0", "INERT0"),
    "body_inertia": ("INERT0",),
    "body_gravcomp": (),
    "dof_armature": ("INERT0",),
    "dof_damping": (),
    "dof_frictionloss": (),
    "jnt_stiffness": (),
    "jnt_range": (),
    "geom_size": ("FIXED", "KIN0", "INERT0"),
    "geom_friction": (),
    "geom_solref": (),
    "geom_solimp": (),
    "actuator_gear": ("INERT0",),
    "actuator_gainprm": (),
    "actuator_biasprm": (),
    "actuator_forcerange": (),
    "actuator_ctrlrange": (),
}
"""Fields that may differ between simulations, and which constants follow from each."""

_CONTACTS = 8
"""Kept for every geom that moves and touches, on average over the simulations."""

ONE_AT_A_TIME = RLock()  # Warp's current device and stream are those of the process


@contextmanager
def packages() -> Iterator[tuple[Any, Any]]:
    """The packages warp and mujoco_warp for one thread, without Warp's greeting and its lines about kernels."""
    with extra("warp"):
        import mujoco_warp
        import warp
    with ONE_AT_A_TIME:
        before = warp.config.log_level
        warp.config.log_level = max(before, warp.LOG_WARNING)
        try:
            warp.init()
            yield warp, mujoco_warp
        finally:
            warp.config.log_level = before


def made(mjw: Any, model: Any, batch_sizes: dict[str, int]) -> Any:
    """Warp's model of a model of MuJoCo, on Warp's current device, with as many of some fields.

    Warp starts nothing over by itself, and has no flag that says so.
    """
    model = copy(model)
    model.opt.disableflags = int(model.opt.disableflags) & ~int(mujoco().mjtDisableBit.mjDSBL_AUTORESET)
    out = mjw.put_model(model, batch_sizes)
    out.opt.warn_overflow = 0  # said by rows that are not numbers
    return out


def check(model: Any, varied: Varied) -> None:
    """Refuse a scene, or what is to vary in it, that Warp cannot do; ConfigError says what."""
    bits = mujoco().mjtEnableBit
    parts = {
        "flexible bodies": model.nflex,
        "plastic deformation": size_of(model, "PLASTIC"),
        "plugins": model.nplugin,
        "sleeping": model.opt.enableflags & int(bits.mjENBL_SLEEP),
    }
    told = [name for name, there in parts.items() if there]
    told += [f"{field} that varies" for field, _ in varied if field not in VARIES]
    if not told:
        with packages() as (warp, mjw), warp.ScopedDevice("cpu"):
            try:
                made(mjw, model, {})
            except (NotImplementedError, ValueError) as error:  # what it says of the scene is told below
                told = [" ".join(str(error).split())]
    if told:
        known = f"; what may vary: {', '.join(VARIES)}" if varied else ""
        raise ConfigError(f"physics.backend: warp cannot do this scene: {', '.join(told)}; use mujoco{known}")


def capacity(model: Any) -> tuple[int, int]:
    """How many contacts a simulation may have, on average over all of them, and how many rows of constraints."""
    moves = model.body_weldid[model.geom_bodyid] > 0
    touches = (model.geom_contype > 0) | (model.geom_conaffinity > 0)
    contacts = _CONTACTS * (int((moves & touches).sum()) + model.npair)
    sides = max([1, *model.geom_condim, *model.pair_dim])
    pyramid = model.opt.cone == int(mujoco().mjtCone.mjCONE_PYRAMIDAL)
    rows = max(1, 2 * (sides - 1)) if pyramid else sides
    others = 6 * model.neq + model.nv + 2 * model.njnt + 3 * model.ntendon
    return contacts, int(rows * contacts + others)
