"""Goodness of fit of sampled tokens: Pearson's chi-squared test."""

import numpy as np
import torch
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Array = NDArray[np.float64]

MIN_EXPECTED = 8.0
"""Tokens that are expected less often are counted together: the statistic is good for cells from 5 on."""


def p_value(counts: Counts, shares: Array) -> float:
    """Probability that samples of these `shares` fit them worse than `counts` do.

    The smaller of the chi-squared test and the test for absent tokens; 0 if an impossible token occurred.
    """
    if counts[shares == 0].any():
        return 0.0
    expected = shares * counts.sum()
    return min(_absence(counts, expected), _chi_squared(*_merged(counts[shares > 0], expected[shares > 0])))


def pairs_p_value(first: Counts, second: Counts, num_values: int) -> float:
    """The p-value for pairs of independent values, uniform below `num_values`."""
    counts = np.bincount(first.ravel() * num_values + second.ravel(), minlength=num_values**2)
    return p_value(counts.astype(np.int64), np.full(num_values**2, num_values**-2.0))


def _merged(observed: Counts, expected: Array) -> tuple[Array, Array]:
    """Cells of at least MIN_EXPECTED: rare tokens are merged in order of their probability."""
    order = np.argsort(expected)
    total = np.cumsum(expected[order])
    num_rare = int((expected < MIN_EXPECTED).sum())
    if num_rare:
        num_rare = max(num_rare, int(np.searchsorted(total, MIN_EXPECTED)) + 1)
    rare, others = order[:num_rare], order[num_rare:]
    if not num_rare:
        return observed[others].astype(np.float64), expected[others]
    return (
        np.concatenate([[observed[rare].sum()], observed[others]]).astype(np.float64),
        np.concatenate([[expected[rare].sum()], expected[others]]),
    )


def _absence(counts: Counts, expected: Array) -> float:
    """Probability that the likeliest absent token, or another as likely, is absent."""
    absent = expected[counts == 0]
    return min(1.0, len(counts) * float(np.exp(-absent.max()))) if len(absent) else 1.0


def _chi_squared(observed: Array, expected: Array) -> float:
    """1 if only one outcome is possible."""
    statistic, degrees = float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
    if degrees == 0:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
