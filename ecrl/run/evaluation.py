"""Evaluate a policy with deterministic actions over an exact number of episodes.

Every environment contributes the same number of episodes. Counting only the episodes that end first would give short
episodes too much weight. Evaluations have their own seed, so they do not change the results of training.

If the episodes of an environment are parts of a game, such as the lives of an Atari game, evaluations count whole games
and their scores.
"""

import math
import warnings
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
from ecrl.config.embodichain_releases import NO_LIMIT
from ecrl.envs import Env, make_env
from ecrl.envs.action_chunks import undiscounted_reward
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import scan
from ecrl.kernels.rollout import restarted_carry
from ecrl.kernels.scan_loop import Scan
from ecrl.loop.build import build, check_envs, device_of, with_eval_events, with_training_wrappers
from ecrl.loop.iteration import explaining_other_networks, is_due
from ecrl.loop.signals import interruptible
from ecrl.loop.state_argument import check_state_argument
from ecrl.policies import policy_params
from ecrl.policies.single_actions import in_single_actions
from ecrl.registry import did_you_mean
from ecrl.run.loggers import ending
from ecrl.run.video_writer import filming, view, with_film
from ecrl.spaces import Box
from ecrl.types import LogData

_CHUNK = 128  # number of steps after which the loop checks again whether all episodes have ended
_MAX_STEPS = 1_000_000  # maximum length of an episode; a longer episode raises an error
_GYMNASIUM = "gymnasium:"
_ALWAYS_LOGGED = ("eval/avg_reward", "eval/std_reward", "eval/avg_length")


