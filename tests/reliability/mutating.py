"""Random mutations of a config: of its values, its structure and its text, many of them hostile.

Whatever evaluates, imports or touches what a mutated config says meets the canary: a word, a module and a file.
"""

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import yaml

CANARY = "canary_of_mutations"
"""A module of this name is importable; importing it, or evaluating what names it, is what must not happen."""

_CODE = f"__import__({CANARY!r})"
NUMBERS = [
    0,
    1,
    -1,
    2,
    7,
    0.5,
    -0.0,
    5e-324,
    1e-8,
    3.5e38,
    1e308,
    -1e308,
    10**6,
    10**9,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63),
]
NUMBERS += [10**400, float("nan"), float("inf"), float("-inf")]
WORDS = ["", " ", "x", "auto", "on", "a\x00b", "a\nb", "a: b", "é\u202e😀", "\ud800", "null", "1", "x" * 100_000]
PATHS = ["../../x", f"/tmp/{CANARY}", "/etc/passwd", "/dev/zero", "/dev/stdin", "/proc/self/mem", ".", "~", "a/../../b"]
PATHS += [f"/nowhere/{CANARY}", f"file:///tmp/{CANARY}", f"http://127.0.0.1:9/{CANARY}", "cartpole_ppo.json"]
HOSTILE = [_CODE, f"eval({_CODE!r})", f"os.system('touch {CANARY}')", f"$(touch {CANARY})", f"`touch {CANARY}`"]
HOSTILE += [
    f"${{{CANARY}}}",
    f"{{{{{CANARY}}}}}",
    f"cpu; touch {CANARY}",
    f"!!python/object/apply:os.system [touch {CANARY}]",
]
HOSTILE += [
    CANARY,
    f"{CANARY}:Env-v0",
    f"gymnasium:{CANARY}:Env-v0",
    f"{CANARY}.run",
    f"<mujoco><include file='{CANARY}'/></mujoco>",
]
MODULES = ["os", "os:system", "gymnasium:os:Env-v0", "subprocess.Popen", "torch.nn.Linear", "__class__", "__init__"]
SHAPES: list[Any] = [
    [],
    {},
    [[]],
    [None],
    {"": {}},
    {"name": {}},
    {"cfg": []},
    [0] * 1000,
    {CANARY: CANARY},
    {"$ref": "#"},
]
YAML = [
    f"!!python/object/apply:os.system ['touch {CANARY}']",
    f"!!python/name:{CANARY}.run",
    f"!!python/module:{CANARY}",
]
YAML += [
    "!!binary aGk=",
    "!!set {a}",
    "&a [*a]",
    "*nobody",
    "<<: 3",
    "? [a]",
    "!x y",
    "0o17",
    "2026-01-02",
    "- - -",
    "%TAG ! x",
]
BYTES = [
    b"\xff",
    b"\x00",
    b"\xef\xbb\xbf",
    b"{",
    b"}",
    b"[",
    b'"',
    b",",
    b":",
    b"\\",
    b"\n",
    b"NaN",
    b"//",
    b"#",
    b"\t",
    b"'",
]

Spot = tuple[Any, Any]  # a list or dict, and one of its indices or keys


