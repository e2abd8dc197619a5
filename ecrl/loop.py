"""The training loop: an iteration is one function `(state) -> (state, logs)`, and a generator runs it again and again.

The loop owns control flow only. Logging, checkpoints, evaluation and progress consume what it yields.
"""

import warnings
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl import rng
from ecrl.algorithms import Parts, make_algorithm
from ecrl.algorithms.core import env_index
from ecrl.compile import Form, choose_form
from ecrl.config import Config, total_steps
from ecrl.distributed import world_size
from ecrl.envs import auto_reset, make_env
from ecrl.errors import ConfigError
from ecrl.kernels import episode_init, masked_mean
from ecrl.policies import make_policy
from ecrl.types import LogData, Logs

WINDOW = 100
"""Episodes in the running averages of return and length."""

Iteration = Callable[[TensorDict], tuple[TensorDict, dict[str, Logs]]]


def device_of(cfg: Config) -> torch.device:
    """The device of a run; "auto" is cuda where there is one. Raises ConfigError naming the devices there are."""
    name, count = cfg.trainer.device, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    have = ["cpu", *(f"cuda:{i}" for i in range(count))]
    if name not in have and not (name == "cuda" and count):
        raise ConfigError(f"trainer.device: {name} is not available; available: {', '.join(have)} (or auto)")
    return torch.device(name)


def form_of(cfg: Config) -> Form:
    """Compiled or eager, and why."""
    return choose_form(cfg.trainer.compile, device_of(cfg).type)


def make_parts(cfg: Config) -> Parts:
    """Environment (with auto-reset), policy, config and form of a run."""
    env = auto_reset(make_env(cfg.env))
    policy = make_policy(cfg.policy, env.observation_space, env.action_space)
    return Parts(env, policy, cfg, form_of(cfg).jit)


def init_state(cfg: Config, key: Tensor | None = None) -> TensorDict:
    """The state before the first step; `key` replaces the one made from `trainer.seed`.

    >>> from ecrl.config import load_config
    >>> state = init_state(load_config("configs/cartpole_ppo.json"))
    >>> sorted(state.keys())
    ['env', 'episode', 'hyper', 'key', 'opt', 'params', 'sample_step', 'update_step']
    """
    parts, device, num_envs = make_parts(cfg), device_of(cfg), cfg.trainer.num_envs
    key = rng.key(cfg.trainer.seed) if key is None else key
    key = key.to(device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    state = {
        **make_algorithm(cfg.algorithm).init(parts, key),
        "env": parts.env.reset(rng.stream(key, rng.START, env_index(num_envs, device), 0)),
        "episode": episode_init(num_envs, WINDOW, device),
        "key": key.clone(),
        "sample_step": zero,
        "update_step": zero.clone(),
    }
    return TensorDict(state, []).lock_()


def check_state(state: TensorDict, cfg: Config) -> None:
    """Refuse a state that another config made, naming the first field that differs; warn of hyperparameters that do.

    The numbers of the algorithm are read from `state["hyper"]`, so that they can change during a run.
    """
    if state["key"].device != device_of(cfg):
        raise ConfigError(f"state: is on {state['key'].device}, the config says {device_of(cfg)}; use state.to(...)")
    expected, given = (dict(td.flatten_keys("/").items()) for td in (init_state(cfg), state))
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


def steps_per_iteration(cfg: Config) -> int:
    """Environment steps that one iteration takes, over all ranks."""
    return cfg.trainer.buffer_size * cfg.trainer.num_envs * world_size()


def _episode_logs(episode: TensorDict) -> Logs:
    """Means over the last finished episodes, NaN before the first."""
    finished = episode["finished"]
    none = torch.full((), torch.nan, device=finished.device)
    return {
        f"episode_{name}_avg_{WINDOW}": torch.where(finished.sum() > 0, masked_mean(episode[field], finished), none)
        for name, field in (("reward", "finished_return"), ("length", "finished_length"))
    }


def make_iteration(cfg: Config) -> Iteration:
    """One iteration, `(state) -> (state, {"collect": logs, "train": logs})`: pure, to embed or vmap."""
    parts, algorithm = make_parts(cfg), make_algorithm(cfg.algorithm)

    def iteration(state: TensorDict) -> tuple[TensorDict, dict[str, Logs]]:
        state, batch = algorithm.collect(parts, state.copy())
        state, train_logs = algorithm.update(parts, state, batch)
        logs = {"collect": _episode_logs(state["episode"]), "train": train_logs}
        counters = {
            "sample_step": state["sample_step"] + steps_per_iteration(cfg),
            "update_step": state["update_step"] + 1,
        }
        return state.copy().update(counters), logs

    return iteration


def train_iter(state: TensorDict, cfg: Config) -> Iterator[LogData]:
    """Run one iteration at a time; after each, yield what it collected and what it learned.

    The generator owns control flow only: it never prints, logs, evaluates or saves. Stop with `break`; continue later
    with `train_iter(log_data["state"], cfg)`. Both give bit for bit what an uninterrupted run gives. Both records of an
    iteration carry the step and the state after it; the state is a locked copy of the caller's own.

    Numbers of the algorithm are read from `state["hyper"]`. To change one in mid-run:
    `state = state.clone(); state["hyper", "learning_rate"] = torch.tensor(1e-4)`.
    """
    check_state(state, cfg)
    iteration, step, end = make_iteration(cfg), int(state["sample_step"]), total_steps(cfg, world_size())
    state = state.clone()
    while step < end:
        state, logs = iteration(state)
        step += steps_per_iteration(cfg)
        given = state.clone().lock_()
        yield LogData(log_type="collect", sample_step=step, logs=logs["collect"], state=given)
        yield LogData(log_type="train", sample_step=step, logs=logs["train"], state=given)
