"""Distributional action values, against hand tables, plain float64 loops and properties."""

import inspect
from itertools import pairwise
from math import erf, exp, log, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import close

from ecrl.kernels import (
    categorical_kl,
    categorical_project,
    categorical_q_target,
    categorical_target,
    categorical_td_loss,
    hl_gauss,
    min_categorical_target,
    quantile_huber_loss,
    quantile_midpoints,
    quantile_q_target,
    soft_categorical_target,
)

NAN, INF = float("nan"), float("inf")
EVEN, UNEVEN = torch.linspace(-2.0, 2.0, 5), torch.tensor([-3.0, -1.0, -0.5, 2.0, 2.5])
seeds = st.integers(0, 2**31)
FIELDS = {
    categorical_target: ("reward", "next_probs", "terminated", "support"),
    categorical_q_target: ("reward", "next_logits", "next_q_selector", "terminated", "support"),
    quantile_q_target: ("reward", "next_logits", "next_q_selector", "terminated"),
}
each_target = pytest.mark.parametrize("kernel", FIELDS, ids=lambda k: k.__name__)


def random_batch(seed, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=dtype)

    batch = {"reward": normal(*shape), "next_logits": normal(*shape, 3, 5), "next_q_selector": normal(*shape, 3)}
    batch |= {"next_probs": normal(*shape, 5).softmax(-1), "support": UNEVEN.to(dtype)}
    return batch | {"terminated": torch.rand(shape, generator=g) < 0.3}


def run(kernel, batch, call=None, gamma=0.5):
    return (call or kernel)(*(batch[name] for name in FIELDS[kernel]), gamma=gamma)


def project(probs, atoms, support):
    """The projection of lists of floats, atom by atom onto its two neighbours."""
    out = [0.0] * len(support)
    for p, x in zip(probs, atoms, strict=True):
        x = min(max(x, support[0]), support[-1])
        above = next(j for j, z in enumerate(support) if z >= x)
        if support[above] == x:
            out[above] += p
        else:
            share = (x - support[above - 1]) / (support[above] - support[above - 1])
            out[above - 1] += p * (1.0 - share)
            out[above] += p * share
    return out


def softmax(logits):
    powers = [exp(x) for x in logits]
    return [x / sum(powers) for x in powers]


def loop(kernel, batch, gamma):
    """Each transition in Python floats, from the equations."""
    shape, support, rows = batch["reward"].shape, UNEVEN.double().tolist(), []
    gammas = torch.as_tensor(gamma).double().expand(shape).flatten().tolist()
    for i, gamma in enumerate(gammas):
        row = {name: batch[name].flatten(0, len(shape) - 1)[i].double().tolist() for name in batch if name != "support"}
        discount = 0.0 if row["terminated"] else gamma
        action = row["next_q_selector"].index(max(row["next_q_selector"]))
        if kernel is quantile_q_target:
            rows.append([row["reward"] + discount * z for z in row["next_logits"][action]])
        else:
            probs = row["next_probs"] if kernel is categorical_target else softmax(row["next_logits"][action])
            rows.append(project(probs, [row["reward"] + discount * z for z in support], support))
    return torch.tensor(rows, dtype=torch.float64).reshape(*shape, 5)


def test_project_by_hand(variant):
    probs = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    atoms = torch.tensor([[0.25, 3.0, -3.0], [4.0, 5.0, 6.0], [-INF, INF, 2.0]])
    even, uneven = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 5.0])
    close(variant(categorical_project)(probs, atoms, even), [[0.625, 0.125, 0.25], [0, 0, 1], [0.2, 0, 0.8]])
    expected = [[0.625, 0.25, 0.125], [0, 0.25, 0.75], [0.2, 0.375, 0.425]]  # 3 is halfway between 1 and 5
    close(variant(categorical_project)(probs, atoms, uneven), expected)
    close(variant(categorical_project)(probs, atoms, even[:1]), [[1.0], [1.0], [1.0]])


