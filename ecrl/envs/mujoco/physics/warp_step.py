"""MuJoCo Warp behind the operator `ecrl::mujoco_step`: the same rows in and out, on a GPU, or on the CPU in tests.

Warp steps in float32. Its arrays are seen as tensors without a copy, and all that a step depends on is written to them
from the rows, so that nothing of an earlier call is left. Nothing is read by the host. In a capture of torch the solver
stops when it is done, by nodes of the graph; outside of one, on a GPU, it does all its iterations, most of them idle.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ecrl.envs.mujoco.physics.warp_model import GROUPS, ONE_AT_A_TIME, VARIES, capacity, made, packages
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
"""Where Warp has the parts of a state and of a control. Scenes with others are refused."""

_HARMLESS = ("ITERATIONS", "LS_ITERATIONS")
"""What Warp reports that is no loss: a solver that stopped at its limit, as MuJoCo's own does."""


class _Worlds(NamedTuple):
    """Simulations of one model on one device that are stepped together."""

    model: Any  # of Warp, as data
    data: Any
    state: list[tuple[Tensor, slice]]  # views `[many, size]` of parts, and where they are in our rows
    control: list[tuple[Tensor, slice]]
    parameters: list[tuple[Tensor, slice]]
    constants: int  # which follow from the parameters
    sensors: Tensor
    overflow: Tensor
    losses: int  # bits of it that count
    room: list[tuple[Tensor, int]]  # how much is in use, and how much there is
    graphs: list[Any]  # what Warp holds for captures that use these


def _view(warp: Any, array: Any, many: int) -> Tensor:
    """An array of Warp as a tensor `[many, size]` in the same memory."""
    if not math.prod(array.shape):
        return torch.empty(many, 0, device=warp.device_to_torch(array.device))
    return warp.to_torch(array).view(many, -1)


def _slices(model: Any, names: tuple[str, ...]) -> dict[str, slice]:
    """Where the parts lie in our rows, of those that the model has."""
    found, at = {}, 0
    for name in names:
        if size := size_of(model, name):
            found[name] = slice(at, at + size)
            at += size
    return found


def _varying(warp: Any, ours: Any, model: Any, varied: Varied, many: int) -> list[tuple[Tensor, slice]]:
    found, at = [], 0
    for field, name in varied:
        rows = rows_of(model, field, name)
        view = _view(warp, getattr(ours, field), many)[:, rows.start : rows.stop]
        found.append((view, slice(at, at + len(rows))))
        at += len(rows)
    return found


@cache  # never given back: captured graphs go on reading and writing there
def _worlds(handle: int, many: int, device: torch.device) -> _Worlds:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"mujoco step: {many} simulations are new in a capture of a CUDA graph; step them once before"
        )
    model, _, varied, _, _ = loaded(handle)
    groups = {group for field, _ in varied for group in VARIES[field]}
    each = {field for field, _ in varied} | {constant for group in groups for constant in GROUPS[group]}
    contacts, rows = capacity(model)
    with packages() as (warp, mjw), warp.ScopedDevice(warp.device_from_torch(device)):
        ours = made(mjw, model, dict.fromkeys(each, many))
        data = mjw.make_data(model, many, nconmax=contacts, njmax=rows)
        state, control = (
            [(_view(warp, getattr(data, _PARTS[name]), many), part) for name, part in _slices(model, names).items()]
            for names in (STATE, CONTROL)
        )
        parameters = _varying(warp, ours, model, varied, many)
        constants = sum(int(getattr(mjw.SetConstGroup, group)) for group in groups)
        sensors, overflow = _view(warp, data.sensordata, many), warp.to_torch(data.overflow)
        counts = (data.nefc, data.njmax), (data.ncollision, data.naconmax), (data.nacon, data.naconmax)
        room = [(warp.to_torch(count), there) for count, there in counts]
        warp.synchronize_device()
        kinds = mjw.OverflowType
        losses = int(kinds.ALL) & ~sum(int(getattr(kinds, name)) for name in _HARMLESS)
    return _Worlds(ours, data, state, control, parameters, constants, sensors, overflow, losses, room, [])


@cache
def _stream(pointer: int, device: torch.device) -> Any:
    """A stream of torch as Warp's; one object for each, as Warp knows captures by it."""
    with packages() as (warp, _):
        return warp.Stream(warp.device_from_torch(device), cuda_stream=pointer)


@contextmanager
def _on_gpu(worlds: _Worlds, warp: Any, device: torch.device) -> Iterator[None]:
    """Warp's work comes after torch's before it and before torch's after it, and is in torch's capture if there is one.

    Outside of captures it is done on a stream of Warp's own, as memory that Warp frees must not be in use on others.
    """
    current, capturing = torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing()
    # a loop of the host, or one of the graph; the former would wait for the GPU in every turn
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
    with warp.ScopedDevice(warp.device_from_torch(device)) as here:
        own = warp.stream_to_torch(here.stream)
        own.wait_stream(current)
        yield
        current.wait_stream(own)


def _run(worlds: _Worlds, device: torch.device, substeps: int) -> None:
    """Warp's part of a call: from what its arrays hold to what they hold afterwards."""
    model, data = worlds.model, worlds.data
    with packages() as (warp, mjw), ExitStack() as where:
        if device.type == "cpu":
            where.enter_context(warp.ScopedDevice("cpu"))
        else:
            where.enter_context(torch.cuda.device(device))
            where.enter_context(_on_gpu(worlds, warp, device))
        if worlds.constants:
            mjw.set_const(model, data, worlds.constants, restore=False)
        for _ in range(substeps):
            mjw.step(model, data)
        if not substeps:
            mjw.forward(model, data)


def _lost(worlds: _Worlds) -> Tensor:
    """Which simulations had more contacts or constraints than there is room for, `[many]`.

    Contacts share theirs: where it does not do, nobody knows whose were dropped, and all are lost.
    """
    lost = (worlds.overflow & worlds.losses) != 0  # in any substep
    for count, there in worlds.room:  # without a substep nobody looked
        lost = lost | (count > there)
    return lost


def step(state: Tensor, control: Tensor, parameters: Tensor, handle: int, substeps: int) -> tuple[Tensor, Tensor]:
    """`substeps` of MuJoCo Warp from each row; arguments and results as of `ecrl.envs.mujoco.physics.step_op.step`.

    Rows after it hold numbers of float32. A simulation with more constraints than there is room for (`capacity`) comes
    back as NaN, and so do all if they have too many contacts together.

    Args:
        state: `[N, nstate]` float64.
        control: `[N, nu + nv]` float64.
        parameters: `[N, nparameters]` float64.
        handle: of a model that was loaded for Warp.
        substeps: 0 for the sensors of the state.

    Gradient: none.
    Raises: RuntimeError where so many simulations are new in a capture of a CUDA graph.
    """
    many, sensors = len(state), state.new_empty(len(state), loaded(handle).model.nsensordata)
    after = state.clone(memory_format=torch.contiguous_format)
    if not many:
        return after, sensors
    with ONE_AT_A_TIME:
        worlds = _worlds(handle, many, state.device)
        for rows, views in ((parameters, worlds.parameters), (state, worlds.state), (control, worlds.control)):
            for view, part in views:
                view.copy_(rows[:, part])
        worlds.overflow.zero_()
        _run(worlds, state.device, substeps)
        for view, part in worlds.state if substeps else ():
            after[:, part] = view
        sensors.copy_(worlds.sensors)
        lost = _lost(worlds).unsqueeze(1)
    return after.masked_fill_(lost, math.nan), sensors.masked_fill_(lost, math.nan)
