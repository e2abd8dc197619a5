"""Implement the operator `ecrl::mujoco_step` with MuJoCo Warp, on a GPU or (for tests) on the CPU.

States have the same layout as in `step_op`. Warp computes in float32. Torch tensors share the memory of Warp's arrays.
Each call writes all inputs of a step to Warp's arrays, so earlier calls do not affect the results. A step never copies
results from the GPU to the CPU. In a CUDA graph captured by torch, conditional nodes stop the solver once it has
converged, if the CUDA driver supports such nodes. In every other step on a GPU, the solver runs all its iterations.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecrl.envs.mujoco.physics.warp_model import GROUPS, VARIES, WARP_LOCK, capacity, make_warp_model, packages
from ecrl.envs.mujoco.scene.models import CONTROL, STATE, Varied, loaded, rows_of, size_of

_PARTS = {
    "TIME": "time",
    "QPOS": "qpos",
    "QVEL": "qvel",
    "ACT": "act",
    "HISTORY": "history",
    "WARMSTART": "qacc_warmstart",
    "MOCAP_POS": "mocap_pos",
    "MOCAP_QUAT": "mocap_quat",
    "CTRL": "ctrl",
    "QFRC_APPLIED": "qfrc_applied",
}
"""Name of Warp's array for each component of a state or control. `warp_model.check` rejects all other components."""

_HARMLESS = ("ITERATIONS", "LS_ITERATIONS")
"""Overflow flags that report only that the solver reached its iteration limit, as can also happen in MuJoCo."""


class _Worlds(NamedTuple):
    """A batch of simulations of one model on one device, which are stepped together."""

    model: Any  # Warp's model
    data: Any  # Warp's data
    state: list[tuple[Tensor, slice]]  # views `[count, size]` of the components, and their columns in a state
    control: list[tuple[Tensor, slice]]
    parameters: list[tuple[Tensor, slice]]
    constants: int  # bit mask of the groups of constants that Warp recomputes from the parameters in each call
    sensors: Tensor
    overflow: Tensor
    loss_bits: int  # bits of `overflow` that report lost contacts or constraints
    buffers: list[tuple[Tensor, int]]  # for each buffer, the number of used slots and the buffer's size
    graphs: list[Any]  # Warp's objects for the CUDA graph captures that use these arrays


def _view(warp: Any, array: Any, count: int) -> Tensor:
    """Return a tensor `[count, size]` that shares the memory of a Warp array."""
    if not math.prod(array.shape):
        return torch.empty(count, 0, device=warp.device_to_torch(array.device))
    return warp.to_torch(array).view(count, -1)


def _slices(model: Any, names: tuple[str, ...]) -> dict[str, slice]:
    """Map the name of each component that is not empty to the component's columns in a state or control."""
    slices, at = {}, 0
    for name in names:
        if size := size_of(model, name):
            slices[name] = slice(at, at + size)
            at += size
    return slices


def _parameter_views(warp: Any, warp_model: Any, model: Any, varied: Varied, count: int) -> list[tuple[Tensor, slice]]:
    """For each varied field, return a view of the field in Warp's model and the field's columns in the parameters."""
    views, at = [], 0
    for field, name in varied:
        rows = rows_of(model, field, name)
        view = _view(warp, getattr(warp_model, field), count)[:, rows.start : rows.stop]
        views.append((view, slice(at, at + len(rows))))
        at += len(rows)
    return views


@cache  # the arrays are never freed, because captured graphs read and write them in each replay
def _worlds(handle: int, count: int, device: torch.device) -> _Worlds:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"mujoco step: cannot allocate {count} simulations during a CUDA graph capture; "
            "step them once before the capture"
        )
    model, _, varied, *_ = loaded(handle)
    groups = {group for field, _ in varied for group in VARIES[field]}
    copied = {field for field, _ in varied} | {constant for group in groups for constant in GROUPS[group]}
    contacts, rows = capacity(model)
    with packages() as (warp, mjw), warp.ScopedDevice(warp.device_from_torch(device)):
        warp_model = make_warp_model(mjw, model, dict.fromkeys(copied, count))
        data = mjw.make_data(model, count, nconmax=contacts, njmax=rows)
        state, control = (
            [(_view(warp, getattr(data, _PARTS[name]), count), part) for name, part in _slices(model, names).items()]
            for names in (STATE, CONTROL)
        )
        parameters = _parameter_views(warp, warp_model, model, varied, count)
        constants = sum(int(getattr(mjw.SetConstGroup, group)) for group in groups)
        sensors, overflow = _view(warp, data.sensordata, count), warp.to_torch(data.overflow)
        counters = (data.nefc, data.njmax), (data.ncollision, data.naconmax), (data.nacon, data.naconmax)
        buffers = [(warp.to_torch(used), size) for used, size in counters]
        warp.synchronize_device()
        kinds = mjw.OverflowType
        loss_bits = int(kinds.ALL) & ~sum(int(getattr(kinds, name)) for name in _HARMLESS)
    return _Worlds(warp_model, data, state, control, parameters, constants, sensors, overflow, loss_bits, buffers, [])