def spots(data: Any) -> Iterator[Spot]:
    """Every place in a config, whatever it has become."""
    for key, value in list(
        data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from spots(value)


def put(data: dict, path: str, value: Any) -> Spot:
    """Set a dotted key, whatever is in its way; where it is then."""
    *sections, key = path.split(".")
    for section in sections:
        if not isinstance(data.get(section), dict):
            data[section] = {}
        data = data[section]
    data[key] = copy.deepcopy(value)
    return data, key


class Mutator:
    """Draws mutations.

    Args:
        draw: what is random.
        keys: those that a config may have somewhere.
        names: of registered parts.
        others: further configs, of which parts are taken.
        changes: values by dotted key, such as change what a config does; a mutation often begins with one of these.
    """

    def __init__(
        self,
        draw: random.Random,
        keys: list[str],
        names: list[str],
        others: list[Any],
        changes: Sequence[Mapping[str, Any]],
    ):
        self.draw, self.keys, self.names, self.others, self.changes = draw, keys, names, others, changes

    def junk(self) -> Any:
        """A value that is hardly ever right."""
        kinds = [NUMBERS, WORDS, PATHS, HOSTILE, MODULES, SHAPES, self.names, self.keys, [None, True, False]]
        return copy.deepcopy(self.draw.choice(self.draw.choice(kinds)))

    def like(self, value: Any) -> Any:
        """A value of the same kind that may be right."""
        match value:
            case bool():
                return not value
            case int():
                return self.draw.choice([value + 1, -value, value // 2, 10 * value, 0, float(value), 1000 * value])
            case float():
                return self.draw.choice([-value, 0.0, 2 * value, 1e3 * value, 1e-3 * value, round(value)])
            case str():
                return self.draw.choice([value.upper(), value[:-1], f"{value} ", self.draw.choice(self.names)])
            case list():
                return self.draw.choice([value[:-1], [*value, *value[:1]], value[::-1], [value]])
        return self.junk()

    def replace(self, data: Any, spot: Spot) -> None:
        spot[0][spot[1]] = self.junk()

    def change(self, data: Any, spot: Spot) -> None:
        spot[0][spot[1]] = self.like(spot[0][spot[1]])

    def remove(self, data: Any, spot: Spot) -> None:
        del spot[0][spot[1]]

    def add(self, data: Any, spot: Spot) -> None:
        part = spot[0][spot[1]] if self.draw.random() < 0.7 else data
        if isinstance(part, dict):
            part[self.draw.choice([*self.keys, *self.keys, *HOSTILE, *WORDS, *PATHS])] = self.junk()
        elif isinstance(part, list):
            part.insert(self.draw.randint(0, len(part)), self.junk())

    def misspell(self, data: Any, spot: Spot) -> None:
        part, key = spot
        if isinstance(key, str) and key:
            at = self.draw.randrange(len(key))
            ways = [
                key[:at] + key[at + 1 :],
                key[:at] + key[at] + key[at:],
                key.upper(),
                f"{key} ",
                key.replace("_", "-"),
            ]
            part[self.draw.choice(ways)] = part.pop(key)

    def swap(self, data: Any, spot: Spot) -> None:
        other = self.draw.choice(list(spots(data)))
        here, there = copy.deepcopy((spot[0][spot[1]], other[0][other[1]]))
        spot[0][spot[1]], other[0][other[1]] = there, here

    def wrap(self, data: Any, spot: Spot) -> None:
        value = spot[0][spot[1]]
        spot[0][spot[1]] = self.draw.choice(
            [[value], {"cfg": value}, {"name": value}, {str(spot[1]): value}, [value, value]]
        )

    def deepen(self, data: Any, spot: Spot) -> None:
        spot[0][spot[1]] = f"@deep{self.draw.choice([5, 60, 300, 900, 5000])}{self.draw.choice('[{')}@"

    def graft(self, data: Any, spot: Spot) -> None:
        other = self.draw.choice(self.others)
        part, key = self.draw.choice(list(spots(other)))
        here = spot[0] if isinstance(spot[0], dict) and isinstance(key, str) and self.draw.random() < 0.5 else None
        target, at = (here, key) if here is not None else spot
        target[at] = copy.deepcopy(part[key])

    def tree(self, data: Any) -> Any:
        """The config with a few mutations of its values and structure."""
        data, changed = copy.deepcopy(data), []
        if self.changes and self.draw.random() < 0.5:
            changed = [put(data, path, value) for path, value in self.draw.choice(self.changes).items()]
        ways: list[Callable] = [self.replace] * 4 + [self.change] * 3 + [self.add] * 3
        ways += [self.remove, self.misspell, self.swap, self.wrap, self.deepen, self.graft, self.graft]
        for _ in range(self.draw.choice([1, 1, 1, 2, 3])):
            near = [spot for part, key in changed if key in part for spot in ((part, key), *spots(part[key]))]
            found = near if near and self.draw.random() < 0.8 else list(spots(data))
            if found:
                self.draw.choice(ways)(data, self.draw.choice(found))
        return data

    def text(self, data: bytes) -> bytes:
        """The file with one mutation of its bytes."""
        lines, at = data.split(b"\n"), self.draw.randrange(len(data) + 1)
        line = self.draw.randrange(len(lines))
        match self.draw.randrange(8):
            case 0:
                return data[:at]
            case 1:
                return data[:at] + data[at + self.draw.randint(1, 20) :]
            case 2:
                return data[:at] + self.draw.choice(BYTES) + data[at:]
            case 3:
                return b"\n".join([*lines[:line], lines[line], *lines[line:]])
            case 4:
                return b"\n".join(lines[:line] + lines[line + 1 :])
            case 5:
                return data.decode(errors="replace").encode(self.draw.choice(["utf-16", "utf-8-sig", "utf-32-be"]))
            case 6:
                token = self.draw.choice(YAML).encode()
                return b"\n".join([*lines[:line], lines[line].rpartition(b":")[0] + b": " + token, *lines[line + 1 :]])
        return data[:at] + bytes([self.draw.randrange(256)]) + data[at + 1 :]

    def file(self, data: Any) -> tuple[bytes, str]:
        """A mutated config as the bytes of a file, and the ending of its name."""
        suffix = self.draw.choice([".json", ".json", ".yaml"])
        only_text = self.draw.random() < 0.15
        tree = data if only_text else self.tree(data)
        if suffix == ".json":
            text = json.dumps(tree, indent=1, ensure_ascii=self.draw.random() < 0.5)
        else:
            text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
        content = _deep(text).encode(errors="surrogatepass")
        return self.text(content) if only_text or self.draw.random() < 0.05 else content, suffix


def _deep(text: str) -> str:
    """With placeholders turned into what is nested so deep, which no encoder writes."""

    def nested(found: re.Match) -> str:
        opens, closes = {"[": ("[", "]"), "{": ('{"a": ', "}")}[found[2]]
        return opens * int(found[1]) + "1" + closes * int(found[1])

    return re.sub(r"""['"]?@deep(\d+)([\[{])@['"]?""", nested, text)
