"""Thousands of random mutations of each shipped config, checked by `ecrl check`; some accepted ones also start to run.

`python tests/reliability/mutations.py --count 10000 --keep [CONFIG...]`. A mutation must not end in a traceback, take
20 s, write outside of a run folder, start a program, or import or evaluate text of a config. Each fault is one line
that begins with the file and the place in it. Mutation `n` of a config is the same in every run. A defect is printed
with its number, and its file is saved. Warp is treated as not installed, because it compiles for half a minute and
writes to its own cache.
"""

import argparse
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1]))
from mutating import CANARY, Pool, mutated_file
from runs import write_results
from support.key_rows import TABLE
from watching import Watch

from ecrl.cli.main import main as ecrl
from ecrl.compile.jit import compiler_fault
from ecrl.config.json_schema import KINDS, json_schema
from ecrl.envs.mujoco.camera import backend
from ecrl.envs.mujoco.scene.models import mujoco
from ecrl.registry import registered
from ecrl.run.video_writer import encoder

CONFIGS = Path(__file__).parents[2] / "configs"
SECONDS = 20.0  # of processor time, since the machine may be busy with other work
CHUNK = 500  # mutations to a process: what it makes is remembered there
ROOM = 8 << 30  # bytes that it may map: what asks for more is to be refused, not to drive the machine into the ground
BOUNDED = {"trainer.iterations": 1, "trainer.compile": "off", "trainer.num_envs": 4, "trainer.buffer_size": 8}
BOUNDED |= {"trainer.eval_freq": 10**9, "trainer.use_wandb": False, "algorithm.cfg.n_epochs": 1}
_NAME = r"(?:[\w-]+|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
_PLACE = rf"(?:{_NAME}(?:\.{_NAME}|\[\d+\])*(?: \([\w.:-]+\))?: |:\d+(?::\d+)?: )"
_WHOLE = "not a config: |expected an object, |import of warp halted"  # lines about no place in the file
_GUARD = r"iteration 0 \(after 0 env steps\): (?=NaN or infinity in )"  # numbers that are right and lead to infinity
LINE = re.compile(rf"(?:mutated\.(?:json|yaml)(?:: {_PLACE}|:\d+(?::\d+)?: |: (?={_WHOLE}))|{_GUARD})\S")


class Outcome(NamedTuple):
    """The outcome of a mutation: `ok`, `refused`, or `defect` with its problems."""

    number: int
    end: str
    seconds: float
    lines: list[str]
    began: bool


def properties(schema: Any) -> set[str]:
    """Every key that a config may have somewhere."""
    if isinstance(schema, list):
        return set().union(*map(properties, schema))
    if not isinstance(schema, dict):
        return set()
    own = schema.get("properties")
    return (set(own) if isinstance(own, dict) else set()).union(*map(properties, schema.values()))


