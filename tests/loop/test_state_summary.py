"""`ecrl.summary` describes a state in three lines, also if the state has several seeds."""

import torch
from support.small_runs import last_state, small

import ecrl
from ecrl.run.checkpoint import latest


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


def test_a_state_prints_as_its_summary(tmp_path):
    cfg = small()
    first, iteration = ecrl.init_state(cfg), ecrl.make_iteration(cfg)
    trained = ecrl.train(first, cfg, run_dir=tmp_path / "run", progress=False)[0]
    seeds = torch.stack([first, ecrl.init_state(cfg, ecrl.rng.key(1))])
    loaded = ecrl.load(latest(tmp_path / "run"))[0]
    record = next(iter(ecrl.train_iter(first, cfg)))["state"]
    vmapped = torch.func.vmap(iteration)(seeds)[0]
    again = ecrl.train(trained, cfg, run_dir=tmp_path / "run", progress=False)[0]  # nothing is left to train
    for state in (first, trained, again, loaded, record, seeds, vmapped, first.clone(), iteration(first)[0]):
        assert str(state) == repr(state) == f"State: {ecrl.summary(state)}" and str(state).count("\n") == 2


def test_a_state_without_a_summary_prints_its_tensors():
    state = ecrl.init_state(small())
    texts = [str(state["hyper"]), str(state.select("hyper")), str(state.to_tensordict())]
    torch.func.vmap(lambda inside: texts.append(str(inside)) or inside["key"])(torch.stack([state, state]))
    # the rest of the text depends on the version of tensordict
    assert len(texts) == 4 and all("learning_rate: " in text and "State: " not in text for text in texts)


def test_a_state_is_a_pytree():
    state = ecrl.init_state(small())
    doubled = torch.utils._pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), state)
    assert str(doubled).startswith("State: 2 seeds") and torch.equal(doubled["key"], torch.stack([state["key"]] * 2))
