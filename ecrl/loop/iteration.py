"""Define one training iteration as a function `(state) -> (state, logs)`, and a generator that runs iterations.

The generator contains only control flow. Logging, checkpoints, evaluation and progress displays read the records that
the generator yields.
"""

import gc
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import islice
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms import Interleaved, Run
from ecrl.algorithms.core import (
    counted_after,
    decisions,
    initial_carry,
    initial_exploration,
    start_keys,
    steps_taken,
)
from ecrl.algorithms.state_kinds import merge
from ecrl.compile.background import switch_of
from ecrl.compile.jit import compilations_of
from ecrl.compile.vmap import host_values, vmapped
from ecrl.config import Config, total_steps
from ecrl.distributed import any_rank, world_size
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import episode_init, restarted
from ecrl.loop.background import compiling_in_background, leaving_a_thread
from ecrl.loop.buffers import (
    ZerosWithoutMemory,
    borrowed_leaves,
    check_current,
    check_data,
    check_kinds,
    commit,
    committed,
    data_of,
    kinds_of,
    mark_written,
    overwrite,
    with_gap,
    with_own_buffers,
)
from ecrl.loop.build import build, check_envs, check_rollout, device_of, planned_form
from ecrl.loop.contract import with_contract
from ecrl.loop.finite_guard import FIELDS, KINDS, flags, restart_nonfinite, restarted_exploration, undo_update
from ecrl.loop.initial_policy import initial_policy
from ecrl.loop.metrics import WINDOW, collect_logs, counted_steps, over_ranks
from ecrl.loop.nonfinite_report import Collected, NonfiniteAction, action_error, nonfinite_error, with_checked_actions
from ecrl.loop.signals import asked, interruptible
from ecrl.loop.state_argument import check_state_argument
from ecrl.loop.state_summary import as_state
from ecrl.memory import keep_freed_memory
from ecrl.policies import Policy
from ecrl.policies.contract import check_frozen_names, checking
from ecrl.pytree import Borrowed, flatten, mapped, names, replaced, unflatten
from ecrl.registry import did_you_mean
from ecrl.types import LogData, Logs

Iteration = Callable[[TensorDict], tuple[TensorDict, dict[str, Logs]]]
Watch = Callable[[Run], Run]

STATE_FIELDS = ("params", "hyper", "env", "episode", "norm", "key", "sample_step", "update_step", "iterations")
"""Fields that the state of every run has."""


def unwatched(run: Run) -> Run:
    """Return the run unchanged. This function is the default of the argument `watch`."""
    return run


@contextmanager
def _matmul_precision(tf32: bool) -> Iterator[None]:
    """Allow TF32 in matrix products inside this context if `tf32` is True. On exit, restore torch's global setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def init_state(cfg: Config, key: Tensor | None = None) -> TensorDict:
    """Create the initial state of a run. By default, the random key of the run is made from `trainer.seed`.

    >>> from ecrl.config import load_config
    >>> state = init_state(load_config("configs/cartpole_ppo.json"))
    >>> sorted(state.keys())
    ['env', 'episode', 'hyper', 'iterations', 'key', 'norm', 'opt', 'params', 'sample_step', 'update_step']
    """
    return first_state(build(cfg), cfg, key)


def first_state(run: Run, cfg: Config, key: Tensor | None = None) -> TensorDict:
    """Create the initial state of a run that is already built (see `init_state`)."""
    check_envs(cfg, run.env, cfg.trainer.num_envs, "trainer.num_envs")
    key = (rng.key(cfg.trainer.seed) if key is None else key).to(device_of(cfg))
    start = run._replace(policy=initial_policy(run, cfg, key.device))
    state = _state_without_env(start, cfg, key)  # `init` may reject the config, so call it before opening environments
    if run.algorithm.data is not None:
        run.algorithm.data.check(run, cfg)
        state = replaced(state, {"data_sha256": run.algorithm.data.sha256().to(key.device)})
    return as_state(_with_envs(run, state, _first_envs(run, cfg, key))).lock_()


def check_start(run: Run, cfg: Config) -> None:
    """Raise ConfigError if the initial policy or the data set of a new run does not fit the config.

    The function allocates no memory for large buffers.
    """
    key = rng.key(cfg.trainer.seed, device_of(cfg))
    start = run._replace(policy=initial_policy(run, cfg, key.device))
    with ZerosWithoutMemory():
        _state_without_env(start, cfg, key)
    if run.algorithm.data is not None:
        run.algorithm.data.check(run, cfg)


def _with_envs(run: Run, state: TensorDict, env: TensorDict) -> TensorDict:
    """Add the environments' states `env` to an initial state, and return the result.

    If an action may take several steps, the result also has the count of actions `decision_step`, and its replay
    buffer, if any, has the field `executed`.
    """
    if "executed" in env:
        state = replaced(state, {"decision_step": torch.zeros_like(state["sample_step"])})
        iterate = run.algorithm.iterate
        state = iterate.with_executed(state) if isinstance(iterate, Interleaved) else state
    return replaced(state, {"env": env})


def _first_envs(run: Run, cfg: Config, key: Tensor) -> TensorDict:
    """Reset the environments before the first step, and return the states of the environments."""
    return run.env.reset(start_keys(key, cfg.trainer.num_envs, 0, run.algorithm.group_size))


def _state_without_env(run: Run, cfg: Config, key: Tensor) -> TensorDict:
    with checking():
        return _fields_without_env(with_contract(run), cfg, key)


def _fields_without_env(run: Run, cfg: Config, key: Tensor) -> TensorDict:
    fields, policy, zero = run.algorithm.init(run, key), run.policy, torch.zeros_like(key)
    norm = fields.pop("norm", TensorDict({}, []))
    if policy.norm_init is not None:
        norm = norm.copy().set("obs", policy.norm_init(key.device))
    episode = episode_init(run.static.num_envs, WINDOW, key.device)
    counters = {"sample_step": zero, "update_step": zero.clone(), "iterations": zero + cfg.trainer.iterations}
    state = TensorDict({**fields, "norm": norm, "episode": episode, "key": key.clone(), **counters}, [])
    if policy.init_frozen is not None:
        state.set("frozen_params", _frozen_params(policy, state))
    if run.algorithm.data is not None:
        state.set("data_sha256", torch.zeros(4, dtype=torch.int64, device=key.device))
    state.update(initial_carry(run, state))
    check_kinds(state, kinds_of(run))
    return state


def _frozen_params(policy: Policy, state: TensorDict) -> TensorDict:
    """Create the policy's frozen parameters, and check their names."""
    frozen = cast(Any, policy.init_frozen)(state["key"].device).detach()
    check_frozen_names(policy, frozen, cast(TensorDict, state["params"]))
    return frozen


