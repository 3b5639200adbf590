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
    """An estimate with its confidence interval.

    Attributes:
        estimate: of the quantity.
        low: lower end; NaN if one value is all there is.
        high: upper end; NaN likewise.
        n: values (or pairs) behind it.
    """

    estimate: float
    low: float
    high: float
    n: int

    def contains(self, value: float) -> bool:
        """Whether ``value`` lies between the ends."""
        return self.low <= value <= self.high


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
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
        confidence_level=confidence,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    # The bootstrap's percentiles round: with equal values they may miss the median by an ulp.
    low = min(max(float(found.low), float(data.min())), median)
    high = max(min(float(found.high), float(data.max())), median)
    return Interval(median, low, high, len(data))


def paired_ratio_interval(
    numerator: Mapping[Hashable, float],
    denominator: Mapping[Hashable, float],
    confidence: float = CONFIDENCE,
) -> Interval:
    """Geometric mean of ratios paired by key (the repeat), with a t interval on their logarithms.

    Drift between repeats cancels.  Keys that only one side has are left out.

    Raises:
        ValueError: without a common key, or for values that are not positive.
    """
    keys = [key for key in numerator if key in denominator]
    logs = _logs([numerator[key] for key in keys]) - _logs([denominator[key] for key in keys])
    mean = float(logs.mean())
    half = _half_width(logs, confidence)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def _data(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The values as an array of at least one element."""
    data = np.asarray(values, dtype=np.float64).reshape(-1)
    if len(data) == 0:
        raise ValueError("an interval needs at least one value")
    return data


def _logs(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Logarithms of positive values."""
    data = _data(values)
    if not (data > 0).all():
        raise ValueError(f"a ratio needs positive values, got {float(data.min())}")
    return np.log(data)


def _half_width(data: np.ndarray[tuple[int], np.dtype[np.float64]], confidence: float) -> float:
    """Half the t interval of the mean of ``data``; NaN for one value."""
    if len(data) == 1:
        return math.nan
    error = float(data.std(ddof=1)) / math.sqrt(len(data))
    from scipy import stats

    return float(stats.t.ppf((1 + confidence) / 2, len(data) - 1)) * error
