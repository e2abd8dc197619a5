"""Vocabularies: reading a JSON file, encoding instructions, and one clear line for each fault."""

import json

import pytest

from ecrl.envs.vocabulary import encode, read_vocabulary, vocabulary_size
from ecrl.errors import ConfigError

WORDS = {"<pad>": 0, "go": 3, "to": 1, "red": 7}


def _file(tmp_path, content):
    path = tmp_path / "words.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_file_maps_words_to_ids(tmp_path):
    assert read_vocabulary(_file(tmp_path, WORDS)) == WORDS and vocabulary_size(WORDS) == 8
    assert encode("go TO  red", WORDS, 5) == (3, 1, 7, 0, 0)
    assert encode("red", WORDS, 1) == (7,)


def test_the_shipped_vocabulary_has_one_id_per_word_without_gaps():
    words = read_vocabulary()
    assert sorted(words.values()) == list(range(len(words))) and words["<pad>"] == 0
    assert {"reach", "touch", "go", "move", "to", "the", "red", "green", "blue", "block"} <= set(words)


FAULTS = {
    "{": r"words\.json' is not a JSON file: Expecting property name",
    "[1]": r"words\.json' is not an object that maps words to integers",
    '{"<pad>": 0, "red": "1"}': "is not an object that maps words to integers",
    '{"<pad>": 0, "red": true}': "is not an object that maps words to integers",
    '{"red": 1}': r"does not map the padding word to 0; give '<pad>' the id 0$",
    '{"<pad>": 1, "red": 0}': "does not map the padding word to 0",
    '{"<pad>": 0, "red": -1}': "gives 'red' the id -1; use ids of at least 0$",
    '{"<pad>": 0, "red": 2, "blue": 2}': "gives 'red' and 'blue' the same id 2; use one id per word$",
}


@pytest.mark.parametrize("content", FAULTS)
def test_a_wrong_file_is_refused_in_one_line(content, tmp_path):
    with pytest.raises(ConfigError, match="^tokenizer: .*" + FAULTS[content]) as caught:
        read_vocabulary(_file(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^tokenizer: no such file '.*absent\.json'; give a JSON file that maps"):
        read_vocabulary(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"^tokenizer: '.*' cannot be read: Is a directory$"):
        read_vocabulary(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("go to rad", r"^instruction 'go to rad': 'rad' is not in the vocabulary; did you mean 'red'\?$"),
        ("go <pad> red", "'<pad>' is the padding word"),
        ("go to red red", r"^instruction 'go to red red' has 4 words, expected 1 to 3 \(max_words\)$"),
        ("  ", "has 0 words, expected 1 to 3"),
    ],
)
def test_an_instruction_that_cannot_be_encoded_is_refused(text, fault):
    with pytest.raises(ConfigError, match=fault):
        encode(text, WORDS, 3)
