"""Confidence intervals for medians and paired ratios of timings.  Formulas: docs/reference/metrics.md.

Fewer than :data:`FEWEST` values have no interval: its ends are NaN, which plots and tables leave out.  No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

CONFIDENCE: Final = 0.95
FEWEST: Final = 6  # values: the range of five holds the median in 0.94 of samples, and is no interval of 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from ``n`` values or pairs, and the ends of its confidence interval; NaN for too few."""

    estimate: float
    low: float
    high: float
    n: int

    @property
    def known(self) -> bool:
        """Whether there are enough values for an interval."""
        return not math.isnan(self.low)

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies between the ends."""
        return self.low <= value <= self.high


def median_interval(values: Sequence[float]) -> Interval:
    """Median with the interval between two order statistics, interpolated to 95 %.

    Hettmansperger and Sheather, "Confidence intervals based on interpolated order statistics", 1986: between
    the d-th values from both ends, whose coverage is binomial, and the next ones inside.

    Raises:
        ValueError: without values.
    """
    data = np.sort(_data(values))
    n, median = len(data), float(np.median(data))
    if n < FEWEST:
        return Interval(median, math.nan, math.nan, n)
    d = 1
    while (inner := _coverage(n, d + 1)) >= CONFIDENCE:
        d += 1
    share = ((outer := _coverage(n, d)) - CONFIDENCE) / (outer - inner)
    inwards = (n - d) * share / (d + (n - 2 * d) * share)
    low = (1 - inwards) * data[d - 1] + inwards * data[d]
    high = (1 - inwards) * data[n - d] + inwards * data[n - d - 1]
    return Interval(median, min(float(low), median), max(float(high), median), n)


def _coverage(n: int, d: int) -> float:
    """Probability that the median lies between the d-th smallest and the d-th largest of ``n`` values."""
    return 1.0 - 2.0 * sum(math.comb(n, below) for below in range(d)) / 2.0**n


def paired_ratio_interval(
    numerator: Mapping[Hashable, float], denominator: Mapping[Hashable, float]
) -> Interval:
    """Geometric mean of ratios paired by key (the repeat), with a t interval on their logarithms.

    Drift between repeats cancels.  Keys that only one side has are left out.

    Raises:
        ValueError: without a common key, or for values that are not positive.
    """
    keys = [key for key in numerator if key in denominator]
    above, below = _data([numerator[key] for key in keys]), _data([denominator[key] for key in keys])
    values = np.concatenate([above, below])
    if not (positive := values > 0).all():  # a NaN is not positive either
        raise ValueError(f"a ratio needs positive values, got {values[~positive][0]}")
    logs = np.log(above) - np.log(below)
    mean, half = float(logs.mean()), math.nan
    if len(logs) >= FEWEST:
        error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
        half = quantile(len(logs) - 1) * error
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def quantile(freedom: float) -> float:
    """Student's t that bounds 95 % of the probability on both sides, with so many degrees of freedom."""
    from scipy import stats  # a second, which no command but a report needs

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def crossing(left: Sequence[float], right: Sequence[float]) -> tuple[float, float, float]:
    """Where a straight line between two means crosses zero, with its interval, as parts of the way.

    Fieller's: all places at which the line differs from zero by less than Student's t times its error there.
    An end beyond both means is -inf or inf: it was not measured.

    Args:
        left: values at 0.
        right: values at 1, whose mean has the other sign.

    Returns:
        (place, low, high) with the place in (0, 1); NaN ends for fewer than :data:`FEWEST` values on a side.
    """
    a, b = _data(left), _data(right)
    first, rise = float(a.mean()), float(b.mean() - a.mean())
    place = -first / rise
    if min(len(a), len(b)) < FEWEST:
        return place, math.nan, math.nan
    t = quantile(len(a) + len(b) - 2)
    errors = [t * t * float(each.var(ddof=1)) / len(each) for each in (a, b)]

    def outside(x: float) -> bool:
        return (first + rise * x) ** 2 > errors[0] * (1 - x) ** 2 + errors[1] * x**2

    square, linear = rise**2 - sum(errors), 2 * (first * rise + errors[0])
    roots = np.roots([square, linear, first**2 - errors[0]])
    real = [float(x.real) for x in roots if not x.imag]
    below = [x for x in real if 0 <= x <= place]
    above = [x for x in real if place <= x <= 1]
    low = max(below) if below and outside(0.0) else -math.inf
    high = min(above) if above and outside(1.0) else math.inf
    return place, low, high


def _data(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The values as an array of at least one element."""
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    if len(data) == 0:
        raise ValueError("an interval needs at least one value")
    return data
