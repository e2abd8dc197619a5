"""Compute statistics over many seeds: the interquartile mean and its bootstrap interval.

A single lucky or failed seed can change a mean strongly, while a median uses only the middle seeds. The interquartile
mean averages the middle half of the seeds. Source: Agarwal et al. 2021, arXiv:2108.13264.
"""

import numpy as np

Values = np.ndarray


def interquartile_mean(values: Values) -> Values:
    """Return the mean over the first axis, without the smallest and the largest quarter of the values.

        k = n // 4;  iqm = mean(sort(values)[k : n - k])

    Args:
        values: array of shape `[n, ...]` with one value per seed; for fewer than four seeds, the result is the mean.

    Returns: the interquartile mean, of shape `[...]`.

    >>> float(interquartile_mean(np.array([9.0, 1.0, 2.0, 100.0])))
    5.5
    """
    n = len(values)
    return np.sort(values, axis=0)[n // 4 : n - n // 4].mean(axis=0)


def bootstrap_interval(
    values: Values, rng: np.random.Generator, resamples: int, level: float = 0.95
) -> tuple[Values, Values]:
    """Return the percentile bootstrap interval of the interquartile mean. Seeds are resampled with replacement.

    Args:
        values: array of shape `[n, ...]` with one value per seed; the same seeds are drawn at all positions of the
            other axes.
        rng: NumPy random generator.
        resamples: number of resamples, each with n seeds.
        level: fraction of the resamples whose interquartile mean lies in the interval.

    Returns: the lower and the upper end of the interval, each of shape `[...]`.

    >>> low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0, 4.0]), np.random.default_rng(0), 1000)
    >>> float(low), float(high)
    (1.0, 4.0)
    """
    n = len(values)
    samples = values[rng.integers(n, size=(n, resamples))]
    tail = 50.0 * (1.0 - level)
    low, high = np.percentile(interquartile_mean(samples), [tail, 100.0 - tail], axis=0)
    return low, high
