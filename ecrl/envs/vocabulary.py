"""Convert instructions to word ids, with a vocabulary from a JSON file.

A vocabulary is a JSON object that maps each word to its id. The word `<pad>` has the id 0 and pads short instructions.
Policies observe the ids, and do not read the file.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ecrl.config.input_files import check_input
from ecrl.errors import ConfigError
from ecrl.registry import did_you_mean

PADDING = "<pad>"
SHIPPED = Path(__file__).with_name("vocabulary.json")
"""Path of the vocabulary for the instructions of ecrl's own tasks."""


def read_vocabulary(path: str | None = None) -> dict[str, int]:
    """Read the vocabulary of a JSON file, or the shipped vocabulary if `path` is None.

    Raises: ConfigError if the file is missing or is not a vocabulary. The message begins with `tokenizer`.

    >>> read_vocabulary()["<pad>"]
    0
    """
    if path is None:
        return json.loads(SHIPPED.read_text(encoding="utf-8"))
    check_input(path, "tokenizer")
    where = f"tokenizer: {path!r}"
    try:
        words = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"tokenizer: no such file {path!r}; give a JSON file that maps words to ids") from None
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not a JSON file: {' '.join(str(error).split())}") from None
    if not isinstance(words, dict) or not all(type(number) is int for number in words.values()):
        raise ConfigError(f"{where} is not an object that maps words to integers, such as {{{PADDING!r}: 0, 'red': 1}}")
    if words.get(PADDING) != 0:
        raise ConfigError(f"{where} does not map the padding word to 0; give {PADDING!r} the id 0")
    first_word: dict[int, str] = {}
    for word, number in words.items():
        if number < 0:
            raise ConfigError(f"{where} gives {word!r} the id {number}; use ids of at least 0")
        if (other := first_word.setdefault(number, word)) != word:
            raise ConfigError(f"{where} gives {other!r} and {word!r} the same id {number}; use one id per word")
    return words


def vocabulary_checksums(settings: Any, prefix: str = "") -> dict[str, str]:
    """Map the dotted name of each setting `tokenizer` of an environment to the SHA-256 of its vocabulary.

    The SHA-256 is in hexadecimal. It depends neither on the path of the file nor on the order of the words. For an
    invalid vocabulary or a file that cannot be read, the path is hashed instead.

    >>> one, two = (vocabulary_checksums({"text": {"tokenizer": path}}) for path in (None, str(SHIPPED)))
    >>> list(one), one == two
    (['text.tokenizer'], True)
    """
    if not isinstance(settings, dict):
        return {}
    found: dict[str, str] = {}
    for key, value in settings.items():
        if key == "tokenizer" and (value is None or isinstance(value, str)):
            try:
                text = json.dumps(read_vocabulary(value), sort_keys=True)
            except ConfigError:
                text = str(value)
            found[f"{prefix}{key}"] = sha256(text.encode()).hexdigest()
        found |= vocabulary_checksums(value, f"{prefix}{key}.")
    return found


def vocabulary_size(words: Mapping[str, int]) -> int:
    """Return the largest id of a vocabulary plus 1.

    >>> vocabulary_size({"<pad>": 0, "red": 5})
    6
    """
    return max(words.values()) + 1


def encode(text: str, words: Mapping[str, int], length: int) -> tuple[int, ...]:
    """Convert a text to lower case, and return the ids of its words, padded with zeros to `length` ids.

    Raises: ConfigError if a word is not in the vocabulary or is `<pad>`, or if the text has no words or more than
        `length` words.

    >>> encode("Go to red", {"<pad>": 0, "go": 1, "to": 2, "red": 3}, 5)
    (1, 2, 3, 0, 0)
    """
    parts = text.lower().split()
    if not 1 <= len(parts) <= length:
        raise ConfigError(f"instruction {text!r} has {len(parts)} words, expected 1 to {length} (max_words)")
    for part in parts:
        if part not in words or part == PADDING:
            known = did_you_mean(part, set(words) - {PADDING})
            fault = "is the padding word" if part == PADDING else "is not in the vocabulary"
            raise ConfigError(f"instruction {text!r}: {part!r} {fault}; {known}")
    return tuple(words[part] for part in parts) + (0,) * (length - len(parts))
