"""Save and load rank shards.

A rank shard is a file in a checkpoint folder, and contains the environments and replay buffers of one rank. Every rank
other than rank 0 has a shard. Weights, statistics and counters are equal on all ranks, so only rank 0 saves them.
Before rank 0 saves a state, the other ranks send their shards to rank 0. The shard of rank i is saved as the file
`rank_<i>.safetensors`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as bytes_of_tensors
from tensordict import TensorDict
from torch import Tensor

from ecrl.algorithms import Run
from ecrl.algorithms.state_kinds import PER_RANK, Kinds, leaf_kinds
from ecrl.config import Config, total_steps
from ecrl.distributed import any_rank, gather_on_rank_0, rank, world_size
from ecrl.errors import CheckpointError, NotFiniteError
from ecrl.loop.buffers import buffer_names, kinds_of, without_buffers
from ecrl.loop.iteration import decisions_of, is_due
from ecrl.loop.signals import asked
from ecrl.run.checkpoint import buffers_left_out
from ecrl.run.loggers import ending
from ecrl.types import LogData


def _per_rank_tensors(state: TensorDict, kinds: Kinds) -> dict[str, Tensor]:
    """Return the tensors of the environments and replay buffers, which differ between ranks, by name."""
    paths = [path for path, kind in leaf_kinds(state, kinds).items() if kind in PER_RANK]
    return {"/".join(path): cast(Tensor, state[path]) for path in paths}


def _gather_shards(state: TensorDict, kinds: Kinds) -> dict[str, bytes]:
    """Gather the shards of all other ranks on rank 0.

    On rank 0, return a dict from filename to shard. On the other ranks, return an empty dict. All ranks must call this
    function.
    """
    own = {name: x.detach().cpu().contiguous() for name, x in _per_rank_tensors(state, kinds).items()}
    parts = gather_on_rank_0(bytes_of_tensors(own))
    return {f"rank_{i}.safetensors": part for i, part in enumerate(parts) if i > 0}


def shards_without_buffers(files: Mapping[str, bytes], kinds: Kinds) -> dict[str, bytes]:
    """Return a checkpoint's extra files with the replay buffers removed from the shards."""
    names = buffer_names(kinds)
    if not names:
        return dict(files)

    def without(data: bytes) -> bytes:
        return bytes_of_tensors({n: x for n, x in tensors_from_bytes(data).items() if n.split("/")[0] not in names})

    return {name: without(data) if name.endswith(".safetensors") else data for name, data in files.items()}


def may_be_saved(record: LogData, cfg: Config) -> bool:
    """Return True if the run may save the state of this record. The result is the same on every rank."""
    trainer = cfg.trainer
    due = is_due(record, cfg, trainer.save_freq) or decisions_of(record) >= total_steps(cfg, world_size())
    return due or (trainer.enable_eval and is_due(record, cfg, trainer.eval_freq))


def has_all_shards(record: LogData) -> bool:
    """Return True if a run can resume from a checkpoint of this record. A run of several ranks needs all shards."""
    return world_size() == 1 or "files" in record


def with_shards(records: Iterator[LogData], run: Run, cfg: Config) -> Iterator[LogData]:
    """Add the other ranks' shards to each record that rank 0 may save. All ranks must use this consumer.

    If a signal asks any rank to stop, the records end on all ranks after the same iteration.
    """
    kinds = kinds_of(run)
    with ending(records):
        for record in records:
            stopping = record["log_type"] == "train" and any_rank(asked() is not None)
            if record["log_type"] == "train" and (stopping or may_be_saved(record, cfg)):
                state = record["state"] if cfg.trainer.save_replay else without_buffers(record["state"], kinds)
                record["files"] = _gather_shards(state, kinds)
            yield {**record, "stopping": True} if stopping else record
            if stopping:
                return


def with_shards_at_crash(records: Iterator[LogData], run: Run) -> Iterator[LogData]:
    """Add the other ranks' shards to the error that the finite guard raises.

    If the environments keep data outside of the state, leave the error unchanged. An iteration of these environments
    cannot be repeated, and some ranks may not raise the error.
    """
    try:
        yield from records
    except NotFiniteError as error:
        if not run.env.is_pure:
            raise
        files = _gather_shards(error.state, kinds_of(run))
        raise NotFiniteError(str(error), error.report, error.state, files) from None


def load_own_shard(run: Run, state: TensorDict, path: Path) -> TensorDict:
    """Return a checkpoint's state with the environments and replay buffers from the shard of this rank.

    On rank 0, return the state unchanged, because the checkpoint's state already has the environments of rank 0.

    Raises: CheckpointError if a different number of ranks saved the checkpoint, or if the shard does not fit the state.
    """
    saved = 1 + len(list(path.glob("rank_*.safetensors")))
    if saved != world_size():
        problem = f"{path}: was saved by {saved} ranks, but this run has {world_size()}"
        raise CheckpointError(f"{problem}; resume with {saved} ranks, or start a new run")
    if rank() == 0:
        return state
    own, state = tensors_from_bytes((path / f"rank_{rank()}.safetensors").read_bytes()), state.clone()
    expected = _per_rank_tensors(cast(TensorDict, state.exclude(*buffers_left_out(path))), kinds_of(run))
    if {n: x.shape for n, x in own.items()} != {n: x.shape for n, x in expected.items()}:
        raise CheckpointError(f"{path}/rank_{rank()}.safetensors: does not fit the config; use the config of its run")
    for name, leaf in own.items():
        state[tuple(name.split("/"))] = leaf.to(torch.device(expected[name].device))
    return state.lock_()
