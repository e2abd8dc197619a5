"""Evaluation with deterministic actions: an exact number of episodes, the same from every environment.

Counting whichever episodes end first would favour short ones. Randomness comes from a seed of its own: evaluating,
often or never, leaves training untouched.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.config import Config
from ecrl.loop import make_parts, steps_per_iteration
from ecrl.spaces import Box, from_gymnasium
from ecrl.strict import ConfigError
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
    act: Callable, step: Callable, params: TensorDict, env_state: TensorDict, noise: Any, tally: TensorDict
) -> tuple[TensorDict, TensorDict]:
    """One deterministic step; an episode that ends fills the env's next free column."""
    _, out = act(params, TensorDict({}, []), env_state["obs"], None)
    env_state = step(env_state, out["action"], noise)
    done = env_state["terminated"] | env_state["truncated"]
    ret, length = tally["running_return"] + env_state["reward"], tally["running_length"] + 1
    column = torch.arange(tally["return"].shape[1], device=ret.device)
    here = done.unsqueeze(1) & (column == tally["episodes"].unsqueeze(1))
    success = env_state.get(("info", "success"), None)
    success = torch.zeros_like(done) if success is None else success
    return env_state, TensorDict(
        {
            "running_return": ret.masked_fill(done, 0.0),
            "running_length": length.masked_fill(done, 0),
            "episodes": tally["episodes"] + done.to(torch.int64),
            "return": torch.where(here, ret.unsqueeze(1), tally["return"]),
            "length": torch.where(here, length.unsqueeze(1), tally["length"]),
            "success": torch.where(here, success.unsqueeze(1), tally["success"]),
        },
        tally.batch_size,
    )


def _tally(num_envs: int, quota: int, device: torch.device) -> TensorDict:
    zero = torch.zeros(num_envs, dtype=torch.int64, device=device)
    filled = torch.zeros(num_envs, quota, device=device)
    fields = {
        "running_return": filled[:, 0].clone(),
        "running_length": zero,
        "episodes": zero.clone(),
        "return": filled,
        "length": torch.zeros_like(filled, dtype=torch.int64),
        "success": torch.zeros_like(filled, dtype=torch.bool),
    }
    return TensorDict(fields, [num_envs])


def _summary(returns: Tensor, lengths: Tensor, success: Tensor | None) -> dict[str, float]:
    logs = {
        "eval/avg_reward": returns.double().mean().item(),
        "eval/std_reward": returns.double().std(correction=0).item(),
        "eval/avg_length": lengths.double().mean().item(),
    }
    return logs if success is None else logs | {"eval/success_rate": success.double().mean().item()}


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
    Raises: ConfigError for an env that is not known or whose spaces differ; RuntimeError if an episode never ends.
    """
    count = cfg.trainer.num_eval_episodes if num_episodes is None else num_episodes
    if count < 1:
        raise ConfigError(f"num_episodes: {count}, expected at least 1")
    with torch.no_grad():
        if env is None:
            return _evaluate_own(state, cfg, count)
        if env.startswith(_GYMNASIUM):
            return _evaluate_gymnasium(state, cfg, count, env.removeprefix(_GYMNASIUM))
    raise ConfigError(f'env: {env!r}, expected "gymnasium:<id>" such as "gymnasium:CartPole-v1"')


def _evaluate_own(state: TensorDict, cfg: Config, count: int) -> dict[str, float]:
    parts = make_parts(cfg)
    num_envs = eval_envs(count, cfg.trainer.num_eval_envs)
    key = rng.fold_in(rng.key(_eval_seed(cfg), state["key"].device), rng.EVAL)
    index, quota = torch.arange(num_envs, device=key.device), count // num_envs
    env_state, tally = parts.env.reset(rng.stream(key, rng.START, index, 0)), _tally(num_envs, quota, key.device)
    step = parts.jit(_eval_step, parts.policy.act, parts.env.step)
    params = cast(TensorDict, state["params"]).copy()  # unlocked: a lock is a guard of compiled code
    for first in range(0, _MAX_STEPS * quota, _CHUNK):
        steps = torch.arange(first, first + _CHUNK, device=key.device).unsqueeze(1)
        for noise in parts.env.draw(rng.stream(key, rng.ENV, index, steps)).unbind(0):
            env_state, tally = step(params, env_state, noise, tally)
        if bool((tally["episodes"] >= quota).all()):
            reports = env_state.get(("info", "success"), None) is not None
            return _summary(tally["return"], tally["length"], tally["success"] if reports else None)
    slow = int(tally["episodes"].argmin())
    ended = f"env {slow} ended {int(tally['episodes'][slow])} of {quota} episodes in {_MAX_STEPS * quota} steps"
    raise RuntimeError(f"{ended}: give it a time limit")


def _to_action(action: Tensor, space: Any) -> Any:
    """One env's action as Gymnasium wants it; Box actions are clipped to the space, as the envs here clip their own."""
    array = action.numpy()
    return array.clip(space.low, space.high) if hasattr(space, "low") else int(array) if array.ndim == 0 else array


