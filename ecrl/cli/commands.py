"""Define the commands `check`, `check-env`, `compile`, `presets`, `schema`, `plot` and `bench`.

Each command imports its modules only when the command runs, so `ecrl --help` is fast.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ecrl.errors import UserError

Overrides = Annotated[tuple[str, ...], tyro.conf.Suppress]


def check(path: Annotated[str, tyro.conf.Positional], /, *, overrides: Overrides = ()) -> None:
    """Check a config without training. Print one line for each fault, or a summary of the run if the config is valid.

    Args:
        path: name of a shipped config, such as cartpole_ppo, or path of a JSON or YAML file.
    """
    from ecrl.config import load_config
    from ecrl.config.files import parse_overrides
    from ecrl.distributed import world_size
    from ecrl.loop.build import build, with_eval_events
    from ecrl.loop.iteration import check_start, run_summary
    from ecrl.run.evaluation import check_evaluation
    from ecrl.run.trackers import check_wandb
    from ecrl.run.video_writer import check_cameras

    cfg = load_config(path, parse_overrides(overrides))
    try:
        run = build(cfg)
        lines = run_summary(run, cfg, world_size())
        check_start(run, cfg)
        if cfg.trainer.enable_eval:
            check_evaluation(with_eval_events(run, cfg), cfg)
        check_cameras(cfg)
        check_wandb(cfg)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    print("\n".join(lines))
    print(f"{path}: ok")


def check_env(
    env: Annotated[str, tyro.conf.Positional], /, num_steps: int = 256, seed: int = 0, *, overrides: Overrides = ()
) -> None:
    """Run an environment with random actions, and print one line for each fault or note.

    The exit status is 1 if the environment has faults. You can set keys of env, as in --env.cfg.max_episode_steps 200.

    Args:
        env: name of an environment, such as cartpole or gymnasium:CartPole-v1, or a config with the environment. The
            config can be the name of a shipped config or the path of a file.
        num_steps: number of steps.
        seed: seed of resets, noise and actions.
    """
    from ecrl.config import EnvChoice, env_choice, load_config
    from ecrl.config.files import parse_overrides
    from ecrl.config.presets import preset_names
    from ecrl.env_check.check import check_env as run_check

    keys, in_config = parse_overrides(overrides), env in preset_names() or env.endswith((".json", ".yaml", ".yml"))
    choice: EnvChoice = load_config(env, keys).env if in_config else env_choice(env, keys)
    findings, notes = run_check(choice, num_steps=num_steps, seed=seed)
    for line in (*findings, *notes):
        print(f"{env}: {line}")
    if findings:
        sys.exit(1)
    print(f"{env}: ok")


def compile_config(path: Annotated[str, tyro.conf.Positional], /, *, overrides: Overrides = ()) -> None:
    """Compile the functions of a run and store the code on disk, so that later runs with the config start faster.

    Args:
        path: name of a shipped config, such as cartpole_ppo, or path of a JSON or YAML file.
    """
    from ecrl.compile.cache import cache_path
    from ecrl.config import load_config
    from ecrl.config.files import parse_overrides
    from ecrl.run.compile_ahead import compile_ahead

    try:
        compilations = compile_ahead(load_config(path, parse_overrides(overrides)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for one in compilations:
        print(f"{one.seconds or 0.0:6.1f} s  {one.text}")
    print(f"{path}: compiled code is in {cache_path()}")


def presets() -> None:
    """Print the name, the algorithm and the environment of each config that ecrl ships."""
    from ecrl.config.files import read
    from ecrl.config.presets import preset_folder, preset_names

    names = preset_names()
    width = max(map(len, names))
    for name in names:
        data = read(preset_folder() / f"{name}.json")
        env = data["env"]
        print(f"{name:<{width}}  {data['algorithm']['name']:<8}  {env.get('id') or env['name']}")


def schema() -> None:
    """Print the JSON schema of config files, with the settings of every registered component."""
    from ecrl.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def plot(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    out: str = "curves",
    metric: str | None = None,
    threshold: float | None = None,
) -> None:
    """Plot learning curves over env steps and over minutes, as PNG and SVG files.

    For three or more seeds of a config, the plot shows the interquartile mean as a line, and the 95 % bootstrap
    interval of this mean as a band. To add results of another library, pass a .csv or .json file. Each row of the file
    has the fields steps and seconds, and the field return or success.

    Args:
        runs: run folders, folders of run folders, and files with results of other libraries.
        out: path of the picture. If the path has no suffix, a .png and a .svg file are written.
        metric: name of a metric in metrics.jsonl. The default is the first of these metrics that all runs and files
            have: eval/success_rate, eval/avg_reward, charts/episode_reward_avg_100.
        threshold: draw a line at this value, and print the env steps and minutes from which each curve stays at or
            above this value.
    """
    if not runs:
        raise UserError("ecrl plot needs run folders, such as: ecrl plot outputs/cartpole_ppo_*")
    from ecrl.report.plots import plot as plot_runs
    from ecrl.report.plots import summary

    files, groups, metric = plot_runs([Path(run) for run in runs], Path(out), metric, threshold)
    print("\n".join([metric, *(f"  {line}" for line in summary(groups, threshold)), *map(str, files)]))


def bench(
    what: Annotated[Literal["speed", "results"], tyro.conf.Positional] = "speed",
    /,
    quick: bool = False,
    only: tuple[str, ...] = (),
    seeds: int | None = None,
    minutes: float | None = None,
    out: str | None = None,
) -> None:
    """Compare ecrl with other libraries. The command needs a checkout of the source and the extra `bench`.

    Args:
        what: "speed" measures how fast ecrl is, and "results" measures how well the shipped configs learn. With
            "results", each seed has a file, and the command measures only seeds whose file is missing or out of date.
        quick: measure speed in fewer and shorter rounds. If --only is absent, --quick runs only end_to_end,
            solved and kernels.
        only: with "speed", names of benchmarks, such as end_to_end; with "results", names of configs, such as
            cartpole_ppo; all if absent.
        seeds: with "results", number of seeds per config. The default is ten for configs that train in less than ten
            minutes, and three for the others.
        minutes: with "results", number of minutes after which no new run starts; no limit if absent. With 0 minutes,
            the command only regenerates the tables and pictures.
        out: folder for the results; benchmarks/results if absent.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").exists():
        raise UserError(
            f"ecrl bench: no benchmarks folder next to {root / 'ecrl'}; run it from a checkout of the source"
        )
    if what == "speed" and (seeds is not None or minutes is not None):
        raise UserError("--seeds and --minutes work only with: ecrl bench results; remove them")
    if what == "results" and quick:
        raise UserError("--quick works only with: ecrl bench speed; remove it")
    sys.path.insert(0, str(root))
    folder = Path(out) if out else root / "benchmarks" / "results"
    if not (_speed(quick, only, folder) if what == "speed" else _results(only, seeds, minutes, folder)):
        sys.exit(1)


def _speed(quick: bool, only: tuple[str, ...], folder: Path) -> bool:
    from benchmarks.__main__ import run

    return run(quick, only, folder)


def _results(only: tuple[str, ...], seeds: int | None, minutes: float | None, folder: Path) -> bool:
    from benchmarks.results import run

    return run(only, seeds, minutes, folder)
