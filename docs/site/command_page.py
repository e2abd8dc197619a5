"""Generate the reference page of the command line from the functions that `ecrl COMMAND --help` describes."""

import inspect
from collections.abc import Callable
from html import escape

from griffe import Docstring, DocstringSectionKind

from ecrl.cli import main as command_line

_INTRO = """# Commands

`python -m ecrl` is the same as `ecrl`. `ecrl COMMAND --help` prints the same descriptions.
The page [The command line](../command_line.md) shows examples."""


def _option(parameter: inspect.Parameter, description: str) -> str:
    flag = f"--{parameter.name.replace('_', '-')}"
    name = parameter.name.upper() if parameter.kind is parameter.POSITIONAL_ONLY else flag
    default = "" if parameter.default in (parameter.empty, None, False, ()) else f" ({parameter.default})"
    return f"- `{name}`{default}: {description}"


def _command(name: str, function: Callable) -> str:
    """Return the Markdown of a command: its heading, description and options."""
    descriptions, text = {}, ""
    for section in Docstring(escape(inspect.getdoc(function) or "", quote=False)).parse("google", warnings=False):
        if section.kind is DocstringSectionKind.text:
            text += section.value
        elif section.kind is DocstringSectionKind.parameters:
            descriptions = {item.name: " ".join(item.description.split()) for item in section.value}
    parameters = inspect.signature(function).parameters
    keys = ["- `--SECTION.KEY VALUE`: set a key of the config"] if "overrides" in parameters else []
    options = [_option(parameters[key], description) for key, description in descriptions.items()]
    return "\n\n".join(filter(None, (f"## ecrl {name}", text, "\n".join(options + keys))))


def command_page() -> dict[str, str]:
    """Return a dict from the path of the page to its Markdown."""
    commands = command_line._WITH_OVERRIDES | command_line._NO_OVERRIDES
    imports = "- `--import MODULE`, with any command: import a module that registers components; repeatable"
    return {"reference/commands.md": "\n\n".join((_INTRO, imports, *(_command(*item) for item in commands.items())))}
