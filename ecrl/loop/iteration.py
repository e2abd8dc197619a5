"""The training loop: an iteration is one function `(state) -> (state, logs)`, and a generator runs it again and again.

The loop owns control flow only. Logging, checkpoints, evaluation and progress consume what it yields.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms import Algorithm, Parts, make_algorithm
from ecrl.algorithms.core import start_keys, steps_taken
from ecrl.compile.jit import COMPILED
from ecrl.config import Config, total_steps
from ecrl.distributed import world_size
from ecrl.errors import ConfigError
from ecrl.kernels import episode_init, restarted
from ecrl.loop.build import check_envs, check_rollout, device_of, form_of, make_parts, shaping
from ecrl.loop.finite_guard import KEYS, WHAT, flags, left_out
from ecrl.loop.metrics import WINDOW, collect_logs, counted_steps, over_ranks
from ecrl.loop.nonfinite_report import careful, refusal
from ecrl.loop.signals import interruptible
from ecrl.pytree import flatten, mapped, names, replaced, unflatten
from ecrl.types import LogData, Logs

Iteration = Callable[[TensorDict], tuple[TensorDict, dict[str, Logs]]]
Watch = Callable[[Parts, Algorithm], tuple[Parts, Algorithm]]


def unwatched(parts: Parts, algorithm: Algorithm) -> tuple[Parts, Algorithm]:
    """The default `watch`: both as they are."""
    return parts, algorithm


@contextmanager
def _matrices(tf32: bool) -> Iterator[None]:
    """Torch's own switch for TF32, put back afterwards: it is the process's, not the run's."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def init_state(cfg: Config, key: Tensor | None = None) -> TensorDict:
    """The state before the first step; `key` replaces the one made from `trainer.seed`.

    >>> from ecrl.config import load_config
    >>> state = init_state(load_config("configs/cartpole_ppo.json"))
    >>> sorted(state.keys())
    ['env', 'episode', 'hyper', 'key', 'norm', 'opt', 'params', 'sample_step', 'update_step']
    """
    parts, algorithm = make_parts(cfg), make_algorithm(cfg.algorithm)
    check_envs(cfg, parts.env, cfg.trainer.num_envs, "trainer.num_envs")
    key = rng.key(cfg.trainer.seed) if key is None else key
    start = start_keys(key.to(device_of(cfg)), cfg.trainer.num_envs, 0, algorithm.group_size)
    state = _without_env(parts, algorithm, key.to(device_of(cfg)))  # before the envs open: this may refuse the config
    return state.set("env", parts.env.reset(start)).lock_()


def _without_env(parts: Parts, algorithm: Algorithm, key: Tensor) -> TensorDict:
    """The first state but for its environments."""
    made, policy, zero = algorithm.init(parts, key), parts.policy, torch.zeros_like(key)
    norm = made.pop("norm", TensorDict({}, []))
    if policy.norm_init is not None:
        norm = norm.copy().set("obs", policy.norm_init(key.device))
    episode = episode_init(parts.cfg.trainer.num_envs, WINDOW, key.device)
    counters = {"sample_step": zero, "update_step": zero.clone()}
    return TensorDict({**made, "norm": norm, "episode": episode, "key": key.clone(), **counters}, [])


def expected_state(cfg: Config, given: TensorDict) -> TensorDict:
    """A state as the config makes it, to compare `given` with; environments on the host are not opened for that."""
    parts = make_parts(cfg)
    if parts.env.is_pure:
        return init_state(cfg)
    if "token" not in given["env"]:
        raise ConfigError(f"state: its environments are not those of {cfg.env.name}; use the config of its run")
    key = rng.key(cfg.trainer.seed, device_of(cfg))
    return _without_env(parts, make_algorithm(cfg.algorithm), key).set("env", given["env"]).lock_()


def reopened(state: TensorDict, cfg: Config) -> TensorDict:
    """The state with its host environments started afresh if they do not stand where it says, which is told.

    They are gone in another process, and ahead where an iteration was cut short or the state is not the newest.
    """
    parts, env = make_parts(cfg), cast(TensorDict, state["env"])
    if parts.env.is_current(env):
        return state
    warnings.warn("the environments' own state could not be restored: their episodes start afresh", stacklevel=3)
    parts.env.close(env)
    group = make_algorithm(cfg.algorithm).group_size
    step = steps_taken(parts, state)
    fresh = parts.env.reset(start_keys(state["key"], cfg.trainer.num_envs, step, group))
    state = state.copy().update({"env": fresh, "episode": restarted(cast(TensorDict, state["episode"]))})
    if "reward" in state["norm"]:  # the running returns are of the episodes that are lost
        norm = cast(TensorDict, state["norm"]).clone()
        norm["reward", "running"] = torch.zeros_like(norm["reward", "running"])
        state.set("norm", norm)
    return state


