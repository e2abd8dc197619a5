"""Commands that need no trained run: `ecrl check`, `check-env`, `schema`, `plot`, `bench`. Heavy imports are local."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ecrl.errors import UserError

Overrides = Annotated[tuple[str, ...], tyro.conf.Suppress]


def check(path: Annotated[str, tyro.conf.Positional], /, *, overrides: Overrides = ()) -> None:
    """Check a config file without running it. Print all faults, one line each, or a summary of the run.

    Args:
        path: name of a shipped config, such as cartpole_ppo, or a config file.
    """
    from ecrl.config import load_config
    from ecrl.config.files import parse_overrides
    from ecrl.distributed import world_size
    from ecrl.loop.build import build, with_eval_events
    from ecrl.loop.iteration import run_summary
    from ecrl.run.evaluation import check_evaluation
    from ecrl.run.trackers import check_wandb
    from ecrl.run.video_writer import check_cameras

    cfg = load_config(path, parse_overrides(overrides))
    try:
        run = build(cfg)
        lines = run_summary(run, cfg, world_size())
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
    """Run an environment with random actions and print its faults, one line each.

    You can set keys of the environment's config.

    Args:
        env: name, such as cartpole or gymnasium:CartPole-v1, or a config (name or file) that has the environment.
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


def schema() -> None:
    """Print the JSON schema of config files, with every registered part."""
    from ecrl.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))


def plot(
    runs: Annotated[tuple[str, ...], tyro.conf.Positional],
    /,
    out: str = "curves",
    metric: str | None = None,
    threshold: float | None = None,
) -> None:
    """Plot learning curves over env steps and minutes, as PNG and SVG. Three or more seeds of a config form a band.

    A band shows the interquartile mean with its 95 % bootstrap interval. Results of other libraries can be added from a
    .csv or .json file with rows of steps, seconds and return or success.

    Args:
        runs: run folders, and files with results of other libraries.
        out: path of the picture; without .png or .svg, both are written.
        metric: name in metrics.jsonl. By default, the first that all files have of eval/success_rate, eval/avg_reward
            and charts/episode_reward_avg_100.
        threshold: draw a line at this value, and print when each curve reaches it and stays there.
    """
    if not runs:
        raise UserError("ecrl plot needs run folders, such as: ecrl plot outputs/cartpole_ppo_*")
    from ecrl.report.plots import plot as plot_runs
    from ecrl.report.plots import summary

    files, groups = plot_runs([Path(run) for run in runs], Path(out), metric, threshold)
    print("\n".join([*summary(groups, threshold), *map(str, files)]))


def bench(
    what: Annotated[Literal["speed", "results"], tyro.conf.Positional] = "speed",
    /,
    quick: bool = False,
    only: tuple[str, ...] = (),
    seeds: int | None = None,
    minutes: float | None = None,
    out: str | None = None,
) -> None:
    """Benchmark ecrl side by side with other libraries. It needs a checkout of the source and the extra `bench`.

    Args:
        what: speed, or results (how well the shipped configs learn). Each seed is measured once, into its own file.
        quick: for speed: fewer and shorter rounds, and only the first three subjects.
        only: subjects of speed, such as end_to_end, or configs of results, such as cartpole_ppo; all if absent.
        seeds: for results: seeds per config; if absent, ten if a run takes under ten minutes, else three.
        minutes: for results: start no run after this many minutes. 0 only makes the tables and pictures again.
        out: folder for the results; benchmarks/results if absent.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").exists():
        raise UserError(
            f"ecrl bench: no benchmarks folder next to {root / 'ecrl'}; run it from a checkout of the source"
        )
    if what == "speed" and (seeds is not None or minutes is not None):
        raise UserError("--seeds and --minutes are for: ecrl bench results; leave them out")
    if what == "results" and quick:
        raise UserError("--quick is for speed; leave it out")
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
