"""Learning-rate schedules, by hand and against torch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.checks import assert_no_retrace, close

from ecrl.kernels import (
    cosine_schedule,
    exponential_schedule,
    linear_schedule,
    step_schedule,
    warmup_cosine_schedule,
    warmup_linear_schedule,
)

F64 = torch.float64
HORIZON = 20
LINEAR = {"start": 1.0, "end": 0.2, "horizon": HORIZON}
COSINE = {"end": 0.1, "horizon": HORIZON}
STEP = {"every": 7, "gamma": 0.3}
EXPONENTIAL = {"gamma": 0.9}
WARMUP = {"start": 0.3, "end": 0.1, "warmup": 6, "horizon": HORIZON}
lr_scheduler = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("fn", "kwargs", "step", "expected"),
    [
        # 3 - 2 * min(t / 4, 1)
        (linear_schedule, {"start": 3.0, "end": 1.0, "horizon": 4}, [0, 1, 4, 9], [3.0, 2.5, 1.0, 1.0]),
        # 1/2 + 1/2 * (1 + cos(pi t / 6)) / 2, with cosines 1, 1/2, 0, -1 and -1 held
        (cosine_schedule, {"end": 0.5, "horizon": 6}, [0, 2, 3, 6, 8], [1.0, 0.875, 0.75, 0.5, 0.5]),
        (step_schedule, {"every": 3, "gamma": 0.5}, [0, 2, 3, 5, 6], [1.0, 1.0, 0.5, 0.5, 0.25]),
        (exponential_schedule, {"gamma": 0.5}, [0, 1, 3], [1.0, 0.5, 0.125]),
        # 1/2 + t / 4 up to step 2, then 1 - (t - 2) / 8 down to 1/2 at step 6
        (
            warmup_linear_schedule,
            {"start": 0.5, "end": 0.5, "warmup": 2, "horizon": 6},
            [0, 1, 2, 4, 6, 9],
            [0.5, 0.75, 1.0, 0.75, 0.5, 0.5],
        ),
        # t / 2 up to step 2, then the cosine of the row above from step 2 to step 8
        (
            warmup_cosine_schedule,
            {"start": 0.0, "end": 0.5, "warmup": 2, "horizon": 8},
            [0, 1, 2, 4, 5, 8, 9],
            [0.0, 0.5, 1.0, 0.875, 0.75, 0.5, 0.5],
        ),
        # the run ends within the warm-up: the factor falls after it
        (
            warmup_linear_schedule,
            {"start": 0.0, "end": 0.25, "warmup": 4, "horizon": 3},
            [0, 2, 3, 4, 5],
            [0.0, 0.5, 0.75, 1.0, 0.25],
        ),
    ],
)
def test_by_hand(variant, fn, kwargs, step, expected):
    out = variant(fn)(torch.tensor(step), **kwargs)
    assert out.dtype == F64
    close(out, expected, 1e-14)
    single = variant(fn)(torch.tensor(step[1]), **kwargs)
    assert single.dtype == F64
    close(single, expected[1], 1e-14)


def linear(t):
    return 1.0 + (0.2 - 1.0) * min(t / HORIZON, 1)


def cosine(t):
    return 0.1 + (1 - 0.1) * (1 + math.cos(math.pi * min(t / HORIZON, 1))) / 2


def warmup_linear(t):
    return 0.3 + 0.7 * t / 6 if t < 6 else 1.0 + (0.1 - 1.0) * min((t - 6) / (HORIZON - 6), 1)


def warmup_cosine(t):
    return 0.3 + 0.7 * t / 6 if t < 6 else 0.1 + 0.9 * (1 + math.cos(math.pi * min((t - 6) / (HORIZON - 6), 1))) / 2


ORACLES = [
    (warmup_linear_schedule, WARMUP, warmup_linear),
    (warmup_cosine_schedule, WARMUP, warmup_cosine),
    (linear_schedule, LINEAR, linear),
    (cosine_schedule, COSINE, cosine),
    (step_schedule, STEP, lambda t: 0.3 ** (t // 7)),
    (exponential_schedule, EXPONENTIAL, lambda t: 0.9**t),
]


@pytest.mark.parametrize(("fn", "kwargs", "oracle"), ORACLES, ids=lambda x: getattr(x, "__name__", ""))
def test_oracle(variant, fn, kwargs, oracle):
    out = variant(fn)(torch.arange(2 * HORIZON), **kwargs)
    close(out, torch.tensor([oracle(t) for t in range(2 * HORIZON)], dtype=F64), 1e-13)


@pytest.mark.parametrize(("fn", "kwargs", "oracle"), ORACLES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_step_may_be_an_integer(fn, kwargs, oracle):
    for step in (0, 5, 7, 30, np.int64(5), torch.tensor(5, dtype=torch.int32)):
        out = fn(step, **kwargs)
        assert out.dtype == F64 and out.shape == ()
        close(out, torch.tensor(oracle(int(step)), dtype=F64), 1e-13)
    torch._dynamo.reset()
    compiled = torch.compile(lambda step: fn(step, **kwargs), backend="eager", fullgraph=True)
    assert [float(compiled(step)) for step in (1, 2, 9)] == [float(fn(step, **kwargs)) for step in (1, 2, 9)]


@pytest.mark.parametrize("wrong", ["5", None, [5]], ids=str)
@pytest.mark.parametrize(("fn", "kwargs", "oracle"), ORACLES, ids=lambda x: getattr(x, "__name__", ""))
def test_arguments_that_are_no_numbers_are_named(fn, kwargs, oracle, wrong):
    with pytest.raises(ValueError, match=r"^step is .*, expected a number or a 0-d tensor$"):
        fn(wrong, **kwargs)
    for name in kwargs:
        with pytest.raises(ValueError, match=f"^{name} is .*, expected a number or a 0-d tensor$"):
            fn(torch.tensor(5), **kwargs | {name: wrong})


@pytest.mark.parametrize(("fn", "kwargs", "oracle"), ORACLES, ids=lambda x: getattr(x, "__name__", ""))
def test_lengths_below_one_are_refused(fn, kwargs, oracle):
    for name in kwargs.keys() & {"horizon", "every", "warmup"}:
        with pytest.raises(ValueError, match=f"^{name} is 0, expected at least 1$"):
            fn(5, **kwargs | {name: 0})
        with pytest.raises(ValueError, match=rf"^{name} has shape \[1\], expected a number or a 0-d tensor$"):
            fn(5, **kwargs | {name: torch.tensor([7])})


@pytest.mark.ref
def test_warmups_against_optax():
    """optax computes in float32, and its horizon includes the warm-up too."""
    optax = pytest.importorskip("optax")
    theirs = optax.schedules.warmup_cosine_decay_schedule(0.3, 1.0, 6, HORIZON, end_value=0.1)
    expected = torch.tensor([float(theirs(t)) for t in range(2 * HORIZON)], dtype=F64)
    close(warmup_cosine_schedule(torch.arange(2 * HORIZON), **WARMUP), expected, 1e-6)
    theirs = optax.schedules.warmup_constant_schedule(0.3, 1.0, 6)
    expected = torch.tensor([float(theirs(t)) for t in range(HORIZON)], dtype=F64)
    close(linear_schedule(torch.arange(HORIZON), start=0.3, end=1.0, horizon=6), expected, 1e-6)


def rates_of(make, steps, rate=0.5):
    """Return the learning rates of torch's scheduler at steps 0 to steps - 1, divided by the initial rate."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler, out = make(optimizer), []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"] / rate)
        optimizer.step()
        scheduler.step()
    return torch.tensor(out, dtype=F64)


