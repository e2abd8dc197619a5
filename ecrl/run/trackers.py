"""Consumers that track a run: TensorBoard, and Weights & Biases, which is imported only when it is used.

Both show the same scalars, named by `ecrl.run.loggers.scalar_name`, against env steps, and the config beside them.
"""

import io
import json
import math
import os
import socket
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ecrl.config import Config
from ecrl.errors import MissingExtraError, extra
from ecrl.run.loggers import appending, ending, never_fatal, with_scalars
from ecrl.types import LogData

_COMPARED = ("charts/episode_reward_avg_100", "charts/episode_length_avg_100", "charts/SPS")
_WAIT, _LAST_WAIT = 10.0, 60.0  # seconds W&B may take to answer at the start, and to take the last upload
_RETRY = 60.0  # seconds between two attempts to start it again


def hyperparameters(cfg: Config) -> dict[str, bool | int | float | str]:
    """The config by dotted key; what is no number, flag or text is written as JSON, and null left out.

    >>> from ecrl.config import load_config
    >>> flat = hyperparameters(load_config("configs/cartpole_ppo.json"))
    >>> flat["algorithm.cfg.clip_coef"], flat["policy.actor.network_cfg.hidden_sizes"]
    (0.2, '[64, 64]')
    """

    def leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
        for key, value in data.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{path}{key}.")
            elif value is not None:
                yield path + key, value if isinstance(value, bool | int | float | str) else json.dumps(value)

    return dict(leaves(cfg.model_dump(mode="json"), ""))


def _described(cfg: Config) -> list[Any]:
    """The config as a table among the texts and in TensorBoard's HParams, of this very run.

    `SummaryWriter.add_hparams` would open a run folder of its own, with none of the curves.
    """
    from torch.utils.tensorboard.summary import hparams, text

    flat = hyperparameters(cfg)
    table = "\n".join(f"|{key}|{value}|" for key, value in flat.items())
    return [text("hyperparameters", f"|key|value|\n|-|-|\n{table}"), *hparams(flat, dict.fromkeys(_COMPARED, 0.0))]


def _event(**content: Any) -> bytes:
    """One record of an event file, with the lengths and checksums that TensorBoard's own writer puts around it."""
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
    return record.getvalue()


def _event_file(log_dir: Path) -> Path:
    """A new name, by which TensorBoard knows the file and sorts it after the older ones."""
    number = len(list(log_dir.glob("events.out.tfevents.*")))
    return log_dir / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"


def with_tensorboard(records: Iterator[LogData], cfg: Config, log_dir: str | Path, start: int = 0) -> Iterator[LogData]:
    """Write every log against env steps, `charts/SPS`, and the config as a table and as TensorBoard's HParams.

        for record in with_tensorboard(train_iter(state, cfg), cfg, "logs"): ...

    Each record is whole in the file when it is passed on: there is no thread that could die, and a kill loses none.

    Args:
        records: to pass on.
        cfg: of the run.
        log_dir: folder of the event files.
        start: env steps before the first record; what an earlier run wrote beyond them is hidden.
    """
    from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    add = appending(_event_file(folder))
    head = [_event(file_version="brain.Event:2")]
    head += [_event(step=start + 1, session_log=SessionLog(status=SessionLog.START))]
    add(b"".join([*head, *(_event(summary=summary) for summary in _described(cfg))]))
    numbered = with_scalars(records, start)
    with ending(numbered):
        for record, numbers in numbered:
            values = [Summary.Value(tag=n, simple_value=value) for n, value in numbers.items() if math.isfinite(value)]
            add(_event(step=record["sample_step"], summary=Summary(value=values)))
            yield record


def _run_id(folder: Path) -> str:
    """W&B's id of the run in this folder, so that it goes on there when it is resumed."""
    path = folder / "wandb" / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def check_wandb(cfg: Config) -> None:
    """Refuse, before a run begins, `trainer.use_wandb` without the package; MissingExtraError says how to get it."""
    if not cfg.trainer.use_wandb:
        return
    try:
        with extra("wandb"):
            import wandb  # noqa: F401
    except MissingExtraError as error:
        raise MissingExtraError(f"trainer.use_wandb: {error}") from None


def _wandb_run(cfg: Config, folder: Path) -> Any:
    """A run of W&B: as WANDB_MODE says, else online, else (no key, or no server that answers) offline and said."""
    with extra("wandb"):
        import wandb

    def begin(mode: Any) -> Any:
        return wandb.init(
            project=cfg.trainer.wandb_project_name,
            name=cfg.trainer.exp_name,
            id=_run_id(folder),
            resume="allow" if mode == "online" else None,
            dir=folder,
            config=cfg.model_dump(mode="json"),
            mode=mode,
            # console: W&B would keep every frame of the live progress line
            settings=wandb.Settings(init_timeout=_WAIT, finish_timeout=_LAST_WAIT, console="off"),
        )

    mode = wandb.setup().settings.mode
    if mode != "online":
        return begin(mode)
    try:
        if wandb.login(prompt=False):
            return begin("online")
        reason = "no API key is configured (wandb login)"
    except wandb.Error as error:
        reason = str(error).splitlines()[0]
    upload = f"upload it later with: wandb sync {folder}/wandb/offline-run-*"
    warnings.warn(f"W&B: {reason}; tracking offline, {upload}", stacklevel=3)
    return begin("offline")


def _errors() -> type[Exception]:
    import wandb

    return wandb.Error


def _begun_again(cfg: Config, folder: Path) -> Any:
    """A run of W&B in a new process in place of one that died."""
    import wandb

    with suppress(OSError):
        wandb.teardown()
    run = _wandb_run(cfg, folder)
    run.define_metric("*", step_metric="sample_step")
    return run


def with_wandb(records: Iterator[LogData], cfg: Config, run_dir: str | Path, start: int = 0) -> Iterator[LogData]:
    """Track a run with Weights & Biases: the logs that TensorBoard gets, against env steps, and the config.

        for record in with_wandb(train_iter(state, cfg), cfg, "outputs/mine"): ...

    Args:
        records: to pass on.
        cfg: of the run; `trainer.wandb_project_name` is the project and `trainer.exp_name` the name.
        run_dir: the run folder; W&B's files go into `wandb/` of it.
        start: env steps before the first record.

    Raises: UserError without the extra `wandb`.
    """
    run, failed = _wandb_run(cfg, Path(run_dir)), True
    guarded, tried = never_fatal("W&B", _errors()), 0.0

    def send(row: dict[str, float]) -> None:
        nonlocal run, tried
        if run is None:
            if time.monotonic() < tried + _RETRY:
                raise ConnectionError("its process is gone")
            tried = time.monotonic()
            run = _begun_again(cfg, Path(run_dir))
        try:
            run.log(row)
        except ConnectionError:  # of the process that W&B starts, which does not come back by itself
            run, tried = None, time.monotonic()
            raise

    try:
        run.define_metric("*", step_metric="sample_step")
        numbered = with_scalars(records, start)
        with ending(numbered):
            for record, numbers in numbered:
                finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
                guarded(send, finite | {"sample_step": record["sample_step"]})
                yield record
        failed = False
    except GeneratorExit:  # the caller stopped early
        failed = False
        raise
    finally:
        if run is not None:
            guarded(run.finish, int(failed))
