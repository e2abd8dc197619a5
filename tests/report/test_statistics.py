"""Statistics over seeds: against tables by hand, all resamples in full, and numpy's own moments."""

import itertools

import numpy as np
import pytest

from ecrl.report.statistics import bootstrap_interval, interquartile_mean


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0], 1.5),
        ([1.0, 2.0, 6.0], 3.0),  # 3 // 4 = 0 are left out
        ([8.0, 1.0, 2.0, 100.0], 5.0),  # (2 + 8) / 2
        ([0.0, 9.0, 1.0, 2.0, 6.0], 3.0),  # (1 + 2 + 6) / 3
        ([10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, -99.0], 5.5),  # 10 // 4 = 2 at each end: (3 + ... + 8) / 6
    ],
)
def test_interquartile_mean_by_hand(values, expected):
    assert interquartile_mean(np.array(values)) == pytest.approx(expected, abs=1e-12)


def test_interquartile_mean_is_of_the_first_axis():
    values = np.random.default_rng(1).normal(size=(9, 3, 2))
    one_by_one = [[interquartile_mean(values[:, i, j]) for j in range(2)] for i in range(3)]
    np.testing.assert_allclose(interquartile_mean(values), one_by_one, rtol=1e-12)


def every_resample(values, level):
    """The exact percentiles over all n ** n resamples."""
    means = [
        np.sort(r)[len(r) // 4 : len(r) - len(r) // 4].mean() for r in itertools.product(values, repeat=len(values))
    ]
    return np.percentile(means, [50 * (1 - level), 50 * (1 + level)])


@pytest.mark.parametrize("level", [0.95, 0.5])
def test_interval_is_that_of_all_resamples(level):
    values = np.array([1.0, 2.0, 4.0, 8.0, 16.0])  # 3125 resamples
    interval = bootstrap_interval(values, np.random.default_rng(0), 200_000, level)
    np.testing.assert_allclose(interval, every_resample(values, level), atol=0.15)


def test_interval_of_three_by_hand():
    """Three draws from 0, 3, 6 have 27 means. One is 0 and one is 6: each is 3.7 %, more than the tail of 2.5 %."""
    assert bootstrap_interval(np.array([0.0, 3.0, 6.0]), np.random.default_rng(0), 20_000) == (0.0, 6.0)
    low, high = bootstrap_interval(np.array([0.0, 3.0, 6.0]), np.random.default_rng(0), 20_000, 0.9)
    assert (low, high) == (1.0, 5.0)  # a tail of 5 % lies among the 3 means of 1, of 11.1 %


def test_interval_of_many_is_that_of_a_normal_mean():
    """With 40 seeds the width of the interval is 2 * 1.96 standard errors of the interquartile mean, within 15 %."""
    rng = np.random.default_rng(5)
    errors = np.std([interquartile_mean(rng.normal(size=40)) for _ in range(4000)])
    widths = [np.subtract(*bootstrap_interval(rng.normal(size=40), rng, 1000)[::-1]) for _ in range(100)]
    assert np.mean(widths) == pytest.approx(2 * 1.96 * errors, rel=0.15)


def test_equal_generators_give_equal_intervals_and_every_place_shares_its_draws():
    values = np.random.default_rng(2).normal(size=(5, 4))
    first, second = (bootstrap_interval(values, np.random.default_rng(0), 500) for _ in range(2))
    assert np.array_equal(first, second)
    assert first[0].shape == first[1].shape == (4,)
    twice = bootstrap_interval(np.stack([values[:, 0], values[:, 0]], 1), np.random.default_rng(0), 500)
    assert twice[0][0] == twice[0][1] and twice[1][0] == twice[1][1]


def test_equal_seeds_have_no_spread():
    assert bootstrap_interval(np.full(10, 500.0), np.random.default_rng(0), 100) == (500.0, 500.0)