@cache
def _stream(pointer: int, device: torch.device) -> Any:
    """Return the Warp object that represents a torch stream. Each stream has only one such object.

    Warp identifies a capture by this object, so a stream must not have two objects.
    """
    with packages() as (warp, _):
        return warp.Stream(warp.device_from_torch(device), cuda_stream=pointer)


@contextmanager
def _on_gpu(worlds: _Worlds, warp: Any, device: torch.device) -> Iterator[None]:
    """Run the Warp kernels of the `with` block in order with the kernels on torch's current stream.

    If torch captures a CUDA graph, the graph includes Warp's kernels. Outside a capture, Warp's kernels run on Warp's
    own stream, because Warp might free memory that another stream still uses.
    """
    current, capturing = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
    # a captured graph can itself loop until the solver has converged; a loop on the CPU would wait for the GPU
    worlds.model.opt.graph_conditional = capturing and warp.is_conditional_graph_supported()
    if capturing:
        stream = _stream(current.cuda_stream, device)
        with warp.ScopedStream(stream, sync_enter=False):
            warp.capture_begin(stream=stream, external=True, force_module_load=False)
            try:
                yield
            finally:
                worlds.graphs.append(warp.capture_end(stream=stream))
        return
    with warp.ScopedDevice(warp.device_from_torch(device)) as warp_device:
        warp_stream = warp.stream_to_torch(warp_device.stream)
        warp_stream.wait_stream(current)
        yield
        current.wait_stream(warp_stream)


def _run(worlds: _Worlds, device: torch.device, substeps: int) -> None:
    """Step the simulations in Warp's arrays `substeps` times. If `substeps` is 0, compute only the sensor readings."""
    model, data = worlds.model, worlds.data
    with packages() as (warp, mjw), ExitStack() as contexts:
        if device.type == "cpu":
            contexts.enter_context(warp.ScopedDevice("cpu"))
        else:
            contexts.enter_context(torch.cuda.device(device))
            contexts.enter_context(_on_gpu(worlds, warp, device))
        if worlds.constants:
            mjw.set_const(model, data, worlds.constants, restore=False)
        for _ in range(substeps):
            mjw.step(model, data)
        if not substeps:
            mjw.forward(model, data)


def _overflowed(worlds: _Worlds) -> Tensor:
    """Return a mask of the simulations that needed more contacts or constraints than the buffers hold, bool `[count]`.

    All simulations share the contact buffer. If the contact buffer overflows, Warp does not report which simulations
    lost contacts, so the result is True for all simulations.
    """
    lost = (worlds.overflow & worlds.loss_bits) != 0  # any substep may have set the bits
    for used, size in worlds.buffers:  # check the buffers, because `forward` does not set `overflow`
        lost = lost | (used > size)
    return lost


def step(state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    """Step MuJoCo Warp `substeps` times from each state, as `ecrl.envs.mujoco.physics.step_op.step` steps MuJoCo.

    The results have float32 precision. A simulation's results are NaN if the simulation needs more constraints than its
    buffer holds; see `capacity`. All results are NaN if the simulations together have more contacts than the contact
    buffer holds.

    Args:
        state: states of the simulations, `[N, nstate]` float64.
        control: controls and generalised forces, `[N, nu + nv]` float64.
        parameters: values of the varied model fields, `[N, nparameters]` float64.
        handle: the handle of a model that was loaded for Warp.
        substeps: number of physics steps. With 0 steps, only the sensor readings of the state are computed.

    Gradient: none.
    Raises: RuntimeError if the first call with this number of simulations happens during a CUDA graph capture.
    """
    count, sensors = len(state), state.new_empty(len(state), loaded(handle).model.nsensordata)
    after = state.clone(memory_format=torch.contiguous_format)
    if not count:
        return after, sensors
    with WARP_LOCK:
        worlds = _worlds(handle, count, state.device)
        for rows, views in ((parameters, worlds.parameters), (state, worlds.state), (control, worlds.control)):
            for view, part in views:
                view.copy_(rows[:, part])
        worlds.overflow.zero_()
        _run(worlds, state.device, substeps)
        for view, part in worlds.state if substeps else ():
            after[:, part] = view
        sensors.copy_(worlds.sensors)
        lost = _overflowed(worlds).unsqueeze(1)
    return after.masked_fill_(lost, math.nan), sensors.masked_fill_(lost, math.nan)
