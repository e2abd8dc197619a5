"""Train many runs that differ in their seeds, and optionally in the values of some settings."""

import csv
import io
import json
import math
import re
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import torch
from tensordict import TensorDict

from ecrl.algorithms import Run
from ecrl.algorithms.core import decisions
from ecrl.compile.background import switch_of
from ecrl.compile.jit import compilations_of
from ecrl.config import Config, diff, total_steps
from ecrl.distributed import world_size
from ecrl.errors import CheckpointError, ConfigError, NotFiniteError, UserError, extra
from ecrl.loop.buffers import kinds_of, with_own_buffers
from ecrl.loop.build import build, device_of
from ecrl.loop.iteration import can_vmap, decisions_of, first_state, iterations_of_members, one_torch_thread
from ecrl.loop.signals import asked, in_loop
from ecrl.pytree import flatten
from ecrl.registry import did_you_mean
from ecrl.run.folder import claim, lock_run_folder
from ecrl.run.history import History
from ecrl.run.loggers import with_progress
from ecrl.run.resume import pending_evaluation, resume_run
from ecrl.run.train import check_run, consumers, train_run
from ecrl.storage.atomic_files import replace_file
from ecrl.types import LogData

_SEED = "trainer.seed"
_MAX_NAME_BYTES = 255  # limit of most file systems
_RECORD_TYPES = ("collect", "train", "evaluate")  # in the order of the records of an iteration
_FEW_ENVS, _RUNS_OF_FEW_ENVS = 4, 16
"""By default, compiled runs on a CPU share calls of `torch.func.vmap` only if each run has at most 4 environments.

At most 16 runs then share a call.
"""


class Member(NamedTuple):
    """One of the runs of `train_many`.

    Attributes:
        name: name such as `seed_3` or `learning_rate_0.001_seed_3`, which is also the name of the run's folder.
        values: the seed and the swept settings, by dotted key.
        cfg: config of the run.
        state: state at the end of the run.
        history: logs of the run. If `run_dir` is given, they include the iterations before a resumption.
    """

    name: str
    values: dict[str, Any]
    cfg: Config
    state: TensorDict
    history: History


