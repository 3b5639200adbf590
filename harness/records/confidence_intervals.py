"""Confidence intervals of medians, paired ratios and differences.  Formulas: docs/reference/metrics.md.

No interval is of fewer than :data:`FEWEST` values or pairs.  Of several sweeps, the sweeps' means or medians
are the values: means (and ratios) have an interval from :data:`FEWEST_SWEEPS` sweeps on, by Student's t;
medians from :data:`FEWEST` sweeps on, since the order statistics of five hold a median in less than 95 % of
samples.  Where there is none, its ends are NaN, and :attr:`Interval.why_none` says what is missing.  No
torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np

CONFIDENCE: Final = 0.95
FEWEST: Final = 6  # values: the range of five holds the median in 0.94 of samples, and is no interval of 0.95
FEWEST_SWEEPS: Final = 3  # of means: Student's t of two is 13 times their error
_NUMERALS: Final = {FEWEST_SWEEPS: "three", FEWEST: "six"}

_Key = TypeVar("_Key", bound=Hashable)
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from ``n`` values or pairs of ``sweeps``, and its confidence interval; NaN for too few."""

    estimate: float
    low: float
    high: float
    n: int
    sweeps: int = 1
    fewest_sweeps: int = FEWEST_SWEEPS  # of several, from which on there is an interval

    @property
    def why_none(self) -> str:
        """``n = 3: no interval; six are needed``, or the same of sweeps; empty where there are enough."""
        if 0 < self.n < FEWEST:
            return f"n = {self.n}: no interval; {_NUMERALS[FEWEST]} are needed"
        if 1 < self.sweeps < self.fewest_sweeps:
            return f"{self.sweeps} sweeps: no interval; {_NUMERALS[self.fewest_sweeps]} are needed"
        return ""

    @property
    def known(self) -> bool:
        """Whether there are enough values for an interval."""
        return not math.isnan(self.low)

    @property
    def half(self) -> float:
        """How far the upper end lies above the estimate, as a share of it; NaN for too few."""
        return self.high / self.estimate - 1

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies between the ends."""
        return self.low <= value <= self.high


def of_another_sweep(interval: Interval, *, ratio: bool) -> Interval:
    """Student's prediction interval of a further sweep; a ratio's is of its logarithm."""
    numbers = (interval.low, interval.estimate, interval.high)
    low, middle, high = map(math.log, numbers) if ratio else numbers
    wider = math.sqrt(1 + interval.sweeps)
    ends = (middle + wider * (end - middle) for end in (low, high))
    low, high = (math.exp(end) if ratio else end for end in ends)
    return replace(interval, low=low, high=high)


def median_interval(values: Sequence[float], sweeps: Sequence[int] | None = None) -> Interval:
    """Median with the interval between two order statistics, of several sweeps those of their medians,
    interpolated to 95 % (Hettmansperger and Sheather, 1986); a ValueError without values.

    From :data:`FEWEST` values, or of several sweeps :data:`FEWEST` sweeps, on: the range of fewer holds the
    median in less than 95 % of samples, so that there is none.
    """
    data = _data(values)
    n, median = len(data), float(np.median(data))
    of_sweeps = _by_sweep(data, sweeps, np.median)
    data = np.sort(data if len(of_sweeps) == 1 else of_sweeps)
    if (m := len(data)) < FEWEST:
        return Interval(median, math.nan, math.nan, n, len(of_sweeps), FEWEST)
    d = 1
    while (inner := _coverage(m, d + 1)) >= CONFIDENCE:
        d += 1
    share = ((outer := _coverage(m, d)) - CONFIDENCE) / (outer - inner)
    inwards = (m - d) * share / (d + (m - 2 * d) * share)
    low = float((1 - inwards) * data[d - 1] + inwards * data[d])
    high = float((1 - inwards) * data[m - d] + inwards * data[m - d - 1])
    return Interval(median, min(low, median), max(high, median), n, len(of_sweeps), FEWEST)


def _coverage(n: int, d: int) -> float:
    """Probability that the median lies between the d-th smallest and the d-th largest of ``n`` values."""
    return 1.0 - 2.0 * sum(math.comb(n, below) for below in range(d)) / 2.0**n


def paired_ratio_interval(
    above: Mapping[_Key, float], below: Mapping[_Key, float], sweeps: Mapping[_Key, int] | None = None
) -> Interval:
    """Geometric mean of the ratios above/below of positive values, paired by key, with its interval.

    Student's t on the logarithms of the ratios, of several sweeps on their means; keys on one side only are
    left out.  A ValueError if no key is shared, or a value is not positive (or NaN).
    """
    both = [key for key in above if key in below]
    for value in (*(above[key] for key in both), *(below[key] for key in both)):
        if not value > 0:  # NaN is neither
            raise ValueError(f"a ratio needs positive values, got {value}")
    logs = [math.log(above[key]) - math.log(below[key]) for key in both]
    log = mean_interval(logs, None if sweeps is None else [sweeps[key] for key in both])
    return Interval(math.exp(log.estimate), math.exp(log.low), math.exp(log.high), log.n, log.sweeps)


def geometric_interval(values: Sequence[float], sweeps: Sequence[int] | None = None) -> Interval:
    """Geometric mean of positive values, with the interval of their mean logarithm; else a ValueError."""
    by_index = None if sweeps is None else dict(enumerate(sweeps))
    return paired_ratio_interval(dict(enumerate(values)), dict.fromkeys(range(len(values)), 1.0), by_index)


def mean_interval(values: Sequence[float] | _Floats, sweeps: Sequence[int] | None = None) -> Interval:
    """Mean with Student's interval, of several sweeps that of their means; a ValueError without values."""
    data = _data(values)
    means = _by_sweep(data, sweeps, np.mean)
    few = len(data) < FEWEST or 1 < len(means) < FEWEST_SWEEPS
    kept = data if len(means) == 1 else means
    mean, half = float(kept.mean()), math.nan
    if not few:
        half = quantile(len(kept) - 1) * float(kept.std(ddof=1)) / math.sqrt(len(kept))
    return Interval(mean, mean - half, mean + half, len(data), len(means))


