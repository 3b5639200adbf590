"""Confidence intervals for medians and paired ratios of timings.  Formulas: docs/reference/metrics.md.

An interval of a single value has NaN ends, which plots and tables leave out.  No torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

CONFIDENCE: Final = 0.95
RESAMPLES: Final = 2000
SEED: Final = 20230616  # of the bootstrap: a report made twice prints the same digits


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate from ``n`` values or pairs, and the ends of its confidence interval; NaN for one value."""

    estimate: float
    low: float
    high: float
    n: int

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies between the ends."""
        return self.low <= value <= self.high


def median_interval(values: Sequence[float]) -> Interval:
    """Median with a percentile-bootstrap interval.

    Raises:
        ValueError: without values.
    """
    data = _data(values)
    median = float(np.median(data))
    if len(data) == 1:
        return Interval(median, math.nan, math.nan, 1)
    from scipy import stats  # a second, which no command but a report needs

    found = stats.bootstrap(
        (data,),
        np.median,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    # The bootstrap's percentiles round: with equal values they may miss the median by an ulp.
    low = min(max(float(found.low), float(data.min())), median)
    high = max(min(float(found.high), float(data.max())), median)
    return Interval(median, low, high, len(data))


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
    if len(logs) > 1:
        from scipy import stats

        error = float(logs.std(ddof=1)) / math.sqrt(len(logs))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(logs) - 1)) * error
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def _data(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The values as an array of at least one element."""
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    if len(data) == 0:
        raise ValueError("an interval needs at least one value")
    return data
