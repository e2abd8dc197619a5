"""Files and command lines as data: JSON and YAML, strict about repeated keys."""

import json
import os
import re
from pathlib import Path

import pytest
from support.config_files import write_file

from ecrl.config.files import parse_overrides, read
from ecrl.config.model import format_path, repeated_keys
from ecrl.errors import ConfigError

SCALARS = [  # text, value: the value is JSON's, also where YAML 1.1 differs
    ("1e-8", 1e-8),
    ("-2.5E+3", -2500.0),
    ("1.", 1.0),
    (".5", 0.5),
    ("1_000", 1000),
    ("-7", -7),
    ("0", 0),
    ("true", True),
    ("False", False),
    ("null", None),
    ("~", None),
    ("", None),
    ("off", "off"),  # trainer.compile has the value "off"
    ("yes", "yes"),
    ("010", "010"),  # neither 8 nor 10 without being asked
    ("1:30", "1:30"),
    ("2026-01-02", "2026-01-02"),
    ("cuda:0", "cuda:0"),
    ("'3'", "3"),
    ("[64, 64]", [64, 64]),
    ("{a: 1e-3}", {"a": 1e-3}),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_yaml_values(tmp_path, text, value):
    assert json.dumps(read(write_file(tmp_path, f"x: {text}\n", "run.yaml"))["x"]) == json.dumps(
        value
    )  # JSON distinguishes 1, 1.0 and true


def test_yaml_infinities(tmp_path):
    result = read(write_file(tmp_path, "a: .inf\nb: -.INF\nc: .nan\n", "run.yaml"))
    assert result["a"] == -result["b"] == float("inf") and result["c"] != result["c"]


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".YAML"])
def test_yaml_is_json_by_another_name(tmp_path, suffix):
    data = {"trainer": {"seed": 3, "exp_name": "a"}, "list": [1, {"b": None}], "eps": 1e-8}
    assert read(write_file(tmp_path, json.dumps(data, indent=1), f"run{suffix}")) == data
    text = "trainer:\n  seed: 3\n  exp_name: a\nlist:\n- 1\n- b:\neps: 1e-8\n"
    assert read(write_file(tmp_path, text, f"run{suffix}")) == data


def _twice(path):
    return sorted(format_path(loc) for loc, _ in repeated_keys(read(path)))


def test_yaml_keys_given_twice(tmp_path):
    text = "a: 1\nb:\n  c: 1\n  c: 2\nd:\n- {e: 1, e: 2}\na: 2\n"
    assert _twice(write_file(tmp_path, text, "run.yaml")) == ["a", "b.c", "d[0].e"]
    merged = "base: &base {x: 1, y: 2}\nother: {<<: *base, y: 3}\n"  # merging is there to be overridden
    assert _twice(write_file(tmp_path, merged, "run.yaml")) == [] and read(write_file(tmp_path, merged, "run.yaml"))[
        "other"
    ] == {"x": 1, "y": 3}
    assert _twice(write_file(tmp_path, "base: &base {x: 1}\nother: {<<: *base, y: 3, y: 4}\n", "run.yaml")) == [
        "other.y"
    ]


def test_shared_parts_are_looked_at_once(tmp_path):
    layers = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 6))
    (result,) = _twice(write_file(tmp_path, f"l0: &l0 {{a: 1, a: 2}}\n{layers}", "run.yaml"))
    assert result.endswith(".a")


BOMB = "l0: &l0 {a: 1}\n" + "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 30))
MERGES = "l0: &l0 {a: 1}\n" + "".join(f"l{i}: &l{i} {{<<: [{', '.join([f'*l{i - 1}'] * 10)}]}}\n" for i in range(1, 9))
BAD = [  # YAML, the message after the path
    (b"a: [1\nb: 2\n", ":2:2: not YAML: expected ',' or ']'"),
    (b"a: 1\n b: 2\n", ":2:3: not YAML: mapping values are not allowed here"),
    (b"a: !!python/object/apply:os.system [ls]\n", ":1:4: not YAML: could not determine a constructor for the tag"),
    (b"? [a, b]\n: 1\n", ":1:1: not YAML: a key must be a name"),
    (b"a: &a [*a]\n", ":1:4: not YAML: found unconstructable recursive node"),
    (b"a: *b\n", ":1:4: not YAML: found undefined alias 'b'"),
    (b"a: 1\n---\nb: 2\n", ":2:1: not YAML: but found another document"),
    (b"a: 1\nb: \x07\n", ":2:4: not YAML: special characters are not allowed, got '\\x07'"),
    (b"a: 1\nb: \xff\n", ":2: not UTF-8 text: invalid start byte at byte 8"),
    (b"a: " + b"[" * 2000, ": not a config: nested too deeply"),
    (BOMB.encode(), ": not a config: more than 1,000,000 values, with each alias counted as a copy"),
    (b"a: &a {<<: *a}\n", ": not a config: nested too deeply"),
    (b"a: {<<: 5}\n", ":1:9: not YAML: expected a mapping or list of mappings for merging, but found scalar"),
    (b"a: " + b"9" * 5000, ": not a config: "),
]


@pytest.mark.parametrize(("content", "message"), BAD, ids=range(len(BAD)))
def test_bad_yaml(tmp_path, content, message):
    path = write_file(tmp_path, content, "run.yaml")
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}{message}") and "\n" not in str(error.value)


