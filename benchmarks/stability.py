"""Measure how often PPO collapses on continuous tasks, in ecrl and in Stable-Baselines3 with the same settings.

Start with `python -m benchmarks.stability`. The settings come from `cartpole_speed.json`: a learning rate of 1e-3,
and neither observations nor rewards are normalised. The episodes of the tasks end only at time limits. Each run has its
own process and one core. The results of a finished run are in the file
`results/runs/stability/<task>/<arm>/<seed>.json`. A run with such a file is measured again only if its settings have
changed.
"""

import hashlib
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import gymnasium
import numpy as np

from benchmarks import separate_process
from benchmarks.command_line import run_command
from benchmarks.ecrl_runs import CONFIG
from benchmarks.pairs import ROOT, Failure, available
from benchmarks.report import machine, versions
from ecrl.config import Config, load_config, total_steps
from ecrl.errors import UserError
from ecrl.report.curves import canonical_json, without_seeds_and_names
from ecrl.storage.atomic_files import replace_file

Row = dict[str, Any]
Act = Callable[[np.ndarray], np.ndarray]
"""Type of a function that maps the observations of several environments to deterministic actions."""
Report = Callable[[int, Act], None]
"""Type of a function to call before the training and after every iteration, with the env steps and the policy."""

OUT = ROOT / "benchmarks" / "results"
TASKS = ("Pendulum-v1", "Reacher-v5", "Pusher-v5")
"""Ids of Gymnasium's environments."""
SEEDS = tuple(range(10))
POINTS, EPISODES = 25, 20
"""Evaluations during a run, and episodes of an evaluation. Actions are deterministic."""


class Arm(NamedTuple):
    """Library and settings that the benchmark compares.

    Attributes:
        label: name in the table.
        library: library that trains.
        changes: changes to the config of `config`.
        other: arm of Stable-Baselines3 whose returns are the threshold of this arm.
    """

    label: str
    library: Literal["ecrl", "sb3"]
    changes: Mapping[str, Any] = MappingProxyType({})
    other: str = "sb3"


def _with_eps(eps: float) -> Row:
    """Return the changes of the config that set Adam's `eps`."""
    adam = {"name": "adam", "learning_rate": 1e-3, "kwargs": {"eps": eps}}
    return {"algorithm.cfg.learning_rate": None, "algorithm.cfg.optimizer": adam}


_FEW_ENVS = {"trainer.num_envs": 8, "trainer.iterations": 100}
ARMS = {
    "ecrl": Arm("ecrl", "ecrl"),
    "sb3": Arm("SB3", "sb3"),
    "ecrl_eps": Arm("ecrl, Adam's `eps` 1e-5 as in SB3", "ecrl", _with_eps(1e-5)),
    "sb3_eps": Arm("SB3, Adam's `eps` 1e-8 as in ecrl", "sb3", _with_eps(1e-8)),
    "ecrl_minibatch": Arm(
        "ecrl, `normalize_advantage` minibatch", "ecrl", {"algorithm.cfg.normalize_advantage": "minibatch"}
    ),
    "ecrl_critic_norm": Arm("ecrl, `critic_max_grad_norm` 0.5", "ecrl", {"algorithm.cfg.critic_max_grad_norm": 0.5}),
    "ecrl_8_envs": Arm("ecrl, 8 environments", "ecrl", _FEW_ENVS, "sb3_8_envs"),
    "sb3_8_envs": Arm("SB3, 8 environments", "sb3", _FEW_ENVS, "sb3_8_envs"),
}
COMPARED = ("ecrl", "sb3")
"""The arms that a call without arms measures."""
FEW_ENVS = ("ecrl_8_envs", "sb3_8_envs")
"""The arms with 8 instead of 32 environments."""
VARIANTS = tuple(arm for arm in ARMS if arm not in FEW_ENVS)
"""The arms with 32 environments."""


def config(task: str, arm: str, seed: int) -> Config:
    """Return the config of a run."""
    cfg = load_config(CONFIG).replace(env={"name": f"gymnasium:{task}"})
    run = {"trainer.seed": seed, "trainer.iterations": 50, "trainer.compile": "off"}
    return cfg.replace(**run).replace(**ARMS[arm].changes)


def settings_hash(task: str, arm: str) -> str:
    """Return the hash of everything that a record depends on, except the seed and the code."""
    settings = without_seeds_and_names(config(task, arm, 0).model_dump(mode="json", exclude_defaults=True))
    used = {"library": ARMS[arm].library, "settings": settings, "points": POINTS, "episodes": EPISODES}
    return hashlib.sha256(canonical_json(used).encode()).hexdigest()


