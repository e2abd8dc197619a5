"""ecrl as a contestant: whole iterations of `train_iter`, as users run them."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.learning import Report, Row, followed
from benchmarks.other_libraries import SOLVED, STEPS, as_work, iterations_per_call
from benchmarks.pairs import ROOT
from benchmarks.tasks import Task, task_of, with_arm, without_memory
from ecrl import Config, evaluate, init_state, load_config, train_iter
from ecrl.algorithms import Run
from ecrl.config import total_steps
from ecrl.loop.build import build, form_in_use
from ecrl.loop.iteration import first_state
from ecrl.loop.iteration import iterations as run_iterations

CONFIG = ROOT / "benchmarks" / "cartpole_speed.json"
"""PPO on CartPole with the settings of the other libraries. `configs/cartpole_ppo.json` has other settings."""


def averages(cfg: Config) -> Iterator[float]:
    """Train with a config. For each `collect` record, yield the mean return of the last 100 episodes."""
    yield from _averages_of(build(cfg), cfg)


def _averages_of(run: Run, cfg: Config) -> Iterator[float]:
    for record in run_iterations(run, first_state(run, cfg), cfg):
        if record["log_type"] == "collect":
            yield float(record["logs"]["episode_reward_avg_100"])


def iterations(num_envs: int, **keys: Any) -> Iterator[float]:
    """Train CartPole PPO with 128 steps per iteration and 4 minibatches per epoch, and yield the values of `averages`.

    Like rejax, ecrl runs `iterations_per_call` iterations in one call. `keys` are further config keys, with "__"
    instead of a dot.
    """
    log_freq = iterations_per_call(num_envs)
    sizes = {"trainer.num_envs": num_envs, "trainer.buffer_size": STEPS}
    sizes |= {"trainer.log_freq": log_freq, "trainer.iterations": log_freq * 10**6}
    other_keys = {name.replace("__", "."): value for name, value in keys.items()}
    yield from averages(
        load_config(CONFIG).replace(**sizes, **{"algorithm.cfg.batch_size": num_envs * STEPS // 4, **other_keys})
    )


def make(num_envs: int, **keys: Any) -> Callable[[], int]:
    """Return a function that runs `iterations_per_call` iterations, and returns their number of environment steps."""
    return as_work(iterations(num_envs, **keys), iterations_per_call(num_envs) * num_envs * STEPS)


def solve(seed: int, started: float, compile: str) -> dict[str, Any]:
    """Train CartPole PPO for the whole budget, and measure the time until the task is solved.

    Returns: `solved_s` and `steps` are the seconds from `started` and the env steps until CartPole is solved. If the
        run does not solve CartPole, they are None and 0. `budget_s` is the seconds from `started` to the end of
        training. `form` is the result of `form_in_use`.
    """
    cfg = load_config(CONFIG).replace(**{"trainer.seed": seed, "trainer.compile": compile})
    run, solved, steps = build(cfg), None, 0
    for number, average in enumerate(_averages_of(run, cfg)):
        if solved is None and average >= SOLVED:
            solved, steps = time.time() - started, (number + 1) * cfg.trainer.num_envs * STEPS
    return {"solved_s": solved, "steps": steps, "budget_s": time.time() - started, "form": form_in_use(run)}


def learn(config: str, seed: int, started: float | None = None) -> Row:
    """Train a config for its whole budget and return its learning curve."""
    return _learn(load_config(config), task_of(config), seed, started)


def learn_without_memory(config: str, seed: int, started: float | None = None) -> Row:
    """Train a config with feed-forward networks in place of its recurrent networks, and return its learning curve."""
    return _learn(without_memory(load_config(config)), task_of(config), seed, started)


def learn_with_panda(config: str, seed: int, started: float | None = None) -> Row:
    """Train a config with the arm `example:panda`, and return its learning curve."""
    return _learn(with_arm(load_config(config), "panda"), task_of(config), seed, started)


def learn_with_so101(config: str, seed: int, started: float | None = None) -> Row:
    """Train a config with the arm `example:so101`, and return its learning curve."""
    return _learn(with_arm(load_config(config), "so101"), task_of(config), seed, started)


def learn_with_ur10(config: str, seed: int, started: float | None = None) -> Row:
    """Train a config with the arm `example:ur10` and a gripper, and return its learning curve."""
    return _learn(with_arm(load_config(config), "ur10"), task_of(config), seed, started)


def _learn(cfg: Config, task: Task, seed: int, started: float | None) -> Row:
    cfg = cfg.replace(**{"trainer.seed": seed, "trainer.num_eval_envs": 50})
    names = {"eval/avg_reward": "return", "eval/success_rate": "success", "eval/avg_length": "length"}

    def train(report: Report) -> None:
        for record in train_iter(init_state(cfg), cfg):
            state = record["state"]

            def scores(episodes: int, state: Any = state) -> Row:
                logs = evaluate(state, cfg, episodes, task.env)
                return {short: logs[name] for name, short in names.items() if name in logs}

            if record["log_type"] == "train":
                report(record["sample_step"], scores)

    return followed(train, task, total_steps(cfg, 1), started)
