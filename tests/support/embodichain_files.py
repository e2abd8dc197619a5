"""Config files of EmbodiChain's releases, which lie in `tests/config/embodichain_files`."""

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from ecrl.config.files import read

FILES = Path(__file__).parents[1] / "config" / "embodichain_files"
ENV_NAMES = ("gym_config.json", "env.json")
"""Names of the files that `trainer.gym_config` names."""


def plain(path: str) -> dict[str, Any]:
    """Read a file."""
    return read(FILES / path)


def gym_file_of(train: str) -> str | None:
    """Return the newest file of the same task that a release up to the train file's has, or None."""
    release, task, _ = train.split("/")
    known = sorted(p.relative_to(FILES).as_posix() for name in ENV_NAMES for p in FILES.glob(f"v*/{task}/{name}"))
    return max((path for path in known if path.split("/")[0] <= release), default=None)


def place(folder: Path, train: str, gym: str | None) -> Path:
    """Copy a train file to `folder`, and the other file to the path that the train file names. Return the train file.

    Files that differ only in their format are kept once. So a JSON file is written as YAML if the train file says so.
    """
    name = plain(train)["trainer"].get("gym_config")
    if name is not None and gym is not None:
        target = folder / name
        target.parent.mkdir(parents=True)
        if target.suffix == ".yaml":
            target.write_text(yaml.safe_dump(json.loads((FILES / gym).read_text())))
        else:
            shutil.copy(FILES / gym, target)
    return Path(shutil.copy(FILES / train, folder))
