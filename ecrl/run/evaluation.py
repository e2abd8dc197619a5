"""Evaluation with deterministic actions: an exact number of episodes, the same from every environment.

Counting whichever episodes end first would favour short ones. Randomness comes from a seed of its own: evaluating,
often or never, leaves training untouched.
"""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms import Run
from ecrl.config import Config
from ecrl.envs import Env, make_env
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import scan
from ecrl.kernels.scan_loop import Scan
from ecrl.loop.build import build, check_envs, device_of, with_training_wrappers
from ecrl.loop.iteration import crossed, steps_per_iteration
from ecrl.loop.signals import interruptible
from ecrl.policies import acting_params
from ecrl.registry import did_you_mean
from ecrl.run.loggers import ending
from ecrl.run.video_writer import filming, view, with_film
from ecrl.spaces import Box
from ecrl.types import LogData

_CHUNK = 128  # steps between looks at whether all episodes are done: one host read each
_MAX_STEPS = 1_000_000
_GYMNASIUM = "gymnasium:"
_ALWAYS = ("eval/avg_reward", "eval/std_reward", "eval/avg_length")


def eval_envs(num_episodes: int, at_most: int) -> int:
    """How many environments share `num_episodes` equally: the largest divisor not above `at_most`.

    >>> eval_envs(100, 16), eval_envs(5, 4)
    (10, 1)
    """
    small = [n for n in range(1, math.isqrt(num_episodes) + 1) if num_episodes % n == 0]
    return max(n for n in (*small, *(num_episodes // n for n in small)) if n <= at_most)


def _eval_step(
    act: Callable, step: Callable, filmed: int, env_state: TensorDict, noise: Any, params: TensorDict
) -> tuple[TensorDict, tuple[Tensor, Any]]:
    """One deterministic step; rows `[N]` of reward, end, what counts and each outcome; what is filmed before it."""
    seen = view(env_state, filmed) if filmed else ()
    _, out = act(params, TensorDict({}, []), env_state["obs"], None)
    env_state = step(env_state, out["action"], noise)
    done = env_state["terminated"] | env_state["truncated"]
    counts = env_state["mask"] if "mask" in env_state else torch.ones_like(done)
    row = (env_state["reward"], done, counts, *_outcomes(env_state).values())
    return env_state, (torch.stack([x.to(torch.float32) for x in row]), seen)


def _eval_steps(
    act: Callable,
    env: Env,
    loop: Scan,
    num_envs: int,
    length: int,
    filmed: int,
    params: TensorDict,
    env_state: TensorDict,
    key: Tensor,
    first: Tensor,
) -> tuple[TensorDict, tuple[Tensor, Any]]:
    """`length` steps from step `first`; their rows `[length, outcomes, N]`, and what is filmed `[length, filmed]`."""
    index, times = torch.arange(num_envs, device=key.device), torch.arange(length, device=key.device).unsqueeze(1)
    noise = env.draw(rng.stream(key, rng.ENV, index, first + times))
    return loop(partial(_eval_step, act, env.step, filmed), env_state, noise, params)


def _outcomes(env_state: TensorDict) -> dict[str, Tensor]:
    """What the environment says of how an episode went, `[N]` each, under the names of their logs; vectors are left."""
    info = env_state.get("info", TensorDict({}, []))
    found = {"eval/success_rate": info["success"]} if "success" in info else {}
    metrics = sorted(info.get("metrics", TensorDict({}, [])).items())  # which each step may have in its own order
    return found | {f"eval/metrics/{name}": value for name, value in metrics if value.shape == env_state.batch_size}


def _count(steps: Iterator[list[tuple]], num_envs: int, quota: int) -> list[tuple[float, ...]]:
    """(return, length, *outcomes) of the first `quota` episodes of every env."""
    running, episodes = [(0.0, 0)] * num_envs, [[] for _ in range(num_envs)]
    for row in steps:
        for i, (reward, done, counts, *outcomes) in enumerate(row):
            running[i] = (running[i][0] + reward, running[i][1] + int(counts))
            if running[i][1] > _MAX_STEPS and len(episodes[i]) < quota:
                told = f"env {i} ended {len(episodes[i])} of {quota} episodes, the last one not in {_MAX_STEPS} steps"
                raise UserError(f"{told}: give it a time limit")
            if done:
                episodes[i].append((*running[i], *outcomes))
                running[i] = (0.0, 0)
        if all(len(done) >= quota for done in episodes):
            break
    return [episode for done in episodes for episode in done[:quota]]


def _summary(episodes: list[tuple[float, ...]], names: list[str]) -> dict[str, float]:
    returns, lengths, *outcomes = (torch.tensor(x, dtype=torch.float64) for x in zip(*episodes, strict=True))
    logs = {
        "eval/avg_reward": returns.mean().item(),
        "eval/std_reward": returns.std(correction=0).item(),
        "eval/avg_length": lengths.mean().item(),
    }
    means = {name: values.nanmean().item() for name, values in zip(names, outcomes, strict=True)}  # of those told
    return logs | {name: mean for name, mean in means.items() if not math.isnan(mean)}


def _eval_seed(cfg: Config) -> int:
    return cfg.trainer.seed + 10_000 if cfg.trainer.eval_seed is None else cfg.trainer.eval_seed


def evaluate(
    state: TensorDict,
    cfg: Config,
    num_episodes: int | None = None,
    env: str | None = None,
    videos: str | Path | None = None,
) -> dict[str, float]:
    """Mean return, its spread, mean length and what the environment reports of success and metrics, over episodes.

    Args:
        state: of a run; only `params` and `norm` are read.
        cfg: of the run.
        num_episodes: `trainer.num_eval_episodes` if absent.
        env: None for the run's own environment, `"gymnasium:<id>"` for one of Gymnasium's.
        videos: a folder for those of the cameras under `trainer.events.eval`; None makes none. They change no number.

    Returns: `eval/avg_reward`, `eval/std_reward`, `eval/avg_length`; over the episodes at whose last step the
        environment reports them, `eval/success_rate` and `eval/metrics/<name>`.
        A reward that is not finite makes the mean so: the finite guard is of training, an evaluation changes nothing.
    Raises: ConfigError for an env that is not known or whose spaces differ; UserError if an episode never ends.
    """
    if env is not None and videos is not None:
        raise ConfigError(f"videos: {videos}: cameras see the run's own environment, not {env}; leave either out")
    with filming(cfg, None if videos is None else Path(videos)) as opened:
        return _evaluated(build(cfg, "eval"), state, cfg, num_episodes, env, opened)


def _evaluated(
    run: Run,
    state: TensorDict,
    cfg: Config,
    num_episodes: int | None,
    env: str | None,
    opened: Callable[[TensorDict, int], Any],
) -> dict[str, float]:
    count = cfg.trainer.num_eval_episodes if num_episodes is None else num_episodes
    if count < 1:
        raise ConfigError(f"num_episodes: {count}, expected at least 1")
    num_envs = eval_envs(count, cfg.trainer.num_eval_envs)
    if env is not None and not env.startswith(_GYMNASIUM):
        raise ConfigError(f'env: {env!r}, expected "gymnasium:<id>" such as "gymnasium:CartPole-v1"')
    names: list[str] = []
    with torch.no_grad(), opened(state, num_envs) as film:
        run = run if env is None else _with_env(run, cfg, env)
        rows = eval_steps(run, state, cfg, num_envs, names, film.num_envs)
        with closing(rows) as steps:
            return _summary(_count(with_film(steps, film), num_envs, count // num_envs), names)


def _with_env(run: Run, cfg: Config, name: str) -> Run:
    """The run with another environment, which must have the spaces that the policy was trained on."""
    env = make_env(name)
    check_spaces(run.env, env, name)
    return run._replace(env=with_training_wrappers(env, cfg, None))


def check_spaces(trained: Env, env: Env, name: str) -> None:
    """Refuse an environment, `name` to people, whose spaces are not those that a policy was trained on."""
    for field in ("observation_space", "action_space"):
        mine, other = getattr(trained, field), getattr(env, field)
        same = mine.shape == other.shape if isinstance(mine, Box) and isinstance(other, Box) else mine == other
        if not same:
            raise ConfigError(f"env: {name} has {field} {other}, the policy was trained on {mine}")


def eval_steps(
    run: Run, state: TensorDict, cfg: Config, num_envs: int, names: list[str], filmed: int = 0
) -> Generator[tuple[list[tuple], TensorDict | None], None, None]:
    """Step after step, without end: (reward, done, counts, *outcomes) per environment, and what was seen before it.

    Args:
        run: run with the environment of evaluations.
        state: of a run; only `params`, `norm` and the device of `key` are read.
        cfg: of the run.
        num_envs: environments.
        names: of the outcomes, which are filled in.
        filmed: how many environments, the first ones, `ecrl.run.video_writer.view` is of; None is seen if 0.
    """
    env, act = run.env, run.policy.act
    key = rng.fold_in(rng.key(_eval_seed(cfg), state["key"].device), rng.EVAL)
    index = torch.arange(num_envs, device=key.device)
    env_state = env.reset(rng.stream(key, rng.START, index, 0))
    names += _outcomes(env_state)
    sizes = (num_envs, _CHUNK if env.is_pure else 1, filmed)  # a step of the host costs more than looking
    if env.is_pure:
        steps = run.jit(_eval_steps, act, env, run.scan, *sizes)
    else:
        steps = partial(_eval_steps, run.jit(act), env, scan, *sizes)
    params, first = acting_params(state["params"], state["norm"]), torch.zeros_like(key)
    try:
        while True:
            env_state, (rows, seen) = steps(params, env_state, key, first)
            first = first + len(rows)
            seen = cast(TensorDict, seen).cpu() if filmed else None
            for i, row in enumerate(rows.tolist()):
                yield list(zip(*row, strict=True)), None if seen is None else cast(TensorDict, seen[i])
    finally:
        env.close(env_state)


def check_evaluation(cfg: Config, run: Run | None = None) -> None:
    """Refuse, before a run begins, events of evaluation that do not fit and a best metric that is never logged."""
    run, name = build(cfg, "eval") if run is None else run, cfg.trainer.best_eval_metric
    check_envs(cfg, run.env, min(cfg.trainer.num_eval_envs, cfg.trainer.num_eval_episodes), "trainer.num_eval_envs")
    known = [*_ALWAYS, "eval/success_rate"]
    if run.env.is_pure:
        key = rng.key(_eval_seed(cfg), device_of(cfg))
        known = [*_ALWAYS, *_outcomes(run.env.reset(key.unsqueeze(0)))]
    if name not in known:
        raise ConfigError(f"trainer.best_eval_metric: {name!r} is not evaluated; {did_you_mean(name, known)}")


def with_evaluation(
    records: Iterator[LogData],
    cfg: Config,
    videos: str | Path | None = None,
    first: LogData | None = None,
    run: Run | None = None,
) -> Iterator[LogData]:
    """Evaluate when `trainer.eval_freq` env steps are crossed; the `evaluate` record follows the one it evaluates.

    Ranks that were asked to stop do not wait for it: it is made when the run goes on.

    Args:
        records: to pass on.
        cfg: of the run.
        videos: a folder for those of the cameras under `trainer.events.eval`; None makes none. They are drawn while
            training goes on; an evaluation waits for the video of the one before.
        first: a record to evaluate before them, that of a run which was stopped (`ecrl.run.owed`).
        run: the run with the events of evaluation, if it is built.
    """
    run = build(cfg, "eval") if run is None else run
    check_evaluation(cfg, run)
    freq = cfg.trainer.eval_freq
    with filming(cfg, None if videos is None else Path(videos)) as opened, ending(records):

        def judged(record: LogData) -> LogData:
            with interruptible():
                numbers = _evaluated(run, record["state"], cfg, None, None, opened)
            logs = {name: torch.tensor(value) for name, value in numbers.items()}
            return {**record, "log_type": "evaluate", "logs": logs}

        if first is not None:
            yield judged(first)
        for record in records:
            yield record
            due = crossed(record["sample_step"], steps_per_iteration(cfg), freq)
            if record["log_type"] == "train" and due and not record.get("stopping"):
                yield judged(record)