class Members(Sequence):
    """Results of `train_many`, in the order of the swept settings and seeds. The index is a position or a name."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = {member.name: member for member in members}

    @overload
    def __getitem__(self, index: int | str) -> Member: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Member]: ...
    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return list(self._members.values())[index]
        if index not in self._members:
            raise UserError(f"no run {index!r}; {did_you_mean(index, self._members)}")
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per run: its name, seed, swept settings, env steps, last logs and last evaluation."""
        return [_row(member) for member in self]

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame. The extra `plot` is required."""
        with extra("plot"):
            import pandas
        return pandas.DataFrame(self.rows()).set_index("name")

    def __repr__(self) -> str:
        shown = ("sample_step", "episode_reward_avg_100", "success_rate", "eval/avg_reward", "eval/success_rate")
        rows = self.rows()
        names = ["name", *(key for key in shown if any(key in row for row in rows))]
        cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _row(member: Member) -> dict[str, Any]:
    last = dict(member.history[-1]) if len(member.history) else {}
    evaluations = [row for row in member.history if any(key.startswith("eval/") for key in row)]
    last |= {key: value for key, value in (evaluations[-1] if evaluations else {}).items() if key.startswith("eval/")}
    return {"name": member.name, **member.values, **last, "sample_step": int(member.state["sample_step"])}


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def train_many(
    cfg: Config,
    *,
    seeds: Sequence[int],
    sweep: Mapping[str, Sequence[Any]] | None = None,
    run_dir: str | Path | None = None,
    runs_per_call: int | None = None,
    progress: bool = True,
) -> Members:
    """Train one run for each combination of a seed and values of the swept settings.

    Runs that differ only in the seed and in hyperparameters of `state["hyper"]`, such as the learning rate, train
    together as a group. By default, several runs of a group share a call of `torch.func.vmap` if this is faster.
    Compiled runs on a CPU, except MuJoCo tasks, train in up to `torch.get_num_threads()` calls at the same time. If
    there are several such calls, each uses one thread. Except for rounding, each run has the results of a run that
    trains alone. If other settings also differ, such as the sizes of networks, there are several groups, which train
    one after the other.

    These runs always train one by one:

    - runs whose environments step in Python, such as Gymnasium's
    - runs with a replay buffer, frozen parameters or demonstrations
    - runs whose policy draws its own random numbers
    - runs with `trainer.use_wandb`, or with `trainer.compile` set to "background"

    With `run_dir`, each run has its own run folder in `run_dir`, with its config, metrics and checkpoints. The commands
    for run folders, such as `ecrl eval`, work with each of these folders. A second call with the same arguments resumes
    the runs that have not finished. The file `summary.csv` in `run_dir` contains a row for each run.

    If `trainer.finite_guard` is "stop", a run with NaN or infinity stops with a warning, and the other runs continue.

    Args:
        cfg: config of all runs.
        seeds: values of `trainer.seed`.
        sweep: dict from a dotted key to a list of values, such as `{"algorithm.cfg.learning_rate": [1e-3, 3e-4]}`. The
            runs cover every combination of these values.
        run_dir: folder for the run folders; if None, nothing is written.
        runs_per_call: largest number of runs in a call of `torch.func.vmap`. If None, all runs of a group share a call,
            except compiled runs on a CPU. Up to 16 compiled runs on a CPU share a call if each has at most 4
            environments. Compiled runs on a CPU with more environments share no call.
        progress: if True, show a live progress line for each group. For runs that train one by one, print the name of
            the run, and show a progress line for each run.

    Returns: the states and histories of all runs. `print` shows a table with one row per run.
    Raises: ConfigError if the config, the seeds or the sweep are not valid, or if a run folder holds another run.

    >>> from ecrl import load_config
    >>> cfg = load_config("cartpole_ppo", {"trainer.iterations": 1, "trainer.num_envs": 8, "trainer.compile": "off"})
    >>> sweep = {"algorithm.cfg.learning_rate": [1e-3, 3e-4]}
    >>> runs = train_many(cfg, seeds=[0], sweep=sweep, progress=False)
    >>> [run.name for run in runs]
    ['learning_rate_0.001_seed_0', 'learning_rate_0.0003_seed_0']
    """
    if world_size() > 1:
        raise ConfigError("train_many: trains in one process; start it without torchrun")
    if runs_per_call is not None and runs_per_call < 1:
        raise ConfigError(f"runs_per_call: {runs_per_call}; expected at least 1, or None")
    folder = None if run_dir is None else Path(run_dir)
    with ExitStack() as stack:
        runs = [(name, values, cfg.replace(**values)) for name, values in _combinations(seeds, sweep or {})]
        members = [_start(*named_run, folder, stack) for named_run in runs]
        try:
            for group in _groups(members, runs_per_call):
                alone = len(group.members) == 1
                if not (_train_alone(group.members[0], progress) if alone else _train_together(group, progress)):
                    break
        finally:
            results = Members([Member(m.name, m.values, m.cfg, m.state, m.history) for m in members])
            if folder is not None:
                _write_summary(results, folder)
    return results


class _Unfinished:
    """Mutable data of a run of `train_many`. `add` updates the run's history and state with each record.

    `has_pending_evaluation` is True if an earlier call stopped before the evaluation of `state`.
    """

    def __init__(self, name: str, values: dict[str, Any], cfg: Config, folder: Path | None) -> None:
        self.name, self.values, self.cfg, self.folder = name, values, cfg, folder
        self.history = History()
        self.has_pending_evaluation = False
        self.run: Run
        self.state: TensorDict

    @property
    def has_finished(self) -> bool:
        return int(decisions(self.state)) >= total_steps(self.cfg, 1)

    def add(self, record: LogData) -> None:
        self.history.add(record)
        self.state = record["state"]


def _combinations(seeds: Sequence[int], sweep: Mapping[str, Sequence[Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the settings of each run. Raise ConfigError if the seeds or the sweep are not valid."""
    given = [*seeds] if isinstance(seeds, Iterable) and not isinstance(seeds, str) else []
    if not given or not all(isinstance(seed, int) for seed in given) or len({*given}) < len(given):
        raise ConfigError(f"seeds: {given or seeds!r}; expected one or more different integers")
    if not isinstance(sweep, Mapping):
        raise ConfigError(f"sweep: {sweep!r}; expected a dict from dotted keys to lists of values")
    for key, choices in sweep.items():
        if key == _SEED:
            raise ConfigError(f"sweep: {_SEED} cannot be swept; pass the seeds as the argument seeds")
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise ConfigError(f"sweep: {key} is {choices!r}; expected a list of values")
    last = [key.rpartition(".")[2] for key in sweep]
    labels = {key: name if last.count(name) == 1 else key for name, key in zip(last, sweep, strict=True)}
    combinations: dict[str, dict[str, Any]] = {}
    for *choices, seed in product(*sweep.values(), given):
        chosen = sorted(zip(sweep, choices, strict=True), key=lambda item: item[0])  # names do not depend on the order
        name = "_".join((*(f"{labels[key]}_{_label(choice)}" for key, choice in chosen), f"seed_{seed}"))
        if name in combinations:
            raise ConfigError(
                f"sweep: two runs would have the name {name}; use values that differ in letters, digits or _.+-"
            )
        combinations[name] = dict(zip(sweep, choices, strict=True)) | {_SEED: seed}
    return [*combinations.items()]


