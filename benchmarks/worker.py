"""Run one contestant in a separate process: `python -m benchmarks.worker MODULE:FUNCTION JSON`.

`FUNCTION(**json)` returns `work`, a function without arguments that completes one unit of work and returns its count,
such as env steps. The worker answers in JSON lines on stdout: first the setup time, then for each line `N` on stdin the
time of N calls of `work`. All other output goes to stderr.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import TextIO

PACKAGES = {  # module: distribution
    **{name: name for name in ("torch", "tensordict", "torchrl", "numpy", "gymnasium", "mujoco")},
    **{name: name for name in ("jax", "jaxlib", "flax", "optax", "rejax", "gymnax", "rlax")},
    "stable_baselines3": "stable-baselines3",
}


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process in MiB, without the parent process, unlike `getrusage`."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def timed(work: Callable[[], int], times: int) -> dict[str, float]:
    """Make `times` calls of `work`. Return the seconds, the total count and the peak memory in MiB."""
    start = time.perf_counter()
    count = sum(work() for _ in range(times))
    return {"seconds": time.perf_counter() - start, "count": count, "peak_rss_mb": peak_rss_mb()}


def answers() -> TextIO:
    """Return the real stdout, and redirect file descriptor 1 to stderr, so that output of libraries goes there."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return out


def main() -> None:
    """Set up the contestant. For each number on stdin, make this number of calls of `work`, and print the answer."""
    start, out = time.perf_counter(), answers()
    module, function = sys.argv[1].split(":")
    work = getattr(import_module(module), function)(**json.loads(sys.argv[2]))
    ready = {"setup_s": time.perf_counter() - start, "peak_rss_mb": peak_rss_mb()}
    versions = {name: version(name) for module, name in PACKAGES.items() if module in sys.modules}
    print(json.dumps({**ready, "versions": versions}), file=out)
    for line in sys.stdin:
        print(json.dumps(timed(work, int(line))), file=out)


if __name__ == "__main__":
    main()
