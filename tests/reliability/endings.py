"""Two ranks that end in every way a command can end; prints a row per rank: case, rank, exit status, last line.

Each rank is a fork of this process, which has imported everything once. It ends like a command, by the exit of the
interpreter. Its last line shows if its process group still exists when all of `ecrl` has finished.
"""

import atexit
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import free_port

from ecrl import distributed
from ecrl.cli import main as shell
from ecrl.cli.commands import Overrides
from ecrl.errors import NotFiniteError, UserError

WAYS = {
    "success": None,
    "UserError": UserError("a fault"),
    "NotFiniteError": NotFiniteError("NaN", {}),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(3),
    "RuntimeError": RuntimeError("a fault"),
}
"""Both ranks end this way. In the ways below, rank 1 does something else."""
ONE_RANK_FAILS = ("rank 1 dies in all_sum", "rank 1 dies in gather_on_rank_0", "rank 1 is stuck")


def command(way: str) -> None:
    """Exchange a message as training does, then end this way."""
    distributed.start(True)
    distributed.all_sum(torch.ones(1000))
    if way in ONE_RANK_FAILS and distributed.rank() == 1:
        if way == "rank 1 is stuck":
            time.sleep(3600.0)  # the parent kills it
        os._exit(7)
    if way == "rank 1 dies in all_sum":
        distributed.all_sum(torch.ones(1000))
    elif way == "rank 1 dies in gather_on_rank_0":
        distributed.gather_on_rank_0(b"state")
    elif way == "rank 1 is stuck":
        raise UserError("a fault")
    elif (error := WAYS[way]) is not None:
        raise error


def state_at_exit() -> None:
    """Registered first, so it runs last."""
    print("process group stands" if dist.is_initialized() else "process group destroyed", flush=True)


def as_rank(way: str, rank: int, port: int, out: Path) -> None:
    """Become this rank, and run the command."""
    handle = os.open(out, os.O_CREAT | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    atexit.register(state_at_exit)

    def train(*, overrides: Overrides = ()) -> None:
        command(way)

    shell._WITH_OVERRIDES["train"] = train
    sys.argv = ["ecrl", "train"]
    shell.main()


def main(ways: list[str]) -> bool:
    """Fork the ranks of each way in turn; return True in the parent."""
    folder = Path(tempfile.mkdtemp())
    for way in ways:
        port, pids = free_port(), []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                as_rank(way, rank, port, folder / str(rank))
                return False
            pids.append(pid)
        for rank, pid in enumerate(pids):
            if way == "rank 1 is stuck" and rank == 1:
                os.kill(pid, signal.SIGKILL)  # rank 0 has ended by now
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            text = (folder / str(rank)).read_text()
            print(json.dumps([way, rank, status, text.splitlines()[-1] if text else ""]), flush=True)
            (folder / str(rank)).unlink()
    folder.rmdir()
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
