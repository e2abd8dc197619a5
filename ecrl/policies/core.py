"""Define `Policy`, a frozen record of pure functions. The parameters of a policy are in a TensorDict."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.config import Config
from ecrl.errors import ConfigError
from ecrl.pytree import replaced
from ecrl.spaces import Box, Dict, Discrete, MultiDiscrete, Space, element_dtype, element_shape, flat_dim, is_image


class ReturnDistribution(NamedTuple):
    """Type and atoms of the return distributions that a Q-function predicts.

    A distribution is a vector of K = `atoms` numbers. In a categorical distribution, as in C51, these numbers are the
    logits of K fixed returns, which are evenly spaced from `low` to `high`. In a quantile distribution, as in QR-DQN,
    number k is the quantile of the return for the probability (k + 1/2) / K, where k counts from 0, and `low` and
    `high` are not used.
    """

    name: Literal["categorical", "quantile"]
    atoms: int
    low: float = 0.0
    high: float = 0.0

    def support(self, like: Tensor) -> Tensor:
        """Return the fixed returns `[K]` of a categorical distribution, in the dtype and on the device of `like`.

        >>> ReturnDistribution("categorical", 3, -1.0, 1.0).support(torch.zeros(()))
        tensor([-1.,  0.,  1.])
        """
        return torch.linspace(self.low, self.high, self.atoms, dtype=like.dtype, device=like.device)

    def mean(self, atoms: Tensor) -> Tensor:
        """Return the expected return `[*B]` of distributions `[*B, K]`.

            sum_k(softmax(atoms)[k] * support[k])        for a categorical distribution
            mean_k(atoms[k])                             for a quantile distribution

        >>> ReturnDistribution("categorical", 3, -1.0, 1.0).mean(torch.tensor([0.0, 0.0, 9.0])) > 0.99
        tensor(True)
        """
        if self.name == "quantile":
            return atoms.mean(-1)
        return (atoms.softmax(-1) * self.support(atoms)).sum(-1)


def no_carry(params: TensorDict, num_envs: int) -> TensorDict:
    """Return an empty TensorDict: by default, a policy has no memory and no exploration state that restarts."""
    return TensorDict({}, [])


@dataclass(frozen=True)
class Policy:
    """Record of the pure functions of a policy.

    `carry` is the policy's memory. Feed-forward policies have an empty TensorDict as memory. `steps` is a TensorDict
    with obs, action, done and every other field that `act` returned. The steps of demonstrations lack these other
    fields. If actions are chunks (`ecrl.envs.chunked`), `steps` also has `executed`, which counts how many steps of
    each chunk the environment executed. All values in `steps` must be finite.

    If an action consists of several tokens, such as one token per number, `sample_log_prob` and the results of
    `evaluate` may have further axes, with one entry per token. The log-probability of an action is then the sum of the
    log-probabilities of its tokens. If only some tokens count in this sum, `act` also returns the bool field
    `token_mask`, which has the shape of `sample_log_prob` and is True for the tokens that count.

    If actions are chunks and there are two or more token axes, the first token axis is the axis of the steps of a
    chunk. The tokens of steps that were not executed then do not count. If the steps of a chunk depend on each other's
    noise, use one token axis, so that the tokens of all steps count.

    Most policies have the unit "step": `evaluate` and `value` process every step independently and accept any leading
    axes. A policy with memory has the unit "sequence". The `steps` of a sequence policy have shape `[n, S]`, with time
    as the second axis. `carry`, of shape `[n]`, is the memory before the first step. `evaluate` and `value` run the
    recurrence, which restarts after each `done` step, as in the collector. The `value` of a sequence policy takes other
    arguments and returns two results:

        value(params, carry, steps, final) -> (V [n, S], V_final [n, F])

    V_final has the values of the states in which episodes were truncated. These states are the entries of `final`, a
    TensorDict of shape `[n, F]`, where F is an upper bound of the number of truncations in a sequence. `final` has two
    fields. `obs` holds the observation at the truncation, and `carry` holds the memory after the last `act` of the
    episode, before the restart. Unused entries may have any values. If only V is needed, `final` and V_final are None.

    Two policies are equal and share compiled functions if all their fields except `init`, `init_frozen`, `time_loops`
    and `name` are equal. `init` and `init_frozen` are never compiled.

    Attributes:
        init: 0-d key -> params.
        draw: keys `[*B]` -> noise of an action, a tensor or a TensorDict `[*B, ...]`.
        act: (params, carry, obs, noise) -> (carry, out); `out` has `action`, and `sample_log_prob` if the policy
            has `evaluate`. If noise is None, the action is deterministic.
        evaluate: (params, carry, steps) -> (log_prob, entropy), in nats. None for a policy without probabilities, such
            as a greedy policy.
        value: (params, carry, obs) -> V `[*B]`, or as above for a sequence policy; None for a policy without a critic.
        norm_init: device -> the initial observation statistics (see `normalized`); None if observations stay unchanged.
        norm_update: (statistics, obs, mask) -> the statistics, updated with the observations for which the bool tensor
            `mask` is True.
        compiles: False if the policy cannot be compiled. A module that draws its own random numbers cannot be compiled.
        init_carry: (params, num_envs) -> carry, a TensorDict `[num_envs]`, at the start of an episode.
        unit: unit of a minibatch, "step" or "sequence".
        init_frozen: device -> frozen parameters, such as a pretrained backbone; None for a policy without frozen
            parameters. The other functions read these parameters from `params`. Frozen parameters are never optimised,
            and all states of a run share them without a copy.
        explore: (params, exploration, out, noise) -> (exploration, out); changes the `out` of `act` while an algorithm
            that explores, such as DQN or PQN, collects steps. For example, `explore` takes a random action or adds
            noise. `exploration` is a TensorDict of tensors `[*B, ...]`, the state and the parameters of the
            exploration, such as the last noise or epsilon. The algorithm creates `exploration` and changes its
            parameters. `noise` is the noise passed to `act`. Evaluations do not explore. If `explore` is None, the
            collected steps take the actions of `act`.
        init_exploration: (params, num_envs) -> the fields of `exploration` at the start of an episode, a TensorDict
            `[num_envs]`. An example is the first noise of an Ornstein-Uhlenbeck process. The returned fields restart
            whenever an episode ends. Fields that `init_exploration` does not return, such as epsilon, do not restart.
        q: (params, obs, action, noise) -> Q `[critics, *B]`, the values of actions. For Discrete actions, `action` may
            be None, and the result then has the values of all actions, `[critics, *B, actions]`. If `distribution` is
            not None, the result has an additional last axis with one entry per atom. `noise` is the result of `draw`
            for keys `[*B]`. If all observations share the noise, `noise` is the result of `draw` for one 0-d key.
            `noise` is None for deterministic values. Many policies ignore `noise`. `q` is None for a policy without a
            Q-function.
        distribution: type of the return distributions that `q` returns; None if `q` returns values.
        noisy: True if `q` learns the scales of its noise, as a noisy network does. A loss must then pass noise to `q`.
        evaluate_and_value: (params, carry, steps) -> (log_prob, entropy, V), the results of `evaluate` and of `value`
            for the same steps. If actor and critic share layers, this function computes the shared layers only once. If
            None, the loss calls `evaluate` and `value`. If you replace one of these two functions of a policy, also
            replace `evaluate_and_value`, or set it to None.
        imitation_loss: (params, carry, steps) -> `[*B]`, the loss of imitating the action of each step, such as the
            cross-entropy with a smoothed target. If None, the loss is the negative log-probability of the action.
        draw_imitation: keys `[*B]` -> random numbers of `imitation_loss`, such as the time and the noise of flow
            matching. `imitation_loss` reads these numbers from `steps["imitation_noise"]`. None for a loss without
            random numbers.
        time_loops: number of loops over time in a loss, for a sequence policy. The number is used to estimate the time
            that compilation saves.
        frame_stack: number of latest observations that the policy sees. If `frame_stack` is above 1, `q` takes stacks
            of observations, and `act` takes stacks if the carry is empty (see `ecrl.policies.frame_stack`).
        export: (folder, state, cfg) -> None; writes the policy to the new folder in a format of its own. For example,
            the backend `pi0` writes a checkpoint for transformers. None for a policy that torch.export can trace.
        name: registered name of the policy, for error messages.
    """

    init: Callable[[Tensor], TensorDict] = field(compare=False)
    draw: Callable[[Tensor], Tensor]
    act: Callable[[TensorDict, TensorDict, Any, Tensor | None], tuple[TensorDict, TensorDict]]
    evaluate: Callable[[TensorDict, TensorDict, TensorDict], tuple[Tensor, Tensor]] | None
    value: Callable[..., Any] | None
    norm_init: Callable[[torch.device], TensorDict] | None = None
    norm_update: Callable[[TensorDict, Any, Tensor], TensorDict] | None = None
    compiles: bool = True
    init_carry: Callable[[TensorDict, int], TensorDict] = no_carry
    unit: Literal["step", "sequence"] = "step"
    init_frozen: Callable[[torch.device], TensorDict] | None = field(default=None, compare=False)
    explore: Callable[[TensorDict, TensorDict, TensorDict, Any], tuple[TensorDict, TensorDict]] | None = None
    init_exploration: Callable[[TensorDict, int], TensorDict] = no_carry
    q: Callable[[TensorDict, Any, Tensor | None, Any], Tensor] | None = None
    distribution: ReturnDistribution | None = None
    noisy: bool = False
    evaluate_and_value: Callable[[TensorDict, TensorDict, TensorDict], tuple[Tensor, Tensor, Tensor]] | None = None
    imitation_loss: Callable[[TensorDict, TensorDict, TensorDict], Tensor] | None = None
    draw_imitation: Callable[[Tensor], Tensor | TensorDict] | None = None
    time_loops: int = field(default=1, compare=False)
    frame_stack: int = 1
    export: Callable[[Path, TensorDict, Config], None] | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)

    def __post_init__(self):
        if self.unit not in ("step", "sequence"):
            raise ValueError(f"unit is {self.unit!r}, expected 'step' or 'sequence'")
        if self.unit == "step" and self.init_carry is not no_carry:
            raise ValueError("a policy with init_carry has memory; set its unit to 'sequence'")

    def q_mean(self, q: Tensor) -> Tensor:
        """Convert a result of the function `q` to values.

        If the policy has a `distribution`, the values are the means of the return distributions. Otherwise, the result
        stays unchanged.
        """
        return q if self.distribution is None else self.distribution.mean(q)

    def evaluate_tokens(self, params: TensorDict, rows: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the entropy of each token, in nats, for each step of a minibatch.

        The results have the token axes of the policy's log-probabilities, if any. `evaluate_rows` sums over these axes.
        """
        evaluate: Any = self.evaluate
        return evaluate(params, *_carry_and_steps(self, rows))

    def evaluate_rows(self, params: TensorDict, rows: TensorDict) -> tuple[Tensor, Tensor]:
        """Return the log-probability of the action and the policy's entropy, in nats, for each step of a minibatch.

        `sum_tokens` sums the results over the tokens of an action. `ecrl.algorithms.rows.rows_of` creates `rows` for
        policies of either unit. The policy must have log-probabilities.
        """
        log_prob, entropy = self.evaluate_tokens(params, rows)
        return sum_tokens(log_prob, rows), sum_tokens(entropy, rows)

    def value_rows(self, params: TensorDict, rows: TensorDict) -> Tensor:
        """Return the critic's value for each step of a minibatch. The policy must have a critic."""
        carry, steps = _carry_and_steps(self, rows)
        critic: Any = self.value
        return critic(params, carry, steps["obs"]) if self.unit == "step" else critic(params, carry, steps, None)[0]

    def evaluate_and_value_rows(self, params: TensorDict, rows: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `evaluate_rows` and `value_rows`.

        With `evaluate_and_value`, the layers that actor and critic share are computed once. The policy must have
        log-probabilities and a critic.
        """
        log_prob, entropy, value = self.evaluate_and_value_tokens(params, rows)
        return sum_tokens(log_prob, rows), sum_tokens(entropy, rows), value

    def evaluate_and_value_tokens(self, params: TensorDict, rows: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `evaluate_and_value_rows`, but without the sums over the tokens of an action."""
        if self.evaluate_and_value is None:
            return (*self.evaluate_tokens(params, rows), self.value_rows(params, rows))
        return self.evaluate_and_value(params, *_carry_and_steps(self, rows))

    def imitation_rows(self, params: TensorDict, rows: TensorDict) -> Tensor:
        """Return the loss of imitating the action, for each step of a minibatch.

        The result has the shape of `rows["done"]`. The policy must have `imitation_loss` or log-probabilities. If the
        policy has `draw_imitation`, the field `imitation_noise` of the rows must hold the result of `draw_imitation`.
        """
        if self.imitation_loss is None:
            return -self.evaluate_rows(params, rows)[0]
        return self.imitation_loss(params, *_carry_and_steps(self, rows))


def _carry_and_steps(policy: Policy, rows: TensorDict) -> tuple[TensorDict, TensorDict]:
    """Return the policy's memory before the first step of each minibatch row, and the steps of the rows."""
    carry: Any = rows.get("carry", TensorDict({}, []))
    if rows.batch_size == rows["done"].shape and policy.unit == "step":
        return carry, rows
    return carry, TensorDict(dict(rows.exclude("carry").items()), rows["done"].shape)


def counted_tokens(like: Tensor, rows: TensorDict) -> Tensor | None:
    """Return a bool mask of the shape of `like`, True for the tokens that count.

        token_mask[..., i, :] and i < executed        for step i of a chunk

    The condition `i < executed` applies only if `rows` has `executed` and there are two or more token axes. The first
    token axis is then the axis of the steps of a chunk. If this condition does not apply and `rows` has no
    `token_mask`, all tokens count, and the result is None.

    Args:
        like: tensor with the shape of `rows["done"]`, followed by token axes.
        rows: TensorDict with `done`. Optional fields are `token_mask`, bool of the shape of `like`, and `executed`,
            int64 of the shape of `done`. `executed` counts how many steps of each chunk the environment executed.

    >>> rows = TensorDict({"done": torch.tensor([False]), "executed": torch.tensor([1])}, [1])
    >>> counted_tokens(torch.zeros(1, 2, 3), rows).tolist()
    [[[True, True, True], [False, False, False]]]
    """
    ndim = rows["done"].ndim
    mask = rows.get("token_mask", None)
    if "executed" not in rows or like.ndim < ndim + 2:
        return mask
    taken = torch.arange(like.shape[ndim], device=like.device) < rows["executed"].unsqueeze(-1)
    taken = taken.reshape(*taken.shape, *[1] * (like.ndim - ndim - 1)).expand_as(like)
    return taken if mask is None else mask & taken


def sum_tokens(x: Tensor, rows: TensorDict) -> Tensor:
    """Sum the log-probabilities or entropies of an action's tokens.

        log_prob(action) = sum(log_prob(token) for the tokens of the action that count)

    Args:
        x: tensor with the shape of `rows["done"]`, optionally followed by token axes.
        rows: TensorDict with `done`, and with `token_mask` and `executed` if some tokens do not count (see
            `counted_tokens`).

    Returns: a tensor of the shape of `rows["done"]`.
    Gradient: flows through the tokens that count.

    >>> rows = TensorDict({"done": torch.tensor([False]), "token_mask": torch.tensor([[True, True, False]])}, [1])
    >>> sum_tokens(torch.tensor([[-1.0, -2.0, -4.0]]), rows)
    tensor([-3.])
    """
    ndim = rows["done"].ndim
    if x.ndim == ndim:
        return x
    mask = counted_tokens(x, rows)
    return (x if mask is None else x.masked_fill(~mask, 0.0)).flatten(ndim).sum(-1)


def acting_params(params: TensorDict, fixed: TensorDict) -> TensorDict:
    """Merge learned and fixed parameters into the `params` argument of a policy's functions.

    Args:
        params: the learned parameters.
        fixed: the result of `fixed_params`, or the field `norm` of a state. Observation statistics, the field `obs` of
            `fixed`, become the field `norm` of the result. The result also has all fields of `fixed["frozen_params"]`,
            if any.
    """
    merged = params.copy().set("norm", fixed["obs"]) if "obs" in fixed else params.copy()
    return replaced(merged, fixed["frozen_params"]) if "frozen_params" in fixed else merged


def fixed_params(state: TensorDict) -> TensorDict:
    """Return the policy's fixed parameters from a state: the observation statistics and the frozen parameters."""
    norm: Any = state["norm"]
    fixed = norm.select("obs", strict=False)
    return replaced(fixed, {"frozen_params": state["frozen_params"]}) if "frozen_params" in state else fixed


def policy_params(state: TensorDict) -> TensorDict:
    """Return the `params` argument of the policy's functions, built from the state of a run.

    >>> state = TensorDict({"params": {"w": 1.0}, "norm": {}, "frozen_params": {"backbone": 2.0}}, [])
    >>> sorted(policy_params(state).keys())
    ['backbone', 'w']
    """
    params: Any = state["params"]
    return acting_params(params, fixed_params(state))


def flatten(obs: Any, space: Space) -> Tensor:
    """Flatten an observation to float features of shape `[*B, flat_dim(space)]`.

    Elements of a Box are converted to float. An image (`ecrl.spaces.is_image`) is divided by 255, as in
    Stable-Baselines3. A Discrete observation becomes a one-hot vector. A MultiDiscrete observation becomes a one-hot
    vector for each entry. The entries of a Dict are concatenated in order of name, without `action_mask`.

    >>> from ecrl.spaces import box, dict_space
    >>> space = dict_space({"b": box(0.0, 1.0, 2), "a": box(0.0, 1.0)})
    >>> flatten(TensorDict({"b": torch.ones(3, 2), "a": torch.zeros(3)}, [3]), space)[0].tolist()
    [0.0, 1.0, 1.0]
    >>> flatten(torch.full((1, 1, 2, 1), 51, dtype=torch.uint8), box(0, 255, 1, 2, 1, dtype=torch.uint8))
    tensor([[0.2000, 0.2000]])
    """
    match space:
        case Dict():
            return torch.cat([flatten(obs[name], part) for name, part in space.items if name != "action_mask"], -1)
        case Box():
            rows = obs.reshape(*obs.shape[: obs.ndim - len(space.shape)], flat_dim(space))
            rows = rows if space.dtype == torch.float32 else rows.to(torch.get_default_dtype())
            return rows / 255.0 if is_image(space) else rows
        case Discrete():
            return (obs.unsqueeze(-1) == torch.arange(space.n, device=obs.device)).to(torch.get_default_dtype())
        case MultiDiscrete():
            return torch.cat(
                [flatten(part, Discrete(n)) for part, n in zip(obs.unbind(-1), space.nvec, strict=True)], -1
            )


def batch_shape(obs: Tensor, shape: tuple[int, ...]) -> torch.Size:
    """Return the batch shape `B` of observations `[*B, *shape]`. Raise ConfigError if the last axes are not `shape`."""
    batch = obs.shape[: max(0, obs.ndim - len(shape))]
    if obs.shape[len(batch) :] != shape:
        sizes = ", ".join(("...", *map(str, shape)))
        raise ConfigError(
            f"policy: an observation has the shape {list(obs.shape)}, but the networks were built for [{sizes}]; pass "
            "observations of the environment that the policy was made for"
        )
    return batch


def one_batch(obs: Any, space: Space) -> tuple[Any, torch.Size]:
    """Flatten the batch axes of an observation `[*B, ...]` into one axis for a module. Return the observation and `B`.

    Raises: ConfigError if the shape of the observation does not match the space.

    >>> from ecrl.spaces import box
    >>> rows, batch = one_batch(torch.zeros(5, 6, 3, 8, 8), box(0.0, 1.0, 3, 8, 8))
    >>> rows.shape, batch
    (torch.Size([30, 3, 8, 8]), torch.Size([5, 6]))
    """
    if isinstance(space, Dict):
        parts = {name: one_batch(obs[name], part) for name, part in space.items}
        first, batch = next(iter(parts.values()))
        return TensorDict({name: rows for name, (rows, _) in parts.items()}, [first.shape[0]]), batch
    shape = element_shape(space)
    batch = batch_shape(obs, shape)
    return obs if len(batch) == 1 else obs.reshape((batch.numel(), *shape)), batch


def example(space: Space) -> Any:
    """Return two all-zero observations of a space, with every action allowed, for a trial call of a module."""
    if isinstance(space, Dict):
        parts = {name: example(part) for name, part in space.items}
        mask = (
            {"action_mask": torch.ones_like(parts["action_mask"], dtype=torch.bool)} if "action_mask" in parts else {}
        )
        return TensorDict(parts | mask, [2])
    dtype = element_dtype(space)
    return torch.zeros(2, *element_shape(space), dtype=None if dtype == torch.float32 else dtype)
