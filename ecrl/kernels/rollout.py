"""Collect experience, one transition or one batch at a time, and keep episode statistics.

A policy is a record with the fields `act`, `value` and `draw`. A policy with memory also has `unit` and `init_carry`
(`ecrl.policies.Policy`). An environment is a record with the fields `step` and `draw`. This module uses no other
fields of policies and environments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from ecrl.kernels.dtypes import common_dtype, step_discounts, widened
from ecrl.kernels.reverse_scan import reverse_scan, varies
from ecrl.kernels.scan_loop import Scan, in_chunks, loop, scan
from ecrl.pytree import flatten, mapped, unflatten
from ecrl.types import Scalar, check_bool, check_tensors, same_shape

_STEP_FIELDS = ("reward", "terminated", "truncated")
_OPTIONAL = ("info", "mask", "executed")
_COLLECTED = {*_STEP_FIELDS, *_OPTIONAL, "done", "obs", "final_obs", "value", "final_value", "carry", "final_carry"}
"""Fields that the collector or a minibatch adds to a step, so `act` must not return fields with these names."""


def act_and_step(
    act: Callable[..., Any],
    step: Callable[..., TensorDict],
    params: TensorDict,
    carry: TensorDict,
    env_state: TensorDict,
    action_noise: Any,
    env_noise: Any,
) -> tuple[TensorDict, TensorDict, TensorDict]:
    """Run one transition: the policy acts on the last observation, and the environment takes a step.

        carry, out = act(params, carry, env_state["obs"], action_noise)
        env_state  = step(env_state, out["action"], env_noise)

    Args:
        act: the policy's function `(params, carry, obs, noise) -> (carry, out)`. `out` holds `action` and any other
            fields that the rollout should contain, such as tokens and `token_mask`.
        step: the function `(env_state, action, noise) -> env_state` of an environment from `ecrl.envs.auto_reset`.
        params: the policy's parameters.
        carry: the policy's memory, empty for a feed-forward policy.
        env_state: environment states, a TensorDict `[N]` with `obs`.
        action_noise: noise from the policy's `draw` for this step, or None for the deterministic action.
        env_noise: noise from the environment's `draw` for this step.

    Returns: the new carry, the new env_state and the transition `[N]`. The transition has the fields of `out`, and
        reward, terminated, truncated, done and final_obs. The transition also has info, mask and executed if the
        environment reports these fields. The carry is the policy's memory after `act`. Pass the carry through
        `restarted_carry` before the next step, because the episode may have ended.
    Gradient: flows through `act` and `step`.
    Raises: ValueError if `act` returns a field that the collector sets, such as reward.

    >>> act = lambda params, carry, obs, noise: (carry, TensorDict({"action": obs + noise}, obs.shape))
    >>> def step(s, action, noise):
    ...     no = torch.zeros(1, dtype=torch.bool)
    ...     after = {"obs": action, "reward": action, "terminated": no, "truncated": no, "final_obs": action}
    ...     return TensorDict(after, [1])
    >>> empty, start = TensorDict({}, []), TensorDict({"obs": torch.ones(1)}, [1])
    >>> act_and_step(act, step, empty, empty, start, torch.ones(1), None)[2]["reward"]
    tensor([2.])
    """
    carry, out = act(params, carry, env_state["obs"], action_noise)
    for name in _COLLECTED.intersection(out.keys()):
        raise ValueError(f"act returns the field {name!r}, which the collector sets itself; give it another name")
    env_state = step(env_state, out["action"], env_noise)
    fields = (*_STEP_FIELDS, "final_obs", *(key for key in _OPTIONAL if key in env_state))
    row = out.copy().update({key: env_state[key] for key in fields})
    return carry, env_state, row.set("done", row["terminated"] | row["truncated"])


def restarted_carry(carry: TensorDict, initial: TensorDict, row: TensorDict) -> TensorDict:
    """Return the memory for the next step: `initial` for environments whose episode ended, `carry` for the others.

    The memory also restarts after a step whose `mask` is False, because such a step is the reset of a Gymnasium
    environment.

    Args:
        carry: the policy's memory after `act`, of shape `[N]`.
        initial: the memory at the start of an episode, with the same fields.
        row: the transition `[N]`, with terminated, truncated and, if present, mask.

    Returns: `[N]`.
    Gradient: flows through `carry` and `initial`.

    >>> row = TensorDict({"terminated": torch.tensor([True, False]), "truncated": torch.zeros(2).bool()}, [2])
    >>> old, new = (TensorDict({"h": torch.full((2,), float(x))}, [2]) for x in (1, 0))
    >>> restarted_carry(old, new, row)["h"].tolist()
    [0.0, 1.0]
    """
    if initial.is_empty():
        return carry
    ended = row["terminated"] | row["truncated"]
    ended = ended | ~row["mask"] if "mask" in row else ended
    return mapped(lambda old, new: torch.where(_append_axes(ended, new), old, new), initial, carry)


def _append_axes(flags: Tensor, like: Tensor) -> Tensor:
    """Append axes of size 1 to `flags`, so that it has as many axes as `like`."""
    return flags.reshape(*flags.shape, *[1] * (like.ndim - flags.ndim))


def _transition(
    policy: Any,
    env: Any,
    carry_and_env: tuple[TensorDict, TensorDict],
    noise: tuple[Any, Any],
    params: TensorDict,
    initial: TensorDict,
) -> tuple[tuple[TensorDict, TensorDict], TensorDict]:
    """Run `act_and_step` as the body of a scan, and add the observation to the transition.

    The memory restarts where an episode ended. If the policy has memory, the transition's `final_carry` is the memory
    before the restart.
    """
    carry, env_state = carry_and_env
    obs = env_state["obs"]
    carry_after, env_state, row = act_and_step(policy.act, env.step, params, carry, env_state, *noise)
    carry, row = restarted_carry(carry_after, initial, row), row.set("obs", obs)
    return (carry, env_state), row if initial.is_empty() else row.set("final_carry", carry_after)


_Slots = tuple[Tensor, dict[str, Any]]
"""Pair of the number of truncations per environment (`[N]`) and the states at these truncations (`[N, F, ...]`)."""


def _empty_slots(carry: TensorDict, obs: Any, size: int) -> _Slots:
    """Return `size` empty slots for each environment."""

    def zeros(x: Tensor) -> Tensor:
        return x.new_zeros((len(x), size, *x.shape[1:]))

    states = mapped(zeros, {"obs": obs, "carry": carry}, batch=lambda batch: (*batch[:1], size, *batch[1:]))
    first = flatten(obs)[0][0]
    return torch.zeros(len(first), dtype=torch.int64, device=first.device), states


def _fill_slots(slots: _Slots, obs: Any, carry: TensorDict, truncated: Tensor) -> _Slots:
    """Store the state of each truncated environment in the next free slot of that environment."""
    count, states = slots
    (old, structure), (new, _) = flatten(states), flatten({"obs": obs, "carry": carry})
    number = torch.arange(old[0].shape[1], device=count.device)
    chosen = truncated.unsqueeze(1) & (count.unsqueeze(1) == number)
    leaves = [torch.where(_append_axes(chosen, x), y.unsqueeze(1), x) for x, y in zip(old, new, strict=True)]
    return count + truncated, unflatten(structure, leaves)


def _sparse_transition(
    policy: Any,
    env: Any,
    state: tuple[tuple[TensorDict, TensorDict], _Slots | None],
    noise: tuple[Any, Any],
    params: TensorDict,
    initial: TensorDict,
) -> tuple[tuple[tuple[TensorDict, TensorDict], _Slots | None], TensorDict]:
    """Run `_transition`, but move the final states of truncated environments from the transition into slots.

    `state` holds the carry, the environment state and the slots. If the slots are None, the final states are dropped.
    """
    carry_and_env, slots = state
    carry_and_env, row = _transition(policy, env, carry_and_env, noise, params, initial)
    obs, carry = row.pop("final_obs"), cast(TensorDict, row.pop("final_carry", initial))
    return (carry_and_env, None if slots is None else _fill_slots(slots, obs, carry, row["truncated"])), row


def _run_loop(
    policy: Any,
    env: Any,
    params: TensorDict,
    carry_and_env: tuple[TensorDict, TensorDict],
    noise: tuple[Any, Any],
    initial: TensorDict,
    scan: Scan,
    size: int | None,
    length: int,
) -> tuple[tuple[TensorDict, TensorDict], TensorDict, dict[str, Any] | None, TensorDict]:
    """Run the loop over time, in segments of `length` steps.

    Return the carry and the environment state, the steps `[T, N]`, the final states, and the memory before each
    segment, of shape `[S, N]`. If `size` is None, the final states have the shape `[N, T]`, with one state for each
    step. If `size` is 0, the final states are None. Otherwise, the final states have the shape `[N, size]`, with one
    state for each truncation.
    """
    if size is None:
        body = partial(_transition, policy, env)
        scan_segments = partial(_scan_segments, scan, length, _memory)
        carry_and_env, rows, memories = scan_segments(body, carry_and_env, noise, params, initial)
        final = {"obs": rows.pop("final_obs"), "carry": rows.pop("final_carry", initial)}
        return carry_and_env, rows, _swap_axes(final), memories
    slots = _empty_slots(carry_and_env[0], carry_and_env[1]["obs"], size) if size else None
    body, start = partial(_sparse_transition, policy, env), (carry_and_env, slots)
    scan_segments = partial(_scan_segments, scan, length, _memory_beside_slots)
    (carry_and_env, slots), rows, memories = scan_segments(body, start, noise, params, initial)
    return carry_and_env, rows, None if slots is None else slots[1], memories


def _memory(carry_and_env: tuple[TensorDict, TensorDict]) -> TensorDict:
    return carry_and_env[0]


def _memory_beside_slots(carry: Any) -> TensorDict:
    (memory, _), _ = carry
    return memory


def _scan_segments(
    scan: Scan, length: int, memory_of: Callable[[Any], TensorDict], body: Any, carry: Any, noise: Any, *constants: Any
) -> tuple[Any, TensorDict, TensorDict]:
    """Scan `body` over time, in segments of `length` steps.

    Args:
        scan: function that runs a loop.
        length: number of steps per segment, a divisor of T.
        memory_of: function that returns the policy's memory from a carry.
        body: the function that the loop calls at each step.
        carry: the carry before the first step.
        noise: the noise of all steps, `[T, N]`.
        constants: further arguments of `body`, the same in every step.

    Returns: the last carry, the steps `[T, N]`, and the memory before the first step of each segment, `[S, N]`.
    """
    steps = len(flatten(noise)[0][0])
    if length == steps:
        start = mapped(lambda x: x.unsqueeze(0), memory_of(carry), batch=lambda size: (1, *size))
        return *scan(body, carry, noise, *constants), start
    cut = mapped(lambda x: x.unflatten(0, (-1, length)), noise, batch=lambda size: (steps // length, length, *size[1:]))
    segment = partial(_segment, scan, memory_of, body)
    carry, (rows, memories) = scan(segment, carry, cut, *constants)
    return carry, mapped(lambda x: x.flatten(0, 1), rows, batch=lambda size: (steps, *size[2:])), memories


def _segment(
    scan: Scan, memory_of: Callable[[Any], TensorDict], body: Any, carry: Any, noise: Any, *constants: Any
) -> tuple[Any, tuple[TensorDict, TensorDict]]:
    """Run the steps of a segment. Return the carry, the steps, and the memory before the first step."""
    after, rows = scan(body, carry, noise, *constants)
    return after, (rows, memory_of(carry).clone())


def _swap_axes(tree: Any) -> Any:
    """Swap the first two axes of every tensor."""
    return mapped(lambda x: x.transpose(0, 1), tree, batch=lambda size: (*size[1::-1], *size[2:]))


def place_at_truncations(value: Tensor, truncated: Tensor) -> Tensor:
    """Move the values of final states from slots to the steps at which a time limit ended the episode.

        placed[t] = value[sum(truncated[:t])] if truncated[t] else 0

    If the number of slots F is T, each step has its own slot. The equation then has `value[t]` in place of
    `value[sum(truncated[:t])]`.

    Args:
        value: `[*B, F]` with 1 <= F <= T, the value of each slot in `final` of a batch (`collect_rollout`). Slots
            without a time limit may hold any value.
        truncated: `[*B, T + 1]` bool, the field `truncated` of the batch's steps. The last step is padding, and its
            flag is False.

    Returns: `[*B, T + 1]` in the dtype of `value`.
    Gradient: flows through `value`.
    Raises: ValueError naming `value` if its shape does not match the shape of `truncated`, or `truncated` if it is not
        bool.
    Source: Pardo et al. 2018, arXiv:1712.00378.

    >>> truncated = torch.tensor([False, True, True, False, False])
    >>> place_at_truncations(torch.tensor([7.0, 9.0]), truncated).tolist()
    [0.0, 7.0, 9.0, 0.0, 0.0]
    """
    check_bool(truncated=truncated)
    steps = truncated.shape[-1] - 1
    if value.shape[:-1] != truncated.shape[:-1] or not 1 <= value.shape[-1] <= steps:
        shapes = f"value has shape {list(value.shape)}, and truncated has {list(truncated.shape)}"
        raise ValueError(f"{shapes}; expected equal leading axes, and between 1 and {steps} slots in value")
    value, truncated = value.movedim(-1, 0), truncated.movedim(-1, 0)  # in storage, time is the first axis
    if len(value) == steps:
        placed = torch.cat((value, value[-1:]))
    else:
        number = truncated.to(torch.int64).cumsum(0) - 1
        placed = value.gather(0, number.clamp(0, len(value) - 1))
    return placed.masked_fill(~truncated, 0.0).movedim(0, -1)


def env_major(rows: Any, last: Any = None) -> Any:
    """Append `last`, or zeros, to fields of shape `[T, N, ...]`, and return them with shape `[N, T + 1, ...]`."""
    leaves, structure = flatten(rows)
    ends = [torch.zeros_like(leaf[0]) for leaf in leaves] if last is None else flatten(last)[0]
    joined = [torch.cat((leaf, end.unsqueeze(0))).transpose(0, 1) for leaf, end in zip(leaves, ends, strict=True)]
    return unflatten(structure, joined, lambda size: (size[1], size[0] + 1, *size[2:]))


def collect_rollout(
    policy: Any,
    env: Any,
    params: TensorDict,
    carry: TensorDict,
    env_state: TensorDict,
    env_keys: Tensor,
    action_keys: Tensor,
    *,
    scan: Scan = scan,
    max_truncations: int | None = None,
    segment_length: int | None = None,
) -> tuple[TensorDict, TensorDict, TensorDict]:
    """Run N environments for T steps and return the steps as a batch.

    All noise is drawn before the loop over time, and all values are computed after it. The policy's memory restarts
    when an episode ends.

    Args:
        policy: record with `act`, `draw` and `value`. `value` is None for a policy without a critic. A policy with
            memory also has `unit` and `init_carry`.
        env: record with `step` and `draw`, from `ecrl.envs.auto_reset`.
        params: the policy's parameters.
        carry: the policy's memory before the first step, a TensorDict `[N]`. For a feed-forward policy, the memory is
            empty.
        env_state: environment states, a TensorDict `[N]` with `obs`.
        env_keys: int64 `[T, N]`, one key per step and environment, for the environment's noise.
        action_keys: int64 `[T, N]`, one key per step and environment, for the actions.
        scan: function that runs the loop over time. The default runs a Python loop.
        max_truncations: the largest number of truncations of one environment in the T steps, or None if this number is
            unknown. A small bound saves memory and time, because the function stores only this many final observations
            per environment, and the critic evaluates only these observations.
        segment_length: number of steps per segment, a divisor of T. The batch has the policy's memory before the first
            step of each segment. If None, all T steps form one segment.

    Returns: carry and env_state after T steps, and the batch, a TensorDict `[N]` with the fields `steps`, `carry` and
        `final`.

        `steps`, of shape `[N, T + 1]`, is a rollout with obs, the fields that `act` returns, reward, terminated,
        truncated and done. The rollout has info, mask and executed if the environment has them, and value and
        final_value if the policy has a critic. In storage, time is the first axis. The last time slot of every field is
        zero, except for obs and value.

        `carry`, of shape `[N, S]` with S = T / segment_length, is the policy's memory before each segment. If the
        policy has no memory, the batch has no `carry`.

        `final`, of shape `[N, F]`, holds the states at time limits, before the reset: `obs`, `value` and, if the policy
        has memory, the `carry` after `act`. F is max_truncations. The index of a state's slot is the number of earlier
        truncations of the same environment. If max_truncations is None or at least T, F is T and slot t belongs to step
        t. Slots without a time limit hold arbitrary values. `final` is absent if the policy has no critic, or if F is
        0. `place_at_truncations` moves values from slots to steps.
    Gradient: none, because the function runs under `no_grad`.
    Raises: ValueError if the keys are not both `[T, N]` with T >= 1, if `segment_length` does not divide T, or if `act`
        returns a field that the collector sets.
    Source: for the value at a time limit, Pardo et al. 2018, arXiv:1712.00378.

    >>> from ecrl.envs import auto_reset, make_env
    >>> from ecrl.policies import make_policy
    >>> env = auto_reset(make_env("probe_constant"))
    >>> policy = make_policy({"name": "actor_critic", "actor": {"network_cfg": {"hidden_sizes": [4]}},
    ...     "critic": {"network_cfg": {"hidden_sizes": [4]}}}, env.observation_space, env.action_space)
    >>> empty, keys = TensorDict({}, []), torch.arange(6).reshape(3, 2)
    >>> start = env.reset(torch.arange(2))
    >>> _, _, batch = collect_rollout(policy, env, policy.init(torch.tensor(0)), empty, start, keys, keys)
    >>> batch["steps", "reward"].tolist()
    [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    """
    if env_keys.ndim != 2 or env_keys.shape != action_keys.shape or not len(env_keys):
        raise ValueError(
            f"env_keys has shape {list(env_keys.shape)}, and action_keys has {list(action_keys.shape)}; "
            "expected one shape [T, N] with T >= 1 for both"
        )
    num_steps, num_envs = env_keys.shape
    length = num_steps if segment_length is None else segment_length
    if length < 1 or num_steps % length:
        raise ValueError(f"segment_length is {length}, expected a divisor of the {num_steps} steps")
    with torch.no_grad():
        noise, start = (policy.draw(action_keys), env.draw(env_keys)), carry
        initial = carry if carry.is_empty() else policy.init_carry(params, num_envs)
        size = 0 if policy.value is None else max_truncations
        size = None if size is None or size >= num_steps else size
        collected = _run_loop(policy, env, params, (carry, env_state), noise, initial, scan, size, length)
        (carry, env_state), rows, states, memories = collected
        steps = env_major(rows.exclude("obs")).set("obs", env_major(rows["obs"], env_state["obs"]))
        parts = {"steps": steps} if start.is_empty() else {"steps": steps, "carry": _swap_axes(memories)}
        if policy.value is not None:
            final = None if states is None else _final(states, [num_envs, num_steps if size is None else size])
            values = _sequence_values if getattr(policy, "unit", "step") == "sequence" else _step_values
            value, final_value = values(policy.value, params, start, scan, steps, final)
            placed = torch.zeros_like(steps["reward"])
            if final is not None and final_value is not None:
                placed = place_at_truncations(final_value, steps["truncated"])
                parts["final"] = final.set("value", final_value)
            steps.update({"value": value, "final_value": placed})
    return carry, env_state, TensorDict(parts, [num_envs])


def _final(states: dict[str, Any], size: list[int]) -> TensorDict:
    """Return the final states `[N, F]` of the loop as a TensorDict. If `carry` is empty, leave it out."""
    return TensorDict({name: part for name, part in states.items() if flatten(part)[0]}, size)


def _step_values(
    value: Callable[..., Tensor],
    params: TensorDict,
    carry: TensorDict,
    scan: Scan,
    rollout: TensorDict,
    final: TensorDict | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the values `[N, T + 1]` of all observations and the values `[N, F]` of the final observations.

    The second result is None if `final` is None. The values are computed by one scan over chunks of all observations.
    """
    num_envs, steps = rollout.batch_size
    trees = [_swap_axes(part["obs"]) for part in (rollout, final) if part is not None]
    parts, (structure, *_) = zip(*map(flatten, trees), strict=True)
    joined = [torch.cat(part).flatten(0, 1) for part in zip(*parts, strict=True)]
    rows = unflatten(structure, joined, lambda size: (len(joined[0]), *size[2:]))

    def critic(_: None, part: Any, params: TensorDict, carry: TensorDict) -> tuple[None, Tensor]:
        return None, value(params, carry, part)

    values = scan(critic, None, in_chunks(rows), params, carry)[1].flatten()[: len(joined[0])].reshape(-1, num_envs)
    return values[:steps].t(), None if final is None else values[steps:].t()


def sequences(steps: TensorDict) -> TensorDict:
    """Prepare steps `[N, S]` for a policy with memory by setting `done` wherever the memory restarts.

    The memory also restarts after a step whose `mask` is False (see `restarted_carry`).
    """
    steps = steps.copy()
    return steps.set("done", steps["done"] | ~steps["mask"]) if "mask" in steps else steps


def _sequence_values(
    value: Callable[..., tuple[Tensor, Tensor]],
    params: TensorDict,
    carry: Any,
    scan: Scan,
    rollout: TensorDict,
    final: TensorDict | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the values `[N, T + 1]` along the sequences and the values `[N, F]` of the final states.

    The second result is None if `final` is None. A scan passes chunks of environments to `value`.
    """
    num_envs, steps = rollout.batch_size
    rows = {"steps": sequences(rollout)} | ({} if carry.is_empty() else {"carry": carry})
    rows |= {} if final is None else {"final": final}

    def critic(_: None, part: dict[str, TensorDict], params: TensorDict) -> tuple[None, tuple[Tensor, Tensor | None]]:
        return None, value(params, part.get("carry", TensorDict({}, [])), part["steps"], part.get("final"))

    parts: Any = scan(critic, None, in_chunks(rows, steps), params)[1]
    return mapped(lambda x: x.flatten(0, 1)[:num_envs], parts)


def episode_init(num_envs: int, window: int, device: torch.device | str | None = None) -> TensorDict:
    """Return the initial episode statistics.

    The statistics hold the return and length so far of each running episode, and the return and length of each of the
    last `window` finished episodes.

    >>> episode_init(2, 100)["finished_return"].shape
    torch.Size([100])
    """
    zeros, none = torch.zeros(num_envs, device=device), torch.zeros(window, device=device)
    return TensorDict(
        {
            "running_return": zeros,
            "running_length": zeros.clone(),
            "finished_return": none,
            "finished_length": none.clone(),
            "finished": torch.zeros(window, dtype=torch.bool, device=device),
        },
        [],
    )


def running_returns(reward: Tensor, done: Tensor, before: Tensor, *, gamma: Scalar) -> Tensor:
    """Return the discounted sum of the rewards so far in each episode, with smaller weights for older rewards.

        y[t] = reward[t] + gamma[t] * y[t - 1] * not done[t - 1],    y[-1] = before

    Args:
        reward: `[*B, T]` float, in reward units.
        done: `[*B, T]` bool.
        before: `[*B]` float, the sum before the first step, 0 for a new episode.
        gamma: discount, or a `[*B, T]` tensor with the discount of each step.

    Returns: `[*B, T]` in the dtype of `reward`. Half-precision rewards are converted to float32 first.
    Gradient: flows through `reward` and `before`.
    Raises: ValueError naming the argument, if shapes differ, `done` is not bool or `gamma` has a wrong shape.
    Source: Engstrom et al. 2020, arXiv:2005.12729, sec. 3 (reward scaling).

    >>> running_returns(torch.ones(3), torch.tensor([False, True, False]), torch.tensor(4.0), gamma=0.5).tolist()
    [3.0, 2.5, 1.0]
    """
    same_shape(reward=reward, done=done)
    check_bool(done=done)
    check_tensors(before=before)
    gamma = step_discounts(gamma, reward)
    if before.shape != reward.shape[:-1]:
        expected = f"expected {list(reward.shape[:-1])}, the shape of reward without its time axis"
        raise ValueError(f"before has shape {list(before.shape)}, {expected}")
    dtype = reward.dtype if reward.is_floating_point() else common_dtype(reward, before)
    reward, before = widened(reward, before)
    ended_before = torch.cat((torch.zeros_like(done[..., :1]), done[..., :-1]), -1)
    gamma = gamma.flip(-1) if varies(gamma) else gamma  # pyright: ignore
    return reverse_scan(reward.flip(-1), gamma, ended_before.flip(-1), before).flip(-1).to(dtype)


def _steps_since_end(counted: Tensor, done: Tensor, before: Tensor) -> Tensor:
    """Return, at each step, the sum of `counted` over the steps of the episode so far, as float64 `[N, T]`.

    `before` is the sum before the first step. The results are differences of cumulative sums of whole numbers, so no
    rounding error passes from one episode to the next.
    """
    counts = torch.cat((before.unsqueeze(1), counted), 1).double().cumsum(1)
    times = torch.arange(1, done.shape[1] + 1, device=done.device)
    ended = torch.where(done, times, 0)
    last = torch.cat((torch.zeros_like(ended[:, :1]), ended[:, :-1]), 1).cummax(1).values
    return counts[:, 1:] - counts.gather(1, last).masked_fill(last == 0, 0.0)


def _add_reward(total: Tensor, step: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Add a reward to the float64 return `[N]` of each episode.

    Return the next carry, which is 0 where an episode ended, and the return.
    """
    reward, done = step
    total = total + reward
    return total.masked_fill(done, 0.0), total


def episode_update(
    episode: TensorDict, reward: Tensor, done: Tensor, mask: Tensor | None = None, executed: Tensor | None = None
) -> TensorDict:
    """Return the episode statistics after T more steps.

    Args:
        episode: episode statistics from `episode_init` or `episode_update`.
        reward: `[N, T]` float, in reward units.
        done: `[N, T]` bool.
        mask: `[N, T]` bool, False for a step that does not count. If None, all steps count.
        executed: `[N, T]` int64, the number of environment steps that each step took. If None, each step took one
            environment step.

    Returns: new statistics in the dtypes of `episode`. `finished_return` and `finished_length` hold the most recent
        episodes, oldest first. Episodes that end at the same step are ordered by environment. `finished` is False for
        slots without an episode. A nonfinite reward makes the return of its episode NaN. Sums are computed in float64.
    Gradient: flows through `reward` and through the returns in `episode`.
    Raises: ValueError if `done` or `mask` is not bool.

    >>> e = episode_update(episode_init(1, 2), torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[False, True, False]]))
    >>> e["finished_return"][e["finished"]], e["running_return"]
    (tensor([3.]), tensor([4.]))
    """
    check_bool(done=done, **{} if mask is None else {"mask": mask})
    taken = torch.ones_like(reward) if executed is None else executed.to(reward.dtype)
    if mask is not None:
        reward, taken = reward.masked_fill(~mask, 0.0), taken.masked_fill(~mask, 0.0)
    before = episode["running_return"]
    _, ret = loop(_add_reward, before.double(), (reward.t().double(), done.t()))
    ret = ret.t().masked_fill(~ret.t().isfinite(), torch.nan).to(before.dtype)
    length = _steps_since_end(taken, done, episode["running_length"]).to(episode["running_length"].dtype)
    ended = torch.cat((episode["finished"], done.t().reshape(-1)))
    position = torch.arange(len(ended), device=done.device)
    # The entries of `order` are distinct, so `topk` selects the same slots on every device.
    order = torch.where(ended, position, position - len(ended))
    last = order.topk(len(episode["finished"])).indices.flip(0)
    returns = torch.cat((episode["finished_return"], ret.t().reshape(-1)))[last]
    lengths = torch.cat((episode["finished_length"], length.t().reshape(-1)))[last]
    return TensorDict(
        {
            "running_return": ret[:, -1].masked_fill(done[:, -1], 0.0),
            "running_length": length[:, -1].masked_fill(done[:, -1], 0.0),
            "finished_return": returns,
            "finished_length": lengths,
            "finished": ended[last],
        },
        [],
    )


def restarted(episode: TensorDict) -> TensorDict:
    """Set the return and length of every running episode to 0, and keep the statistics of finished episodes.

    Args:
        episode: episode statistics from `episode_init` or `episode_update`.

    Returns: the new statistics.
    Gradient: flows through the statistics of finished episodes.

    >>> restarted(episode_init(1, 2).set("running_return", torch.ones(1)))["running_return"]
    tensor([0.])
    """
    return episode.copy().update(
        {name: torch.zeros_like(episode[name]) for name in ("running_return", "running_length")}
    )