def expected_state(run: Run, cfg: Config, state: TensorDict) -> TensorDict:
    """Create a new state from the config, for comparison with `state`.

    The large buffers of the new state are zeros for which no memory is allocated.

    If the environments step in Python, the new state contains the environments of `state`, so the function opens no
    environments.

    Raises: ConfigError if the config's environments step in Python, but `state` contains no such environments.
    """
    if not run.env.is_pure and "token" not in state["env"]:
        raise ConfigError(f"state: it has no environments of {cfg.env.label}; use the config of its run")
    key = rng.key(cfg.trainer.seed, device_of(cfg))
    env = _first_envs(run, cfg, key) if run.env.is_pure else cast(TensorDict, state["env"])
    with ZerosWithoutMemory():
        return _with_envs(run, _state_without_env(run, cfg, key), env).lock_()


def with_iterations_of(cfg: Config, state: TensorDict) -> TensorDict:
    """Set the field `iterations` of the state, which schedules read, to the number of iterations in the config.

    The number in the state differs from the number in the config if, for example, a resumed run trains for longer.
    """
    return replaced(state, {"iterations": torch.full_like(state["iterations"], cfg.trainer.iterations)})


def with_empty_buffers(run: Run, cfg: Config, state: TensorDict, names: list[str]) -> TensorDict:
    """Add new, empty buffers to a state that lacks the buffers in `names`."""
    new = _state_without_env(run, cfg, rng.key(cfg.trainer.seed, device_of(cfg)))
    buffers = cast(TensorDict, _with_envs(run, new, cast(TensorDict, state["env"])).select(*names))
    mark_written(run, buffers, state)
    return replaced(state, buffers)


def reopened(run: Run, state: TensorDict) -> TensorDict:
    """Reset environments that step in Python and do not match `state`, with a warning. Return the resulting state.

    Environments that step in Python exist only in the process that opened them. These environments are ahead of `state`
    after an interrupted iteration, or if `state` is not the newest state.
    """
    env = cast(TensorDict, state["env"])
    if run.env.is_current(env):
        return state
    warnings.warn("the environments' own state could not be restored: their episodes restart", stacklevel=4)
    run.env.close(env)
    keys = start_keys(state["key"], run.static.num_envs, steps_taken(run, state), run.algorithm.group_size)
    fields = {"env": run.env.reset(keys), "episode": restarted(cast(TensorDict, state["episode"]))}
    state = state.copy().update(fields | initial_carry(run, state) | initial_exploration(run, state))
    if "reward" in state["norm"]:  # running returns belong to the lost episodes
        norm = cast(TensorDict, state["norm"]).clone()
        norm["reward", "running"] = torch.zeros_like(norm["reward", "running"])
        state.set("norm", norm)
    return with_gap(run, state)


def close(state: TensorDict, cfg: Config) -> None:
    """Close a state's Gymnasium environments and their worker processes. Other environments need no closing.

    Gymnasium environments that are still open at the end of the process are closed automatically.

    Raises: UserError if `state` is not the state of a run.
    """
    check_state_argument(state, "env")
    build(cfg).env.close(cast(TensorDict, state["env"]))


def _compare(state: TensorDict, new: TensorDict) -> None:
    """Raise ConfigError for the first leaf whose shape or dtype differs, or that only one of the states has."""
    expected, actual = (dict(td.flatten_keys("/").items()) for td in (new, state))
    for name in sorted(expected.keys() | actual.keys()):
        shapes = [list(td[name].shape) if name in td else "absent" for td in (actual, expected)]
        dtypes = [str(td[name].dtype).removeprefix("torch.") if name in td else "absent" for td in (actual, expected)]
        for actual_one, expected_one in (shapes, dtypes):
            if actual_one != expected_one:
                raise ConfigError(
                    f"state: {name} is {actual_one}, the config makes it {expected_one}; use the config of its run"
                )


@contextmanager
def explaining_other_networks(state: TensorDict, cfg: Config) -> Iterator[None]:
    """If the block fails and the config makes networks of other shapes than `state` has, raise ConfigError instead."""
    try:
        yield
    except (KeyError, RuntimeError, UserError):
        run, key = build(cfg), rng.key(cfg.trainer.seed, device_of(cfg))
        with ZerosWithoutMemory():
            new = _state_without_env(run, cfg, key)
        _compare(cast(TensorDict, state.select("params", "norm")), cast(TensorDict, new.select("params", "norm")))
        raise


