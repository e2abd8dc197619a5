"""Check the access to files that an MJCF file includes or reads, such as meshes and textures.

MuJoCo searches for files in the folder of the main file, and in the folders that `<compiler>` elements name. These
elements may also be in included files. The check therefore tries every file name in each of these folders. MuJoCo
recognises an include in an XML namespace, but the check does not. The check therefore refuses XML namespaces.
"""

from pathlib import Path
from xml.etree import ElementTree

from ecrl.config.input_files import check_input, is_restricted
from ecrl.errors import ConfigError

_ROOTS = ("mujoco", "mujocoinclude")
_FOLDERS = ("meshdir", "texturedir", "assetdir")


def check_mjcf_inputs(source: str, key: str) -> None:
    """Raise ConfigError, which names `key`, if an MJCF file reads a file outside $ECRL_INPUT_FOLDERS.

    If this variable is not set, the function does nothing. If this variable is set, files that cannot be read, plugins
    and XML namespaces also raise ConfigError, because the function cannot check them.

    Args:
        source: path or text of the MJCF file. Relative paths in the MJCF start at the folder of the file. If `source`
            is a text, relative paths start at the working directory.
        key: config key for error messages.
    """
    if not is_restricted():
        return
    if source.lstrip().startswith("<"):
        _check_model(_parsed(source, "the text", key), Path(), key, set())
    else:
        _check_file(Path(source), key, set())


def _check_file(path: Path, key: str, seen: set[Path]) -> None:
    """Check the access to a file. If it is not in `seen`, add it to `seen` and check all files that it names."""
    check_input(path, key)
    if path.resolve() not in seen:
        seen.add(path.resolve())
        _check_model(_read(path, key), path.parent, key, seen)


def _check_model(root: ElementTree.Element, home: Path, key: str, seen: set[Path]) -> None:
    """Check the access to all files that a model names. The main file of the model is in the folder `home`."""
    roots = _with_includes(root, home, key)
    folders = {"", *(part.get(name, "") for root in roots for part in root.iter("compiler") for name in _FOLDERS)}
    for part in (part for root in roots for part in root.iter() if part.tag != "include"):
        for name in (value.replace("\\", "/") for name, value in part.items() if name.startswith("file")):
            files = {home / folder / one for folder in folders for one in (name, Path(name).name)}
            for file in files:
                check_input(file, key)
            if part.tag == "model":
                for file in filter(Path.is_file, files):
                    _check_file(file, key, seen)


def _with_includes(root: ElementTree.Element, home: Path, key: str) -> list[ElementTree.Element]:
    """Return the root element of a main file and of each file that it includes, directly or indirectly."""
    roots, seen = [root], set()
    for one in roots:  # the list grows during the loop
        for name in (part.get("file", "") for part in one.iter("include")):
            path = home / name.replace("\\", "/")
            check_input(path, key)
            if path.resolve() not in seen:
                seen.add(path.resolve())
                roots.append(_read(path, key))
    return roots


def _read(path: Path, key: str) -> ElementTree.Element:
    try:
        return _parsed(path.read_text(encoding="utf-8"), repr(str(path)), key)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: cannot read {str(path)!r}: {error}") from None


def _parsed(text: str, where: str, key: str) -> ElementTree.Element:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{key}: cannot read {where}: {error}") from None
    if root.tag not in _ROOTS:
        raise ConfigError(f"{key}: the first element of {where} is <{root.tag}>, expected <mujoco>")
    for part in root.iter():
        if any("}" in name for name in (part.tag, *part.keys())):
            raise ConfigError(f"{key}: {where} has an XML namespace, in <{part.tag}>; remove the namespace")
        if part.tag == "extension":
            raise ConfigError(f"{key}: {where} has plugins, whose files cannot be checked; remove <extension>")
    return root
