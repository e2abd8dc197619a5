"""Frozen records that describe a run and its algorithm, and functions that collect batches.

`ecrl.loop.build.build` builds a `Run` from a config, and other functions take the `Run` as an argument. Equal runs
share compiled functions. The seed, the name of the run and the learning rate are not part of a `Run`, so runs that
differ only in these settings are equal.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import distributed, rng
from ecrl.algorithms.state_kinds import Kind, Kinds, merge, without
from ecrl.config import Config
from ecrl.envs import NEVER, Env, restart
from ecrl.envs.action_chunks import undiscounted_reward
from ecrl.errors import ConfigError
from ecrl.kernels import (
    collect_rollout,
    episode_update,
    moments_init,
    moments_update,
    restarted,
    running_returns,
    scale,
    scan,
    standardize,
    transitions,
)
from ecrl.kernels.rollout_estimators import decision_discounts
from ecrl.kernels.scan_loop import Scan
from ecrl.policies import Policy, policy_params
from ecrl.policies.contract import check_restart, described, returned
from ecrl.pytree import flatten, replaced
from ecrl.types import Logs

Jit = Callable[..., Callable[..., Any]]
_EPS, _CLIP = 1e-8, 10.0

SKIPPED_STEPS = "skipped_steps"
"""Name of the log that counts the gradient steps that were skipped because of NaN or infinity."""

LEARNER_KINDS: Kinds = {"params": Kind.LEARNED, "opt": Kind.LEARNED, "hyper": Kind.COUNTER}
"""Kinds of the fields `params`, `opt` and `hyper`, which the `init` of every built-in algorithm returns."""

REWARD_NORM_KINDS: Kinds = {("norm", "reward", "running"): Kind.ENVIRONMENT}
"""Kind of the running returns in `norm["reward"]`. All other leaves of `norm` are statistics."""


COUNTERS = ("sample_step", "decision_step")
"""State fields that count environment steps and actions.

