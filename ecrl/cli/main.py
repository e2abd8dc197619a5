"""Run the program `ecrl`, and define its commands for runs, such as `train`. A command imports torch only if needed."""

import atexit
import errno
import gc
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ecrl import __version__
from ecrl.cli.commands import Overrides, bench, check, check_env, compile_config, plot, presets, schema
from ecrl.errors import UserError
from ecrl.loop.signals import asked, listen
from ecrl.memory import enough_memory

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
    """Train a policy with a config. You can set any key of the config, as in --trainer.seed 3.

    Args:
        path: name of a shipped config, such as cartpole_ppo, or path of a JSON or YAML file.
        config: name or path of the config, if the first argument is absent.
        resume: folder of a run to continue from its newest checkpoint. No config is needed.
        force: resume even if the config differs from the run's own config.
        distributed: join the processes that torchrun started, even if the config's trainer.distributed is false.
        no_distributed: do not join the processes that torchrun started, even if trainer.distributed is true.
        run_dir: run folder; outputs/<exp_name>_<time> if absent.
        profile: time each phase of the run, such as the update, and trace two iterations. With trainer.log_freq above
            1, trace the iterations of two records instead. The results go to profile/ in the run folder.
    """
    listen()
    path = _config_path(path, config, needed=resume is None)
    if distributed and no_distributed:
        raise UserError("--distributed and --no-distributed exclude each other; use only one")
    if resume is not None and run_dir is not None:
        raise UserError("--resume continues in the folder of the run; remove --run-dir")
    if force and resume is None:
        raise UserError("--force works only with --resume; remove --force")
    from ecrl.config.files import parse_overrides
    from ecrl.run.train import run_config

    join_torchrun = distributed or (False if no_distributed else None)
    run_config(path, join_torchrun, run_dir, parse_overrides(overrides), resume, force, profile)
    if asked():
        sys.exit(_exit_status())


def _config_path(path: str | None, config: str | None, needed: bool = True) -> str | None:
    if path is not None and config is not None:
        raise UserError("two configs; pass only one, as the first argument or with --config")
    if needed and path is None and config is None:
        raise UserError("ecrl train needs a config, such as: ecrl train cartpole_ppo")
    return path or config


