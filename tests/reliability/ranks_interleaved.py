"""One rank of an off-policy run: `python ranks_interleaved.py CONFIG OUT`, started once for each rank.

It trains, and writes the learned leaves, the counts, the rows of its buffer and its logs.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from support import chunks
from support.replay_agent import KINDS

import ecrl
from ecrl import distributed
from ecrl.algorithms.state_kinds import Kind, leaf_kinds
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build


def main(config: str, out: str) -> None:
    """Train, and write what this rank ends with."""
    torch.set_num_threads(1)
    assert KINDS["replay"] is Kind.BUFFER and chunks.repeated_pole  # the imports register agent and environment
    distributed.start(True)
    cfg = ecrl.load_config(config)
    kept, steps = {}, 0
    for record in ecrl.train_iter(ecrl.init_state(cfg), cfg):
        state = record["state"]
        if record["log_type"] == "train":
            kept |= {f"log/{steps}/{name}": x for name, x in record["logs"].items()}
            steps += 1
    for path, kind in leaf_kinds(state, kinds_of(build(cfg))).items():
        kept[f"{kind.value}/{'/'.join(path)}"] = state[path]
    save_file({name: x.clone().contiguous() for name, x in kept.items()}, Path(out) / f"rank_{distributed.rank()}")
    distributed.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
