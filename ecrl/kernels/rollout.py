"""Collecting experience: one step, a whole rollout, and the statistics of the episodes in it.

The functions take records with fields `act`, `value` and `draw` (a policy) and `step` and `draw` (an environment); they
know nothing else of either.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from ecrl.kernels.returns import _reverse_scan
from ecrl.types import Scalar, same_shape

_VALUE_ROWS = 16_384  # observations per critic pass: bounds activations, large enough to fill a core
_STEP_FIELDS = ("reward", "terminated", "truncated")
_OPTIONAL = ("info", "mask")


def act_and_step(
    act: Callable[..., Any],
    step: Callable[..., TensorDict],
    params: TensorDict,
    carry: TensorDict,
    env_state: TensorDict,
    action_noise: Any,
    env_noise: Any,
) -> tuple[TensorDict, TensorDict, TensorDict]:
    """One transition: the policy acts on the last observation, the world answers.

        carry, out = act(params, carry, env_state["obs"], action_noise)
        env_state  = step(env_state, out["action"], env_noise)

    Args:
        act: a policy's, `(params, carry, obs, noise) -> (carry, out)`, `out` with `action` and whatever it declares.
        step: an environment's, `(env_state, action, noise) -> env_state`, wrapped by auto-reset.
        params: the policy's parameters.
        carry: the policy's memory; empty for feed-forward ones.
        env_state: batch `[N]`, with `obs`.
        action_noise: what the policy's `draw` gives for this step; None for the deterministic action.
        env_noise: what the environment's `draw` gives for this step.

    Returns: carry, env_state, and the rollout row `[N]`: `out`, reward, terminated, truncated, done, final_obs, and
        where the environment has them info and mask.
    Gradient: whatever `act` and `step` let through.

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
    env_state = step(env_state, out["action"], env_noise)
    fields = (*_STEP_FIELDS, "final_obs", *(key for key in _OPTIONAL if key in env_state))
    row = out.copy().update({key: env_state[key] for key in fields})
    return carry, env_state, row.set("done", row["terminated"] | row["truncated"])


def _draw(env_draw: Callable, policy_draw: Callable, env_keys: Tensor, action_keys: Tensor) -> tuple[Any, Any]:
    return env_draw(env_keys), policy_draw(action_keys)


def _critic(value: Callable, params: TensorDict, carry: TensorDict, obs: Any) -> Tensor:
    return value(params, carry, obs)


def _rows(noise: Any, length: int) -> list[Any]:
    return list(noise.unbind(0)) if isinstance(noise, Tensor | TensorDictBase) else [noise] * length


def _env_major(rows: list[Any]) -> Any:
    return torch.stack(rows).transpose(0, 1)


def collect_rollout(
    policy: Any,
    env: Any,
    params: TensorDict,
    carry: TensorDict,
    env_state: TensorDict,
    env_keys: Tensor,
    action_keys: Tensor,
    *,
    jit: Callable[..., Callable[..., Any]] = partial,
) -> tuple[TensorDict, TensorDict, TensorDict]:
    """T steps of N environments as a `[N, T + 1]` rollout; noise is drawn before the loop, values are filled in after.

    Args:
        policy: record with `act`, `draw` and `value` (None for a policy without a critic).
        env: record with `step` (wrapped by auto-reset), `draw`, and `is_pure`, False for one that runs on the host.
        params: the policy's parameters.
        carry: the policy's memory.
        env_state: batch `[N]`, with `obs`.
        env_keys: int64 `[T, N]`, one key per step and environment for the world.
        action_keys: int64 `[T, N]`, likewise for the actions.
        jit: `jit(fn, *static)` binds the static arguments and may compile; plain `functools.partial` is eager.

    Returns: carry, env_state after T steps, and the rollout: obs, what the policy's `act` gives, reward, terminated,
        truncated, done, where the environment has them info and mask, and with a critic value and final_value. The
        memory is time-major; the last slot of every field but obs and value is zero.
    Gradient: none; it runs under `no_grad`.
    Raises: ValueError if the keys are not both `[T, N]` with T >= 1.
    Source: the time limit's value as in Pardo et al. 2018, arXiv:1712.00378.

    >>> from ecrl.envs import auto_reset, make_env
    >>> from ecrl.policies import make_policy
    >>> env = auto_reset(make_env("probe_constant"))
    >>> policy = make_policy({"name": "actor_critic", "actor": {"network_cfg": {"hidden_sizes": [4]}},
    ...     "critic": {"network_cfg": {"hidden_sizes": [4]}}}, env.observation_space, env.action_space)
    >>> empty, keys = TensorDict({}, []), torch.arange(6).reshape(3, 2)
    >>> start = env.reset(torch.arange(2))
    >>> collect_rollout(policy, env, policy.init(torch.tensor(0)), empty, start, keys, keys)[2]["reward"].tolist()
    [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    """
    if env_keys.ndim != 2 or env_keys.shape != action_keys.shape or not len(env_keys):
        raise ValueError(
            f"env_keys {list(env_keys.shape)} and action_keys {list(action_keys.shape)} must both be [T, N], T >= 1"
        )
    length = len(env_keys)
    with torch.no_grad():
        env_noise, action_noise = jit(_draw, env.draw, policy.draw)(env_keys, action_keys)
        fused = jit(act_and_step, policy.act, env.step) if env.is_pure else None
        step = fused or partial(act_and_step, jit(policy.act), env.step)
        obs, rows = [], []
        for action_t, env_t in zip(_rows(action_noise, length), _rows(env_noise, length), strict=True):
            obs.append(env_state["obs"])
            carry, env_state, row = step(params, carry, env_state, action_t, env_t)
            rows.append(row)
        rollout = _env_major([*rows, rows[0].apply(torch.zeros_like)])
        rollout.set("obs", _env_major([*obs, env_state["obs"]]))
        if policy.value is not None:
            rollout.update(_values(jit(_critic, policy.value), params, carry, rollout))
    return carry, env_state, rollout.exclude("final_obs")


