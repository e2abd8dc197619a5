"""Log a run to TensorBoard and to Weights & Biases (W&B). Each package is imported only when it is used.

TensorBoard and W&B show the config and the same scalars, plotted against env steps. `ecrl.run.loggers.scalar_name`
names the scalars.
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
from ecrl.run.loggers import ending, make_appender, tolerate_errors, with_scalars
from ecrl.types import LogData

_METRICS = ("charts/episode_reward_avg_100", "charts/episode_length_avg_100", "charts/SPS")
_INIT_TIMEOUT, _FINISH_TIMEOUT = 10.0, 60.0  # seconds to wait for W&B's first answer and its last upload
_RETRY = 60.0  # seconds between two attempts to restart W&B


def hyperparameters(cfg: Config) -> dict[str, bool | int | float | str]:
    """Return the values of the config by dotted key. Lists and empty objects become JSON text, and nulls are left out.

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


def _config_summaries(cfg: Config) -> list[Any]:
    """Return the config as TensorBoard summaries: a table for the tab Text, and hyperparameters for the tab HParams.

    `SummaryWriter.add_hparams` is not used, because it would create a second run folder without the curves.
    """
    from torch.utils.tensorboard.summary import hparams, text

    flat = hyperparameters(cfg)
    table = "\n".join(f"|{key}|{value}|" for key, value in flat.items())
    return [
        text("hyperparameters", f"|key|value|\n|-|-|\n{table}"),
        *hparams(flat, dict.fromkeys(_METRICS, 0.0)),
    ]


def _event(**content: Any) -> bytes:
    """Encode one record of an event file in the format that TensorBoard's own writer uses."""
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
    return record.getvalue()


def _event_file(log_dir: Path) -> Path:
    """Return the path of a new event file. Its name sorts after older names, so TensorBoard reads the new file last."""
    number = len(list(log_dir.glob("events.out.tfevents.*")))
    return log_dir / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"


def with_tensorboard(records: Iterator[LogData], cfg: Config, log_dir: str | Path, start: int = 0) -> Iterator[LogData]:
    """Write the config, all finite logs and `charts/SPS` to TensorBoard event files. The x-axis shows env steps.

        for record in with_tensorboard(train_iter(state, cfg), cfg, "logs"): ...

    The config appears as a table and as hyperparameters (HParams). The consumer writes each record before it yields the
    record, without a background thread. A killed run therefore loses no record.

    Args:
        records: records of the run; the function yields each record again.
        cfg: config of the run.
        log_dir: folder of the event files.
        start: number of env steps before the first record. In a resumed run, TensorBoard hides values that the
            interrupted run logged after this step.
    """
    from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

    folder = Path(log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    add = make_appender(_event_file(folder))
    head = [_event(file_version="brain.Event:2")]
    head += [_event(step=start + 1, session_log=SessionLog(status=SessionLog.START))]
    add(b"".join([*head, *(_event(summary=summary) for summary in _config_summaries(cfg))]))
    numbered = with_scalars(records, start)
    with ending(numbered):
        for record, numbers in numbered:
            values = [Summary.Value(tag=n, simple_value=value) for n, value in numbers.items() if math.isfinite(value)]
            add(_event(step=record["sample_step"], summary=Summary(value=values)))
            yield record


def _run_id(folder: Path) -> str:
    """Return the run's W&B id. The id is stored in `folder`, so that a resumed run has the same id."""
    path = folder / "wandb" / "run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def check_wandb(cfg: Config) -> None:
    """Raise MissingExtraError if `trainer.use_wandb` is set but the package wandb is missing."""
    if not cfg.trainer.use_wandb:
        return
    try:
        with extra("wandb"):
            import wandb  # noqa: F401
    except MissingExtraError as error:
        raise MissingExtraError(f"trainer.use_wandb: {error}") from None


def _wandb_run(cfg: Config, folder: Path) -> Any:
    """Start a W&B run in the mode that the environment variable WANDB_MODE sets, which is online by default.

    If no API key is set or the server cannot be reached, warn and track offline.
    """
    with extra("wandb"):
        import wandb

    def init_run(mode: Any) -> Any:
        return wandb.init(
            project=cfg.trainer.wandb_project_name,
            name=cfg.trainer.exp_name,
            id=_run_id(folder),
            resume="allow" if mode == "online" else None,
            dir=folder,
            config=cfg.model_dump(mode="json"),
            mode=mode,
            # by default, W&B would store every frame of the live progress line
            settings=wandb.Settings(init_timeout=_INIT_TIMEOUT, finish_timeout=_FINISH_TIMEOUT, console="off"),
        )

    mode = wandb.setup().settings.mode
    if mode != "online":
        return init_run(mode)
    try:
        if wandb.login(prompt=False):
            return init_run("online")
        problem = "no API key is configured (wandb login)"
    except wandb.Error as error:
        problem = str(error).splitlines()[0]
    upload = f"upload the run later with: wandb sync {folder}/wandb/offline-run-*"
    warnings.warn(f"W&B: {problem}; tracking offline, {upload}", stacklevel=3)
    return init_run("offline")


def _wandb_error() -> type[Exception]:
    import wandb

    return wandb.Error


def _restart_wandb(cfg: Config, folder: Path) -> Any:
    """Start a new W&B process after the old process has ended, and continue the run in the new process."""
    import wandb

    with suppress(OSError):
        wandb.teardown()
    run = _wandb_run(cfg, folder)
    run.define_metric("*", step_metric="sample_step")
    return run


def with_wandb(records: Iterator[LogData], cfg: Config, run_dir: str | Path, start: int = 0) -> Iterator[LogData]:
    """Log the config and the scalars of a run to Weights & Biases. The scalars are the same as in TensorBoard.

        for record in with_wandb(train_iter(state, cfg), cfg, "outputs/mine"): ...

    Args:
        records: records of the run; the function yields each record again.
        cfg: config of the run; `trainer.wandb_project_name` is the project, and `trainer.exp_name` is the run's name.
        run_dir: run folder; W&B writes its files to `wandb/` in this folder.
        start: number of env steps before the first record.

    Raises: UserError if the extra `wandb` is missing.
    """
    run, failed = _wandb_run(cfg, Path(run_dir)), True
    guarded, last_attempt = tolerate_errors("W&B", _wandb_error()), 0.0

    def send(row: dict[str, float]) -> None:
        nonlocal run, last_attempt
        if run is None:
            if time.monotonic() < last_attempt + _RETRY:
                raise ConnectionError("the W&B process has ended")
            last_attempt = time.monotonic()
            run = _restart_wandb(cfg, Path(run_dir))
        try:
            run.log(row)
        except ConnectionError:  # W&B's own process has ended, and W&B does not restart it
            run, last_attempt = None, time.monotonic()
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
