"""Find checkpoints, and read their manifests.

A checkpoint folder has a `manifest.json` with the SHA-256 of every other file of the checkpoint. The entry
`manifest_sha256` of the manifest is the SHA-256 of all other entries of the manifest.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ecrl.errors import CheckpointError
from ecrl.storage.atomic_files import complete_folder

FORMAT = 1
"""Version number of the checkpoint format, stored in the manifest."""


def sha256_of(data: bytes | Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of bytes, or of the parts of a file, in hexadecimal."""
    digest = hashlib.sha256()
    for part in [data] if isinstance(data, bytes) else data:
        digest.update(part)
    return digest.hexdigest()


def json_bytes(data: Any) -> bytes:
    """Return JSON with sorted keys, so that equal data has equal bytes."""
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(path: str | Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder.

    Raises: CheckpointError if the manifest is missing, is damaged, or has another version of the format.
    """
    path = complete_folder(Path(path))
    if not is_file(path / "manifest.json"):
        is_run = (path / "checkpoints").is_dir()
        problem = "it is a run folder; load a folder in its checkpoints/" if is_run else "it has no manifest.json"
        raise CheckpointError(f"{path}: not a checkpoint: {problem}")
    data = read_bytes(path / "manifest.json")
    try:
        manifest = dict(json.loads(data))
        canonical = json_bytes(manifest)
        checksum, _ = manifest.pop("manifest_sha256"), dict(manifest["sha256"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}/manifest.json: damaged ({error})") from None
    if checksum != sha256_of(json_bytes(manifest)) or canonical != data:
        raise CheckpointError(f"{path}/manifest.json: damaged: its checksum or its layout is not as saved")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path}: has format {manifest['format']}, but this version of ecrl reads format {FORMAT}; use the version "
            "of ecrl that saved it"
        )
    return manifest


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise CheckpointError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raise CheckpointError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def is_file(path: Path) -> bool:
    """Return True if `path` is a file. Raise CheckpointError if its folder cannot be read."""
    try:
        return path.is_file()
    except OSError as error:  # the user has no permission to open the folder
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


def step_checkpoints(run: str | Path) -> list[Path]:
    """Return the checkpoint folders `step_<N>` of a run from oldest to newest, including damaged checkpoints."""
    folders = [p for p in (Path(run) / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdecimal()]
    return sorted(folders, key=lambda p: int(p.name.removeprefix("step_")))
