"""What many seeds say together: the interquartile mean and its bootstrap interval.

A mean moves with one lucky or broken seed, a median throws most of the seeds away; the interquartile mean is of the
middle half. Source: Agarwal et al. 2021, arXiv:2108.13264.
"""

import numpy as np

Values = np.ndarray


def interquartile_mean(values: Values) -> Values:
    """The mean over the first axis without the quarter that is least and the quarter that is greatest.

        k = n // 4;  iqm = mean(sort(values)[k : n - k])

    Args:
        values: `[n, ...]`, a value of each seed; with fewer than four it is the mean.

    Returns: `[...]`.

    >>> float(interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])))
    5.5
    """
    n = len(values)
    return np.sort(values, axis=0)[n // 4 : n - n // 4].mean(axis=0)


def bootstrap_interval(
    values: Values, rng: np.random.Generator, resamples: int, level: float = 0.95
) -> tuple[Values, Values]:
    """The percentile bootstrap interval of the interquartile mean: of seeds drawn again and again, with replacement.

    Args:
        values: `[n, ...]`, a value of each seed; all places of the other axes share the draws.
        rng: draws the seeds.
        resamples: how often n seeds are drawn.
        level: share of the resamples within the interval.

    Returns: the lower and the upper end, `[...]` each.

    >>> low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0, 4.0]), np.random.default_rng(0), 1000)
    >>> float(low), float(high)
    (1.0, 4.0)
    """
    n = len(values)
    drawn = values[rng.integers(n, size=(n, resamples))]
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(interquartile_mean(drawn), [tail, 100.0 - tail], axis=0)
    return low, high
