"""The command line: `ecrl train CONFIG`, `ecrl eval RUN`, ... Torch is imported only by the command that needs it."""

import atexit
import gc
import re
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro

from ecrl.cli.commands import Overrides, bench, check, check_env, plot, schema
from ecrl.errors import UserError, enough_memory
from ecrl.garbage import importing
from ecrl.loop.signals import asked, listen

if TYPE_CHECKING:
    from ecrl.config import Config


def train(
    path: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    config: str | None = None,
    resume: str | None = None,
    force: bool = False,
    distributed: bool = False,
    no_distributed: bool = False,
    run_dir: str | None = None,
    profile: bool = False,
    *,
    overrides: Overrides = (),
) -> None:
    """Train what a JSON or YAML file describes; any of its keys can be set, as in --trainer.seed 3.

    Args:
        path: config file.
        config: config file, the same as the positional one.
        resume: run folder to go on with from its newest checkpoint; needs no config file.
        force: resume though the config differs from the run's.
        distributed: join the processes that torchrun started; the config decides if neither is given.
        no_distributed: do not join them.
        run_dir: run folder; outputs/<exp_name>_<time> if absent.
        profile: time the phases and trace some iterations, into the run folder's profile/.
    """
    listen()
    path = _one_config(path, config, needed=resume is None)
    if distributed and no_distributed:
        raise UserError("give --distributed or --no-distributed, not both")
    if resume is not None and run_dir is not None:
        raise UserError("--resume goes on in its own folder; leave --run-dir out")
    if force and resume is None:
        raise UserError("--force is for --resume; leave it out")
    with importing():
        from ecrl.config.files import parse_overrides
        from ecrl.run.train import run_config

    joins = distributed or (False if no_distributed else None)
    run_config(path, joins, run_dir, parse_overrides(overrides), resume, force, profile)
    if asked():
        sys.exit(_stopped())


def _one_config(path: str | None, config: str | None, needed: bool = True) -> str | None:
    if path is not None and config is not None:
        raise UserError("give the config file once: as the first argument or with --config")
    if needed and path is None and config is None:
        raise UserError("ecrl train needs one config file, such as: ecrl train configs/cartpole_ppo.json")
    return path or config


def export(run: Annotated[str, tyro.conf.Positional], /, out: str | None = None) -> None:
    """Write the newest policy of a run, normaliser included, as torch.export and ONNX, to run without ecrl.

    Args:
        run: run folder or checkpoint folder.
        out: folder; <run>/export if absent.
    """
    from pathlib import Path

    from ecrl.run.checkpoint import latest, load
    from ecrl.run.export import export as write

    path = latest(run)
    state, cfg = load(path, "cpu")
    for file in write(state, cfg, Path(out) if out else Path(run) / "export"):
        print(file)


def evaluate(
    run: Annotated[str, tyro.conf.Positional],
    /,
    env: str | None = None,
    num_episodes: int = 100,
    device: str | None = None,
    *,
    overrides: Overrides = (),
) -> None:
    """Evaluate the newest checkpoint of a run with deterministic actions; its cameras film that into the run's videos/.

    Keys of env and trainer can be set, as in --env.cfg.max_episode_steps 200.

    Args:
        run: run folder or checkpoint folder.
        env: "gymnasium:<id>" for one of Gymnasium's environments; the run's own if absent.
        num_episodes: episodes, shared equally by the environments.
        device: replaces the config's device.
    """
    from pathlib import Path

    from ecrl.run.checkpoint import latest, load
    from ecrl.run.evaluation import evaluate as run_episodes

    path = latest(run)
    state, cfg = load(path, device)
    cfg = _elsewise(cfg, run, overrides)
    logs = run_episodes(state, cfg, num_episodes, env, None if env else Path(run) / "videos")
    print(f"{path} on {env or cfg.env.name}, {num_episodes} episodes")
    for name, value in logs.items():
        print(f"{name:<18} {value:.2f}")


def _elsewise(cfg: "Config", run: str, overrides: tuple[str, ...]) -> "Config":
    """The config of a run with other keys of env and trainer, of the same spaces."""
    from ecrl.config import config_from_dict
    from ecrl.config.files import parse_overrides
    from ecrl.loop.build import build
    from ecrl.run.evaluation import check_spaces

    changes = parse_overrides(overrides)
    if "trainer.device" in changes:
        raise UserError("--trainer.device: the device of an evaluation is --device")
    for key in changes:
        if not key.startswith(("env.", "trainer.")):
            raise UserError(f"--{key}: an evaluation can set keys of env and trainer, the others made the policy")
    if not changes:
        return cfg
    other = config_from_dict(cfg.model_dump(mode="json"), run, changes)
    check_spaces(build(cfg, "eval").env, build(other, "eval").env, "with these keys")
    return other