def check_state(run: Run, state: TensorDict, cfg: Config) -> None:
    """Raise ConfigError if the leaves, the device or the data set of a state do not match the config.

    Raise UserError if a buffer of the state is out of date. Warn if hyperparameters have other values than in the
    config. An iteration reads hyperparameters from `state["hyper"]`, so you can change hyperparameters during a run.
    """
    check_current(run, state)
    new = expected_state(run, cfg, state)
    _check_chunk_discount(state, new, cfg)
    if state["key"].device != new["key"].device:  # `device_of(cfg)` may lack the device index
        raise ConfigError(f"state: is on {state['key'].device}, the config sets {device_of(cfg)}; use state.to(...)")
    _check_hyperparameters(state, cast(TensorDict, new["hyper"]))
    _compare(state, new)
    check_data(run, state)
    expected, actual = (dict(td.flatten_keys("/").items()) for td in (new, state))
    numbers = [name for name in expected if name.startswith("hyper/") and not torch.equal(actual[name], expected[name])]
    if numbers:
        differences = ", ".join(
            f"{n.removeprefix('hyper/')} {actual[n]:.6g} (config {expected[n]:.6g})" for n in numbers
        )
        warnings.warn(f"the state's hyperparameters are used, not the config's: {differences}", stacklevel=3)


def _check_hyperparameters(state: TensorDict, known: TensorDict) -> None:
    """Raise ConfigError if the state has a hyperparameter that its algorithm does not have, such as a misspelt one.

    `known` has the hyperparameters of the algorithm.
    """
    given, expected = (dict(td.flatten_keys("/").items()) for td in (cast(TensorDict, state["hyper"]), known))
    for name in sorted(given.keys() - expected.keys()):
        path = ", ".join(map(repr, ("hyper", *name.split("/"))))
        raise ConfigError(f"state[{path}]: no hyperparameter of this name; {did_you_mean(name, expected)}")


def _check_chunk_discount(state: TensorDict, new: TensorDict, cfg: Config) -> None:
    """Raise ConfigError if the discount inside action chunks would differ from the discount of the algorithm."""
    gamma = ("hyper", "gamma")
    known = all(gamma in one.keys(True) for one in (state, new))
    if cfg.env.action_chunk > 1 and known and not torch.equal(state[gamma], new[gamma]):
        raise ConfigError(
            f"algorithm.cfg.gamma: {new[gamma]:.6g}, but the state has {state[gamma]:.6g}, and steps inside an action "
            "chunk would be discounted with the config's gamma; use the same gamma in both"
        )


def run_summary(run: Run, cfg: Config, world_size: int) -> list[str]:
    """Describe a run on `world_size` ranks in a few lines.

    Raises: ConfigError if the components are incompatible, or if a rollout does not fit in memory.
    """
    form = planned_form(cfg, run.policy, run.algorithm, run.static)
    check_rollout(cfg, run)
    key = rng.key(cfg.trainer.seed, device_of(cfg))
    with ZerosWithoutMemory():
        state = _state_without_env(run, cfg, key)
    if run.env.is_pure:
        run.env.reset(key.unsqueeze(0))  # check that the environment has the fields that the events use
    weights = sum(leaf.numel() for leaf in cast(TensorDict, state["params"]).values(True, True))  # pyright: ignore
    return [
        f"task     {cfg.env.label}, {cfg.policy.name}, {cfg.algorithm.name}, seed {cfg.trainer.seed}",
        f"spaces   observations {run.env.observation_space}",
        f"         actions {run.env.action_space}",
        f"policy   {weights:,} parameters",
        f"device   {device_of(cfg)}, {form.name} ({form.reason}), world size {world_size}",
        f"budget   {_budget(cfg, world_size)}, {cfg.trainer.iterations} iterations",
    ]


def _budget(cfg: Config, world_size: int) -> str:
    actions, chunk = total_steps(cfg, world_size), cfg.env.action_chunk
    return f"{actions:,} env steps" if chunk == 1 else f"{actions:,} actions of up to {chunk} env steps"


def steps_per_iteration(cfg: Config) -> int:
    """Return the number of environment steps in one iteration, summed over the environments of all ranks.

    If an action may take several environment steps, the function counts actions instead.
    """
    return cfg.trainer.buffer_size * cfg.trainer.num_envs * world_size()


def crossed(step: int, size: int, freq: int) -> bool:
    """Return True if an iteration of `size` environment steps that ends at `step` passed a multiple of `freq`.

    Ending exactly at a multiple of `freq` counts as passing the multiple. If `freq` is 0, return False.

    >>> [crossed(step, 4, 10) for step in (4, 8, 12, 16, 20)]
    [False, False, True, False, True]
    """
    return freq > 0 and step // freq > (step - size) // freq


def steps_per_record(cfg: Config) -> int:
    """Return the number of environment steps between two records (see `steps_per_iteration`)."""
    return cfg.trainer.log_freq * steps_per_iteration(cfg)


def is_due(record: LogData, cfg: Config, freq: int) -> bool:
    """Return True if the recorded iterations reached or passed a multiple of `freq` environment steps."""
    return crossed(record["sample_step"], record.get("taken", steps_per_record(cfg)), freq)


def decisions_of(record: LogData) -> int:
    """Return the number of actions that a run took before it yielded this record.

    If each action is one environment step, this number is the `sample_step` of the record.
    """
    return int(decisions(record["state"])) if "decision_step" in record["state"] else record["sample_step"]


