"""The form that `trainer.compile: auto` takes: what ends the whole budget sooner."""

from dataclasses import replace

import pytest

import ecrl.loop.build
from ecrl import load_config
from ecrl.loop.build import form_of


@pytest.mark.parametrize(
    ("name", "times", "form"),
    [
        ("cartpole_grpo", 1, "eager"),
        ("cartpole_grpo", 10, "compiled"),
        ("cartpole_ppo", 1, "compiled"),
        ("cartpole_ppo", 0.1, "eager"),
        ("point_mass_apg", 1, "compiled"),
        ("point_mass_apg", 0.1, "eager"),
    ],
)
def test_auto_takes_what_ends_the_budget_sooner(name, times, form):
    cfg = load_config(f"configs/{name}.json")
    iterations = int(cfg.trainer.iterations * times)
    taken = form_of(cfg.replace(**{"trainer.iterations": iterations}))
    assert taken.name == form
    assert ("of the whole budget" in taken.reason) == (form == "eager")
    for mode, name in (("on", "compiled"), ("off", "eager")):
        assert form_of(cfg.replace(**{"trainer.iterations": iterations, "trainer.compile": mode})).name == name


def test_an_algorithm_that_does_not_tell_its_steps_is_compiled(monkeypatch):
    cfg = load_config("configs/cartpole_grpo.json")
    make = ecrl.loop.build.make_algorithm
    monkeypatch.setattr(ecrl.loop.build, "make_algorithm", lambda block: replace(make(block), gradient_steps=None))
    assert form_of(cfg).name == "compiled"


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_tf32_on_a_cpu_is_told_in_every_form(mode):
    cfg = load_config("configs/cartpole_grpo.json").replace(**{"trainer.tf32": True, "trainer.compile": mode})
    with pytest.warns(UserWarning, match="tf32 is for cuda"):
        form_of(cfg)