def called(*args: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the command line."""
    sys.argv, out, err = ["ecrl", *args], io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            ecrl()
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else 1
    return status, out.getvalue(), err.getvalue()


def faults(status: int, err: str) -> tuple[list[str], list[str]]:
    """Return the printed lines of a refusal, and the problems of the lines or of the exit status."""
    lines = [line for line in err.split("\n") if line and not line.startswith("warning: ")]
    problems = [f"not one line with its place: {line[:300]}" for line in lines if status == 2 and not LINE.match(line)]
    problems += [f"{len(line)} characters: {line[:300]}" for line in lines if len(line) > 1500]
    problems += [f"not printable: {line[:300]!r}" for line in lines if not line.isprintable()]
    if status not in (0, 2) or bool(lines) != (status == 2):
        problems.append(f"exit status {status}: {err[-300:]}")
    return lines, problems


def beginning(path: Path, out: str) -> bool:
    """Return True if an accepted config has few enough weights to start quickly."""
    weights = re.search(r"policy +([\d,]+) parameters", out)
    return weights is not None and int(weights[1].replace(",", "")) < 10**6


def tried(number: int, path: Path, watch: Watch, begin: bool) -> Outcome:
    """Check one file; if it is accepted and `begin` is true, also train it for one bounded iteration."""
    before, began, lines, problems = time.process_time(), False, [], []
    signal.setitimer(signal.ITIMER_PROF, 3 * SECONDS)
    try:
        with watch.within(None) as done:
            status, out, err = called("check", path.name)
        problems += done
        lines, faulty = faults(status, err)
        seconds = time.process_time() - before
        if status == 0 and begin and beginning(path, out):
            began, args = True, [f"--{key}={json.dumps(value)}" for key, value in BOUNDED.items()]
            with watch.within(path.parent / "outputs") as done:
                status, _, err = called("train", path.name, *args)
            problems += done
            faulty += faults(status, err)[1]
            shutil.rmtree(path.parent / "outputs", ignore_errors=True)
    except BaseException as error:
        problems.append(
            f"{type(error).__name__}: {str(error)[:300]}, {'begun' if began else 'checked'}: {_place(error)}"
        )
        faulty, seconds = [], time.process_time() - before
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    problems += [*faulty, *([f"{seconds:.1f} s"] if seconds >= SECONDS else [])]
    problems += [f"the canary {place} exists" for place in _canaries(path.parent) if place.exists()]
    return Outcome(number, "defect" if problems else "refused" if lines else "ok", seconds, problems or lines, began)


def _place(error: BaseException) -> str:
    """Return the place where an exception was raised, and the line of ecrl that called it."""
    steps, trace = [], error.__traceback__
    while trace:
        steps.append(f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}")
        trace = trace.tb_next
    own = [step for step in steps if "/ecrl/" in step]
    return " <- ".join(dict.fromkeys([*steps[-1:], *own[-1:]]))


def _canaries(folder: Path) -> list[Path]:
    return [folder / CANARY, folder / f"{CANARY}.imported", Path("/tmp", CANARY), folder / "canary"]


def _timed_out(*_: object) -> None:
    raise TimeoutError(f"longer than {3 * SECONDS:.0f} s")


def chunk(name: str, numbers: range, seed: int, folder: Path, begin: int) -> None:
    """Write the number of each mutation and then its Outcome, one per line; runs in a separate process."""
    configs = {path.stem: json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))}
    names = {part for kind in KINDS for part in registered(kind)}
    changes = [row.changed for row in TABLE]
    pool = Pool(sorted(properties(json_schema())), sorted(names), [*configs.values()], changes)
    os.chdir(folder)
    sys.path.append(str(folder / "modules"))
    sys.modules["warp"] = None  # pyright: ignore
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    signal.signal(signal.SIGPROF, _timed_out)
    (folder / "mutated.json").write_text(json.dumps(configs[name]))
    compiler_fault(), backend(), encoder(), mujoco()
    called("check", "mutated.json")  # what is imported, probed and compiled once, is not looked at
    called("train", "mutated.json", *[f"--{key}={json.dumps(value)}" for key, value in BOUNDED.items()])
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    watch, accepted = Watch(CANARY, encoder()), 0
    with (folder / "outcomes.jsonl").open("a") as file:
        for number in numbers:
            draw = random.Random(f"{seed} {name} {number}")
            content, suffix = mutated_file(draw, pool, configs[name])
            path = folder / f"mutated{suffix}"
            path.write_bytes(content)
            file.write(f"{number}\n")
            file.flush()
            outcome = tried(number, path, watch, begin > 0 and accepted % begin == 0)
            accepted += outcome.end == "ok"
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            if outcome.end == "defect":
                shutil.copy(path, folder / f"{name}_{number}{suffix}")


def mutated(name: str, count: int, seed: int, folder: Path, begin: int) -> list[Outcome]:
    """Return the outcomes of all mutations of a config; a dying or hanging process is a defect of its last mutation."""
    folder = folder / name
    (folder / "modules").mkdir(parents=True)
    (folder / "modules" / f"{CANARY}.py").write_text(f"open({str(folder / (CANARY + '.imported'))!r}, 'w')\n")
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        first = len(outcomes)
        ended = _forked(name, range(first, min(first + CHUNK, count)), seed, folder, begin)
        rows = [json.loads(line) for line in (folder / "outcomes.jsonl").read_text().splitlines()]
        outcomes += [Outcome(*row) for row in rows if isinstance(row, list)]
        assert rows, (
            f"{name}: the process {ended} before its first mutation: {(folder / 'out.txt').read_text()[-2000:]}"
        )
        if isinstance(rows[-1], int):
            outcomes.append(Outcome(rows[-1], "defect", 0.0, [f"the process {ended}"], False))
        (folder / "outcomes.jsonl").unlink()
    return outcomes


def _forked(name: str, numbers: range, seed: int, folder: Path, begin: int) -> str:
    """Return the exit status of the process of a chunk; kill it if it makes no progress for too long."""
    outcomes_file = folder / "outcomes.jsonl"
    outcomes_file.touch()
    if not (pid := os.fork()):
        handle = os.open(folder / "out.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(handle, 1), os.dup2(handle, 2)
        status = 1
        try:
            chunk(name, numbers, seed, folder, begin)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return f"ended with {os.waitstatus_to_exitcode(status)}"
        if time.time() > outcomes_file.stat().st_mtime + 1800.0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hung"
        time.sleep(0.05)


def kind(line: str) -> str:
    """A line without what is particular: files, names, numbers."""
    line = LINE.sub("", f"{line} ", count=1)
    return re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\d.]+", "_", line).partition(";")[0][:60]


def summed(name: str, outcomes: list[Outcome]) -> str:
    """Figures of a config."""
    ends, lines = Counter(one.end for one in outcomes), [line for one in outcomes for line in one.lines]
    kinds, slowest = len({kind(line) for line in lines}), max(one.seconds for one in outcomes)
    began = sum(one.began for one in outcomes)
    return (
        f"{name}: {len(outcomes)} mutations, {ends['refused']} refused in {len(lines)} lines of {kinds} kinds, "
        f"{ends['ok']} accepted, {began} of these begun, {ends['defect']} defects, slowest {slowest:.1f} s"
    )


def main() -> None:
    """Mutate and check configs, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help=f"of {', '.join(names)}; all if none is given")
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each")
    parser.add_argument(
        "--begin", type=int, default=10, help="begin to train every so many-th that is accepted; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write the figures to RESULTS.md")
    args, folder = parser.parse_args(), Path(tempfile.mkdtemp(prefix="mutations_")).resolve()
    defects = 0
    if unknown := {*args.configs} - {*names}:
        parser.error(f"no shipped config: {', '.join(sorted(unknown))}")
    for name in args.configs or names:
        outcomes = mutated(name, args.count, args.seed, folder, args.begin)
        print(summary := summed(name, outcomes), flush=True)
        wrong = {kind(one.lines[0]): one for one in outcomes if one.end == "defect"}
        if args.keep and not wrong:
            write_results(f"Mutations of {name}", summary)
        defects += len(wrong)
        for one in wrong.values():
            print(f"  {folder}/{name}/{name}_{one.number}: {'; '.join(one.lines)}"[:700], flush=True)
    if defects:
        raise SystemExit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
