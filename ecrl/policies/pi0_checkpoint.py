"""Read and write pi0 checkpoints of the package transformers, from local folders only.

A checkpoint is a folder that `PI0ForConditionalGeneration.save_pretrained` wrote. No code and no pickle of the folder
is run, and nothing is downloaded. The extra `vla` is required.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ecrl.errors import ConfigError, extra
from ecrl.spaces import MultiDiscrete
from ecrl.storage.atomic_files import write_folder

_KEY = "policy.vla.model_path"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".safetensors", ".index.json", ".msgpack", ".h5", ".py")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and the warnings of transformers. Errors of ecrl report what is wrong."""
    from transformers.utils import logging as logs

    was_enabled, verbosity = logs.is_progress_bar_enabled(), logs.get_verbosity()
    logs.disable_progress_bar()
    logs.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if was_enabled:
            logs.enable_progress_bar()


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raise ConfigError if the file holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}: {str(path)!r} cannot be read: {_one_line(error)}; copy it again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{_KEY}: {str(path)!r} is not a JSON object; copy it again")
    return data


def check_folder(model_path: str | None) -> Path:
    """Return the folder of a pi0 checkpoint. Raise ConfigError if there is none, or one of another architecture."""
    advice = "give the folder that save_pretrained of a pi0 model wrote"
    if model_path is None:
        raise ConfigError(f"{_KEY}: absent, but backend pi0 reads a checkpoint; {advice}")
    folder = Path(model_path)
    if not folder.is_dir():
        raise ConfigError(f"{_KEY}: no such folder {model_path!r}; {advice}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{_KEY}: {model_path!r} has no config.json; {advice}")
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "pi0":
        raise ConfigError(f"{_KEY}: {model_path!r} is a checkpoint of {kind!r}, expected 'pi0'; {advice}")
    return folder


def read_model(folder: Path) -> Any:
    """Return the model of a checkpoint, a `PI0ForConditionalGeneration` in float32 and in evaluation mode.

    Raises: ConfigError if a weight is missing, unknown or of another shape, or if a file is damaged. MissingExtraError
        if transformers is not installed.
    """
    with extra("vla"):
        from transformers import PI0ForConditionalGeneration
    read: Any = PI0ForConditionalGeneration.from_pretrained
    try:
        with _quiet():
            model, report = read(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # the report names them
                output_loading_info=True,
            )
    except Exception as error:  # damaged files raise errors of many kinds
        problem = f"{str(folder)!r} cannot be loaded by transformers: {_one_line(error)}"
        raise ConfigError(f"{_KEY}: {problem}; copy the checkpoint again") from None
    _check_report(folder, report)
    return model.eval()


def _check_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first weight that is missing, of another shape, or unknown to the model."""
    shapes = [
        f"{name} of shape {list(have)}, but config.json has {list(want)}"
        for name, have, want in sorted(report["mismatched_keys"])
    ]
    problems = (
        ("lacks the weights", sorted(report["missing_keys"]), "copy the checkpoint again"),
        ("has the weights", shapes, "copy the checkpoint again"),
        ("has weights that pi0 lacks,", sorted(report["unexpected_keys"]), "remove them, or copy the checkpoint again"),
    )
    for problem, found, advice in problems:
        if found:
            more = f" and {len(found) - 1} others" if len(found) > 1 else ""
            raise ConfigError(f"{_KEY}: {str(folder)!r} {problem} {found[0]}{more}; {advice}")


class Statistics(NamedTuple):
    """Means and standard deviations of the data that a checkpoint was trained on. None if the checkpoint has none.

    Attributes:
        state: pair of tuples with one number per number of the state.
        actions: pair of tuples with one number per number of a step of an action.
    """

    state: tuple[tuple[float, ...], tuple[float, ...]] | None
    actions: tuple[tuple[float, ...], tuple[float, ...]] | None


def read_statistics(folder: Path, state: int, actions: int) -> Statistics:
    """Return the statistics in `processor_config.json` of a checkpoint, if it has this file.

    Raises: ConfigError if the statistics are not lists of `state` and `actions` finite numbers, if a standard deviation
        is not above 0, or if a mean or a standard deviation is alone.
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
    where, advice = f"{_KEY}: {str(path)!r}", "correct the file"
    if absent:
        present = keys[1 - keys.index(absent[0])]
        raise ConfigError(f"{where} has {present}, but no {absent[0]}; add it, or delete {present}")
    for key in keys:
        if not isinstance(data[key], list) or not all(map(_is_finite, data[key])):
            raise ConfigError(f"{where}: {key} is not a list of finite numbers; {advice}")
        if len(data[key]) != size:
            problem = f"{key} has the length {len(data[key])}, but the environment has {size} numbers"
            raise ConfigError(f"{where}: {problem}; {advice}")
    mean, std = (tuple(map(float, data[key])) for key in keys)
    if min(std, default=1.0) <= 0.0:
        raise ConfigError(f"{where}: {keys[1]} has {min(std)}, which is not above 0; {advice}")
    return mean, std