def _values(
    critic: Callable[..., Tensor], params: TensorDict, carry: TensorDict, rollout: TensorDict
) -> dict[str, Tensor]:
    """`value` and `final_value` in chunked critic passes over whole time rows, the padding row included."""
    time_major = rollout.transpose(0, 1)
    chunk = max(1, _VALUE_ROWS // time_major.batch_size[1])

    def over_time(obs: Any) -> Tensor:
        return torch.cat([critic(params, carry, part) for part in obs.split(chunk)]).transpose(0, 1)

    final_value = over_time(time_major["final_obs"]).masked_fill(~rollout["truncated"], 0.0)
    return {"value": over_time(time_major["obs"]), "final_value": final_value}


def episode_init(num_envs: int, window: int, device: torch.device | str | None = None) -> TensorDict:
    """Statistics before the first step: running return and length per env, and the last `window` finished episodes.

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
    """Discounted sums of the rewards so far in each episode, the older the less.

        y[t] = reward[t] + gamma * y[t - 1] * not done[t - 1],    y[-1] = before

    Args:
        reward: `[*B, T]` float, reward units.
        done: `[*B, T]` bool.
        before: `[*B]` float, the sum before the first step; 0 where an episode begins.
        gamma: discount per step.

    Returns: `[*B, T]` in the dtype of `reward`.
    Gradient: flows through `reward` and `before`.
    Raises: ValueError naming the arguments whose shapes differ.
    Source: Engstrom et al. 2020, arXiv:2005.12729, sec. 3 (reward scaling).

    >>> running_returns(torch.ones(3), torch.tensor([False, True, False]), torch.tensor(4.0), gamma=0.5).tolist()
    [3.0, 2.5, 1.0]
    """
    same_shape(reward=reward, done=done)
    if before.shape != reward.shape[:-1]:
        expected = f"expected {list(reward.shape[:-1])} as reward without time"
        raise ValueError(f"before has shape {list(before.shape)}, {expected}")
    ended_before = torch.cat((torch.zeros_like(done[..., :1]), done[..., :-1]), -1)
    return _reverse_scan(reward.flip(-1), gamma, ended_before.flip(-1), before).flip(-1)


def episode_update(episode: TensorDict, reward: Tensor, done: Tensor, mask: Tensor | None = None) -> TensorDict:
    """Statistics after T more steps.

    Args:
        episode: from `episode_init` or here.
        reward: `[N, T]` float, reward units.
        done: `[N, T]` bool.
        mask: `[N, T]` bool, False for a step that belongs to no episode and is not counted; None counts all.

    Returns: new statistics. `finished_return` and `finished_length` keep the most recent episodes, oldest first; only
        those where `finished` are real. Ties in time are kept in order of env index.
    Gradient: none.

    >>> e = episode_update(episode_init(1, 2), torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[False, True, False]]))
    >>> e["finished_return"][e["finished"]], e["running_return"]
    (tensor([3.]), tensor([4.]))
    """
    one = torch.ones_like(reward)
    if mask is not None:
        reward, one = reward.masked_fill(~mask, 0.0), mask.to(reward.dtype)
    ret = running_returns(reward, done, episode["running_return"], gamma=1.0)
    length = running_returns(one, done, episode["running_length"], gamma=1.0)
    ended = torch.cat((episode["finished"], done.t().reshape(-1)))
    order = torch.where(ended, torch.arange(1, len(ended) + 1, device=done.device), 0)
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
    """Statistics where every running episode is given up and a new one begins; the finished ones are kept.

    Args:
        episode: from `episode_init` or `episode_update`.

    Returns: new statistics.
    Gradient: none.

    >>> restarted(episode_init(1, 2).set("running_return", torch.ones(1)))["running_return"]
    tensor([0.])
    """
    return episode.copy().update(
        {name: torch.zeros_like(episode[name]) for name in ("running_return", "running_length")}
    )
