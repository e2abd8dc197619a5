"""Training on the tasks with a gripper gives the same result compiled and eager."""

import pytest
from support.checks import close
from support.long_cases import long_except
from support.small_runs import last_state

from ecrl.config import load_config
from ecrl.loop.iteration import init_state

pytest.importorskip("mujoco.batch")

SHORT = {
    "trainer.num_envs": 8,
    "trainer.buffer_size": 8,
    "trainer.iterations": 2,
    "trainer.enable_eval": False,
    "trainer.compile": "off",
    "algorithm.cfg.n_epochs": 2,
    "algorithm.cfg.batch_size": 32,
}
CONFIGS = ("pick_cube_ppo", "stack_cube_ppo", "open_drawer_ppo", "push_cube_gripper_ppo")


@pytest.mark.usefixtures("traced_or_compiled")
@pytest.mark.parametrize("name", long_except(("pick_cube_ppo",), CONFIGS))
def test_training_compiled_equals_training_eager(name):
    eager = load_config(name, SHORT)
    compiled = eager.replace(**{"trainer.compile": "on"})
    expected, got = (last_state(cfg) for cfg in (eager, compiled))
    start = init_state(eager)["params"].flatten_keys("/")
    moved = [key for key, leaf in expected["params"].flatten_keys("/").items() if not leaf.equal(start[key])]
    assert len(moved) > 4, "training changed nothing"
    for part in ("params", "env"):
        for key, leaf in expected[part].flatten_keys("/").items():
            close(got[part].flatten_keys("/")[key], leaf, 1e-4)
