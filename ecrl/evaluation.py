"""Evaluation with deterministic actions: an exact number of episodes, the same from every environment.

Counting whichever episodes end first would favour short ones. Randomness comes from a seed of its own: evaluating,
often or never, leaves training untouched.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms import Parts
from ecrl.config import Config
from ecrl.errors import ConfigError, UserError
from ecrl.loop import make_parts, steps_per_iteration
from ecrl.spaces import Box, from_gymnasium
from ecrl.types import LogData

_CHUNK = 128  # steps between looks at whether all episodes are done: one host read each
_MAX_STEPS = 1_000_000
_GYMNASIUM = "gymnasium:"


def eval_envs(num_episodes: int, at_most: int) -> int:
    """How many environments share `num_episodes` equally: the largest divisor not above `at_most`.

    >>> eval_envs(100, 16), eval_envs(5, 4)
    (10, 1)
    """
    return max(n for n in range(1, min(num_episodes, at_most) + 1) if num_episodes % n == 0)


def _eval_step(
    act: Callable, step: Callable, params: TensorDict, env_state: TensorDict, noise: Any
) -> tuple[TensorDict, Tensor]:
    """One deterministic step; the second result has a row `[N]` each for reward, whether it ended, and success."""
    _, out = act(params, TensorDict({}, []), env_state["obs"], None)
    env_state = step(env_state, out["action"], noise)
    done = env_state["terminated"] | env_state["truncated"]
    success = env_state.get(("info", "success"), None)
    success = torch.full_like(done, torch.nan, dtype=torch.float32) if success is None else success
    return env_state, torch.stack([x.to(torch.float32) for x in (env_state["reward"], done, success)])


def _count(steps: Iterator[list[tuple]], num_envs: int, quota: int) -> list[tuple[float, int, float]]:
    """(return, length, success) of the first `quota` episodes of every env; success is NaN where not reported."""
    running, episodes = [(0.0, 0)] * num_envs, [[] for _ in range(num_envs)]
    for row in steps:
        for i, (reward, done, success) in enumerate(row):
            running[i] = (running[i][0] + reward, running[i][1] + 1)
            if running[i][1] > _MAX_STEPS and len(episodes[i]) < quota:
                told = f"env {i} ended {len(episodes[i])} of {quota} episodes, the last one not in {_MAX_STEPS} steps"
                raise UserError(f"{told}: give it a time limit")
            if done:
                episodes[i].append((*running[i], success))
                running[i] = (0.0, 0)
        if all(len(done) >= quota for done in episodes):
            break
    return [episode for done in episodes for episode in done[:quota]]


def _summary(episodes: list[tuple[float, int, float]]) -> dict[str, float]:
    returns, lengths, success = (torch.tensor(x, dtype=torch.float64) for x in zip(*episodes, strict=True))
    logs = {
        "eval/avg_reward": returns.mean().item(),
        "eval/std_reward": returns.std(correction=0).item(),
        "eval/avg_length": lengths.mean().item(),
    }
    return logs if success.isnan().any() else logs | {"eval/success_rate": success.mean().item()}


def _eval_seed(cfg: Config) -> int:
    return cfg.trainer.seed + 10_000 if cfg.trainer.eval_seed is None else cfg.trainer.eval_seed


def evaluate(
    state: TensorDict, cfg: Config, num_episodes: int | None = None, env: str | None = None
) -> dict[str, float]:
    """Mean return, its spread, mean length and, where the environment reports it, success rate over episodes.

    Args:
        state: of a run; only `params` is read.
        cfg: of the run.
        num_episodes: `trainer.num_eval_episodes` if absent.
        env: None for the run's own environment, `"gymnasium:<id>"` for one of Gymnasium's.

    Returns: `eval/avg_reward`, `eval/std_reward`, `eval/avg_length` and maybe `eval/success_rate`.
    Raises: ConfigError for an env that is not known or whose spaces differ; UserError if an episode never ends.
    """
    count = cfg.trainer.num_eval_episodes if num_episodes is None else num_episodes
    if count < 1:
        raise ConfigError(f"num_episodes: {count}, expected at least 1")
    num_envs = eval_envs(count, cfg.trainer.num_eval_envs)
    if env is not None and not env.startswith(_GYMNASIUM):
        raise ConfigError(f'env: {env!r}, expected "gymnasium:<id>" such as "gymnasium:CartPole-v1"')
    with torch.no_grad():
        steps = _own_steps(state, cfg, num_envs) if env is None else _gymnasium_steps(state, cfg, num_envs, env)
        with closing(steps):
            return _summary(_count(steps, num_envs, count // num_envs))


def _own_steps(state: TensorDict, cfg: Config, num_envs: int) -> Generator[list[tuple], None, None]:
    """Step after step of the run's own environment, without end: (reward, done, success) per env."""
    parts = make_parts(cfg)
    key = rng.fold_in(rng.key(_eval_seed(cfg), state["key"].device), rng.EVAL)
    index = torch.arange(num_envs, device=key.device)
    env_state = parts.env.reset(rng.stream(key, rng.START, index, 0))
    step = parts.jit(_eval_step, parts.policy.act, parts.env.step)
    params = cast(TensorDict, state["params"]).copy()  # unlocked: a lock is a guard of compiled code
    for first in itertools.count(0, _CHUNK):
        times, rows = torch.arange(first, first + _CHUNK, device=key.device).unsqueeze(1), []
        for noise in parts.env.draw(rng.stream(key, rng.ENV, index, times)).unbind(0):
            env_state, row = step(params, env_state, noise)
            rows.append(row)
        for row in torch.stack(rows).tolist():
            yield list(zip(*row, strict=True))


