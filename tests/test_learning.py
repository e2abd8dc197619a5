"""The published configs solve Gymnasium's environments, which share no code with the ones trained on, on every seed.

`python -m pytest tests/test_learning.py -m slow -s` prints the figures that the README gives.
"""

from pathlib import Path

import pytest

from ecrl.config import load_config, total_steps
from ecrl.evaluation import evaluate
from ecrl.loop import init_state, train_iter

CONFIGS = Path(__file__).parents[1] / "configs"
CASES = [
    ("cartpole_ppo", "CartPole-v1", range(10), 475.0),
    ("cartpole_grpo", "CartPole-v1", range(5), 450.0),
    ("pendulum_ppo", "Pendulum-v1", range(5), -200.0),
]


def test_cartpoles_budget_is_within_half_a_million_steps():
    assert total_steps(load_config(CONFIGS / "cartpole_ppo.json"), 1) <= 500_000


@pytest.mark.slow
@pytest.mark.parametrize(("config", "gym_id", "seeds", "threshold"), CASES, ids=[case[0] for case in CASES])
def test_every_seed_solves_gymnasiums_environment(config, gym_id, seeds, threshold):
    returns = {}
    for seed in seeds:
        cfg = load_config(CONFIGS / f"{config}.json").replace(**{"trainer.seed": seed, "trainer.num_eval_envs": 50})
        *_, record = train_iter(init_state(cfg), cfg)
        logs = evaluate(record["state"], cfg, num_episodes=100, env=f"gymnasium:{gym_id}")
        returns[seed] = logs["eval/avg_reward"]
        print(f"{config} seed {seed}: {gym_id} {returns[seed]:.1f} after {record['sample_step']:,} steps")
    assert min(returns.values()) >= threshold, returns
