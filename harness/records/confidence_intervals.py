"""Computes 95 % confidence intervals of medians, means and paired ratios.  No torch.

The formulas are in docs/reference/metrics.md.

An interval needs at least :data:`FEWEST` measured values (or pairs of values, for ratios).  Values that other programs
disturbed may be left out, as long as :data:`FEWEST_UNDISTURBED` remain.

Times depend on the *occasion* at which they were measured, because values of one occasion share the machine's state.
A new occasion begins when the machine is booted, and after a pause of more than an hour between runs.

- If all values are from one occasion, the interval is computed from these values, and is valid for this occasion only.
- If the values are from several occasions, the mean or median of each occasion counts as one value.  An interval of a
  median then needs :data:`FEWEST` (six) occasions.  Five are too few, because the true median lies outside the range of
  five values in more than 5 % of samples.

With too few values or occasions, the ends of the interval are NaN, and :attr:`Interval.why_none` gives the reason.
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
FEWEST: Final = 6  # fewest values; the median lies between the ends of five values in only 94 % of samples
FEWEST_UNDISTURBED: Final = 3  # fewest values that must remain after disturbed ones are left out
FEWEST_FOR_LINE: Final = 4  # fewest occasions for a prediction by a covariate
WITHIN_START: Final = "within this start"  # printed beside an interval that is from one occasion only
_NUMERALS: Final = {FEWEST_UNDISTURBED: "three", FEWEST: "six"}

_Key = TypeVar("_Key", bound=Hashable)
_Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval, whose ends are NaN if there are too few values.

    Values of one *occasion* were measured on one start of one machine, with pauses of at most an hour between runs.
    """

    estimate: float
    low: float
    high: float
    n: int  # number of values or pairs
    occasions: int = (
        0  # number of occasions at which they were measured; 0 if values do not depend on the occasion
    )
    left_out: int = 0  # number of further values that were left out because other programs disturbed them
    disturbed: bool = False  # whether other programs disturbed all values, so that none could be left out
    fewest_occasions: int = 1  # fewest occasions for an interval, if the values are of several occasions

    @property
    def why_none(self) -> str:
        """Why there is no interval, such as ``n = 3: no interval; six are needed``; empty if there is an interval."""
        if self.n > 0 and self.n + self.left_out < FEWEST:
            return f"n = {self.n}: no interval; {_NUMERALS[FEWEST]} are needed"
        if self.n > 0 and not enough(self.n, self.left_out):
            measured = f"n = {self.n} undisturbed of {self.n + self.left_out}"
            return f"{measured}: no interval; {_NUMERALS[FEWEST_UNDISTURBED]} are needed"
        if 1 < self.occasions < self.fewest_occasions:
            return f"{self.occasions} occasions: no interval; {_NUMERALS[self.fewest_occasions]} are needed"
        return ""

    @property
    def known(self) -> bool:
        """Whether there are enough values for an interval."""
        return not math.isnan(self.low)

    @property
    def within_start(self) -> bool:
        """Whether all values are of one occasion, so that the interval is valid for this occasion only.

        An occasion is one start of one machine, with pauses of at most an hour between runs.  False if there is no
        interval.
        """
        return self.known and self.occasions == 1

    @property
    def over(self) -> str:
        """A text to print next to the interval: the number of occasions of its values, such as ``3 occasions``.

        An occasion is one start of one machine, with pauses of at most an hour between runs.  With one occasion the
        text is ``within this start``, since the interval says nothing about later starts of the machine.  The text is
        empty if there is no interval, or if the values do not depend on the occasion.
        """
        if not self.known or not self.occasions:
            return ""
        return WITHIN_START if self.occasions == 1 else f"{self.occasions} occasions"

    @property
    def half(self) -> float:
        """Relative width of the interval above the estimate: ``high / estimate - 1``; NaN without an interval."""
        return self.high / self.estimate - 1

    def contains(self, value: float) -> bool:
        """Return whether ``value`` lies between the ends, or equals an end; False without an interval."""
        return self.low <= value <= self.high


def enough(n: int, left_out: int = 0) -> bool:
    """Return whether ``n`` values are enough for an interval.

    They are enough if ``n`` is at least :data:`FEWEST_UNDISTURBED`, and ``n + left_out`` is at least :data:`FEWEST`.
    ``left_out`` is the number of further values that were left out because other programs disturbed them.
    """
    return n + left_out >= FEWEST and n >= FEWEST_UNDISTURBED


