"""Read and write pi0 checkpoints of the package transformers in local folders.

A checkpoint is a folder that `PI0ForConditionalGeneration.save_pretrained` wrote. ecrl runs no code from the folder,
loads no pickle and downloads nothing. The extra `vla` is required.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ecrl.errors import ConfigError, extra
from ecrl.policies.checkpoint_folder import KEY, check_weights_fit, is_finite, one_line, quiet, read_json
from ecrl.storage.atomic_files import write_folder

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".index.json", ".msgpack", ".h5", ".py")


def read_model(folder: Path) -> Any:
    """Return the model of a checkpoint, a `PI0ForConditionalGeneration` in float32 and in evaluation mode.

    Raises: ConfigError if the weights need more memory than the machine has, if a weight is missing, unknown or of
        another shape, or if a file is damaged. MissingExtraError if transformers is not installed.
    """
    with extra("vla"):
        from transformers import PI0ForConditionalGeneration
    check_weights_fit(folder)
    read: Any = PI0ForConditionalGeneration.from_pretrained
    try:
        with quiet():
            model, report = read(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # the report lists these weights
                output_loading_info=True,
            )
    except Exception as error:  # damaged files raise many types of errors
        problem = f"{str(folder)!r} cannot be loaded by transformers: {one_line(error)}"
        raise ConfigError(f"{KEY}: {problem}; copy the checkpoint again") from None
    _check_report(folder, report)
    return model.eval()


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first weight that is missing, of another shape, or unknown to the model."""
    shapes = [
        f"{name} {list(have)}, expected {list(want)} by config.json"
        for name, have, want in sorted(report["mismatched_keys"])
    ]
    problems = (
        ("lacks weights", sorted(report["missing_keys"]), "copy the checkpoint again"),
        ("has weights of another shape", shapes, "copy the checkpoint again"),
        ("has weights that pi0 lacks", sorted(report["unexpected_keys"]), "remove them, or copy the checkpoint again"),
    )
    for problem, found, advice in problems:
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise ConfigError(f"{KEY}: {str(folder)!r} {problem}: {found[0]}{more}; {advice}")


class Statistics(NamedTuple):
    """Means and standard deviations of a checkpoint's training data. Fields that the checkpoint lacks are None.

    Attributes:
        state: mean and standard deviation of the state, tuples with one entry per dimension.
        actions: mean and standard deviation of a step of an action, tuples with one entry per dimension.
    """

    state: tuple[tuple[float, ...], tuple[float, ...]] | None
    actions: tuple[tuple[float, ...], tuple[float, ...]] | None


def read_statistics(folder: Path, state: int, actions: int) -> Statistics:
    """Return the statistics in `processor_config.json` of a checkpoint. Without this file, all fields are None.

    Args:
        folder: the checkpoint.
        state: size of the state in the environment.
        actions: size of one step of an action in the environment.

    Raises: ConfigError if statistics are not a list of finite numbers, or if the length of a list differs from the size
        in the environment. Also raised if a standard deviation is not above 0, or if only the mean or only the standard
        deviation exists.
    """
    path = folder / "processor_config.json"
    data = read_json(path) if path.is_file() else {}
    return Statistics(_mean_and_std(path, data, "state", state), _mean_and_std(path, data, "actions", actions))


def _mean_and_std(
    path: Path, data: Mapping[str, Any], name: str, size: int
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the mean and the standard deviation of `name` in a file, or None if the file has neither."""
    keys = f"{name}_mean", f"{name}_std"
    absent = [key for key in keys if data.get(key) is None]
    if len(absent) == 2:
        return None
    where, advice = f"{KEY}: {str(path)!r}", "correct the file"
    if absent:
        present = keys[1 - keys.index(absent[0])]
        raise ConfigError(f"{where} has {present}, but no {absent[0]}; add it, or delete {present}")
    for key in keys:
        if not isinstance(data[key], list) or not all(map(is_finite, data[key])):
            raise ConfigError(f"{where}: {key} is not a list of finite numbers; {advice}")
        if len(data[key]) != size:
            problem = f"{key} has the length {len(data[key])}, but the environment has {size} numbers"
            raise ConfigError(f"{where}: {problem}; {advice}")
    mean, std = (tuple(map(float, data[key])) for key in keys)
    if min(std, default=1.0) <= 0.0:
        raise ConfigError(f"{where}: {keys[1]} has {min(std)}, which is not above 0; {advice}")
    return mean, std


def write_model(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that transformers loads, with new weights.

    All files of the checkpoint `source` are copied, except weights and Python code. The folder appears complete or not
    at all.

    Raises: ConfigError if the folder exists or cannot be made, if `source` cannot be read, or if its weights have other
        names or shapes.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{str(folder)!r} exists; give the path of a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be made: {one_line(error)}; give another path") from None
    model: nn.Module = read_model(source)
    own = dict(model.named_parameters())
    if unknown := sorted(own.keys() ^ weights.keys()):
        raise ConfigError(
            f"{KEY}: the weights of the run and of {str(source)!r} differ in {unknown[0]}; restore "
            "the checkpoint that the run began with"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            if own[name].shape != weight.shape:
                shapes = f"{list(weight.shape)} in the run and {list(own[name].shape)} in {str(source)!r}"
                raise ConfigError(f"{KEY}: {name} is {shapes}; restore the checkpoint that the run began with")
            own[name].copy_(weight)
    others = [p for p in source.iterdir() if p.is_file() and not p.name.endswith(_OTHER_WEIGHTS)]
    files: dict[str, Any] = {path.name: path.read_bytes() for path in others}
    with TemporaryDirectory(dir=folder.parent) as temporary, quiet():
        cast(Any, model).save_pretrained(temporary)
        files |= {path.name: path for path in Path(temporary).iterdir()}
        write_folder(folder, files)
