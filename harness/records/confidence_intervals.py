"""Computes 95 % confidence intervals of medians, means and paired ratios.  No torch.

The formulas are in docs/reference/metrics.md.  How many values an interval needs:

- From one sweep, at least :data:`FEWEST` values or pairs.
- From several sweeps, each sweep's mean or median counts as one value, because values of one sweep share its
  link's calibration and the machine's state.  Means and ratios then need :data:`FEWEST_SWEEPS` sweeps (Student's t);
  medians need :data:`FEWEST` sweeps, because the range of five values holds the median in less than 95 % of samples.

With fewer values the ends of the interval are NaN, and :attr:`Interval.why_none` says what is missing.
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
FEWEST: Final = 6  # fewest values; the range of five values holds the median in only 94 % of samples
FEWEST_SWEEPS: Final = 3  # for means; the interval of two sweeps would reach 13 standard errors to each side
_NUMERALS: Final = {FEWEST_SWEEPS: "three", FEWEST: "six"}

_Key = TypeVar("_Key", bound=Hashable)
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval, whose ends are NaN if there are too few values."""

    estimate: float
    low: float
    high: float
    n: int  # number of values or pairs
    sweeps: int = 1  # number of sweeps that they are from
    fewest_sweeps: int = FEWEST_SWEEPS  # least number for an interval, if there are several sweeps

    @property
    def why_none(self) -> str:
        """Why there is no interval, such as ``n = 3: no interval; six are needed``; empty if there is one."""
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
        """How far the upper end lies above the estimate, as a share of the estimate; NaN without an interval."""
        return self.high / self.estimate - 1

    def contains(self, value: float) -> bool:
        """Return whether ``value`` lies between the ends."""
        return self.low <= value <= self.high


def of_another_sweep(interval: Interval, *, ratio: bool) -> Interval:
    """Return Student's prediction interval for the result of one further sweep.

    For a ratio, the interval is computed on the scale of logarithms.
    """
    numbers = (interval.low, interval.estimate, interval.high)
    low, middle, high = map(math.log, numbers) if ratio else numbers
    wider = math.sqrt(1 + interval.sweeps)
    ends = (middle + wider * (end - middle) for end in (low, high))
    low, high = (math.exp(end) if ratio else end for end in ends)
    return replace(interval, low=low, high=high)


def median_interval(values: Sequence[float], sweeps: Sequence[int] | None = None) -> Interval:
    """Return the median and its interval between two order statistics, interpolated to exactly 95 %.

    With several sweeps, the order statistics are those of the sweeps' medians.  The interpolation is Hettmansperger
    and Sheather's (1986).

    Args:
        values: At least one value.  An interval needs :data:`FEWEST` values or, if there are several sweeps, as many
            sweeps.
        sweeps: The sweep of each value; None if all are from one sweep.

    Raises:
        ValueError: If there are no values.
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
    """Return the probability that the median lies between the d-th smallest and d-th largest of ``n`` values."""
    return 1.0 - 2.0 * sum(math.comb(n, below) for below in range(d)) / 2.0**n


def paired_ratio_interval(
    above: Mapping[_Key, float], below: Mapping[_Key, float], sweeps: Mapping[_Key, int] | None = None
) -> Interval:
    """Return the geometric mean of paired ratios with its interval, by Student's t on their logarithms.

    Args:
        above: Positive numerators by key.
        below: Positive denominators by key.  Keys that only one side has are left out.
        sweeps: The sweep of each key; with several sweeps, the mean of each sweep's logarithms counts as one value.

    Raises:
        ValueError: If no key is shared, or a value is NaN, zero or negative.
    """
    both = [key for key in above if key in below]
    for value in (*(above[key] for key in both), *(below[key] for key in both)):
        if not value > 0:  # written so that NaN is refused too
            raise ValueError(f"a ratio needs positive values, got {value}")
    logs = [math.log(above[key]) - math.log(below[key]) for key in both]
    log = mean_interval(logs, None if sweeps is None else [sweeps[key] for key in both])
    return Interval(math.exp(log.estimate), math.exp(log.low), math.exp(log.high), log.n, log.sweeps)


def geometric_interval(values: Sequence[float], sweeps: Sequence[int] | None = None) -> Interval:
    """Return the geometric mean of positive values with its interval; raises a ValueError for other values."""
    by_index = None if sweeps is None else dict(enumerate(sweeps))
    return paired_ratio_interval(dict(enumerate(values)), dict.fromkeys(range(len(values)), 1.0), by_index)


def mean_interval(values: Sequence[float] | _Floats, sweeps: Sequence[int] | None = None) -> Interval:
    """Return the mean with Student's interval; with several sweeps, both are computed from the sweeps' means.

    Raises:
        ValueError: If there are no values.
    """
    data = _data(values)
    means = _by_sweep(data, sweeps, np.mean)
    few = len(data) < FEWEST or 1 < len(means) < FEWEST_SWEEPS
    kept = data if len(means) == 1 else means
    mean, half = float(kept.mean()), math.nan
    if not few:
        half = quantile(len(kept) - 1) * float(kept.std(ddof=1)) / math.sqrt(len(kept))
    return Interval(mean, mean - half, mean + half, len(data), len(means))


def _by_sweep(data: _Floats, sweeps: Sequence[int] | None, middle: Any) -> _Floats:
    """Return the ``middle`` (median or mean) of each sweep's values, one value per sweep."""
    if sweeps is None or len(set(sweeps)) == 1:
        return np.array([middle(data)])
    numbers = np.asarray(sweeps)
    return np.array([middle(data[numbers == sweep]) for sweep in sorted(set(sweeps))])


