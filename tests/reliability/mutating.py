"""Random mutations of a config: of its values, its structure and its text, many of them hostile.

Canaries detect a config that is evaluated, imported or opened: a word, a module and a file.
"""

import copy
import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

CANARY = "canary_of_mutations"
"""A module of this name is importable; importing it, or evaluating what names it, is what must not happen."""

_CODE = f"__import__({CANARY!r})"
NUMBERS = [0, 1, -1, 2, 7, 0.5, -0.0, 5e-324, 1e-8, 3.5e38, 1e308, -1e308, 10**6, 10**9, 2**31 - 1, 2**31, 2**63]
NUMBERS += [-(2**63), 10**400, float("nan"), float("inf"), float("-inf")]
WORDS = ["", " ", "x", "auto", "on", "a\x00b", "a\nb", "a: b", "é\u202e😀", "\ud800", "null", "1", "x" * 100_000]
PATHS = ["../../x", f"/tmp/{CANARY}", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", ".", "~"]
PATHS += [f"/nowhere/{CANARY}", f"file:///tmp/{CANARY}", f"http://127.0.0.1:9/{CANARY}", "mutated.json", "a/../../b"]
HOSTILE = [_CODE, f"eval({_CODE!r})", f"os.system('touch {CANARY}')", f"$(touch {CANARY})", f"`touch {CANARY}`"]
HOSTILE += [f"${{{CANARY}}}", f"{{{{{CANARY}}}}}", f"cpu; touch {CANARY}", CANARY, f"{CANARY}:Env-v0", f"{CANARY}.run"]
HOSTILE += [f"gymnasium:{CANARY}:Env-v0", f"<mujoco><include file='{CANARY}'/></mujoco>"]
HOSTILE += [f"!!python/object/apply:os.system [touch {CANARY}]"]
MODULES = ["os", "os:system", "gymnasium:os:Env-v0", "subprocess.Popen", "torch.nn.Linear", "__class__", "__init__"]
SHAPES: list[Any] = [[], {}, [[]], [None], {"": {}}, {"name": {}}, {"cfg": []}, [0] * 1000, {CANARY: CANARY}]
YAML = [
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"!!python/name:{CANARY}.run",
    f"!!python/module:{CANARY}",
]
YAML += ["!!binary aGk=", "!!set {a}", "&a [*a]", "*nobody", "<<: 3", "? [a]", "!x y", "0o17", "2026-01-02", "%TAG ! x"]
BYTES = [b"\xff", b"\x00", b"\xef\xbb\xbf", b"NaN", b"//", b"\\", b"\n", *(bytes([x]) for x in b"{}[],:#\t'\"")]
KINDS = {"junk": 4, "alike": 3, "add": 3, "graft": 2, "remove": 1, "misspell": 1, "swap": 1, "wrap": 1, "deepen": 1}
"""Kinds of mutations, and how often each is drawn."""

Spot = tuple[Any, Any]  # a list or dict, and one of its indices or keys


def spots(data: Any) -> Iterator[Spot]:
    """Yield every place in a config, after any mutation."""
    for key, value in list(
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from spots(value)


def put(data: dict, path: str, value: Any) -> Spot:
    """Set a dotted key, replacing values on its path; return its place."""
    *sections, key = path.split(".")
    for section in sections:
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[key] = copy.deepcopy(value)
    return data, key


class Pool(NamedTuple):
    """Material for mutations."""

    keys: list[str]  # that a config may have somewhere
    names: list[str]  # of registered parts
    others: list[Any]  # other configs, a source of parts
    changes: list[dict[str, Any]]  # values by dotted key that change the behaviour of a config


def junk(draw: random.Random, pool: Pool) -> Any:
    """A value that is hardly ever right."""
    kinds = [NUMBERS, WORDS, PATHS, HOSTILE, MODULES, SHAPES, pool.names, pool.keys, [None, True, False]]
    return copy.deepcopy(draw.choice(draw.choice(kinds)))


def alike(draw: random.Random, pool: Pool, value: Any) -> Any:
    """A value of the same kind that may be right."""
    match value:
        case bool():
            return not value
        case int():
            floating = float(value) if abs(value) < 1e300 else value
            return draw.choice([value + 1, -value, value // 2, 10 * value, 0, floating, 1000 * value])
        case float():
            rounded = round(value) if math.isfinite(value) else value
            return draw.choice([-value, 0.0, 2 * value, 1e3 * value, 1e-3 * value, rounded])
        case str():
            return draw.choice([value.upper(), value[:-1], f"{value} ", draw.choice(pool.names)])
        case list():
            return draw.choice([value[:-1], [*value, *value[:1]], value[::-1], [value]])
    return junk(draw, pool)


def misspelt(draw: random.Random, key: str) -> str:
    """Return the word with a missing or doubled letter, or in another notation."""
    at = draw.randrange(len(key))
    twice, without = key[:at] + key[at : at + 1] + key[at:], key[:at] + key[at + 1 :]
    return draw.choice([twice, without, key.upper(), f"{key} ", key.replace("_", "-")])


def _add(draw: random.Random, pool: Pool, part: Any) -> None:
    if isinstance(part, dict):
        part[draw.choice([*pool.keys, *pool.keys, *HOSTILE, *WORDS, *PATHS])] = junk(draw, pool)
    elif isinstance(part, list):
        part.insert(draw.randint(0, len(part)), junk(draw, pool))


def mutate(draw: random.Random, pool: Pool, data: Any, part: Any, key: Any) -> None:
    """Apply one mutation to `data` at `part[key]`."""
    value = part[key]
    match draw.choices([*KINDS], [*KINDS.values()])[0]:
        case "junk":
            part[key] = junk(draw, pool)
        case "alike":
            part[key] = alike(draw, pool, value)
        case "add":
            _add(draw, pool, value if draw.random() < 0.7 else data)
        case "graft":
            other, name = draw.choice(list(spots(draw.choice(pool.others))))
            beside = isinstance(part, dict) and isinstance(name, str) and draw.random() < 0.5
            part[name if beside else key] = copy.deepcopy(other[name])
        case "remove":
            del part[key]
        case "misspell" if isinstance(key, str) and key:
            part[misspelt(draw, key)] = part.pop(key)
        case "swap":
            other, name = draw.choice(list(spots(data)))
            part[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(value)
        case "wrap":
            part[key] = draw.choice([[value], {"cfg": value}, {"name": value}, {str(key): value}, [value, value]])
        case "deepen":
            part[key] = f"@deep{draw.choice([5, 60, 300, 900, 5000])}{draw.choice('[{')}@"


def mutated_tree(draw: random.Random, pool: Pool, data: Any) -> Any:
    """Return the config with a few mutations of values and structure; half of them after a change of its behaviour."""
    data, changed = copy.deepcopy(data), []
    if draw.random() < 0.5:
        changed = [put(data, path, value) for path, value in draw.choice(pool.changes).items()]
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        near = [spot for part, key in changed if key in part for spot in ((part, key), *spots(part[key]))]
        if candidates := near if near and draw.random() < 0.8 else list(spots(data)):
            mutate(draw, pool, data, *draw.choice(candidates))
    return data


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    """A file with one mutation of its bytes or lines."""
    lines, at = data.split(b"\n"), draw.randrange(len(data) + 1)
    line = draw.randrange(len(lines))
    before, this, after = lines[:line], lines[line], lines[line + 1 :]
    match draw.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[at + draw.randint(1, 20) :]
        case 2:
            return data[:at] + draw.choice(BYTES) + data[at:]
        case 3:
            return b"\n".join([*before, this, this, *after])
        case 4:
            return b"\n".join([*before, *after])
        case 5:
            return data.decode(errors="replace").encode(draw.choice(["utf-16", "utf-8-sig", "utf-32-be"]))
        case 6:
            return b"\n".join([*before, this.rpartition(b":")[0] + b": " + draw.choice(YAML).encode(), *after])
    return data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]


def mutated_file(draw: random.Random, pool: Pool, data: Any) -> tuple[bytes, str]:
    """A mutated config as the bytes of a file, and the ending of its name."""
    suffix, only_text = draw.choice([".json", ".json", ".yaml"]), draw.random() < 0.15
    tree = data if only_text else mutated_tree(draw, pool, data)
    if suffix == ".json":
        text = json.dumps(tree, indent=1, ensure_ascii=draw.random() < 0.5)
    else:
        text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    content = _deep(text).encode(errors="surrogatepass")
    return mutated_bytes(draw, content) if only_text or draw.random() < 0.05 else content, suffix


def _deep(text: str) -> str:
    """Replace placeholders by deeply nested text, which no encoder writes."""

    def nested(match: re.Match) -> str:
        opens, closes = {"[": ("[", "]"), "{": ('{"a": ', "}")}[match[2]]
        return opens * int(match[1]) + "1" + closes * int(match[1])

    return re.sub(r"""['"]?@deep(\d+)([\[{])@['"]?""", nested, text)
