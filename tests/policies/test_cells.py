"""Recurrent cells equal torch's own cells or their equations, and restart where an episode begins."""

from functools import partial

import pytest
import torch
from support.checks import close
from support.graphs import graph_of, needs_cpu_compiler, with_reshapes
from tensordict import TensorDict
from torch import nn

from ecrl import rng
from ecrl.compile.jit import Jit
from ecrl.config.model import validate_section
from ecrl.errors import ConfigError
from ecrl.policies.cells import CELLS, CellConfig, cell_inputs, empty_memory, init_cell, unroll
from ecrl.pytree import flatten

INPUTS, SIZE = 3, 4
NAMES = list(CELLS)


def numbers(seed, *shape):
    return rng.normal(rng.key(seed), shape)


def random_weights(name, dtype=torch.float32):
    weights = init_cell(CellConfig(type=name, hidden_size=SIZE), INPUTS, rng.key(5))
    return TensorDict(
        {key: (w + 0.3 * numbers(i, *w.shape)).to(dtype) for i, (key, w) in enumerate(weights.items())}, []
    )


def random_memory(name, *batch):
    return {part: numbers(40 + i, *batch, SIZE) for i, part in enumerate(CELLS[name].memory)}


def one_step(name, weights, memory, obs):
    return CELLS[name].step(weights, memory, cell_inputs(weights, obs))


def as_torch(cell, weights, biases):
    """Give one of torch's cells the weights of ours."""
    parts = {"weight_ih": weights["input"].t(), "weight_hh": weights["hidden"].t(), **biases}
    cell.load_state_dict({key: part.clone() for key, part in parts.items()})
    return cell


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_a_gru_is_torchs(variant, batch):
    weights, obs, memory = random_weights("gru"), numbers(1, *batch, INPUTS), random_memory("gru", *batch)
    hidden_bias = torch.cat((torch.zeros(2 * SIZE), weights["hidden_bias"]))
    theirs = as_torch(nn.GRUCell(INPUTS, SIZE), weights, {"bias_ih": weights["bias"], "bias_hh": hidden_bias})
    expected = theirs(obs.reshape(-1, INPUTS), memory["h"].reshape(-1, SIZE)).reshape(*batch, SIZE)
    after = variant(lambda *args: one_step("gru", *args))(weights, memory, obs)
    close(after["h"], expected)


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_an_lstm_is_torchs(variant, batch):
    weights, obs, memory = random_weights("lstm"), numbers(1, *batch, INPUTS), random_memory("lstm", *batch)
    biases = {"bias_ih": weights["bias"], "bias_hh": torch.zeros(4 * SIZE)}
    theirs = as_torch(nn.LSTMCell(INPUTS, SIZE), weights, biases)
    h, c = theirs(obs.reshape(-1, INPUTS), tuple(memory[part].reshape(-1, SIZE) for part in ("h", "c")))
    after = variant(lambda *args: one_step("lstm", *args))(weights, memory, obs)
    close(after["h"], h.reshape(*batch, SIZE))
    close(after["c"], c.reshape(*batch, SIZE))


def test_a_minimal_gru_by_hand(variant):
    """z = sigmoid(ln 3) = 3/4, so h' = 1/4 * 8 + 3/4 * 4 = 5; and z = 1/2 gives 1/2 * 8 + 1/2 * -2 = 3."""
    x = torch.tensor([[1.0986123, 0.0, 4.0, -2.0]])
    after = variant(CELLS["mingru"].step)(TensorDict({}, []), {"h": torch.tensor([[8.0, 8.0]])}, x)
    close(after["h"], [[5.0, 3.0]])


@pytest.mark.parametrize("name", NAMES)
def test_initial_weights(name):
    weights = init_cell(CellConfig(type=name, hidden_size=64), 256, rng.key(0))
    assert abs(weights["input"].std().item() - 1 / 16) < 0.002 and abs(weights["input"].mean().item()) < 0.002
    gates = weights["bias"].reshape(-1, 64)
    ones = [name == "lstm" and gate == 1 for gate in range(len(gates))]
    assert torch.equal(gates, torch.tensor(ones).float().unsqueeze(1).expand_as(gates))
    for matrix in weights["hidden"].split(64, 1) if "hidden" in weights else []:
        close(matrix @ matrix.t(), torch.eye(64))
    assert ("hidden" in weights) == (name != "mingru") and ("hidden_bias" in weights) == (name == "gru")
    memory = empty_memory(CellConfig(type=name, hidden_size=64), weights, torch.Size([3]))
    assert memory.shape == (3,) and all(torch.equal(part, torch.zeros(3, 64)) for part in memory.values())