def _made(env_id: str) -> Any:
    """One of Gymnasium's environments; whatever goes wrong in making it is the fault of what was asked for."""
    import gymnasium

    try:
        return gymnasium.make(env_id.removeprefix(_GYMNASIUM))
    except Exception as error:  # an id may name a module, a missing package or an env that raises anything
        raise ConfigError(f"env: {env_id}: {type(error).__name__}: {' '.join(str(error).split())}") from None


def _check_spaces(parts: Parts, env: Any, env_id: str) -> None:
    for name in ("observation_space", "action_space"):
        mine, gym_space = getattr(parts.env, name), getattr(env, name)
        try:
            other = from_gymnasium(gym_space)
        except TypeError as error:
            raise ConfigError(f"env: {env_id}: {error}") from None
        same = mine.shape == other.shape if isinstance(mine, Box) and isinstance(other, Box) else mine == other
        if not same:
            raise ConfigError(f"env: {env_id} has {name} {other}, the policy was trained on {mine}")
    if not isinstance(parts.env.observation_space, Box):
        raise ConfigError(f"env: {env_id} has observations {parts.env.observation_space}; only a Box is supported here")


def _to_action(action: Tensor, space: Any) -> Any:
    """One env's action as Gymnasium wants it; Box actions are clipped to the space, as the envs here clip their own."""
    array = action.numpy()
    return array.clip(space.low, space.high) if hasattr(space, "low") else int(array) if array.ndim == 0 else array


def _gymnasium_steps(state: TensorDict, cfg: Config, num_envs: int, env_id: str) -> Generator[list[tuple], None, None]:
    """Step after step of Gymnasium's environments side by side, each seeded once, reset in the step that ends it."""
    parts, params = make_parts(cfg), cast(TensorDict, state["params"]).cpu()
    envs = [_made(env_id) for _ in range(num_envs)]
    try:
        _check_spaces(parts, envs[0], env_id)
        obs = [env.reset(seed=_eval_seed(cfg) + i)[0] for i, env in enumerate(envs)]
        while True:
            batch = torch.stack([torch.as_tensor(o, dtype=torch.float32) for o in obs])
            actions, row = parts.policy.act(params, TensorDict({}, []), batch, None)[1]["action"], []
            for i, (env, action) in enumerate(zip(envs, actions, strict=True)):
                obs[i], reward, terminated, truncated, info = env.step(_to_action(action, env.action_space))
                row.append((float(reward), terminated or truncated, float(info.get("success", math.nan))))
                if terminated or truncated:
                    obs[i] = env.reset()[0]
            yield row
    finally:
        for env in envs:
            env.close()


def with_evaluation(records: Iterator[LogData], cfg: Config) -> Iterator[LogData]:
    """Evaluate when `trainer.eval_freq` env steps are crossed; the `evaluate` record follows the one it evaluates."""
    freq = cfg.trainer.eval_freq
    for record in records:
        yield record
        step = record["sample_step"]
        if record["log_type"] == "train" and step // freq > (step - steps_per_iteration(cfg)) // freq:
            logs = {name: torch.tensor(value) for name, value in evaluate(record["state"], cfg).items()}
            yield LogData(log_type="evaluate", sample_step=step, logs=logs, state=record["state"])
