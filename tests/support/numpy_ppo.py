"""PPO in float64 NumPy, with gradients by hand: the expectation of the tests of `ecrl.algorithms.ppo`.

Nothing here comes from the code under test. The order of the rows in each pass is an argument.

Sources:
    GAE: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    The loss: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9.
    Adam: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    RMSprop: Tieleman and Hinton 2012, lecture 6.5.
"""

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
Net = dict[str, Array]
"""A perceptron with one hidden layer of tanh: `0.weight`, `0.bias`, `2.weight` and `2.bias`, named as by torch."""


class Numbers(NamedTuple):
    """Hyperparameters."""

    gamma: float
    gae_lambda: float
    clip_coef: float
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    critic_max_grad_norm: float | None
    normalize_advantage: str
    clip_vloss: bool
    optimizer: str
    learning_rate: float
    batch_size: int | None
    num_minibatches: int | None


def gae(rollout: dict[str, Array], gamma: float, gae_lambda: float) -> tuple[Array, Array]:
    """Return advantages and value targets, `[N, T]` each, of a rollout `[N, T + 1]`."""
    reward, value, final = rollout["reward"], rollout["value"], rollout["final_value"]
    num_envs, length = reward.shape[0], reward.shape[1] - 1
    advantage = np.zeros((num_envs, length))
    for n in range(num_envs):
        later = 0.0
        for t in reversed(range(length)):
            following = final[n, t] if rollout["truncated"][n, t] else value[n, t + 1]
            bootstrap = 0.0 if rollout["terminated"][n, t] else gamma * following
            rest = 0.0 if rollout["done"][n, t] else gamma * gae_lambda * later
            later = advantage[n, t] = reward[n, t] + bootstrap - value[n, t] + rest
    return advantage, advantage + value[:, :-1]


def standardized(x: Array) -> Array:
    """Return x with mean 0 and sample standard deviation 1."""
    return (x - x.mean()) / x.std(ddof=1)


def forward(net: Net, x: Array) -> tuple[Array, Array]:
    """Return the hidden layer and the output of a perceptron."""
    hidden = np.tanh(x @ net["0.weight"].T + net["0.bias"])
    return hidden, hidden @ net["2.weight"].T + net["2.bias"]


def backward(net: Net, x: Array, hidden: Array, d_output: Array) -> Net:
    """Return the gradients of the weights from the gradient of the output."""
    d_hidden = (d_output @ net["2.weight"]) * (1.0 - hidden**2)
    return {
        "0.weight": d_hidden.T @ x,
        "0.bias": d_hidden.sum(0),
        "2.weight": d_output.T @ hidden,
        "2.bias": d_output.sum(0),
    }


def actor_gradient(net: Net, batch: dict[str, Array], advantage: Array, k: Numbers) -> Net:
    """Return the gradient of the clipped surrogate and of the entropy bonus, for a categorical policy."""
    count = len(advantage)
    hidden, logits = forward(net, batch["obs"])
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    p, taken = np.exp(log_p), batch["action"]
    ratio = np.exp(log_p[np.arange(count), taken] - batch["sample_log_prob"])
    clipped = np.clip(ratio, 1.0 - k.clip_coef, 1.0 + k.clip_coef)
    d_ratio = np.where(ratio * advantage <= clipped * advantage, advantage, 0.0)  # the other branch is flat
    d_log_p = (d_ratio * ratio)[:, None] * (np.eye(logits.shape[1])[taken] - p)
    entropy = -(p * log_p).sum(1, keepdims=True)
    d_entropy = -p * (log_p + entropy)
    return backward(net, batch["obs"], hidden, -(d_log_p + k.ent_coef * d_entropy) / count)