def _evaluate_gymnasium(state: TensorDict, cfg: Config, count: int, env_id: str) -> dict[str, float]:
    import gymnasium

    parts = make_parts(cfg)
    num_envs = eval_envs(count, cfg.trainer.num_eval_envs)
    try:
        envs = [gymnasium.make(env_id) for _ in range(num_envs)]
    except gymnasium.error.Error as error:
        raise ConfigError(f"env: gymnasium:{env_id}: {error}") from None
    try:
        _check_spaces(parts, envs[0], env_id)
        params = state["params"].cpu()
        results = _episodes(lambda obs: parts.policy.act(params, TensorDict({}, []), obs, None)[1], envs, count, cfg)
    finally:
        for env in envs:
            env.close()
    returns, lengths, success = zip(*results, strict=True)
    reported = None if None in success else torch.tensor(success)
    return _summary(torch.tensor(returns), torch.tensor(lengths), reported)


def _check_spaces(parts: Any, env: Any, env_id: str) -> None:
    ours, theirs = parts.env, (from_gymnasium(env.observation_space), from_gymnasium(env.action_space))
    for name, mine, other in zip(
        ("observation", "action"), (ours.observation_space, ours.action_space), theirs, strict=True
    ):
        same = mine.shape == other.shape if isinstance(mine, Box) and isinstance(other, Box) else mine == other
        if not same:
            raise ConfigError(f"env: gymnasium:{env_id} has {name} space {other}, the policy was trained on {mine}")


def _episodes(act: Callable[[Tensor], TensorDict], envs: list[Any], count: int, cfg: Config) -> list[tuple]:
    """(return, length, success or None) of `count / len(envs)` episodes of every env, stepped side by side."""
    quota, results, space = count // len(envs), [], envs[0].action_space
    obs = {i: env.reset(seed=_eval_seed(cfg) + i)[0] for i, env in enumerate(envs)}
    running = {i: (0.0, 0) for i in obs}
    ended = dict.fromkeys(obs, 0)
    while obs:
        batch = torch.stack([torch.as_tensor(o, dtype=torch.float32) for o in obs.values()])
        for i, action in zip(list(obs), act(batch)["action"], strict=True):
            obs[i], reward, terminated, truncated, info = envs[i].step(_to_action(action, space))
            running[i] = (running[i][0] + float(reward), running[i][1] + 1)
            if running[i][1] > _MAX_STEPS:
                raise RuntimeError(f"env {i} did not end an episode in {_MAX_STEPS} steps: give it a time limit")
            if terminated or truncated:
                success = info.get("success", info.get("is_success"))
                results.append((*running[i], None if success is None else bool(success)))
                running[i], ended[i] = (0.0, 0), ended[i] + 1
                obs[i] = envs[i].reset()[0]
        obs = {i: o for i, o in obs.items() if ended[i] < quota}
    return results


def with_evaluation(records: Iterator[LogData], cfg: Config) -> Iterator[LogData]:
    """Evaluate when `trainer.eval_freq` env steps are crossed; the `evaluate` record follows the one it evaluates."""
    freq = cfg.trainer.eval_freq
    for record in records:
        yield record
        step = record["sample_step"]
        if record["log_type"] == "train" and step // freq > (step - steps_per_iteration(cfg)) // freq:
            logs = {name: torch.tensor(value) for name, value in evaluate(record["state"], cfg).items()}
            yield LogData(log_type="evaluate", sample_step=step, logs=logs, state=record["state"])