def record(
    run: Annotated[str, tyro.conf.Positional],
    /,
    output: str | None = None,
    num_envs: int = 4,
    num_episodes: int = 1,
    device: str | None = None,
) -> None:
    """Make a video of the newest policy of a run, with deterministic actions and in real time, from its first camera.

    Args:
        run: run folder or checkpoint folder.
        output: the mp4; <run>/videos/record_<env steps>.mp4 if absent.
        num_envs: environments, side by side and below each other.
        num_episodes: of each environment.
        device: replaces the config's device.
    """
    from pathlib import Path

    from ecrl.run.checkpoint import latest, load
    from ecrl.run.films import record as film

    state, cfg = load(latest(run), device)
    path = Path(output) if output else Path(run) / "videos" / f"record_{int(state['sample_step'])}.mp4"
    frames = film(state, cfg, path, num_envs, num_episodes)
    print(f"{path}: {frames} frames of {num_envs} environments")


def replay(crash: Annotated[str, tyro.conf.Positional], /, distributed: bool = False) -> None:
    """Repeat the iteration that was not finite: in the form of its run first, then eagerly step by step to find where.

    Args:
        crash: crash folder of a run, RUN/crash.
        distributed: join the processes that torchrun started, as many as had trained.
    """
    from ecrl.distributed import rank, start, stop, world_size
    from ecrl.run.crash import replay as repeated

    start(distributed)
    for line in repeated(crash):
        print(f"rank {rank()}: {line}" if world_size() > 1 else line, flush=True)
    stop()


def _stopped() -> int:
    """The exit status of a command that a signal ended, as shells have it."""
    return 128 + (asked() or signal.SIGINT)


def _split(args: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Arguments of the command, and those that set a key of the config, which have a dot: `--trainer.seed 3`."""
    own, keys, rest = [], [], list(args)
    while rest:
        arg = rest.pop(0)
        if not re.match(r"--[A-Za-z_-]+\.", arg):
            own.append(arg)
            continue
        keys.append(arg)
        if "=" not in arg and rest and not rest[0].startswith("--"):
            keys.append(rest.pop(0))
    return own, tuple(keys)


def _importing(args: list[str]) -> list[str]:
    """Arguments without `--import MODULE`, anywhere and any number of times; the modules register parts of a user's."""
    rest = []
    while args:
        arg, *args = args
        name, equals, module = arg.partition("=")
        if name != "--import":
            rest.append(arg)
            continue
        module, args = (module, args) if equals else ("".join(args[:1]), args[1:])
        from ecrl.registry import import_own

        sys.path[:0] = [] if "" in sys.path else [""]  # the working directory, as for `python -m`
        import_own(module)
    return rest


def _short(line: str) -> str:
    """Without the middle of what is too long to read: a fault may quote what was given."""
    return line if len(line) <= 1000 else f"{line[:800]} ... {line[-200:]}"


def _one_line(message: Warning | str, *place: object) -> str:
    return f"warning: {message}\n"


_WITH_KEYS: dict[str, Callable] = {"train": train, "check": check, "check-env": check_env, "eval": evaluate}
_OTHERS = {"record": record, "replay": replay, "plot": plot, "bench": bench, "export": export, "schema": schema}

_ABOUT = "Train and evaluate policies. --import MODULE, with any command, imports parts of your own."
_FLAGS = (tyro.conf.FlagCreatePairsOff,)


def main() -> None:
    """Run the command; a fault the user can mend is one line each on stderr and exit status 2."""
    warnings.formatwarning = _one_line
    atexit.register(gc.freeze)  # a process that ends has no garbage to look for: that takes two seconds after compiling
    try:
        args, keys = _split(_importing(sys.argv[1:]))
        if keys and (not args or args[0] not in _WITH_KEYS):
            raise UserError(f"{keys[0]}: keys of the config can be set for: {', '.join(_WITH_KEYS)}")
        commands = {name: partial(command, overrides=keys) for name, command in _WITH_KEYS.items()} | _OTHERS
        with enough_memory("ecrl", "lower trainer.num_envs or trainer.buffer_size, or make the networks smaller"):
            tyro.extras.subcommand_cli_from_dict(commands, prog="ecrl", description=_ABOUT, args=args, config=_FLAGS)
    except UserError as error:
        print("\n".join(map(_short, str(error).split("\n"))), file=sys.stderr)
        sys.exit(2)
    except PermissionError as error:
        print(f"{error.filename}: {error.strerror}; give this user access, or choose another place", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_stopped())
