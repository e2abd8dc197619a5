"""MuJoCo's physics as one operator, `ecrl::mujoco_step`: states in, states out, any number of simulations at once.

A state is a row of float64: what `mj_getState` gives for `models.STATE`, all that a simulation carries from one step
to the next. Rows are stepped side by side by `mujoco.batch`, on threads of its own and without Python's lock; the same
row, control and parameters give the same bits for any number of threads and in any batch. Equal models are one.
Models that are loaded for Warp are stepped by `ecrl.envs.mujoco.physics.warp_step`, where their rows are.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ecrl.envs.mujoco.physics import warp_step
from ecrl.envs.mujoco.scene.models import CONTROL, STATE, loaded, mujoco, rows_of, size_of


class _Pool(NamedTuple):
    """Simulations of one model that are stepped together; every call fills them with what it is given."""

    batch: Any
    parts: list[tuple[slice, slice]]  # of a state, in the rows of the batch and in ours
    control: slice
    sensors: np.ndarray
    fields: list[tuple[np.ndarray, slice]]  # varied, and where their numbers are in the parameters
    parameters: np.ndarray
    lock: Any


def _slices(model: Any, names: Sequence[str]) -> list[tuple[slice, slice]]:
    """Where parts of a state lie in the rows of a batch, which hold all parts in order of their bits, and in ours."""
    states, firsts, at = mujoco().mjtState, {}, 0
    for bit in sorted(int(state) for state in states.__members__.values() if int(state).bit_count() == 1):
        if bit & states.mjSTATE_INTEGRATION.value:
            firsts[bit] = at
            at += mujoco().mj_stateSize(model, bit)
    found, at = [], 0
    for name in names:
        first, size = firsts[getattr(states, f"mjSTATE_{name}").value], size_of(model, name)
        if found and found[-1][0].stop == first:
            found[-1] = slice(found[-1][0].start, first + size), slice(found[-1][1].start, at + size)
        elif size:
            found.append((slice(first, first + size), slice(at, at + size)))
        at += size
    return found


def _say_if_crowded(threads: int) -> None:
    """OpenMP's threads spin for milliseconds when they have nothing to do, unless told otherwise before torch loads."""
    told = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    if min(threads, torch.get_num_threads()) > 1 and sys.platform == "linux" and not told:
        cost = "torch's threads wait for work on the cores that MuJoCo's need, which can halve the speed"
        warnings.warn(f"{cost}: import ecrl before torch, or set GOMP_SPINCOUNT=4000", stacklevel=1)


@lru_cache(16)
def _pool(handle: int, many: int) -> _Pool:
    model, threads, varied, *_ = loaded(handle)
    threads = threads or torch.get_num_threads()
    _say_if_crowded(threads)
    batch = mujoco().batch.Batch(model, many, threads)
    batch.warning[:] = 1  # one that was given before is not written to a file again
    fields, at = [], 0
    for field, name in varied:
        rows = rows_of(model, field, name)
        view = batch.expand(field).reshape(many, -1)[:, rows.start : rows.stop]
        fields.append((view, slice(at, at + len(rows))))
        at += len(rows)
    control = next((theirs for theirs, _ in _slices(model, CONTROL)), slice(0))
    unknown = np.full((many, at), np.nan)
    return _Pool(batch, _slices(model, STATE), control, batch.bind("sensordata"), fields, unknown, Lock())


def _vary(pool: _Pool, parameters: np.ndarray) -> None:
    """Give the simulations their parameters; constants that follow from them are worked out only where they changed."""
    changed = np.flatnonzero((parameters != pool.parameters).any(1))
    if len(changed):
        for view, part in pool.fields:
            view[changed] = parameters[changed, part]
        pool.batch.set_const(changed)
        pool.parameters[changed] = parameters[changed]


_NAME = "ecrl::mujoco_step"
# not torch.library.custom_op, which takes as long again per call as everything here
torch.library.define(
    _NAME, "(Tensor state, Tensor control, Tensor parameters, int handle, int substeps) -> (Tensor, Tensor)"
)


