"""Train in several processes (ranks) that torchrun starts.

All ranks have the same weights, and each rank has its own environments. Inside an iteration, ranks exchange data only
through `all_sum`, `all_max` and `all_mean`. These functions call the custom operator `ecrl::all_sum`, which a compiled
graph can contain. If there is only one rank, as before a call of `start`, all three functions return `x` unchanged.
"""

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from ecrl.errors import ConfigError, UserError
from ecrl.pytree import flatten, unflatten

T = TypeVar("T")
_TIMEOUT = timedelta(days=7)
"""Maximum time that a rank waits for the other ranks, for example while rank 0 evaluates the policy.

The timeout can be long, because torchrun stops all ranks as soon as one rank dies.
"""


class _Ranks(NamedTuple):
    """The place of this process among the ranks.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        store: key-value store that survives restarts by torchrun, or None if this process is not connected to a store.
    """

    rank: int
    size: int
    store: Any


_ranks = _Ranks(0, 1, None)  # `start` sets this value, and `stop` resets it


def rank() -> int:
    """Return the rank of this process, which is 0 if there is only one process."""
    return _ranks.rank


def world_size() -> int:
    """Return the number of processes that train together."""
    return _ranks.size


@contextmanager
def _short_errors() -> Iterator[None]:
    """Convert a communication error inside this context to a one-line UserError.

    The function drops the traceback of the error, because the traceback's frames would keep the process group alive.
    """
    try:
        yield
    except RuntimeError as error:
        cause = " ".join(str(error).split("]", 1)[-1].split(". ")[0].split())
        raise UserError(f"rank {rank()}: another rank ended ({cause}); read its last message for the reason") from None


torch.library.define("ecrl::all_sum", "(Tensor x) -> Tensor")


