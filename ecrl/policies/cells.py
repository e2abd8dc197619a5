"""Recurrent cells as pure functions: `gru`, `lstm` and `mingru`.

A cell has a memory, which is a dict of tensors `[*B, H]`, where H is `hidden_size`. The entry `h` of the memory is the
output of the cell. A step of a cell has two parts:

    x       = obs W + b                     `cell_inputs`, for all steps at once, without the memory
    memory' = step(weights, memory, x)      `Cell.step`

`unroll` runs a cell over the steps of sequences. The memory becomes zero before the first step of an episode.

A cell computes in the dtype of its weights, even if `policy.bf16` runs the other networks in bfloat16.
"""

from collections.abc import Callable
from math import sqrt
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config.model import ConfigModel
from ecrl.kernels import loop
from ecrl.kernels.reverse_scan import reverse_scan
from ecrl.memory import check_room
from ecrl.policies.mlp import Width

Memory = dict[str, Tensor]
"""Type of a cell's memory: tensors `[*B, H]`."""
_Step = tuple[Tensor, Tensor]
"""Input of a step, and a flag that is True for the first step of an episode."""
_Stepped = tuple[Memory, Tensor]
"""Memory and output after a step."""


class CellConfig(ConfigModel):
    """Settings of a recurrent cell."""

    type: Literal["gru", "lstm", "mingru"] = Field(default="gru", description="the cell: gru, lstm or mingru")
    hidden_size: Width = Field(default=64, description="size of the memory `h`, which is the output of the cell")


def gru_step(weights: TensorDict, memory: Memory, x: Tensor) -> Memory:
    """Return the memory of a gated recurrent unit after a step.

        r  = sigmoid(x_r + h U_r)                 reset gate
        z  = sigmoid(x_z + h U_z)                 update gate
        n  = tanh(x_n + r * (h U_n + c))
        h' = (1 - z) * n + z * h

    Args:
        weights: `hidden` `[H, 3 H]`, the matrices U, and `hidden_bias` `[H]`, the bias c.
        memory: `h` `[*B, H]`.
        x: `[*B, 3 H]`, the concatenation of x_r, x_z and x_n.

    Gradient: flows through all arguments.
    Source: Cho et al. 2014, arXiv:1406.1078. As in `torch.nn.GRUCell`, r multiplies h U_n + c, not h.
    """
    h = memory["h"]
    x_r, x_z, x_n = x.chunk(3, -1)
    h_r, h_z, h_n = (h @ weights["hidden"]).chunk(3, -1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * (h_n + weights["hidden_bias"]))
    return {"h": n + torch.sigmoid(x_z + h_z) * (h - n)}


def lstm_step(weights: TensorDict, memory: Memory, x: Tensor) -> Memory:
    """Return the memory of a long short-term memory (LSTM) cell after a step.

        i  = sigmoid(x_i + h U_i)                 input gate
        f  = sigmoid(x_f + h U_f)                 forget gate
        g  = tanh(x_g + h U_g)
        o  = sigmoid(x_o + h U_o)                 output gate
        c' = f * c + i * g
        h' = o * tanh(c')

    Args:
        weights: `hidden` `[H, 4 H]`, the matrices U.
        memory: `h` and `c`, each `[*B, H]`.
        x: `[*B, 4 H]`, the concatenation of x_i, x_f, x_g and x_o.

    Gradient: flows through all arguments.
    Source: Hochreiter and Schmidhuber 1997, "Long short-term memory", with the forget gate of Gers et al. 2000.
    """
    i, f, g, o = (x + memory["h"] @ weights["hidden"]).chunk(4, -1)
    c = torch.sigmoid(f) * memory["c"] + torch.sigmoid(i) * torch.tanh(g)
    return {"h": torch.sigmoid(o) * torch.tanh(c), "c": c}


def mingru_step(weights: TensorDict, memory: Memory, x: Tensor) -> Memory:
    """Return the memory of a minimal GRU after a step. The gate of a minimal GRU does not read the memory.

        z  = sigmoid(x_z)
        h' = (1 - z) * h + z * x_n

    Args:
        weights: not used, because the step has no weights.
        memory: `h` `[*B, H]`.
        x: `[*B, 2 H]`, the concatenation of x_z and x_n.

    Gradient: flows through `memory` and `x`.
    Source: Feng et al. 2024, "Were RNNs all we needed?", arXiv:2410.01201, algorithm 1.
    """
    x_z, x_n = x.chunk(2, -1)
    return {"h": torch.lerp(memory["h"], x_n, torch.sigmoid(x_z))}


class Cell(NamedTuple):
    """Step function and sizes of a kind of recurrent cell.

    Attributes:
        step: `step(weights, memory, x)` returns the memory after a step. `x` is the result of `cell_inputs`.
        memory: names of the tensors in the memory.
        gates: number of vectors `[H]` in `x`.
        recurrent: number of weight matrices `[H, H]` that multiply the memory.
        linear: True if `step` is `mingru_step`, which is a linear function of the memory. `unroll` then calls
            `reverse_scan` once instead of calling `step` for each step.
    """

    step: Callable[[TensorDict, Memory, Tensor], Memory]
    memory: tuple[str, ...]
    gates: int
    recurrent: int
    linear: bool = False


