"""Read a data set of demonstrations, and draw the steps of each iteration from the data set."""

import warnings
from collections.abc import Mapping
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
from ecrl.config import Config
from ecrl.config.config import env_label
from ecrl.config.input_files import check_input
from ecrl.distributed import rank
from ecrl.envs import Env
from ecrl.envs.vocabulary import vocabulary_checksums
from ecrl.errors import CheckpointError, ConfigError
from ecrl.kernels.rollout import restarted_carry
from ecrl.pytree import mapped
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, element_shape, observation_dtype
from ecrl.storage.checkpoint_files import sha256_of_file
from ecrl.storage.demonstrations import read_about
from ecrl.storage.tensor_files import read_tensors

_KEY = "algorithm.cfg.demos"
_NOISE = 1
"""Number that is folded into the action keys to derive the keys of `draw_imitation`."""
_FIELDS = ("obs", "action", "reward", "done", "executed")


@dataclass(frozen=True)
class Demonstrations:
    """Data set of demonstrations in a file, for the field `data` of an algorithm.

    Attributes:
        path: path of the file, which `ecrl demo` writes.
        holdout: share of the episodes that is held out from training. The last episodes of the file are held out.
    """

    path: str
    holdout: float = field(default=0.0, compare=False)

    def sha256(self) -> Tensor:
        """Return the SHA-256 of the file, as int64 `[4]`."""
        digest = bytes.fromhex(_or_config_error(sha256_of_file, Path(self.path)))
        words = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
        return torch.tensor(words)

    def check(self, run: Run, cfg: Config) -> None:
        """Raise ConfigError if the file cannot be read, or if its tensors do not fit the run's environment.

        On rank 0, warn if the file was recorded in another environment, or with another vocabulary.
        """
        about = self._fitting_about(run)
        if rank() == 0:
            for text in _other_sources(about, cfg):
                warnings.warn(f"{_KEY}: {self.path}: {text}", stacklevel=2)

    def _fitting_about(self, run: Run) -> dict[str, Any]:
        """Return the metadata of the file. Raise ConfigError unless the tensors of the file fit the run."""
        tensors, about = _or_config_error(read_about, Path(self.path))
        env, chunk = run.env, _at(about, "config", "env", "action_chunk")
        spaces = _leaves("obs", env.observation_space) | {"action": env.action_space}
        expected = {name: (observation_dtype(name, space), element_shape(space)) for name, space in spaces.items()}
        expected["done"] = torch.bool, ()
        if has_executed := _reports_executed(env):
            expected["executed"] = torch.int64, ()
        hint = "use demonstrations of this environment"
        if isinstance(chunk, int) and chunk != env.steps_per_action and max(chunk, env.steps_per_action) > 1:
            hint = f"the demonstrations have env.action_chunk {chunk}; set env.action_chunk to {chunk}, or {hint}"
        for name, (dtype, shape) in expected.items():
            if name not in tensors:
                raise ConfigError(f"{_KEY}: {self.path}: the file has no {name}; {hint}")
            own, size = tensors[name]
            if not size:
                raise ConfigError(f"{_KEY}: {self.path}: {name} is a 0-d tensor, expected one row per action; {hint}")
            if (own, size[1:]) != (dtype, shape):
                problem = f"{name} is {_described(own, size[1:])} per step, but {_described(dtype, shape)} in this"
                raise ConfigError(f"{_KEY}: {self.path}: {problem} environment; {hint}")
        if "executed" in tensors and not has_executed:
            problem = "the file has executed, but an action of this environment is always one step"
            raise ConfigError(f"{_KEY}: {self.path}: {problem}; {hint}")
        (rows,) = tensors["done"][1]
        for name, (_, size) in tensors.items():
            if name.split(".")[0] in _FIELDS and size[:1] != (rows,):
                problem = f"{name} is a tensor {list(size)}, but done has {rows} rows"
                raise ConfigError(f"{_KEY}: {self.path}: {problem}; write one row of each field per action")
        return about

    def read(self, run: Run, device: torch.device) -> TensorDict:
        """Read the data set.

        Returns: a TensorDict with `train` and, if `holdout` is not 0, `holdout`. Each part has `steps` `[M]` and
            `starts`, the index of the first step of each of its E episodes, int64 `[E]`.
        Raises: ConfigError if the file does not fit the run, or if the policy has memory and an episode is longer than
            `trainer.buffer_size`. Also raised for NaN, infinity, a value outside a discrete space, `executed` outside
            its limits, or a last episode without an end. Also raised if `holdout` leaves no episode to learn from, or
            none to hold out.
        """
        self._fitting_about(run)
        tensors = _or_config_error(read_tensors, Path(self.path))
        self._check_values(run.env, tensors)
        fields = {name: x.to(device) for name, x in tensors.items() if name.split(".")[0] in _FIELDS}
        rows = len(fields["done"])
        steps = TensorDict({tuple(name.split(".")): x for name, x in fields.items()}, [rows])
        ends = fields["done"].nonzero().flatten() + 1
        if not len(ends) or int(ends[-1]) != rows:
            raise ConfigError(
                f"{_KEY}: {self.path}: the file does not end with the last step of an episode; write whole episodes"
            )
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

    def _check_values(self, env: Env, tensors: Mapping[str, Tensor]) -> None:
        """Raise ConfigError for NaN, infinity, a value outside a discrete space, or `executed` outside its limits."""
        for name, space in (_leaves("obs", env.observation_space) | {"action": env.action_space}).items():
            problem = _outside(tensors[name], space)
            if problem is not None:
                raise ConfigError(f"{_KEY}: {self.path}: {name} has {problem}; use demonstrations of this environment")
        if "executed" in tensors:
            executed, most = tensors["executed"], env.steps_per_action
            wrong = (executed < 1) | ((executed > most) if most > 1 else torch.zeros_like(executed, dtype=torch.bool))
            if wrong.any():
                limits = f"1 to {most}" if most > 1 else "at least 1"
                problem = f"executed has {int(executed[wrong][0])}, expected {limits}"
                raise ConfigError(f"{_KEY}: {self.path}: {problem}; write the number of environment steps per action")


