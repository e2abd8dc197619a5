"""The command line: `ecrl train CONFIG`, `ecrl eval RUN`. Torch is imported only by the command that needs it."""

import signal
import sys
from typing import Annotated

import tyro

from ecrl.errors import UserError


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
    if path is not None and config is not None:
        raise UserError("give the config file once: as the first argument or with --config")
    if path is None and config is None:
        raise UserError("ecrl train needs one config file, such as: ecrl train configs/cartpole_ppo.json")
    if distributed and no_distributed:
        raise UserError("give --distributed or --no-distributed, not both")
    from ecrl.training import train_from_config

    stopped = _stoppable()
    train_from_config(path or config or "", distributed or (False if no_distributed else None), run_dir)
    if stopped:
        sys.exit(128 + stopped[0])


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
    logs = run_episodes(state, cfg, num_episodes, env)
    print(f"{path} on {env or cfg.env.name}, {num_episodes} episodes")
    for name, value in logs.items():
        print(f"{name:<18} {value:.2f}")


def _stoppable() -> list[int]:
    """Let SIGINT and SIGTERM end a run as Ctrl-C ends it in Python, saved; gives the list of signals that came."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        stopped.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


def main() -> None:
    """Run the command; a fault the user can mend is one line each on stderr and exit status 2."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"train": train, "eval": evaluate},
            prog="ecrl",
            description="Train and evaluate policies.",
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