def _statistics(norm_update: Callable[..., TensorDict], norm: TensorDict, steps: TensorDict) -> TensorDict:
    """Update the observation statistics with the collected steps. The policy acted with the old statistics."""
    obs = norm_update(cast(TensorDict, norm["obs"]), steps["obs"][:, :-1], counted_steps(steps))
    return norm.copy().set("obs", obs)


def _iteration(
    run: Run, guard: str, start: TensorDict, borrowed: Borrowed
) -> tuple[TensorDict, TensorDict, dict[str, Logs], Tensor | None]:
    """Run one iteration. Return the state, the new buffer entries, the logs, and the finite guard's flags.

    If `guard` is "off", the flags are None. If `guard` is "stop" and the environments step in Python, raise
    NotFiniteError for NaN or infinity.
    """
    stops_here = (
        guard == "stop" and not run.env.is_pure
    )  # the error report cannot repeat the steps of environments in Python
    checked = with_checked_actions(run) if stops_here else run
    try:
        state, writes, train_logs = run.algorithm.iterate(checked, start, borrowed.fields)
    except NonfiniteAction as refused:
        raise action_error(run, merge(start, borrowed.fields), refused) from None
    batch = cast(TensorDict, writes.get("batch", TensorDict({}, [])))
    steps = cast(TensorDict, batch.get("steps", TensorDict({}, [])))
    norm, episode = cast(TensorDict, state["norm"]), cast(TensorDict, state["episode"])
    turns = isinstance(run.algorithm.iterate, Interleaved)  # each turn has already updated the statistics
    if run.policy.norm_update is not None and "obs" in steps and not turns:
        norm = run.jit(_statistics, run.policy.norm_update)(norm, steps.select("obs", "done", "mask", strict=False))
    state = replaced(state, {"norm": norm, "update_step": state["update_step"] + 1})
    nonfinite = None
    if guard != "off":
        every_step = {name: log for name, log in train_logs.items() if name not in run.algorithm.delayed}
        nonfinite = flags(steps.select(*FIELDS, "mask", strict=False), every_step, cast(TensorDict, state["params"]))
        if stops_here and nonfinite[1].any():
            raise nonfinite_error(run, merge(start, borrowed.fields), nonfinite, Collected(state, batch, train_logs))
    if guard == "skip" and nonfinite is not None:
        state = undo_update(nonfinite[1], start, state, kinds_of(run))
        if "carry" in state:
            first = initial_carry(run, merge(state, borrowed.fields))["carry"]
            state = replaced(state, {"carry": restart_nonfinite(cast(TensorDict, state["carry"]), first)})
        state = replaced(state, restarted_exploration(run, merge(state, borrowed.fields)))
        train_logs = train_logs | {"skipped_updates": nonfinite[1].any().to(torch.float32)}
    state = replaced(state, counted_after(run, state, steps.get("executed", None)))
    logs = {"collect": over_ranks(collect_logs(episode, steps)), "train": over_ranks(train_logs)}
    return state, cast(TensorDict, writes.exclude("batch")), logs, nonfinite


def _iteration_of_leaves(
    run: Run, guard: str, structure: Hashable, leaves: list[Tensor], borrowed: Borrowed
) -> tuple[list[Tensor], TensorDict, TensorDict, dict[str, Logs], Tensor | None]:
    """Run `_iteration` on a state given as a list of tensors.

    Return the list of tensors of the new state, a copy of the new state, the new buffer entries, a copy of the logs,
    and the finite guard's flags.

    Raises: ValueError if the iteration changes the names or batch sizes of the state's fields.
    """
    state, writes, logs, nonfinite = _iteration(run, guard, unflatten(structure, leaves), borrowed)
    after, structure_after = flatten(state)
    if structure_after != structure:
        fields = ", ".join(sorted({*names(structure_after)} ^ {*names(structure)})) or "the batch size of a field"
        raise ValueError(f"an iteration must keep the names and batch sizes of the state's fields; it changed {fields}")
    copies = mapped(torch.clone, (state, logs))  # the logged learning rate may be a tensor of the state
    return after, copies[0], writes, copies[1], nonfinite


COUNTS = ("skipped_steps", "skipped_updates")
"""Logs that a record of several iterations sums.

For a log in `Algorithm.delayed`, the record has the last value that is not NaN. For all other logs, the record has the
value of the last iteration.
"""


def _over_iterations(earlier: Logs, logs: Logs, delayed: Sequence[str]) -> Logs:
    """Combine the logs of an iteration with logs that this function returned for earlier iterations of the record.

    Only the logs in `COUNTS` and `delayed` are returned.
    """
    sums = {name: log + earlier.get(name, 0) for name, log in logs.items() if name in COUNTS}
    return sums | {n: torch.where(x.isnan(), earlier.get(n, x), x) for n, x in logs.items() if n in delayed}


