"""Hours of one run with evaluations, checkpoints and logs: memory, descriptors and speed stay constant.

`python tests/reliability/soak.py --hours 2 --keep`. The run is `ecrl train` in a separate process, observed through
/proc and ended by SIGTERM. The first evaluation and save start threads and open files, so samples begin at the second
checkpoint. The second quarter of the samples is compared with the last one. Speed is in steps per second of CPU time,
so other processes and a stop (SIGSTOP) do not count. A fixed piece of work in this process measures the speed of the
machine at the same time.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

CONFIG = Path(__file__).parents[2] / "configs" / "cartpole_ppo.json"
TRAINER = {"iterations": 10**7, "enable_eval": True, "keep_checkpoints": 3}
TICK = os.sysconf("SC_CLK_TCK")


class Sample(NamedTuple):
    """Resources and progress of a run and its children at one moment."""

    seconds: float
    megabytes: float
    descriptors: int
    threads: int
    cpu_seconds: float
    steps: int
    machine_seconds: float
    yardstick: float


class Judged(NamedTuple):
    """One line of figures, and True if they are good."""

    text: str
    well: bool


def family(pid: int) -> list[int]:
    """A process and its children, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def status(pid: int) -> dict[str, int]:
    """The numbers of /proc/PID/status; memory is in kB there."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def cpu_seconds(pid: int) -> float:
    """Return user and system time, with the time of ended children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICK


def machine_seconds() -> float:
    """CPU seconds that all processes of the machine took, and what its host took from it."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICK


def steps_of(log: Path) -> int:
    """Env steps of the last whole row; the file may be large."""
    with log.open("rb") as file:
        file.seek(max(log.stat().st_size - 20_000, 0))
        return json.loads(file.read().split(b"\n")[-2])["sample_step"]


def yardstick() -> float:
    """CPU seconds of a fixed piece of work."""
    before = time.process_time()
    sum(number * number for number in range(300_000))
    return time.process_time() - before


def sample(pid: int, run: Path, since: float) -> Sample:
    """Look at a run and its children."""
    pids = family(pid)
    statuses = [status(one) for one in pids]
    return Sample(
        seconds=time.monotonic() - since,
        megabytes=sum(numbers["VmRSS"] for numbers in statuses) / 1024,
        descriptors=sum(len(os.listdir(f"/proc/{one}/fd")) for one in pids),
        threads=sum(numbers["Threads"] for numbers in statuses),
        cpu_seconds=sum(map(cpu_seconds, pids)),
        steps=steps_of(run / "metrics.jsonl"),
        machine_seconds=machine_seconds(),
        yardstick=yardstick(),
    )


def watched(folder: Path, seconds: float, every: float, period: int) -> list[Sample]:
    """Samples of a run in `folder`/run that evaluates and saves once per `period` env steps.

    They are written to `folder`/samples.jsonl too.
    """
    config = json.loads(CONFIG.read_text())
    trainer = config["trainer"] | TRAINER | {"eval_freq": period, "save_freq": period}
    (folder / "soak.json").write_text(json.dumps(config | {"trainer": trainer}))
    command = [sys.executable, "-m", "ecrl", "train", "soak.json", "--run-dir", "run"]
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        samples = _samples(process, folder, seconds, every)
    finally:
        process.send_signal(signal.SIGTERM)
        ended = process.wait(1200.0)
    assert ended == 128 + signal.SIGTERM, f"exit status {ended}: {(folder / 'out.txt').read_text()[-2000:]}"
    return samples


def _samples(process: subprocess.Popen, folder: Path, seconds: float, every: float) -> list[Sample]:
    samples, begun = [], time.monotonic()
    while len(list((folder / "run" / "checkpoints").glob("step_*"))) < 2:
        assert process.poll() is None, (folder / "out.txt").read_text()
        assert time.monotonic() < begun + 3600.0, "no second checkpoint within an hour"
        time.sleep(0.1)
    since = time.monotonic()
    while time.monotonic() < since + seconds:
        assert process.poll() is None, (folder / "out.txt").read_text()[-2000:]
        samples.append(sample(process.pid, folder / "run", since))
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(samples[-1]._asdict()) + "\n")
        time.sleep(max(since + len(samples) * every - time.monotonic(), 0.0))
    return samples


def quarters(samples: list[Any]) -> tuple[list[Any], list[Any]]:
    """The second and the last one."""
    size = len(samples) // 4
    return samples[size : 2 * size], samples[-size:]


class Rates(NamedTuple):
    """Between neighbouring samples, `[n]` each: what was done, and how the machine was meanwhile."""

    seconds: np.ndarray
    per_cpu_second: np.ndarray
    neighbours: np.ndarray  # cores that other processes used
    yardstick: np.ndarray


def rates(samples: list[Sample]) -> Rates:
    """Return the speeds between samples; leave out samples in which the process did not run."""
    rows = []
    for a, b in pairwise(samples):
        took, own = b.seconds - a.seconds, b.cpu_seconds - a.cpu_seconds
        if own > 0.3 * min(took, 1.0) and b.steps > a.steps:
            others = (b.machine_seconds - a.machine_seconds - own) / took
            rows.append((b.seconds, (b.steps - a.steps) / own, others, 0.5 * (a.yardstick + b.yardstick)))
    return Rates(*np.array(rows).T)


def drift(rates: Rates, seconds: float) -> float:
    """Return the gain of speed over so many seconds, percent, without the effect of the machine's load.

    log(rate) = a + b time + c neighbours + d log(yardstick)
    """
    columns = (np.ones_like(rates.seconds), rates.seconds, rates.neighbours, np.log(rates.yardstick))
    (_, slope, *_), *_ = np.linalg.lstsq(np.stack(columns, 1), np.log(rates.per_cpu_second), rcond=None)
    return 100.0 * float(np.expm1(slope * seconds))


def memory(samples: list[Sample], percent: float) -> Judged:
    """Judge the growth of resident memory from the second to the last quarter."""
    before, after = (median(s.megabytes for s in part) for part in quarters(samples))
    hours = 0.5 * (samples[-1].seconds - samples[0].seconds) / 3600
    growth = 100.0 * (after / before - 1.0)
    text = f"memory {before:.1f} MB, then {after:.1f} MB: {growth:+.2f} %, {(after - before) / hours:+.1f} MB per hour"
    return Judged(text, growth < percent)


def flat(samples: list[Sample], name: str) -> Judged:
    """Judge a count by its smallest values: a save or an evaluation adds a few for a moment, a leak forever."""
    before, after = (min(getattr(s, name) for s in part) for part in quarters(samples))
    most = max(getattr(s, name) for s in samples)
    return Judged(f"{name} {before} at least, then {after}, {most} at most", before == after)


def speed(samples: list[Sample], percent: float) -> Judged:
    """Judge steps per CPU second without the effect of the machine's load; also report the raw numbers."""
    parts = [rates(part) for part in quarters(samples)]
    before, after = (float(np.median(part.per_cpu_second)) for part in parts)
    wall = [(p[-1].steps - p[0].steps) / (p[-1].seconds - p[0].seconds) for p in quarters(samples)]
    sticks = [float(np.median(part.yardstick)) for part in parts]
    gained = drift(rates(samples), 0.5 * samples[-1].seconds)
    change, slower = (100.0 * (b / a - 1.0) for a, b in ((before, after), sticks))
    text = (
        f"steps per CPU second {before:,.0f}, then {after:,.0f}: {change:+.1f} %, {gained:+.1f} % apart from the "
        f"machine's load (a fixed piece of work took {slower:+.1f} % longer); per second of the clock "
        f"{wall[0]:,.0f}, then {wall[1]:,.0f}"
    )
    return Judged(text, abs(gained) <= percent)


