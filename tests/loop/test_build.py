"""The choice of `trainer.compile: auto`: compile only if it shortens the run."""

from dataclasses import replace

import pytest

import ecrl.loop.build
from ecrl import load_config
from ecrl.config import Config
from ecrl.loop.build import build, form_of, planned_form


def form_after(cfg: Config, iterations: int, mode: str = "auto") -> str:
    return form_of(cfg.replace(**{"trainer.iterations": iterations, "trainer.compile": mode})).name


def break_even(cfg: Config) -> int:
    """Return the smallest number of iterations for which `auto` compiles, by bisection."""
    eager, compiled = 1, 10**6
    assert (form_after(cfg, eager), form_after(cfg, compiled)) == ("eager", "compiled")
    while compiled - eager > 1:
        middle = (eager + compiled) // 2
        eager, compiled = (middle, compiled) if form_after(cfg, middle) == "eager" else (eager, middle)
    return compiled


@pytest.mark.parametrize("name", ["cartpole_ppo", "cartpole_grpo", "point_mass_apg"])
def test_auto_compiles_half_as_many_iterations_of_twice_the_work(name):
    cfg = load_config(f"configs/{name}.json").replace(**{"trainer.num_envs": 4, "trainer.buffer_size": 8})
    cfg = cfg if name == "point_mass_apg" else cfg.replace(**{"algorithm.cfg.batch_size": 16})
    first = break_even(cfg)
    assert break_even(cfg.replace(**{"trainer.buffer_size": 16})) == pytest.approx(first / 2, abs=1)
    before = cfg.replace(**{"trainer.iterations": first - 1})
    assert form_of(before).name == "eager" and "of the whole run" in form_of(before).reason
    for iterations in (1, 10**6):
        assert form_after(cfg, iterations, "on") == "compiled"
        assert form_after(cfg, iterations, "off") == "eager"


def test_gradient_steps_add_to_the_work_evenly():
    """The work of an iteration has a constant part and a part per epoch; the break-even point is its reciprocal."""
    cfg = load_config("configs/cartpole_ppo.json").replace(**{"trainer.num_envs": 4, "trainer.buffer_size": 8})
    sized = [cfg.replace(**{"algorithm.cfg.batch_size": 16, "algorithm.cfg.n_epochs": n}) for n in (1, 2, 3)]
    one, two, three = (1.0 / break_even(c) for c in sized)
    assert two - one > 0.1 * one
    assert three - two == pytest.approx(two - one, rel=0.02)


def test_an_algorithm_that_does_not_declare_its_steps_is_compiled(monkeypatch):
    cfg = load_config("configs/cartpole_grpo.json")
    make = ecrl.loop.build.make_algorithm
    monkeypatch.setattr(ecrl.loop.build, "make_algorithm", lambda block: replace(make(block), gradient_steps=None))
    assert form_of(cfg).name == "compiled"


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_tf32_on_a_cpu_warns_in_every_compile_mode(mode):
    cfg = load_config("configs/cartpole_grpo.json").replace(**{"trainer.tf32": True, "trainer.compile": mode})
    with pytest.warns(UserWarning, match="tf32 is for cuda"):
        form_of(cfg)


def test_tf32_on_a_cpu_warns_for_a_policy_that_cannot_be_compiled():
    cfg = load_config("configs/cartpole_ppo.json").replace(**{"trainer.tf32": True})
    run = build(cfg.replace(**{"trainer.tf32": False}))
    with pytest.warns(UserWarning, match="tf32 is for cuda"):
        form = planned_form(cfg, replace(run.policy, compiles=False), run.algorithm, run.static)
    assert form.name == "eager" and "cannot be compiled" in form.reason
