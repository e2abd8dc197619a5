"""Population-based training of several runs, as a function over their stacked states."""

from collections.abc import Mapping
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl import rng
from ecrl.errors import ConfigError, UserError
from ecrl.kernels import perturbed, truncation_parents
from ecrl.pytree import replaced
from ecrl.registry import did_you_mean


def exploit_and_explore(
    states: TensorDict,
    fitness: Tensor,
    key: Tensor,
    *,
    count: int,
    factor: float,
    ranges: Mapping[str, tuple[float, float]],
) -> tuple[TensorDict, Tensor]:
    """Replace the worst runs by copies of the best runs, with changed hyperparameters.

        parent = truncation_parents(fitness, ...)
        states = states[parent], except that each run keeps its own random key
        hyper  = perturbed(hyper, parent[i] != i, ...)        for each hyperparameter in `ranges`

    Call this function between iterations of `torch.func.vmap(make_iteration(cfg))`. The state of a copy includes the
    networks, the optimiser's state, the statistics and the environments of its parent.

    Args:
        states: stacked states of M runs.
        fitness: `[M]` float, such as the mean return of each run. Larger is better, and NaN is the worst.
        key: random key, 0-d int64. Use a new key in each call.
        count: number of runs that are replaced, at most M / 2.
        factor: number above 0. In a copy, each hyperparameter in `ranges` is multiplied or divided by `factor`, at
            random.
        ranges: lower and upper bounds of each hyperparameter that changes, by its name in `state["hyper"]`.

    Returns: the new states, and the index of each run's parent, int64 `[M]`.
    Raises: ConfigError for a hyperparameter that the states do not have, for `gamma` if actions are chunks, or for a
        factor of at most 0; UserError if `states` does not hold stacked states; ValueError if `count` is out of range
        or `fitness` has another shape.
    Source: Jaderberg et al. 2017, arXiv:1711.09846.

    >>> from ecrl import init_state, load_config
    >>> cfg = load_config("cartpole_ppo", {"trainer.num_envs": 8})
    >>> states = torch.stack([init_state(cfg, rng.key(seed)) for seed in range(2)])
    >>> ranges = {"learning_rate": (1e-5, 1e-2)}
    >>> after, parent = exploit_and_explore(
    ...     states, torch.tensor([1.0, 2.0]), rng.key(0), count=1, factor=2.0, ranges=ranges)
    >>> parent.tolist(), after["hyper", "learning_rate"].tolist() != states["hyper", "learning_rate"].tolist()
    ([1, 1], True)
    """
    if not isinstance(states, TensorDictBase) or "hyper" not in states:
        given = type(states).__name__
        raise UserError(f"states: got {given}, expected the stacked states of the runs; stack them with torch.stack")
    if fitness.shape != states.batch_size or fitness.ndim != 1:
        shapes = f"{list(fitness.shape)}, but states have the batch shape {list(states.batch_size)}"
        raise ValueError(f"fitness has shape {shapes}; pass one number for each of the stacked states")
    known = [str(name) for name, value in cast(TensorDict, states["hyper"]).items() if isinstance(value, Tensor)]
    for name in ranges:
        if name not in known:
            raise ConfigError(f"ranges: {name}: no hyperparameter of this name; {did_you_mean(name, known)}")
    if "gamma" in ranges and "decision_step" in states:
        raise ConfigError(
            "ranges: gamma: steps inside an action chunk are discounted with the config's gamma, so it cannot change; "
            "leave gamma out"
        )
    if not factor > 0.0:
        raise ConfigError(f"factor: {factor}; expected a number above 0")
    keys = rng.split(key, 1 + len(ranges))
    parent = truncation_parents(fitness, rng.uniform(keys[0], fitness.shape), count=count)
    is_new = parent != torch.arange(len(parent), device=parent.device)
    copies = cast(TensorDict, states[parent])
    new_hyper = cast(TensorDict, copies["hyper"]).copy()
    for one_key, (name, (low, high)) in zip(keys[1:], ranges.items(), strict=True):
        uniform = rng.uniform(one_key, fitness.shape)
        new_hyper[name] = perturbed(new_hyper[name], is_new, uniform, factor=factor, low=low, high=high)
    return replaced(copies, {"key": states["key"], "hyper": new_hyper}), parent
