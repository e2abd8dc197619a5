"""Kernels of learning from replay against rlax, TorchRL, Stable-Baselines3 and torch, in float32.

Tolerance 1e-5 of the size, for at most 40 float32 steps that are each rounded by 6e-8.
"""

import numpy as np
import pytest
import torch
from support.checks import close
from tensordict import TensorDict
from torch.nn import functional

from ecrl import kernels as k
from ecrl import rng

pytestmark = [pytest.mark.ref, pytest.mark.filterwarnings("ignore:Rlax:PendingDeprecationWarning")]
B, A, ATOMS, GAMMA = 16, 3, 7, 0.9
SUPPORT = torch.linspace(-2.0, 2.0, ATOMS)


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ended(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.2


def actions(seed):
    return torch.randint(A, (B,), generator=torch.Generator().manual_seed(seed))


def taken(q, action):
    return q[torch.arange(B), action]


@pytest.fixture(scope="module")
def rlax():
    return pytest.importorskip("rlax")


@pytest.fixture(scope="module")
def rows():
    """Call a function of rlax, which takes one transition, on a batch of tensors."""
    jax = pytest.importorskip("jax")

    def call(fn, *tensors):
        return torch.from_numpy(np.array(jax.vmap(fn)(*(x.numpy() for x in tensors))))

    return call


def test_rlax_one_step_targets(rlax, rows):
    reward, q, next_q, selector = normal(0, B), normal(1, B, A), normal(2, B, A), normal(3, B, A)
    terminated, action, probs = ended(4, B), actions(5), normal(6, B, A).softmax(-1)
    discount, q_taken = GAMMA * (~terminated).float(), taken(q, action)
    error = rows(rlax.q_learning, q, action, reward, discount, next_q)
    close(k.q_target(reward, next_q, terminated, gamma=GAMMA) - q_taken, error)
    error = rows(rlax.double_q_learning, q, action, reward, discount, next_q, selector)
    close(k.double_q_target(reward, next_q, selector, terminated, gamma=GAMMA) - q_taken, error)
    error = rows(rlax.expected_sarsa, q, action, reward, discount, next_q, probs)
    close(k.expected_q_target(reward, next_q, probs, terminated, gamma=GAMMA) - q_taken, error)
    # One critic and no entropy: TD learning.
    error = rows(rlax.td_learning, q_taken, reward, discount, next_q[:, 0])
    close(k.min_q_target(reward, next_q[None, :, 0], terminated, gamma=GAMMA) - q_taken, error)


@pytest.mark.parametrize("trace", [0.0, 0.7, 1.0])
def test_rlax_traces(rlax, trace):
    # A time limit is a lambda of 0 there. Its retrace takes probabilities, and a constant lambda: only true ends.
    q, next_q, reward = normal(0, B, A), normal(1, B, A), normal(2, B)
    terminated, truncated, action, next_action = ended(3, B), ended(4, B), actions(5), actions(6)
    done, discount = terminated | truncated, (GAMMA * (~terminated).float()).numpy()
    lambdas = (trace * ~done).numpy().astype(np.float32)
    error = rlax.q_lambda(q.numpy(), action.numpy(), reward.numpy(), discount, next_q.numpy(), lambdas)
    target = k.q_lambda(reward, next_q, terminated, done, gamma=GAMMA, trace=trace)
    close(target - taken(q, action), torch.from_numpy(np.array(error)))

    pi, mu = normal(7, B, A).softmax(-1), normal(8, B).sigmoid()
    error = rlax.retrace(
        *(x.numpy() for x in (q, next_q, action, next_action, reward)), discount, pi.numpy(), mu.numpy(), trace, 0.0
    )
    next_log_rho = torch.log(taken(pi, next_action) / mu)
    log_rho = torch.cat((torch.zeros(1), next_log_rho[:-1]))  # ours belongs to the action of the same step
    fields = taken(next_q, next_action), (pi * next_q).sum(-1), log_rho
    target = k.retrace(reward, *fields, terminated, terminated, gamma=GAMMA, trace=trace)
    close(target - taken(q, action), torch.from_numpy(np.array(error)))


def test_rlax_categorical(rlax, rows):
    probs, atoms, support = normal(0, B, ATOMS).softmax(-1), 3 * normal(1, B, ATOMS), SUPPORT.expand(B, ATOMS)
    uneven = torch.tensor([-2.0, -1.5, 0.0, 0.25, 3.0])
    for points in (SUPPORT, uneven):
        expected = rows(rlax.categorical_l2_project, atoms, probs, points.expand(B, -1))
        close(k.categorical_project(probs, atoms, points), expected)

    reward, terminated, action = normal(2, B), ended(3, B), actions(4)
    discount, ones = GAMMA * (~terminated).float(), torch.ones(B)
    logits, next_logits, q = normal(5, B, A, ATOMS), normal(6, B, A, ATOMS), normal(7, B, A)
    own_mean = (next_logits.softmax(-1) * SUPPORT).sum(-1)
    inputs = (support, logits, action, reward, discount, support, next_logits)
    for selector, expected in (
        (own_mean, rows(rlax.categorical_q_learning, *inputs)),
        (q, rows(rlax.categorical_double_q_learning, *inputs, q)),
    ):
        target = k.categorical_q_target(reward, next_logits, selector, terminated, SUPPORT, gamma=GAMMA)
        loss, _ = k.categorical_td_loss(taken(logits, action)[None], target, ones, ones > 0)
        close(loss, expected.mean())
    expected = rows(rlax.categorical_td_learning, support, logits[:, 0], reward, discount, support, next_logits[:, 0])
    target = k.categorical_target(reward, next_logits[:, 0].softmax(-1), terminated, SUPPORT, gamma=GAMMA)
    close(k.categorical_td_loss(logits[:, 0][None], target, ones, ones > 0)[0], expected.mean())


@pytest.mark.parametrize("delta", [0.5, 1.0])
def test_rlax_quantiles(rlax, rows, delta):
    # It has the quantiles before the actions.
    reward, terminated, action, selector = normal(0, B), ended(1, B), actions(2), normal(3, B, A, ATOMS)
    quantiles, next_quantiles, discount = normal(4, B, A, ATOMS), normal(5, B, A, ATOMS), GAMMA * (~terminated).float()
    taus = k.quantile_midpoints(ATOMS)
    inputs = (
        *(quantiles.mT.contiguous(), taus.expand(B, -1), action, reward, discount),
        *(selector.mT.contiguous(), next_quantiles.mT.contiguous()),
    )
    expected = rows(lambda *xs: rlax.quantile_q_learning(*xs, huber_param=delta), *inputs)
    target = k.quantile_q_target(reward, next_quantiles, selector.mean(-1), terminated, gamma=GAMMA)
    close(k.quantile_huber_loss(taken(quantiles, action), taus, target, delta=delta), expected)


@pytest.mark.parametrize("delta", [0.5, 2.0])
def test_huber(rlax, delta):
    x, target = 3 * normal(0, 2, B), normal(1, B)
    close(k.huber(x, delta=delta), torch.from_numpy(np.array(rlax.huber_loss(x.numpy(), delta))))
    ones = torch.ones(B)
    expected = sum(functional.huber_loss(q, target, delta=delta) for q in x)
    close(k.td_loss(x, target, ones, ones > 0, delta=delta)[0], expected)
    expected = sum(functional.mse_loss(q, target) for q in x) / 2  # without a bound
    close(k.td_loss(x, target, ones, ones > 0, delta=float("inf"))[0], expected)


def test_rlax_dpg_gradient(rlax):
    """The gradient of the policy's action equals the gradient of rlax's surrogate loss, `-dq/da`."""
    jax = pytest.importorskip("jax")
    action, weights = normal(0, B).requires_grad_(), normal(1, B)
    q = weights * action + 0.5 * action.square()
    ours = torch.autograd.grad(k.dpg_loss(q, torch.ones(B) > 0)[0], action, retain_graph=True)[0]
    dqda = torch.autograd.grad(q.sum(), action)[0].numpy()
    surrogate = jax.grad(lambda a: rlax.dpg_loss(a, dqda).sum())(action.detach().numpy())
    close(ours, torch.from_numpy(np.array(surrogate)) / B)  # its loss is a sum over the entries


def test_torchrl_targets_of_actor_critics():
    functions = pytest.importorskip("torchrl.objectives.value.functional")
    reward, next_q, log_prob, terminated = normal(0, B), normal(1, 2, B), normal(2, B), ended(3, B)
    for value, target in (
        (next_q.amin(0), k.min_q_target(reward, next_q, terminated, gamma=GAMMA)),
        (
            next_q.amin(0) - 0.3 * log_prob,
            k.soft_min_q_target(reward, next_q, log_prob, terminated, gamma=GAMMA, temperature=0.3),
        ),
    ):
        columns = (x.unsqueeze(-1) for x in (value, reward, terminated))
        close(target, functions.td0_return_estimate(GAMMA, *columns).squeeze(-1))


def test_stable_baselines3_target_networks_and_noise():
    utils = pytest.importorskip("stable_baselines3.common.utils")
    noise = pytest.importorskip("stable_baselines3.common.noise")
    params, target = normal(0, 5), normal(1, 5)
    ours = k.soft_update(TensorDict({"w": params}, []), TensorDict({"w": target}, []), tau=0.05)["w"]
    utils.polyak_update([params], [target], 0.05)  # writes on its target
    close(ours, target)

    np.random.seed(3)
    process = noise.OrnsteinUhlenbeckActionNoise(np.zeros(2), sigma=0.3 * np.ones(2), theta=0.15, dt=0.01)
    expected = [process() for _ in range(20)]
    np.random.seed(3)
    state = torch.zeros(2, dtype=torch.float64)
    for sample in expected:
        state = k.ou_noise(state, torch.from_numpy(np.random.normal(size=2)), theta=0.15, sigma=0.3, dt=0.01)
        close(state, torch.from_numpy(sample))


@pytest.mark.parametrize("step", [4, 5])
def test_rlax_periodic_update(rlax, step):
    jax = pytest.importorskip("jax")
    params, target = normal(0, 5), normal(1, 5)
    expected = rlax.periodic_update(params.numpy(), target.numpy(), jax.numpy.array(step), 2)
    tree = [TensorDict({"w": x}, []) for x in (params, target)]
    actual = k.periodic_update(*tree, torch.tensor(step), period=2)["w"]
    close(actual, torch.from_numpy(np.array(expected)))


def test_rlax_epsilon_greedy(rlax):
    """The frequencies of our samples are the probabilities of its distribution (chi-square)."""
    q, count = normal(0, A), 20_000
    probs = torch.from_numpy(np.array(rlax.epsilon_greedy(0.3).probs(q.numpy()))).double()
    noise = rng.gumbel(rng.split(rng.key(1), count), (A,))
    seen = torch.bincount(k.epsilon_greedy(q.expand(count, A), noise, epsilon=0.3), minlength=A)
    assert ((seen - count * probs).square() / (count * probs)).sum() < 13.8  # 0.999 quantile, 2 degrees of freedom
