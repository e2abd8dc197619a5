"""Time a run without a private part of torch: `python -m tests.support.time_without_a_part PART [ITERATIONS]`.

It prints the part, the CPU seconds of the process and its compilers, and the CPU milliseconds of an iteration (lower
quartile). Set TORCHINDUCTOR_CACHE_DIR to a folder for each part, because the cache does not know which part is missing.
An empty folder and 1 iteration time a cold start. Take parts in turn, a few times each.
"""

import argparse
import resource
import sys
import time
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch

import ecrl
from benchmarks.ecrl_runs import CONFIG


class _Layouts:
    """Compare the layouts of tensors one by one."""

    def __init__(self, leaves: list[torch.Tensor]):
        self.expected = self.of(leaves)

    @staticmethod
    def of(leaves: Any) -> list[tuple[Any, ...]]:
        return [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad) for x in leaves]

    def check(self, *leaves: torch.Tensor) -> bool:
        return self.of(leaves) == self.expected


PARTS = ["none", "eager", "products", "tiles", "tanh", "loops", "philox", "guards", "codegen", "builds"]


def leave_out(part: str) -> None:
    """Replace one part by inductor's own form, or by public functions."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    own_tanh = vars(CppVecOverrides)["tanh"]
    from ecrl import rng
    from ecrl.compile import cpu, cpu_matmul, jit, trace

    match part:
        case "products":
            trace.PRODUCTS = {}
        case "tiles":
            cpu_matmul.has_vector_instructions = lambda: False
        case "tanh":
            CppVecOverrides.tanh = own_tanh
        case "loops":
            cpu.rewriting_loops = nullcontext
        case "philox":
            rng._only_vmap_is_active = lambda: False
        case "guards":
            jit._layout_guard = _Layouts
        case "codegen":
            cpu.skip_redundant_codegen = nullcontext
        case "builds":
            cpu.parallel_builds = nullcontext


def main(part: str, iterations: int) -> None:
    """Train CartPole by PPO in 4 environments with one thread, and print the times."""
    torch.set_num_threads(1)
    if part not in ("none", "eager"):
        leave_out(part)
    own = {"trainer.compile": "off" if part == "eager" else "on", "trainer.num_envs": 4, "trainer.enable_eval": False}
    cfg = ecrl.load_config(CONFIG, own | {"trainer.iterations": iterations})
    ends = [time.process_time() for one in ecrl.train_iter(ecrl.init_state(cfg), cfg) if one["log_type"] == "train"]
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in usage)
    each = sorted(after - before for before, after in pairwise(ends))
    print(f"{part} cpu {cpu:.1f} s", f"iteration {each[len(each) // 4] * 1e3:.3f} ms" if each else "", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time a run without one private part of torch.")
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("iterations", nargs="?", type=int, default=1)
    args = parser.parse_args()
    sys.exit(main(args.part, args.iterations))
