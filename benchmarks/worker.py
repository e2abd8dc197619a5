"""One contestant in a process of its own: `python -m benchmarks.worker MODULE:FUNCTION JSON`.

`FUNCTION(**json)` gives `work`, a function without arguments that does one unit of work to its end and returns how many
things it did. The answers are one JSON line each on stdout: first what getting ready took, then for each line `N` on
stdin how long `work` took N times. Whatever else is printed goes to stderr.
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
    """The most memory this process ever held, MB; unlike that of `getrusage` without what its parent held."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def timed(work: Callable[[], int], times: int) -> dict[str, float]:
    """Seconds that `work` takes so many times, and the things it did."""
    start = time.perf_counter()
    count = sum(work() for _ in range(times))
    return {"seconds": time.perf_counter() - start, "count": count, "peak_rss_mb": peak_rss_mb()}


def answers() -> TextIO:
    """The real stdout; from here on file descriptor 1, and so whatever libraries print, is stderr."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return out


def main() -> None:
    """Get ready, then work as often as asked, until stdin ends."""
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