def _at(data: Any, *keys: str) -> Any:
    """Return an entry of nested dicts, or None if the entry is missing."""
    for key in keys:
        data = data.get(key) if isinstance(data, dict) else None
    return data


def _other_sources(about: dict[str, Any], cfg: Config) -> list[str]:
    """Return warnings about differences between the environment of a data set and the environment of a run."""
    settings, texts = cfg.env.model_dump(mode="json")["cfg"], []
    theirs, ours = env_label(about.get("env"), _at(about, "config", "env", "cfg")), cfg.env.label
    if theirs != ours:
        texts.append(
            f"the demonstrations are of the environment {theirs}, but this run has {ours}; use demonstrations of "
            f"{ours} unless the observations and actions of both have the same meaning"
        )
    recorded = about.get("vocabularies")
    known = recorded if isinstance(recorded, dict) else vocabulary_checksums(_at(about, "config", "env", "cfg"))
    for key, checksum in vocabulary_checksums(settings).items():
        if key in known and known[key] != checksum:
            texts.append(
                f"env.cfg.{key}: the demonstrations have another vocabulary, so that their ids mean other words; use "
                "the vocabulary of the demonstrations"
            )
            break
    return texts


def _reports_executed(env: Env) -> bool:
    """Return True if the states of an environment have the field `executed`.

    Custom environments may report `executed` even without `env.action_chunk`, so the function resets the environment to
    find out. Gymnasium environments and MuJoCo tasks never report `executed` without `env.action_chunk`.
    """
    if env.steps_per_action > 1 or not env.is_pure or env.scene is not None:
        return env.steps_per_action > 1
    return "executed" in env.reset(torch.zeros(1, dtype=torch.int64))


def _outside(x: Tensor, space: Space) -> str | None:
    """Describe a fault of the values: NaN or infinity in a Box, or the first value outside a discrete space.

    If there is no fault, return None.
    """
    match space:
        case Box():
            if not x.is_floating_point() or x.isfinite().all():
                return None
            return "NaN or infinity"
        case Discrete(n):
            wrong = (x < 0) | (x >= n)
        case MultiDiscrete(nvec):
            wrong = (x < 0) | (x >= torch.tensor(nvec))
        case _:
            raise TypeError(f"expected a Box, Discrete or MultiDiscrete space, got {space}; pass one leaf of a Dict")
    if not wrong.any():
        return None
    return f"the value {int(x[wrong][0])}, which is outside {space}"


