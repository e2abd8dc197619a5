"""The command line: `ecrl train CONFIG`, `ecrl eval RUN`. Torch is imported only by the command that needs it."""

import sys
from typing import Annotated

import tyro


def train(
    path: Annotated[str | None, tyro.conf.Positional] = None,
    /,
    config: str | None = None,
    distributed: bool = False,
    no_distributed: bool = False,
    run_dir: str | None = None,
) -> None:
    """Train what a JSON file describes.

    Args:
        path: config file.
        config: config file, the same as the positional one.
        distributed: join the processes that torchrun started; the config decides if neither is given.
        no_distributed: do not join them.
        run_dir: run folder; outputs/<exp_name>_<time> if absent.
    """
    from ecrl.strict import ConfigError

    if (path is None) == (config is None):
        raise ConfigError("ecrl train needs one config file, such as: ecrl train configs/cartpole_ppo.json")
    if distributed and no_distributed:
        raise ConfigError("give --distributed or --no-distributed, not both")
    from ecrl.training import train_from_config

    train_from_config(path or config or "", distributed or (False if no_distributed else None), run_dir)


def evaluate(
    run: Annotated[str, tyro.conf.Positional],
    /,
    env: str | None = None,
    num_episodes: int = 100,
    device: str | None = None,
) -> None:
    """Evaluate the newest checkpoint of a run with deterministic actions.

    Args:
        run: run folder or checkpoint folder.
        env: "gymnasium:<id>" for one of Gymnasium's environments; the run's own if absent.
        num_episodes: episodes, shared equally by the environments.
        device: replaces the config's device.
    """
    from ecrl.checkpoint import latest, load
    from ecrl.evaluation import evaluate as run_episodes

    path = latest(run)
    state, cfg = load(path, device)
    where = env or cfg.env.name
    print(f"{path} on {where}, {num_episodes} episodes")
    for name, value in run_episodes(state, cfg, num_episodes, env).items():
        print(f"{name:<18} {value:.2f}")


def main() -> None:
    """Run the command; a fault the user can mend is one line each on stderr and exit status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"train": train, "eval": evaluate},
            prog="ecrl",
            description="Train and evaluate policies.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except (ValueError, FileExistsError) as error:
        mendable = type(error).__name__ in ("ConfigError", "CheckpointError", "FileExistsError")
        if not mendable:
            raise
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