# torch multiplies factors step by step, so it drifts from the closed form by a rounding error each step
@pytest.mark.ref
@pytest.mark.parametrize(
    ("fn", "kwargs", "make", "steps"),
    [
        (linear_schedule, LINEAR, lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, HORIZON), 3 * HORIZON),
        (
            linear_schedule,
            {"start": 0.1, "end": 1.0, "horizon": HORIZON},
            lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, HORIZON),
            3 * HORIZON,
        ),
        # torch's cosine rises again after the horizon, ecrl's stays constant: compared up to it, eta_min = end * rate
        (cosine_schedule, COSINE, lambda o: lr_scheduler.CosineAnnealingLR(o, HORIZON, 0.1 * 0.5), HORIZON + 1),
        (cosine_schedule, {"end": 0.0, "horizon": 9}, lambda o: lr_scheduler.CosineAnnealingLR(o, 9), 10),
        (step_schedule, STEP, lambda o: lr_scheduler.StepLR(o, 7, 0.3), 3 * HORIZON),
        (exponential_schedule, EXPONENTIAL, lambda o: lr_scheduler.ExponentialLR(o, 0.9), 3 * HORIZON),
        (
            warmup_linear_schedule,
            WARMUP,
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.3, 1.0, 6), lr_scheduler.LinearLR(o, 1.0, 0.1, HORIZON - 6)], [6]
            ),
            3 * HORIZON,
        ),
        (
            warmup_cosine_schedule,
            WARMUP,
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o, 0.3, 1.0, 6), lr_scheduler.CosineAnnealingLR(o, HORIZON - 6, 0.1 * 0.5)],
                [6],
            ),
            HORIZON + 1,
        ),
    ],
)
def test_against_torch(fn, kwargs, make, steps):
    close(fn(torch.arange(steps), **kwargs), rates_of(make, steps), 1e-12)


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.floats(0.0, 1.0))
def test_ends(horizon, beyond, end):
    for fn, kwargs in ((linear_schedule, {"start": 1.0}), (cosine_schedule, {})):
        call = lambda t: fn(torch.tensor(t), **kwargs, end=end, horizon=horizon)  # noqa: B023, E731
        assert float(call(0)) == 1.0
        close(call(horizon + beyond), torch.tensor(end, dtype=F64), 1e-15)
        assert end - 1e-15 <= float(call(horizon // 2)) <= 1.0


@pytest.mark.parametrize(("fn", "kwargs", "oracle"), ORACLES, ids=lambda x: getattr(x, "__name__", ""))
def test_hyperparameters_as_tensors(fn, kwargs, oracle):
    # 0-d tensors give the same, stay float64, do not retrace and may be swept; horizons and periods are Python ints
    fixed = {key: value for key, value in kwargs.items() if isinstance(value, int)}
    swept = {key: torch.tensor(value, dtype=F64) for key, value in kwargs.items() if key not in fixed}
    call = lambda t, h: fn(t, **fixed, **h)  # noqa: E731
    close(call(torch.tensor(5), swept), torch.tensor(oracle(5), dtype=F64), 1e-13)
    half = {key: 0.5 * value for key, value in swept.items()}
    assert_no_retrace(call, (torch.tensor(5), swept), (torch.tensor(50), half))
    both = torch.vmap(call, (None, 0))(torch.tensor(5), {key: torch.stack((swept[key], half[key])) for key in swept})
    close(both, torch.stack((call(torch.tensor(5), swept), call(torch.tensor(5), half))), 1e-15)
    single = {key: value.float() for key, value in swept.items()}
    assert call(torch.tensor(5), single).dtype == F64


@pytest.mark.parametrize(("fn", "kwargs", "oracle"), ORACLES, ids=lambda x: getattr(x, "__name__", ""))
def test_gradients(fn, kwargs, oracle):
    names = [key for key, value in kwargs.items() if isinstance(value, float)]
    values = [torch.tensor(kwargs[name], dtype=F64, requires_grad=True) for name in names]
    assert torch.autograd.gradcheck(
        lambda *v: fn(torch.tensor(5), **{**kwargs, **dict(zip(names, v, strict=True))}), values
    )
