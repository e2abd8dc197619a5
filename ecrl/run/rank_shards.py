"""Rank shards: the files of a checkpoint with the environments of the ranks other than rank 0.

Weights, statistics and counters are equal on all ranks; only the environments differ. Before a state is saved, the
other ranks send their environments to rank 0, which writes them as `rank_<i>.safetensors` into the checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as bytes_of_tensors
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms.state_kinds import PER_RANK, Kinds, leaf_kinds
from ecrl.config import Config, total_steps
from ecrl.distributed import any_rank, gathered, rank, world_size
from ecrl.errors import CheckpointError, NotFiniteError
from ecrl.loop.buffers import kinds_of
from ecrl.loop.build import build
from ecrl.loop.iteration import crossed, steps_per_iteration
from ecrl.loop.signals import asked
from ecrl.run.loggers import ending
from ecrl.types import LogData


def _own(state: TensorDict, kinds: Kinds) -> dict[str, Tensor]:
    """The leaves that each rank has of its own (kinds environment and buffer), by name."""
    paths = [path for path, kind in leaf_kinds(state, kinds).items() if kind in PER_RANK]
    return {"/".join(path): cast(Tensor, state[path]) for path in paths}


def _of_others(state: TensorDict, kinds: Kinds) -> dict[str, bytes]:
    """On rank 0 the files of the other ranks; a message of all of them."""
    own = {name: x.detach().cpu().contiguous() for name, x in _own(state, kinds).items()}
    parts = gathered(bytes_of_tensors(own))
    return {f"rank_{i}.safetensors": part for i, part in enumerate(parts) if i > 0}


def is_due(step: int, cfg: Config) -> bool:
    """Return True if a state after `step` env steps may be saved. Every rank returns the same."""
    size, trainer = steps_per_iteration(cfg), cfg.trainer
    due = crossed(step, size, trainer.save_freq) or step >= total_steps(cfg, world_size())
    return due or (trainer.enable_eval and crossed(step, size, trainer.eval_freq))


def is_complete(record: LogData) -> bool:
    """Return True if a record has the files of all ranks, so that a run can resume from its checkpoint."""
    return world_size() == 1 or "files" in record


def with_others(records: Iterator[LogData], cfg: Config) -> Iterator[LogData]:
    """Add the other ranks' files to the records of rank 0 whose states may be saved (collective).

    If any rank was asked to stop, the records end on all ranks after the same iteration.
    """
    kinds = kinds_of(build(cfg))
    with ending(records):
        for record in records:
            stopping = record["log_type"] == "train" and any_rank(asked() is not None)
            if record["log_type"] == "train" and (stopping or is_due(record["sample_step"], cfg)):
                record["files"] = _of_others(record["state"], kinds)
            yield {**record, "stopping": True} if stopping else record
            if stopping:
                return


def with_others_at_crash(records: Iterator[LogData], cfg: Config) -> Iterator[LogData]:
    """If the finite guard stops a run, add the files of the other ranks to its error.

    If environments are not in the state, leave the error unchanged: only one rank may have it, and the step cannot be
    repeated.
    """
    try:
        yield from records
    except NotFiniteError as error:
        run = build(cfg)
        if not run.env.is_pure:
            raise
        files = _of_others(error.state, kinds_of(run))
        raise NotFiniteError(str(error), error.report, error.state, files) from None


def with_own(state: TensorDict, cfg: Config, path: Path) -> TensorDict:
    """The state of a checkpoint with the environments of this rank.

    Raises: CheckpointError if another number of ranks saved it.
    """
    saved = 1 + len(list(path.glob("rank_*.safetensors")))
    if saved != world_size():
        problem = f"{path}: was saved by {saved} ranks, this run has {world_size()}"
        raise CheckpointError(f"{problem}; resume with as many ranks, or start a new run")
    if rank() == 0:
        return state
    own, state = tensors_from_bytes((path / f"rank_{rank()}.safetensors").read_bytes()), state.clone()
    expected = _own(state, kinds_of(build(cfg)))
    if {n: x.shape for n, x in own.items()} != {n: x.shape for n, x in expected.items()}:
        raise CheckpointError(f"{path}/rank_{rank()}.safetensors: does not fit the config; use that of its run")
    for name, leaf in own.items():
        state[tuple(name.split("/"))] = leaf.to(torch.device(expected[name].device))
    return state.lock_()
