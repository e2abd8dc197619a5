"""Step any number of MuJoCo simulations at once with the torch operator `ecrl::mujoco_step`.

A state is a float64 vector in the layout of `mj_getState` for the components in `models.STATE`. The state, the control
and the parameters determine the next state. `mujoco.batch` steps the simulations in parallel, on its own threads and
without the GIL. With `mujoco.batch`, equal states, controls and parameters give bitwise equal results for any number of
threads and in any batch. If a model is loaded for Warp, `ecrl.envs.mujoco.physics.warp_step` steps the model on the
device of the state.
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
from ecrl.envs.mujoco.scene.models import CONTROL, STATE, columns_of, loaded, mujoco, rows_of, size_of


class _Pool(NamedTuple):
    """A batch of simulations of one model, which are stepped together.

    Each call of the operator overwrites the states, controls and parameters of the simulations.
    """

    batch: Any
    parts: list[tuple[slice, slice]]  # slices of each component in MuJoCo's layout and in ecrl's layout
    control: slice  # columns of the control in MuJoCo's layout
    sensors: np.ndarray
    fields: list[tuple[np.ndarray, slice]]  # views of the varied model fields, and their columns in the parameters
    parameters: np.ndarray
    lock: Any


def _slices(model: Any, names: Sequence[str]) -> list[tuple[slice, slice]]:
    """Return the slices of each state component in MuJoCo's layout and in ecrl's layout.

    MuJoCo's layout has all components of `mjSTATE_INTEGRATION` in the order of their bits. ecrl's layout has only the
    components in `names`. Neighbouring components are merged into one slice.
    """
    states, firsts, at = mujoco().mjtState, {}, 0
    for bit in sorted(int(state) for state in states.__members__.values() if int(state).bit_count() == 1):
        if bit & states.mjSTATE_INTEGRATION.value:
            firsts[bit] = at
            at += mujoco().mj_stateSize(model, bit)
    slices, at = [], 0
    for name in names:
        first, size = firsts[getattr(states, f"mjSTATE_{name}").value], size_of(model, name)
        if slices and slices[-1][0].stop == first:
            slices[-1] = slice(slices[-1][0].start, first + size), slice(slices[-1][1].start, at + size)
        elif size:
            slices.append((slice(first, first + size), slice(at, at + size)))
        at += size
    return slices


def _warn_if_threads_compete(threads: int) -> None:
    """Warn if idle OpenMP threads of torch may occupy the cores that MuJoCo's threads need."""
    is_set = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    if min(threads, torch.get_num_threads()) > 1 and sys.platform == "linux" and not is_set:
        cost = "idle threads of torch compete with MuJoCo's threads for the cores, which can halve the speed"
        warnings.warn(f"{cost}: import ecrl before torch, or set GOMP_SPINCOUNT=4000", stacklevel=1)


@lru_cache(16)
def _pool(handle: int, count: int) -> _Pool:
    model, threads, varied, *_ = loaded(handle)
    threads = threads or torch.get_num_threads()
    _warn_if_threads_compete(threads)
    batch = mujoco().batch.Batch(model, count, threads)
    batch.warning[:] = 1  # MuJoCo writes a warning to a file only if the count of this warning is 0
    fields, at = [], 0
    for field, name in varied:
        rows = rows_of(model, field, name)
        view = batch.expand(field).reshape(count, -1)[:, rows.start : rows.stop]
        fields.append((view, slice(at, at + len(rows))))
        at += len(rows)
    control = next((columns for columns, _ in _slices(model, CONTROL)), slice(0))
    not_set = np.full((count, at), np.nan)  # NaN never equals a value, so the first call sets all parameters
    return _Pool(batch, _slices(model, STATE), control, batch.bind("sensordata"), fields, not_set, Lock())


def _set_parameters(pool: _Pool, parameters: np.ndarray) -> None:
    """Write the parameters of all simulations into the simulations' models.

    For each model whose parameters changed, MuJoCo then recomputes the constants that depend on the parameters.
    """
    changed = np.flatnonzero((parameters != pool.parameters).any(1))
    if len(changed):
        for view, part in pool.fields:
            view[changed] = parameters[changed, part]
        pool.batch.set_const(changed)
        pool.parameters[changed] = parameters[changed]


_NAME = "ecrl::mujoco_step"
# torch.library.custom_op is not used, because its overhead would double the time of a call
torch.library.define(
    _NAME, "(Tensor state, Tensor control, Tensor parameters, int handle, int substeps) -> (Tensor, Tensor)"
)


def _mujoco_step(
    state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int
) -> tuple[Tensor, Tensor]:
    """Step the simulations with `mujoco.batch`, without speed limits. See `step` for the arguments and results."""
    out = torch.empty_like(state, memory_format=torch.contiguous_format)
    sensors = state.new_empty(len(state), loaded(handle).model.nsensordata)
    if not len(state):
        return out, sensors
    pool, before, after = _pool(handle, len(state)), state.numpy(), out.numpy()
    with pool.lock:
        if pool.fields:
            _set_parameters(pool, parameters.numpy())
        for mujoco_columns, columns in pool.parts:
            pool.batch.state[:, mujoco_columns] = before[:, columns]
        pool.batch.state[:, pool.control] = control.numpy()
        if substeps:
            pool.batch.step(nstep=substeps)
        else:
            pool.batch.forward()
        for mujoco_columns, columns in pool.parts:
            after[:, columns] = pool.batch.state[:, mujoco_columns]
        sensors.numpy()[:] = pool.sensors
    return out, sensors