@given(seed=seeds, shape=st.sampled_from([(), (3,), (2, 1, 2)]), atoms=st.integers(1, 7), points=st.integers(1, 6))
def test_project_against_loop(seed, shape, atoms, points):
    g = torch.Generator().manual_seed(seed)
    probs = torch.randn(*shape, atoms, generator=g).softmax(-1)
    x, support = 2 * torch.randn(*shape, atoms, generator=g), torch.randn(points, generator=g).sort().values
    x[..., 0] = support[0]  # an atom on a point
    rows = zip(*(t.double().reshape(-1, atoms).tolist() for t in (probs, x)), strict=True)
    expected = torch.tensor([project(*row, support.double().tolist()) for row in rows]).reshape(*shape, points)
    out = categorical_project(probs, x, support)
    close(out, expected)
    inside = x.clamp(support[0], support[-1])
    close((out * support).sum(-1), (probs * inside).sum(-1))  # the mean is kept


def test_targets_by_hand(variant):
    # With gamma 1/2, the atoms of row 0 are 1/2 + [0, 1/2, 1]. Row 1 is terminated, so all its atoms are 1/2.
    support, reward = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.5, 9.0])
    probs, ended = torch.tensor([[0.5, 0.25, 0.25], [NAN] * 3, [1.0, 0.0, 0.0]]), torch.tensor([False, True, False])
    expected = [[0.25, 0.625, 0.125], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    for gamma in (0.5, torch.tensor([0.5, 0.9, 0.1])):
        close(variant(categorical_target)(reward, probs, ended, support, gamma=gamma), expected)
    other = torch.tensor([[9.0, 1.0, 1.0], [0.0] * 3, [1.0, 2.0, 3.0]])
    logits = torch.stack((other, probs.log()), 1)
    selector = torch.tensor([[1.0, 2.0], [NAN, NAN], [-1.0, 0.0]])
    close(variant(categorical_q_target)(reward, logits, selector, ended, support, gamma=torch.tensor(0.5)), expected)
    quantiles = torch.stack((other, torch.tensor([[2.0, 4.0, 6.0], [NAN] * 3, [0.0, 0.0, 8.0]])), 1)
    actual = variant(quantile_q_target)(reward.long(), quantiles, selector, ended, gamma=0.5)
    close(actual, [[1.0, 2.0, 3.0], [0.0] * 3, [9.0, 9.0, 13.0]])


@each_target
def test_targets_against_loop(variant, kernel):
    batch, gamma = random_batch(0, 2, 3), torch.tensor([[0.9, 0.5, 0.0], [0.1, 0.99, 1.0]])
    close(run(kernel, batch, variant(kernel), 0.9), loop(kernel, batch, 0.9))
    close(run(kernel, batch, variant(kernel), gamma), loop(kernel, batch, gamma))


@each_target
@given(seed=seeds, gamma=st.floats(0.0, 1.0))
def test_targets_with_any_discount(kernel, seed, gamma):
    batch = random_batch(seed, 4)
    out = run(kernel, batch, gamma=gamma)
    close(out, loop(kernel, batch, gamma))
    if kernel is not quantile_q_target:
        assert (out >= 0.0).all()
        close(out.sum(-1), torch.ones(4))


@each_target
@pytest.mark.parametrize("junk", [NAN, INF])
def test_the_next_state_is_not_read_where_its_weight_is_zero(kernel, junk):
    batch, gamma = random_batch(1, 6), torch.tensor([0.5, 0.0] * 3)
    unread = batch["terminated"] | (gamma == 0.0)
    filled = {
        k: x.masked_fill(unread.reshape(-1, *[1] * (x.ndim - 1)), junk) if k.startswith("next") else x
        for k, x in batch.items()
    }
    names = [name for name in FIELDS[kernel] if name in ("reward", "next_probs", "next_logits")]
    leaves = [filled[name].requires_grad_() for name in names]
    out = run(kernel, filled, gamma=gamma)
    assert torch.equal(out, run(kernel, batch, gamma=gamma))
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad.isfinite().all()


@each_target
def test_gradients_of_targets(kernel):
    batch = random_batch(2, 3, dtype=torch.float64) | {"terminated": torch.tensor([False, True, False])}
    names = [name for name in FIELDS[kernel] if name not in ("terminated", "next_q_selector")]
    leaves = [batch[name].requires_grad_() for name in names]

    def target(*values):
        return run(kernel, batch | dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(target, leaves)
    for name, grad in zip(names, torch.autograd.grad(target(*leaves).square().sum(), leaves), strict=True):
        assert grad.any(), f"nothing reaches {name}: targets detach nothing"


CRITICS = {
    min_categorical_target: ("reward", "next_logits", "terminated", "support"),
    soft_categorical_target: ("reward", "next_logits", "next_log_prob", "terminated", "support"),
}
each_critics_target = pytest.mark.parametrize("kernel", CRITICS, ids=lambda k: k.__name__)


def critics_batch(seed, *shape, dtype=torch.float32, critics=3):
    g = torch.Generator().manual_seed(seed + 1)
    logits, log_prob = (2 * torch.randn(size, generator=g, dtype=dtype) for size in ((critics, *shape, 5), shape))
    return random_batch(seed, *shape, dtype=dtype) | {"next_logits": logits, "next_log_prob": log_prob}


def run_critics(kernel, batch, call=None, gamma=0.5, temperature=0.3):
    more = {"temperature": temperature} if kernel is soft_categorical_target else {}
    return (call or kernel)(*(batch[name] for name in CRITICS[kernel]), gamma=gamma, **more)


def critics_loop(kernel, batch, gamma, temperature=0.3):
    """Each transition and critic in Python floats, from the equations."""
    shape, support = batch["reward"].shape, UNEVEN.double().tolist()
    rewards, log_probs = (batch[name].double().flatten().tolist() for name in ("reward", "next_log_prob"))
    discounts = torch.as_tensor(gamma).double().expand(shape).masked_fill(batch["terminated"], 0.0).flatten().tolist()
    logits = batch["next_logits"].double().flatten(1, -2) if shape else batch["next_logits"].double().unsqueeze(1)
    every = []
    for critic in logits.tolist():
        every.append([softmax(row) for row in critic])
    rows = []
    for i, (reward, discount) in enumerate(zip(rewards, discounts, strict=True)):
        if kernel is min_categorical_target:
            means = [sum(p * z for p, z in zip(probs[i], support, strict=True)) for probs in every]
            probs = every[means.index(min(means))][i]
            rows.append(project(probs, [reward + discount * z for z in support], support))
        else:
            bonus = -temperature * log_probs[i]
            atoms = [reward + discount * (z + bonus) for z in support]
            rows.append([project(probs[i], atoms, support) for probs in every])
    out = torch.tensor(rows, dtype=torch.float64)
    if kernel is min_categorical_target:
        return out.reshape(*shape, 5)
    return out.movedim(0, 1).reshape(len(every), *shape, 5)


def test_targets_of_critics_by_hand(variant):
    # The critics predict the returns 1 and 2 in row 0, and 2 and 0 in row 1. Row 2 is terminated.
    support, reward = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 0.0, 1.0])
    ended, one_hot = torch.tensor([False, False, True]), torch.eye(3)
    probs = torch.stack((one_hot[[1, 2, 0]], one_hot[[2, 0, 1]]))
    logits = probs.log().masked_fill(ended.unsqueeze(-1), NAN)
    smallest = variant(min_categorical_target)(reward, logits, ended, support, gamma=0.5)
    close(smallest, [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # returns 0.5 + 0.5 * 1, 0 and 1
    log_prob = torch.tensor([1.0, -2.0, NAN])  # at temperature 0.5, the bonus is -0.5 and 1
    soft = variant(soft_categorical_target)(reward, logits, log_prob, ended, support, gamma=0.5, temperature=0.5)
    first = [[0.25, 0.75, 0.0], [0.0, 0.5, 0.5], [0.0, 1.0, 0.0]]  # 0.5 + 0.5 * (1 - 0.5), 0.5 * (2 + 1) and 1
    second = [[0.0, 0.75, 0.25], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]  # 0.5 + 0.5 * (2 - 0.5), 0.5 * (0 + 1) and 1
    close(soft, [first, second])


@each_critics_target
def test_targets_of_critics_against_loop(variant, kernel):
    batch, gamma = critics_batch(0, 2, 3), torch.tensor([[0.9, 0.5, 0.0], [0.1, 0.99, 1.0]])
    close(run_critics(kernel, batch, variant(kernel), 0.9), critics_loop(kernel, batch, 0.9))
    close(run_critics(kernel, batch, variant(kernel), gamma), critics_loop(kernel, batch, gamma))


@each_critics_target
@given(seed=seeds, gamma=st.floats(0.0, 1.0), critics=st.integers(1, 4), shape=st.sampled_from([(), (4,), (2, 2)]))
def test_targets_of_any_number_of_critics(kernel, seed, gamma, critics, shape):
    batch = critics_batch(seed, *shape, critics=critics)
    out = run_critics(kernel, batch, gamma=gamma)
    close(out, critics_loop(kernel, batch, gamma))
    assert (out >= 0.0).all()
    close(out.sum(-1), torch.ones(out.shape[:-1]))
    if kernel is min_categorical_target and critics == 1:
        alone = batch | {"next_probs": batch["next_logits"][0].softmax(-1)}
        close(out, run(categorical_target, alone, gamma=gamma))


@each_critics_target
@pytest.mark.parametrize("junk", [NAN, INF])
def test_critics_are_not_read_where_their_weight_is_zero(kernel, junk):
    batch, gamma = critics_batch(1, 6), torch.tensor([0.5, 0.0] * 3)
    unread = batch["terminated"] | (gamma == 0.0)
    filled = batch | {
        "next_logits": batch["next_logits"].masked_fill(unread.unsqueeze(-1), junk),
        "next_log_prob": batch["next_log_prob"].masked_fill(unread, junk),
    }
    names = [name for name in CRITICS[kernel] if name not in ("terminated", "support")]
    leaves = [filled[name].requires_grad_() for name in names]
    out = run_critics(kernel, filled, gamma=gamma)
    assert torch.equal(out, run_critics(kernel, batch, gamma=gamma))
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad.isfinite().all()


@each_critics_target
def test_gradients_of_targets_of_critics(kernel):
    batch = critics_batch(2, 3, dtype=torch.float64) | {"terminated": torch.tensor([False, True, False])}
    batch["temperature"] = torch.tensor(0.3, dtype=torch.float64)
    names = [name for name in CRITICS[kernel] if name != "terminated"]
    names += ["temperature"] if kernel is soft_categorical_target else []
    leaves = [batch[name].requires_grad_() for name in names]

    def target(*values):
        changed = batch | dict(zip(names, values, strict=True))
        return run_critics(kernel, changed, temperature=changed["temperature"])

    assert torch.autograd.gradcheck(target, leaves)
    for name, grad in zip(names, torch.autograd.grad(target(*leaves).square().sum(), leaves), strict=True):
        assert grad.any(), f"nothing reaches {name}: targets detach nothing"


def test_bad_shapes_of_critics_are_named():
    for kernel, names in CRITICS.items():
        batch, parameters = critics_batch(5, 3, 4), inspect.signature(kernel).parameters
        for parameter, name in zip(parameters, names, strict=False):
            bad = batch[name].unsqueeze(0) if name == "support" else torch.cat((batch[name],) * 2, 1)
            with pytest.raises(ValueError, match=rf"^{parameter} has shape|the shape of {parameter}$"):
                run_critics(kernel, batch | {name: bad})
        with pytest.raises(ValueError, match=r"^next_logits has shape \[3, 3, 4, 5\], expected \[C, 3, 4, 4\]$"):
            run_critics(kernel, batch | {"support": UNEVEN[:-1]})


def test_an_empty_batch_has_no_targets():
    for kernel in CRITICS:
        assert run_critics(kernel, critics_batch(3, 0)).shape[-2:] == (0, 5)

    for kernel in FIELDS:
        assert run(kernel, random_batch(3, 0)).shape == (0, 5)
    for kernel in CRITICS:
        assert run_critics(kernel, critics_batch(3, 0)).shape[-2:] == (0, 5)


@given(seed=seeds)
def test_training_on_the_target_itself_has_the_least_loss(seed):
    """The cross-entropy is least at the target; beyond that, it is the KL divergence, which is the priority."""
    batch, ones = random_batch(seed, 6), torch.ones(6)
    target = run(categorical_q_target, batch)
    logits = batch["next_logits"][:, 0]
    loss, least = (categorical_td_loss(x[None], target, ones, ones > 0)[0] for x in (logits, target.log()))
    close(loss - least, categorical_kl(target.log(), logits).mean())


def test_midpoints_by_hand():
    close(quantile_midpoints(1), [0.5])
    close(
        quantile_midpoints(5, dtype=torch.float64),
        torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64),
        tol=1e-15,
    )
    assert quantile_midpoints(3).dtype == torch.float32


def quantile_loop(quantiles, taus, target, delta):
    def huber(u):
        return u * u / 2 if abs(u) <= delta else delta * (abs(u) - delta / 2)

    return sum(
        sum(abs(tau - (1.0 if t < q else 0.0)) * huber(t - q) for t in target) / len(target)
        for q, tau in zip(quantiles, taus, strict=True)
    )


def test_quantile_loss_by_hand(variant):
    # row 0: u = [[1, -1], [3, 1]], huber at 2 [[1/2, 1/2], [4, 1/2]], |tau - (u < 0)| [[1/4, 3/4], [3/4, 3/4]]
    quantiles, target = torch.tensor([[0.0, -2.0], [1.0, 1.0]]), torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    loss = variant(quantile_huber_loss)
    close(loss(quantiles, torch.tensor([0.25, 0.75]), target, delta=2.0), [0.5 / 2 + 3.375 / 2, 0.0])
    close(loss(quantiles, torch.tensor([[0.25, 0.75]] * 2), target, delta=torch.tensor(2.0)), [1.9375, 0.0])


@given(seed=seeds, delta=st.sampled_from([0.3, 1.0, INF]), shape=st.sampled_from([(), (4,), (2, 3)]))
def test_quantile_loss_against_loop(seed, delta, shape):
    g = torch.Generator().manual_seed(seed)
    quantiles, target = 2 * torch.randn(*shape, 4, generator=g), torch.randn(*shape, 3, generator=g)
    taus = torch.rand(*shape, 4, generator=g)
    rows = zip(*(t.double().reshape(-1, t.shape[-1]).tolist() for t in (quantiles, taus, target)), strict=True)
    expected = torch.tensor([quantile_loop(*row, delta) for row in rows]).reshape(shape)
    close(quantile_huber_loss(quantiles, taus, target, delta=delta), expected)


def test_the_least_quantile_loss_is_at_the_quantiles():
    """Gradient descent with a small delta finds the quantiles of the targets, whose midpoints are known."""
    target, taus = torch.arange(100.0, dtype=torch.float64), quantile_midpoints(4, dtype=torch.float64)
    quantiles = torch.full((4,), 50.0, dtype=torch.float64)
    for _ in range(400):
        leaf = quantiles.detach().requires_grad_()
        quantiles = leaf - 50.0 * torch.autograd.grad(quantile_huber_loss(leaf, taus, target, delta=0.1), leaf)[0]
    close(quantiles.detach(), 100.0 * taus - 0.5, tol=0.02)


def test_gradients_of_the_quantile_loss():
    g = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, n, generator=g, dtype=torch.float64).requires_grad_() for n in (4, 4, 3)]
    loss = quantile_huber_loss(*tensors, delta=0.7)
    grads = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
    assert [grad is not None for grad in grads] == [True, False, False]
    assert torch.autograd.gradcheck(lambda q: quantile_huber_loss(q, *tensors[1:], delta=0.7), tensors[:1])


