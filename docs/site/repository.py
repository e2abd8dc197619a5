"""The web address of the repository that the site is built from."""

import re
import subprocess
from pathlib import Path


def origin() -> str:
    """Return the address of the clone's remote `origin`, or an empty text if the clone has none."""
    command = ["git", "-C", str(Path(__file__).parent), "config", "--get", "remote.origin.url"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def web_address(remote: str) -> str | None:
    """Return the web address of a git remote without credentials, or None if the remote is not on a server.

    >>> web_address("git@code.example:owner/name.git"), web_address("https://user:token@code.example/owner/name")
    ('https://code.example/owner/name', 'https://code.example/owner/name')
    >>> web_address("/folder/name.git")
    """
    match = re.fullmatch(r"(?:(?:https|ssh)://(?:[^@/]*@)?|[^@/:]+@)([\w.-]+)(?::\d+)?[:/](.+?)(?:\.git)?/?", remote)
    return match and f"https://{match[1]}/{match[2]}"
