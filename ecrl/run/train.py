"""Train a run, and pass its records through consumers, such as loggers (see `ecrl.run.loggers`).

Notebooks call `train`, scripts call `train_from_config`, and the command `ecrl train` calls `run_config`.
"""

import json
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

from tensordict import TensorDict

from ecrl.algorithms import Run
from ecrl.algorithms.core import decisions
from ecrl.compile.jit import compilations_of
from ecrl.config import Config, TrainerConfig, load_config, total_steps
from ecrl.distributed import rank, start, stop, value_of_rank_0, world_size
from ecrl.errors import CheckpointError, ConfigError, NotSavedError, UserError
from ecrl.loop.buffers import kinds_of, with_own_buffers
from ecrl.loop.build import build, check_rollout, with_eval_events
from ecrl.loop.iteration import (
    STATE_FIELDS,
    check_state,
    first_state,
    iterations,
    run_summary,
    steps_per_iteration,
    warn_if_finished,
)
from ecrl.loop.signals import asked, in_loop
from ecrl.loop.state_argument import check_state_argument
from ecrl.registry import first_names, registered
from ecrl.run.checkpointing import with_best_checkpoint, with_checkpoints
from ecrl.run.compiled_from import restore_switch, with_switch
from ecrl.run.crash import with_crash
from ecrl.run.evaluation import check_evaluation, with_evaluation
from ecrl.run.folder import claim, claimed_before, lock_run_folder, new_run_dir
from ecrl.run.history import History
from ecrl.run.large_observations import with_warning_of_large_observations
from ecrl.run.loggers import with_host_logs, with_jsonl, with_progress
from ecrl.run.own_consumers import Consumer, with_own_consumer
from ecrl.run.profiler import Times, timed_records, with_profile, with_timers
from ecrl.run.rank_shards import with_shards, with_shards_at_crash
from ecrl.run.resume import check_run_folder, continues_run, drop_rows_after, pending_evaluation, resume_run
from ecrl.run.trackers import check_wandb, with_tensorboard, with_wandb
from ecrl.run.video import with_training_videos
from ecrl.run.video_writer import cameras, check_cameras
from ecrl.storage.atomic_files import replace_file
from ecrl.types import LogData

_SAVE_FREQ = TrainerConfig.model_fields["save_freq"].default
Timed = Callable[[str, Iterator[LogData]], Iterator[LogData]]


def _untimed(phase: str, records: Iterator[LogData]) -> Iterator[LogData]:
    return records


def consumers(
    records: Iterator[LogData],
    run: Run,
    state: TensorDict,
    cfg: Config,
    run_dir: Path | None,
    first: int,
    progress: bool,
    timed: Timed = _untimed,
    own: Sequence[Consumer] = (),
) -> Iterator[LogData]:
    """Wrap the records of the training loop in the consumers that the arguments request.

    Args:
        records: records of the training loop.
        run: run built from `cfg`.
        state: state before the first record.
        cfg: config of the run.
        run_dir: run folder; if None, nothing is written.
        first: number of env steps before the first record.
        progress: if True, show a live progress line.
        timed: function `timed(phase, records)` that yields the records again. The function may time the wait for each
            record, as the phase with the name `phase` (see `ecrl.run.profiler.timed_records`).
        own: consumers of the caller. They receive the records after the evaluation, and before the loggers and the
            checkpoints.
    """
    records = timed("loop", records)
    records = with_shards_at_crash(records, run) if world_size() > 1 else records
    records = records if run_dir is None or rank() > 0 else with_crash(records, run, cfg, run_dir)
    if rank() > 0:  # other ranks only train, and send their shards to rank 0
        return with_shards(records, run, cfg)
    records = with_shards(records, run, cfg) if world_size() > 1 else records
    videos = None if run_dir is None else run_dir / "videos"
    if cfg.trainer.enable_eval:
        pending = None if run_dir is None else pending_evaluation(state, cfg, run_dir)
        records = timed("evaluation", with_evaluation(records, cfg, videos, pending, with_eval_events(run, cfg)))
    if videos is not None and cameras(cfg, "train"):
        records = timed("videos", with_training_videos(records, run, cfg, videos, state))
    records = with_warning_of_large_observations(with_host_logs(records), cfg)
    for consumer in own:
        records = timed("own consumers", with_own_consumer(records, consumer))
    if run_dir is not None:
        _write_config(cfg, run_dir)
        records = with_switch(records, run, run_dir)
        records = with_jsonl(records, run_dir / "metrics.jsonl", first)
        records = with_tensorboard(records, cfg, run_dir / "logs", first)
        records = with_wandb(records, cfg, run_dir, first) if cfg.trainer.use_wandb else records
        records = timed("logging", records)
        records = with_best_checkpoint(records, cfg, run_dir, run)
        records = timed("checkpoints", with_checkpoints(records, cfg, run_dir, run))
    if not progress:
        return records
    end, known = total_steps(cfg, world_size()), compilations_of(run.jit)
    return timed("progress", with_progress(records, int(decisions(state)), end, known))