def test_hl_gauss_by_hand(variant):
    # One standard deviation around 0 holds erf(1 / sqrt 2) of the mass, two hold erf(sqrt 2).
    edges, value = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0]), torch.tensor([0.0, -9.0, INF])
    near, all_ = erf(1 / sqrt(2)), erf(sqrt(2))
    row = [(all_ - near) / 2 / all_, near / 2 / all_]
    half = [near / erf(4 / sqrt(2)), (all_ - near) / erf(4 / sqrt(2))]  # at an edge, the half inside the range counts
    for sigma in (1.0, torch.tensor(1.0)):
        out = variant(hl_gauss)(value, edges, sigma=sigma)
        close(out[:, :2], [row, half, out[2, :2].tolist()])
        close(out[2].flip(0), out[1])
    close(variant(hl_gauss)(value.long().clamp(-2, 2), edges, sigma=1e-3)[:2], [[0, 0.5, 0.5, 0], [1, 0, 0, 0]])


@given(seed=seeds, sigma=st.floats(0.05, 3.0), shape=st.sampled_from([(), (4,), (2, 0), (2, 3)]))
def test_hl_gauss_against_loop(seed, sigma, shape):
    g = torch.Generator().manual_seed(seed)
    value, edges = 2 * torch.randn(shape, generator=g), torch.randn(6, generator=g).sort().values
    ends, rows = edges.double().tolist(), []
    for y in value.double().flatten().tolist():
        y = min(max(y, ends[0]), ends[-1])
        cdf = [erf((end - y) / (sqrt(2) * sigma)) for end in ends]
        rows.append([(b - a) / (cdf[-1] - cdf[0]) for a, b in pairwise(cdf)])
    close(hl_gauss(value, edges, sigma=sigma), torch.tensor(rows).reshape(*shape, 5), tol=1e-4)