CELLS = {
    "gru": Cell(gru_step, ("h",), gates=3, recurrent=3),
    "lstm": Cell(lstm_step, ("h", "c"), gates=4, recurrent=4),
    "mingru": Cell(mingru_step, ("h",), gates=2, recurrent=0, linear=True),
}


def init_cell(cfg: CellConfig, inputs: int, key: Tensor) -> TensorDict:
    """Return new weights of a cell, drawn from a 0-d key.

    The input matrices are normal with variance 1 / `inputs`, and each recurrent matrix is orthogonal. All biases are 0,
    except the bias of an LSTM's forget gate, which is 1.
    """
    cell, size = CELLS[cfg.type], cfg.hidden_size
    weights = size * (inputs * cell.gates + size * cell.recurrent)
    check_room(8 * weights, torch.device("cpu"), f"hidden_size: {weights:,} weights and their gradients")
    bias = torch.zeros(cell.gates, size)
    if cfg.type == "lstm":
        bias[1] = 1.0
    own, *keys = rng.split(key, 1 + cell.recurrent)
    parts = {"input": rng.normal(own, (inputs, cell.gates * size)) / sqrt(inputs), "bias": bias.flatten()}
    if cell.recurrent:
        parts["hidden"] = torch.cat([_orthogonal(one, size) for one in keys], 1)
    if cfg.type == "gru":
        parts["hidden_bias"] = torch.zeros(size)
    return TensorDict({name: part.to(torch.get_default_dtype()) for name, part in parts.items()}, [])


def _orthogonal(key: Tensor, size: int) -> Tensor:
    """Draw a matrix `[size, size]` from the uniform distribution on orthogonal matrices."""
    q, r = torch.linalg.qr(rng.normal(key, (size, size)))
    return q * r.diagonal().sign()


def empty_memory(cfg: CellConfig, weights: TensorDict, batch: torch.Size) -> TensorDict:
    """Return the memory at the start of an episode, zeros `[*batch, H]`, in the dtype of the weights."""
    bias, shape = weights["bias"], torch.Size([*batch, cfg.hidden_size])
    return TensorDict({name: bias.new_zeros(shape) for name in CELLS[cfg.type].memory}, batch)


def cell_inputs(weights: TensorDict, obs: Tensor) -> Tensor:
    """Return the part of a step that does not read the memory, `obs W + b`, for observations `[*B, I]`."""
    return obs @ weights["input"] + weights["bias"]


def unroll(cfg: CellConfig, weights: TensorDict, memory: Memory, obs: Tensor, is_first: Tensor) -> Tensor:
    """Run a cell over sequences, and return its output after each step.

        memory[t] = step(weights, 0 if is_first[t] else memory[t - 1], obs[t] W + b)

    For a linear cell, such as `mingru`, one call of `reverse_scan` computes all steps.

    Args:
        cfg: settings of the cell.
        weights: weights of the cell.
        memory: the memory before the first step, tensors `[n, H]`.
        obs: `[n, S, I]` float.
        is_first: `[n, S]` bool, True for the first step of an episode.

    Returns: `[n, S, H]`, the output `h` after each step.
    Gradient: flows through `weights`, `memory` and `obs`, and not across the start of an episode.
    """
    cell, first = CELLS[cfg.type], is_first.t()
    x = cell_inputs(weights, obs).transpose(0, 1)  # [S, n, gates * H]
    if cell.linear:
        return _unroll_linear(memory["h"], x, first).transpose(0, 1)

    def body(memory: Memory, row: _Step, weights: TensorDict) -> _Stepped:  # dynamo cannot trace `tuple[...]`
        x, first = row
        kept = {name: part.masked_fill(first.unsqueeze(-1), 0.0) for name, part in memory.items()}
        after = cell.step(weights, kept, x)
        return after, after["h"].clone()

    parts = {name: memory[name] for name in cell.memory}
    return loop(body, parts, (x, first), weights.exclude("input", "bias"))[1].transpose(0, 1)


def _unroll_linear(h: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """Run `mingru_step` over S steps with `reverse_scan`, and return the outputs `[S, n, H]`.

        h[t] = (1 - z[t]) * (0 if first[t] else h[t - 1]) + z[t] * x_n[t]

    `x` has the shape `[S, n, 2 H]`, `first` has the shape `[S, n]`, and `h`, of shape `[n, H]`, is the memory before
    the first step.
    """
    x_z, x_n = x.flip(0).chunk(2, -1)
    z = torch.sigmoid(x_z)
    cut = first.flip(0).unsqueeze(-1).expand_as(z)
    inputs, decay, cut = (part.movedim(0, -1) for part in (z * x_n, 1.0 - z, cut))
    return reverse_scan(inputs, decay, cut, h).movedim(-1, 0).flip(0)
