"""Faults injected one by one: a message that names the fault, no orphan process, earlier checkpoints intact.

`python tests/reliability/faults.py --keep`; `--only disk_full` for some of them. A full disk is a limit on the size of
files, which the parent sets and removes during the run. If mounting is possible, it is also a tiny disk.
"""

import argparse
import copy
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from runs import TINY, Run, ecrl_train, ending, forked, reference, resume_run, start_run, steps_logged, write_results

from ecrl.run.checkpoint import read_files, step_checkpoints

ROOT = Path(__file__).resolve().parents[2]
SLOW = copy.deepcopy(TINY)
SLOW["trainer"] |= {"iterations": 100, "keep_checkpoints": 100}
MARK = "ECRL_FAULTS"
LIMIT = 4000
"""Largest size of a file, bytes: enough for the output of a run, too small for its checkpoints."""


def wait(run: Run, condition: Callable[[], bool]) -> None:
    """Wait until `condition()` is true, and check that the run continues."""
    while not condition():
        assert run.ended() is None, f"ended too early: {run.out.read_text()}"
        time.sleep(0.002)


def marked(mark: str) -> list[int]:
    """Return the processes that were started with this mark in their environment."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


def no_orphan(mark: str) -> None:
    """Raise AssertionError if a process with this mark is there ten minutes later."""
    deadline = time.monotonic() + 600.0
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not marked(mark), f"left behind: {marked(mark)}"


def intact(run: Path) -> int:
    """Check the checksums of all checkpoints and return their number; raise CheckpointError if one is damaged."""
    for path in step_checkpoints(run):
        read_files(path)
    return len(step_checkpoints(run))


WRITERS = ("checkpoints: run/checkpoints/step_", "run/metrics.jsonl: ", "run/logs/events.out.tfevents")


def disk_full_for_a_while(folder: Path) -> str:
    """Checkpoint, log and TensorBoard find no room, then there is some again: nothing of the run is missing."""
    expected, _ = reference(folder / "whole", SLOW)
    run = start_run(folder / "full", SLOW)
    at = folder / "full" / "run"
    wait(run, lambda: steps_logged(at) >= 640)
    _, hard = resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    before = intact(at)
    wait(run, lambda: all(text in run.out.read_text() for text in WRITERS))
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert run.end() == 0, run.out.read_text()
    lines = run.out.read_text().splitlines()
    for text in WRITERS:
        failed = [line for line in lines if text in line and line.endswith("; the run goes on and tries again")]
        assert len(failed) == 1, f"{text}: {failed}"
    again = [line for line in lines if "works again, after" in line]
    assert len(again) == 3, again
    assert ending(at) == expected
    return f"said once each by checkpoints, log and TensorBoard, works again; {before} older intact, no row lost"


def disk_full_to_the_end(folder: Path) -> str:
    """The disk stays full: the run continues to its end, and the exit status shows that it is not saved."""
    run = start_run(folder, SLOW)
    wait(run, lambda: steps_logged(folder / "run") >= 640)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))
    status = run.end()
    last = run.out.read_text().splitlines()[-1]
    assert status == 2 and "cannot be written: " in last and "step_3200" in last, (status, run.out.read_text())
    assert steps_logged(folder / "run") >= 128  # every row there is can be read
    count = intact(folder / "run")
    assert resume_run(folder) == 0 and steps_logged(folder / "run") == 3200
    return f"exit status 2, {last!r}; {count} checkpoints intact, resumed to the end"


def disk_of_a_few_pages(folder: Path) -> str:
    """A real disk without room: ENOSPC at checkpoint, log and TensorBoard."""
    disk = folder / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, text=True)
    if made.returncode:
        return f"not run: {made.stderr.strip()}"
    try:
        (folder / "run.json").write_text(json.dumps(SLOW))
        run = ecrl_train(folder, "run.json", "--run-dir", "disk/run")
        status, output = run.end(), run.out.read_text()
        rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        count = intact(disk / "run")
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    last = output.splitlines()[-1]
    assert status == 2 and count > 2 and rows and "step_3200: cannot be written: No space left on device" in last, (
        output
    )
    assert output.count("; the run goes on and tries again") == 3 and "Traceback" not in output, output
    return f"exit status 2, {last!r}; {count} checkpoints intact, every row readable"


def video(folder: Path) -> str:
    """A full disk during a video warns and leaves no partial file, and the next video is made."""
    from ecrl.run.video_writer import background_worker, write_video

    images = [np.random.default_rng(i).integers(0, 255, (64, 64, 3), np.uint8) for i in range(20)]

    def job() -> None:
        warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
        with background_worker() as start:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            start(write_video, folder / "one.mp4", images, 20.0).result()
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            start(write_video, folder / "two.mp4", images, 20.0)

    run = forked(folder / "out.txt", job)
    assert run.end() == 0, run.out.read_text()
    lines = run.out.read_text().splitlines()
    assert len(lines) == 2 and "warning: videos: " in lines[0] and "videos: works again" in lines[1], lines
    assert sorted(p.name for p in folder.iterdir()) == ["out.txt", "two.mp4"]
    return lines[0]


def gymnasium(fault: str) -> dict[str, Any]:
    """Run environments in workers; one worker fails in its third step, in the second iteration."""
    config = copy.deepcopy(TINY)
    config["trainer"] |= {"buffer_size": 2, "iterations": 6, "save_freq": 8}
    settings = {"asynchronous": True, "timeout": 10.0, "kwargs": {"fault": fault}}
    config["env"] = {"name": "gymnasium:Count-v0", "cfg": settings}
    config["algorithm"]["cfg"]["batch_size"] = 8
    return config


def worker(folder: Path, fault: str, message: str) -> str:
    """A run whose worker fails ends in one line, saved, with no process left."""
    mark = uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(gymnasium(fault if fault != "killed" else "slow in step")))
    run = ecrl_train(folder, "run.json", "--run-dir", "run", **{MARK: mark})
    if fault == "killed":
        wait(run, lambda: (folder / "run" / "checkpoints" / "step_8").exists())
        os.kill(max(marked(mark)), signal.SIGKILL)
    status, output = run.end(), run.out.read_text()
    assert status == 2 and "Traceback" not in output, output
    last = output.splitlines()[-1]
    assert message in last and "Count-v0" in last, output
    no_orphan(mark)
    assert intact(folder / "run") >= 1
    return f"exit status 2, {last!r}, {intact(folder / 'run')} checkpoints intact, no orphan"


def tracker(folder: Path) -> str:
    """A killed W&B process warns once, the run continues, and no process is left."""
    mark = uuid.uuid4().hex
    config = copy.deepcopy(TINY)
    config["trainer"] |= {"use_wandb": True, "iterations": 400}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(config))
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(folder), MARK: mark}
    run = ecrl_train(folder, "run.json", "--run-dir", "run", **quiet)
    wait(run, lambda: steps_logged(folder / "run") > 64)
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    assert run.end() == 0, run.out.read_text()
    lines = [line for line in run.out.read_text().splitlines() if "W&B" in line]
    failed, *works_again = lines  # a slow run lasts until W&B works again
    assert "the run goes on and tries again" in failed and len(works_again) <= 1, lines
    assert all("works again" in line for line in works_again), lines
    assert steps_logged(folder / "run") == 400 * 32
    no_orphan(mark)
    return f"{lines[0]!r}; {intact(folder / 'run')} checkpoints intact, no orphan"


FAULTS: dict[str, Callable[[Path], str]] = {
    "disk_full_for_a_while": disk_full_for_a_while,
    "disk_full_to_the_end": disk_full_to_the_end,
    "disk_of_a_few_pages": disk_of_a_few_pages,
    "video": video,
    "worker_raises": lambda folder: worker(folder, "raise in step", "raised KeyError"),
    "worker_dies": lambda folder: worker(folder, "die in step", "lost its worker"),
    "worker_killed": lambda folder: worker(folder, "killed", "killed by SIGKILL"),
    "worker_hangs": lambda folder: worker(folder, "hang in step", "did not answer within 10 s"),
    "tracker_killed": tracker,
}


def main() -> None:
    """Run each fault in a separate folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--keep", action="store_true", help="write the figures to RESULTS.md")
    args, results = parser.parse_args(), []
    sys.path[:0] = [str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    from support import fake_gymnasium_envs  # noqa: F401  (registers Count-v0)

    for name in args.only:
        folder = Path(tempfile.mkdtemp(prefix=f"{name}_"))
        line = FAULTS[name](folder).replace(str(folder), "<folder>")
        results.append(f"- {name}: {line}")
        print(results[-1], flush=True)
        shutil.rmtree(folder)
    if args.keep:
        write_results("Faults", "\n".join(results))


if __name__ == "__main__":
    main()
