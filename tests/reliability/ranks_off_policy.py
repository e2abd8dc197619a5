"""One rank of a run of every off-policy agent: `python ranks_off_policy.py OUT`, started once for each rank.

It trains each agent, and writes the leaves of its last state by kind.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.off_policy_agents import AGENTS, agent
from support.small_runs import last_state

from ecrl import distributed
from ecrl.algorithms.state_kinds import leaf_kinds
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build


def main(out: str) -> None:
    """Train, and write what this rank ends with."""
    torch.set_num_threads(1)
    distributed.start(True)
    for name in AGENTS:
        cfg = agent(name, **{"trainer.distributed": True, "trainer.iterations": 3})
        state = last_state(cfg)
        leaves = {
            f"{kind.value}/{'/'.join(path)}": state[path].clone().contiguous()
            for path, kind in leaf_kinds(state, kinds_of(build(cfg))).items()
        }
        place = f"{name}_{distributed.rank()}_of_{distributed.world_size()}"
        save_file(leaves, Path(out) / place)
    distributed.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
