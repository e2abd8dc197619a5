"""The reference of the command line, made from its functions: what `ecrl COMMAND --help` says."""

import inspect
from collections.abc import Callable
from html import escape

from griffe import Docstring, DocstringSectionKind

from ecrl.cli import main as command_line

_INTRO = """# Commands

`python -m ecrl` is the same as `ecrl`; `ecrl COMMAND --help` says all this, too. [The command line](../command_line.md)
shows the commands at work."""


def _option(parameter: inspect.Parameter, about: str) -> str:
    flag = f"--{parameter.name.replace('_', '-')}"
    first = parameter.name.upper() if parameter.kind is parameter.POSITIONAL_ONLY else flag
    told = () if parameter.default in (parameter.empty, None, False, ()) else f" ({parameter.default})"
    return f"- `{first}`{told or ''}: {about}"


def _command(name: str, function: Callable) -> str:
    """A heading, what the command does, and its options."""
    about, told = {}, ""
    for section in Docstring(escape(inspect.getdoc(function) or "", quote=False)).parse("google", warnings=False):
        if section.kind is DocstringSectionKind.text:
            told += section.value
        elif section.kind is DocstringSectionKind.parameters:
            about = {one.name: " ".join(one.description.split()) for one in section.value}
    parameters = inspect.signature(function).parameters
    keys = ["- `--SECTION.KEY VALUE`: sets a key of the config"] if "overrides" in parameters else []
    options = [_option(parameters[key], text) for key, text in about.items()]
    return "\n\n".join(filter(None, (f"## ecrl {name}", told, "\n".join(options + keys))))


def command_page() -> dict[str, str]:
    """Markdown by path."""
    commands = command_line._WITH_KEYS | command_line._OTHERS
    imports = "- `--import MODULE`, with any command: imports your own parts; any number of times"
    return {"reference/commands.md": "\n\n".join((_INTRO, imports, *(_command(*one) for one in commands.items())))}
