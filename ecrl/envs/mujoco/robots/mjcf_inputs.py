"""Check the files that an MJCF file includes or reads, such as meshes and textures."""

from pathlib import Path
from xml.etree import ElementTree

from ecrl.errors import ConfigError
from ecrl.input_files import check_input, is_restricted

_FILES = ("file", *(f"file{side}" for side in ("right", "left", "up", "down", "front", "back")))
_FOLDERS = ("meshdir", "texturedir", "assetdir")
_MODELS = ("include", "model")
"""Elements whose files are MJCF files too."""


def check_mjcf_inputs(source: str, key: str) -> None:
    """Raise ConfigError that begins with `key`, if an MJCF file reads a file outside $ECRL_INPUT_FOLDERS.

    Args:
        source: path or text of the MJCF file. The files that it names are searched in its folder, or in the working
            directory for a text.
        key: config key for error messages.
    """
    if is_restricted():
        is_text = source.lstrip().startswith("<")
        _check(source if is_text else None, Path() if is_text else Path(source), key, set())


def _check(text: str | None, path: Path, key: str, seen: set[Path]) -> None:
    """Check a file with all files that it includes. `seen` lists the checked files, because files may form a loop."""
    if text is None:
        check_input(path, key)
        seen.add(path)
    try:
        root = ElementTree.fromstring(path.read_text(encoding="utf-8") if text is None else text)
    except (OSError, UnicodeDecodeError, ElementTree.ParseError) as error:
        raise ConfigError(f"{key}: cannot read {str(path)!r}: {error}") from None
    home = path.parent if text is None else path
    folders = {"", *(element.get(name, "") for element in root.iter("compiler") for name in _FOLDERS)}
    for element in root.iter():
        for name in filter(None, map(element.get, _FILES)):
            for file in {home / folder / name for folder in folders}:
                check_input(file, key)
                if element.tag in _MODELS and file.is_file() and file not in seen:
                    _check(None, file, key, seen)