def _is_finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and isfinite(x)


def write_model(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that transformers loads: new weights, and all other files of the checkpoint `source`.

    The folder appears complete or not at all.

    Raises: ConfigError if the folder exists or cannot be made, or if the weights are not the weights of the model in
        `source`.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{str(folder)!r} exists; give the path of a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be made: {_one_line(error)}; give another path") from None
    model: nn.Module = read_model(source)
    own = dict(model.named_parameters())
    if unknown := sorted(own.keys() ^ weights.keys()):
        raise ConfigError(f"{_KEY}: the weights of the run and of {str(source)!r} differ in {unknown[0]}; use its own")
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    others = [p for p in source.iterdir() if p.is_file() and not p.name.endswith(_OTHER_WEIGHTS)]
    files: dict[str, Any] = {path.name: path.read_bytes() for path in others}
    with TemporaryDirectory(dir=folder.parent) as temporary, _quiet():
        cast(Any, model).save_pretrained(temporary)
        files |= {path.name: path for path in Path(temporary).iterdir()}
        write_folder(folder, files)


def encode_instructions(model_path: str, texts: Sequence[str]) -> tuple[Tensor, MultiDiscrete]:
    """Convert instructions to the ids of the tokens of a checkpoint, for the observations of an environment.

        ids = tokens(bos + text + newline), filled up with zeros

    Args:
        model_path: folder of a pi0 checkpoint with the files of its tokenizer.
        texts: the instructions.

    Returns: int64 ids `[len(texts), L]`, where L is the length of the longest instruction, and the space of one row.
    Raises: ConfigError if there are no texts, if a word is unknown to the tokenizer, or if the folder has no tokenizer.
        MissingExtraError if transformers is not installed.
    """
    if not texts:
        raise ConfigError("encode_instructions: texts is empty; give the instructions of the environment")
    folder = check_folder(model_path)
    with extra("vla"):
        from transformers import AutoTokenizer
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the formats of tokenizers raise errors of many kinds
        problem = f"the tokenizer in {model_path!r} cannot be loaded: {_one_line(error)}"
        raise ConfigError(f"{_KEY}: {problem}; copy tokenizer.json and tokenizer_config.json there") from None

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    rows = []
    for text in texts:
        row = ids(f"{tokenizer.bos_token or ''}{text}\n")
        if tokenizer.unk_token_id in row:
            unknown = [word for word in text.split() if tokenizer.unk_token_id in ids(word)]
            words = ", ".join(map(repr, unknown)) or "a character"
            raise ConfigError(f"instruction {text!r}: the tokenizer of {model_path!r} does not know {words}; reword it")
        if 0 in row:
            raise ConfigError(f"instruction {text!r}: a token has the id 0, which is padding; use another tokenizer")
        rows.append(row)
    length = max(map(len, rows))
    table = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return table, MultiDiscrete((int(table.max()) + 1,) * length)
