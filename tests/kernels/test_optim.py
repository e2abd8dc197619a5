"""Optimisers and gradient clipping, by hand, by plain loops and against torch."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, assert_pure, close
from tensordict import TensorDict

from ecrl import rng
from ecrl.kernels import (
    adam,
    adam_init,
    adamw,
    amsgrad,
    amsgrad_init,
    centered_rmsprop,
    centered_rmsprop_init,
    clip_by_global_norm,
    decoupled_weight_decay,
    global_norm,
    l2_weight_decay,
    nesterov_sgd,
    rmsprop,
    rmsprop_init,
    sgd,
    sgd_init,
)

F32, F64 = torch.float32, torch.float64
ADAM = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
FAST = {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.8, "eps": 1e-8}
RMSPROP = {"learning_rate": 0.01, "alpha": 0.95, "eps": 1e-5}
MOMENTUM = {"learning_rate": 0.01, "momentum": 0.9}


def with_l2(step):
    """The optimiser with an L2 penalty."""

    def decayed(params, grads, opt, *, weight_decay, **hyper):
        return step(params, l2_weight_decay(grads, params, weight_decay=weight_decay), opt, **hyper)

    return decayed


def decoupled(step):
    """The optimiser with decoupled weight decay."""

    def decayed(params, grads, opt, *, learning_rate, weight_decay, **hyper):
        params = decoupled_weight_decay(params, learning_rate=learning_rate, weight_decay=weight_decay)
        return step(params, grads, opt, learning_rate=learning_rate, **hyper)

    return decayed


OPTIMIZERS = {  # kernel, init, hyperparameters, the same in torch
    "adam": (adam, adam_init, ADAM, lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam_odd": (
        adam,
        adam_init,
        {"learning_rate": 0.3, "beta1": 0.5, "beta2": 0.8, "eps": 1e-3},
        lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.5, 0.8), eps=1e-3),
    ),
    "adamw": (
        adamw,
        adam_init,
        {**ADAM, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
    "sgd": (sgd, sgd_init, {"learning_rate": 0.01, "momentum": 0.0}, lambda p: torch.optim.SGD(p, lr=0.01)),
    "momentum": (
        sgd,
        sgd_init,
        {"learning_rate": 0.01, "momentum": 0.9},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    ),
    "rmsprop": (
        rmsprop,
        rmsprop_init,
        {"learning_rate": 0.01, "alpha": 0.95, "eps": 1e-5},
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.95, eps=1e-5),
    ),
    "amsgrad": (  # short memories, so that the second moment falls
        amsgrad,
        amsgrad_init,
        FAST,
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.8), amsgrad=True),
    ),
    "nesterov": (
        nesterov_sgd,
        sgd_init,
        MOMENTUM,
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    ),
    "centered_rmsprop": (
        centered_rmsprop,
        centered_rmsprop_init,
        RMSPROP,
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.95, eps=1e-5, centered=True),
    ),
    "adam_l2": (
        with_l2(adam),
        adam_init,
        {**ADAM, "weight_decay": 0.3},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.3),
    ),
    "amsgrad_l2": (
        with_l2(amsgrad),
        amsgrad_init,
        {**FAST, "weight_decay": 0.3},
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.5, 0.8), amsgrad=True, weight_decay=0.3),
    ),
    "amsgrad_decoupled": (
        decoupled(amsgrad),
        amsgrad_init,
        {**FAST, "weight_decay": 0.3},
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.5, 0.8), amsgrad=True, weight_decay=0.3),
    ),
    "nesterov_l2": (
        with_l2(nesterov_sgd),
        sgd_init,
        {**MOMENTUM, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.3),
    ),
    "sgd_l2": (
        with_l2(sgd),
        sgd_init,
        {**MOMENTUM, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.3),
    ),
    "rmsprop_l2": (
        with_l2(rmsprop),
        rmsprop_init,
        {**RMSPROP, "weight_decay": 0.3},
        lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.95, eps=1e-5, weight_decay=0.3),
    ),
}
KERNELS = ["adam", "adamw", "momentum", "rmsprop", "amsgrad", "nesterov", "centered_rmsprop"]


def tree(seed=0, dtype=F32, scale=1.0):
    """Nested parameters: a matrix, a vector, a single number."""
    a, b, c = rng.split(rng.key(seed), 3)
    drawn = [scale * rng.normal(key, shape, F64).to(dtype) for key, shape in ((a, (2, 3)), (b, (3,)), (c, ()))]
    return TensorDict({"actor": {"weight": drawn[0], "bias": drawn[1]}, "log_alpha": drawn[2]}, [])


def leaves(td):
    return [td["actor", "weight"], td["actor", "bias"], td["log_alpha"]]


def same(actual, expected, tol):
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        close(a, b, tol)


def run(name, params, grads, **changes):
    fn, init, hyper, _ = OPTIMIZERS[name]
    opt = init(params)
    for g in grads:
        params, opt = fn(params, g, opt, **{**hyper, **changes})
    return params, opt


def one(x):
    return TensorDict({"w": torch.tensor([x])}, [])


def test_adam_by_hand(variant):
    # two steps with g = 2 then g = -1, beta1 = 1/2, beta2 = 3/4, eps = 0, rate = 1
    # t=1: mu = 1, nu = 1; mu / (1/2) = 2, nu / (1/4) = 4: moves by -2/2
    # t=2: mu = 1/2 - 1/2 = 0, nu = 3/4 + 1/4 = 1: does not move
    hyper = {"learning_rate": 1.0, "beta1": 0.5, "beta2": 0.75, "eps": 0.0}
    params, opt = variant(adam)(one(5.0), one(2.0), adam_init(one(5.0)), **hyper)
    close(params["w"], [4.0], 1e-6)
    params, opt = variant(adam)(params, one(-1.0), opt, **hyper)
    close(params["w"], [4.0], 1e-6)
    assert [float(opt[k]) for k in (("mu", "w"), ("nu", "w"), "step")] == [0.0, 1.0, 2]
    # adamw decays by 1 - rate * decay first: 5 * (1 - 1/2) - 2/2
    out, _ = variant(adamw)(one(5.0), one(2.0), adam_init(one(5.0)), **hyper, weight_decay=0.5)
    close(out["w"], [1.5], 1e-6)


def test_sgd_and_rmsprop_by_hand(variant):
    # momentum 1/2, rate 1/10: buffer 2 then 1 + 4 = 5; moves by -0.2 and -0.5
    hyper = {"learning_rate": 0.1, "momentum": 0.5}
    params, opt = variant(sgd)(one(1.0), one(2.0), sgd_init(one(1.0)), **hyper)
    params, opt = variant(sgd)(params, one(4.0), opt, **hyper)
    close(params["w"], [0.3], 1e-6)
    assert float(opt["momentum", "w"]) == 5.0 and int(opt["step"]) == 2
    # alpha 3/4: nu = 4/4 = 1, so it moves by -0.1 * 2 / (1 + 1)
    params, opt = variant(rmsprop)(one(1.0), one(2.0), rmsprop_init(one(1.0)), learning_rate=0.1, alpha=0.75, eps=1.0)
    close(params["w"], [0.9], 1e-6)
    assert float(opt["nu", "w"]) == 1.0 and int(opt["step"]) == 1


def test_amsgrad_by_hand(variant):
    # beta1 = 1/2, beta2 = 3/4, eps = 0, rate = 1, g = 2 then 0
    # t=1: mu = 1, nu = max_nu = 1: moves by -(1 / (1/2)) / sqrt(1 / (1/4)) = -1
    # t=2: mu = 1/2, nu = 3/4, max_nu = 1: moves by -((1/2) / (3/4)) / sqrt(1 / (7/16)) = -(2/3) sqrt(7) / 4
    hyper = {"learning_rate": 1.0, "beta1": 0.5, "beta2": 0.75, "eps": 0.0}
    params, opt = variant(amsgrad)(one(5.0), one(2.0), amsgrad_init(one(5.0)), **hyper)
    close(params["w"], [4.0], 1e-6)
    params, opt = variant(amsgrad)(params, one(0.0), opt, **hyper)
    close(params["w"], [4.0 - math.sqrt(7.0) / 6.0], 1e-6)
    assert [float(opt[k]) for k in (("mu", "w"), ("nu", "w"), ("max_nu", "w"), "step")] == [0.5, 0.75, 1.0, 2]


def test_nesterov_and_centered_rmsprop_by_hand(variant):
    # momentum 1/2, rate 1/10: buffer 2, moves by -(2 + 1) / 10; buffer 1 + 4 = 5, moves by -(4 + 5/2) / 10
    hyper = {"learning_rate": 0.1, "momentum": 0.5}
    params, opt = variant(nesterov_sgd)(one(1.0), one(2.0), sgd_init(one(1.0)), **hyper)
    close(params["w"], [0.7], 1e-6)
    params, opt = variant(nesterov_sgd)(params, one(4.0), opt, **hyper)
    close(params["w"], [0.05], 1e-6)
    assert float(opt["momentum", "w"]) == 5.0 and int(opt["step"]) == 2
    # alpha 1/2: mu = 2, nu = 8, variance 8 - 4 = 4, so it moves by -0.1 * 4 / (2 + 2)
    start = centered_rmsprop_init(one(1.0))
    params, opt = variant(centered_rmsprop)(one(1.0), one(4.0), start, learning_rate=0.1, alpha=0.5, eps=2.0)
    close(params["w"], [0.9], 1e-6)
    assert [float(opt[k]) for k in (("mu", "w"), ("nu", "w"), "step")] == [2.0, 8.0, 1]


def test_weight_decay_by_hand(variant):
    close(variant(l2_weight_decay)(one(5.0), one(4.0), weight_decay=0.25)["w"], [6.0], 1e-6)
    close(variant(decoupled_weight_decay)(one(4.0), learning_rate=0.5, weight_decay=0.25)["w"], [3.5], 1e-6)


def test_weight_decay_gradcheck_and_no_retrace():
    p, g = rng.normal(rng.key(0), (3,), F64), rng.normal(rng.key(1), (3,), F64)
    decay, rate = torch.tensor(0.2, dtype=F64), torch.tensor(0.1, dtype=F64)

    def both(p, g, decay, rate):
        params, grads = TensorDict({"w": p}, []), TensorDict({"w": g}, [])
        shrunk = decoupled_weight_decay(params, learning_rate=rate, weight_decay=decay)
        return l2_weight_decay(grads, params, weight_decay=decay)["w"], shrunk["w"]

    leaf = lambda x: x.clone().requires_grad_()  # noqa: E731
    assert torch.autograd.gradcheck(both, (leaf(p), leaf(g), leaf(decay), leaf(rate)))
    assert_no_retrace(both, (p, g, decay, rate), (2 * p, 2 * g, 2 * decay, 2 * rate))


@given(st.floats(-1e3, 1e3), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_one_step_of_plain_sgd_decays_the_same_with_both_kinds(p, rate, decay):
    p, zero = TensorDict({"w": torch.tensor([p], dtype=F64)}, []), TensorDict({"w": torch.zeros(1, dtype=F64)}, [])
    grads = l2_weight_decay(zero, p, weight_decay=decay)
    out, _ = sgd(p, grads, sgd_init(p), learning_rate=rate, momentum=0.0)
    close(out["w"], decoupled_weight_decay(p, learning_rate=rate, weight_decay=decay)["w"], 1e-12)


def test_leaves_that_weight_decay_does_not_match_are_named():
    with pytest.raises(ValueError, match=r"^grads and params must have the same leaves; some of them lack .*bias"):
        l2_weight_decay(tree().exclude(("actor", "bias")), tree(), weight_decay=0.1)
    with pytest.raises(ValueError, match=r"^grads and params must have leaves of the same shapes; .*log_alpha .*\[1\]"):
        l2_weight_decay(tree(), tree().set("log_alpha", torch.zeros(1)), weight_decay=0.1)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6), st.floats(0.0, 0.99))
def test_the_divisor_of_amsgrad_never_falls(gradients, beta2):
    p, largest = TensorDict({"w": torch.zeros(1, dtype=F64)}, []), 0.0
    opt = amsgrad_init(p)
    for g in gradients:
        grads = TensorDict({"w": torch.tensor([g], dtype=F64)}, [])
        p, opt = amsgrad(p, grads, opt, learning_rate=0.1, beta1=0.9, beta2=beta2, eps=1e-8)
        assert float(opt["max_nu", "w"]) >= max(largest, float(opt["nu", "w"]))
        largest = float(opt["max_nu", "w"])


def test_equal_gradients_have_no_variance_up_to_rounding():
    """Rounding may make nu - mu^2 negative, which would be NaN under the root."""
    p, g = TensorDict({"w": torch.zeros(1000)}, []), TensorDict({"w": torch.linspace(0.1, 9.0, 1000)}, [])
    opt = centered_rmsprop_init(p)
    for _ in range(300):
        p, opt = centered_rmsprop(p, g, opt, learning_rate=1e-6, alpha=0.9, eps=1e-3)
        assert bool(p["w"].isfinite().all())
    assert bool((opt["nu", "w"] - opt["mu", "w"].square() < 0.0).any()), "the case must occur"


NUMBERS = [1, 0, torch.tensor(1), np.float32(0.5), np.float64(0.5), np.int64(1), 0.5, torch.tensor(0.5, dtype=F64)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hyperparameters_may_be_any_numbers(name):
    """Integers, floats, numbers of NumPy and 0-d tensors give the step of the equal float."""
    for key in OPTIMIZERS[name][2]:
        for number in NUMBERS:
            if key.startswith("beta") and float(number) == 1.0:
                continue  # the bias correction divides by 1 - beta
            out, expected = (run(name, one(1.0), [one(2.0)], **{key: x})[0]["w"] for x in (number, float(number)))
            close(out, expected, 1e-6)
            assert out.dtype == F32


@pytest.mark.parametrize("wrong", ["0.1", None, [0.1], {"a": 1}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_hyperparameter_that_is_no_number_is_named(name, wrong):
    for key in OPTIMIZERS[name][2]:
        with pytest.raises(
            ValueError, match=rf"^{key} is {re.escape(repr(wrong))}, expected a number or a 0-d tensor$"
        ):
            run(name, tree(), [tree(1)], **{key: wrong})


def oracle(name, params, grads, h):
    """The equations of the docstrings on Python floats; one parameter."""
    p, mu, nu, max_nu = params, 0.0, 0.0, 0.0
    for t, g in enumerate(grads, 1):
        if name == "amsgrad":
            mu, nu = h["beta1"] * mu + (1 - h["beta1"]) * g, h["beta2"] * nu + (1 - h["beta2"]) * g**2
            max_nu = max(max_nu, nu)
            root = math.sqrt(max_nu / (1 - h["beta2"] ** t))
            p -= h["learning_rate"] * (mu / (1 - h["beta1"] ** t)) / (root + h["eps"])
        elif name == "nesterov":
            mu = h["momentum"] * mu + g
            p -= h["learning_rate"] * (g + h["momentum"] * mu)
        elif name == "centered_rmsprop":
            mu, nu = h["alpha"] * mu + (1 - h["alpha"]) * g, h["alpha"] * nu + (1 - h["alpha"]) * g**2
            p -= h["learning_rate"] * g / (math.sqrt(nu - mu**2) + h["eps"])
        elif name in ("adam", "adamw"):
            mu, nu = h["beta1"] * mu + (1 - h["beta1"]) * g, h["beta2"] * nu + (1 - h["beta2"]) * g**2
            p = p * (1 - h["learning_rate"] * h.get("weight_decay", 0.0))
            p -= h["learning_rate"] * (mu / (1 - h["beta1"] ** t)) / (math.sqrt(nu / (1 - h["beta2"] ** t)) + h["eps"])
        elif name == "momentum":
            mu = h["momentum"] * mu + g
            p -= h["learning_rate"] * mu
        else:
            nu = h["alpha"] * nu + (1 - h["alpha"]) * g**2
            p -= h["learning_rate"] * g / (math.sqrt(nu) + h["eps"])
    return p


@pytest.mark.parametrize("name", KERNELS)
def test_oracle(variant, name):
    fn, _, hyper, _ = OPTIMIZERS[name]
    params, grads = tree(0, F64), [tree(seed, F64) for seed in (1, 2, 3)]
    out, opt = run(name, params, grads[:2])
    out, _ = variant(fn)(out, grads[2], opt, **hyper)
    for i, leaf in enumerate(leaves(params)):
        rows = zip(leaf.flatten().tolist(), *[leaves(g)[i].flatten().tolist() for g in grads], strict=True)
        expected = [oracle(name, p, gs, hyper) for p, *gs in rows]
        close(leaves(out)[i].flatten(), torch.tensor(expected, dtype=F64), 1e-13)


# float32: rounding differs in order only; 60 steps of 0.01 (0.3 for adam_odd) leave a few 1e-7 of the size moved
@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-12), (F32, 1e-6)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_torch(name, dtype, tol):
    grads = [tree(seed, dtype, 10.0 ** (seed % 5 - 2)) for seed in range(1, 61)]
    params = tree(0, dtype)
    ecrl_params, _ = run(name, params, grads)
    torch_params = [torch.nn.Parameter(p.clone()) for p in leaves(params)]
    optimizer = OPTIMIZERS[name][3](torch_params)
    for g in grads:
        for p, leaf in zip(torch_params, leaves(g), strict=True):
            p.grad = leaf.clone()
        optimizer.step()
    for a, b in zip(leaves(ecrl_params), torch_params, strict=True):
        close(a, b.detach(), tol * (10.0 if name == "adam_odd" else 1.0))


@pytest.mark.parametrize("name", KERNELS)
def test_zero_gradients(name):
    params, zero = tree(), tree(scale=0.0)
    out, opt = run(name, params, [zero] * 3)
    same(out, params.apply(lambda p: p * (1.0 - 0.01 * 0.1) ** 3) if name == "adamw" else params, 1e-6)
    assert int(opt["step"]) == 3 and opt["step"].dtype == torch.int64


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
def test_hyperparameters_keep_the_dtype_of_params(name, dtype):
    hyper = {key: torch.tensor(value, dtype=F64) for key, value in OPTIMIZERS[name][2].items()}
    params, grads = tree(dtype=dtype), [tree(seed, dtype=dtype) for seed in (1, 2)]
    out, opt = run(name, params, grads, **hyper)
    state = [leaf for key, leaf in opt.items(True, True) if key != "step"]
    assert {leaf.dtype for leaf in (*leaves(out), *state)} == {dtype}
    if dtype == F32:
        same(out, run(name, params, grads)[0], 1e-6)  # the same numbers as with floats


@pytest.mark.parametrize("name", KERNELS)
def test_vmapped_over_seeds_and_rates(name):
    fn, _, hyper, _ = OPTIMIZERS[name]
    rates = torch.tensor([0.1, 0.01, 0.0], dtype=F64)
    params, grads = ([tree(seed) for seed in seeds] for seeds in ((0, 1, 2), (3, 4, 5)))
    opts = [run(name, p, [g])[1] for p, g in zip(params, grads, strict=True)]
    step = lambda p, g, o, rate: fn(p, g, o, **{**hyper, "learning_rate": rate})  # noqa: E731
    together, _ = torch.vmap(step)(torch.stack(params), torch.stack(grads), torch.stack(opts), rates)
    for i in range(3):
        single, _ = step(params[i], grads[i], opts[i], rates[i])
        assert all(leaf.dtype == F32 for leaf in leaves(together))
        same(together[i], single, 1e-6)
    same(together[2], params[2], 0.0)  # rate 0 moves nothing


@pytest.mark.parametrize("name", KERNELS)
def test_new_hyperparameters_do_not_retrace(name):
    fn, init, hyper, _ = OPTIMIZERS[name]
    step = lambda p, g, o, h: fn(p, g, o, **h)  # noqa: E731
    first, second = ({k: torch.tensor(v * scale) for k, v in hyper.items()} for scale in (1.0, 0.9))
    params, opt = run(name, tree(), [tree(1)])
    assert_no_retrace(step, (tree(), tree(1), init(tree()), first), (params, tree(2), opt, second))


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_flow_through_every_input(name):
    fn, init, hyper, _ = OPTIMIZERS[name]
    w, g, m = (rng.normal(rng.key(seed), (3,), F64).requires_grad_() for seed in (0, 1, 2))
    rate = torch.tensor(0.1, dtype=F64, requires_grad=True)
    slots = [key for key in init(one(1.0)).keys() if key != "step"]  # noqa: SIM118

    def step(w, g, m, rate):
        state = {slot: {"w": m.square() if slot in ("nu", "max_nu") else m} for slot in slots}
        opt = TensorDict({**state, "step": torch.tensor(4)}, [])
        params, opt = fn(TensorDict({"w": w}, []), TensorDict({"w": g}, []), opt, **{**hyper, "learning_rate": rate})
        return params["w"], *[opt[slot, "w"] for slot in slots]

    assert torch.autograd.gradcheck(step, (w, g, m, rate))


def test_a_frozen_learning_rate_and_locked_inputs():
    params, grads = tree().lock_(), tree(1).lock_()
    out, _ = assert_pure(adam, params, grads, adam_init(params).lock_(), **{**ADAM, "learning_rate": 0.0})
    same(out, params, 0.0)


WRONG = {
    "missing": (lambda td: td.exclude(("actor", "bias")), "actor.*bias"),
    "extra": (lambda td: td.clone().set("critic", torch.zeros(2)), "critic"),
    "narrow": (lambda td: td.clone().set("log_alpha", torch.zeros(1)), r"log_alpha .*\[1\]"),
    "broadcast": (lambda td: td.clone().set(("actor", "bias"), torch.zeros(1)), r"bias.*\[1\]"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("place", ["params", "grads", "opt"])
@pytest.mark.parametrize("name", KERNELS)
def test_other_structures_are_named(name, place, wrong):
    fn, init, hyper, _ = OPTIMIZERS[name]
    change, message = WRONG[wrong]
    args = {"params": tree(), "grads": tree(), "opt": init(tree())}
    args[place] = init(change(tree())) if place == "opt" else change(args[place])
    with pytest.raises(ValueError, match=message):
        fn(*args.values(), **hyper)


def test_global_norm_by_hand(variant):
    # 2-2-1 and 6-2-3 have norms 3 and 7; with 0: sqrt(9 + 49) = sqrt(58)
    grads = TensorDict(
        {"a": torch.tensor([2.0, 2.0, 1.0]), "b": {"c": torch.tensor([[6.0, 2.0, 3.0]]), "d": torch.tensor(0.0)}}
    )
    close(variant(global_norm)(grads), math.sqrt(58.0), 1e-6)
    clipped, norm = variant(clip_by_global_norm)(grads, max_norm=math.sqrt(58.0) / 2.0)
    close(norm, math.sqrt(58.0), 1e-6)
    close(clipped["b", "c"], [[3.0, 1.0, 1.5]], 1e-6)
    unclipped, _ = variant(clip_by_global_norm)(grads, max_norm=8.0)
    close(unclipped["a"], [2.0, 2.0, 1.0], 0.0)


@pytest.mark.ref
@pytest.mark.parametrize(("dtype", "tol"), [(F64, 1e-12), (F32, 1e-6)])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 3.0, 1e3])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e4])
def test_clipping_against_torch(dtype, tol, max_norm, scale):
    grads = tree(dtype=dtype, scale=scale)
    torch_params = [torch.nn.Parameter(torch.zeros_like(g)) for g in leaves(grads)]
    for p, g in zip(torch_params, leaves(grads), strict=True):
        p.grad = g.clone()
    expected = torch.nn.utils.clip_grad_norm_(torch_params, max_norm)
    clipped, norm = clip_by_global_norm(grads, max_norm=max_norm)
    close(norm, expected, tol)
    for a, b in zip(leaves(clipped), torch_params, strict=True):
        close(a, b.grad, tol)


def test_norm_in_half_precision_and_at_zero():
    # squares of 300 overflow float16; their root does not
    close(global_norm(TensorDict({"w": torch.full((4,), 300.0, dtype=torch.float16)}, [])), 600.0)
    zero = tree(scale=0.0, dtype=F64).apply(lambda g: g.requires_grad_())
    assert all(float(g.abs().max()) == 0.0 for g in torch.autograd.grad(global_norm(zero), leaves(zero)))
    max_norm = torch.tensor(0.5, dtype=F64)
    assert all(g.dtype == F32 for g in leaves(clip_by_global_norm(tree(), max_norm=max_norm)[0]))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_clipping_properties(scale, max_norm):
    grads = tree(dtype=F64, scale=scale)
    clipped, norm = clip_by_global_norm(grads, max_norm=max_norm)
    assert float(global_norm(clipped)) <= max_norm
    close(norm, scale * global_norm(tree(dtype=F64)), 1e-9)
    ratio = torch.cat([(a / b).flatten() for a, b in zip(leaves(clipped), leaves(grads), strict=True)])
    close(ratio, ratio[0].expand(10), 1e-12)  # one factor, so the direction stays


def test_clipping_gradcheck_and_no_retrace():
    def clip(g, max_norm):
        clipped, norm = clip_by_global_norm(TensorDict({"w": g}, []), max_norm=max_norm)
        return clipped["w"], norm

    g, max_norm = rng.normal(rng.key(0), (4,), F64), torch.tensor(0.7, dtype=F64)
    assert torch.autograd.gradcheck(clip, (g.clone().requires_grad_(), max_norm.clone().requires_grad_()))
    assert_no_retrace(clip, (g, max_norm), (g * 2.0, max_norm * 2.0))
