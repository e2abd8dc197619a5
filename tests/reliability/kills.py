"""kill -9 at random moments, half of them inside a save; resumed runs are compared with an uninterrupted run.

`python tests/reliability/kills.py --kills 100 --keep`. A moment is inside a save if temporary files of the save exist
afterwards: a new folder, or a folder that is being replaced or removed.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from runs import RUNS, Run, ending, reference, resume_run, start_run, steps_logged, write_results

SAVE = 0.004
"""Seconds that a save takes at most, about: a kill inside one comes so long after it was seen to begin."""


def traces(folder: Path) -> list[str]:
    """Return the temporary files of a save in the folder of the checkpoints."""
    try:
        return [name for name in os.listdir(folder / "run" / "checkpoints") if name.startswith(".")]
    except FileNotFoundError:
        return []


def killed(run: Run, folder: Path, draw: random.Random, inside: bool, seconds: float) -> bool:
    """Kill a run at a random moment; False if it had ended before."""
    moment = time.monotonic() + draw.uniform(0.0, seconds)
    while time.monotonic() < moment:
        time.sleep(0.0005)
    while inside and not traces(folder):  # the next save
        if run.ended() is not None:
            return False
    time.sleep(draw.uniform(0.0, SAVE) if inside else 0.0)
    try:
        os.kill(run.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return run.end() == -signal.SIGKILL


def kills(count: int, seed: int, folder: Path, deadline: float, algorithm: str) -> dict[str, int]:
    """Kill runs; return the number of kills inside and outside of a save, and of runs that ended with the same bits."""
    draw, (expected, seconds) = random.Random(seed), reference(folder / "whole", RUNS[algorithm])
    counts = {"inside a save": 0, "outside of one": 0, "before the first checkpoint": 0, "same bits": 0}
    tried = 0
    while counts["inside a save"] + counts["outside of one"] < count and time.monotonic() < deadline:
        tried += 1
        inside, at = counts["inside a save"] <= counts["outside of one"], folder / str(tried)
        run = start_run(at, RUNS[algorithm])
        if not killed(run, at, draw, inside, seconds):
            shutil.rmtree(at)
            continue
        saving = bool(traces(at))
        if inside and not saving and counts["outside of one"] >= count // 2:  # enough of these: it does not count
            shutil.rmtree(at)
            continue
        counts["inside a save" if saving else "outside of one"] += 1
        counts["before the first checkpoint"] += steps_logged(at / "run") < 64
        status = resume_run(at)
        assert status == 0, (at / "out.txt").read_text()
        if ending(at / "run") == expected and not traces(at):
            counts["same bits"] += 1
            shutil.rmtree(at)
        else:
            print(f"other bits: {at}")
    return counts


def main() -> None:
    """Kill and resume runs, compare their ends, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no further kill after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=[*RUNS], default="ppo")
    parser.add_argument("--keep", action="store_true", help="write the figures to RESULTS.md")
    args, before = parser.parse_args(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="kills_"))
    counts = kills(args.kills, args.seed, folder, before + 60.0 * args.minutes, args.algorithm)
    inside, outside = counts["inside a save"], counts["outside of one"]
    if counts["same bits"] == inside + outside:
        shutil.rmtree(folder)
    figures = (
        f"kill -9 {inside + outside} times, {inside} inside a save, {outside} outside of one, of all "
        f"{counts['before the first checkpoint']} before the first checkpoint: {counts['same bits']} of "
        f"{inside + outside} resumed bit for bit as the run that nothing stopped (state and every logged number), "
        f"{time.monotonic() - before:.0f} s."
    )
    print(figures)
    if args.keep:
        write_results("kill -9" if args.algorithm == "ppo" else f"kill -9, {args.algorithm}", figures)
    if counts["same bits"] < inside + outside:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