def export(run: Annotated[str, tyro.conf.Positional], /, out: str | None = None) -> None:
    """Export the newest policy of a run to torch.export and ONNX files, which do not need ecrl.

    If the policy normalises observations, the files include the normaliser. The policies pi0 and openvla are written as
    a checkpoint in the format of the checkpoint that the run began with.

    Args:
        run: run folder or checkpoint folder.
        out: output folder; <run>/export if absent.
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
    """Evaluate the newest checkpoint of a run with deterministic actions.

    You can set keys of env and trainer, as in --env.cfg.max_episode_steps 200. If the config has cameras for
    evaluations, their videos are saved in <run>/videos. With --env, no videos are recorded.

    Args:
        run: run folder or checkpoint folder.
        env: "gymnasium:<id>" for an environment of Gymnasium; the run's environment if absent.
        num_episodes: total number of episodes. Up to trainer.num_eval_envs environments, 4 by default, run in parallel,
            and each runs the same number of episodes. More environments, as with --trainer.num_eval_envs 50, take less
            time and more memory. The episodes then have other initial states, so the results differ.
        device: device, such as cuda; the config's trainer.device if absent.
    """
    from pathlib import Path

    from ecrl.config.files import parse_overrides
    from ecrl.run.checkpoint import latest, load
    from ecrl.run.evaluation import evaluate as run_episodes

    path = latest(run)
    state, cfg = load(path, device)
    cfg = _changed_config(cfg, run, parse_overrides(overrides))
    logs = run_episodes(state, cfg, num_episodes, env, None if env else Path(run) / "videos")
    print(f"{path} on {env or cfg.env.label}, {num_episodes} episodes")
    for name, value in logs.items():
        print(f"{name:<18} {value:.2f}")


def _changed_config(cfg: "Config", run: str, changes: dict[str, Any]) -> "Config":
    """Return a run's config with overrides for keys of env and trainer.

    Raises: UserError for other keys, for trainer.device, and if the overrides change the observation or action space.
    """
    from ecrl.config import config_from_dict
    from ecrl.config.abcdrl import FLAGS, PAGE
    from ecrl.envs import make_env
    from ecrl.registry import nearest
    from ecrl.run.evaluation import check_spaces

    if "trainer.device" in changes:
        raise UserError("--trainer.device: use --device to set the device")
    for key in changes:
        if not key.startswith(("env.", "trainer.")) or key in FLAGS:
            near = nearest(key.partition(".")[0], ("env", "trainer"))
            advice = "remove it" if near is None else f"did you mean {near!r}?"
            if key in FLAGS:
                advice = "this is a flag of abcdRL; remove it"
            if key.startswith("evaluater."):  # flags of abcdRL's example_eval_model.py
                advice = f"use an option instead (see {PAGE}#abcdrl-benchmarks-sweeps-and-saved-models)"
            raise UserError(f"--{key}: with a trained policy, you can only set keys of env and trainer; {advice}")
    if not changes:
        return cfg
    other = config_from_dict(cfg.model_dump(mode="json"), run, changes)
    check_spaces(make_env(cfg.env), make_env(other.env), "the environment with these keys")
    return other


def demo(
    path: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    run_dir: str | None = None,
    out: str = "demos.safetensors",
    num_episodes: int = 100,
    num_envs: int = 64,
    successes_only: bool = False,
    sample: bool = False,
    seed: int = 0,
    device: str | None = None,
    *,
    overrides: Overrides = (),
) -> None:
    """Record demonstrations for the algorithm bc, with the scripted expert of an environment or with a trained policy.

    With a config, you can set its keys and the settings of the scripted expert, as in --expert.noise 0.1. With
    --run-dir, you can set keys of env and trainer.

    Args:
        path: name of a shipped config, such as cartpole_ppo, or path of a JSON or YAML file. The scripted expert of the
            config's environment acts.
        run_dir: run folder or checkpoint folder, instead of a config. The run's newest policy acts in the run's
            environment.
        out: safetensors file for the demonstrations. The file must not exist yet.
        num_episodes: number of episodes in the file.
        num_envs: number of parallel environments.
        successes_only: leave out episodes that do not end with success.
        sample: sample the actions of a trained policy. By default, its actions are deterministic.
        seed: seed of the initial states, the environment noise, the expert's noise and the sampled actions.
        device: device, such as cuda; the config's trainer.device if absent.
    """
    if (path is None) == (run_dir is None):
        raise UserError("ecrl demo needs either a config, as in ecrl demo cartpole_ppo, or --run-dir; pass one of them")
    from ecrl.config import load_config
    from ecrl.config.files import parse_overrides
    from ecrl.run.checkpoint import latest, load
    from ecrl.run.demonstrations import record_demonstrations

    values = parse_overrides(overrides)
    expert = {key.removeprefix("expert."): values.pop(key) for key in [*values] if key.startswith("expert.")}
    state = None
    if run_dir is not None:
        state, cfg = load(latest(run_dir), device)
        cfg = _changed_config(cfg, run_dir, values)
    else:
        cfg = load_config(path or "", values | ({} if device is None else {"trainer.device": device}))
    done = record_demonstrations(
        cfg,
        out,
        num_episodes,
        state=state,
        expert=expert,
        sample=sample,
        successes_only=successes_only,
        seed=seed,
        num_envs=num_envs,
    )
    rate = "" if done.success_rate is None else f", success rate {done.success_rate:.3f}"
    print(f"{done.path}: {done.episodes:,} episodes, {done.steps:,} steps, mean return {done.mean_return:.2f}{rate}")
    print(f"sha256 {done.sha256}")


def record(
    run: Annotated[str, tyro.conf.Positional],
    /,
    output: str | None = None,
    num_envs: int = 4,
    num_episodes: int = 1,
    device: str | None = None,
) -> None:
    """Record a real-time video of the newest policy of a run, with deterministic actions.

    In a MuJoCo task, the first evaluation camera of the config takes the video. If the config has no evaluation camera,
    the first training camera takes the video. If the config has no camera, the video shows the whole scene. A Gymnasium
    environment renders its own frames.

    Args:
        run: run folder or checkpoint folder.
        output: mp4 file; <run>/videos/record_<env steps>.mp4 if absent.
        num_envs: number of environments, shown in a grid.
        num_episodes: number of episodes of each environment.
        device: device, such as cuda; the config's trainer.device if absent.
    """
    from pathlib import Path

    from ecrl.run.checkpoint import latest, load
    from ecrl.run.video import record as record_video

    state, cfg = load(latest(run), device)
    path = Path(output) if output else Path(run) / "videos" / f"record_{int(state['sample_step'])}.mp4"
    frames = record_video(state, cfg, path, num_envs, num_episodes)
    print(f"{path}: {frames} frames of {num_envs} environments")


def replay(crash: Annotated[str, tyro.conf.Positional], /, distributed: bool = False) -> None:
    """Repeat an iteration that produced NaN or infinity, and print where the first such value occurs.

    The iteration first runs compiled or eagerly, as in the original run. If NaN or infinity appears again, the
    iteration also runs eagerly, step by step.

    Args:
        crash: crash folder of a run, such as RUN/crash.
        distributed: join the processes that torchrun started. Start as many processes as the run had.
    """
    from ecrl.distributed import rank, start, stop, world_size
    from ecrl.run.crash import replay as replay_lines

    start(distributed)
    for line in replay_lines(crash):
        print(f"rank {rank()}: {line}" if world_size() > 1 else line, flush=True)
    stop()


def _exit_status() -> int:
    """Return the exit status of a command that a signal has ended: 128 plus the signal number, as in shells."""
    return 128 + (asked() or signal.SIGINT)


_KEY = r"--[A-Za-z_-]+\."
"""Regular expression for the start of an argument that is a key of the config."""


def _split_overrides(args: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Separate the arguments of the command from config keys. A config key has a dot, as in `--trainer.seed 3`."""
    if not any(re.match(_KEY, arg) for arg in args):
        return args, ()
    from ecrl.config.files import split_values

    command_args, keys, remaining = [], [], list(args)
    while remaining:
        arg = remaining.pop(0)
        if not re.match(_KEY, arg):
            command_args.append(arg)
            continue
        values, remaining = split_values(arg, remaining)
        keys += [arg, *values]
    return command_args, tuple(keys)


