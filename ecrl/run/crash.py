"""Crash folders: save the state before an iteration with NaN or infinity, and repeat that iteration."""

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ecrl.config import Config
from ecrl.distributed import world_size
from ecrl.errors import CheckpointError, NotFiniteError, UserError
from ecrl.loop.build import build
from ecrl.loop.iteration import train_iter
from ecrl.loop.nonfinite_report import explained
from ecrl.registry import own_modules
from ecrl.run.checkpoint import conditions, differing, load, read_files, save
from ecrl.run.rank_shards import with_own
from ecrl.types import LogData

REPORT = "report.json"


def _about(cfg: Config) -> dict[str, Any]:
    """Return everything, besides state and config, that the bits of an iteration depend on."""
    return {**conditions(cfg), "machine": platform.machine(), "ranks": world_size()}


def _command(folder: Path, ranks: int, cfg: Config) -> str:
    """Return the shell command that repeats the iteration."""
    imports = "".join(f" --import {module}" for module in own_modules(cfg.model_dump_json()))
    many = f"torchrun --nproc-per-node {ranks} -m ecrl replay {folder} --distributed"
    return (f"ecrl replay {folder}" if ranks == 1 else many) + imports


def with_crash(records: Iterator[LogData], cfg: Config, run_dir: str | Path) -> Iterator[LogData]:
    """If the finite guard stops a run, write `crash/` under `run_dir`: a report, and a checkpoint from before.

    Raises: the NotFiniteError of the run, with the command that repeats the iteration.
    """
    folder = Path(run_dir) / "crash"
    try:
        yield from records
    except NotFiniteError as error:
        again = _command(folder, world_size(), cfg)
        pure = build(cfg).env.is_pure
        try:
            report = {"message": str(error), **error.report, **_about(cfg), "command": again}
            save(
                folder, error.state, cfg, None, {**error.files, REPORT: (json.dumps(report, indent=2) + "\n").encode()}
            )
        except CheckpointError as fault:
            raise NotFiniteError(f"{error}; no crash folder: {fault}", error.report, error.state) from None
        advice = f"repeat it with: {again}" if pure else f"the state before it is in {folder}"
        raise NotFiniteError(f"{error}; {advice}", error.report, error.state) from None


def _read(folder: Path) -> dict[str, Any]:
    files = read_files(folder) if (folder / "manifest.json").is_file() else {}
    if REPORT not in files:
        raise UserError(f"{folder}: no {REPORT}: expected the crash folder of a run, such as RUN/crash")
    return json.loads(files[REPORT])


def _found_again(report: dict[str, Any], now: NotFiniteError | None) -> Iterator[str]:
    form, earlier = report["form"], ", ".join(report["met"])
    if now is None:
        yield f"{form}: everything is finite this time; the run had NaN or infinity in {earlier}"
        return
    places = ", ".join(now.report["met"])
    yield f"{form}: NaN or infinity in {places} again" + ("" if places == earlier else f"; the run had it in {earlier}")
    if now.report["found"] is None:
        yield f"eager, step by step: everything is finite; only the {form} form has it"
    else:
        yield f"eager, step by step: {explained(now.report)}"


def replay(folder: str | Path) -> Iterator[str]:
    """Repeat the iteration of a crash folder and yield lines of text: in its own form, then eagerly step by step.

    An iteration of several ranks needs as many ranks, each with its own environments.

    Raises: UserError if the folder is not a crash folder; CheckpointError if it is damaged.
    """
    folder = Path(folder)
    report = _read(folder)
    yield f"reported: {report['message']}"
    state, cfg = load(folder)
    if odd := differing(report, _about(cfg)):
        yield f"the bits may differ: {'; '.join(odd)}"
    if not build(cfg).env.is_pure:
        yield f"environments of {cfg.env.name} live outside of the state: their steps cannot be repeated"
    elif report["ranks"] != world_size():
        problem = f"the iteration had {report['ranks']} ranks, this command has {world_size()}"
        yield f"{problem}; repeat it with: {_command(folder, report['ranks'], cfg)}"
    else:
        yield from _found_again(report, _once(with_own(state, cfg, folder), cfg))


def _once(state: Any, cfg: Config) -> NotFiniteError | None:
    try:
        next(train_iter(state, cfg))
    except NotFiniteError as error:
        return error
    return None
