"""Read the JSON files and load the tokenizers of pretrained checkpoints in local folders.

ecrl runs no code from a folder, loads no pickle and downloads nothing. Tokenizers require the extra `vla`.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite, prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ecrl.config.input_files import check_inputs_in
from ecrl.errors import ConfigError, extra
from ecrl.memory import check_room
from ecrl.spaces import MultiDiscrete

KEY = "policy.vla.model_path"

_ADVICE = {
    "pi0": "give the folder that save_pretrained of a pi0 model wrote",
    "openvla": "give the folder of an OpenVLA or OpenVLA-OFT model with action tokens",
}
"""Advice at the end of errors, for each supported `model_type` in a checkpoint's `config.json`."""


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and the warnings of transformers. ecrl raises its own errors instead."""
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


def one_line(error: Exception) -> str:
    """Return the type and the message of an error in one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint.

    Raises: ConfigError if the file cannot be read, or if its content is not a JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{KEY}: {str(path)!r} cannot be read: {one_line(error)}; copy it again") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{KEY}: {str(path)!r} is not a JSON object; copy it again")
    return data


def is_finite(x: Any) -> bool:
    """Return True for a finite int or float, and False for any other value, such as a bool."""
    try:
        return isinstance(x, int | float) and not isinstance(x, bool) and isfinite(float(x))
    except OverflowError:
        return False


def check_folder(model_path: str | None, kind: str) -> Path:
    """Return the folder of a checkpoint.

    Raises: ConfigError if `model_path` is None, if the folder or its `config.json` is missing or damaged, or if the
        `model_type` of the checkpoint is not `kind`.
    """
    advice = _ADVICE[kind]
    if model_path is None:
        raise ConfigError(f"{KEY}: absent, but backend {kind} reads a checkpoint; {advice}")
    found = model_type(model_path, advice)
    if found != kind:
        raise ConfigError(f"{KEY}: {model_path!r} {_is_of(found)}, expected {kind!r}; {advice}")
    return Path(model_path)


def _is_of(kind: Any) -> str:
    return 'has no "model_type" in its config.json' if kind is None else f"is a checkpoint of {kind!r}"


def model_type(model_path: str, advice: str) -> Any:
    """Return the `model_type` in the `config.json` of a folder.

    Raises: ConfigError if the folder or the file is missing. The error message then ends with `advice`. Also raised if
        the file is damaged.
    """
    folder = Path(model_path)
    check_inputs_in(folder, KEY)
    if not folder.is_dir():
        raise ConfigError(f"{KEY}: no such folder {model_path!r}; {advice}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{KEY}: {model_path!r} has no config.json; {advice}")
    return read_json(folder / "config.json").get("model_type")


def check_weights_fit(folder: Path) -> None:
    """Raise ConfigError if the weights of a checkpoint, converted to float32, need more memory than the machine has.

    The function reads only the shapes in the safetensors files. It skips files that cannot be read, because the
    functions that load the weights report them.
    """
    weights = 0
    for path in folder.glob("*.safetensors"):
        with suppress(SafetensorError, OSError), safe_open(path, "pt") as file:
            weights += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    label = f"{KEY}: the {weights:,} weights of {str(folder)!r}"
    check_room(4 * weights, torch.device("cpu"), label, "give a smaller checkpoint")


def _pi0_row(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(f"{tokenizer.bos_token or ''}{text}\n", add_special_tokens=False)["input_ids"]


def _openvla_row(tokenizer: Any, text: str) -> list[int]:
    if tokenizer.bos_token_id is None:
        raise ConfigError(f"{KEY}: the tokenizer has no bos_token, with which prompts begin; copy its files again")
    prompt = f"In: What action should the robot take to {text.lower()}?\nOut:"
    row = [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    empty = tokenizer.convert_tokens_to_ids(
        "\u2581"
    )  # Llama's token for a space; the prompts of OpenVLA end with this token
    return row if empty in (None, tokenizer.unk_token_id, row[-1]) else [*row, empty]


_ROWS: Mapping[str, Callable[[Any, str], list[int]]] = {"pi0": _pi0_row, "openvla": _openvla_row}


def encode_instructions(model_path: str, texts: Sequence[str]) -> tuple[Tensor, MultiDiscrete]:
    """Convert instructions to token ids with a checkpoint's tokenizer, for the observations of an environment.

        pi0:      ids = tokens(bos + text + newline)
        openvla:  ids = tokens(bos + "In: What action should the robot take to {text}?" + newline + "Out:" + space)

    Args:
        model_path: folder of a pi0 or OpenVLA checkpoint with the files of its tokenizer.
        texts: the instructions. For openvla, the instructions are converted to lower case.

    Returns: int64 ids `[len(texts), L]`, and the space of one row. L is the length of the longest row. Shorter rows are
        padded with zeros.
    Raises: ConfigError if there are no texts, if a word is unknown to the tokenizer, or if a token has the id 0. Also
        raised if the folder has no checkpoint of pi0 or OpenVLA, or no tokenizer. MissingExtraError if transformers is
        not installed.
    """
    if not texts:
        raise ConfigError("encode_instructions: texts is empty; give the instructions of the environment")
    kind = model_type(model_path, advice := "give the folder of a pi0 or OpenVLA checkpoint")
    if kind not in _ROWS:
        raise ConfigError(f"{KEY}: {model_path!r} {_is_of(kind)}; {advice}")
    with extra("vla"):
        from transformers import AutoTokenizer
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged tokenizer files raise many types of errors
        problem = f"the tokenizer in {model_path!r} cannot be loaded: {one_line(error)}"
        raise ConfigError(f"{KEY}: {problem}; copy tokenizer.json and tokenizer_config.json there") from None
    rows = []
    for text in texts:
        row = _ROWS[kind](tokenizer, text)
        if tokenizer.unk_token_id in row:
            pieces = {word: tokenizer(word, add_special_tokens=False)["input_ids"] for word in text.split()}
            unknown = [word for word, ids in pieces.items() if tokenizer.unk_token_id in ids]
            words = ", ".join(map(repr, unknown)) or "a character"
            raise ConfigError(f"instruction {text!r}: the tokenizer of {model_path!r} does not know {words}; reword it")
        if 0 in row:
            raise ConfigError(f"instruction {text!r}: a token has the id 0, which is padding; use another tokenizer")
        rows.append(row)
    length = max(map(len, rows))
    table = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return table, MultiDiscrete((int(table.max()) + 1,) * length)