def _iterations_of_leaves(
    run: Run, guard: str, structure: Hashable, count: int, leaves: list[Tensor], borrowed: Borrowed
) -> tuple[list[Tensor], TensorDict, TensorDict, dict[str, Logs], Tensor | None]:
    """Run `count` iterations as one loop, and return a result like that of `_iteration_of_leaves`, without writes.

    The logs are combined to the logs of one record (see `COUNTS`). A flag of the finite guard is True if it is True in
    any iteration.
    """

    def body(leaves: list[Tensor], _: Tensor) -> tuple[list[Tensor], tuple[dict[str, Logs], Tensor | None]]:
        after, _, _, logs, nonfinite = _iteration_of_leaves(run, guard, structure, leaves, borrowed)
        return after, (logs, nonfinite)

    leaves, (rows, nonfinite) = run.scan(body, leaves, torch.arange(count))
    logs = {kind: {name: row[-1].clone() for name, row in group.items()} for kind, group in rows.items()}
    for name, row in rows["train"].items():
        if name in COUNTS:
            logs["train"][name] = row.sum()
        elif name in run.algorithm.delayed:
            logs["train"][name] = row[torch.where(row.isnan(), -1, torch.arange(count)).argmax()]
    state = mapped(torch.clone, unflatten(structure, leaves))
    return leaves, state, TensorDict({}, []), logs, None if nonfinite is None else nonfinite.any(0)


def _iterations_per_call(run: Run, cfg: Config, borrowed: TensorDict) -> int:
    """Return the largest number of iterations that one call runs.

    Several iterations can be one call of a compiled run on a CPU, if an iteration is one graph, if all iterations have
    the same graph, and if the state has no buffers and no frozen parameters. The run must be compiled from its first
    iteration on, so a run that is compiled in the background has one iteration per call.
    """
    compiled = run.jit is not partial and switch_of(run.jit) is None and device_of(cfg).type == "cpu"
    same_graph = _is_one_graph(run) and run.algorithm.phase is None
    return cfg.trainer.log_freq if compiled and same_graph and borrowed.is_empty() else 1