`decision_step` exists only if the environment reports `executed`, the number of environment steps that an action took.
"""


class Static(NamedTuple):
    """Settings that determine the compiled graph of an iteration.

    Attributes:
        num_envs: number of environments of this rank.
        buffer_size: number of steps of each environment per iteration.
        world_size: number of ranks.
        skips_nonfinite: True if gradient steps with NaN or infinity are skipped (`trainer.finite_guard: skip`).
        row_steps: number of steps in each row of a minibatch. If the algorithm needs whole episodes, `row_steps` is
            `buffer_size`. Otherwise, `row_steps` is 1 for a policy of unit "step". For unit "sequence", `row_steps` is
            the setting `segment_length` of a `MinibatchConfig`, or `buffer_size` if there is no such setting.
        phase: phase of the iteration (`Algorithm.phase`), or None if the algorithm has no phases.
        turns: in the `run` that a turn receives (see `interleaved`), the number of turns per iteration. In all other
            runs, `turns` is 1.
    """

    num_envs: int
    buffer_size: int
    world_size: int
    skips_nonfinite: bool = False
    row_steps: int = 1
    phase: Hashable = None
    turns: int = 1


class Run(NamedTuple):
    """The components of a run that stay constant during the run.

    Attributes:
        env: environment with auto-reset and events.
        policy: policy for the environment's observation space and action space.
        algorithm: algorithm that trains the policy.
        jit: `jit(fn, *static)` binds static arguments to `fn`, and may compile the result.
        scan: loop over time, for functions that `jit` may compile.
        static: settings that determine the compiled graph.
    """

    env: Env
    policy: Policy
    algorithm: "Algorithm"
    jit: Jit
    scan: Scan
    static: Static


Collect = Callable[[Run, TensorDict], tuple[TensorDict, TensorDict]]
Update = Callable[[Run, TensorDict, TensorDict], tuple[TensorDict, Logs]]
Iterate = Callable[[Run, TensorDict, TensorDict], tuple[TensorDict, TensorDict, Logs]]


class DataSet(Protocol):
    """Data set in a file. An algorithm learns from the steps of the data set.

    The iteration receives the tensors in `borrowed["data"]`. The state does not include these tensors. Two data sets
    are equal if they have the same `path`.
    """

    @property
    def path(self) -> str:
        """Path of the file."""
        ...

    def sha256(self) -> Tensor:
        """Return the SHA-256 of the file, as int64 `[4]`."""
        ...

    def check(self, run: Run, cfg: Config) -> None:
        """Raise ConfigError if the file does not fit the run. The function reads only the header of the file."""
        ...

    def read(self, run: Run, device: torch.device) -> TensorDict:
        """Read the tensors of the file."""
        ...


@dataclass(frozen=True)
class Algorithm:
    """Functions and static settings of an algorithm.

    Attributes:
        choices: the settings that determine the compiled graph, as a hashable tuple. The tuple must not contain floats.
            Tuples are compared by value.
        init: (run, key) -> {name: TensorDict or Tensor}, the algorithm's fields of the state: `params`, `opt`, `hyper`,
            and further fields such as `norm`. `init` stores the float hyperparameters of the config in `hyper`. The
            other functions of the algorithm read the float hyperparameters from `hyper`. Bind the config with
            `partial(init, cfg)`.
        iterate: (run, state, borrowed) -> (state, writes, logs); runs one iteration (see `on_policy` and
            `interleaved`). `borrowed` has the read-only leaves of kind buffer and frozen. `writes` may have `batch`,
            the batch of this iteration. The loop computes statistics and logs from the batch's `steps`, of shape
            `[N, T + 1]`. Every other field of `writes` has the name of a buffer, and holds the new contents of parts of
            this buffer. The new content of a part is a tensor that replaces the whole part, or a TensorDict with `rows`
            `[B]` and `index`, int64 `[B]`. The rows have every field of the part, and `index` holds the positions of
            the rows in the part (see `ecrl.loop.buffers`). To record training videos, `iterate` needs an attribute
            `collect` (see `collect_of`).
        kinds: kinds of the state fields that the algorithm adds (see `ecrl.algorithms.state_kinds`).
        group_size: number of consecutive environments that share their initial states and their environment noise.
        gradient_steps: function from `Static` to the number of gradient steps per iteration. `trainer.compile: auto`
            uses this number to estimate whether compiling shortens the run. If `gradient_steps` is None, `auto`
            compiles every run that can be compiled.
        as_one: True if the code of an iteration works only on tensors, and may be compiled as one graph.
        phase: function from sample_step to the phase of the next iteration, such as "collect" or "learn". The loop
            calls `phase` in Python, with the number of environment steps so far over all ranks. If the algorithm has a
            replay buffer, only steps that were added to the buffer count. If such a run resumes without its buffer, the
            earlier steps do not count. `iterate` reads the result from `run.static.phase`, and may run different code
            in each phase. Each phase is compiled once. Bind hyperparameters of the config, such as `learning_starts`,
            with `partial`.
        delayed: names of the logs of optimiser groups that some gradient steps do not update. Such a log is a mean over
            the steps that update its group, first within each turn and then over the turns. The log is NaN in an
            iteration without such a step. The finite guard therefore ignores these logs, but checks the parameters of
            these groups.
        data: data set in a file, or None. If there is a data set, `borrowed["data"]` has the tensors of the file, and
            the state's field `data_sha256` has the SHA-256 checksum of the file.
        name: name under which the algorithm is registered, for error messages.
    """

    choices: Any
    init: Callable[[Run, Tensor], dict[str, Any]] = field(compare=False)
    iterate: Iterate
    kinds: Kinds = field(default_factory=lambda: dict(LEARNER_KINDS), compare=False)
    group_size: int = 1
    gradient_steps: Callable[[Static], int] | None = field(default=None, compare=False)
    as_one: bool = False
    phase: Callable[[int], Hashable] | None = field(default=None, compare=False)
    delayed: tuple[str, ...] = ()
    data: DataSet | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class OnPolicy:
    """Callable `iterate` that collects steps with the current policy and learns only from them (see `on_policy`)."""

    collect: Collect
    update: Update

    def __call__(self, run: Run, state: TensorDict, borrowed: TensorDict) -> tuple[TensorDict, TensorDict, Logs]:
        """Run one iteration. The state passed to `collect` and `update` includes the borrowed, read-only leaves.

        Raises: ValueError if `collect` or `update` replaced a borrowed field.
        """
        given = [str(name) for name in borrowed.keys() if name not in state.keys()]  # noqa: SIM118
        state, batch = self.collect(run, merge(state, borrowed))
        state, logs = learn(self.update, run, state, batch)
        for name in given:
            if not _are_same(state.get(name, None), borrowed[name]):
                raise ValueError(f"{run.algorithm.name} replaced {name}, which is read-only; give it another kind")
        return without(state, borrowed), TensorDict({"batch": batch}, []), logs


def on_policy(collect: Collect, update: Update) -> OnPolicy:
    """Compose an on-policy `iterate` from `collect` and `update`. The `iterate` writes to no buffer.

        state, batch = collect(run, state);    state, logs = update(run, state, batch)

    `with_scaled_rewards` returns a variant of `update`, and `from_reset` returns a variant of `collect`.

    Args:
        collect: (run, state) -> (state, batch), such as `collect` of this module. The batch `[N]` has `steps` of
            shape `[N, T + 1]`. The steps need `obs`, `reward` and `done`. The loop also reads these fields, if present:
            `action`, `sample_log_prob`, `info`, `mask` and `executed`.
        update: (run, state, batch) -> (state, logs).
    """
    return OnPolicy(collect, update)


def collect_of(iterate: Iterate) -> Collect | None:
    """Return the attribute `collect` of an `iterate` callable, or None if the attribute is missing.

    `collect` is a function (run, state) -> (state, batch) that takes the steps of an iteration without learning. The
    batch has the field `steps`. A single rank may call `collect`, so the function must not wait for other ranks.
    """
    return getattr(iterate, "collect", None)


def batch_of(steps: TensorDict) -> TensorDict:
    """Return a batch `[N]` whose only field is `steps`, of shape `[N, T + 1]`."""
    return TensorDict({"steps": steps}, steps.batch_size[:1])


def learn(update: Update, run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Call `update(run, state, batch)`. In a compiled run, compile the call as one function if `as_one` is set."""
    if not run.algorithm.as_one:
        return _updated(update, run, state, batch)
    changed, logs = run.jit(_learn, update, run)(state, batch)
    return replaced(state, changed), logs