def _part(steps: TensorDict, starts: Tensor) -> TensorDict:
    return TensorDict({"steps": steps, "starts": starts}, [])


def _described(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _or_config_error(read: Any, path: Path) -> Any:
    """Call `read(path)`. Raise ConfigError, with the config key, instead of CheckpointError."""
    check_input(path, _KEY)
    try:
        return read(path)
    except CheckpointError as error:
        raise ConfigError(f"{_KEY}: {error}") from None


def _leaves(name: str, space: Space) -> dict[str, Space]:
    """Map the name of each tensor of an observation to its space."""
    if not isinstance(space, Dict):
        return {name: space}
    parts = (_leaves(f"{name}.{key}", part) for key, part in space.items)
    return {key: leaf for part in parts for key, leaf in part.items()}


def drawn_batch(run: Run, state: TensorDict, part: TensorDict) -> TensorDict:
    """Draw a batch of demonstrated steps. Behaviour cloning learns from this batch instead of a rollout.

    A policy of unit "step" receives `num_envs * buffer_size` single steps, drawn with replacement. A policy of unit
    "sequence" receives `num_envs` sequences of `buffer_size` consecutive steps. Each sequence starts at the beginning
    of an episode, and continues with the next episodes of the data set. The first episode follows the last one.

    The drawn steps depend on the run's key, the number of steps so far and the global index of the environment. Each
    rank therefore draws different steps.

    Args:
        run: the run.
        state: state of the run. The function reads only the key and the counters.
        part: `train` or `holdout` of the data set.

    Returns: a batch `[N]` whose `steps` have shape `[N, T + 1]`. The last step is padding. If the policy has
        `draw_imitation`, the field `imitation_noise` has the result of `draw_imitation` for each step.
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
    if (draw := run.policy.draw_imitation) is not None:
        noise_keys = rng.fold_in(torch.cat((keys, keys[:, -1:]), 1), _NOISE)
        chosen = chosen.set("imitation_noise", draw(noise_keys))
    return TensorDict({"steps": chosen}, chosen.batch_size[:1])


def rows_to_learn(run: Run, params: TensorDict, batch: TensorDict) -> TensorDict:
    """Convert a batch of `drawn_batch` to rows for the policy's `evaluate` (see `rows_of`).

    For a policy with memory, the rows include the memory before each segment, computed with the parameters `params`.
    The rows have a bool `mask`, which is False for chunks of actions that cannot be learnt (see `_learnable`).
    """
    done = batch["steps", "done"][:, :-1]
    if run.policy.unit == "sequence":
        batch = batch.copy().update(_memories(run, params, cast(TensorDict, batch["steps"])))
    rows = rows_of(run, batch, mask=torch.ones_like(done))
    return rows.set("mask", _learnable(run, params, rows))


def _learnable(run: Run, params: TensorDict, rows: TensorDict) -> Tensor:
    """Return a mask, of the shape of `rows["done"]`, that is True for steps whose actions can be learnt.

    The actions of a chunk after the end of an episode have no meaning. If log-probabilities have one entry per step of
    a chunk, `sum_tokens` leaves out these actions. Other log-probabilities describe the whole chunk. For such
    log-probabilities, the mask is True only for chunks whose steps were all executed:

        mask = executed == steps_per_action

    A policy with its own `imitation_loss` must mask the actions itself.
    """
    chunk, mask = run.env.steps_per_action, cast(Tensor, rows["mask"])
    if "executed" not in rows or chunk == 1 or run.policy.imitation_loss is not None:
        return mask
    with torch.no_grad():
        log_prob = run.policy.evaluate_tokens(params, rows[:1])[0]  # only the number of axes is used
    return mask & (rows["executed"] == chunk) if log_prob.ndim < mask.ndim + 2 else mask


def _memories(run: Run, params: TensorDict, steps: TensorDict) -> dict[str, TensorDict]:
    """Return a dict with the policy's memory `carry` before each segment, `[N, T / row_steps]`.

    If the policy has no memory, the dict is empty.
    """
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
    """Return the memory after a step and before the step. If the step ends an episode, the first result is `first`."""
    after, _ = run.policy.act(params, carry, row["obs"], None)
    ended = TensorDict({"terminated": row["done"], "truncated": torch.zeros_like(row["done"])}, row["done"].shape)
    return restarted_carry(after, first, ended), mapped(torch.clone, carry)
