"""The warning about large observations: when it appears, once, and that the key that it names mends the run."""

import warnings
from pathlib import Path

import pytest
import torch
from support.small_runs import small
from tensordict import TensorDict

from ecrl import init_state, load_config, train
from ecrl.run.large_observations import largest, with_warning_of_large_observations

FILES = Path(__file__).parents[1] / "config" / "embodichain_files"


def record(kl, magnitude, log_type="train"):
    state = TensorDict({"env": TensorDict({"obs": torch.tensor([[0.0, -magnitude]])}, 1)}, ())
    return {"log_type": log_type, "logs": {} if kl is None else {"approx_kl": kl}, "state": state}


def warned(cfg, *records):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert list(with_warning_of_large_observations(iter(records), cfg)) == list(records)
    return [str(warning.message) for warning in caught]


def test_a_wild_update_with_large_observations_warns_once():
    (text,) = warned(small(), record(0.01, 500.0), record(0.25, 500.0), record(0.5, 500.0))
    assert text == (
        "policy.normalize_obs: is false, but observations reach 500, and an update had an approx_kl of 0.25; "
        'add "normalize_obs": true to policy'
    )


@pytest.mark.parametrize(
    "one", [record(0.25, 5.0), record(0.05, 500.0), record(None, 500.0), record(float("nan"), 500.0)]
)
def test_usual_updates_and_usual_observations_do_not_warn(one):
    assert warned(small(), one) == []


def test_a_policy_that_normalises_does_not_warn():
    assert warned(small(**{"policy.normalize_obs": True}), record(0.5, 500.0)) == []


def test_images_and_integers_are_not_large():
    entries = {"image": torch.full((2, 4, 4, 3), 255, dtype=torch.uint8), "words": torch.full((2, 5), 900)}
    assert largest(TensorDict(entries, 2)) == 0.0


def test_embodichains_file_of_push_cube_warns_and_the_named_key_mends_it():
    """Its policy reads forces of up to 500 N m as they are."""
    path = FILES / "tutorial" / "push_cube" / "train_config.json"
    changes = {
        "trainer.gym_config": str(FILES / "v0.2.3" / "push_cube" / "gym_config.json"),
        **{"trainer.device": "cpu", "trainer.enable_eval": False, "trainer.compile": "off", "trainer.use_wandb": False},
        **{"trainer.num_envs": 16, "trainer.buffer_size": 16, "trainer.iterations": 1, "trainer.events": {}},
        "algorithm.cfg.batch_size": 64,
    }

    def warnings_of(more):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cfg = load_config(path, changes | more)
            train(init_state(cfg), cfg, progress=False)
        return [str(one.message) for one in caught if "normalize_obs" in str(one.message)]

    (text,) = warnings_of({})
    assert text.startswith("policy.normalize_obs: is false, but observations reach")
    assert warnings_of({"policy.normalize_obs": True}) == []
