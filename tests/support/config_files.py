"""Config files and what reading a config warns of."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ecrl.config import Config


def write_file(folder: Path, text: str | bytes, name: str) -> Path:
    """Write a file and return its path; text is encoded as UTF-8."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def with_warnings(load: Callable[..., Config], *args: Any) -> tuple[Config, list[str]]:
    """Return the config that `load(*args)` returns, and its warnings; each must be a UserWarning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = load(*args)
    assert all(w.category is UserWarning for w in caught)
    return cfg, [str(w.message) for w in caught]