def _check_options(args: list[str]) -> None:
    """Raise UserError for the first unknown option that ecrl can map to a config key, such as --seed or --lr.

    The option may lack the section of the key, or be the name of the setting in another library. The message contains
    the complete option, such as --trainer.seed.
    """
    command = _WITH_OVERRIDES.get(args[0]) if args else None
    if command is None:
        return
    known = {f"--{name.replace('_', '-')}" for name in signature(command).parameters} | {"--help"}
    unknown = [arg.partition("=")[0] for arg in args[1:] if arg.startswith("--")]
    for name in unknown:
        if name.replace("_", "-") not in known:
            from ecrl.config.other_libraries import option_for

            if option := option_for(name):
                raise UserError(f"{name}: no option of ecrl {args[0]}; set the key of the config: {option}")


def _import_user_modules(args: list[str]) -> list[str]:
    """Import the modules of all options `--import MODULE`, and return the other arguments."""
    remaining = []
    while args:
        arg, *args = args
        name, equals, module = arg.partition("=")
        if name != "--import":
            remaining.append(arg)
            continue
        module, args = (module, args) if equals else ("".join(args[:1]), args[1:])
        from ecrl.registry import import_user_module

        sys.path[:0] = [] if "" in sys.path else [""]  # also import from the working directory, as `python -m` does
        import_user_module(module)
    return remaining


def _shorten(line: str) -> str:
    """Shorten a line of more than 1,000 characters in the middle, because an error message may quote a long value."""
    return line if len(line) <= 1000 else f"{line[:800]} ... {line[-200:]}"


def _format_warning(message: Warning | str, *place: object) -> str:
    return f"warning: {message}\n"


_WITH_OVERRIDES: dict[str, Callable] = {
    "train": train,
    "check": check,
    "check-env": check_env,
    "compile": compile_config,
    "eval": evaluate,
    "demo": demo,
}
_NO_OVERRIDES = {
    "record": record,
    "replay": replay,
    "plot": plot,
    "bench": bench,
    "export": export,
    "presets": presets,
    "schema": schema,
}

_ABOUT = (
    "Train and evaluate policies. With --import MODULE, any command first imports a module with your own components."
)
_ACCESS, _ANOTHER_PLACE = "give this user access, or choose another place", "choose another place"
_PATH_ERRORS: dict[int | None, str] = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EISDIR: _ANOTHER_PLACE,
    errno.ENOTDIR: _ANOTHER_PLACE,
    errno.EROFS: _ANOTHER_PLACE,
    errno.ENAMETOOLONG: _ANOTHER_PLACE,
}
"""Map the errno of an OSError that the user can fix to the remedy. Any other OSError ends with a traceback."""
_FLAGS = (tyro.conf.FlagCreatePairsOff,)


def main() -> None:
    """Run the command line. If the output is closed early, as in `ecrl schema | head`, exit without a traceback."""
    try:
        try:
            _run_command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python also flushes stdout at exit
        sys.exit(128 + signal.SIGPIPE)


def _run_command() -> None:
    """Run the command in `sys.argv`.

    If the user can fix an error, print one line per fault to stderr and exit with status 2.
    """
    warnings.formatwarning = _format_warning
    gc.set_threshold(50_000)  # collect rarely: imports and compilation create many permanent objects
    atexit.register(gc.freeze)  # after compilation, a garbage collection at exit would take two seconds
    if sys.argv[1:] == ["--version"]:
        print(f"ecrl {__version__}")
        return
    try:
        args, keys = _split_overrides(_import_user_modules(sys.argv[1:]))
        if keys and (not args or args[0] not in _WITH_OVERRIDES):
            raise UserError(f"{keys[0]}: only these commands accept config keys: {', '.join(_WITH_OVERRIDES)}")
        _check_options(args)
        commands = {name: partial(command, overrides=keys) for name, command in _WITH_OVERRIDES.items()} | _NO_OVERRIDES
        with enough_memory("ecrl", "lower trainer.num_envs or trainer.buffer_size, or make the networks smaller"):
            tyro.extras.subcommand_cli_from_dict(commands, prog="ecrl", description=_ABOUT, args=args, config=_FLAGS)
    except UserError as error:
        print("\n".join(_shorten(line) for line in str(error).split("\n")), file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _PATH_ERRORS:
            raise
        print(f"{error.filename}: {error.strerror}; {_PATH_ERRORS[error.errno]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(_exit_status())
