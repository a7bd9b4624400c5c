"""Two tests of counts against a law that is known exactly, each with the probability of a false alarm."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FEWEST_EXPECTED = 20  # outcomes expected less often are counted together: chi-square is an approximation for many


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test.

    Attributes:
        statistic: Sum of (observed - expected)^2 / expected.
        degrees: Degrees of freedom.
        p_value: The probability of a statistic at least as large where the law holds; 0 when an impossible outcome occurred.
    """

    statistic: float
    degrees: int
    p_value: float


@dataclass(frozen=True)
class TotalVariation:
    """Half the summed absolute differences between observed frequencies and probabilities.

    Attributes:
        distance: 0 to 1.
        limit: What it exceeds with at most the asked probability where the law holds, for any law and any number of samples.
    """

    distance: float
    limit: float


def chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> ChiSquare:
    """Tests counts [outcomes] against probabilities [outcomes] that sum to 1."""
    from scipy import stats

    expected = probabilities * counts.sum()
    frequent = expected >= _FEWEST_EXPECTED
    observed = np.append(counts[frequent], counts[~frequent].sum()).astype(np.float64)
    expected = np.append(expected[frequent], expected[~frequent].sum())
    used = expected > 0
    if counts[probabilities == 0].any():
        return ChiSquare(math.inf, int(used.sum()) - 1, 0.0)
    if used[-1] and expected[-1] < _FEWEST_EXPECTED and used.sum() > 1:
        # What is rare even together joins the least frequent of the others.
        least = int(np.argmin(expected[:-1]))
        observed[least] += observed[-1]
        expected[least] += expected[-1]
        used[-1] = False
    statistic = float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())
    degrees = int(used.sum()) - 1
    return ChiSquare(statistic, degrees, float(stats.chi2.sf(statistic, degrees)) if degrees else 1.0)


def total_variation(counts: NDArray[np.int64], probabilities: NDArray[np.float64], false_alarm: float) -> TotalVariation:
    """Measures counts [outcomes] against probabilities [outcomes].

    The limit is the largest expected distance, half the sum of sqrt(p (1 - p) / n), and what McDiarmid's inequality adds for
    one sample changing the distance by at most 1 / n: sqrt(ln(1 / false_alarm) / (2 n)).
    """
    samples = int(counts.sum())
    distance = 0.5 * np.abs(counts / samples - probabilities).sum()
    expected = 0.5 * np.sqrt(probabilities * (1 - probabilities) / samples).sum()
    return TotalVariation(float(distance), float(expected + math.sqrt(math.log(1 / false_alarm) / (2 * samples))))