def eval_envs(num_episodes: int, at_most: int) -> int:
    """Return the number of evaluation environments, the largest divisor of `num_episodes` that is at most `at_most`.

    >>> eval_envs(100, 16), eval_envs(5, 4)
    (10, 1)
    """
    small = [n for n in range(1, math.isqrt(num_episodes) + 1) if num_episodes % n == 0]
    return max(n for n in (*small, *(num_episodes // n for n in small)) if n <= at_most)


def _eval_step(
    act: Callable,
    step: Callable,
    filmed: int,
    carry_and_env: tuple[TensorDict, TensorDict],
    noise: Any,
    params: TensorDict,
    initial: TensorDict,
) -> tuple[tuple[TensorDict, TensorDict], tuple[Tensor, Any]]:
    """Take one step in every environment.

    Returns: the tuple `((carry, environment state), (rows, view))`. The tensor `rows` has shape `[K, N]`. Its K rows
        are the reward, `done`, the number of env steps to count and each outcome. `view` holds the fields that a camera
        needs for the first `filmed` environments, from the state before the step. If `filmed` is 0, `view` is `()`.
    """
    carry, env_state = carry_and_env
    before = view(env_state, filmed) if filmed else ()
    carry, out = act(params, carry, env_state["obs"], None)
    env_state = step(env_state, out["action"], noise)
    carry = restarted_carry(carry, initial, env_state)
    reward, done = _counted(env_state)
    taken = env_state["executed"] if "executed" in env_state else torch.ones_like(done)
    counts = taken.masked_fill(~env_state["mask"], 0) if "mask" in env_state else taken
    row = (reward, done, counts, *_outcomes(env_state).values())
    return (carry, env_state), (torch.stack([x.to(torch.float32) for x in row]), before)


def _counted(env_state: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the rewards and the done flags that an evaluation counts, each of shape `[N]`.

    If the environment reports the score of whole games, a game counts as one episode whose only reward is the score.
    Otherwise, the reward of a step whose `mask` is False counts as 0, as in training.
    """
    info = env_state.get("info", TensorDict({}, []))
    if "game_score" in info:
        score, over = info["game_score"], ~info["game_score"].isnan()
        return score.where(over, 0.0), over
    reward = undiscounted_reward(env_state)
    reward = reward.masked_fill(~env_state["mask"], 0.0) if "mask" in env_state else reward
    return reward, env_state["terminated"] | env_state["truncated"]


def _eval_steps(
    act: Callable,
    env: Env,
    loop: Scan,
    num_envs: int,
    length: int,
    filmed: int,
    params: TensorDict,
    initial: TensorDict,
    carry_and_env: tuple[TensorDict, TensorDict],
    key: Tensor,
    first: Tensor,
) -> tuple[tuple[TensorDict, TensorDict], tuple[Tensor, Any]]:
    """Take `length` steps in every environment, starting at step `first`.

    Returns: the tuple `((carry, environment state), (rows, views))`, where `rows` and `views` stack the results of
        `_eval_step`. `rows` has shape `[length, K, N]`, and `views` has shape `[length, filmed]`.
    """
    index, times = torch.arange(num_envs, device=key.device), torch.arange(length, device=key.device).unsqueeze(1)
    noise = env.draw(rng.stream(key, rng.ENV, index, first + times))
    return loop(partial(_eval_step, act, env.step, filmed), carry_and_env, noise, params, initial)


def _outcomes(env_state: TensorDict) -> dict[str, Tensor]:
    """Map log names to the environments' success flags and scalar metrics, each of shape `[N]`."""
    info = env_state.get("info", TensorDict({}, []))
    success = {"eval/success_rate": info["success"]} if "success" in info else {}
    # sort the metrics, because their order may differ between steps
    metrics = sorted(info.get("metrics", TensorDict({}, [])).items())
    return success | {f"eval/metrics/{name}": value for name, value in metrics if value.shape == env_state.batch_size}


def _first_episodes(steps: Iterator[list[tuple]], num_envs: int, quota: int) -> list[tuple[float, ...]]:
    """Return a tuple (return, length, *outcomes) for each of the first `quota` episodes of every environment.

    Raises: UserError if an episode does not end.
    """
    running, episodes = [(0.0, 0)] * num_envs, [[] for _ in range(num_envs)]
    for row in steps:
        for i, (reward, done, counts, *outcomes) in enumerate(row):
            running[i] = (running[i][0] + reward, running[i][1] + int(counts))
            if running[i][1] > _MAX_STEPS and len(episodes[i]) < quota:
                problem = f"env {i} finished {len(episodes[i])} of {quota} episodes, but the next did not end"
                raise UserError(f"{problem} in {_MAX_STEPS} steps; give the environment a time limit")
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
    # NaN marks an episode that does not report the outcome
    means = {name: values.nanmean().item() for name, values in zip(names, outcomes, strict=True)}
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
    """Evaluate the policy of a run with deterministic actions.

    Args:
        state: state of a run; only `params`, `norm`, `frozen_params` and the device of `key` are read. If videos are
            recorded, `sample_step` is also read, for the names of the videos.
        cfg: config of the run.
        num_episodes: number of episodes; if None, `trainer.num_eval_episodes` is used.
        env: name of a Gymnasium environment, as `"gymnasium:<id>"`, in which no events happen; if None, the run's
            environment is used, with the events under `trainer.events.eval`.
        videos: folder for the videos of the cameras under `trainer.events.eval`; if None, no videos are recorded.
            Recording does not change the results.

    Returns: a dict with the mean return `eval/avg_reward`, the standard deviation of the returns `eval/std_reward` and
        the mean episode length `eval/avg_length`. If the environment reports success or scalar metrics, the dict also
        has the success rate `eval/success_rate` and each metric as `eval/metrics/<name>`. The success rate and each
        metric are means over the episodes whose last step reports them. The finite guard does not check evaluations. If
        a reward is NaN or infinite, the mean return is therefore also NaN or infinite.
    Raises: ConfigError if an argument is invalid, if both `env` and `videos` are given, if the spaces of `env` differ
        from the run's spaces (see `check_spaces`), or if `state` has networks of another config; UserError if `state`
        is not the state of a run, or if an episode does not end.
    """
    check_state_argument(state, "params", "norm", "key")
    if env is not None and videos is not None:
        raise ConfigError(
            f"videos: {videos}: cameras record only the run's own environment, not {env}; leave out videos or env"
        )
    with (
        explaining_other_networks(state, cfg),
        filming(cfg, None if videos is None else Path(videos)) as open_film,
    ):
        return _evaluate_run(with_eval_events(build(cfg), cfg), state, cfg, num_episodes, env, open_film)


def _evaluate_run(
    run: Run,
    state: TensorDict,
    cfg: Config,
    num_episodes: int | None,
    env: str | None,
    open_film: Callable[[TensorDict, int], Any],
) -> dict[str, float]:
    count = cfg.trainer.num_eval_episodes if num_episodes is None else num_episodes
    if count < 1:
        raise ConfigError(f"num_episodes: {count}, expected at least 1")
    num_envs = eval_envs(count, cfg.trainer.num_eval_envs)
    if env is not None and not env.startswith(_GYMNASIUM):
        raise ConfigError(f'env: {env!r}, expected "gymnasium:<id>" such as "gymnasium:CartPole-v1"')
    names: list[str] = []
    with torch.no_grad(), open_film(state, num_envs) as film:
        run = run if env is None else _with_env(run, cfg, env)
        rows = eval_steps(run, state, cfg, num_envs, names, film.num_envs)
        with closing(rows) as steps:
            return _summary(_first_episodes(with_film(steps, film), num_envs, count // num_envs), names)


def _with_env(run: Run, cfg: Config, name: str) -> Run:
    """Return a copy of the run with another environment. Raise ConfigError if the spaces differ."""
    env = make_env(name)
    check_spaces(single_step_env(cfg), env, name)
    return in_single_steps(run, cfg)._replace(env=with_training_wrappers(env, cfg, None))


def single_step_env(cfg: Config) -> Env:
    """Return the environment of a config, with single actions instead of action chunks."""
    return make_env(cfg.env.model_copy(update={"action_chunk": 1}))


def in_single_steps(run: Run, cfg: Config) -> Run:
    """Return a run whose evaluation environment takes single actions instead of action chunks.

    The policy still chooses a chunk, but returns the actions of the chunk one at a time. If `env.action_chunk` is 1,
    the run is unchanged.
    """
    if cfg.env.action_chunk == 1:
        return run
    env = single_step_env(cfg)
    policy = in_single_actions(run.policy, cfg.env.action_chunk, env.action_space)
    return run._replace(env=with_training_wrappers(env, cfg, "eval"), policy=policy)


def check_spaces(trained: Env, env: Env, name: str) -> None:
    """Raise ConfigError if the spaces of `env` differ from the spaces of `trained`.

    The bounds of a Box may differ, unless the Box is part of a Dict. The error message refers to `env` by `name`.
    """
    for field in ("observation_space", "action_space"):
        own, other = getattr(trained, field), getattr(env, field)
        are_boxes = isinstance(own, Box) and isinstance(other, Box)
        same = (own.shape, own.dtype) == (other.shape, other.dtype) if are_boxes else own == other
        if not same:
            raise ConfigError(f"env: {name} has {field} {other}, but the policy was trained on {own}; use equal spaces")


def eval_steps(
    run: Run, state: TensorDict, cfg: Config, num_envs: int, names: list[str], filmed: int = 0
) -> Generator[tuple[list[tuple], TensorDict | None], None, None]:
    """Step the environments until the caller closes the generator. An environment resets when its episode ends.

    For each step, the generator yields a list, and the view of the first `filmed` environments before the step. The
    list has a tuple (reward, done, counts, *outcomes) for each environment. `counts` is the number of env steps that
    the action took, or 0 if the `mask` of the step is False.

    Args:
        run: run whose environment is the evaluation environment.
        state: state of a run; only `params`, `norm`, `frozen_params` and the device of `key` are read.
        cfg: config of the run.
        num_envs: number of environments.
        names: list to which the function appends the names of the outcomes.
        filmed: number of environments in the view (see `ecrl.run.video_writer.view`); if 0, the view is None.
    """
    env, act = run.env, run.policy.act
    key = rng.fold_in(rng.key(_eval_seed(cfg), state["key"].device), rng.EVAL)
    index = torch.arange(num_envs, device=key.device)
    env_state = env.reset(rng.stream(key, rng.START, index, 0))
    names += _outcomes(env_state)
    sizes = (num_envs, _CHUNK if env.is_pure else 1, filmed)  # a check is cheap if the environment runs on the host
    if env.is_pure:
        steps = run.jit(_eval_steps, act, env, run.scan, *sizes)
    else:
        steps = partial(_eval_steps, run.jit(act), env, scan, *sizes)
    params, first = policy_params(state), torch.zeros_like(key)
    initial = run.policy.init_carry(params, num_envs)
    carry = initial.clone()
    try:
        while True:
            (carry, env_state), (rows, views) = steps(params, initial, (carry, env_state), key, first)
            first = first + len(rows)
            views = cast(TensorDict, views).cpu() if filmed else None
            for i, row in enumerate(rows.tolist()):
                yield list(zip(*row, strict=True)), None if views is None else cast(TensorDict, views[i])
    finally:
        env.close(env_state)


def check_evaluation(run: Run, cfg: Config) -> None:
    """Check the evaluations of a run, and warn if the config switches off the time limit of episodes.

    `train` calls this function before the run starts.

    Args:
        run: run whose environment is the evaluation environment.
        cfg: config of the run.

    Raises: ConfigError if the evaluation environments do not fit in memory, or if `trainer.best_eval_metric` is not a
        log of the evaluations.
    """
    name = cfg.trainer.best_eval_metric
    if getattr(cfg.env.cfg, "max_episode_steps", None) == NO_LIMIT:
        fault = (
            f"episodes have no time limit, so an evaluation fails if an episode does not end in {_MAX_STEPS:,} steps"
        )
        warnings.warn(f"env.cfg.max_episode_steps: {fault}; set a limit", stacklevel=2)
    check_envs(cfg, run.env, min(cfg.trainer.num_eval_envs, cfg.trainer.num_eval_episodes), "trainer.num_eval_envs")
    known = [*_ALWAYS_LOGGED, "eval/success_rate"]
    if run.env.is_pure:
        key = rng.key(_eval_seed(cfg), device_of(cfg))
        known = [*_ALWAYS_LOGGED, *_outcomes(run.env.reset(key.unsqueeze(0)))]
    if name not in known:
        raise ConfigError(f"trainer.best_eval_metric: evaluations do not log {name!r}; {did_you_mean(name, known)}")


def with_evaluation(
    records: Iterator[LogData],
    cfg: Config,
    videos: str | Path | None = None,
    first: LogData | None = None,
    run: Run | None = None,
) -> Iterator[LogData]:
    """Evaluate the policy every `trainer.eval_freq` env steps, and yield an `evaluate` record after the train record.

    If a signal stops the run while an evaluation is due, the run does not evaluate, and the resumed run performs the
    evaluation.

    Args:
        records: records of the run; the function yields each record again.
        cfg: config of the run.
        videos: folder for the videos of the cameras under `trainer.events.eval`; if None, no videos are recorded.
            Videos are rendered while training continues. An evaluation waits until the videos of the previous
            evaluation are complete.
        first: train record that an interrupted run did not evaluate (see `ecrl.run.resume.pending_evaluation`). The
            function evaluates this record first.
        run: run whose environment is the evaluation environment; if None, the function builds the run from `cfg`.
    """
    run = with_eval_events(build(cfg), cfg) if run is None else run
    check_evaluation(run, cfg)
    freq = cfg.trainer.eval_freq
    with filming(cfg, None if videos is None else Path(videos)) as open_film, ending(records):

        def evaluation_of(record: LogData) -> LogData:
            with interruptible():
                numbers = _evaluate_run(run, record["state"], cfg, None, None, open_film)
            logs = {name: torch.tensor(value) for name, value in numbers.items()}
            return {**record, "log_type": "evaluate", "logs": logs}

        if first is not None:
            yield evaluation_of(first)
        for record in records:
            yield record
            due = is_due(record, cfg, freq)
            if record["log_type"] == "train" and due and not record.get("stopping"):
                yield evaluation_of(record)