def _updated(update: Update, run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Call `update(run, state, batch)`. Raise ConfigError unless the result has two values."""
    label = f"algorithm {run.algorithm.name}: {getattr(update, '__name__', 'update')}"
    return returned(label, update(run, state, batch), "state", "logs")


def _learn(update: Update, run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
    """Call `update`, and return the changed fields and the logs. A compiled function would copy unchanged fields."""
    after, logs = _updated(update, run, state, batch)
    return changed_fields(after, state), logs


def loss_and_logs(run: Run, out: Any) -> tuple[Tensor, Logs]:
    """Check the result `out` of an algorithm's loss function, and return it as the loss and the logs.

    Raises: ConfigError unless `out` is a 0-d loss and a dict of tensors.
    """
    label = f"algorithm {run.algorithm.name}: loss"
    loss, logs = returned(label, out, "loss", "logs")
    if not isinstance(loss, Tensor) or loss.ndim:
        advice = "return its mean" if isinstance(loss, Tensor) else "return one"
        raise ConfigError(f"{label} returns the loss as {described(loss)}, expected a 0-d tensor; {advice}")
    if not isinstance(logs, Mapping):
        raise ConfigError(f"{label} returns {described(logs)} as logs, expected a dict of 0-d tensors; return one")
    for name, log in logs.items():
        if not isinstance(log, Tensor):
            raise ConfigError(f"{label} returns the log {name} as {described(log)}, expected a 0-d tensor; return one")
    return loss, cast(Logs, logs)


def changed_fields(after: TensorDict, before: TensorDict) -> TensorDict:
    """Return the fields of `after` whose tensors are not the same objects as in `before`."""
    return TensorDict({k: v for k, v in cast(Any, after.items()) if not _are_same(v, before.get(k, None))}, [])


def _are_same(tree: Any, other: Any) -> bool:
    """Return True if two trees hold the same tensor objects. Tensors with equal values are not enough."""
    leaves, others = flatten(tree)[0], flatten(other)[0]
    return len(leaves) == len(others) and all(a is b for a, b in zip(leaves, others, strict=True))


def env_index(num_envs: int, device: torch.device | None) -> Tensor:
    """Return the global indices of this rank's environments, as int64 `[N]`."""
    return torch.arange(num_envs, device=device) + distributed.rank() * num_envs


def start_keys(key: Tensor, num_envs: int, step: Tensor | int, group_size: int = 1) -> Tensor:
    """Return the keys `[N]` of the episodes that begin after `step` steps of each environment.

    All environments of a group share one key.
    """
    return rng.stream(key, rng.START, env_index(num_envs, key.device) // group_size, step)


def steps_taken(run: Run, state: TensorDict) -> Tensor:
    """Return the number of actions that each environment has taken, as 0-d int64."""
    return decisions(state) // (run.static.num_envs * run.static.world_size)


def decisions(state: TensorDict) -> Tensor:
    """Return the number of actions taken over all environments and ranks, as 0-d int64.

    The result is `sample_step`, unless the environment reports `executed`, the number of steps that an action took.
    """
    return state["decision_step"] if "decision_step" in state else state["sample_step"]


def counted_after(run: Run, state: TensorDict, executed: Tensor | None) -> dict[str, Tensor]:
    """Return the counters of environment steps and actions after an iteration.

        sample_step'   = sample_step + sum(executed)        over the steps of all environments on all ranks
        decision_step' = decision_step + num_envs * buffer_size * world_size

    If the environment does not report `executed`, every action is one step. `sample_step` then grows like
    `decision_step` in the equation, and the result has no `decision_step`.

    Args:
        run: the run, whose `static` gives the numbers of steps, environments and ranks.
        state: state with the counters before the iteration.
        executed: the field `executed` of this rank's steps, or None if the steps lack this field. Entries that are
            padding must be 0.

    Raises: ConfigError if the environment reports `executed`, but the steps lack this field.
    """
    taken = run.static.buffer_size * run.static.num_envs * run.static.world_size
    if "decision_step" not in state:
        return {"sample_step": state["sample_step"] + taken}
    if executed is None:
        text = "the environment reports `executed`, but the steps of the batch lack this field; add the field"
        raise ConfigError(f"algorithm {run.algorithm.name}: {text}")
    total = distributed.all_sum(executed.sum())
    return {"sample_step": state["sample_step"] + total, "decision_step": state["decision_step"] + taken}


def step_keys(run: Run, state: TensorDict) -> tuple[Tensor, Tensor]:
    """Return the environment keys and the action keys of the next T = `buffer_size` steps, each `[T, N]`.

    A key depends on the run's key, the environment's global index and the number of earlier steps. The environment key
    and the action key of the same step differ. The environments of a group share their environment keys, but not their
    action keys.
    """
    key, index = state["key"], env_index(run.static.num_envs, state["key"].device)
    steps = (steps_taken(run, state) + torch.arange(run.static.buffer_size, device=key.device)).unsqueeze(1)
    group = index // run.algorithm.group_size
    return rng.stream(key, rng.ENV, group, steps), rng.stream(key, rng.ACTION, index, steps)


def initial_carry(run: Run, state: TensorDict) -> dict[str, TensorDict]:
    """Return a dict with the initial `carry` for the state, or an empty dict if the policy has no memory."""
    carry = run.policy.init_carry(policy_params(state), run.static.num_envs)
    return {} if carry.is_empty() else {"carry": carry}


def initial_exploration(run: Run, state: TensorDict) -> dict[str, TensorDict]:
    """Return a dict with `exploration` at the start of an episode, or an empty dict if the state has no such field.

    Only the fields that the policy's `init_exploration` returns restart.
    """
    if "exploration" not in state:
        return {}
    first = run.policy.init_exploration(policy_params(state), run.static.num_envs)
    exploration = cast(TensorDict, state["exploration"])
    check_restart(run.policy, exploration, first)
    return {"exploration": replaced(exploration, first)}


def max_truncations(env: Env, steps: int) -> int:
    """Return the largest possible number of truncations of one environment in `steps` steps.

    >>> from ecrl.envs import make_env
    >>> max_truncations(make_env("cartpole"), 1200)  # its time limit is 500 steps
    3
    """
    return 0 if env.min_truncation_gap == NEVER else -(-steps // env.min_truncation_gap)


def _collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Collect a batch. Return the new state fields (`env`, `episode` and, with memory, `carry`) and the batch."""
    env_keys, action_keys = step_keys(run, state)
    params, before = policy_params(state), state.get("carry", TensorDict({}, []))
    carry, env_state, batch = collect_rollout(
        run.policy,
        run.env,
        params,
        cast(TensorDict, before),
        state["env"],
        env_keys,
        action_keys,
        scan=run.scan,
        max_truncations=max_truncations(run.env, run.static.buffer_size),
        segment_length=run.static.row_steps if run.policy.unit == "sequence" else None,
    )
    episode = with_episodes(state, cast(TensorDict, batch["steps"]))
    fields = {"env": env_state, "episode": episode} | ({"carry": carry} if "carry" in state else {})
    return TensorDict(fields, []), batch


def with_episodes(state: TensorDict, steps: TensorDict) -> TensorDict:
    """Update the episode statistics with the steps `[N, T + 1]` of a batch (see `episode_update`)."""
    reward = undiscounted_reward(steps)[:, :-1]
    steps = cast(TensorDict, steps.select("done", "mask", "executed", strict=False)[:, :-1])
    return episode_update(state["episode"], reward, steps["done"], steps.get("mask", None), steps.get("executed", None))


def with_compiled_policy(run: Run) -> Run:
    """Return the run for collecting in an environment that steps in Python.

    In a compiled run, the policy's functions `act`, `draw`, `value` and `explore` are compiled one by one. The loop
    over time is not compiled.
    """
    policy, jit = run.policy, run.jit
    value = None if policy.value is None else jit(policy.value)
    explore = None if policy.explore is None else jit(policy.explore)
    policy = replace(policy, act=jit(policy.act), draw=jit(policy.draw), value=value, explore=explore)
    return run._replace(policy=policy, scan=scan)


def collect(run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Take `buffer_size` steps in every environment.

    Returns: the state with new `env`, `episode` and `carry`, and the batch `[N]` of `collect_rollout`. The fields of
        the batch are listed in `ecrl.types.BATCH_FIELDS`.
    """
    take_steps = run.jit(_collect, run) if run.env.is_pure else partial(_collect, with_compiled_policy(run))
    fields = ("key", *COUNTERS, "params", "norm", "env", "episode", "carry", "frozen_params")
    changed, batch = take_steps(state.select(*fields, strict=False))
    return replaced(state, changed), batch


def _restart(run: Run, key: Tensor, step: Tensor, env_state: TensorDict) -> TensorDict:
    return restart(run.env, env_state, start_keys(key, run.static.num_envs, step, run.algorithm.group_size))


@dataclass(frozen=True)
class _FromReset:
    """Callable that `from_reset` returns. Instances are compared by value."""

    collect: Collect

    def __call__(self, run: Run, state: TensorDict) -> tuple[TensorDict, TensorDict]:
        start = run.jit(_restart, run) if run.env.is_pure else partial(_restart, run)
        env_state = start(state["key"], steps_taken(run, state), state["env"])
        fields = {"env": env_state, "episode": restarted(cast(TensorDict, state["episode"]))}
        return self.collect(run, replaced(state, fields | initial_carry(run, state)))


def from_reset(collect: Collect) -> Collect:
    """Return a `collect` that first resets every environment and the policy's memory.

    The returns and lengths of the running episodes restart at 0. The statistics of finished episodes are kept. After
    the reset, all environments of a group have the same initial state.
    """
    return _FromReset(collect)


def over_steps(run: Run, logs: Logs) -> Logs:
    """Average logs `[S]` over the turns of an iteration or the gradient steps of a turn, but sum `skipped_steps`.

    A log in `Algorithm.delayed` is NaN in a step that does not update the optimiser group of the log. The mean of such
    a log leaves out NaN. If `trainer.finite_guard` is "skip", skipped steps log NaN, and all means leave out NaN.
    """
    incomplete = logs.keys() if run.static.skips_nonfinite else run.algorithm.delayed

    def over(name: str, log: Tensor) -> Tensor:
        if name == SKIPPED_STEPS:
            return log.sum()
        return log.nanmean() if name in incomplete else log.mean()

    return {name: over(name, log) for name, log in logs.items()}


def standardize_over_ranks(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `x` to mean 0 and standard deviation 1 over the unmasked entries of all ranks.

    The function calls `ecrl.kernels.standardize` with 1e-8 as the lower bound of the standard deviation.
    """
    return standardize(x, mask, eps=_EPS, total=distributed.all_sum)


@dataclass(frozen=True)
class _WithScaledRewards:
    """Callable that `with_scaled_rewards` returns. Instances are compared by value."""

    update: Update

    def __call__(self, run: Run, state: TensorDict, batch: TensorDict) -> tuple[TensorDict, Logs]:
        return self.update(run, *scaled_rewards(state, batch))


def with_scaled_rewards(update: Update) -> Update:
    """Return an `update` that learns from the result of `scaled_rewards`. Episode logs show the unscaled rewards."""
    return _WithScaledRewards(update)


def scaled_rewards(state: TensorDict, batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Divide rewards by the standard deviation of the earlier discounted returns, and update the return statistics.

    `scaled_reward` and `reward_norm_update` give the equations.

    Returns: the state with new `norm`, and the batch with scaled rewards in its `steps`.
    """
    norm, rollout = cast(TensorDict, state["norm"]), cast(TensorDict, batch["steps"])
    before = cast(TensorDict, norm["reward"])
    after = reward_norm_update(before, transitions(rollout.exclude("value")), state["hyper", "gamma"])
    scaled = scaled_reward(rollout["reward"], before)
    norm = replaced(norm, {"reward": after})
    return replaced(state, {"norm": norm}), replaced(batch, {"steps": replaced(rollout, {"reward": scaled})})


def scaled_reward(reward: Tensor, norm: TensorDict) -> Tensor:
    """Divide rewards by the standard deviation of discounted returns, and clip the results.

    `norm` has the statistics of the discounted returns.

    clip(reward / sqrt(variance(return) + 1e-8), -10, 10)
    """
    return scale(reward, cast(TensorDict, norm["moments"]), eps=_EPS, clip=_CLIP)


def reward_norm_update(norm: TensorDict, steps: TensorDict, gamma: Tensor) -> TensorDict:
    """Update the statistics of discounted returns with steps `[N, T]`.

        return[t] = reward[t] + gamma * return[t - 1] * not done[t - 1]

    If the steps have the field `executed`, `gamma ** executed[t]` replaces `gamma`. A step whose `mask` is False has
    the reward 0, and the moments leave out this step.

    Args:
        norm: the statistics before the steps, as in the field `reward` of the result of `reward_norm_init`.
        steps: the steps that follow, with the fields `reward` and `done`, and `mask` and `executed`, if present.
        gamma: discount per step.

    Returns: the statistics after the steps. The moments include the steps of all ranks.
    """
    mask = steps["mask"] if "mask" in steps else torch.ones_like(steps["done"])
    reward = steps["reward"].masked_fill(~mask, 0.0)
    returns = running_returns(reward, steps["done"], norm["running"], gamma=decision_discounts(steps, gamma))
    last = returns[:, -1].masked_fill(steps["done"][:, -1], 0.0)
    moments = moments_update(cast(TensorDict, norm["moments"]), returns, mask, total=distributed.all_sum)
    return TensorDict({"moments": moments, "running": last}, [])


def reward_norm_init(num_envs: int, device: torch.device) -> TensorDict:
    """Return the initial statistics of discounted returns, for the field `norm` of the state.

    `moments` holds the moments of discounted returns. `running` holds the discounted returns so far, `[N]`, of the
    current episodes.
    """
    running = torch.zeros(num_envs, device=device)
    return TensorDict({"reward": {"moments": moments_init((), device), "running": running}}, [])
