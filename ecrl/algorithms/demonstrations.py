"""Read a data set of demonstrations, and draw the steps of an iteration from the data set."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms.core import Run, step_keys
from ecrl.algorithms.rows import rows_of
from ecrl.errors import CheckpointError, ConfigError
from ecrl.kernels.rollout import restarted_carry
from ecrl.pytree import mapped
from ecrl.spaces import Dict, Space, element_dtype, element_shape
from ecrl.storage.checkpoint_files import sha256_of_file
from ecrl.storage.demonstrations import read_about
from ecrl.storage.tensor_files import read_tensors

_KEY = "algorithm.cfg.demos"
_FIELDS = ("obs", "action", "reward", "done", "executed")


@dataclass(frozen=True)
class Demonstrations:
    """Data set of demonstrations in a file, as the field `data` of an algorithm.

    Attributes:
        path: path of the file, which `ecrl demo` writes.
        holdout: share of the episodes that are not learnt from. The last episodes of the file are held out.
    """

    path: str
    holdout: float = field(default=0.0, compare=False)

    def sha256(self) -> Tensor:
        """Return the SHA-256 of the file, as int64 `[4]`."""
        digest = bytes.fromhex(_or_config_error(sha256_of_file, Path(self.path)))
        words = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
        return torch.tensor(words)

    def check(self, run: Run) -> None:
        """Raise ConfigError unless the file has demonstrations of the run's environment."""
        tensors, _ = _or_config_error(read_about, Path(self.path))
        env = run.env
        expected = {**_leaves("obs", env.observation_space), "done": (torch.bool, ())}
        expected["action"] = element_dtype(env.action_space), element_shape(env.action_space)
        for name, (dtype, shape) in expected.items():
            if name not in tensors:
                raise ConfigError(f"{_KEY}: {self.path}: has no {name}; use demonstrations of this environment")
            own, size = tensors[name]
            if (own, size[1:]) != (dtype, shape):
                problem = f"{name} is {_described(own, size[1:])} per step, but {_described(dtype, shape)} in this"
                raise ConfigError(f"{_KEY}: {self.path}: {problem} environment; use demonstrations of this environment")

    def read(self, run: Run, device: torch.device) -> TensorDict:
        """Read the data set.

        Returns: a TensorDict with `train` and, if `holdout` is not 0, `holdout`. Each has `steps` `[M]` and `starts`,
            the index of the first step of each episode, int64 `[E]`.
        Raises: ConfigError if the file does not fit the run, or if an episode is too long for a policy with memory.
        """
        self.check(run)
        tensors = _or_config_error(read_tensors, Path(self.path))
        fields = {name: x.to(device) for name, x in tensors.items() if name.split(".")[0] in _FIELDS}
        rows = len(fields["done"])
        steps = TensorDict({tuple(name.split(".")): x for name, x in fields.items()}, [rows])
        ends = fields["done"].nonzero().flatten() + 1
        if not len(ends) or int(ends[-1]) != rows:
            raise ConfigError(f"{_KEY}: {self.path}: the last step has done false; write whole episodes")
        starts = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
        if run.policy.unit == "sequence" and (longest := int((ends - starts).max())) > run.static.buffer_size:
            raise ConfigError(
                f"trainer.buffer_size: {run.static.buffer_size} is below {longest}, the length of the longest "
                f"demonstration, but a policy with memory learns from whole episodes; use at least {longest}"
            )
        first = len(starts) - round(self.holdout * len(starts))
        if not first > 0 or (self.holdout and first == len(starts)):
            raise ConfigError(
                f"algorithm.cfg.holdout: {self.holdout:g} of {len(starts)} episodes leaves no episode to learn from, "
                "or none to hold out; use more demonstrations, or another share"
            )
        if first == len(starts):
            return TensorDict({"train": _part(steps, starts)}, [])
        cut = int(starts[first])
        held_out = _part(cast(TensorDict, steps[cut:]), starts[first:] - cut)
        return TensorDict({"train": _part(cast(TensorDict, steps[:cut]), starts[:first]), "holdout": held_out}, [])


def _part(steps: TensorDict, starts: Tensor) -> TensorDict:
    return TensorDict({"steps": steps, "starts": starts}, [])


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _or_config_error(read: Any, path: Path) -> Any:
    """Call `read(path)`. Raise ConfigError, with the config key, instead of CheckpointError."""
    try:
        return read(path)
    except CheckpointError as error:
        raise ConfigError(f"{_KEY}: {error}") from None