@torch.library.impl(_NAME, "CPU")
def _step(state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    if loaded(handle).backend == "warp":
        return warp_step.step(state, control, parameters, handle, substeps)
    out = torch.empty_like(state, memory_format=torch.contiguous_format)
    sensors = state.new_empty(len(state), loaded(handle).model.nsensordata)
    if not len(state):
        return out, sensors
    pool, given, after = _pool(handle, len(state)), state.numpy(), out.numpy()
    with pool.lock:
        if pool.fields:
            _vary(pool, parameters.numpy())
        for theirs, ours in pool.parts:
            pool.batch.state[:, theirs] = given[:, ours]
        pool.batch.state[:, pool.control] = control.numpy()
        if substeps:
            pool.batch.step(nstep=substeps)
        else:
            pool.batch.forward()
        for theirs, ours in pool.parts:
            after[:, ours] = pool.batch.state[:, theirs]
        sensors.numpy()[:] = pool.sensors
    return out, sensors


torch.library.impl(_NAME, "CUDA", warp_step.step)


@torch.library.register_fake(_NAME)
def _(state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    return state.new_empty(state.shape), state.new_empty(len(state), loaded(handle).model.nsensordata)


def _folded(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    moved = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(args[:3], in_dims[:3], strict=True)
    ]
    out = torch.ops.ecrl.mujoco_step(*(x.flatten(0, 1) for x in moved), *args[3:])
    return tuple(x.unflatten(0, moved[0].shape[:2]) for x in out), (0, 0)  # pyright: ignore


torch.library.register_vmap(_NAME, _folded)


def step(state: Tensor, control: Tensor, parameters: Tensor, *, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    """`substeps` of MuJoCo from each state, under a control that does not change meanwhile.

        state, sensors = mj_step(state, control) ** substeps

    Args:
        state: `[*B, nstate]` float64, see `models.STATE`.
        control: `[*B, nu + nv]` float64: of the actuators, in the unit of each, and generalised forces, N or N m.
        parameters: `[*B, nparameters]` float64, the numbers of what is `varied`, in its order.
        handle: of `models.load`.
        substeps: of the model's time step; 0 for `mj_forward`, which gives the sensors of the state.

    Returns: the states after, and `sensors` `[*B, nsensordata]` float64, which after a step are those of its last
        substep: they describe the state before that and the forces in it.
    Gradient: none.
    Raises: ValueError for tensors of another shape, dtype or device, or where a gradient would be lost here;
        `mujoco.batch.SimulationError` where MuJoCo cannot go on, with the index of the simulation. Numbers that are not
        finite pass through. A model that is stepped by Warp takes tensors of a GPU too.
    Source: Todorov, Erez and Tassa 2012, "MuJoCo: a physics engine for model-based control".

    >>> from ecrl.envs.mujoco.scene.models import load
    >>> m = mujoco().MjModel.from_xml_string("<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody>"
    ...     "<sensor><clock/></sensor></mujoco>")
    >>> start = torch.zeros(3, size_of(m, *STATE), dtype=torch.float64)
    >>> start[:, 4], none = 1.0, start.new_zeros(3, 0)
    >>> after, sensors = step(start, start.new_zeros(3, m.nv), none, handle=load(m), substeps=2)
    >>> after[:, 0], sensors[:, 0]  # seconds
    (tensor([0.0040, 0.0040, 0.0040], dtype=torch.float64), tensor([0.0020, 0.0020, 0.0020], dtype=torch.float64))
    """
    batch, names = state.shape[:-1], ("state", "control", "parameters")
    warp = loaded(handle).backend == "warp"
    where = state.device if warp and state.device.type in ("cpu", "cuda") else torch.device("cpu")
    for name, width, given in zip(names, loaded(handle).widths, (state, control, parameters), strict=True):
        if given.shape != (*batch, width) or given.dtype != torch.float64 or given.device != where:
            told = f"{name} is {given.dtype} {list(given.shape)} on {given.device}".replace("torch.", "")
            raise ValueError(f"mujoco step: {told}, expected float64 {[*batch, width]} on {where}")
    if torch.is_grad_enabled() and (state.requires_grad or control.requires_grad or parameters.requires_grad):
        raise ValueError("mujoco step: it has no gradient; detach what it is given, or use an algorithm without one")
    rows = (x.reshape(batch.numel(), x.shape[-1]) for x in (state, control, parameters))
    out, sensors = torch.ops.ecrl.mujoco_step(*rows, handle, substeps)
    return out.reshape(state.shape), sensors.reshape(*batch, sensors.shape[-1])
