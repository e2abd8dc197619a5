"""Memory of a run with a large replay buffer, in a process of its own.

`python tests/support/buffer_memory.py FORM ROWS FOLDER` prints JSON, in bytes: one copy of each field of the buffer's
steps, the final observations, and the largest rise of the resident memory in a run that saves three checkpoints, in its
resumption, in `save` and in a copy of the buffer.
"""

import json
import sys
from pathlib import Path

import torch
from tensordict import TensorDict

sys.path.insert(0, str(Path(__file__).parents[1]))

from ecrl.config import Config
from ecrl.loop.iteration import init_state
from ecrl.pytree import flatten
from ecrl.run.checkpoint import save
from ecrl.run.train import run_config
from support.replay_agent import N, T, replaying


def resident(name: str) -> int:
    """Return a size from the status of this process, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


class Rise:
    """How much the resident memory rises at most within this context, in bytes."""

    def __enter__(self):
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present size
        self.before = resident("VmRSS")
        return self

    def __exit__(self, *error):
        self.bytes = resident("VmHWM") - self.before


def size(tree: TensorDict) -> int:
    """Return the bytes of all tensors."""
    return sum(x.numel() * x.element_size() for x in flatten(tree)[0])


def config(form: str, rows: int) -> Config:
    """Return a run that saves three checkpoints."""
    trainer = {"iterations": 6, "save_freq": 2 * N * T, "keep_checkpoints": 1, "compile": form}
    changes = {f"trainer.{key}": value for key, value in trainer.items()}
    return replaying(**changes, **{"algorithm.cfg.capacity": rows, "algorithm.cfg.padding": 1100})


def begin(folder: Path, cfg: Config) -> None:
    """Train a new run."""
    folder.with_suffix(".json").write_text(json.dumps(cfg.model_dump(mode="json")))
    run_config(folder.with_suffix(".json"), None, folder, {}, None, False, False)


def go_on(folder: Path) -> None:
    """Resume the run for two more iterations."""
    run_config(None, None, folder, {"trainer.iterations": 8}, folder, True, False)


def main(form: str, rows: int, folder: Path) -> None:
    """Measure, and print the figures."""
    torch.set_num_threads(1)
    begin(folder / "small", config(form, 100))  # imports everything, and warms the compiler up
    go_on(folder / "small")
    cfg = config(form, rows)
    with Rise() as run:
        begin(folder / "run", cfg)
    with Rise() as resumed:
        go_on(folder / "run")
    state = init_state(cfg)
    with Rise() as saved:
        save(folder / "saved", state, cfg)
    with Rise() as copied:
        state["replay"].clone()
    sizes = size(state["replay", "steps"]), size(state["replay", "final"])
    print(json.dumps([*sizes, *(rise.bytes for rise in (run, resumed, saved, copied))]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
