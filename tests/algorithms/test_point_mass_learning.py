"""The published configs of the point mass reach the goal on every seed, in fresh episodes.

`python -m pytest tests/algorithms/test_point_mass_learning.py -s` prints the figures that the README gives.
"""

import time
from pathlib import Path

import pytest

from ecrl.config import load_config
from ecrl.evaluation import evaluate
from ecrl.loop import init_state, train_iter

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.slow
@pytest.mark.parametrize("config", ["point_mass_apg", "point_mass_ppo"])
def test_every_seed_reaches_the_goal(config):
    rates = {}
    for seed in range(3):
        cfg = load_config(CONFIGS / f"{config}.json").replace(**{"trainer.seed": seed, "trainer.num_eval_envs": 250})
        began = time.perf_counter()
        *_, record = train_iter(init_state(cfg), cfg)
        took = time.perf_counter() - began
        logs = evaluate(record["state"], cfg, num_episodes=500)
        rates[seed] = logs["eval/success_rate"]
        print(f"{config} seed {seed}: success {rates[seed]:.3f} after {record['sample_step']:,} steps, {took:.0f} s")
    assert min(rates.values()) >= 0.95, rates
