"""Measure how far reinforcement learning improves a clone of demonstrations.

Start with `python -m benchmarks.clones --task TASK`. For each seed, a scripted expert records demonstrations, and the
arm `clone` learns from the demonstrations with `bc`. Each other arm continues from the clone. Each run has its own
process, one core, and an empty compile cache. The results of a finished run are in the file
`results/runs/<task>/<arm>/<seed>.json`. A run with such a file is measured again only if its settings have changed. The
arm `clone` also runs again if another arm needs the clone of a seed, but its run folder is missing.
"""

import hashlib
import json
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any, Literal, NamedTuple

from benchmarks import separate_process
from benchmarks.command_line import run_command
from benchmarks.pairs import ROOT, Failure, available
from benchmarks.report import machine, versions
from benchmarks.tasks import CONFIGS
from ecrl.config import Config, load_config
from ecrl.errors import UserError
from ecrl.report.curves import canonical_json, without_seeds_and_names
from ecrl.storage.atomic_files import replace_file

OUT = ROOT / "benchmarks" / "results"
WORK = ROOT / "build" / "clones"
EPISODES = 500
SWAP = "env.cfg.extensions.swap_instructions"
Row = dict[str, Any]


class Arm(NamedTuple):
    """Training that the benchmark compares: a config, its changed keys, and the label of the arm in the table.

    Every arm except `clone` continues from the clone of the same seed.
    """

    config: str
    changes: Row
    label: str


class Task(NamedTuple):
    """Task of the benchmark: the demonstrations of a scripted expert, and the arms to train.

    Attributes:
        demos: number of recorded episodes.
        expert: settings of the expert.
        has_goals: True if instructions name a goal, so that swapped instructions test if the policy reads instructions.
        arms: the arms by name. `clone` is the first.
    """

    demos: int
    expert: Row
    has_goals: bool
    arms: dict[str, Arm]


TASKS = {
    "reach_color": Task(
        300,
        {"bias": 0.05, "noise": 0.1},
        True,
        {
            "clone": Arm("reach_color_bc", {}, "cloning"),
            "grpo": Arm("reach_color_grpo", {}, "cloning, then GRPO"),
            "grpo_kl": Arm(
                "reach_color_grpo", {"algorithm.cfg.kl_coef": 0.02}, "cloning, then GRPO with `kl_coef` 0.02"
            ),
            "ppo": Arm("reach_color_ppo", {}, "cloning, then PPO"),
            "clone_more": Arm(  # takes about the time of `grpo`
                "reach_color_bc",
                {"trainer.iterations": 250, "trainer.init_from": "clone"},
                "cloning, then more cloning",
            ),
        },
    ),
    "push_cube_pixels": Task(
        400,
        {"noise": 0.1},
        False,
        {
            "clone": Arm("push_cube_pixels_bc", {}, "cloning"),
            "grpo": Arm("push_cube_pixels_grpo", {}, "cloning, then GRPO"),
        },
    ),
}
TaskName = Literal["reach_color", "push_cube_pixels"]


def config(arm: Arm, seed: int, folder: Path) -> Config:
    """Return the config of an arm for a seed, with the demonstrations and the clone in `folder`."""
    cfg = load_config(CONFIGS / f"{arm.config}.json").replace(**arm.changes, **{"trainer.seed": seed})
    if cfg.algorithm.name == "bc":
        cfg = cfg.replace(**{"algorithm.cfg.demos": str(folder / "demos.safetensors")})
    return cfg if cfg.trainer.init_from is None else cfg.replace(**{"trainer.init_from": str(folder / "clone")})


def settings_hash(task: str, arm: str) -> str:
    """Return the hash of everything that a record depends on, except the seed and the code."""
    about = TASKS[task]
    arms = about.arms
    used: Row = {"demos": about.demos, "expert": about.expert, "episodes": EPISODES, "settings": _settings(arms[arm])}
    if arm != "clone":
        used["clone"] = _settings(arms["clone"])
    return hashlib.sha256(canonical_json(used).encode()).hexdigest()


def _settings(arm: Arm) -> Row:
    cfg = config(arm, 0, Path("folder"))
    return without_seeds_and_names(cfg.model_dump(mode="json", exclude_defaults=True))


def learn(task: str, arm: str, seed: int, started: float) -> Row:
    """Train one arm. The arm `clone` first records the demonstrations, and saves its run for the other arms.

    Returns: a row with the success rate `success`, and the seconds `train_s` from `started` to the end of training. The
        seconds include imports and compiling. If the task has goals, `swapped` is the success rate with swapped
        instructions. If the arm is `clone`, `demonstrations` is the success rate of the demonstrations.
    """
    from ecrl import evaluate, init_state, record_demonstrations, train

    about, folder = TASKS[task], WORK / task / str(seed)
    cfg, row = config(about.arms[arm], seed, folder), {}
    if arm == "clone":
        folder.mkdir(parents=True, exist_ok=True)
        demos = record_demonstrations(cfg, folder / "demos.safetensors", about.demos, expert=about.expert, seed=seed)
        row["demonstrations"] = demos.success_rate
    state, _ = train(init_state(cfg), cfg, folder / "clone" if arm == "clone" else None, progress=False)
    row["train_s"] = round(time.time() - started, 1)
    configs = {"success": cfg} | ({"swapped": cfg.replace(**{SWAP: True})} if about.has_goals else {})
    logs = {name: evaluate(state, changed, EPISODES) for name, changed in configs.items()}
    return row | {name: round(float(log["eval/success_rate"]), 4) for name, log in logs.items()}


