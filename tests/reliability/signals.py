"""SIGTERM and SIGINT at random moments: saved, exit status 143 or 130, in time, and resumed bit for bit.

`python tests/reliability/signals.py --signals 20 --keep`. Some signals arrive during the first compilation.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runs import TINY, ending, reference, resume_run, start_run, steps_logged, write_results

from ecrl.run.checkpoint import latest


def stopped(folder: Path, number: int, wait: float) -> float | None:
    """Seconds from the signal to the end of a run, `wait` seconds after its folder is made; None if it had ended."""
    run = start_run(folder)
    while not (folder / "run" / "config.json").exists():
        assert run.ended() is None, run.out.read_text()
        time.sleep(0.001)
    time.sleep(wait)
    before = time.monotonic()
    if run.ended() is not None:
        return None
    os.kill(run.pid, number)
    status, took = run.end(), time.monotonic() - before
    if status == 0:  # it was over already
        return None
    assert status == 128 + number, f"exit status {status}: {run.out.read_text()}"
    output = run.out.read_text()
    assert "interrupted at " in output and "Traceback" not in output, output
    return took


def signals(count: int, seed: int, folder: Path, numbers: tuple[int, ...]) -> list[float]:
    """Stop runs by signals and resume them; return the seconds that each took to stop."""
    draw, (expected, seconds) = random.Random(seed), reference(folder / "whole")
    times: list[float] = []
    while len(times) < count:
        at = folder / f"{len(times)}_{draw.random()}"
        took = stopped(at, numbers[len(times) % len(numbers)], draw.uniform(0.0, 0.9 * seconds))
        if took is None:
            continue
        logged = steps_logged(at / "run")
        if logged:
            assert latest(at / "run").name == f"step_{logged}", "the last iteration is not saved"
        assert resume_run(at) == 0, (at / "out.txt").read_text()
        assert ending(at / "run") == expected, f"other bits: {at}"
        times.append(took)
        shutil.rmtree(at)
    return times


def stopped_compiling(folder: Path, wait: float) -> float:
    """Seconds from SIGTERM to the end of a process that had begun to compile `wait` seconds before."""
    folder.mkdir()
    compiled = TINY | {"trainer": TINY["trainer"] | {"compile": "on"}}
    (folder / "run.json").write_text(json.dumps(compiled))
    command = [sys.executable, "-m", "ecrl", "train", "run.json", "--run-dir", "run"]
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    with (folder / "out.txt").open("wb") as out:
        run = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)
    while not (folder / "run" / "config.json").exists():
        assert run.poll() is None, (folder / "out.txt").read_text()
        time.sleep(0.01)
    time.sleep(wait)
    before = time.monotonic()
    run.terminate()
    status, took, output = run.wait(1200.0), time.monotonic() - before, (folder / "out.txt").read_text()
    assert status == 143 and "interrupted at 0 env steps" in output and "Traceback" not in output, f"{status}: {output}"
    return took


def main() -> None:
    """Stop and resume runs, compare their ends, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write the figures to RESULTS.md")
    args, results = parser.parse_args(), []
    for name in ("SIGTERM", "SIGINT"):
        folder = Path(tempfile.mkdtemp(prefix="signals_"))
        number = signal.Signals[name]
        times = signals(args.signals, args.seed, folder, (number,))
        shutil.rmtree(folder)
        count = len(times)
        results.append(
            f"{name} {count} times at random moments: {count} of {count} saved, exit status {128 + number}, resumed "
            f"bit for bit; longest {max(times):.2f} s, median {sorted(times)[count // 2]:.2f} s."
        )
    folder, draw, count = Path(tempfile.mkdtemp(prefix="signals_")), random.Random(args.seed), -(-args.signals // 4)
    times = [stopped_compiling(folder / f"compiling_{n}", draw.uniform(0.0, 12.0)) for n in range(count)]
    shutil.rmtree(folder)
    results.append(f"SIGTERM {count} times within the first compilation: exit status 143; longest {max(times):.2f} s.")
    print("\n".join(results))
    if args.keep:
        write_results("Signals", "\n".join(results))


if __name__ == "__main__":
    main()