def of_another_run(interval: Interval, *, ratio: bool) -> Interval:
    """Return the interval in which the result of one further run is expected (Student's prediction interval).

    The further run takes place at a new occasion: after the machine was booted, or after a pause of more than an hour.
    The confidence interval ``interval`` of the measured values is widened:

    - If the values are from n > 1 occasions, the width is multiplied by sqrt(1 + n).  With 3 occasions, it doubles.
    - If the values are from one occasion, the ends are NaN, since one occasion says nothing about other occasions.
    - If the values do not depend on the occasion, they count as one run, and the width is multiplied by sqrt(2).

    Args:
        interval: The confidence interval of the measured values.
        ratio: Whether the values are ratios.  If so, the interval of their logarithms is widened.
    """
    if interval.occasions == 1:
        return replace(interval, low=math.nan, high=math.nan)
    numbers = (interval.low, interval.estimate, interval.high)
    low, middle, high = map(math.log, numbers) if ratio else numbers
    wider = math.sqrt(1 + max(1, interval.occasions))
    ends = (middle + wider * (end - middle) for end in (low, high))
    low, high = (math.exp(end) if ratio else end for end in ends)
    return replace(interval, low=low, high=high)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The 95 % prediction interval of a ratio in a further run."""

    low: float
    high: float
    # The covariate's value for which the interval holds; NaN if it holds without a covariate.
    at: float = math.nan


def ratio_of_another_run(ratio: Interval, points: Sequence[tuple[float, float]]) -> Prediction:
    """Return the interval in which a ratio, such as a speed-up, is expected in a further run at a new occasion.

    A new occasion begins when the machine is booted, and after a pause of more than an hour.

    The ratio may depend on a covariate that differs between occasions, such as the speed of the machine.  If the ratio
    does, the result is Student's prediction interval around a regression line, at the mean of the covariate.  These are
    the steps:

    1. If there are fewer than four occasions, or fewer than three different values of the covariate, no line is used.
    2. A straight line over the covariate is fitted to the logarithms of the ratios.
    3. By leave-one-out cross-validation, each occasion is predicted from all other occasions, once by their line and
       once by their mean.  The line is used if its predictions have the smaller sum of squared errors.

    If no line is used, the interval is that of :func:`of_another_run`.

    Args:
        ratio: The mean ratio, with its interval over occasions.
        points: For each occasion, the pair (covariate, ratio).
    """
    if len(points) >= FEWEST_FOR_LINE and len({x for x, _ in points}) > 2:
        x, y = np.array([x for x, _ in points]), np.log([value for _, value in points])
        m, centred = len(points), x - x.mean()
        slope = float(centred @ y / (centred @ centred))
        residuals, means = y - y.mean() - slope * centred, y - y.mean()
        leverage = 1 / m + centred**2 / (centred @ centred)
        with_line, without = (residuals / (1 - leverage)) @ (residuals / (1 - leverage)), m / (m - 1) * means
        if with_line < without @ without:
            error = math.sqrt(residuals @ residuals / (m - 2) * (1 + 1 / m))
            half = quantile(m - 2) * error
            return Prediction(math.exp(y.mean() - half), math.exp(y.mean() + half), float(x.mean()))
    further = of_another_run(ratio, ratio=True)
    return Prediction(further.low, further.high)


def median_interval(values: Sequence[float], occasions: Sequence[int] | None = None) -> Interval:
    """Return the median of all values, with its 95 % confidence interval.

    The interval is computed from the sorted values.  Each end is interpolated between two neighbouring values
    (Hettmansperger and Sheather, 1986), and the interval covers the true median with a probability of 95 %.

    If the values are of several occasions, the median of each occasion counts as one value for the interval.  With
    fewer than :data:`FEWEST` values, or fewer than :data:`FEWEST` such medians, the ends are NaN.

    Args:
        values: At least one value.
        occasions: For each value, the number of the occasion (start of the machine, or series of runs after a pause of
            an hour) at which it was measured; None if values do not depend on the occasion.

    Raises:
        ValueError: If there are no values.
    """
    data = _data(values)
    n, median = len(data), float(np.median(data))
    middles, count = _by_occasion(data, occasions, np.median), _count(occasions)
    data = np.sort(data if len(middles) == 1 else middles)
    if (m := len(data)) < FEWEST:
        return Interval(median, math.nan, math.nan, n, count, fewest_occasions=FEWEST)
    d = 1
    while (inner := _coverage(m, d + 1)) >= CONFIDENCE:
        d += 1
    share = ((outer := _coverage(m, d)) - CONFIDENCE) / (outer - inner)
    inwards = (m - d) * share / (d + (m - 2 * d) * share)
    low = float((1 - inwards) * data[d - 1] + inwards * data[d])
    high = float((1 - inwards) * data[m - d] + inwards * data[m - d - 1])
    return Interval(median, min(low, median), max(high, median), n, count, fewest_occasions=FEWEST)


def _coverage(n: int, d: int) -> float:
    """Return the probability that the true median lies between the d-th smallest and d-th largest of ``n`` values."""
    return 1.0 - 2.0 * sum(math.comb(n, below) for below in range(d)) / 2.0**n


def paired_ratio_interval(
    above: Mapping[_Key, float],
    below: Mapping[_Key, float],
    occasions: Mapping[_Key, int] | None = None,
    left_out: int = 0,
) -> Interval:
    """Return the geometric mean of paired ratios with its 95 % confidence interval, by Student's t on their logarithms.

    Args:
        above: Positive numerators by key.
        below: Positive denominators by key.  Keys that only one of the two dicts has are left out.
        occasions: By key, the number of the occasion (start of the machine, or series of runs after a pause of an hour)
            at which the pair was measured; None if ratios do not depend on the occasion.  With several occasions, the
            mean logarithm of each occasion counts as one value.
        left_out: Number of further pairs that were left out because other programs disturbed them.

    Raises:
        ValueError: If no key is shared, or a value is NaN, zero or negative.
    """
    both = [key for key in above if key in below]
    for value in (*(above[key] for key in both), *(below[key] for key in both)):
        if not value > 0:  # written so that NaN is refused too
            raise ValueError(f"a ratio needs positive values, got {value}")
    logs = [math.log(above[key]) - math.log(below[key]) for key in both]
    log = mean_interval(logs, None if occasions is None else [occasions[key] for key in both], left_out)
    return replace(log, estimate=math.exp(log.estimate), low=math.exp(log.low), high=math.exp(log.high))


def geometric_interval(
    values: Sequence[float], occasions: Sequence[int] | None = None, left_out: int = 0
) -> Interval:
    """Return the geometric mean of positive values with its 95 % interval, by Student's t on their logarithms.

    Args:
        values: At least one value.
        occasions: For each value, the number of the occasion (start of the machine, or series of runs after a pause of
            an hour) at which it was measured; None if values do not depend on the occasion.
        left_out: Number of further values that were left out because other programs disturbed them.

    Raises:
        ValueError: If there are no values, or if a value is NaN, zero or negative.
    """
    by_index = None if occasions is None else dict(enumerate(occasions))
    ones = dict.fromkeys(range(len(values)), 1.0)
    return paired_ratio_interval(dict(enumerate(values)), ones, by_index, left_out)


def product_interval(left: Interval, right: Interval) -> Interval:
    """Return the product of two independent positive ratios, with its interval.

    The method is MOVER, the method of variance estimates recovery (Zou and Donner, Statistics in Medicine 27 (2008),
    1693), on logarithms.  Let a and b be the distances of the two factors' lower ends from their estimates.  Then the
    product's lower end lies sqrt(a**2 + b**2) below the product's estimate.  The upper end is computed in the same way.
    If the ends of a factor equal its estimate, this factor adds nothing to the width.

    Returns:
        The interval.  Its ends are NaN if a factor has no interval.  Its ``n`` and ``left_out`` are taken from the
        factor with the smaller ``n``; a factor with ``n`` = 0 does not count.

    Raises:
        ValueError: If an estimate or an end is zero or negative.
    """
    for value in (left.estimate, left.low, right.estimate, right.low):
        if value <= 0:  # NaN passes, since a factor may have no interval
            raise ValueError(f"a product of ratios needs positive values, got {value}")
    estimate = left.estimate * right.estimate
    fewest = min((each for each in (left, right) if each.n), key=lambda each: each.n, default=left)
    below = math.hypot(*(math.log(each.estimate / each.low) for each in (left, right)))
    above = math.hypot(*(math.log(each.high / each.estimate) for each in (left, right)))
    return Interval(
        estimate=estimate,
        low=estimate * math.exp(-below),
        high=estimate * math.exp(above),
        n=fewest.n,
        occasions=max(left.occasions, right.occasions),
        left_out=fewest.left_out,
        disturbed=left.disturbed or right.disturbed,
    )


def mean_interval(
    values: Sequence[float] | _Floats, occasions: Sequence[int] | None = None, left_out: int = 0
) -> Interval:
    """Return the mean of the values with its 95 % confidence interval, by Student's t.

    With several occasions, the mean of each occasion counts as one value.  If there are too few values
    (:func:`enough`), the ends of the interval are NaN.

    Args:
        values: At least one value.
        occasions: For each value, the number of the occasion (start of the machine, or series of runs after a pause of
            an hour) at which the value was measured; None if values do not depend on the occasion.
        left_out: Number of further values that were left out because other programs disturbed them.

    Raises:
        ValueError: If there are no values.
    """
    data = _data(values)
    means = _by_occasion(data, occasions, np.mean)
    kept = data if len(means) == 1 else means
    mean, half = float(kept.mean()), math.nan
    if enough(len(data), left_out):
        half = quantile(len(kept) - 1) * float(kept.std(ddof=1)) / math.sqrt(len(kept))
    return Interval(mean, mean - half, mean + half, len(data), _count(occasions), left_out)


def _count(occasions: Sequence[int] | None) -> int:
    return 0 if occasions is None else len(set(occasions))


def _by_occasion(data: _Floats, occasions: Sequence[int] | None, middle: Any) -> _Floats:
    """Return, for each occasion, the median or mean of the values of this occasion: (number of occasions,).

    Args:
        data: (n,) values.
        occasions: For each value, the number of the occasion (start of the machine, or series of runs after a pause of
            an hour) at which it was measured.  None counts as a single occasion.
        middle: ``np.median`` or ``np.mean``.
    """
    if occasions is None or len(set(occasions)) == 1:
        return np.array([middle(data)])
    numbers = np.asarray(occasions)
    return np.array([middle(data[numbers == number]) for number in sorted(set(occasions))])


@functools.cache
def quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t for this many degrees of freedom."""
    from scipy import special  # only reports need it, and scipy.stats takes half a second more

    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def undecided(
    left: Mapping[_Key, float],
    right: Mapping[_Key, float],
    occasions: Mapping[_Key, int] | None = None,
    left_out: int = 0,
) -> list[tuple[float, float]]:
    """Return the parts of [0, 1] in which a straight line between two means may cross zero (Fieller's confidence set).

    The line goes from the mean of ``left`` at x = 0 to the mean of ``right`` at x = 1.  A point x belongs to the set if
    the line's height at x does not differ significantly from zero.  This is the case if the height's magnitude is at
    most Student's t times the standard error of the height.

    Args:
        left: Values at x = 0, by key.
        right: Values at x = 1, by key.  Keys that only one of the two dicts has are left out.
        occasions: By key, the number of the occasion (start of the machine, or series of runs after a pause of an hour)
            at which the key's two values were measured; None if values do not depend on the occasion.  With several
            occasions, the two means of each occasion count as one pair of values.
        left_out: Number of further keys that were left out because other programs disturbed their values.

    Returns:
        Disjoint parts (low, high) of [0, 1] in ascending order; with too few values, the whole of [0, 1].
    """
    both = [key for key in left if key in right]
    numbers = None if occasions is None else [occasions[key] for key in both]
    if not enough(len(both), left_out):
        return [(0.0, 1.0)]
    a, b = (_data([side[key] for key in both]) for side in (left, right))
    if numbers is not None and len(set(numbers)) > 1:
        a, b = (_by_occasion(side, numbers, np.mean) for side in (a, b))
    first, rise = float(a.mean()), float(b.mean() - a.mean())
    scale = quantile(len(a) - 1) ** 2 / len(a)
    (aa, ab), (_, bb) = scale * np.cov(a, b)
    # The square of the line's height at x, minus the square of its uncertainty, is a parabola in x.  The line may cross
    # zero where the parabola is 0 or less.
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
    """Return all real x at which square * x**2 + linear * x + constant is 0; ``square`` may be 0."""
    size = max(abs(square), abs(linear), abs(constant))
    if abs(square) <= 1e-12 * size:
        return [-constant / linear] if abs(linear) > 1e-12 * size else []
    root = linear**2 - 4 * square * constant
    if root < 0:
        return []
    half = -(linear + math.copysign(math.sqrt(root), linear)) / 2
    return [half / square, *([constant / half] if half else [])]


def joined(parts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge intervals (low, high) that touch or overlap, and return the resulting intervals in ascending order."""
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