@functools.cache
def quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t for this many degrees of freedom."""
    from scipy import special  # only reports need it, and scipy.stats takes half a second more

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def undecided(
    left: Mapping[_Key, float],
    right: Mapping[_Key, float],
    sweeps: Mapping[_Key, int] | None = None,
) -> list[tuple[float, float]]:
    """Return where a straight line between two means may cross zero (Fieller's confidence set).

    The line goes from the mean of ``left`` at 0 to the mean of ``right`` at 1.  A place belongs to the set if the line
    there differs from zero by less than Student's t times its standard error.

    Args:
        left: Values by key at 0; keys that only one side has are left out.
        right: Values by key at 1.
        sweeps: The sweep of each key; with several sweeps, each sweep's mean counts as one value.

    Returns:
        Disjoint parts (low, high) of [0, 1] in ascending order; with too few values or sweeps, all of it.
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
    # At x in [0, 1]: the line's square minus the square of its uncertainty, a parabola; undecided where <= 0.
    square, linear, constant = rise**2 - aa + 2 * ab - bb, 2 * (first * rise + aa - ab), first**2 - aa

    def difference(x: float) -> float:
        return float((square * x + linear) * x + constant)

    places = [0.0, *sorted(x for x in _roots(square, linear, constant) if 0 < x < 1), 1.0]
    if first * (first + rise) < 0:  # without spread, only the crossing itself is undecided
        places = sorted([*places, -first / rise])
    parts = [(0.0, 0.0)] if difference(0.0) <= 0 else []
    parts += [(x, x) for x in places[1:-1]]
    parts += [(x, y) for x, y in itertools.pairwise(places) if difference((x + y) / 2) <= 0]
    parts += [(1.0, 1.0)] if difference(1.0) <= 0 else []
    return joined(parts)


def _roots(square: float, linear: float, constant: float) -> list[float]:
    """Return the real roots of a parabola; if its square term vanishes, the root of the line."""
    size = max(abs(square), abs(linear), abs(constant))
    if abs(square) <= 1e-12 * size:
        return [-constant / linear] if abs(linear) > 1e-12 * size else []
    root = linear**2 - 4 * square * constant
    if root < 0:
        return []
    half = -(linear + math.copysign(math.sqrt(root), linear)) / 2
    return [half / square, *([constant / half] if half else [])]


def joined(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sort parts of a line, and merge those that touch or overlap."""
    whole: list[tuple[float, float]] = []
    for low, high in sorted(parts):
        if whole and low <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(high, whole[-1][1]))
        else:
            whole.append((low, high))
    return whole


def _data(values: Sequence[float] | _Floats) -> _Floats:
    """Return the values as a 1-D array; raises a ValueError if there are none."""
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    if not len(data):
        raise ValueError("an interval needs at least one value")
    return data
