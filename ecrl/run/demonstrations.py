"""Record demonstrations of a scripted expert or a trained policy, as a data set for the algorithm `bc`.

For a given environment and source of actions, episode i depends only on the seed and on i. Except for rounding, the
number of parallel environments does not change the results.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import __version__, rng
from ecrl.algorithms import Run
from ecrl.config import Config
from ecrl.envs import make_env, make_expert
from ecrl.envs.action_chunks import undiscounted_reward
from ecrl.envs.experts import Expert, open_loop
from ecrl.envs.vocabulary import vocabulary_checksums
from ecrl.errors import CheckpointError, ConfigError, UserError
from ecrl.kernels import scan
from ecrl.kernels.rollout import restarted_carry
from ecrl.kernels.scan_loop import Scan
from ecrl.loop.build import build, device_of
from ecrl.loop.state_argument import check_state_argument
from ecrl.policies import policy_params
from ecrl.pytree import flatten, mapped, names
from ecrl.spaces import Box, Space, element_shape
from ecrl.storage.demonstrations import write_demonstrations

_CHUNK = 8  # number of steps after which the loop checks again whether all episodes have ended
_MAX_STEPS = 1_000_000  # maximum length of an episode
_TRIES = 100  # maximum number of recorded episodes per requested episode

Act = Callable[[TensorDict, TensorDict, TensorDict, Tensor], tuple[TensorDict, Tensor]]
"""Type of a function (params, carry, environment state, keys) -> (carry, action)."""


class Actor(NamedTuple):
    """A source of actions, with a name for the metadata."""

    name: str
    act: Act
    params: TensorDict
    carry: TensorDict


class Summary(NamedTuple):
    """Summary of a data set.

    `success_rate` is the share of successes among all recorded episodes, including the episodes that `successes_only`
    leaves out of the data set. If the environment reports no success, `success_rate` is None.
    """

    path: Path
    episodes: int
    steps: int
    mean_return: float
    success_rate: float | None
    sha256: str


def record_demonstrations(
    cfg: Config,
    path: str | Path,
    num_episodes: int = 100,
    *,
    state: TensorDict | None = None,
    expert: Mapping[str, Any] | None = None,
    sample: bool = False,
    successes_only: bool = False,
    seed: int = 0,
    num_envs: int = 64,
) -> Summary:
    """Record whole episodes of an expert or a policy, and write the data set atomically.

    Args:
        cfg: config of the run. If `state` is None, the policy does not act, and `policy.clip_actions` is the only
            setting of the policy that affects the data: it decides whether the expert's actions are clipped.
        path: safetensors file, which must not exist yet (see `ecrl.storage.demonstrations`).
        num_episodes: number of episodes in the data set.
        state: state of a run, whose policy acts; if None, the scripted expert of the environment acts.
        expert: settings of the scripted expert, such as its noise.
        sample: if True, the policy samples its actions; if False, its actions are deterministic.
        successes_only: if True, only episodes that end with success are part of the data set.
        seed: seed of the initial states, the environment noise, the expert's noise and the sampled actions.
        num_envs: maximum number of parallel environments. There are never more environments than `num_episodes`.

    Returns: a summary of the data set. The success rate is the share of successes among all recorded episodes. With
        `successes_only`, these include episodes that are not part of the data set.
    Raises: ConfigError if an argument is invalid, if `path` exists, if the environment has no scripted expert, or if
        `successes_only` is set but the environment reports no success. UserError if `state` is not the state of a run,
        if an episode does not end, or if `successes_only` is set but fewer than 1 % of the episodes succeed.
        CheckpointError if the file cannot be written.
    """
    if state is not None:
        check_state_argument(state, "params", "norm")
    path, run = Path(path), build(cfg)
    for name, number in (("num_episodes", num_episodes), ("num_envs", num_envs)):
        if number < 1:
            raise ConfigError(f"{name}: {number}, expected at least 1")
    if path.exists():
        raise ConfigError(f"{path}: exists; choose another name, or remove it first")
    num_envs = min(num_envs, num_episodes)
    if state is None:
        actor = _expert_of(run, cfg, expert or {}, sample)
    else:
        actor = _policy_of(run, state, num_envs, expert, sample)
    chosen: list[TensorDict] = []
    tried = succeeded = 0
    with torch.no_grad():
        for episode in _episodes(run, actor, cfg, seed, num_envs):
            if successes_only and "success" not in episode:
                raise ConfigError(f"successes_only: {cfg.env.label} reports no success; leave it out")
            success = bool(episode["success"][-1]) if "success" in episode else False
            tried, succeeded = tried + 1, succeeded + success
            if success or not successes_only:
                chosen.append(episode)
            if len(chosen) == num_episodes:
                break
            if tried >= _TRIES * num_episodes:
                raise UserError(
                    f"{path}: only {len(chosen)} of {tried:,} episodes of {actor.name} succeeded, expected "
                    f"{num_episodes}; use a better expert or policy, or leave out successes_only"
                )
    rate = succeeded / tried if "success" in chosen[0] else None
    steps = cast(TensorDict, torch.cat([episode.exclude("success") for episode in chosen]))
    mean_return = float(steps["reward"].double().sum()) / num_episodes
    about = {
        "env": cfg.env.label,
        "expert": actor.name,
        "episodes": num_episodes,
        "steps": len(steps),
        "mean_return": mean_return,
        "success_rate": rate,
        "successes_only": successes_only,
        "seed": seed,
        "ecrl": __version__,
        "vocabularies": vocabulary_checksums(cfg.env.cfg.model_dump(mode="json")),
        "config": cfg.model_dump(mode="json"),
    }
    leaves, structure = flatten(steps)
    tensors = dict(zip(names(structure), (leaf.contiguous() for leaf in leaves), strict=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checksum = write_demonstrations(path, tensors, about)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror}; make room or choose another place"
        ) from None
    return Summary(path, num_episodes, len(steps), mean_return, rate, checksum)


def _no_tensors() -> TensorDict:
    return TensorDict({}, [])


def _expert_of(run: Run, cfg: Config, settings: Mapping[str, Any], sample: bool) -> Actor:
    """Return the environment's scripted expert as an actor.

    If `env.action_chunk` is above 1, the expert plans all actions of a chunk at once (see `open_loop`).

    Raises: ConfigError if `sample` is True, because experts do not sample.
    """
    if sample:
        raise ConfigError("sample: only a trained policy samples its actions; leave it out, or pass a run")
    expert, chunk = make_expert(cfg.env, settings), cfg.env.action_chunk
    if chunk > 1:
        expert = open_loop(make_env(cfg.env.model_copy(update={"action_chunk": 1})), expert, chunk)
    act = partial(_act_as_expert, expert, element_shape(run.env.action_space))
    return Actor(f"the expert of {cfg.env.label}", act, _no_tensors(), _no_tensors())


def _act_as_expert(
    expert: Expert,
    shape: tuple[int, ...],
    params: TensorDict,
    carry: TensorDict,
    env_state: TensorDict,
    keys: Tensor,
) -> tuple[TensorDict, Tensor]:
    action = expert(env_state, keys)
    return carry, action.reshape(*keys.shape, *shape)


def _policy_of(run: Run, state: TensorDict, num_envs: int, settings: Mapping[str, Any] | None, sample: bool) -> Actor:
    """Return the policy of a state as an actor.

    Raises: ConfigError if `settings` are given, which only an expert has, or if `sample` is True and the policy has no
        random actions outside of training.
    """
    if settings:
        raise ConfigError(f"expert.{next(iter(settings))}: a trained policy has no such settings; leave it out")
    if sample and run.policy.explore is not None and not run.policy.noisy:
        raise ConfigError(f"sample: the policy {run.policy.name} explores only in training; leave it out")
    params = policy_params(state)
    act = partial(_act_as_policy, run.policy.act, run.policy.draw if sample else None)
    return Actor(f"policy {run.policy.name}", act, params, run.policy.init_carry(params, num_envs))


def _act_as_policy(
    act: Callable,
    draw: Callable | None,
    params: TensorDict,
    carry: TensorDict,
    env_state: TensorDict,
    keys: Tensor,
) -> tuple[TensorDict, Tensor]:
    carry, out = act(params, carry, env_state["obs"], None if draw is None else draw(keys))
    return carry, out["action"]


def _step(
    act: Act,
    step: Callable,
    bounds: Space | None,
    carry_and_env: tuple[TensorDict, TensorDict],
    x: tuple[Any, Tensor],
    params: TensorDict,
    initial: TensorDict,
) -> tuple[tuple[TensorDict, TensorDict], dict[str, Any]]:
    """Take one step in every environment. Return `((carry, environment state), row)`; `row` holds the step's data."""
    (carry, env_state), (noise, keys) = carry_and_env, x
    obs = mapped(torch.clone, env_state["obs"])
    carry, action = act(params, carry, env_state, keys)
    if isinstance(bounds, Box):
        low, high = (action.new_tensor(bound).reshape(bounds.shape) for bound in (bounds.low, bounds.high))
        action = action.clamp(low, high)
    env_state = step(env_state, action, noise)
    carry = restarted_carry(carry, initial, env_state)
    row = {"obs": obs, "action": action, "done": env_state["terminated"] | env_state["truncated"]}
    row["reward"] = undiscounted_reward(env_state).clone()
    for name in ("executed", "mask"):
        if name in env_state:
            row[name] = env_state[name].clone()
    if "success" in env_state.get("info", _no_tensors()):
        row["success"] = env_state["info", "success"].clone()
    return (carry, env_state), row