@lru_cache(16)
def _joint_limits(handle: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for all joints with a speed limit, the columns of velocities and positions in a state, and the limits."""
    model, limits = loaded(handle).model, loaded(handle).speed_limits
    q, v = columns_of(model, "QPOS").start, columns_of(model, "QVEL").start
    joints = [
        (v + dof, q + first, largest) for dof, first, count, largest in limits if first is not None and count == 1
    ]
    velocities, positions, largest = zip(*joints, strict=True) if joints else ((), (), ())
    columns = torch.tensor((velocities, positions), dtype=torch.int64, device=device)
    return columns[0], columns[1], torch.tensor(largest, dtype=torch.float64, device=device)


def _with_limited_speeds(state: Tensor, handle: int) -> Tensor:
    """Scale the velocities in states `[N, nstate]` after a physics step down to the model's speed limits.

        v' = v min(1, largest / |v|),    x' = x + h (v' - v)

    The position x is corrected, because the physics step of h seconds moved it by h v. The orientation of an object is
    not corrected.
    """
    model, limits = loaded(handle).model, loaded(handle).speed_limits
    q, v = columns_of(model, "QPOS").start, columns_of(model, "QVEL").start
    after, h = state.clone(), model.opt.timestep
    velocities, positions, largest = _joint_limits(handle, state.device)
    after[:, velocities] = state[:, velocities].clamp(-largest, largest)
    after[:, positions] += h * (after[:, velocities] - state[:, velocities])
    for dof, position, count, largest in (limit for limit in limits if limit.count > 1):
        velocity = state[:, v + dof : v + dof + count]
        speed = torch.linalg.vector_norm(velocity, dim=-1, keepdim=True)
        limited = velocity * (largest / speed.clamp_min(largest))
        after[:, v + dof : v + dof + count] = limited
        if position is not None:
            after[:, q + position : q + position + count] += h * (limited - velocity)
    return after


def _step(state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    """Step the models. If a model has speed limits, apply the limits after each physics step."""
    model = loaded(handle)
    step_model = warp_step.step if model.backend == "warp" else _mujoco_step
    if not model.speed_limits or not substeps:
        return step_model(state, control, parameters, handle, substeps)
    sensors = state.new_empty(0)
    for _ in range(substeps):
        state, sensors = step_model(state, control, parameters, handle, 1)
        state = _with_limited_speeds(state, handle)
    return state, sensors


for _device in ("CPU", "CUDA"):
    torch.library.impl(_NAME, _device, _step)


@torch.library.register_fake(_NAME)
def _(state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    return state.new_empty(state.shape), state.new_empty(len(state), loaded(handle).model.nsensordata)


def _vmap_step(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    batched = [
        x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(args[:3], in_dims[:3], strict=True)
    ]
    out = torch.ops.ecrl.mujoco_step(*(x.flatten(0, 1) for x in batched), *args[3:])
    return tuple(x.unflatten(0, batched[0].shape[:2]) for x in out), (0, 0)  # pyright: ignore


torch.library.register_vmap(_NAME, _vmap_step)


def step(state: Tensor, control: Tensor, parameters: Tensor, *, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    """Step MuJoCo `substeps` times from each state, under a constant control.

        repeat substeps times:    state, sensors = mj_step(state, control)

    If the model was loaded with speed limits, each physics step scales faster velocities down to the limits.

    Args:
        state: states of the simulations in the layout of `models.STATE`, `[*B, nstate]` float64.
        control: controls in the units of the actuators, followed by generalised forces (N or N m),
            `[*B, nu + nv]` float64.
        parameters: values of the model fields that `models.load` received as `varied`, in the same order,
            `[*B, nparameters]` float64.
        handle: the handle of the model, as returned by `models.load`.
        substeps: number of physics steps. With 0 steps, `mj_forward` computes the sensor readings of the state.

    Returns: the next states, and the sensor readings, `[*B, nsensordata]` float64. The sensors are read in the last
    substep. The readings describe the state before the last substep, and the forces during the last substep. States
    that are not finite are stepped like any other state. If the model was loaded for Warp, the tensors may be on a GPU.
    Gradient: none.
    Raises: ValueError if a tensor has a wrong shape, dtype or device, or if autograd would record the step.
        `mujoco.batch.SimulationError` with the index of the simulation, if MuJoCo fails.
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
    device = state.device if warp and state.device.type in ("cpu", "cuda") else torch.device("cpu")
    for name, width, x in zip(names, loaded(handle).widths, (state, control, parameters), strict=True):
        if x.shape != (*batch, width) or x.dtype != torch.float64 or x.device != device:
            actual = f"{name} is {x.dtype} {list(x.shape)} on {x.device}".replace("torch.", "")
            raise ValueError(f"mujoco step: {actual}, expected float64 {[*batch, width]} on {device}")
    if torch.is_grad_enabled() and (state.requires_grad or control.requires_grad or parameters.requires_grad):
        reason = "MuJoCo's physics has no gradient"
        raise ValueError(f"mujoco step: {reason}; detach the inputs, or use an algorithm without physics gradients")
    rows = (x.reshape(batch.numel(), x.shape[-1]) for x in (state, control, parameters))
    out, sensors = torch.ops.ecrl.mujoco_step(*rows, handle, substeps)
    return out.reshape(state.shape), sensors.reshape(*batch, sensors.shape[-1])