def phase_of(run: Run, state: TensorDict) -> Hashable:
    """Compute the phase of the next iteration (see `Algorithm.phase`).

    With a replay buffer, the phase depends only on the environment steps that were added to the buffer. A run therefore
    fills the buffer before it learns, even if the run resumes without its buffer, or if the finite guard skipped the
    first iterations. If the state has several seeds, all seeds wait for the seed with the fewest steps in its buffer.

    Raises: ConfigError if the seeds are in different phases.
    """
    phase, steps = run.algorithm.phase, state["sample_step"]
    if phase is None:
        return None
    phases = {phase(step) for step in host_values(steps)}
    if len(phases) > 1:
        raise ConfigError(
            f"state: the seeds are in the phases {sorted(map(str, phases))}; give all seeds the same sample_step"
        )
    if not isinstance(run.algorithm.iterate, Interleaved) or "replay" not in state:
        return phases.pop()
    stored = state["replay", "cursor"] * (run.static.num_envs * run.static.world_size)
    return phase(min(host_values(steps * stored // decisions(state).clamp(min=1))))


def with_phase(run: Run, phase: Hashable) -> Run:
    """Return a copy of the run with its phase set to `phase`."""
    return run._replace(static=run.static._replace(phase=phase))


def _uses_tf32(cfg: Config) -> bool:
    return cfg.trainer.tf32 and device_of(cfg).type == "cuda"


def _is_one_graph(run: Run) -> bool:
    """Return True if a compiled run can compile a whole iteration as one graph."""
    return run.algorithm.as_one and run.env.is_pure and run.static.world_size == 1


def _bound(fn: Callable[..., Any], run: Run, tf32: bool, *static: Any) -> Callable[..., Any]:
    """Bind `run` and `static` to `fn`. In a compiled run whose whole iteration can be one graph, compile `fn`.

    Only the first call checks the results of the policy and the algorithm.
    """
    checked = (run.jit if _is_one_graph(run) else partial)(fn, with_contract(run), *static)
    bound = partial(fn, run, *static) if run.jit is partial else checked
    is_first = True

    def call(*state: Any) -> Any:
        nonlocal is_first
        with _matmul_precision(tf32):
            if not is_first:
                return bound(*state)
            with checking():
                out = checked(*state)
            is_first = False
            return out

    return call


def _hyperparameters(run: Run) -> TensorDict:
    """Return the hyperparameters of a new state, on the CPU."""
    with checking(), ZerosWithoutMemory():
        fields = with_contract(run).algorithm.init(run, rng.key(0))
    return TensorDict({"hyper": fields["hyper"]}, [])["hyper"]


def make_iteration(cfg: Config, watch: Watch = unwatched) -> Iteration:
    """Return one iteration as a pure function, which you can embed in other code or pass to `vmap`.

        (state) -> (state, {"collect": logs, "train": logs})

    If the environments step in Python, as Gymnasium's do, the function is not pure, and `vmap` raises an error.

    The function `watch` may replace functions of the run. For example, `ecrl.run.profiler` replaces functions to
    measure their run time. If `trainer.finite_guard` is "skip", an iteration leaves out an update with NaN or infinity.
    With other settings, the iteration raises no error, and its results may contain NaN or infinity. `train_iter` writes
    to the buffers of a state in place, but the pure iteration copies the buffers.

    Raises: ConfigError if the state has a hyperparameter that the algorithm does not have. The iteration checks the
        names of the hyperparameters in its first call, and in each call with new names. UserError if the argument of
        the iteration is not the state of a run.
    """
    keep_freed_memory()
    run, guard = build(cfg), "skip" if cfg.trainer.finite_guard == "skip" else "off"
    run, kinds, tf32 = watch(run), kinds_of(run), _uses_tf32(cfg)
    data = data_of(run, device_of(cfg))
    bound = cache(lambda phase: _bound(_iteration, with_phase(run, phase), tf32, guard))
    known, checked = _hyperparameters(run), None  # before `vmap`, inside which a network cannot be initialised

    def iteration(state: TensorDict) -> tuple[TensorDict, dict[str, Logs]]:
        nonlocal checked
        check_state_argument(state, *STATE_FIELDS)
        own, borrowed = borrowed_leaves(state, kinds)
        if (given := {*cast(TensorDict, own["hyper"]).keys()}) != checked:
            _check_hyperparameters(own, known)
            checked = given
        if not vmapped():
            check_current(run, state)
            check_data(run, state)
        iterate = bound(phase_of(run, own))
        own = with_iterations_of(cfg, own)
        own, writes, logs, nonfinite = iterate(own, Borrowed(replaced(borrowed, data)))
        if borrowed.is_empty():
            return as_state(own), logs
        skipped = torch.zeros_like(own["key"], dtype=torch.bool) if nonfinite is None else nonfinite[1].any()
        after = merge(own, committed(run, borrowed, writes, own, skipped))
        if guard == "skip":
            cut = with_gap(run, after)
            after = mapped(lambda x, y: torch.where(skipped, x, y) if x is not y else x, cut, after)
        return as_state(after), logs

    return iteration


def _is_skipped(run: Run, guard: str, nonfinite: Tensor | None, before: TensorDict) -> bool:
    """Return True if the finite guard detected NaN or infinity. If `guard` is "stop", raise NotFiniteError instead."""
    if nonfinite is None or not nonfinite[1].any():
        return False
    if guard == "stop":
        raise nonfinite_error(run, before, nonfinite)
    return True


def _warn_of_skip(nonfinite: Tensor | None, logs: Logs, step: int) -> bool:
    """Warn if the finite guard skipped an update or gradient steps. Return True if the function warned."""
    kinds = [] if nonfinite is None else [kind for kind, flag in zip(KINDS, nonfinite[1].tolist(), strict=True) if flag]
    if kinds:
        text = f"NaN or infinity in {', '.join(kinds)}: the update is left out; counted as skipped_updates"
    elif "skipped_steps" in logs and (steps := int(logs["skipped_steps"])):
        problem = "NaN or infinity in gradients or in new parameters"
        text = f"{problem}: {steps} gradient steps are left out; counted as skipped_steps"
    else:
        return False
    warnings.warn(f"after {step} env steps: {text} (this warning appears once)", stacklevel=3)
    return True


def warn_if_finished(state: TensorDict, cfg: Config) -> None:
    """Warn, at the line of the user's code, if a state has already completed all iterations of its run."""
    done, end = int(decisions(state)), total_steps(cfg, world_size())
    if done >= end:
        advice = "nothing is left to train; raise trainer.iterations"
        warnings.warn(f"the state has {done:,} steps, and the run ends at {end:,}: {advice}", stacklevel=3)


def train_iter(state: TensorDict, cfg: Config, watch: Watch = unwatched) -> Iterator[LogData]:
    """Run iterations. After each iteration, yield a record of its collection and a record of its update.

    If `trainer.log_freq` is above 1, yield the two records only after every `log_freq` iterations, after the last
    iteration of the run, and before the loop ends because of a signal or, on a single rank, an error. The records have
    the logs of the last iteration, with two exceptions. `skipped_updates` and `skipped_steps` count for all iterations
    since the previous record. Logs of optimiser groups that the last iteration did not update, such as a delayed actor,
    have the values of the last update of the group since the previous record, or NaN if there was none.

    The generator never prints, logs, evaluates or saves. You can stop with `break`, and continue with
    `train_iter(log_data["state"], cfg)`, where `log_data` is the last record. The results then equal the results of an
    uninterrupted run, bit for bit. Both records contain the `sample_step` and the `state` after the iteration. A
    yielded state is a locked copy that belongs to you. Only its buffers belong to the generator. The next iteration
    writes to the buffers in place, so using an older state with buffers then raises an error. To keep a state with
    buffers, call `state.clone()`. At the start, the generator copies the buffers of its argument `state`.

    The setting `trainer.finite_guard` determines the reaction to NaN or infinity. By default, the generator raises a
    NotFiniteError that contains the state before the iteration with NaN or infinity.

    An iteration reads hyperparameters from `state["hyper"]`. To change a hyperparameter during a run, edit a copy:
    `state = state.clone(); state["hyper", "learning_rate"] = torch.tensor(1e-4)`.

    The call warns if the state has already completed all iterations of the run.

    Raises: ConfigError if the state does not match the config; UserError if `state` is not the state of a run. The call
        raises these errors before the first iteration.
    """
    check_state_argument(state, *STATE_FIELDS)
    run = build(cfg)
    check_state(run, state, cfg)
    warn_if_finished(state, cfg)
    return iterations(watch(run), with_own_buffers(state, kinds_of(run)), cfg)


def iterations(run: Run, state: TensorDict, cfg: Config) -> Iterator[LogData]:
    """Yield the records of `train_iter` for a run and a state that have already been checked.

    The iterations write to the buffers of `state` in place. The caller must own these buffers. After the first two
    iterations of a phase, or the first two calls if a call runs several iterations, each compilation causes a warning.
    If `trainer.compile` is "background", the first iterations are eager, and the others are compiled.
    """
    keep_freed_memory()
    state, guard = with_iterations_of(cfg, reopened(run, state)), cfg.trainer.finite_guard
    size, step, end = steps_per_iteration(cfg), int(decisions(state)), total_steps(cfg, run.static.world_size)
    settled, graph, recorded = step, (None, 0), int(state["sample_step"])
    per_record, sample_step, logs, combined = steps_per_record(cfg), recorded, {}, Logs()
    own, borrowed = borrowed_leaves(state, kinds_of(run))
    data = data_of(run, device_of(cfg))
    given, per_call = Borrowed(replaced(borrowed, data)), _iterations_per_call(run, cfg, borrowed)
    leaves, structure = flatten(own.clone())  # passing a list of tensors is faster than passing a TensorDict
    tf32, compilations, warned = _uses_tf32(cfg), compilations_of(run.jit), False

    @cache
    def bound(phase: Hashable, count: int) -> Callable[..., Any]:
        fn, static = (_iteration_of_leaves, ()) if count == 1 else (_iterations_of_leaves, (count,))
        return _bound(fn, with_phase(run, phase), tf32, guard, structure, *static)

    def records() -> list[LogData]:
        taken = sample_step - recorded
        record = LogData(
            log_type="collect",
            sample_step=sample_step,
            logs=logs["collect"],
            state=as_state(state).lock_(),
            taken=taken,
        )
        return [record, {**record, "log_type": "train", "logs": logs["train"] | combined}]

    with compiling_in_background(run, cfg, step // size) as switched:
        while step < end:
            known = len(compilations)
            if switched(step // size):
                graph = (None, 0)  # the next iteration compiles, or loads the compiled code
            count = min(per_call, math.ceil(min(per_record - step % per_record, end - step) / size))
            # each phase and each number of iterations has its own graph
            if (now := (phase_of(run, state), count)) != graph:
                graph, settled = now, step + 2 * size * count
            try:
                with interruptible(), leaving_a_thread(run):
                    after, state_after, writes, logs_after, nonfinite = bound(*graph)(leaves, given)
                    if count > 1 and guard == "stop" and cast(Tensor, nonfinite)[1].any():
                        per_call = 1  # repeat the iterations one at a time, to find the one with NaN or infinity
                        continue
                    skipped = _is_skipped(with_phase(run, graph[0]), guard, nonfinite, replaced(state, data))
            except BaseException:  # NaN, an interruption, or an error of the environment
                if sample_step > recorded and run.static.world_size == 1:  # keep the results of the iterations before
                    yield from records()
                raise
            leaves, state, logs = after, state_after, logs_after
            mark_written(run, borrowed, state)
            if not skipped:
                commit(borrowed, writes)
            elif not borrowed.is_empty():
                overwrite(borrowed, borrowed_leaves(with_gap(run, merge(state, borrowed)), kinds_of(run))[1])
            if guard == "skip" and not warned:
                warned = _warn_of_skip(nonfinite, logs["train"], sample_step)
            state = merge(state, borrowed)
            step += size * count
            if len(compilations) > known and step > settled:
                again = "; ".join(one.text for one in compilations[known:])
                warnings.warn(f"compiled again at step {step}: {again}", RuntimeWarning, stacklevel=2)
            sample_step = step if "decision_step" not in state else int(state["sample_step"])
            combined = _over_iterations(combined, logs["train"], run.algorithm.delayed)
            stopping = per_record > size and any_rank(asked() is not None)
            if step >= end or crossed(step, size * count, per_record) or stopping:
                yield from records()
                recorded, combined = sample_step, {}


def can_vmap(run: Run, state: TensorDict) -> bool:
    """Return True if `iterations_of_members` supports the run.

    The environments must not step in Python, and the policy must not draw its own random numbers. The state must have
    no buffers and no frozen parameters, because vmap would copy them in every iteration. The run must have one process
    and no demonstrations.
    """
    is_pure = run.env.is_pure and run.policy.compiles
    borrowed = borrowed_leaves(state, kinds_of(run))[1]
    return is_pure and run.static.world_size == 1 and borrowed.is_empty() and run.algorithm.data is None


def iterations_of_members(
    run: Run, states: Sequence[TensorDict], cfg: Config, members: Sequence[str], *, runs_per_call: int, threads: int
) -> Iterator[list[list[LogData]]]:
    """Run the iterations of several runs. Each call of an iteration handles one run, or several runs under vmap.

    A run is called a member. The iterator yields the two records of `train_iter` for every member, after the same
    iterations as `train_iter`. If `trainer.finite_guard` is "stop", a member with NaN or infinity has no further
    records, and the other members continue.

    Args:
        run: the `Run` that all members share. With several members in one call, `can_vmap` must be True for it.
        states: states with equal numbers of environment steps, but any random keys and hyperparameters.
        cfg: config of one of the members.
        members: names of the members, for warnings.
        runs_per_call: largest number of members in one call. A call of a single member needs no vmap.
        threads: number of calls that run at the same time. If there are several, torch uses one thread in each call,
            and also in the main thread until the iterator is closed.
    """
    keep_freed_memory()
    guard, size = cfg.trainer.finite_guard, steps_per_iteration(cfg)
    step = first = int(decisions(states[0]))
    end = total_steps(cfg, 1)
    recorded, running, warned = [int(state["sample_step"]) for state in states], [True] * len(states), False
    records, combined = [[] for _ in states], [Logs() for _ in states]  # since the last yield
    batches = _batches([with_iterations_of(cfg, state) for state in states], runs_per_call, threads)
    with _several_threads(threads) as call_each, ExitStack() as after_compiling:
        iterate = _batch_iteration(run, _uses_tf32(cfg), guard)
        while step < end and any(running):
            try:
                with interruptible():
                    # the first iteration compiles, in the main thread, so that Ctrl-C can interrupt it
                    results = [iterate(batch) for batch in batches] if step == first else call_each(iterate, batches)
            except BaseException:
                if any(records):  # keep the results of the iterations before
                    yield records
                raise
            batches = [batch for batch, *_ in results]
            step += size
            of_members = (one for result in results for one in _members_of(*result))
            for index, (state, own, nonfinite) in enumerate(islice(of_members, len(states))):
                if guard == "stop" and running[index]:
                    running[index] = not _warn_of_stop(nonfinite, members[index], step)
                if not running[index]:
                    continue
                if guard == "skip" and not warned:
                    warned = _warn_of_skip(nonfinite, own["train"], step)
                combined[index] = _over_iterations(combined[index], own["train"], run.algorithm.delayed)
                now = int(state["sample_step"])
                record = LogData(
                    log_type="collect",
                    sample_step=now,
                    logs=own["collect"],
                    state=as_state(state).lock_(),
                    taken=now - recorded[index],
                )
                records[index] = [record, {**record, "log_type": "train", "logs": own["train"] | combined[index]}]
            if step >= end or crossed(step, size, steps_per_record(cfg)) or asked() or not any(running):
                yield records
                recorded = [one[0]["sample_step"] if one else last for one, last in zip(records, recorded, strict=True)]
                records, combined = [[] for _ in states], [Logs() for _ in states]
            if step == first + size:
                after_compiling.enter_context(_without_scans_of_old_objects())


@contextmanager
def _without_scans_of_old_objects() -> Iterator[None]:
    """Inside this context, let the garbage collector skip all objects that exist when the context begins.

    The states of many members make the collector scan all objects every few iterations. Most of these objects belong to
    torch's compiler and are never freed, so the scans only cost time.
    """
    if gc.get_freeze_count():  # the program has frozen its own objects, which `gc.unfreeze` would also unfreeze
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_Batch = TensorDict | tuple[TensorDict]
"""Stacked states of several members, or the state of one member."""


def _batches(states: Sequence[TensorDict], most: int, threads: int) -> list[_Batch]:
    """Divide states into batches of equal size, of at most `most` states, for `threads` threads.

    The last batch may end with copies of the last state, because a batch of another size would need another
    compilation.
    """
    count = threads * math.ceil(len(states) / most / threads)
    size = math.ceil(len(states) / count)
    if size == 1:
        return [(state,) for state in states]
    padded = [*states, *[states[-1]] * (-len(states) % size)]
    parts = [padded[start : start + size] for start in range(0, len(padded), size)]
    return [cast(TensorDict, torch.stack(part)) for part in parts]  # pyright: ignore


def _batch_iteration(run: Run, tf32: bool, guard: str) -> Callable[[_Batch], tuple[_Batch, dict[str, Logs], Tensor]]:
    """Return a function that runs one iteration of a batch, and returns the states, logs and finite-guard flags."""
    empty = Borrowed(TensorDict({}, []))

    def iterate_member(iterate: Callable[..., Any], state: TensorDict) -> tuple[TensorDict, dict[str, Logs], Tensor]:
        state, _, logs, nonfinite = iterate(state, empty)
        return state, logs, torch.zeros(2, len(KINDS), dtype=torch.bool) if nonfinite is None else nonfinite

    @cache
    def bound(phase: Hashable) -> Callable[[TensorDict], tuple[TensorDict, dict[str, Logs], Tensor]]:
        return partial(iterate_member, _bound(_iteration, with_phase(run, phase), tf32, guard))

    def iterate(batch: _Batch) -> tuple[_Batch, dict[str, Logs], Tensor]:
        if isinstance(batch, tuple):
            state, logs, nonfinite = bound(phase_of(run, batch[0]))(batch[0])
            return (state,), logs, nonfinite
        return torch.func.vmap(bound(phase_of(run, batch)))(batch)

    return iterate


def _members_of(
    batch: _Batch, logs: dict[str, Logs], nonfinite: Tensor
) -> Iterator[tuple[TensorDict, dict[str, Logs], Tensor]]:
    """Yield the results of each member of a batch."""
    if isinstance(batch, tuple):
        yield batch[0], logs, nonfinite
        return
    rows = {kind: {name: log.unbind() for name, log in group.items()} for kind, group in logs.items()}
    for index, state in enumerate(batch.unbind(0)):
        yield state, {k: {n: log[index] for n, log in group.items()} for k, group in rows.items()}, nonfinite[index]


@contextmanager
def _several_threads(threads: int) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]]:
    """Return a function `call_each(fn, args)`, which returns the list of `fn(arg)` for each `arg` in `args`.

    The calls of `fn` run in `threads` Python threads at the same time. If there are several, torch uses one thread in
    each of them, and also in the current thread inside this context.
    """
    if threads == 1:
        yield lambda fn, args: [fn(arg) for arg in args]
        return
    with one_torch_thread():
        pool = ThreadPoolExecutor(threads, "member", torch.set_num_threads, (1,))
        try:
            yield lambda fn, args: [*pool.map(fn, args)]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # do not wait for the end of an interrupted iteration


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch use one thread in the current Python thread, inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _warn_of_stop(nonfinite: Tensor, member: str, step: int) -> bool:
    """Warn if the finite guard detected NaN or infinity in a member's iteration. Return True if the function warned."""
    kinds = [kind for kind, flag in zip(KINDS, nonfinite[1].tolist(), strict=True) if flag]
    if kinds:
        text = "this run stops with the state before the iteration, and the others continue"
        warnings.warn(f"{member}: NaN or infinity in {', '.join(kinds)} at {step:,} env steps; {text}", stacklevel=3)
    return bool(kinds)