def _leaves(name: str, space: Space) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Map the name of each tensor of an observation to its dtype and shape."""
    if not isinstance(space, Dict):
        return {name: (element_dtype(space), element_shape(space))}
    parts = (_leaves(f"{name}.{key}", part) for key, part in space.items)
    return {key: leaf for part in parts for key, leaf in part.items()}


def drawn_batch(run: Run, state: TensorDict, part: TensorDict) -> TensorDict:
    """Draw demonstrated steps in place of a rollout.

    A policy of unit "step" receives `num_envs * buffer_size` single steps, drawn with replacement. A policy of unit
    "sequence" receives `num_envs` sequences of `buffer_size` consecutive steps. Each sequence begins with an episode,
    and continues with the episodes that follow in the data set.

    Row n of the batch depends on the run's key, the number of steps so far and the global index n of an environment.
    Each rank therefore draws its own share.

    Args:
        run: the run.
        state: state of the run; only the key, the counters and, for a policy with memory, the parameters are read.
        part: `train` or `holdout` of the data set.

    Returns: a batch `[N]` whose `steps` have shape `[N, T + 1]`. The last step is padding.
    """
    keys, steps = step_keys(run, state)[1].t(), cast(TensorDict, part["steps"])
    if run.policy.unit == "sequence":
        starts = part["starts"][rng.randint(keys[:, 0], low=0, high=len(part["starts"]))]
        index = (starts.unsqueeze(1) + torch.arange(run.static.buffer_size, device=keys.device)) % len(steps)
    else:
        index = rng.randint(keys, low=0, high=len(steps))
    chosen = cast(TensorDict, steps[torch.cat((index, index[:, -1:]), 1)])
    if "executed" in chosen:
        padding = torch.zeros_like(chosen["executed"][:, -1:])
        chosen = chosen.set("executed", torch.cat((chosen["executed"][:, :-1], padding), 1))
    if "reward" not in chosen:
        chosen = chosen.set("reward", torch.zeros_like(chosen["done"], dtype=torch.float32))
    return TensorDict({"steps": chosen}, chosen.batch_size[:1])


def rows_to_learn(run: Run, params: TensorDict, batch: TensorDict) -> TensorDict:
    """Convert a batch of `drawn_batch` to rows for the policy's `evaluate` (see `rows_of`).

    For a policy with memory, the rows include the memory before each segment, under the parameters `params`.
    """
    done = batch["steps", "done"][:, :-1]
    if run.policy.unit == "sequence":
        batch = batch.copy().update(_memories(run, params, cast(TensorDict, batch["steps"])))
    return rows_of(run, batch, mask=torch.ones_like(done))


def _memories(run: Run, params: TensorDict, steps: TensorDict) -> dict[str, TensorDict]:
    """Return the policy's memory `carry` before each segment, `[N, T / row_steps]`, as `collect_rollout` does."""
    num_envs, segments = len(steps), run.static.buffer_size // run.static.row_steps
    first = run.policy.init_carry(params, num_envs)
    if first.is_empty():
        return {}
    if segments == 1:
        return {"carry": mapped(lambda x: x.unsqueeze(1), first, batch=lambda size: (num_envs, 1, *size[1:]))}
    rows = cast(TensorDict, steps.select("obs", "done")[:, :-1]).transpose(0, 1)
    xs = {"obs": rows["obs"], "done": rows["done"]}
    with torch.no_grad():
        _, before = run.scan(partial(_remember, run), first, xs, params, first)
    length = run.static.row_steps
    size = (num_envs, segments)
    return {"carry": mapped(lambda x: x[::length].transpose(0, 1), before, batch=lambda old: (*size, *old[2:]))}


def _remember(
    run: Run, carry: TensorDict, row: dict[str, Any], params: TensorDict, first: TensorDict
) -> tuple[TensorDict, TensorDict]:
    """Return the memory after a step, which restarts where the episode ended, and the memory before the step."""
    after, _ = run.policy.act(params, carry, row["obs"], None)
    ended = TensorDict({"terminated": row["done"], "truncated": torch.zeros_like(row["done"])}, row["done"].shape)
    return restarted_carry(after, first, ended), mapped(torch.clone, carry)
