"""The published configs learn their tasks on every seed, measured by 100 episodes with deterministic actions.

`python -m pytest tests/test_learning.py -m "slow or long" -s` prints the scores. docs/results.md has the
scores of `ecrl bench results`.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ecrl_runs import CONFIG
from benchmarks.tasks import TASKS
from ecrl.config import load_config, total_steps
from ecrl.loop.build import build
from ecrl.loop.iteration import init_state, train_iter
from ecrl.run.evaluation import evaluate

CONFIGS = Path(__file__).parents[1] / "configs"
TWINS = {"cartpole_ppo": 10, "cartpole_pqn": 10, "cartpole_grpo": 5, "pendulum_ppo": 5} | {
    "pendulum_ddpg": 3,
    "pendulum_td3": 3,
    "pendulum_sac": 3,
}
"""Numbers of seeds that are trained on the environments here and evaluated on Gymnasium's, which share no code."""
REACHES = {"point_mass_apg": 3, "point_mass_ppo": 3}
QUICK = ("cartpole_ppo",)
"""Configs that `make test` trains to the end. It also trains APG, for fewer iterations, and GRPO, in
`tests/algorithms/test_grpo.py`."""
GYMNASIUM = [  # trained on Gymnasium's own; the mean of the seeds must reach the threshold within the budget
    ("acrobot_ppo", 500_000),
    ("mountain_car_continuous_ppo", 1_000_000),
    ("lunar_lander_ppo", 3_000_000),
    ("half_cheetah_ppo", 2_000_000),
]


def threshold(config: str) -> float:
    """Score at which a config counts as learnt."""
    least = TASKS[config].threshold
    assert least is not None
    return least


def learnt(config: str, seed: int, episodes: int, env: str | None = None, **changes: Any) -> dict[str, float]:
    """Train a run and return the score of its last state; print it with steps and seconds."""
    changes = {"trainer.seed": seed, "trainer.num_eval_envs": 50} | changes
    cfg = load_config(CONFIGS / f"{config}.json").replace(**changes)
    began = time.perf_counter()
    *_, record = train_iter(init_state(cfg), cfg)
    took = time.perf_counter() - began
    eager = cfg.replace(**{"trainer.compile": "off"})  # compiling takes longer than one evaluation
    logs = evaluate(record["state"], eager, num_episodes=episodes, env=env)
    build(cfg).env.close(record["state"]["env"])
    shown = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in logs.items())
    print(f"{config} seed {seed}: {shown}  after {record['sample_step']:,} steps, {took:.0f} s")
    return logs


def test_cartpoles_budget_is_within_half_a_million_steps():
    assert total_steps(load_config(CONFIGS / "cartpole_ppo.json"), 1) <= 500_000


def one_and_every(seeds: dict[str, int]) -> list[Any]:
    """Return one seed of the configs in QUICK, which are slow, and every seed of each config, which are long."""
    first = [pytest.param(config, 1, marks=pytest.mark.slow) for config in seeds if config in QUICK]
    return first + [pytest.param(config, number, marks=pytest.mark.long) for config, number in seeds.items()]


@pytest.mark.parametrize(("config", "seeds"), one_and_every(TWINS))
def test_every_seed_solves_gymnasiums_environment(config, seeds):
    returns = [learnt(config, seed, 100, TASKS[config].env)["eval/avg_reward"] for seed in range(seeds)]
    assert min(returns) >= threshold(config), returns


@pytest.mark.parametrize(("config", "seeds"), one_and_every(REACHES))
def test_every_seed_reaches_the_goal(config, seeds):
    rates = [learnt(config, seed, 500)["eval/success_rate"] for seed in range(seeds)]
    assert min(rates) >= threshold(config), rates


@pytest.mark.slow
def test_apg_reaches_the_goal_with_a_larger_rate_and_a_quarter_of_the_iterations():
    fewer = {"trainer.iterations": 30, "algorithm.cfg.learning_rate": 0.01, "trainer.compile": "off"}
    assert learnt("point_mass_apg", 0, 100, **fewer)["eval/success_rate"] >= 0.9


@pytest.mark.long
def test_every_seed_pushes_the_cube_to_its_goal():
    rates = [learnt("push_cube_ppo", seed, 500)["eval/success_rate"] for seed in range(5)]
    assert min(rates) >= threshold("push_cube_ppo"), rates


@pytest.mark.long
@pytest.mark.parametrize(("config", "budget"), GYMNASIUM, ids=[case[0] for case in GYMNASIUM])
def test_gymnasiums_own_environments_are_learnt_within_budget(config, budget):
    assert total_steps(load_config(CONFIGS / f"{config}.json"), 1) <= budget
    returns = [learnt(config, seed, 100)["eval/avg_reward"] for seed in range(3)]
    assert sum(returns) / len(returns) >= threshold(config), returns


def curve(seed: int, form: str) -> list[float]:
    """Mean return of the last 100 episodes after each of 30 iterations."""
    keys = {"trainer.seed": seed, "trainer.compile": form, "trainer.iterations": 30}
    cfg = load_config(CONFIG).replace(**keys)
    records = train_iter(init_state(cfg), cfg)
    return [float(r["logs"]["episode_reward_avg_100"]) for r in records if r["log_type"] == "collect"]


@pytest.mark.long
def test_compiled_curves_lie_among_eager_ones():
    """Equal seeds differ only by rounding, which changes a curve no more than another seed does."""
    eager, compiled = ([curve(seed, form) for seed in range(5)] for form in ("off", "on"))
    assert [c[0] for c in compiled] == [e[0] for e in eager], "before the first update nothing differs"
    assert max(map(max, eager)) > 400.0 and max(e[0] for e in eager) < 40.0, "the band is one of learning"
    for number, (es, cs) in enumerate(zip(zip(*eager, strict=True), zip(*compiled, strict=True), strict=True)):
        spread, mean = max(es) - min(es), sum(cs) / len(cs)  # five seeds give the band to about half of its width
        assert min(es) - spread / 2 <= mean <= max(es) + spread / 2, (number, es, cs)
