"""Computes break-even rates: the link rates at which a configuration is as fast as its baseline (speed-up 1).

The speed-up is measured at a few rates.  Between neighbouring measured rates, it is interpolated by a straight line,
with both axes logarithmic.  Fieller's method gives the ranges of rates in which the speed-up does not differ
significantly from 1.  For example, let a configuration be faster than its baseline up to 80 Mbit/s, slower from 110
Mbit/s on, and not significantly different in between.  If the interpolated speed-up is 1 at 95 Mbit/s, the break-even
rate is 95 Mbit/s, and its interval is 80 to 110 Mbit/s.

Such a range has a break-even rate in either of these cases:

* The range lies between the lowest and the highest measured rate.  The interpolated speed-up crosses 1 inside the
  range, and the configuration is faster on one side of the range and slower on the other side.
* The range begins at the lowest measured rate, or ends at the highest, so that one side was not measured.  The
  interpolated speed-up crosses 1 exactly once inside the range.

If a range covers all measured rates, no break-even rate is determined.
Definition: docs/reference/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, TypeVar

import numpy as np
import pandas as pd

from harness.records.confidence_intervals import Interval, joined, undecided
from report.data.frames import groups
from report.data.speedups import speedup, undisturbed
from report.data.text import listed, number, with_interval

BEYOND: Final = "beyond what was measured"
# Distance of a place just beside a measured rate, as a share of the way to the next measured rate.
_BESIDE: Final = 1e-9
_three_digits: Final = number(3)
_Value = TypeVar("_Value", int, float)
Outcome = Literal["crosses", "pays", "costs", "not determined"]


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Break-even rates of a configuration: link rates in Mbit/s at which its speed-up over the baseline crosses 1."""

    # ``crosses``: the speed-up crosses 1 at the rates ``crossings``; ``pays``: the configuration is faster at every
    # measured rate; ``costs``: slower at every measured rate; ``not determined``: none of these could be shown.
    outcome: Outcome
    # Rates at which the speed-up crosses 1, with their intervals, in ascending order.  An end of an interval is
    # infinite if it lies beyond the measured rates.
    crossings: tuple[Interval, ...] = ()
    # Ranges of rates without a break-even in which the speed-up does not differ significantly from 1: (low, high).
    unclear: tuple[tuple[float, float], ...] = ()
    few: str = ""  # why no rate has an interval, such as too few repeats; empty otherwise

    @property
    def highest(self) -> Interval:
        """The highest rate at which the speed-up crosses 1, with its interval; all NaN if there is no such rate."""
        return self.crossings[-1] if self.crossings else Interval(math.nan, math.nan, math.nan, 0)


