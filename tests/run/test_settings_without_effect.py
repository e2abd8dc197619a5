"""`ecrl.train` and `train_iter` warn about a finished state, and `train` about settings that have no effect."""

import warnings

import pytest
import torch
from support.small_runs import last_state, small

import ecrl
from ecrl.errors import ConfigError
from ecrl.loop.iteration import make_iteration, train_iter
from ecrl.run.train import train

CAMERA = {"func": "record_camera_data", "mode": "interval", "params": {"name": "view"}}


def messages(cfg, state=None, **keys):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        train(ecrl.init_state(cfg) if state is None else state, cfg, progress=False, **keys)
    return [str(one.message) for one in raised]


def test_a_finished_state_is_returned_with_a_warning():
    cfg = small()
    end = last_state(cfg)
    expected = "the state has 128 steps, and the run ends at 128: nothing is left to train; raise trainer.iterations"
    assert messages(cfg, end) == [expected]
    assert messages(cfg.replace(**{"trainer.iterations": 5}), end) == []
    with pytest.warns(UserWarning) as raised:
        assert list(train_iter(end, cfg)) == []
    assert [(str(one.message), one.filename) for one in raised] == [(expected, __file__)]
    assert len(list(train_iter(end, cfg.replace(**{"trainer.iterations": 5})))) == 2


def test_settings_that_need_a_run_folder_warn_without_one(tmp_path):
    cfg = small().replace(**{"trainer.keep_checkpoints": 2})
    expected = "trainer.keep_checkpoints: nothing is written without a run folder; pass run_dir"
    assert messages(cfg) == [expected]
    assert messages(cfg, run_dir=tmp_path / "run") == []
    both = cfg.replace(**{"trainer.use_wandb": True})
    assert messages(both) == [expected.replace("trainer.keep", "trainer.use_wandb, trainer.keep")]


def test_a_chosen_frequency_of_checkpoints_warns_without_a_run_folder(tmp_path):
    cfg = small().replace(**{"trainer.save_freq": 64})
    expected = "trainer.save_freq: nothing is written without a run folder; pass run_dir"
    assert messages(cfg) == messages(cfg.replace(**{"trainer.seed": 3})) == [expected]
    assert messages(cfg, run_dir=tmp_path / "run") == []
    for silent in (0, 129, 50_000):  # no checkpoint before the end of the run of 128 steps, and the default
        assert messages(cfg.replace(**{"trainer.save_freq": silent})) == []


def test_events_of_evaluations_warn_if_there_are_none():
    pytest.importorskip("mujoco.batch")
    task = {"env": {"name": "ReachRL"}, "policy": {"name": "actor_critic"}, "algorithm": {"name": "ppo"}}
    sizes = {"num_envs": 2, "buffer_size": 8, "iterations": 1, "compile": "off", "num_eval_episodes": 2}
    cfg = ecrl.load_config(task | {"trainer": sizes | {"events": {"eval": {"film": CAMERA}}}})
    assert messages(cfg)[:1] == ["trainer.events.eval: there are no evaluations; set trainer.enable_eval to true"]
    evaluated = messages(cfg.replace(**{"trainer.enable_eval": True}))
    assert "cameras in trainer.events: nothing is written without a run folder; pass run_dir" in evaluated


def test_a_misspelt_hyperparameter_is_refused():
    cfg = small()
    state = ecrl.init_state(cfg).clone()
    state["hyper", "learning_rte"] = torch.tensor(0.1)
    uses = (
        lambda: train(state, cfg, progress=False),
        lambda: next(train_iter(state, cfg)),
        lambda: make_iteration(cfg)(state),
        lambda: torch.func.vmap(make_iteration(cfg))(torch.stack([state, state])),
    )
    for use in uses:
        with pytest.raises(ConfigError) as error:
            use()
        expected = "state['hyper', 'learning_rte']: no hyperparameter of this name; did you mean 'learning_rate'?"
        assert str(error.value) == expected


def test_an_iteration_checks_the_hyperparameters_of_its_first_call_and_of_changed_states():
    iteration, state = make_iteration(small()), ecrl.init_state(small())
    state, _ = iteration(state)
    changed = state.clone()
    changed["hyper", "gama"] = torch.tensor(0.9)
    with pytest.raises(ConfigError, match=r"^state\['hyper', 'gama'\]: no hyperparameter of this name; did you mean"):
        iteration(changed)
    assert int(iteration(state)[0]["update_step"]) == 2