def _label(value: Any) -> str:
    """Return a value as part of the name of a folder.

    >>> _label(-0.001), _label("a/b"), _label([64, 64])
    ('-0.001', 'a-b', '64-64')
    """
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return re.sub(r"[^\w.+-]+", "-", re.sub(r"^[^\w.+-]+|[^\w.+-]+$", "", text))


def _start(name: str, values: dict[str, Any], cfg: Config, parent: Path | None, stack: ExitStack) -> _Unfinished:
    """Return a run at its first state, or at the last state that its folder holds. `stack` keeps the folder locked.

    Raises: ConfigError if the folder holds a run with another config, or if the name of the run is too long for a
        folder.
    """
    folder = None if parent is None else parent / name
    if folder is not None and (size := len(name.encode())) > _MAX_NAME_BYTES:
        limit = f"{size} bytes; the name of a folder has at most {_MAX_NAME_BYTES}"
        advice = "sweep fewer keys or shorter values, or omit run_dir"
        raise ConfigError(f"sweep: the name {name[:60]}... has {limit}; {advice}")
    member = _Unfinished(name, values, cfg, folder)
    if folder is None or not (folder / "config.json").exists():
        member.run = build(cfg)
        member.state = first_state(member.run, cfg)
        check_run(member.run, cfg, folder)
        if folder is not None:
            claim(folder, new=True)
            stack.enter_context(lock_run_folder(folder))
        return member
    stack.enter_context(lock_run_folder(folder))
    member.run, member.state, saved = resume_run(folder)
    if changes := diff(saved, cfg):
        lines = "\n".join(f"  {line}" for line in changes)
        raise ConfigError(f"{folder}: holds a run with another config; choose another run_dir:\n{lines}")
    if cfg.trainer.enable_eval:
        member.has_pending_evaluation = pending_evaluation(member.state, cfg, folder) is not None
    if not member.has_finished or member.has_pending_evaluation:
        check_run(member.run, cfg, folder)
    member.history.add_file(folder / "metrics.jsonl")
    return member


class _Group(NamedTuple):
    """Runs that train together.

    Attributes:
        members: the runs.
        runs_per_call: largest number of runs in one call of an iteration, under vmap.
        threads: number of calls that run at the same time, each in its own thread.
    """

    members: list[_Unfinished]
    runs_per_call: int
    threads: int