def _by_sweep(data: _Floats, sweeps: Sequence[int] | None, middle: Any) -> _Floats:
    """Median or mean of each sweep's values; one value for one sweep."""
    if sweeps is None or len(set(sweeps)) == 1:
        return np.array([middle(data)])
    numbers = np.asarray(sweeps)
    return np.array([middle(data[numbers == sweep]) for sweep in sorted(set(sweeps))])


@functools.cache
def quantile(freedom: float) -> float:
    """Student's t that bounds 95 % of the probability on both sides, with so many degrees of freedom."""
    from scipy import special  # only reports need it, and scipy.stats takes half a second more

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def undecided(
    left: Mapping[_Key, float],
    right: Mapping[_Key, float],
    sweeps: Mapping[_Key, int] | None = None,
) -> list[tuple[float, float]]:
    """Where a straight line between two means may be zero, as parts (low, high) of the way from the left one.

    Fieller's: all places at which the line differs from zero by less than Student's t times its error there,
    of values paired by key.  With too few values or sweeps it is the whole way, (0, 1).
    """
    both = [key for key in left if key in right]
    numbers = None if sweeps is None else [sweeps[key] for key in both]
    few = len(both) < FEWEST
    if few or (numbers is not None and 1 < len(set(numbers)) < FEWEST_SWEEPS):
        return [(0.0, 1.0)]
    a, b = (_data([side[key] for key in both]) for side in (left, right))
    if numbers is not None and len(set(numbers)) > 1:
        a, b = (_by_sweep(side, numbers, np.mean) for side in (a, b))
    first, rise = float(a.mean()), float(b.mean() - a.mean())
    scale = quantile(len(a) - 1) ** 2 / len(a)
    (aa, ab), (_, bb) = scale * np.cov(a, b)
    # The line's square minus that of its uncertainty, at the part x of the way; undecided where at most 0.
    square, linear, constant = rise**2 - aa + 2 * ab - bb, 2 * (first * rise + aa - ab), first**2 - aa

    def difference(x: float) -> float:
        return float((square * x + linear) * x + constant)

    places = [0.0, *sorted(x for x in _roots(square, linear, constant) if 0 < x < 1), 1.0]
    if first * (first + rise) < 0:  # without any spread the crossing itself is all that is undecided
        places = sorted([*places, -first / rise])
    parts = [(0.0, 0.0)] if difference(0.0) <= 0 else []
    parts += [(x, x) for x in places[1:-1]]
    parts += [(x, y) for x, y in itertools.pairwise(places) if difference((x + y) / 2) <= 0]
    parts += [(1.0, 1.0)] if difference(1.0) <= 0 else []
    return joined(parts)


def _roots(square: float, linear: float, constant: float) -> list[float]:
    """Real roots of a parabola, or of the line that it is."""
    size = max(abs(square), abs(linear), abs(constant))
    if abs(square) <= 1e-12 * size:
        return [-constant / linear] if abs(linear) > 1e-12 * size else []
    root = linear**2 - 4 * square * constant
    if root < 0:
        return []
    half = -(linear + math.copysign(math.sqrt(root), linear)) / 2
    return [half / square, *([constant / half] if half else [])]


def joined(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same parts of a line in ascending order, those that touch put together."""
    whole: list[tuple[float, float]] = []
    for low, high in sorted(parts):
        if whole and low <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(high, whole[-1][1]))
        else:
            whole.append((low, high))
    return whole


def _data(values: Sequence[float] | _Floats) -> _Floats:
    """The values as an array of at least one element."""
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(data):
        raise ValueError("an interval needs at least one value")
    return data
