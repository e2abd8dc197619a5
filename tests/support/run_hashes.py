"""Hashes of short runs of the shipped configs: `python -m tests.support.run_hashes [--configs NAME ...]`.

Run it before and after a refactoring. Equal lines show that the runs kept every bit. One line per config:

    <config> <SHA-256 of the last state> <SHA-256 of the logs of every iteration>

Each run has three small eager iterations on the CPU with one thread, seed 0 and no evaluation. It has a process of its
own, so a line does not depend on the other configs. Lines of different machines or versions of torch may differ.
"""

import argparse
import hashlib
import multiprocessing
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import ecrl

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {"trainer.num_envs": 8, "trainer.buffer_size": 32, "trainer.iterations": 3}
ALGORITHM = {"n_epochs": 2, "batch_size": 64, "group_size": 4, "learning_starts": 0}
"""Set where the algorithm has such a key: APG has none of these, and only GRPO has groups."""
LEFT_OUT = ("iterations", ("env", "token"))
"""Leaves of the state without a hash: a setting, and the number of an open host environment, drawn from the clock."""
MODE = {"trainer.compile": "off", "trainer.device": "cpu", "trainer.seed": 0, "trainer.enable_eval": False}


def digest(leaves: Iterable[tuple[Any, torch.Tensor]]) -> str:
    """SHA-256 of path, dtype, shape and bytes of every leaf, in the order of their paths."""
    hashed = hashlib.sha256()
    named = {name if isinstance(name, str) else "/".join(name): leaf for name, leaf in leaves}
    for name, leaf in sorted(named.items()):
        hashed.update(f"{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
        hashed.update(leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def small(path: Path) -> Any:
    """Load a config and shrink it."""
    own = ecrl.load_config(path).algorithm.cfg
    sizes = {f"algorithm.cfg.{key}": size for key, size in ALGORITHM.items() if hasattr(own, key)}
    return ecrl.load_config(path, SIZES | sizes | MODE)


def hashes(path: Path) -> str:
    """Run the config and return its line, without its name."""
    torch.set_num_threads(1)
    try:
        cfg = small(path)
        state, logs = ecrl.init_state(cfg), []
    except (ModuleNotFoundError, ecrl.ConfigError) as error:
        if "pip install" not in str(error):
            raise
        return f"skipped: {error}"
    for number, record in enumerate(ecrl.train_iter(state, cfg)):
        state = record["state"]
        logs += [((str(number), record["log_type"], name), torch.as_tensor(x)) for name, x in record["logs"].items()]
    leaves = ((name, leaf) for name, leaf in state.items(True, True) if name not in LEFT_OUT)
    line = f"{digest(leaves)} {digest(logs)}"
    ecrl.close(state, cfg)
    return line


def main(names: list[str]) -> None:
    """Print the lines of these configs."""
    processes = multiprocessing.get_context("fork")
    for name in names:
        with processes.Pool(1) as pool:
            print(name, pool.apply(hashes, (CONFIGS / f"{name}.json",)), flush=True)


if __name__ == "__main__":
    known = sorted(path.stem for path in CONFIGS.glob("*.json"))
    parser = argparse.ArgumentParser(description="Print hashes of short runs of the shipped configs.")
    parser.add_argument("--configs", nargs="+", choices=known, default=known, metavar="NAME", help="all by default")
    sys.exit(main(parser.parse_args().configs))