def _write_config(cfg: Config, folder: Path) -> None:
    try:
        replace_file(folder / "config.json", (json.dumps(cfg.model_dump(mode="json"), indent=2) + "\n").encode())
    except OSError as error:
        problem = f"run_dir: {folder}: cannot be written: {error.strerror}"
        raise ConfigError(f"{problem}; make room or choose another folder") from None


def train(
    state: TensorDict,
    cfg: Config,
    run_dir: str | Path | None = None,
    progress: bool = True,
    profile: bool = False,
    consumers: Sequence[Consumer] = (),
) -> tuple[TensorDict, History]:
    """Train until the run has taken the environment steps of `trainer.iterations` iterations.

    If nothing is left to train, warn, unless `state` belongs to the run in `run_dir`.

    Args:
        state: state from `init_state`, `load` or `resume`, or from a record that `train_iter` yielded.
        cfg: config of the run.
        run_dir: folder for the config, logs, metrics and checkpoints. The folder must not hold a run yet, or must hold
            the run that `state` belongs to, without a newer checkpoint. In the second case, rows of `metrics.jsonl`
            after the env steps of `state` are removed. If None, nothing is written.
        progress: if True, show a live progress line.
        profile: if True, time the phases of the run (see `ecrl.run.profiler`) and trace the iterations of two records.
            The results are written to `profile/` in `run_dir`.
        consumers: generator functions that take the records of the run and yield every record again, such as a logger
            of your own. The first function receives the records of the loop and of the evaluation, and each other
            function receives the records of the function before it. The history, the log files and the checkpoints get
            the records of the last function, so a function may add logs to a record. A function may return early to end
            the run, if the run has one process. If the run has several processes, only rank 0 calls the functions.

    Returns: the last state and the history of logs. Ctrl-C ends the run early, and the function then returns the
        newest state.
    Raises: ConfigError if `run_dir` cannot be written, holds another run or is in use by another process, or if
        `profile` is set without `run_dir`; `ecrl.errors.NotSavedError`, with the state and the history, if the last
        state could not be saved; UserError if `state` is not the state of a run, or if a function of `consumers` skips
        a record, yields a record twice, or yields a log that is not a 0-d tensor.
    """
    if callable(consumers):
        raise UserError(
            f"consumers: {getattr(consumers, '__name__', consumers)} is a function, expected a list of functions"
        )
    check_state_argument(state, *STATE_FIELDS)
    folder, history, last = None if run_dir is None else Path(run_dir), History(), [state]
    new = folder is not None and not claimed_before(folder) and not continues_run(folder, state, cfg)
    if folder is None or new:  # a run that continues in its own folder may have a pending evaluation
        warn_if_finished(state, cfg)

    def on_record(record: LogData) -> None:
        history.add(record)
        last[0] = record["state"]

    try:
        run = build(cfg)
        state = with_own_buffers(state, kinds_of(run))
        state, _ = train_run(run, state, cfg, folder, new, progress, profile, on_record, consumers)
        return state, history
    except CheckpointError as error:
        raise NotSavedError(str(error), last[0], history) from None


