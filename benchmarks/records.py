"""Files of results: what one seed of one config learnt, `runs/<config>/<library>/<seed>.json`, measured once and kept.

A file holds all that is needed to judge and repeat it. It is fresh while the hash of its settings is that of today's,
else stale. Settings are the config without seed and names, as far as it differs from the defaults: a new key with its
default is not another config. What a default or the code was is told by the commit, which stands in the file too.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.peers.zoo import ZOO
from benchmarks.tasks import EPISODES, POINTS, TASKS, Task
from ecrl.config import load_config, total_steps
from ecrl.errors import UserError
from ecrl.report.curves import canonical, without_names
from ecrl.run.atomic_files import replace_file

SEEDS, FEW, SHORT_S = 10, 3, 600.0
"""Seeds of a config, and of one of which a seed takes longer than so many seconds."""

Row = dict[str, Any]


class Library(NamedTuple):
    """`learn` is "module:function", called with config and seed; `settings` are for the hash."""

    name: str
    learn: str
    settings: Callable[[Path], Any]
    tasks: Iterable[str]


def _own_settings(config: Path) -> Row:
    return without_names(load_config(config).model_dump(mode="json", exclude_defaults=True))


def _zoo_settings(config: Path) -> Row:
    return {"zoo": ZOO[config.stem]._asdict(), "steps": total_steps(load_config(config), 1)}


LIBRARIES = {
    "ecrl": Library("ecrl", "benchmarks.ours:learn", _own_settings, TASKS),
    "sb3": Library("Stable-Baselines3", "benchmarks.peers.sb3_zoo:learn", _zoo_settings, ZOO),
}


class Entry(NamedTuple):
    """A config as a library learns it: a line of the leaderboard."""

    task: Task
    library: str
    config: Path
    settings: Row
    hash: str

    @property
    def name(self) -> str:
        """For people.

        >>> Entry(TASKS["cartpole_ppo"], "sb3", Path(), {}, "").name
        'cartpole_ppo, Stable-Baselines3'
        """
        return f"{self.task.config}, {LIBRARIES[self.library].name}"


class Standing(NamedTuple):
    """What is known of an entry: fresh records by seed, how many files are stale, and the seeds that failed since."""

    fresh: dict[int, Row]
    stale: int
    failed: tuple[int, ...] = ()


def entries(configs: Path) -> list[Entry]:
    """Every task with every library that has settings for it, each beside its peers."""
    found = []
    for task in TASKS.values():
        for key, library in LIBRARIES.items():
            if task.config in library.tasks:
                config = configs / f"{task.config}.json"
                scored = {"env": task.env, "episodes": EPISODES[task.score], "points": POINTS}
                settings = {"library": key, "scores": scored, "settings": library.settings(config)}
                digest = hashlib.sha256(canonical(settings).encode()).hexdigest()
                found.append(Entry(task, key, config, settings, digest))
    return found


def path_of(entry: Entry, seed: int, out: Path) -> Path:
    """The file of a seed."""
    return out / "runs" / entry.task.config / entry.library / f"{seed}.json"


def standing(entry: Entry, out: Path) -> Standing:
    """What the files say."""
    fresh, stale = {}, 0
    for path in sorted(path_of(entry, 0, out).parent.glob("*.json"), key=lambda path: int(path.stem)):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON: {error}; remove it, and it is measured again") from None
        if record["hash"] == entry.hash:
            fresh[int(path.stem)] = record
        else:
            stale += 1
    told = [json.loads(path.read_text(encoding="utf-8")) for path in path_of(entry, 0, out).parent.glob("*.failed")]
    failed = {row["seed"] for row in told if row["hash"] == entry.hash}
    return Standing(fresh, stale, tuple(sorted(failed - fresh.keys())))


def wanted(fresh: dict[int, Row]) -> int:
    """How many seeds there must be, by how long those took that there are; three before that is known.

    >>> wanted({}), [wanted(dict.fromkeys(range(3), {"train_s": s})) for s in (599.0, 600.0)]
    (3, [10, 3])
    """
    return SEEDS if fresh and median(record["train_s"] for record in fresh.values()) < SHORT_S else FEW


def write(entry: Entry, seed: int, out: Path, found: Row, about: Row) -> Path:
    """Write what a seed learnt, whole or not at all."""
    path = path_of(entry, seed, out)
    head = {"name": entry.name, "seed": seed, "hash": entry.hash, "settings": entry.settings}
    data = json.dumps(head | about | found, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data.encode())
    path.with_suffix(".failed").unlink(missing_ok=True)
    return path


def write_failure(entry: Entry, seed: int, out: Path, why: str, about: Row) -> None:
    """Write that a seed failed, which the table tells until it is measured: each call tries it again."""
    path = path_of(entry, seed, out).with_suffix(".failed")
    path.parent.mkdir(parents=True, exist_ok=True)
    told = {"name": entry.name, "seed": seed, "hash": entry.hash, "failure": why}
    replace_file(path, (json.dumps(told | about, indent=1) + "\n").encode())
