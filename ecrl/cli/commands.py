"""Commands that neither train nor load: `ecrl check`, `check-env`, `schema`, `plot`, `bench`; heavy imports inside."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ecrl.errors import UserError

Overrides = Annotated[tuple[str, ...], tyro.conf.Suppress]


def check(path: Annotated[str, tyro.conf.Positional], /, *, overrides: Overrides = ()) -> None:
    """Check a config file without running it: every fault at once, one line each; else what it would run.

    Args:
        path: name of a shipped config, such as cartpole_ppo, or a config file.
    """
    from ecrl.config import load_config
    from ecrl.config.files import parse_overrides
    from ecrl.distributed import world_size
    from ecrl.loop.iteration import check_config
    from ecrl.run.evaluation import check_evaluation
    from ecrl.run.recording import check_cameras
    from ecrl.run.trackers import check_wandb

    cfg = load_config(path, parse_overrides(overrides))
    try:
        lines = check_config(cfg, world_size())
        if cfg.trainer.enable_eval:
            check_evaluation(cfg)
        check_cameras(cfg)
        check_wandb(cfg)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    print("\n".join(lines))
    print(f"{path}: ok")


def check_env(
    env: Annotated[str, tyro.conf.Positional], /, num_steps: int = 256, seed: int = 0, *, overrides: Overrides = ()
) -> None:
    """Play an environment at random and say, one line each, what a run could not rely on; its keys can be set.

    Args:
        env: name, such as cartpole or gymnasium:CartPole-v1, or a config (name or file) that has the environment.
        num_steps: of the play.
        seed: of starts, noise and actions.
    """
    from ecrl.config import EnvChoice, env_choice, load_config
    from ecrl.config.files import parse_overrides
    from ecrl.config.presets import preset_names
    from ecrl.env_check.check import check_env as played

    keys, in_config = parse_overrides(overrides), env in preset_names() or env.endswith((".json", ".yaml", ".yml"))
    choice: EnvChoice = load_config(env, keys).env if in_config else env_choice(env, keys)
    found, notes = played(choice, num_steps=num_steps, seed=seed)
    for line in (*found, *notes):
        print(f"{env}: {line}")
    if found:
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
    """Plot learning curves over env steps and minutes, as PNG and SVG; three or more seeds of a config share a band.

    A band is the interquartile mean with its 95 % bootstrap interval. What another library learnt stands in the same
    picture from a .csv or .json with rows of steps, seconds and return or success.

    Args:
        runs: run folders, and files of peers.
        out: picture; a name without .png or .svg is given both.
        metric: as in metrics.jsonl; eval/success_rate, eval/avg_reward or charts/episode_reward_avg_100 if absent.
        threshold: draw a line there, and tell from where on each curve stays above it.
    """
    if not runs:
        raise UserError("ecrl plot needs run folders, such as: ecrl plot outputs/cartpole_ppo_*")
    from ecrl.report.plots import plot as drawn
    from ecrl.report.plots import told

    files, groups = drawn([Path(run) for run in runs], Path(out), metric, threshold)
    print("\n".join([*told(groups, threshold), *map(str, files)]))


def bench(
    what: Annotated[Literal["speed", "results"], tyro.conf.Positional] = "speed",
    /,
    quick: bool = False,
    only: tuple[str, ...] = (),
    seeds: int | None = None,
    minutes: float | None = None,
    out: str | None = None,
) -> None:
    """Measure ecrl side by side with other libraries; from a checkout of the source, with the extra `bench`.

    Args:
        what: speed; or results, how well the shipped configs learn, each seed a file that is measured once.
        quick: of speed: fewer and shorter rounds, and of the subjects the first three only.
        only: subjects of speed, such as end_to_end, or configs of results, such as cartpole_ppo; all if none is given.
        seeds: of results: so many of each config; ten where one takes under ten minutes, else three, if absent.
        minutes: of results: begin no run after so many; 0 only makes the tables and pictures again.
        out: folder for the results; benchmarks/results if absent.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__main__.py").exists():
        raise UserError(f"ecrl bench: no benchmarks beside {root / 'ecrl'}; run it from a checkout of the source")
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
