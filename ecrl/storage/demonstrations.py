"""Write and read a data set of demonstrations: a safetensors file with the steps of whole episodes.

The rows of all tensors are the M steps, in the order of the episodes.

| tensor | shape | content |
|---|---|---|
| `obs`, or `obs.<name>` for each entry of a Dict | `[M, ...]` | observation before the step (see below for dtypes) |
| `action` | `[M, ...]` | action that the environment received |
| `reward` | `[M]` | reward of the step, float; for a chunk of actions, the undiscounted sum of rewards |
| `done` | `[M]` | True for the last step of an episode, bool |
| `executed` | `[M]` | environment steps that the action took, int64; absent if actions are single steps |

An observation has the dtype of its space, except an `action_mask`, which is bool.

The metadata of the file has one entry, `ecrl.demonstrations`. The entry is JSON with the version of the format, the
version of ecrl, the environment, the seed, the numbers of episodes and steps, the mean return, and the success rate if
the environment reports successes. The key `expert` names the expert or the policy that chose the actions. The entry
also has the whole config. If the environment has settings `tokenizer`, the entry has the SHA-256 of the vocabulary that
each of these settings selects. The key `successes_only` is true if only successful episodes were kept.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ecrl.errors import CheckpointError
from ecrl.storage.atomic_files import replace_file
from ecrl.storage.checkpoint_files import sha256_of
from ecrl.storage.tensor_files import TensorFile, read_header

FORMAT = 1
"""Version number of the format."""

_KEY = "ecrl.demonstrations"


def write_demonstrations(path: Path, steps: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Write a data set atomically, and return the SHA-256 of the file in hexadecimal.

    Args:
        path: path of the file. An existing file is replaced.
        steps: the tensors of the data set, by name (see the table of this module).
        about: values of the JSON entry `ecrl.demonstrations`, by key. The version of the format is added.

    Raises: OSError if the file cannot be written.
    """
    text = json.dumps({"format": FORMAT, **about}, sort_keys=True)
    file = TensorFile(steps, {_KEY: text})
    replace_file(path, file)
    return sha256_of(file)


def read_about(path: Path) -> tuple[dict[str, tuple[Any, tuple[int, ...]]], dict[str, Any]]:
    """Return the dtypes and shapes of a data set's tensors by name, and its metadata.

    Raises: CheckpointError if the file cannot be read, is not a data set of demonstrations, or has another version of
        the format.
    """
    tensors, metadata = read_header(path)
    try:
        about = json.loads(metadata[_KEY])
        version = about["format"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path}: not a data set of demonstrations: it has no valid metadata {_KEY}; use a file that ecrl demo "
            "wrote"
        ) from None
    if version != FORMAT:
        raise CheckpointError(
            f"{path}: has format {version}, but this version of ecrl reads format {FORMAT}; record the data set again"
        )
    return tensors, about
