"""The command line: `ecrl train CONFIG`, `ecrl eval RUN`, ... Torch is imported only by the command that needs it."""

import json
import re
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

import tyro

from ecrl.errors import UserError
from ecrl.garbage import uncollected
from ecrl.stopping import asked, listen

if TYPE_CHECKING:
    from ecrl.config import Config

Overrides = Annotated[tuple[str, ...], tyro.conf.Suppress]


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
    with uncollected():
        from ecrl.sources import parse_overrides
        from ecrl.training import train_from_config

    train_from_config(
        path,
        distributed or (False if no_distributed else None),
        run_dir,
        overrides=parse_overrides(overrides),
        resume_from=resume,
        force=force,
        profile=profile,
    )
    if asked():
        sys.exit(_stopped())


def _one_config(path: str | None, config: str | None, needed: bool = True) -> str | None:
    if path is not None and config is not None:
        raise UserError("give the config file once: as the first argument or with --config")
    if needed and path is None and config is None:
        raise UserError("ecrl train needs one config file, such as: ecrl train configs/cartpole_ppo.json")
    return path or config


def check(path: Annotated[str, tyro.conf.Positional], /, *, overrides: Overrides = ()) -> None:
    """Check a config file without running it: every fault at once, one line each; else what it would run.

    Args:
        path: config file.
    """
    from ecrl.config import load_config
    from ecrl.distributed import world_size
    from ecrl.evaluation import check_evaluation
    from ecrl.loop import check_config
    from ecrl.recording import check_cameras
    from ecrl.sources import parse_overrides

    cfg = load_config(path, parse_overrides(overrides))
    lines = check_config(cfg, world_size())
    if cfg.trainer.enable_eval:
        check_evaluation(cfg)
    check_cameras(cfg)
    print("\n".join(lines))
    print(f"{path}: ok")


def schema() -> None:
    """Print the JSON schema of config files, with every registered part."""
    from ecrl.schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def export(run: Annotated[str, tyro.conf.Positional], /, out: str | None = None) -> None:
    """Write the newest policy of a run, normaliser included, as torch.export and ONNX, to run without ecrl.

    Args:
        run: run folder or checkpoint folder.
        out: folder; <run>/export if absent.
    """
    from pathlib import Path

    from ecrl.checkpoint import latest, load
    from ecrl.export import export as write

    path = latest(run)
    state, cfg = load(path, "cpu")
    for file in write(state, cfg, Path(out) if out else Path(run) / "export"):
        print(file)


def bench(quick: bool = False, only: tuple[str, ...] = (), out: str | None = None) -> None:
    """Measure ecrl side by side with other libraries; from a checkout of the source, with the extra `bench`.

    Args:
        quick: fewer and shorter rounds, and of the subjects the first three only.
        only: subjects, such as end_to_end; all if none is given.
        out: folder for the JSON files and plots; benchmarks/results if absent.
    """
    from pathlib import Path

    root = Path(__file__).resolve().parents[1]
    if not (root / "benchmarks" / "__main__.py").exists():
        raise UserError(
            f"ecrl bench: no benchmarks beside {Path(__file__).parent}; run it from a checkout of the source"
        )
    sys.path.insert(0, str(root))
    from benchmarks.__main__ import run

    if not run(quick, only, Path(out) if out else root / "benchmarks" / "results"):
        sys.exit(1)


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

    from ecrl.checkpoint import latest, load
    from ecrl.evaluation import evaluate as run_episodes

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
    from ecrl.evaluation import check_spaces
    from ecrl.parts import make_parts
    from ecrl.sources import parse_overrides

    changes = parse_overrides(overrides)
    for key in changes:
        if not key.startswith(("env.", "trainer.")):
            raise UserError(f"--{key}: an evaluation can set keys of env and trainer, the others made the policy")
    if not changes:
        return cfg
    other = config_from_dict(cfg.model_dump(mode="json"), run, changes)
    check_spaces(make_parts(cfg, "eval").env, make_parts(other, "eval").env, "with these keys")
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

    from ecrl.checkpoint import latest, load
    from ecrl.films import record as film

    state, cfg = load(latest(run), device)
    path = Path(output) if output else Path(run) / "videos" / f"record_{int(state['sample_step'])}.mp4"
    frames = film(state, cfg, path, num_envs, num_episodes)
    print(f"{path}: {frames} frames of {num_envs} environments")


def replay(crash: Annotated[str, tyro.conf.Positional], /) -> None:
    """Repeat the iteration that was not finite: in the form of its run first, then eagerly step by step to find where.

    Args:
        crash: crash folder of a run, RUN/crash.
    """
    from ecrl.replay import replay as repeated

    for line in repeated(crash):
        print(line)


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


def _one_line(message: Warning | str, *place: object) -> str:
    return f"warning: {message}\n"


def main() -> None:
    """Run the command; a fault the user can mend is one line each on stderr and exit status 2."""
    warnings.formatwarning = _one_line
    args, keys = _split(sys.argv[1:])
    commands: dict[str, Callable] = {"train": train, "check": check, "eval": evaluate}
    commands = {name: partial(command, overrides=keys) for name, command in commands.items()}
    try:
        if keys and (not args or args[0] not in commands):
            raise UserError(f"{keys[0]}: keys of the config can be set for: {', '.join(commands)}")
        tyro.extras.subcommand_cli_from_dict(
            {**commands, "record": record, "replay": replay, "bench": bench, "export": export, "schema": schema},
            prog="ecrl",
            description="Train and evaluate policies.",
            args=args,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_stopped())


if __name__ == "__main__":
    main()