def stepwise(name, weights, memory, obs, is_first):
    """Run a cell one step at a time, in a Python loop."""
    outputs = []
    for t in range(obs.shape[1]):
        memory = {key: torch.where(is_first[:, t, None], 0.0, part) for key, part in memory.items()}
        memory = one_step(name, weights, memory, obs[:, t])
        outputs.append(memory["h"])
    return torch.stack(outputs, 1)


def starts(n, length):
    is_first = rng.uniform(rng.key(3), (n, length)) < 0.3
    is_first[0] = False
    return is_first


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2, 9, 33])
def test_an_unrolled_cell_is_one_step_after_the_other(variant, name, length):
    weights, memory, obs = random_weights(name), random_memory(name, 6), numbers(2, 6, length, INPUTS)
    is_first, cfg = starts(6, length), CellConfig(type=name, hidden_size=SIZE)
    out = variant(lambda *args: unroll(cfg, *args))(weights, memory, obs, is_first)
    close(out, stepwise(name, weights, memory, obs, is_first))


def loss_of(fn):
    def loss(weights, memory, obs, is_first):
        return (fn(weights, memory, obs, is_first) * numbers(9, obs.shape[0], obs.shape[1], SIZE)).sum()

    return loss


def gradients(fn, weights, memory, obs, is_first):
    return torch.func.grad(loss_of(fn), argnums=(0, 1, 2))(weights, memory, obs, is_first)


def arguments(name, length=9):
    weights = dict(random_weights(name).items())
    return weights, random_memory(name, 4), numbers(2, 4, length, INPUTS), starts(4, length)


def unrolled(cfg):
    return lambda weights, *args: unroll(cfg, TensorDict(weights, []), *args)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_an_unrolled_cell(name):
    cfg = CellConfig(type=name, hidden_size=SIZE)
    args = arguments(name)
    ours, expected = gradients(unrolled(cfg), *args), gradients(partial(stepwise, name), *args)
    for one, other in zip(flatten(ours)[0], flatten(expected)[0], strict=True):
        assert other.any()
        close(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    weights, memory = random_weights(name, torch.float64), random_memory(name, 2)
    obs, is_first, cfg = numbers(2, 2, 5, INPUTS).double(), starts(2, 5), CellConfig(type=name, hidden_size=SIZE)
    names, leaves = list(weights.keys()), [*weights.values(), *(part.double() for part in memory.values()), obs]

    def fn(*tensors):
        weights = TensorDict(dict(zip(names, tensors, strict=False)), [])
        parts = dict(zip(memory, tensors[len(names) :], strict=False))
        return unroll(cfg, weights, parts, tensors[-1], is_first)

    assert torch.autograd.gradcheck(fn, [leaf.requires_grad_() for leaf in leaves])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_crosses_the_start_of_an_episode(name):
    """Not even NaN, and no gradient."""
    weights, cfg = random_weights(name), CellConfig(type=name, hidden_size=SIZE)
    obs, is_first = numbers(2, 1, 6, INPUTS), torch.tensor([[False, False, False, True, False, False]])
    bad = obs.clone().index_fill_(1, torch.tensor([0]), torch.nan)
    out = unroll(cfg, weights, random_memory(name, 1), bad, is_first)
    assert out[:, :3].isnan().any() and torch.equal(
        out[:, 3:], unroll(cfg, weights, random_memory(name, 1), obs, is_first)[:, 3:]
    )
    moving = obs.clone().requires_grad_()
    unroll(cfg, weights, random_memory(name, 1), moving, is_first)[:, 3:].sum().backward()
    assert not moving.grad[:, :3].any() and moving.grad[:, 3:].all()


@pytest.mark.parametrize("name", NAMES)
def test_in_a_graph_an_unrolled_cell_is_one_step_after_the_other(name):
    cfg = CellConfig(type=name, hidden_size=SIZE)
    args = random_weights(name), random_memory(name, 3), numbers(2, 3, 20, INPUTS), starts(3, 20)
    graph = with_reshapes(graph_of(partial(unroll, cfg), *args))
    close(graph(*flatten(args)[0])[0], stepwise(name, *args))


@pytest.mark.slow
@needs_cpu_compiler
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_compiled_for_the_cpu(name):
    cfg = CellConfig(type=name, hidden_size=SIZE)
    args, fn = arguments(name), unrolled(cfg)
    for one, other in zip(flatten(Jit(True)(gradients, fn)(*args))[0], flatten(gradients(fn, *args))[0], strict=True):
        close(one, other)


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="type: expected 'gru', 'lstm' or 'mingru', got 'rnn'"):
        validate_section(CellConfig, {"type": "rnn"}, "policy.cell")
    with pytest.raises(ConfigError, match="hidden_size"):
        validate_section(CellConfig, {"hidden_size": 0}, "policy.cell")