def test_the_mean_of_hl_gauss_is_the_value():
    """With narrow bins, the mean of the centres is near the value, away from the ends of the range."""
    edges = torch.linspace(-10.0, 10.0, 102)
    value = torch.linspace(-8.0, 8.0, 33)
    out = hl_gauss(value, edges, sigma=0.75 * 20 / 101)
    close((out * (edges[1:] + edges[:-1]) / 2).sum(-1), value, tol=1e-3)


def test_gradients_of_projections():
    g = torch.Generator().manual_seed(4)
    probs, atoms = (torch.randn(2, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2))
    support = UNEVEN.double().requires_grad_()
    assert torch.autograd.gradcheck(categorical_project, (probs, atoms, support))
    assert torch.autograd.gradcheck(lambda y, edges: hl_gauss(y, edges, sigma=0.8), (atoms, support))


def test_bad_shapes_are_named():
    for kernel, names in FIELDS.items():
        batch, parameters = random_batch(5, 3, 4), inspect.signature(kernel).parameters
        for parameter, name in zip(parameters, names, strict=False):
            bad = batch[name][:-1] if name == "support" else torch.cat((batch[name],) * 2, 1)
            with pytest.raises(ValueError, match=rf"^{parameter} has shape|the shape of {parameter}$"):
                run(kernel, batch | {name: bad})
    x, row = torch.zeros(3, 4), torch.zeros(4)
    calls = [
        ("atoms", lambda: categorical_project(x, row, row)),
        ("support", lambda: categorical_project(x, x, x)),
        ("edges", lambda: hl_gauss(row, x, sigma=1.0)),
        ("target", lambda: quantile_huber_loss(x, row, row, delta=1.0)),
        ("taus", lambda: quantile_huber_loss(x, torch.zeros(3), x, delta=1.0)),
        ("taus", lambda: quantile_huber_loss(x, torch.zeros(1, 4), x, delta=1.0)),
        ("quantiles", lambda: quantile_huber_loss(row[0], row, row, delta=1.0)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"^{name} has shape"):
            call()


def test_log_of_the_target_is_finite_where_it_counts():
    """A target with probability 0 and a logit of minus infinity there give a finite loss."""
    logits, one = torch.tensor([[[0.0, 0.0, -INF]]], requires_grad=True), torch.ones(1)
    loss, _ = categorical_td_loss(logits, torch.tensor([[0.5, 0.5, 0.0]]), one, one > 0)
    close(loss, log(2.0))
    assert torch.autograd.grad(loss, logits)[0].isfinite().all()
