"""Side effects of a process, by Python's audit hook: written files, started programs, generated code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod"}
_PATHS |= {"shutil.rmtree", "shutil.copyfile", "shutil.move"}
_NEVER = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "socket.connect", "socket.bind"}
_NEVER |= {"webbrowser.open", "urllib.Request"}
_WORKER = "ecrl/envs/gymnasium/worker.py"  # which a config may ask for by name of its key
_ANSWERED = {"gymnasium", "numpy"}  # what a worker's answers are made of


def _outside(path: Any, folder: Path | None) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False  # a descriptor, which was opened before
    real = os.path.realpath(os.fsdecode(path))
    return real != os.devnull and (folder is None or not f"{real}{os.sep}".startswith(f"{folder}{os.sep}"))


class Watch:
    """Records actions that a config must not cause, in `done`, while `looking` is true."""

    def __init__(self, canary: str, encoder: str):
        self.canary, self.encoder, self.folder, self.looking, self.done = canary, encoder, None, False, []
        sys.addaudithook(self._on_event)

    @contextmanager
    def within(self, folder: Path | None) -> Iterator[list[str]]:
        """Record actions inside a `with` block; writing is allowed in `folder`, or nowhere if None."""
        self.folder, self.looking, self.done = folder and folder.resolve(), True, []
        try:
            yield self.done
        finally:
            self.looking = False

    def _on_event(self, event: str, args: tuple) -> None:
        if self.looking and (problem := self._wrong(event, args)):
            self.done.append(f"{event}: {problem}"[:500])

    def _wrong(self, event: str, args: tuple) -> str | None:
        if event == "open":
            path, _, flags = args
            wrong = bool(flags & _WRITES) and _outside(path, self.folder)
        elif event in _PATHS:
            wrong = any(_outside(path, self.folder) for path in args[:2])
        elif event == "subprocess.Popen":
            worker = args[0] == sys.executable and any(str(arg).endswith(_WORKER) for arg in args[1])
            wrong = not worker and (args[0] != self.encoder or _outside(args[1][-1], self.folder))
        elif event in ("import", "compile"):
            wrong = self.canary in str(args[0])
        elif event == "exec":
            wrong = self.canary in repr(args[0].co_consts) + repr(args[0].co_names)
        elif event == "pickle.find_class":
            wrong = args[0].partition(".")[0] not in _ANSWERED
        else:
            wrong = event in _NEVER
        return repr(args) if wrong else None