def critic_gradient(net: Net, batch: dict[str, Array], target: Array, k: Numbers) -> tuple[Net, float]:
    """Return the gradient of the critic's weighted squared error, and that error."""
    hidden, output = forward(net, batch["obs"])
    value, before = output[:, 0], batch["value"]
    error, slope = (value - target) ** 2, 2.0 * (value - target)
    if k.clip_vloss:
        moved = value - before
        clipped = before + np.clip(moved, -k.clip_coef, k.clip_coef)
        flat = (np.abs(moved) > k.clip_coef) & ((clipped - target) ** 2 > error)
        error, slope = np.maximum(error, (clipped - target) ** 2), np.where(flat, 0.0, slope)
    d_output = k.vf_coef * slope[:, None] / len(target)
    return backward(net, batch["obs"], hidden, d_output), float(error.mean())


def clip(gradients: list[Net], largest: float) -> None:
    """Scale gradients in place so that their joint norm is at most `largest`."""
    norm = np.sqrt(sum((g**2).sum() for net in gradients for g in net.values()))
    for net in gradients:
        for name in net:
            net[name] = net[name] * min(1.0, largest / (norm + 1e-6))


def step(weights: Net, gradient: Net, memory: dict[str, Any], number: int, k: Numbers) -> None:
    """Move weights in place by one step of the optimiser, whose moments are in `memory`."""
    rate = k.learning_rate
    for name, g in gradient.items():
        first, second = memory.get(name, (np.zeros_like(g), np.zeros_like(g)))
        if k.optimizer == "sgd":
            weights[name] = weights[name] - rate * g
        elif k.optimizer == "rmsprop":
            second = 0.99 * second + 0.01 * g**2
            weights[name] = weights[name] - rate * g / (np.sqrt(second) + 1e-8)
        else:
            decay = 0.01 if k.optimizer == "adamw" else 0.0
            first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
            m, v = first / (1.0 - 0.9**number), second / (1.0 - 0.999**number)
            weights[name] = weights[name] * (1.0 - rate * decay) - rate * m / (np.sqrt(v) + 1e-8)
        memory[name] = (first, second)


def minibatches(order: Array, k: Numbers) -> list[Array]:
    """Cut one pass: by size with a smaller last minibatch, or by number with the larger ones first."""
    if k.num_minibatches is not None:
        return np.array_split(order, k.num_minibatches)
    assert k.batch_size is not None
    return [order[first : first + k.batch_size] for first in range(0, len(order), k.batch_size)]


def update(
    weights: dict[str, Net], rollout: dict[str, Array], orders: Array, k: Numbers
) -> tuple[dict[str, Net], list[float]]:
    """Return the weights of `actor` and `critic` after all passes, and the critic's error in each minibatch.

    Args:
        weights: `actor` and `critic`.
        rollout: `[N, T + 1]` fields; rows in which `mask` is False are left out.
        orders: `[n_epochs, N * T]` int, the order of the rows in each pass.
        k: hyperparameters.
    """
    nets = {name: {key: w.astype(np.float64) for key, w in net.items()} for name, net in weights.items()}
    memories: dict[str, dict[str, Any]] = {name: {} for name in nets}
    advantage, target = (x.reshape(-1) for x in gae(rollout, k.gamma, k.gae_lambda))
    rows = {name: x[:, :-1].reshape(-1, *x.shape[2:]) for name, x in rollout.items()}
    counts = rows.get("mask", np.ones(len(target), bool))
    if k.normalize_advantage == "rollout":
        advantage[counts] = standardized(advantage[counts])
    errors: list[float] = []
    for index in (part for order in orders for part in minibatches(order, k)):
        index = index[counts[index]]
        batch, a = {name: x[index] for name, x in rows.items()}, advantage[index]
        a = standardized(a) if k.normalize_advantage == "minibatch" else a
        actor = actor_gradient(nets["actor"], batch, a, k)
        critic, error = critic_gradient(nets["critic"], batch, target[index], k)
        if k.critic_max_grad_norm is None:
            clip([actor, critic], k.max_grad_norm)
        else:
            clip([actor], k.max_grad_norm)
            clip([critic], k.critic_max_grad_norm)
        errors.append(error)
        for name, gradient in (("actor", actor), ("critic", critic)):
            step(nets[name], gradient, memories[name], len(errors), k)
    return nets, errors
