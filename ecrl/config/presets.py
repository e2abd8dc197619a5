"""Find presets, which are configs that ecrl ships.

The preset `cartpole_ppo` is the file `configs/cartpole_ppo.json`.
"""

import re
from difflib import get_close_matches
from pathlib import Path

from ecrl.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def preset_folder() -> Path:
    """Return the folder of the presets: `ecrl/configs` in an installed wheel, `configs` in a checkout."""
    installed = _PACKAGE / "configs"
    return installed if installed.is_dir() else _PACKAGE.parent / "configs"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets in alphabetical order.

    >>> "cartpole_ppo" in preset_names()
    True
    """
    return tuple(sorted(path.stem for path in preset_folder().glob("*.json")))


def find_config(source: str | Path) -> Path:
    """Return the path of the config file `source`, or of the preset with this name.

    If the working directory has a file with the name of a preset, return that file.

    >>> find_config("cartpole_ppo").name, str(find_config("outputs/first/config.json"))
    ('cartpole_ppo.json', 'outputs/first/config.json')

    Raises: ConfigError if `source` is a plain word, and there is neither a preset nor a file with this name.
    """
    path, names = Path(source), preset_names()
    if isinstance(source, Path) or not re.fullmatch(r"[\w-]+", source) or path.is_file():
        return path
    if source in names:
        return preset_folder() / f"{source}.json"
    nearest = get_close_matches(source.lower(), names, n=1)
    question = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigError(f"{source}: no preset or file has this name; {question}presets: {', '.join(names) or 'none'}")
