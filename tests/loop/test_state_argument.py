"""A public function that takes a state refuses anything else in one line."""

import pytest
import torch
from support.small_runs import NET, small
from tensordict import TensorDict

import ecrl
from ecrl.errors import ConfigError, UserError
from ecrl.run.export import export
from ecrl.run.video import record

EXPECTED = 'expected the state of a run; pass the result of init_state, the "state" of a record, or the first result'
USES = {
    "summary": lambda state, cfg, folder: ecrl.summary(state),
    "train": lambda state, cfg, folder: ecrl.train(state, cfg, progress=False),
    "train_iter": lambda state, cfg, folder: ecrl.train_iter(state, cfg),
    "make_iteration": lambda state, cfg, folder: ecrl.make_iteration(cfg)(state),
    "evaluate": lambda state, cfg, folder: ecrl.evaluate(state, cfg, 2),
    "save": lambda state, cfg, folder: ecrl.save(folder / "saved", state, cfg),
    "close": lambda state, cfg, folder: ecrl.close(state, cfg),
    "export": lambda state, cfg, folder: export(state, cfg, folder / "export"),
    "record": lambda state, cfg, folder: record(state, cfg, folder / "video.mp4"),
}


@pytest.mark.parametrize("name", USES)
def test_anything_but_a_state_is_refused_in_one_line(tmp_path, name):
    cfg = small()
    state = ecrl.init_state(cfg)
    given = {
        "got tuple, ": (state, None),
        "got None, ": None,
        "got dict, ": {"log_type": "train", "state": state},
        "got Config, ": cfg,
        "got str, ": "outputs/first",
        "got a TensorDict without ": state["params"],
    }
    for problem, wrong in given.items():
        with pytest.raises(UserError) as error:
            USES[name](wrong, cfg, tmp_path)
        line = str(error.value)
        assert line.startswith(f"state: {problem}") and EXPECTED in line and "\n" not in line
    assert not [*tmp_path.iterdir()]


def test_the_policy_of_demonstrations_is_that_of_a_state(tmp_path):
    with pytest.raises(UserError, match=r"^state: got tuple, expected the state of a run; pass "):
        ecrl.record_demonstrations(small(), tmp_path / "demos.safetensors", 2, state=(ecrl.init_state(small()), None))


def test_the_missing_fields_are_named():
    with pytest.raises(UserError, match=r"^state: got a TensorDict without update_step, iterations, expected"):
        ecrl.summary(ecrl.init_state(small()).exclude("update_step", "iterations"))


@pytest.mark.parametrize("states", [[], None, TensorDict({}, [2])])
def test_a_population_is_a_stack_of_states(states):
    line = f"^states: got {type(states).__name__}, expected the stacked states of the runs; stack them with torch.stack"
    with pytest.raises(UserError, match=line):
        ecrl.exploit_and_explore(states, torch.ones(2), ecrl.rng.key(0), count=1, factor=2.0, ranges={})


RECURRENT = {"name": "recurrent", "cell": {"type": "gru", "hidden_size": 8}, "actor": NET, "critic": NET}
OTHERS = {
    "another policy": ({"policy": RECURRENT}, "params/actor/0.bias is [8], the config makes it absent"),
    "another environment": ({"env": "pendulum"}, "params/actor/0.weight is [8, 4], the config makes it [8, 3]"),
}


@pytest.mark.parametrize("name", ["evaluate", "export"])
@pytest.mark.parametrize("other", OTHERS)
def test_networks_of_another_config_are_named(name, other, tmp_path):
    changes, problem = OTHERS[other]
    with pytest.raises(ConfigError) as error:
        USES[name](ecrl.init_state(small()), small(**changes), tmp_path)
    assert str(error.value) == f"state: {problem}; use the config of its run"