def evaluations(task: str, seed: int) -> Callable[[Act], Row]:
    """Return a function that evaluates a policy on `EPISODES` episodes.

    The initial states of the episodes depend only on the task and the seed of the run, not on the library. The result
    has `return` and `std`, the mean and the standard deviation of the returns of the episodes.
    """
    envs: Any = gymnasium.make_vec(task, EPISODES, vectorization_mode="sync")
    seeds = [10_000 + EPISODES * seed + i for i in range(EPISODES)]

    def evaluate(act: Act) -> Row:
        obs, _ = envs.reset(seed=seeds)
        returns, ended = np.zeros(EPISODES), np.zeros(EPISODES, bool)
        while not ended.any():
            obs, reward, _, ended, _ = envs.step(act(obs))
            returns += reward
        assert ended.all(), "the episodes of the tasks have equal lengths"
        return {"return": float(returns.mean()), "std": float(returns.std())}

    return evaluate


def learn(task: str, arm: str, seed: int) -> Row:
    """Train one run, and evaluate the policy before the training and at `POINTS` points of the training.

    Returns: `curve` has a row per evaluation, with the env steps, and the mean and standard deviation of the returns.
        `wall_s` is the seconds of training and evaluations.
    """
    cfg, started = config(task, arm, seed), time.time()
    curve, evaluate = [], evaluations(task, seed)
    between = total_steps(cfg, 1) // POINTS

    def report(steps: int, act: Act) -> None:
        if steps % between == 0:
            curve.append({"steps": steps} | evaluate(act))

    if ARMS[arm].library == "sb3":
        from benchmarks.other_libraries.sb3_stability import train

        train(cfg, report)
    else:
        _train(cfg, report)
    return {"curve": curve, "wall_s": round(time.time() - started, 1)}


def _train(cfg: Config, report: Report) -> None:
    import torch

    from ecrl import init_state, train_iter
    from ecrl.loop.build import build
    from ecrl.policies import policy_params

    run, state = build(cfg), init_state(cfg)
    low, high = (np.array(bound, np.float32) for bound in (run.env.action_space.low, run.env.action_space.high))  # pyright: ignore

    def act_with(state: Any, obs: np.ndarray) -> np.ndarray:
        params = policy_params(state)
        with torch.no_grad():
            _, out = run.policy.act(params, run.policy.init_carry(params, len(obs)), torch.tensor(obs).float(), None)
        return cast(torch.Tensor, out["action"]).numpy().clip(low, high)

    report(0, partial(act_with, state))
    for record in train_iter(state, cfg):
        if record["log_type"] == "train":
            report(record["sample_step"], partial(act_with, record["state"]))


def is_collapsed(curve: list[Row]) -> bool:
    """Return True if a run lost more than half of its gain by its end, or ended worse than its untrained policy.

        last < (untrained + best) / 2

    `best` is the highest return of the run, including the return of the untrained policy in the first row. `best` is
    therefore not below `untrained`, and a run that ends worse than its untrained policy fulfils the inequality.

    >>> [is_collapsed([{"return": float(x)} for x in returns]) for returns in ([-9, -1, -4], [-9, -1, -6], [-5, -6])]
    [False, True, True]
    """
    returns = [row["return"] for row in curve]
    return returns[-1] < (returns[0] + max(returns)) / 2.0


def is_far_below_best(curve: list[Row]) -> bool:
    """Return True if a run collapsed, and its fall is larger than the spread of single episodes.

        best - last > std of the returns of the untrained policy's episodes

    A run that hardly learns collapses by a small random fall. This function leaves out such runs.

    >>> curve = [{"return": -9.0, "std": 2.0}, {"return": -8.5}, {"return": -9.5}]
    >>> is_collapsed(curve), is_far_below_best(curve), is_far_below_best([*curve, {"return": -11.0}])
    (True, False, True)
    """
    returns = [row["return"] for row in curve]
    return is_collapsed(curve) and max(returns) - returns[-1] > curve[0]["std"]


def falls_below_untrained(curve: list[Row]) -> bool:
    """Return True if some evaluation is far below the untrained policy, even if the run recovers later.

        lowest < untrained - std of the returns of the untrained policy's episodes

    >>> curve = [{"return": -9.0, "std": 2.0}, {"return": -10.5}, {"return": -5.0}]
    >>> falls_below_untrained(curve), falls_below_untrained([*curve, {"return": -11.5}, {"return": -5.0}])
    (False, True)
    """
    return min(row["return"] for row in curve) < curve[0]["return"] - curve[0]["std"]


def path_of(task: str, arm: str, seed: int, out: Path = OUT) -> Path:
    """Return the path of the result file of a run."""
    return out / "runs" / "stability" / task / arm / f"{seed}.json"


def records(task: str, arm: str, out: Path = OUT) -> dict[int, Row]:
    """Read the result files of an arm, by seed. Ignore files whose settings differ from the present settings."""
    rows = {int(path.stem): json.loads(path.read_text()) for path in path_of(task, arm, 0, out).parent.glob("*.json")}
    return {seed: rows[seed] for seed in sorted(rows) if rows[seed]["hash"] == settings_hash(task, arm)}