def judged(samples: list[Sample], percent_memory: float, percent_speed: float) -> list[Judged]:
    """Every figure."""
    return [
        memory(samples, percent_memory),
        flat(samples, "descriptors"),
        flat(samples, "threads"),
        speed(samples, percent_speed),
    ]


def main() -> None:
    """Watch a run and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--period", type=int, default=500_000, help="env steps between evaluations, and checkpoints")
    parser.add_argument("--memory", type=float, default=2.0, help="percent that memory may grow")
    parser.add_argument("--speed", type=float, default=5.0, help="percent that speed may change; inf: any")
    parser.add_argument("--keep", action="store_true", help="write the figures to RESULTS.md")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    samples = watched(folder, 3600.0 * args.hours, args.every, args.period)
    verdict = judged(samples, args.memory, args.speed)
    hours = (samples[-1].seconds - samples[0].seconds) / 3600
    lines = [f"{hours:.2f} hours, {samples[-1].steps:,} env steps, {len(samples)} samples; second and last quarter:"]
    lines += [f"- {one.text}{'' if one.well else ' (NOT flat)'}" for one in verdict]
    print("\n".join(lines))
    if not all(one.well for one in verdict):
        raise SystemExit(f"1: {folder}")
    shutil.rmtree(folder)
    if args.keep:
        from runs import write_results

        write_results("Soak", "\n".join(lines))


if __name__ == "__main__":
    main()