def test_merges_of_merges_do_not_grow_without_bound(tmp_path):
    """PyYAML before 6.0.4 keeps each merged key as often as it is named, and later versions keep it once."""
    path = write_file(tmp_path, MERGES.encode(), "run.yaml")
    try:
        assert read(path)["l8"] == {"a": 1}
    except ConfigError as error:
        assert str(error) == f"{path}:6:5: not YAML: '<<' expands to more than 100,000 values"


def test_the_limit_of_a_file_counts_bytes(tmp_path):
    path = write_file(tmp_path, b'"' + "é".encode() * 2**23, "run.json")
    with pytest.raises(ConfigError, match=r"not a config: longer than 16,777,216 bytes$"):
        read(path)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs a file without an end")
def test_files_without_an_end_are_not_read_to_it():
    with pytest.raises(ConfigError, match=r"^/dev/zero: not a config: longer than 16,777,216 bytes$"):
        read(Path("/dev/zero"))


def test_missing_files_name_the_others(tmp_path):
    write_file(tmp_path, "", "one.yaml"), write_file(tmp_path, "", "two.json")
    with pytest.raises(ConfigError, match=r"on.yaml: no such file; did you mean 'one.yaml'\?"):
        read(tmp_path / "on.yaml")
    with pytest.raises(ConfigError, match=r"x: no such file; known: one.yaml, two.json"):
        read(tmp_path / "x")


def test_parse_overrides():
    tokens = ["--trainer.seed", "3", "--algorithm.cfg.gamma=0.9", "--trainer.enable_eval", "true"]
    tokens += ["--policy.actor.network_cfg.hidden_sizes", "[64,64]", "--trainer.exp-name", "a=b", "--env.id=x=y"]
    tokens += ["--policy.initial-log-std", "-1e-1", "--trainer.eval_seed=null", "--trainer.device", "cuda:0", "--a.b="]
    assert parse_overrides(tokens) == {
        "trainer.seed": 3,
        "algorithm.cfg.gamma": 0.9,
        "trainer.enable_eval": True,
        "policy.actor.network_cfg.hidden_sizes": [64, 64],
        "trainer.exp_name": "a=b",
        "env.id": "x=y",
        "policy.initial_log_std": -0.1,
        "trainer.eval_seed": None,
        "trainer.device": "cuda:0",
        "a.b": "",
    }
    assert parse_overrides([]) == {}
    assert parse_overrides(["--a.b", '"3"', "--a.c", '{"d": 1}']) == {"a.b": "3", "a.c": {"d": 1}}
    assert parse_overrides(["--a.b", "[" * 100_000, "--a.c", "9" * 5000]) == {"a.b": "[" * 100_000, "a.c": "9" * 5000}


def test_flags_of_abcdrl_are_written_as_in_its_commands():
    tokens = [
        "--trainer.capture-video",
        "--trainer.no-cuda",
        "--trainer.norm-adv",
        "True",
        "--trainer.clip_vloss=False",
    ]
    tokens += ["--logger.wandb-tags", "a", "3", "--trainer.target-kl", "None", "--logger.track", "false"]
    assert parse_overrides([*tokens, "--trainer.exp-name", "None"]) == {
        "trainer.capture_video": True,
        "trainer.cuda": False,
        "trainer.norm_adv": True,
        "trainer.clip_vloss": False,
        "logger.wandb_tags": ["a", "3"],
        "trainer.target_kl": None,
        "logger.track": False,
        "trainer.exp_name": "None",
    }
    assert parse_overrides(["--logger.wandb-tags"]) == {"logger.wandb_tags": []}
    assert parse_overrides(["--logger.wandb-tags", '["a"]', "--trainer.no-autotune"]) == {
        "logger.wandb_tags": ["a"],
        "trainer.autotune": False,
    }


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            ["--trainer.no-cuda=true"],
            "--trainer.no-cuda: takes no value; write --trainer.no-cuda, or --trainer.cuda",
        ),
        (["--trainer.no-cuda", "true"], "true: not a key; keys start with --"),
        (["--trainer.cuda", "maybe"], "maybe: not a key; keys start with --"),
        (["--trainer.cuda", "--trainer.no-cuda"], "--trainer.no-cuda: given twice; keep one"),
        (["--trainer.no-gamma"], "--trainer.no-gamma: has no value; write"),
        (["--trainer.seed"], "--trainer.seed: has no value; write --trainer.seed VALUE or --trainer.seed=VALUE"),
        (["--trainer.enable_eval", "--trainer.seed", "3"], "--trainer.enable_eval: has no value; write"),
        (["--seed", "3"], "--seed: unknown option; write a config key with its section, such as --trainer.seed 3"),
        (["trainer.seed", "3"], "trainer.seed: not a key; keys start with --, such as --trainer.seed 3"),
        (["-s", "3"], "-s: not a key; keys start with --"),
        (["--trainer.seed", "3", "4"], "4: not a key; keys start with --"),
        (["--trainer..seed", "3"], "--trainer..seed: unknown option;"),
        (["--.seed=3"], "--.seed: unknown option;"),
        (["--a.b-c=1", "--a.b_c=2"], "--a.b_c: given twice; keep one"),
        (["--a.b", '{"c": 1, "c": 2}'], "--a.b: c: given twice; keep one"),
        (["--a.b", '[{"c": 1, "c": 2}]'], "--a.b: [0].c: given twice; keep one"),
    ],
)
def test_parse_overrides_refuses(tokens, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as error:
        parse_overrides(tokens)
    assert "\n" not in str(error.value)
