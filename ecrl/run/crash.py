"""Write a crash folder if an iteration produces NaN or infinity, and repeat the iteration from its crash folder."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ecrl.algorithms import Run
from ecrl.compile.background import switch_of
from ecrl.config import Config
from ecrl.distributed import world_size
from ecrl.errors import CheckpointError, NotFiniteError, UserError
from ecrl.loop.iteration import check_state, iterations
from ecrl.loop.nonfinite_report import explained
from ecrl.registry import user_modules
from ecrl.run.checkpoint import changed_conditions, conditions, load_run, read_manifest, snapshot, verify, write
from ecrl.run.rank_shards import load_own_shard
from ecrl.types import LogData

REPORT = "report.json"


def _replay_conditions(run: Run, cfg: Config) -> dict[str, Any]:
    """Return the conditions that, besides the state and the config, affect the exact results of an iteration."""
    return {**conditions(run, cfg), "machine": platform.machine(), "ranks": world_size()}


def _replay_command(folder: Path, ranks: int, cfg: Config) -> str:
    """Return the shell command that repeats the iteration of a crash folder."""
    imports = "".join(f" --import {module}" for module in user_modules(cfg.model_dump_json()))
    distributed = f"torchrun --nproc-per-node {ranks} -m ecrl replay {folder} --distributed"
    return (f"ecrl replay {folder}" if ranks == 1 else distributed) + imports


def with_crash(records: Iterator[LogData], run: Run, cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """If the finite guard stops the run, write the crash folder `crash/` in `run_dir`.

    The crash folder contains a report, and the state before the iteration in which NaN or infinity appeared.

    Raises: NotFiniteError with the message of the original error and the command that repeats the iteration. If the
        environments keep data outside of the state, the message names the crash folder instead of the command. If the
        crash folder cannot be written, the message contains the reason.
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
        saved = f"the state before the iteration is in {folder}"
        advice = f"repeat the iteration with: {command}" if run.env.is_pure else saved
        raise NotFiniteError(f"{error}; {advice}", error.report, error.state) from None


def _read(folder: Path) -> dict[str, Any]:
    if not (folder / "manifest.json").is_file() or REPORT not in read_manifest(folder)["sha256"]:
        raise UserError(f"{folder}: no {REPORT}: expected the crash folder of a run, such as RUN/crash")
    verify(folder)
    return json.loads((folder / REPORT).read_bytes())


def _compare_findings(report: dict[str, Any], error: NotFiniteError | None) -> Iterator[str]:
    """Yield lines that compare a repeated iteration with the crash report.

    `error` is the NotFiniteError that the repeated iteration raised, or None.
    """
    mode, earlier = report["form"], ", ".join(report["met"])  # `mode` is compiled, eager or partly eager
    if error is None:
        yield f"{mode}: everything is finite this time; the run had NaN or infinity in {earlier}"
        return
    places = ", ".join(error.report["met"])
    difference = "" if places == earlier else f"; the run had NaN or infinity in {earlier}"
    yield f"{mode}: NaN or infinity in {places} again{difference}"
    if error.report["found"] is None:
        yield f"eager, step by step: everything is finite; only the {mode} iteration has NaN or infinity"
    else:
        yield f"eager, step by step: {explained(error.report)}"


def replay(folder: str | Path) -> Iterator[str]:
    """Repeat the iteration that a crash folder describes, and yield lines of text about the result.

    The iteration first runs compiled or eagerly, as in the original run. If NaN or infinity appears again, the
    iteration is repeated eagerly, step by step, to find the first NaN or infinite value. To repeat an iteration of a
    run with several ranks, start the same number of ranks. If the environments keep data outside of the state, as
    Gymnasium environments do, the function only yields the message of the report, and says that it cannot repeat the
    iteration.

    Raises: UserError if the folder is not a crash folder; CheckpointError if the crash folder is damaged.
    """
    folder = Path(folder)
    report = _read(folder)
    yield f"reported: {report['message']}"
    run, state, cfg = load_run(folder)
    if (switch := switch_of(run.jit)) is not None:  # repeat the iteration in the form that it had
        switch.eager = report["form"] == "eager"
        switch.compiled_from = cfg.trainer.iterations if switch.eager else 0
    if changes := changed_conditions(report, _replay_conditions(run, cfg)):
        yield f"results may differ by rounding: {'; '.join(changes)}"
    if not run.env.is_pure:
        yield f"environments of {cfg.env.label} keep data outside of the state, so their steps cannot be repeated"
    elif report["ranks"] != world_size():
        problem = f"the iteration had {report['ranks']} ranks, but this command has {world_size()}"
        yield f"{problem}; repeat the iteration with: {_replay_command(folder, report['ranks'], cfg)}"
    else:
        yield from _compare_findings(report, _error_of_iteration(run, load_own_shard(run, state, folder), cfg))


def _error_of_iteration(run: Run, state: Any, cfg: Config) -> NotFiniteError | None:
    try:
        check_state(run, state, cfg)
        next(iterations(run, state, cfg.replace(**{"trainer.log_freq": 1})))
    except NotFiniteError as error:
        return error
    return None