@torch.library.impl("ecrl::all_sum", ("CPU", "CUDA"))
def _all_sum(x: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    with _short_errors():
        dist.all_reduce(out)
    return out


@torch.library.register_fake("ecrl::all_sum")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _all_sum_vmap(info: Any, in_dims: tuple, x: Tensor) -> tuple[Tensor, Any]:
    return torch.ops.ecrl.all_sum(x), in_dims[0]


torch.library.register_vmap("ecrl::all_sum", _all_sum_vmap)


def all_sum(x: Tensor) -> Tensor:
    """Return the sum of `x` over all ranks, bitwise identical on every rank. If there is only one rank, return `x`.

    >>> all_sum(torch.ones(2))
    tensor([1., 1.])
    """
    return x if world_size() == 1 else torch.ops.ecrl.all_sum(x)


def all_max(x: Tensor) -> Tensor:
    """Return the maximum over all ranks of the 0-d tensor `x`. If there is only one rank, return `x`.

    >>> all_max(torch.tensor(2.0))
    tensor(2.)
    """
    if world_size() == 1:
        return x
    own = torch.arange(world_size(), device=x.device) == rank()
    return all_sum(torch.where(own, x, torch.zeros_like(x))).amax()


def all_mean(x: T, *, weight: Tensor) -> T:
    """Average every tensor in `x` over all ranks, weighted by `weight`. If there is only one rank, return `x`.

        sum_ranks(weight * x) / sum_ranks(weight)        0 if all weights are 0

    On a rank with weight 0, the tensors may contain NaN or infinity. The ranks exchange all tensors in one message.

    Args:
        x: a tree of float tensors: nested TensorDicts, tuples, lists and dicts.
        weight: the weight of this rank, a 0-d tensor.

    >>> all_mean(torch.ones(2), weight=torch.tensor(3.0))
    tensor([1., 1.])
    """
    if world_size() == 1:
        return x
    leaves, structure = flatten(x)
    sizes = [leaf.numel() for leaf in leaves]
    flat = torch.cat([weight.reshape(1).to(leaves[0].dtype), *(leaf.reshape(-1) for leaf in leaves)])
    flat = torch.where(weight == 0.0, 0.0, flat * torch.cat([weight.new_ones(1), weight.expand(sum(sizes))]))
    total, *sums = all_sum(flat).split([1, *sizes])
    means = [(part / torch.where(total == 0.0, 1.0, total)) for part in sums]
    pairs = zip(means, leaves, strict=True)
    return unflatten(structure, [mean.reshape(leaf.shape).to(leaf.dtype) for mean, leaf in pairs])


def any_rank(flag: bool) -> bool:
    """Return True if `flag` is True on any rank. All ranks must call this function together, between two iterations."""
    return flag if world_size() == 1 else bool(all_sum(torch.tensor([int(flag)])) > 0)


def _read_number(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        problem = f"{name} is {text!r}" if text else f"{name} is not set"
        raise ConfigError(f"trainer.distributed: {problem}; start with torchrun --nproc-per-node K -m ecrl train ...")
    return int(text)


def local_device(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the device of this rank: the GPU with index LOCAL_RANK, or `name` itself.

    The function returns the GPU if there are several ranks, GPUs are available, and `name` is `cuda` or `auto`.

    Raises: ConfigError if LOCAL_RANK is missing or not a number, or if this machine has no GPU with this index.
    """
    if world_size() == 1 or name not in ("cuda", "auto") or not torch.cuda.is_available():
        return name
    local, gpus = _read_number("LOCAL_RANK", environ), [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if local >= len(gpus):
        problem = f"LOCAL_RANK is {local}, but this machine has {', '.join(gpus)}"
        raise ConfigError(f"trainer.device: {name}: {problem}; start at most {len(gpus)} processes here")
    return gpus[local]


def start(distributed: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Join the process group of the processes that torchrun started, if `distributed` is True.

    If torchrun started only one process, connect to the key-value store without a process group. Call `start` once,
    before any other function of this module. After each restart, the process group uses a new key prefix in the store,
    so that ranks do not read messages of an earlier attempt.

    Raises: ConfigError if an environment variable of torchrun is missing or invalid, or if the store cannot be reached.
        The error message names the variable.
    """
    global _ranks
    one_process = environ.get("WORLD_SIZE", "1") == "1"
    if not distributed or _ranks.store is not None or (one_process and "TORCHELASTIC_RESTART_COUNT" not in environ):
        return
    size, own_rank, port = (_read_number(name, environ) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    if own_rank >= size:
        raise ConfigError(
            f"trainer.distributed: RANK is {own_rank}, expected less than WORLD_SIZE, {size}; let torchrun set both"
        )
    torchrun_has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host = environ.get("MASTER_ADDR", "localhost")
    try:
        is_master = own_rank == 0 and not torchrun_has_store
        store = TCPStore(host, port, size, is_master=is_master, timeout=timedelta(minutes=5))
    except (TypeError, RuntimeError) as error:
        problem = str(error).split("\n")[0]
        raise ConfigError(f"trainer.distributed: MASTER_ADDR {host}, MASTER_PORT {port}: {problem}") from None
    if one_process:
        _ranks = _Ranks(0, 1, store)
        return
    attempt_store = PrefixStore(f"ecrl_restart_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=attempt_store, rank=own_rank, world_size=size, timeout=_TIMEOUT)
    _ranks = _Ranks(own_rank, size, store)
    atexit.register(_stop_at_exit)


def stop() -> None:
    """Destroy the process group, if there is one, and reset this module to a single rank."""
    global _ranks
    if world_size() > 1:
        dist.destroy_process_group()
    _ranks = _Ranks(0, 1, None)


def _stop_at_exit() -> None:
    """Destroy the process group if this process exits without calling `stop`, for example after an error.

    A thread of gloo holds the tensors of the last message, and needs the GIL to release these tensors. During shutdown,
    the Python interpreter kills this thread, and the process fails with "terminate called without an active exception".
    Destroying the process group ends the thread before the shutdown. With NCCL, destroying the process group would wait
    for the other ranks, so this function aborts the process group first.
    """
    if world_size() > 1 and dist.group.WORLD is not None:
        dist.group.WORLD.abort()  # `abort` has no effect with gloo
        stop()


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of times that torchrun has restarted the processes."""
    return 0 if _ranks.store is None else int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def value_of_rank_0(name: str, make: Callable[[], str]) -> str:
    """Call `make` on rank 0, and return the resulting text on every rank.

    If a text is already stored under `name`, for example after a restart by torchrun, return this text without calling
    `make`. If this process is not connected to the store (see `start`), call `make` in this process, and store nothing.
    """
    if _ranks.store is None:
        return make()
    store = PrefixStore("ecrl", _ranks.store)
    if rank() == 0 and not store.check([name]):
        store.set(name, make())
    return store.get(name).decode()


def set_flag(name: str) -> None:
    """Set the flag `name`, so that `has_flag` returns True after the next restart by torchrun.

    If this process is not connected to the store (see `start`), the function does nothing.
    """
    if _ranks.store is not None and not (store := PrefixStore("ecrl", _ranks.store)).check([name]):
        store.set(name, str(restarts()))


def has_flag(name: str) -> bool:
    """Return True if the flag `name` was set before the last restart by torchrun."""
    if not restarts():
        return False
    store = PrefixStore("ecrl", _ranks.store)
    return store.check([name]) and int(store.get(name)) < restarts()


def gather_on_rank_0(own: bytes) -> list[bytes]:
    """Gather the byte strings of all ranks on rank 0, in order of rank. On other ranks, return an empty list.

    Every rank must call this function.
    """
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    with _short_errors():
        dist.all_gather(sizes, torch.tensor([len(own)]))
        if rank() > 0:
            dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), 0)
            return []
        buffers = [torch.zeros(int(size), dtype=torch.uint8) for size in sizes[1:]]
        for sender, buffer in enumerate(buffers, 1):
            dist.recv(buffer, sender)
    return [own, *(buffer.numpy().tobytes() for buffer in buffers)]