def _groups(members: Sequence[_Unfinished], runs_per_call: int | None) -> Iterator[_Group]:
    """Yield groups of runs that can train together and have iterations or an evaluation left.

    A large group is split into about equal parts.
    """
    groups: list[list[_Unfinished]] = []
    for member in members:
        if member.has_finished and not member.has_pending_evaluation:
            continue
        group = next((group for group in groups if _are_compatible(group[0], member)), None)
        if group is None:
            groups.append([member])
        else:
            group.append(member)
    for group in groups:
        fastest, threads = fastest_calls(group[0].run, group[0].cfg)
        most = runs_per_call or fastest or len(group)
        parts = math.ceil(len(group) / (most * threads))
        edges = [len(group) * part // parts for part in range(parts + 1)]
        yield from (_Group(group[start:end], most, min(threads, end - start)) for start, end in pairwise(edges))


def fastest_calls(run: Run, cfg: Config) -> tuple[int | None, int]:
    """Return the number of runs per call that trains fastest, and the number of calls to run at the same time.

    If all runs of a group should share a call, the number of runs per call is None.

    Eager runs and runs on a GPU spend most of their time in launching operations, which the runs of a call share.
    Compiled runs on a CPU gain from sharing a call only if they have few environments. However, their calls can run at
    the same time, because compiled C++ code releases Python's global interpreter lock. `python -m benchmarks --only
    seeds` measures both effects. MuJoCo tasks and runs under autocast make one call at a time. The physics of MuJoCo
    already uses all threads, and autocast applies only to the thread that enabled it.
    """
    if run.jit is partial or device_of(cfg).type != "cpu":
        return None, 1
    one_thread = run.env.scene is not None or torch.is_autocast_enabled("cpu")
    return _RUNS_OF_FEW_ENVS if cfg.trainer.num_envs <= _FEW_ENVS else 1, 1 if one_thread else torch.get_num_threads()


def _are_compatible(one: _Unfinished, other: _Unfinished) -> bool:
    """Return True if two runs can train in one call.

    Runs with `trainer.use_wandb` cannot, because W&B logs only one run of a process at a time.
    """
    if not can_vmap(one.run, one.state) or one.cfg.trainer.use_wandb or other.cfg.trainer.use_wandb:
        return False
    if switch_of(one.run.jit) is not None:
        return False
    return _signature(one) == _signature(other)


def _signature(member: _Unfinished) -> tuple[Any, ...]:
    """Return everything that must be equal in runs that train in one call."""
    trainer, (leaves, structure) = member.cfg.trainer, flatten(member.state)
    settings = (trainer.iterations, trainer.log_freq, trainer.finite_guard, trainer.tf32)
    shapes = [(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves]
    return member.run, settings, int(decisions(member.state)), structure, shapes


def _train_alone(member: _Unfinished, progress: bool) -> bool:
    """Train one run to its end, and close its environments. Return False if a signal ended it early.

    If the run stops at NaN or infinity, or if its last state cannot be saved, warn.
    """
    state = with_own_buffers(member.state, kinds_of(member.run))
    if progress:
        print(member.name)
    new, interrupted = member.folder is not None and not (member.folder / "config.json").exists(), False
    try:
        member.state, interrupted = train_run(
            member.run, state, member.cfg, member.folder, new, progress, False, member.add
        )
    except NotFiniteError as error:
        warnings.warn(f"{member.name}: {error}; this run stops, and the others continue", stacklevel=3)
        return True
    except CheckpointError as error:
        warnings.warn(f"{member.name}: {error}", stacklevel=3)
    finally:
        member.run.env.close(cast(TensorDict, member.state["env"]))
    return member.has_finished and not interrupted


def _train_together(together: _Group, progress: bool) -> bool:
    """Train several runs together to their ends. All runs finish an iteration before any run begins the next one.

    Return False if a signal ended them early.
    """
    group, runs_per_call, threads = together
    run, cfg, states, names = group[0].run, group[0].cfg, [m.state for m in group], [m.name for m in group]
    batches = iterations_of_members(run, states, cfg, names, runs_per_call=runs_per_call, threads=threads)
    streams = [
        consumers(records, run, member.state, member.cfg, member.folder, int(member.state["sample_step"]), False)
        for records, member in zip(_records_of_each(batches, len(group)), group, strict=True)
    ]
    rounds = _rounds(group, streams)
    if progress:
        rounds = with_progress(rounds, int(decisions(group[0].state)), total_steps(cfg, 1), compilations_of(run.jit))
    try:
        with in_loop(), ExitStack() as stack:
            if threads > 1:  # evaluations then also use one thread, and checkpoints record this number of threads
                stack.enter_context(one_torch_thread())
            stack.enter_context(closing(cast(Generator, batches)))
            for member, stream in zip(group, streams, strict=True):
                stack.enter_context(_closing(member, stream))
            stack.enter_context(closing(cast(Generator, rounds)))
            for record in rounds:
                if record["log_type"] == "train" and asked():
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        steps = sorted({int(member.state["sample_step"]) for member in group})
        reached = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
        print(f"interrupted at {reached} env steps of {len(group)} runs")
        return False
    return True


def _records_of_each(batches: Iterator[list[list[LogData]]], count: int) -> list[Iterator[LogData]]:
    """Return one iterator for each run. The iterator yields the records of the run, and ends after the last record.

    A record is released as soon as its run has taken it. `itertools.tee` stores items in blocks of 57, and would keep
    the states of up to 57 iterations.

    >>> one, other = _records_of_each(iter([[["a", "b"], ["c", "d"]], [["e"], []]]), 2)
    >>> [*one], [*other]
    (['a', 'b', 'e'], ['c', 'd'])
    """
    queues: list[deque[LogData | None]] = [deque() for _ in range(count)]

    def records_of(own: deque[LogData | None]) -> Iterator[LogData]:
        while True:
            if not own:
                for queue, records in zip(queues, next(batches, [[]] * count), strict=True):
                    queue.extend(records or [None])
            record = own.popleft()
            if record is None:
                return
            yield record
            del record

    return [records_of(queue) for queue in queues]


@contextmanager
def _closing(member: _Unfinished, stream: Iterator[LogData]) -> Iterator[None]:
    """Close the records of a run after the block, so that its last state is saved. Warn if the state is not saved."""
    try:
        yield
    finally:
        try:
            cast(Generator, stream).close()
        except CheckpointError as error:
            warnings.warn(f"{member.name}: {error}", stacklevel=3)


def _rounds(group: Sequence[_Unfinished], streams: Sequence[Iterator[LogData]]) -> Iterator[LogData]:
    """Take one record from each run in turn. For each record type, yield one record with the means of the logs.

    If the last state of a run cannot be saved, warn.

    If only some runs are evaluated after an iteration, the other runs wait. No run may lag behind, because the records
    that a run has not taken yet stay in memory.
    """
    positions: dict[int, tuple[int, int]] = dict.fromkeys(range(len(group)), (-1, 0))
    while positions:
        records: dict[str, list[LogData]] = {}
        first = min(positions.values())
        for index in [index for index, position in positions.items() if position == first]:
            try:
                record = next(streams[index], None)
            except CheckpointError as error:
                warnings.warn(f"{group[index].name}: {error}", stacklevel=3)
                record = None
            if record is None:
                del positions[index]
            else:
                group[index].add(record)
                positions[index] = (decisions_of(record), _RECORD_TYPES.index(record["log_type"]))
                records.setdefault(record["log_type"], []).append(record)
        for equal in records.values():
            names = [name for name in equal[0]["logs"] if all(name in one["logs"] for one in equal)]
            logs = {name: torch.stack([one["logs"][name] for one in equal]).nanmean() for name in names}
            yield cast(LogData, {**equal[0], "logs": logs})


def _write_summary(members: Members, folder: Path) -> None:
    rows = members.rows()
    names = [*dict.fromkeys(key for row in rows for key in row)]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    try:
        replace_file(folder / "summary.csv", text.getvalue().encode())
    except OSError as error:
        warnings.warn(f"{folder / 'summary.csv'}: cannot be written: {error.strerror}", stacklevel=3)
