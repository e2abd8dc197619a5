"""Single bit flips and truncations of checkpoint files and manifests: all detected, the previous checkpoint is used.

`python tests/reliability/flips.py --flips 1000 --cuts 100 --keep`. With `--algorithm dqn`, most bytes of
`state.safetensors` are the replay buffer and its sum tree.
"""

import argparse
import random
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from runs import RUNS, write_results

from ecrl import init_state, load, save, train_iter
from ecrl.config import config_from_dict
from ecrl.run.checkpoint import latest
from ecrl.run.resume import resume


def checkpoints(run: Path, algorithm: str) -> list[Path]:
    """Two checkpoints of a run; the newer one has a further file, and numbers of an evaluation with an exponent."""
    cfg = config_from_dict(RUNS[algorithm])
    records = train_iter(init_state(cfg), cfg)
    for step in (32, 64):
        state = [next(records), next(records)][1]["state"]
        logs = {"eval/avg_reward": 1.5e-07, "eval/std_reward": 2.0}
        save(run / "checkpoints" / f"step_{step}", state, cfg, logs, {"more.bin": bytes(range(64))})
    return [run / "checkpoints" / f"step_{step}" for step in (32, 64)]


def damaged(data: bytes, draw: random.Random, cut: bool) -> bytes:
    """Return the bytes with one flipped bit, or truncated, possibly to nothing."""
    at = draw.randrange(len(data))
    return data[:at] if cut else data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


def caught(run: Path, file: Path) -> bool:
    """Return True if one line names the file, the checkpoint before it is used, also to resume, and `load` refuses."""
    with warnings.catch_warnings(record=True, action="always") as recorded:
        used, (state, _) = latest(run), resume(run)
    messages = [str(warning.message) for warning in recorded]
    named = all(str(file) in line and " instead" in line and "\n" not in line for line in messages)
    try:
        load(file.parent)
    except ValueError as error:
        error_is_clear = str(file) in str(error) and "\n" not in str(error)
    else:
        error_is_clear = False
    return (
        used.name == "step_32" and int(state["sample_step"]) == 32 and len(messages) == 2 and named and error_is_clear
    )


def flips(count: int, cuts: int, seed: int, algorithm: str) -> Counter:
    """Return how many damages were detected, by kind and file."""
    run, draw, counts = Path(tempfile.mkdtemp(prefix="flips_")), random.Random(seed), Counter()
    newest = checkpoints(run, algorithm)[1]
    files = sorted(newest.iterdir())
    for number in range(count + cuts):
        kind, file = "truncations" if number >= count else "flips", files[number % len(files)]
        original = file.read_bytes()
        file.write_bytes(damaged(original, draw, kind == "truncations"))
        ok = caught(run, file)
        counts[kind, file.name, ok] += 1
        if not ok:
            print(f"not caught: {kind} of {file.name}")
        file.write_bytes(original)
    assert latest(run) == newest, "undamaged, it is used"
    shutil.rmtree(run)
    return counts


def main() -> None:
    """Damage and read checkpoints, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithm", choices=[*RUNS], default="ppo")
    parser.add_argument("--keep", action="store_true", help="write the figures to RESULTS.md")
    args = parser.parse_args()
    counts, lines = flips(args.flips, args.cuts, args.seed, args.algorithm), []
    for kind in ("flips", "truncations"):
        files = sorted({name for k, name, _ in counts if k == kind})
        by_file = ", ".join(f"{name} {counts[kind, name, True]}" for name in files)
        missed = sum(count for (k, _, ok), count in counts.items() if k == kind and not ok)
        lines.append(f"{kind}: {sum(counts[kind, n, True] for n in files)} caught ({by_file}), {missed} not.")
    print("\n".join(lines))
    if args.keep:
        name = "Damaged checkpoints" if args.algorithm == "ppo" else f"Damaged checkpoints, {args.algorithm}"
        write_results(name, "\n".join(lines))
    if any(not ok for _, _, ok in counts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