def break_even(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return a table of break-even rates: link rates at which a configuration is as fast as its baseline.

    ``pairs`` are rows of :func:`report.data.speedups.pairs`, each a trial and the baseline's trial under the same
    conditions.  A setting (cluster, model, batch and so on) is what a trial runs in.  Settings that differ in the
    link's rate alone form a group.  The table has one row for each group and each configuration that ran at two or more
    rates of the group.  These columns describe the row's result:

    * ``found``: all break-even rates, as a :class:`BreakEven`;
    * ``outcome``: ``crosses`` if there are any; else one of the other outcomes of :class:`BreakEven`;
    * ``break_even_mbit``: the highest break-even rate, with its interval;
    * ``low_mbit`` and ``high_mbit``: the lowest and the highest achieved rate;
    * ``low_speedup`` and ``high_speedup``: the speed-ups at the lowest and at the highest rate;
    * ``records``: the ids of the trials behind the row, joined by spaces.
    """
    keys = ["elsewhere", "nodes", "ranks_per_node", "tokens_per_rank", "place", "configuration"]
    rows = []
    measured = pairs[pairs["achieved_mbit"].notna() & (pairs["id"] != pairs["baseline"])]
    for key, group in groups(measured, keys):
        settings = (
            (float(setting["achieved_mbit"].median()), setting) for _, setting in groups(group, ["setting"])
        )
        points = sorted(settings, key=lambda point: point[0])
        if len(points) > 1:
            (lowest, slow), (highest, fast) = points[0], points[-1]
            found, records = of_points(points), sorted({*group["id"], *group["baseline"]})
            ends = (lowest, highest, speedup(slow).estimate, speedup(fast).estimate)
            rows.append((*key, found, found.outcome, found.highest, *ends, " ".join(records)))
    names = ["found", "outcome", "break_even_mbit", "low_mbit", "high_mbit", "low_speedup", "high_speedup"]
    return pd.DataFrame(rows, columns=[*keys, *names, "records"])


def of_points(points: Sequence[tuple[float, pd.DataFrame]]) -> BreakEven:
    """Find the link rates at which one configuration is as fast as its baseline.

    The docstring of this module describes the method.  ``points`` are the measured rates in Mbit/s, in ascending order,
    each with the pairs of trials at this rate.  A pair is a trial of the configuration and the baseline's trial under
    the same conditions.
    """
    kept = [undisturbed(pairs) for _, pairs in points]
    ratios, logs = [speedup(pairs) for _, pairs in points], [_logs(pairs) for pairs in kept]
    occasions = [_by_pair(pairs, pairs["occasion"]) for pairs in kept]
    left_out = [len(pairs) - len(rest) for (_, pairs), rest in zip(points, kept, strict=True)]
    significant = [ratio.known and not ratio.contains(1.0) for ratio in ratios]
    # Ranges without a significant difference from 1.  Place 1.5 is halfway between the second and the third point.
    parts: list[tuple[float, float]] = []
    for index, (below, above) in enumerate(pairwise(logs)):
        for low, high in undecided(below, above, occasions[index], sum(left_out[index : index + 2])):
            # Two neighbouring rates that share few repeats have no line between them, although the speed-up at each
            # of the two rates may be significant.
            after = _BESIDE if low == 0 and significant[index] else 0.0
            before = _BESIDE if high == 1 and significant[index + 1] else 0.0
            parts.append((index + low + after, index + high - before))
    means = [math.log(ratio.estimate) for ratio in ratios]
    last, zeros = float(len(points) - 1), _zeros(means)
    # If two neighbouring rates have different repeats, ``undecided`` used only the repeats that both have, and its
    # ranges may miss a zero of the means.  Such a zero gets the whole range between the two rates.
    parts += [(math.floor(z), math.ceil(z)) for z in zeros if not any(a <= z <= b for a, b in parts)]
    regions = joined(parts)
    if regions == [(0.0, last)]:
        few = next(filter(None, (ratio.why_none for ratio in ratios)), "")
        return BreakEven("not determined", unclear=(_rates(points, 0.0, last),), few=few)

    def sign(place: float) -> int:
        return int(np.sign(np.interp(place, range(len(means)), means)))

    crossings, unclear = list[Interval](), list[tuple[float, float]]()
    if not regions:
        return BreakEven("pays" if means[0] > 0 else "costs")
    befores = [0.0, *(high for _, high in regions[:-1])]  # for each range, the end of the range before it
    afters = [*(low for low, _ in regions[1:]), last]
    for (low, high), before, after in zip(regions, befores, afters, strict=True):
        left = sign((before + low) / 2) if low > 0 else 0  # 0: beyond what was measured
        right = sign((high + after) / 2) if high < last else 0
        inside = [zero for zero in zeros if low <= zero <= high]
        first, final = _rates(points, low, high)
        if inside and (left * right < 0 or (len(inside) == 1 and left * right == 0)):
            place, _ = _rates(points, inside[len(inside) // 2], last)
            bounds = (first if left else -math.inf, final if right else math.inf)
            crossings.append(Interval(place, *bounds, min(ratio.n for ratio in ratios)))
        else:
            unclear.append((first, final))
    outcome: Outcome = "crosses" if crossings else "not determined"
    return BreakEven(outcome, tuple(crossings), tuple(unclear))


def in_words(found: BreakEven) -> str:
    """Return break-even rates as text: rates in Mbit/s with their intervals, such as ``96.1 (90.2 to 104)``.

    A break-even rate is a link rate at which a configuration is as fast as its baseline.  If there are ranges without a
    clear result, the text of :func:`unclear_in_words` follows.  If there is no break-even rate, the text says whether
    the configuration is always faster or always slower, or why no break-even rate is determined.
    """
    match found.outcome:
        case "crosses":
            return crossings_in_words(found) + (f"; {unclear_in_words(found)}" if found.unclear else "")
        case "pays":
            return "none: faster at every measured rate"
        case "costs":
            return "none: slower at every measured rate"
    return f"not determined ({found.few or unclear_in_words(found)})"


def crossings_in_words(found: BreakEven) -> str:
    """Return all link rates at which the speed-up crosses 1, with their intervals, as text: ``96.1 (90.2 to 104)``."""
    return listed([with_interval(crossing, _end) for crossing in found.crossings])


def unclear_in_words(found: BreakEven) -> str:
    """Return text that lists ranges of link rates without a clear result: ``not significant from 50.0 to 90.0 Mbit/s``.

    In these ranges (``found.unclear``), the speed-up does not differ significantly from 1, and there is no break-even
    rate.  The text is empty if there are no such ranges.
    """
    ranges = [f"{_three_digits(low)} to {_three_digits(high)} Mbit/s" for low, high in found.unclear]
    return f"not significant from {listed(ranges)}" if ranges else ""


def _end(mbit: float) -> str:
    return BEYOND if math.isinf(mbit) else _three_digits(mbit)


def _by_pair(pairs: pd.DataFrame, values: pd.Series[_Value]) -> dict[tuple[int, int], _Value]:
    """Return a dict that has one of the ``values`` for each pair of trials, by (seed, repeat).

    Each row of ``pairs`` is a pair: a trial, and the baseline's trial with the same seed and repeat.  ``values`` has a
    value for each row.  If several rows have the same seed and repeat, the dict has the value of the last row, because
    :func:`report.data.speedups.speedup` also uses the last row.
    """
    rows = zip(pairs["seed"], pairs["repeat"], values, strict=True)
    return {(seed, repeat): value for seed, repeat, value in rows}


def _logs(pairs: pd.DataFrame) -> dict[tuple[int, int], float]:
    """Return the natural logarithm of the speed-up of each pair of trials, by (seed, repeat)."""
    return _by_pair(pairs, np.log(pairs["baseline_seconds"]) - np.log(pairs["step_seconds"]))


def _zeros(means: Sequence[float]) -> list[float]:
    """Return the x coordinates, in ascending order, at which a line drawn from point to point crosses or touches zero.

    The points have the x coordinates 0, 1, 2 and so on, and the y coordinates ``means``.
    """
    zeros = {float(index) for index, mean in enumerate(means) if mean == 0}
    for index, (left, right) in enumerate(pairwise(means)):
        if left * right < 0:
            zeros.add(index + left / (left - right))
    return sorted(zeros)


def _rates(points: Sequence[tuple[float, pd.DataFrame]], low: float, high: float) -> tuple[float, float]:
    """Convert two positions among the points, ``low`` and ``high``, to link rates in Mbit/s.

    ``points`` are the measured rates, each with the pairs of trials at this rate.  A position is an index into
    ``points``, possibly with a fraction: 1.5 is halfway from the second to the third point, on a logarithmic axis of
    rates.
    """
    logs = [math.log(rate) for rate, _ in points]
    ends = (math.exp(float(np.interp(place, range(len(logs)), logs))) for place in (low, high))
    return next(ends), next(ends)