def measure(task: str, arm: str, seed: int, core: int, out: Path) -> None:
    """Train one run in a separate process on one core, and write the result file."""
    known = versions()
    args: Row = {"task": task, "arm": arm, "seed": seed}
    function = "benchmarks.stability:learn"
    about = {
        **args,
        "hash": settings_hash(task, arm),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *separate_process.command(function, args, [core])]),
        "commit": known.pop("ecrl"),
        "machine": machine([core]),
        "versions": known,
    }
    row = separate_process.run_in_process(function, args, [core])
    path = path_of(task, arm, seed, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(about | row, indent=1) + "\n").encode())
    end = f"return {row['curve'][-1]['return']:.4g}{', collapsed' if is_collapsed(row['curve']) else ''}"
    print(f"{task}, {arm}, seed {seed}: {end}, {row['wall_s']:.0f} s", flush=True)


def steps_to(curve: list[Row], threshold: float) -> float:
    """Return the env steps of the first evaluation at or above a return, or infinity.

    >>> steps_to([{"steps": 0, "return": -9.0}, {"steps": 8, "return": -3.0}], -3.0)
    8
    """
    return next((row["steps"] for row in curve if row["return"] >= threshold), inf)


def steps_to_stay(curve: list[Row], threshold: float) -> float:
    """Return the env steps of the first evaluation after which no evaluation is below a return, or infinity.

    >>> curve = [{"steps": steps, "return": x} for steps, x in ((0, -9.0), (8, -3.0), (16, -5.0), (24, -2.0))]
    >>> steps_to_stay(curve, -5.0), steps_to_stay(curve, -4.0), steps_to_stay(curve, -1.0)
    (8, 24, inf)
    """
    steps = inf
    for row in reversed(curve):
        if row["return"] < threshold:
            break
        steps = row["steps"]
    return steps


def table(
    tasks: Sequence[str] = TASKS,
    arms: Sequence[str] = COMPARED,
    seeds: Sequence[int] = SEEDS,
    out: Path = OUT,
) -> str:
    """Return a Markdown table with a row per task and arm that has result files for some of the seeds.

    The columns `untrained` and `last` are medians of the returns over the seeds. The last two columns are the medians
    of `steps_to` and `steps_to_stay`. Their threshold is the median of the last returns of all seeds of `Arm.other`. A
    run that does not reach the threshold counts as infinity.
    """
    lines = [
        "| task | library | seeds | collapsed | far below best | fell below untrained "
        "| untrained | last | env steps to SB3's return | env steps until it stays |",
        f"|{'---|' * 10}",
    ]
    for task in tasks:
        for arm in arms:
            others = records(task, ARMS[arm].other, out).values()
            threshold = median(row["curve"][-1]["return"] for row in others) if others else inf
            curves = [row["curve"] for seed, row in records(task, arm, out).items() if seed in seeds]
            if curves:
                checks = (is_collapsed, is_far_below_best, falls_below_untrained)
                untrained, last = (median(curve[i]["return"] for curve in curves) for i in (0, -1))
                steps = [median(f(curve, threshold) for curve in curves) for f in (steps_to, steps_to_stay)]
                cells = [f"`{task}`", ARMS[arm].label, str(len(curves)), *(str(sum(map(f, curves))) for f in checks)]
                cells += [f"{untrained:.1f}", f"{last:.1f}", *("" if x == inf else f"{x:,.0f}" for x in steps)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(
    tasks: tuple[str, ...] = TASKS,
    arms: tuple[str, ...] = COMPARED,
    seeds: tuple[int, ...] = SEEDS,
    out: Path = OUT,
) -> bool:
    """Train every run that has no result file for the present settings, one run per core. Print the table.

    Args:
        tasks: ids of the tasks.
        arms: names of the arms.
        seeds: the seeds of each arm.
        out: folder of the results.

    Returns: True if no run failed.
    """
    for name, chosen, known in (("tasks", tasks, TASKS), ("arms", arms, tuple(ARMS))):
        if unknown := [one for one in chosen if one not in known]:
            raise UserError(f"--{name} {unknown[0]}: unknown; known: {', '.join(known)}")
    cores: SimpleQueue[int] = SimpleQueue()
    for core in available():
        cores.put(core)

    def one(job: tuple[str, str, int]) -> bool:
        core = cores.get()
        try:
            measure(*job, core, out)
            return True
        except Failure as failure:
            print(f"{job[0]}, {job[1]}, seed {job[2]}: {failure}", flush=True)
            return False
        finally:
            cores.put(core)

    jobs = [(task, arm, seed) for seed in seeds for task in tasks for arm in arms]
    jobs = [job for job in jobs if job[2] not in records(job[0], job[1], out)]
    with ThreadPoolExecutor(len(available())) as pool:
        succeeded = all(list(pool.map(one, jobs)))
    print(table(tasks, arms, seeds, out))
    return succeeded


def main() -> None:
    """Run the command line (see `run_command`)."""
    run_command(run, "python -m benchmarks.stability")


if __name__ == "__main__":
    main()
