"""Crash folders: save the state before an iteration with NaN or infinity, and repeat that iteration."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ecrl.algorithms import Run
from ecrl.config import Config
from ecrl.distributed import world_size
from ecrl.errors import CheckpointError, NotFiniteError, UserError
from ecrl.loop.iteration import check_state, iterations
from ecrl.loop.nonfinite_report import explained
from ecrl.registry import user_modules
from ecrl.run.checkpoint import changed_conditions, conditions, load_run, read_files, snapshot, write
from ecrl.run.rank_shards import load_own_shard
from ecrl.types import LogData

REPORT = "report.json"


def _replay_conditions(run: Run, cfg: Config) -> dict[str, Any]:
    """Return the settings that affect the bits of an iteration, besides its state and config."""
    return {**conditions(run, cfg), "machine": platform.machine(), "ranks": world_size()}


def _replay_command(folder: Path, ranks: int, cfg: Config) -> str:
    """Return the shell command that repeats the iteration."""
    imports = "".join(f" --import {module}" for module in user_modules(cfg.model_dump_json()))
    distributed = f"torchrun --nproc-per-node {ranks} -m ecrl replay {folder} --distributed"
    return (f"ecrl replay {folder}" if ranks == 1 else distributed) + imports


def with_crash(records: Iterator[LogData], run: Run, cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """If the finite guard stops a run, write a report and the state before the iteration to `crash/` under `run_dir`.

    Raises: the run's NotFiniteError, with the command that repeats the iteration.
    """
    folder = Path(run_dir) / "crash"
    try:
        yield from records
    except NotFiniteError as error:
        command = _replay_command(folder, world_size(), cfg)
        try:
            report = {"message": str(error), **error.report, **_replay_conditions(run, cfg), "command": command}
            files = {**error.files, REPORT: (json.dumps(report, indent=2) + "\n").encode()}
            write(folder, snapshot(run, error.state, cfg, None, files))
        except CheckpointError as fault:
            raise NotFiniteError(
                f"{error}; the crash folder was not written: {fault}", error.report, error.state
            ) from None
        advice = f"repeat it with: {command}" if run.env.is_pure else f"the state before it is in {folder}"
        raise NotFiniteError(f"{error}; {advice}", error.report, error.state) from None


def _read(folder: Path) -> dict[str, Any]:
    files = read_files(folder) if (folder / "manifest.json").is_file() else {}
    if REPORT not in files:
        raise UserError(f"{folder}: no {REPORT}: expected the crash folder of a run, such as RUN/crash")
    return json.loads(files[REPORT])


def _compare_findings(report: dict[str, Any], now: NotFiniteError | None) -> Iterator[str]:
    """Yield lines that compare the findings of a repeated iteration with its report."""
    form, earlier = report["form"], ", ".join(report["met"])
    if now is None:
        yield f"{form}: everything is finite this time; the run had NaN or infinity in {earlier}"
        return
    places = ", ".join(now.report["met"])
    yield f"{form}: NaN or infinity in {places} again" + ("" if places == earlier else f"; the run had it in {earlier}")
    if now.report["found"] is None:
        yield f"eager, step by step: everything is finite; only the {form} form has NaN or infinity"
    else:
        yield f"eager, step by step: {explained(now.report)}"


def replay(folder: str | Path) -> Iterator[str]:
    """Repeat the iteration of a crash folder, first in its own form, then eagerly step by step. Yield lines of text.

    To repeat an iteration of several ranks, start the same number of ranks.

    Raises: UserError if the folder is not a crash folder; CheckpointError if it is damaged.
    """
    folder = Path(folder)
    report = _read(folder)
    yield f"reported: {report['message']}"
    run, state, cfg = load_run(folder)
    if changes := changed_conditions(report, _replay_conditions(run, cfg)):
        yield f"the bits may differ: {'; '.join(changes)}"
    if not run.env.is_pure:
        yield f"environments of {cfg.env.name} keep data outside of the state, so their steps cannot be repeated"
    elif report["ranks"] != world_size():
        problem = f"the iteration had {report['ranks']} ranks, this command has {world_size()}"
        yield f"{problem}; repeat it with: {_replay_command(folder, report['ranks'], cfg)}"
    else:
        yield from _compare_findings(report, _error_of_iteration(run, load_own_shard(run, state, folder), cfg))


def _error_of_iteration(run: Run, state: Any, cfg: Config) -> NotFiniteError | None:
    try:
        check_state(run, state, cfg)
        next(iterations(run, state, cfg))
    except NotFiniteError as error:
        return error
    return None