def train_run(
    run: Run,
    state: TensorDict,
    cfg: Config,
    folder: Path | None,
    new: bool,
    progress: bool,
    profile: bool,
    on_record: Callable[[LogData], Any],
    own: Sequence[Consumer] = (),
) -> tuple[TensorDict, bool]:
    """Check the config, claim the folder, and run the loop with its consumers.

    If a signal ends a run of one process early, print the number of env steps. Rows of `metrics.jsonl` after the env
    steps of `state` are removed, because the run logs these steps again.

    Args:
        run: run built from `cfg`.
        state: state at the start of training. The loop writes to the buffers of this state in place.
        cfg: config of the run.
        folder: run folder; if None, nothing is written.
        new: if True, raise an error if the folder already holds a run.
        progress: if True, show a live progress line.
        profile: if True, time the phases of the run, and trace the iterations of two records.
        on_record: function that is called with each record.
        own: consumers of the caller.

    Returns: the last state, and True if a signal ended the run early. The signal may have interrupted an evaluation of
        the last state.
    """
    interrupted = False
    if profile and folder is None:
        raise ConfigError("profile: times and traces are written to the run folder; also pass run_dir")
    check_run(run, cfg, folder)
    if folder is not None and rank() == 0:
        claim(folder, new)
    with lock_run_folder(folder):
        check_state(run, state, cfg)
        times, first = Times(), int(state["sample_step"])
        if folder is not None and rank() == 0:
            drop_rows_after(folder, first)
        if folder is not None:
            restore_switch(run, folder, int(decisions(state)) // steps_per_iteration(cfg))
        records = iterations(with_timers(times, run) if profile else run, state, cfg)
        stack = partial(timed_records, times) if profile else _untimed
        records = consumers(records, run, state, cfg, folder, first, progress, stack, own)
        records = with_profile(records, times, cast(Path, folder)) if profile else records
        try:
            with in_loop(may_abandon=world_size() == 1), closing(cast(Generator, records)):
                for record in records:
                    on_record(record)
                    state = record["state"]
                    if record["log_type"] != "collect" and asked() and world_size() == 1:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupted = True
            advice = "the run's checkpoint is in" if int(state["sample_step"]) else "start it again with --resume"
            advice = "returning the last state" if folder is None else f"{advice} {folder}"
            print(f"interrupted at {int(state['sample_step']):,} env steps; {advice}")
    return state, interrupted


def check_run(run: Run, cfg: Config, folder: Path | None) -> None:
    """Check the run before it trains, and warn about each setting without effect.

    Raises: ConfigError if the rollout does not fit in memory, or if the evaluations or cameras are invalid. UserError
        if a package that the config requires is missing.
    """
    check_rollout(cfg, run)
    for setting in _without_effect(cfg, folder):
        warnings.warn(setting, stacklevel=4)
    if cfg.trainer.enable_eval:
        check_evaluation(with_eval_events(run, cfg), cfg)
    if folder is not None and rank() == 0:
        check_cameras(cfg)
        check_wandb(cfg)


def _without_effect(cfg: Config, folder: Path | None) -> Iterator[str]:
    """Yield the texts of warnings that name the settings without an effect in this run."""
    if cfg.trainer.events.eval and not cfg.trainer.enable_eval:
        yield "trainer.events.eval: there are no evaluations; set trainer.enable_eval to true"
    if folder is None:
        filmed = [*cameras(cfg, "train"), *(cameras(cfg, "eval") if cfg.trainer.enable_eval else [])]
        asked_for = ["cameras in trainer.events"] if filmed else []
        asked_for += ["trainer.use_wandb"] if cfg.trainer.use_wandb else []
        asked_for += ["trainer.keep_checkpoints"] if cfg.trainer.keep_checkpoints is not None else []
        freq = cfg.trainer.save_freq
        would_save = freq != _SAVE_FREQ and 0 < freq <= total_steps(cfg, world_size())
        asked_for += ["trainer.save_freq"] if would_save else []
        if asked_for:
            yield f"{', '.join(asked_for)}: nothing is written without a run folder; pass run_dir"


def _announce(run: Run, cfg: Config, folder: Path) -> None:
    kinds = {"env": "envs", "algorithm": "algorithms", "policy": "policies"}
    known = "; ".join(f"{plural} {first_names(registered(kind))}" for kind, plural in kinds.items())
    print("\n".join([f"run      {folder}", *run_summary(run, cfg, world_size()), f"known    {known}"]))


def _new_run(cfg: Config, path: str) -> tuple[Run, TensorDict]:
    """Check the config, and return the run and its initial state. The messages of ConfigErrors start with `path`."""
    try:
        run = build(cfg)
        check_rollout(cfg, run)
        state = first_state(run, cfg)
        if cfg.trainer.enable_eval:
            check_evaluation(with_eval_events(run, cfg), cfg)
        check_cameras(cfg)
        check_wandb(cfg)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return run, state


def train_from_config(
    path: str | Path | None = None,
    distributed: bool | None = None,
    run_dir: str | Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    resume_from: str | Path | None = None,
    force: bool = False,
    profile: bool = False,
) -> tuple[TensorDict, History]:
    """Train a run that a config file describes, or resume a run.

    Args:
        path: config file, or name of a shipped config. With `resume_from`, the run continues with this config, or with
            its own config if `path` is None.
        distributed: if not None, value that replaces `trainer.distributed`.
        run_dir: new run folder; if None, the folder is `outputs/<exp_name>_<time>`. Not used with `resume_from`.
        overrides: dict from dotted key to a value that replaces the config's value, such as `{"trainer.seed": 3}`.
        resume_from: folder of a run to resume; the run continues in this folder.
        force: if True, resume even if the config differs from the run's own config.
        profile: if True, time the phases of the run (see `ecrl.run.profiler`) and trace the iterations of two records.
            The results are written to `profile/` in the run folder.

    Returns: the last state and the history of logs.
    Raises: ConfigError if the config is invalid, with one line per fault. ConfigError also if the run folder cannot be
        written, if a new run folder already holds a run, or if the config of a resumed run differs and `force` is
        False. CheckpointError if the last state cannot be saved, or if the run to resume is missing or damaged.
    """
    history = History()
    state = run_config(path, distributed, run_dir, overrides or {}, resume_from, force, profile, history.add)
    return state, history


def run_config(
    path: str | Path | None,
    distributed: bool | None,
    run_dir: str | Path | None,
    overrides: Mapping[str, Any],
    resume_from: str | Path | None,
    force: bool,
    profile: bool,
    on_record: Callable[[LogData], Any] = lambda record: None,
) -> TensorDict:
    """Train as `train_from_config` does, but without a history, because a history grows with every iteration.

    `on_record` is called with each record. The other arguments are the same as for `train_from_config`.
    """
    changed = dict(overrides) | ({} if distributed is None else {"trainer.distributed": distributed})
    with ExitStack() as stack:
        if resume_from is not None:
            folder = Path(resume_from)
            start(distributed or _was_distributed(folder, path, changed))
            check_run_folder(folder)  # before the lock, which creates a file in the folder
            stack.enter_context(lock_run_folder(folder))
            run, state, cfg = resume_run(folder, path, changed, force)
        else:
            cfg = load_config(path or "", changed)
            start(cfg.trainer.distributed)
            run, state = _new_run(cfg, str(path))
            folder = Path(value_of_rank_0("run_dir", lambda: str(new_run_dir(cfg) if run_dir is None else run_dir)))
            restarted = claimed_before(folder)
            if rank() == 0:
                claim(folder, new=not restarted)
            stack.enter_context(lock_run_folder(folder))
            if restarted and any(folder.glob("checkpoints/step_*")):
                run, state, cfg = resume_run(folder, path, changed)
            elif rank() == 0:
                drop_rows_after(folder, 0)
        if cfg.trainer.distributed and "WORLD_SIZE" not in os.environ:
            problem = "torchrun did not start this process, so the run has only one process; start it with torchrun"
            warnings.warn(f"trainer.distributed: {problem}", stacklevel=2)
        if rank() == 0:
            _announce(run, cfg, folder)
            if int(decisions(state)) >= total_steps(cfg, world_size()):
                print("the run has finished; to train for longer, add --trainer.iterations N --force")
        state, _ = train_run(run, state, cfg, folder, False, True, profile, on_record)
        run.env.close(cast(TensorDict, state["env"]))
        stop()
        return state


def _was_distributed(folder: Path, path: str | Path | None, changed: Mapping[str, Any]) -> bool:
    """Return `trainer.distributed` of the config at `path`, or of the run's own config if `path` is None.

    The values in `changed` replace values of the config. If the run's own config is missing or invalid, return False,
    because `resume_run` will raise the error.
    """
    try:
        return load_config(path or folder / "config.json", changed).trainer.distributed
    except ConfigError:
        if path is not None:
            raise
        return False
