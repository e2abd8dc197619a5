"""`ecrl.summary` describes a state in three lines, also if the state has several seeds."""

import torch
from support.small_runs import last_state, small

import ecrl


def test_a_state_in_three_lines():
    cfg = small()
    state = last_state(cfg)
    leaves = list(state.values(True, True))
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    progress, total, parts = ecrl.summary(state).split("\n")
    steps = cfg.trainer.iterations * cfg.trainer.num_envs * cfg.trainer.buffer_size
    assert progress == f"iteration {cfg.trainer.iterations} of {cfg.trainer.iterations}, {steps:,} env steps, on cpu"
    count, _, number = total.partition(", ")
    assert count == f"{len(leaves)} leaves" and abs(float(number.removesuffix(" kB")) - size / 1000) < 0.5
    sizes = [state[part.split()[0]] for part in parts.split(", ")]
    bytes_of = [sum(leaf.numel() * leaf.element_size() for leaf in part.values(True, True)) for part in sizes]
    assert bytes_of == sorted(bytes_of, reverse=True) and {"params", "opt", "env"} <= {*parts.replace(",", "").split()}


def test_a_state_of_several_seeds():
    cfg = small()
    state = ecrl.init_state(cfg)
    progress = ecrl.summary(torch.stack([state, last_state(cfg)])).split("\n")[0]
    end, steps = cfg.trainer.iterations, cfg.trainer.iterations * cfg.trainer.num_envs * cfg.trainer.buffer_size
    assert progress == f"2 seeds, iteration 0 to {end} of {end}, 0 to {steps:,} env steps, on cpu"
