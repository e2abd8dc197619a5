"""Import MuJoCo Warp, check that Warp supports a scene, and compute the sizes of Warp's buffers."""

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
"""Model constants that are computed from other fields, grouped as in Warp's `SetConstGroup`."""

VARIES = {
    "body_mass": ("FIXED", "KIN0", "INERT0"),
    "body_inertia": ("INERT0",),
    "body_ipos": ("KIN0", "INERT0"),
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
"""Model fields that may differ between simulations, mapped to the groups of constants that depend on each field."""

_CONTACTS = 8
"""Number of contact slots in Warp's buffer, per simulation and per geom that can move and collide."""

WARP_LOCK = RLock()  # Warp has one current device and stream per process


@contextmanager
def packages() -> Iterator[tuple[Any, Any]]:
    """Yield the packages warp and mujoco_warp to one thread at a time, and hide Warp's messages about kernels."""
    with extra("warp"):
        import mujoco_warp
        import warp
    with WARP_LOCK:
        before = warp.config.log_level
        warp.config.log_level = max(before, warp.LOG_WARNING)
        try:
            warp.init()
            yield warp, mujoco_warp
        finally:
            warp.config.log_level = before


def make_warp_model(mjw: Any, model: Any, batch_sizes: dict[str, int]) -> Any:
    """Convert a MuJoCo model to a Warp model on Warp's current device.

    `batch_sizes` maps the name of each field that differs between simulations to the number of its copies. The flag
    that disables automatic resets is cleared, because Warp does not know this flag. Warp never resets a simulation
    automatically.
    """
    model = copy(model)
    model.opt.disableflags = int(model.opt.disableflags) & ~int(mujoco().mjtDisableBit.mjDSBL_AUTORESET)
    out = mjw.put_model(model, batch_sizes)
    out.opt.warn_overflow = 0  # no warning is needed, because `warp_step.step` returns NaN after an overflow
    return out


def check(model: Any, varied: Varied) -> None:
    """Raise ConfigError with a list of the unsupported features if Warp does not support a scene or a varied field."""
    bits = mujoco().mjtEnableBit
    parts = {
        "flexible bodies": model.nflex,
        "plastic deformation": size_of(model, "PLASTIC"),
        "plugins": model.nplugin,
        "sleeping": model.opt.enableflags & int(bits.mjENBL_SLEEP),
    }
    unsupported = [name for name, count in parts.items() if count]
    unsupported += [f"{field} that varies" for field, _ in varied if field not in VARIES]
    if not unsupported:
        with packages() as (warp, mjw), warp.ScopedDevice("cpu"):
            try:
                make_warp_model(mjw, model, {})
            except (NotImplementedError, ValueError) as error:  # the message names the unsupported features
                unsupported = [" ".join(str(error).split())]
    if unsupported:
        known = f"; fields that may vary: {', '.join(VARIES)}" if varied else ""
        names = ", ".join(unsupported)
        raise ConfigError(f"physics.backend: warp does not support this scene: {names}; use mujoco{known}")


def capacity(model: Any) -> tuple[int, int]:
    """Return how many contacts and how many constraint rows Warp's buffers can hold per simulation.

    All simulations share one contact buffer, so a single simulation may have more contacts than the returned number.
    """
    moves = model.body_weldid[model.geom_bodyid] > 0
    touches = (model.geom_contype > 0) | (model.geom_conaffinity > 0)
    contacts = _CONTACTS * (int((moves & touches).sum()) + model.npair)
    contact_dim = max([1, *model.geom_condim, *model.pair_dim])
    pyramidal = model.opt.cone == int(mujoco().mjtCone.mjCONE_PYRAMIDAL)
    rows_per_contact = max(1, 2 * (contact_dim - 1)) if pyramidal else contact_dim
    other_rows = 6 * model.neq + model.nv + 2 * model.njnt + 3 * model.ntendon
    return contacts, int(rows_per_contact * contacts + other_rows)
