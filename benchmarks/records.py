"""Read and write the result files `runs/<config>/<library>/<seed>.json`. A file has the learning curve of one seed.

A file has everything needed to judge and repeat the measurement. A file is fresh if its hash equals the hash of the
present settings, else stale. The settings are the config's differences from the defaults, without seed and names, so a
new key with its default does not change the hash. The commit in the file identifies the code and the defaults.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.other_libraries.zoo import ZOO
from benchmarks.tasks import ARMS, EPISODES, MEMORY, MINATAR_PPO, POINTS, TASKS, Task, with_arm, without_memory
from ecrl.config import Config, load_config, total_steps
from ecrl.errors import UserError
from ecrl.report.curves import canonical_json, without_seeds_and_names
from ecrl.storage.atomic_files import replace_file

SEEDS, FEW, SHORT_S = 10, 3, 600.0
"""Number of seeds per config, number of seeds per slow config, and minimum training seconds of a slow config."""

Row = dict[str, Any]


class Library(NamedTuple):
    """A library: `learn` is "module:function", called with config and seed; `settings` returns the values to hash.

    `packages` are the packages that `learn` needs.
    """

    name: str
    learn: str
    settings: Callable[[Path], Any]
    tasks: Iterable[str]
    packages: tuple[str, ...] = ()


def _settings(cfg: Config) -> Row:
    return without_seeds_and_names(cfg.model_dump(mode="json", exclude_defaults=True))


def _own_settings(config: Path) -> Row:
    return _settings(load_config(config))


def _settings_without_policy(config: Path) -> Row:
    """Return the settings for rejax, which has the networks of `rejax_minatar` in place of the policy's networks."""
    return {section: value for section, value in _own_settings(config).items() if section != "policy"}


def _settings_without_memory(config: Path) -> Row:
    return _settings(without_memory(load_config(config)))


def _settings_with(arm: str, config: Path) -> Row:
    return _settings(with_arm(load_config(config), arm))


def _zoo_settings(config: Path) -> Row:
    return {"zoo": ZOO[config.stem]._asdict(), "steps": total_steps(load_config(config), 1)}


LIBRARIES = {
    "ecrl": Library("ecrl", "benchmarks.ecrl_runs:learn", _own_settings, TASKS),
    "without_memory": Library(
        "ecrl, without memory", "benchmarks.ecrl_runs:learn_without_memory", _settings_without_memory, MEMORY
    ),
    **{
        arm: Library(
            f"ecrl, example:{arm}",
            f"benchmarks.ecrl_runs:learn_with_{arm}",
            partial(_settings_with, arm),
            ("push_cube_ppo",),
            ("cmeel",),  # part of example-robot-data
        )
        for arm in ARMS
    },
    "rejax": Library(
        "rejax", "benchmarks.other_libraries.rejax_learning:learn", _settings_without_policy, MINATAR_PPO, ("rejax",)
    ),
    "sb3_minatar": Library(
        "Stable-Baselines3, same settings",
        "benchmarks.other_libraries.sb3_minatar:learn",
        _own_settings,
        ("minatar_seaquest_ppo",),
        ("stable_baselines3", "minatar"),
    ),
    "sb3": Library("Stable-Baselines3", "benchmarks.other_libraries.sb3_zoo:learn", _zoo_settings, ZOO),
}


class Entry(NamedTuple):
    """A config and a library: one line of the leaderboard."""

    task: Task
    library: str
    config: Path
    settings: Row
    hash: str

    @property
    def name(self) -> str:
        """Display name of the entry.

        >>> Entry(TASKS["cartpole_ppo"], "sb3", Path(), {}, "").name
        'cartpole_ppo, Stable-Baselines3'
        """
        return f"{self.task.config}, {LIBRARIES[self.library].name}"


class Standing(NamedTuple):
    """The state of an entry: fresh records by seed, the number of stale files, and the seeds that failed."""

    fresh: dict[int, Row]
    stale: int
    failed: tuple[int, ...] = ()


def entries(configs: Path) -> list[Entry]:
    """List an entry for each task and each library whose `tasks` contain the config. Entries are sorted by task."""
    results = []
    for task in TASKS.values():
        for key, library in LIBRARIES.items():
            if task.config in library.tasks:
                config = configs / f"{task.config}.json"
                scored = {"env": task.env, "episodes": EPISODES[task.score], "points": POINTS}
                settings = {"library": key, "scores": scored, "settings": library.settings(config)}
                digest = hashlib.sha256(canonical_json(settings).encode()).hexdigest()
                results.append(Entry(task, key, config, settings, digest))
    return results


def path_of(entry: Entry, seed: int, out: Path) -> Path:
    """Return the path of the result file of a seed."""
    return out / "runs" / entry.task.config / entry.library / f"{seed}.json"


def standing(entry: Entry, out: Path) -> Standing:
    """Read the state of an entry from its files. Raise UserError for a result file that is not JSON."""
    fresh, stale = {}, 0
    for path in sorted(path_of(entry, 0, out).parent.glob("*.json"), key=lambda path: int(path.stem)):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON: {error}; remove it to measure it again") from None
        if record["hash"] == entry.hash:
            fresh[int(path.stem)] = record
        else:
            stale += 1
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in path_of(entry, 0, out).parent.glob("*.failed")]
    failed = {row["seed"] for row in failures if row["hash"] == entry.hash}
    return Standing(fresh, stale, tuple(sorted(failed - fresh.keys())))


def num_seeds(fresh: dict[int, Row]) -> int:
    """Return the required number of seeds: 10 if the median training time of `fresh` is below `SHORT_S`, else 3.

    >>> num_seeds({}), [num_seeds(dict.fromkeys(range(3), {"train_s": s})) for s in (599.0, 600.0)]
    (3, [10, 3])
    """
    return SEEDS if fresh and median(record["train_s"] for record in fresh.values()) < SHORT_S else FEW


def write(entry: Entry, seed: int, out: Path, results: Row, about: Row) -> Path:
    """Write the record of a seed atomically."""
    path = path_of(entry, seed, out)
    head = {"name": entry.name, "seed": seed, "hash": entry.hash, "settings": entry.settings}
    data = json.dumps(head | about | results, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data.encode())
    path.with_suffix(".failed").unlink(missing_ok=True)
    return path


def write_failure(entry: Entry, seed: int, out: Path, why: str, about: Row) -> None:
    """Record that a seed failed. The table shows the failure until a later call measures the seed."""
    path = path_of(entry, seed, out).with_suffix(".failed")
    path.parent.mkdir(parents=True, exist_ok=True)
    failures = {"name": entry.name, "seed": seed, "hash": entry.hash, "failure": why}
    replace_file(path, (json.dumps(failures | about, indent=1) + "\n").encode())
