"""Train eagerly while another process compiles the run (`trainer.compile: background`)."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, Popen

import torch

from ecrl.algorithms import Run
from ecrl.compile.background import Switch, switch_of
from ecrl.config import Config
from ecrl.registry import user_modules

CONFIG = "config.json"


@contextmanager
def compiling_in_background(run: Run, cfg: Config, iteration: int) -> Iterator[Callable[[int], bool]]:
    """Start to compile the run in another process, and return a function to call before each iteration.

    The function takes the number of completed iterations. The first call after the other process has succeeded sets the
    `Switch` of the run to compiled, and returns True. The next iteration then loads the compiled code from disk. All
    other calls return False. If the other process fails, the function warns once, and the run stays eager.

    The field `compiled_from` of the switch is the number of iterations after which the run becomes compiled. If this
    number is known from an earlier part of the run, no process is started. In this case, the first call after this
    number of iterations sets the switch to compiled, and returns True. If the run has already completed this number of
    iterations, the switch is set to compiled at once.

    On exit, a process that is still compiling is stopped. For runs that are not compiled in the background, the context
    does nothing.

    Args:
        run: run that will be trained.
        cfg: config of the run.
        iteration: number of iterations that the run has completed.
    """
    switch = switch_of(run.jit)
    if switch is None:
        yield lambda iteration: False
        return
    start = switch.compiled_from
    switch.eager = start is None or iteration < start
    if start is not None:
        yield lambda iteration: _switched(switch, iteration >= start, iteration)
        return
    with tempfile.TemporaryDirectory(prefix="ecrl-") as folder:
        errors = Path(folder) / "errors.txt"
        with errors.open("wb") as file:
            process = Popen(_command(cfg, Path(folder)), env=_env(), stdout=DEVNULL, stderr=file)
        has_warned = False

        def switched(iteration: int) -> bool:
            nonlocal has_warned
            status = process.poll()
            if status and not has_warned:
                has_warned = True
                lines = errors.read_text(errors="replace").strip().splitlines()
                reason = (
                    lines[-1].removeprefix(f"{Path(folder) / CONFIG}: ")
                    if lines
                    else f"the process ended with status {status}"
                )
                text = f"trainer.compile: background: running eager, slower per step: {reason}"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            return _switched(switch, status == 0, iteration)

        try:
            yield switched
        finally:
            process.kill()
            process.wait()


@contextmanager
def leaving_a_thread(run: Run) -> Iterator[None]:
    """Let torch use one thread less during an eager iteration of a run that is compiled in the background.

    The process that compiles needs a core. If torch used all cores, each parallel operation would wait for the thread
    whose core the compiling process also uses. After the compiling process has failed, and in a resumed run that starts
    no process, eager iterations also use one thread less, because the number of threads affects rounding.
    """
    switch, threads = switch_of(run.jit), torch.get_num_threads()
    if switch is None or not switch.eager or threads == 1:
        yield
        return
    torch.set_num_threads(threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _switched(switch: Switch, ready: bool, iteration: int) -> bool:
    """Set an eager switch to compiled if the compiled code is ready. Return True if this call changed the switch."""
    if not (switch.eager and ready):
        return False
    switch.eager, switch.compiled_from = False, iteration
    return True


def _command(cfg: Config, folder: Path) -> list[str]:
    """Write the config to the folder, and return the command that compiles a run with this config."""
    path, text = folder / CONFIG, cfg.model_dump_json()
    path.write_text(text)
    imports = [argument for module in user_modules(text) for argument in ("--import", module)]
    keys = ["--trainer.compile", "on", "--trainer.log_freq", "1"]  # a call of the run has one iteration
    return [sys.executable, "-P", "-m", "ecrl", "compile", str(path), *keys, *imports]


def _env() -> dict[str, str]:
    """Return the environment variables of the process that compiles.

    That process imports from the same paths as this process, and uses the same number of threads.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