def path_of(task: str, arm: str, seed: int, out: Path = OUT) -> Path:
    """Return the path of the result file of a run."""
    return out / "runs" / task / arm / f"{seed}.json"


def records(task: str, arm: str, out: Path = OUT) -> dict[int, Row]:
    """Read the result files of an arm, by seed. Ignore files whose settings differ from the present settings."""
    rows = {int(path.stem): json.loads(path.read_text()) for path in path_of(task, arm, 0, out).parent.glob("*.json")}
    return {seed: rows[seed] for seed in sorted(rows) if rows[seed]["hash"] == settings_hash(task, arm)}


def measure(task: str, arm: str, seed: int, core: int, out: Path) -> None:
    """Train one arm in a separate process on one core, and write the result file."""
    known = versions()
    with tempfile.TemporaryDirectory(prefix="ecrl_results_") as cache:
        args: Row = {"task": task, "arm": arm, "seed": seed}
        function = "benchmarks.clones:learn"
        about = {
            **args,
            "hash": settings_hash(task, arm),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", *separate_process.command(function, args, [core])]),
            "commit": known.pop("ecrl"),
            "machine": machine([core]),
            "versions": known,
        }
        running = separate_process.begin(
            function, args | {"started": time.time()}, [core], {"TORCHINDUCTOR_CACHE_DIR": cache}
        )
        try:
            running.process.wait()
            row = separate_process.result(running)
        finally:
            separate_process.stop(running)
    path = path_of(task, arm, seed, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(about | row, indent=1) + "\n").encode())
    rates = ", ".join(f"{name} {row[name]:.3f}" for name in ("success", "swapped") if name in row)
    print(f"{arm}, seed {seed}: {rates}, {row['train_s']:.0f} s")


def table(task: str, out: Path = OUT) -> str:
    """Return a Markdown table with a row per arm: the success rates of its seeds in order, and the median minutes."""
    rates = {"success": "success of each seed"}
    if TASKS[task].has_goals:
        rates["swapped"] = "with swapped instructions"
    lines = [f"| policy | {' | '.join(rates.values())} | minutes |", f"|---|{'---|' * len(rates)}---|"]
    for arm, about in TASKS[task].arms.items():
        rows = list(records(task, arm, out).values())
        if rows:
            cells = [", ".join(f"{row[name]:.2f}" for row in rows) for name in rates]
            minutes = median(row["train_s"] for row in rows) / 60.0
            lines.append(f"| {about.label} | {' | '.join(cells)} | {minutes:.1f} |")
    return "\n".join(lines)


def run(task: TaskName, arms: tuple[str, ...] = (), seeds: tuple[int, ...] = (0, 1, 2, 3, 4), out: Path = OUT) -> bool:
    """Train every arm and seed that has no result file for the present settings, one run per core. Print the table.

    Args:
        task: name of the task.
        arms: names of the arms; all arms of the task if empty.
        seeds: the seeds of each arm.
        out: folder of the results.

    Returns: True if no run failed.
    """
    known = TASKS[task].arms
    arms = arms or tuple(known)
    if unknown := [arm for arm in arms if arm not in known]:
        raise UserError(f"--arms {unknown[0]}: {task} has no such arm; known: {', '.join(known)}")
    cores: SimpleQueue[int] = SimpleQueue()
    for core in available():
        cores.put(core)

    def one(job: tuple[str, int]) -> bool:
        core = cores.get()
        try:
            measure(task, *job, core, out)
            return True
        except Failure as failure:
            print(f"{job[0]}, seed {job[1]}: {failure}")
            return False
        finally:
            cores.put(core)

    def all_of(jobs: Sequence[tuple[str, int]]) -> bool:
        with ThreadPoolExecutor(cores.qsize()) as pool:
            return all(list(pool.map(one, jobs)))

    done = records(task, "clone", out)
    clones = [("clone", seed) for seed in seeds if seed not in done or _needs_clone(task, seed, arms, out)]
    for _, seed in clones:
        shutil.rmtree(WORK / task / str(seed), ignore_errors=True)
    rest = [(arm, seed) for arm in arms if arm != "clone" for seed in seeds if seed not in records(task, arm, out)]
    succeeded = all_of(clones) and all_of(rest)
    print(table(task, out))
    return succeeded


def _needs_clone(task: str, seed: int, arms: Sequence[str], out: Path) -> bool:
    """Return True if an arm other than `clone` has no result file for this seed, and the clone is missing."""
    missing = any(arm != "clone" and seed not in records(task, arm, out) for arm in arms)
    return missing and not (WORK / task / str(seed) / "clone" / "config.json").exists()


def main() -> None:
    """Run the command line (see `run_command`)."""
    run_command(run, "python -m benchmarks.clones")


if __name__ == "__main__":
    main()