def _steps(
    act: Act,
    run: Run,
    loop: Scan,
    bounds: Space | None,
    length: int,
    params: TensorDict,
    initial: TensorDict,
    carry_and_env: tuple[TensorDict, TensorDict],
    key: Tensor,
    index: Tensor,
    first: Tensor,
) -> tuple[tuple[TensorDict, TensorDict], dict[str, Any]]:
    """Take `length` steps in every environment, starting at step `first`. The rows have shape `[length, N]`."""
    times = first + torch.arange(length, device=key.device).unsqueeze(1)
    noise = run.env.draw(rng.stream(key, rng.ENV, index, times))
    xs = noise, rng.stream(key, rng.ACTION, index, times)
    return loop(partial(_step, act, run.env.step, bounds), carry_and_env, xs, params, initial)


def _episodes(run: Run, actor: Actor, cfg: Config, seed: int, num_envs: int) -> Iterator[TensorDict]:
    """Yield the episodes 0, 1, 2, ... on the CPU, each a TensorDict of its steps `[T]`.

    The environments run `num_envs` episodes at a time. The next episodes begin when all of these episodes have ended.

    Raises: UserError if an episode does not end.
    """
    key = rng.fold_in(rng.key(seed, device_of(cfg)), rng.DEMO)
    bounds = run.env.action_space if cfg.policy.clip_actions else None
    static = actor.act, run, run.scan if run.env.is_pure else scan, bounds, _CHUNK if run.env.is_pure else 1
    steps = run.jit(_steps, *static) if run.env.is_pure else partial(_steps, *static)
    for start in count(0, num_envs):
        index = start + torch.arange(num_envs, device=key.device)
        env_state = run.env.reset(rng.stream(key, rng.START, index, 0))
        carry, rows, ended = actor.carry.clone(), [], torch.zeros(num_envs, dtype=torch.bool)
        first = torch.zeros_like(key)
        try:
            while not ended.all():
                if int(first) >= _MAX_STEPS:
                    raise UserError(
                        f"env {int((~ended).int().argmax())}: the episode did not end in {_MAX_STEPS:,} steps; give "
                        "the environment a time limit"
                    )
                (carry, env_state), row = steps(actor.params, actor.carry, (carry, env_state), key, index, first)
                rows.append(mapped(lambda x: x.cpu(), row))
                ended, first = ended | row["done"].any(0).cpu(), first + len(row["done"])
        finally:
            run.env.close(env_state)
        taken = int(first)
        fields = mapped(lambda *parts: torch.cat(parts), *rows, batch=lambda size, taken=taken: (taken, *size[1:]))
        for n, last in enumerate(fields["done"].int().argmax(0).tolist()):
            yield _episode(fields, n, last + 1)


def _episode(fields: dict[str, Any], n: int, length: int) -> TensorDict:
    """Return the first `length` steps of environment n, without masked steps, from fields of shape `[T, N]`."""
    counted = torch.arange(length) if "mask" not in fields else fields["mask"][:length, n].nonzero()[:, 0]
    one = {name: field for name, field in fields.items() if name != "mask"}
    if not len(counted):
        raise UserError(
            f"env {n}: the mask is False in all {length} steps of an episode, so there is nothing to record"
        )
    taken = mapped(lambda x: x[counted, n].clone(), one, batch=lambda size: (len(counted), *size[2:]))
    taken["done"][-1] = True  # also if the last step of the episode is masked
    return TensorDict(taken, [len(counted)])
