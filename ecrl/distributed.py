"""Ranks: processes that train together, each with environments of its own and the same weights, started by torchrun.

Numbers pass between ranks by `all_sum` and `all_mean` alone, in compiled code one operator, `ecrl::all_sum`. Without
`start` there is one rank, and a sum over ranks is what it is given.
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
_PATIENCE = timedelta(days=7)
"""How long a rank waits for the others, as while rank 0 evaluates; torchrun ends them all where one dies."""


class _Ranks(NamedTuple):
    """`store` holds strings by name, and outlives the processes where torchrun restarts them."""

    rank: int
    size: int
    store: Any


_ranks = _Ranks(0, 1, None)  # set once, by `start`


def rank() -> int:
    """Index of this process, 0 where it is alone."""
    return _ranks.rank


def world_size() -> int:
    """Number of processes that train together."""
    return _ranks.size


@contextmanager
def _one_line() -> Iterator[None]:
    """Around a message to other ranks: its failure becomes one line, without the frames that hold the process group."""
    try:
        yield
    except RuntimeError as error:
        told = " ".join(str(error).split("]", 1)[-1].split(". ")[0].split())
        raise UserError(f"rank {rank()}: another rank ended ({told}); what it said last tells why") from None


torch.library.define("ecrl::all_sum", "(Tensor x) -> Tensor")


@torch.library.impl("ecrl::all_sum", ("CPU", "CUDA"))
def _all_sum(x: Tensor) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    with _one_line():
        dist.all_reduce(out)
    return out


@torch.library.register_fake("ecrl::all_sum")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _of_batch(info: Any, in_dims: tuple, x: Tensor) -> tuple[Tensor, Any]:
    return torch.ops.ecrl.all_sum(x), in_dims[0]


torch.library.register_vmap("ecrl::all_sum", _of_batch)


def all_sum(x: Tensor) -> Tensor:
    """The sum of `x` over ranks, the same bits on every one of them; `x` itself where there is one.

    >>> all_sum(torch.ones(2))
    tensor([1., 1.])
    """
    return x if world_size() == 1 else torch.ops.ecrl.all_sum(x)


def all_mean(x: T, *, weight: Tensor) -> T:
    """The mean over ranks of every float tensor in `x`, weighted by each rank's count; `x` itself where there is one.

        sum_ranks(weight * x) / sum_ranks(weight)        0 where all weights are

    What has weight 0 may be NaN or infinite. All tensors travel together, in one message.

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


def agreed(flag: bool) -> bool:
    """Whether any rank says so; a message of its own, between iterations."""
    return flag if world_size() == 1 else bool(all_sum(torch.tensor([int(flag)])) > 0)


def _count(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        told = f"{name} is {text!r}" if text else f"{name} is not set"
        raise ConfigError(f"trainer.distributed: {told}; start with torchrun --nproc-per-node K -m ecrl train ...")
    return int(text)


def local_device(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """The device of this rank, where the config says `cuda` or `auto`: the GPU of its number on this machine.

    Raises: ConfigError naming the devices there are if it has none of that number.
    """
    if world_size() == 1 or name not in ("cuda", "auto") or not torch.cuda.is_available():
        return name
    local, have = _count("LOCAL_RANK", environ), [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if local >= len(have):
        told = f"LOCAL_RANK is {local}, but this machine has {', '.join(have)}"
        raise ConfigError(f"trainer.device: {name}: {told}; start at most {len(have)} processes here")
    return have[local]


def start(distributed: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Join the other processes that torchrun started, if the run is distributed; call it once, before anything else.

    Every restart of the processes meets under names of its own: what the dead ones left in the store is not theirs.

    Raises: ConfigError naming a variable that torchrun would have set.
    """
    global _ranks
    alone = environ.get("WORLD_SIZE", "1") == "1"
    if not distributed or _ranks.store is not None or (alone and "TORCHELASTIC_RESTART_COUNT" not in environ):
        return
    size, here, port = (_count(name, environ) for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"))
    if here >= size:
        raise ConfigError(f"trainer.distributed: RANK is {here}, expected below WORLD_SIZE, {size}")
    held = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
    host = environ.get("MASTER_ADDR", "localhost")
    try:
        store = TCPStore(host, port, size, is_master=here == 0 and not held, timeout=timedelta(minutes=5))
    except (TypeError, RuntimeError) as error:
        told = str(error).split("\n")[0]
        raise ConfigError(f"trainer.distributed: MASTER_ADDR {host}, MASTER_PORT {port}: {told}") from None
    if alone:
        _ranks = _Ranks(0, 1, store)
        return
    named = PrefixStore(f"ecrl_restart_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=named, rank=here, world_size=size, timeout=_PATIENCE)
    _ranks = _Ranks(here, size, store)
    atexit.register(_stop_at_exit)


def stop() -> None:
    """Leave the other processes."""
    global _ranks
    if world_size() > 1:
        dist.destroy_process_group()
    _ranks = _Ranks(0, 1, None)


def _stop_at_exit() -> None:
    """Leave the other processes when this one ends without `stop`, as after an error.

    A thread of gloo holds the tensors of the last message, and needs Python's lock to release them. If the interpreter
    has begun to end by then, that thread ends by force, and the process with it: "terminate called without an active
    exception". Destroying the group joins the thread first. NCCL would wait for the other ranks, so it is aborted.
    """
    if world_size() > 1 and dist.group.WORLD is not None:
        dist.group.WORLD.abort()  # gloo has nothing to abort
        stop()


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started the processes anew."""
    return 0 if _ranks.store is None else int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def first_says(name: str, make: Callable[[], str]) -> str:
    """What rank 0 made under this name, on every rank; `make` is called there alone, and not again after a restart."""
    if _ranks.store is None:
        return make()
    store = PrefixStore("ecrl", _ranks.store)
    if rank() == 0 and not store.check([name]):
        store.set(name, make())
    return store.get(name).decode()


def say(name: str) -> None:
    """Leave word for the processes that torchrun may start anew in place of these."""
    if _ranks.store is not None and not (store := PrefixStore("ecrl", _ranks.store)).check([name]):
        store.set(name, str(restarts()))


def said_before(name: str) -> bool:
    """Whether processes that these were started in place of left this word, with `say`."""
    if not restarts():
        return False
    store = PrefixStore("ecrl", _ranks.store)
    return store.check([name]) and int(store.get(name)) < restarts()


def gathered(own: bytes) -> list[bytes]:
    """What every rank gives, on rank 0 in their order; nothing on the others."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    with _one_line():
        dist.all_gather(sizes, torch.tensor([len(own)]))
        if rank() > 0:
            dist.send(torch.frombuffer(bytearray(own), dtype=torch.uint8), 0)
            return []
        found = [torch.zeros(int(size), dtype=torch.uint8) for size in sizes[1:]]
        for sender, buffer in enumerate(found, 1):
            dist.recv(buffer, sender)
    return [own, *(buffer.numpy().tobytes() for buffer in found)]