def close(state: TensorDict, cfg: Config) -> None:
    """Release what a state holds outside its tensors: Gymnasium's environments and their workers. Others hold nothing.

    They are also released when the process ends.
    """
    make_parts(cfg).env.close(cast(TensorDict, state["env"]))


def check_state(state: TensorDict, cfg: Config) -> None:
    """Refuse a state that another config made, naming the first field that differs; warn of hyperparameters that do.

    The numbers of the algorithm are read from `state["hyper"]`, so that they can change during a run.
    """
    made = expected_state(cfg, state)
    if state["key"].device != made["key"].device:  # which has a number where the config's may have none
        raise ConfigError(f"state: is on {state['key'].device}, the config says {device_of(cfg)}; use state.to(...)")
    expected, given = (dict(td.flatten_keys("/").items()) for td in (made, state))
    for name in sorted(expected.keys() | given.keys()):
        shapes = [list(td[name].shape) if name in td else "absent" for td in (given, expected)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                f"state: {name} is {shapes[0]}, the config makes it {shapes[1]}; use the config of its run"
            )
    numbers = [name for name in expected if name.startswith("hyper/") and not torch.equal(given[name], expected[name])]
    if numbers:
        both = ", ".join(f"{n.removeprefix('hyper/')} {given[n]:.6g} (config {expected[n]:.6g})" for n in numbers)
        warnings.warn(f"the state's hyperparameters are used, not the config's: {both}", stacklevel=3)


def check_config(cfg: Config, world_size: int) -> list[str]:
    """What a config would run, in lines for people; raises ConfigError where its parts do not fit together."""
    check_rollout(cfg)
    parts, form = make_parts(cfg), form_of(cfg)
    key = rng.key(cfg.trainer.seed, device_of(cfg))
    state = _without_env(parts, make_algorithm(cfg.algorithm), key)
    if parts.env.is_pure:
        parts.env.reset(key.unsqueeze(0))  # events are checked against its fields there
    weights = sum(leaf.numel() for leaf in cast(TensorDict, state["params"]).values(True, True))  # pyright: ignore
    return [
        f"task     {cfg.env.name}, {cfg.policy.name}, {cfg.algorithm.name}, seed {cfg.trainer.seed}",
        f"spaces   observations {parts.env.observation_space}, actions {parts.env.action_space}",
        f"policy   {weights:,} parameters",
        f"device   {device_of(cfg)}, {form.name} ({form.reason}), world size {world_size}",
        f"budget   {total_steps(cfg, world_size):,} env steps, {cfg.trainer.iterations} iterations",
    ]


def steps_per_iteration(cfg: Config) -> int:
    """Environment steps that one iteration takes, over all ranks."""
    return cfg.trainer.buffer_size * cfg.trainer.num_envs * world_size()


def _statistics(norm_update: Callable[..., TensorDict], norm: TensorDict, batch: TensorDict) -> TensorDict:
    """Observation statistics with those of the batch, which the policy saw raw, frozen until here."""
    moved = norm_update(cast(TensorDict, norm["obs"]), batch["obs"][:, :-1], counted_steps(batch))
    return norm.copy().set("obs", moved)


def _iteration(
    algorithm: Algorithm, parts: Parts, size: int, guard: str, start: TensorDict
) -> tuple[TensorDict, dict[str, Logs], Tensor | None]:
    """Collect, update, and what the loop itself keeps; `size` env steps. The flags of the guard unless it is off."""
    stops_here = guard == "stop" and not parts.env.is_pure  # as its steps cannot be taken again
    collected, batch = algorithm.collect(careful(parts, start) if stops_here else parts, start)
    state, train_logs = algorithm.update(parts, collected, batch)
    norm, episode = cast(TensorDict, state["norm"]), cast(TensorDict, state["episode"])
    if parts.policy.norm_update is not None:
        seen = batch.select("obs", "done", "mask", strict=False)
        norm = parts.jit(_statistics, parts.policy.norm_update)(norm, seen)
    state = replaced(state, {"norm": norm, "update_step": state["update_step"] + 1})
    odd = None
    if guard != "off":
        seen = batch.select(*KEYS, "mask", strict=False)
        odd = flags(seen, train_logs, cast(TensorDict, state["params"]))
        if stops_here and odd[1].any():
            raise refusal(algorithm, parts, start, odd, (collected, batch))
    if guard == "skip" and odd is not None:
        state = left_out(odd[1], start, collected, state)
        train_logs = train_logs | {"skipped_updates": odd[1].any().to(torch.float32)}
    state = replaced(state, {"sample_step": state["sample_step"] + size})
    return state, {"collect": over_ranks(collect_logs(episode, batch)), "train": over_ranks(train_logs)}, odd


def _iteration_of_leaves(
    algorithm: Algorithm, parts: Parts, size: int, guard: str, structure: Hashable, leaves: list[Tensor]
) -> tuple[list[Tensor], TensorDict, dict[str, Logs], Tensor | None]:
    """`_iteration` on the tensors of a state, and its state once more, in memory of its own."""
    state, logs, odd = _iteration(algorithm, parts, size, guard, unflatten(structure, leaves))
    after, made = flatten(state)
    if made != structure:
        fields = ", ".join(sorted({*names(made)} ^ {*names(structure)})) or "the batch size of one"
        raise ValueError(f"an iteration may change no fields of the state but their values; it changed {fields}")
    return after, mapped(torch.clone, state), logs, odd


def _bound(fn: Callable[..., Any], cfg: Config, watch: Watch, *static: Any) -> Callable[..., Any]:
    """`_iteration` or `_iteration_of_leaves` for a config, one graph where the algorithm can be one."""
    parts, algorithm = watch(make_parts(cfg), make_algorithm(cfg.algorithm))
    size, tf32 = steps_per_iteration(cfg), cfg.trainer.tf32 and device_of(cfg).type == "cuda"
    if algorithm.as_one and parts.env.is_pure and world_size() == 1:
        run = parts.jit(fn, algorithm, parts._replace(cfg=shaping(cfg)), size, *static)
    else:
        run = partial(fn, algorithm, parts, size, *static)

    def call(state: Any) -> Any:
        with _matrices(tf32):
            return run(state)

    return call


def make_iteration(cfg: Config, watch: Watch = unwatched) -> Iteration:
    """One iteration, `(state) -> (state, {"collect": logs, "train": logs})`: pure, to embed or vmap.

    `watch` may put others in place of its functions, such as `ecrl.run.profiler`'s, which take the time. With
    `trainer.finite_guard` "skip" updates that are not finite are left out; it never stops: NaN is in what it gives.
    """
    run = _bound(_iteration, cfg, watch, "skip" if cfg.trainer.finite_guard == "skip" else "off")

    def iteration(state: TensorDict) -> tuple[TensorDict, dict[str, Logs]]:
        state, logs, _ = run(state)
        return state, logs

    return iteration


def _judge(odd: Tensor, cfg: Config, before: TensorDict, told: bool) -> bool:
    """Raise where the guard stops; where it skips, say the first time that an update is left out. Whether it was said.

    Raises: NotFiniteError.
    """
    if not odd[1].any():
        return told
    if cfg.trainer.finite_guard == "stop":
        raise refusal(make_algorithm(cfg.algorithm), make_parts(cfg), before, odd)
    if not told:
        met = ", ".join(what for what, is_odd in zip(WHAT, odd[1].tolist(), strict=True) if is_odd)
        after = f"after {int(before['sample_step'])} env steps"
        text = f"{after}: NaN or infinity in {met}: the update is left out; counted as skipped_updates, said once"
        warnings.warn(text, stacklevel=3)
    return True


def train_iter(state: TensorDict, cfg: Config, watch: Watch = unwatched) -> Iterator[LogData]:
    """Run one iteration at a time; after each, yield what it collected and what it learned.

    The generator owns control flow only: it never prints, logs, evaluates or saves. Stop with `break`; continue later
    with `train_iter(log_data["state"], cfg)`. Both give bit for bit what an uninterrupted run gives. Both records of an
    iteration carry the step and the state after it; the state is a locked copy of the caller's own.

    Where something is not finite, `trainer.finite_guard` says what happens: by default NotFiniteError, before that
    iteration is yielded, with the state before it.

    Numbers of the algorithm are read from `state["hyper"]`. To change one in mid-run:
    `state = state.clone(); state["hyper", "learning_rate"] = torch.tensor(1e-4)`.

    Raises: ConfigError at once, before the first iteration, for a state that another config made.
    """
    check_state(state, cfg)
    return _iterations(state, cfg, watch)


def _iterations(state: TensorDict, cfg: Config, watch: Watch) -> Iterator[LogData]:
    state = reopened(state, cfg)
    step, end = int(state["sample_step"]), total_steps(cfg, world_size())
    settled = step + 2 * steps_per_iteration(cfg)
    leaves, structure = flatten(state.clone())  # a list of tensors is taken apart and put together fastest
    iteration = _bound(_iteration_of_leaves, cfg, watch, cfg.trainer.finite_guard, structure)
    told = False
    while step < end:
        known, before = len(COMPILED), state
        with interruptible():
            leaves, state, logs, odd = iteration(leaves)
            if odd is not None:
                told = _judge(odd, cfg, before, told)
        step += steps_per_iteration(cfg)
        if len(COMPILED) > known and step > settled:
            warnings.warn(f"compiled again at step {step}: {'; '.join(COMPILED[known:])}", RuntimeWarning, stacklevel=2)
        state.lock_()
        logs = mapped(torch.clone, logs)  # the learning rate may be the state's own
        yield LogData(log_type="collect", sample_step=step, logs=logs["collect"], state=state)
        yield LogData(log_type="train", sample_step=step, logs=logs["train"], state=state)
