"""Intervals agree with scipy's own tests, cover what they should, and scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from harness.records.statistics import median_interval, paired_ratio_interval

values = st.floats(0.001, 1000)
samples = st.lists(values, min_size=2, max_size=12)


@given(samples)
@example([1.0, 1.0])
@example([320.3041638060336, 320.3041638060336])
def test_median(sample: list[float]) -> None:
    """The interval of a median holds it, lies within the sample, and is the same every time."""
    found = median_interval(sample)
    assert min(sample) <= found.low <= found.estimate <= found.high <= max(sample)
    assert found == median_interval(sample)


@given(st.lists(values, min_size=2, max_size=8), st.floats(0.1, 10))
def test_pairing_cancels_drift(drift: list[float], factor: float) -> None:
    """A drift that both sides share leaves a paired ratio exact."""
    below = {index: value for index, value in enumerate(drift)}  # noqa: C416 - says what is the key
    above = {index: factor * value for index, value in enumerate(drift)}
    found = paired_ratio_interval(above, below)
    assert (found.estimate, found.low, found.high) == pytest.approx((factor,) * 3)


@given(samples)
def test_ratio_is_students(ratios: list[float]) -> None:
    """The interval of a paired ratio is Student's on the logarithms."""
    found = paired_ratio_interval(dict(enumerate(ratios)), dict.fromkeys(range(len(ratios)), 1.0))
    logs = np.log(ratios)
    assert found.n == len(ratios)
    assert found.estimate == pytest.approx(np.exp(logs.mean()))
    if np.std(logs) > 1e-9:
        expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        assert (math.log(found.low), math.log(found.high)) == pytest.approx((expected.low, expected.high))


def test_pairs_only() -> None:
    """A repeat that one side lacks is left out of a paired ratio."""
    found = paired_ratio_interval({0: 2.0, 1: 4.0, 2: 100.0}, {0: 1.0, 1: 2.0})
    assert found.n == 2
    assert found.estimate == pytest.approx(2)


@pytest.mark.parametrize(
    "interval",
    [
        median_interval([3.0]),
        paired_ratio_interval({0: 3.0}, {0: 1.0}),
    ],
)
def test_one_value(interval: object) -> None:
    """One value is an estimate without ends."""
    assert interval.estimate == pytest.approx(3)  # type: ignore[attr-defined]
    assert math.isnan(interval.low)  # type: ignore[attr-defined]
    assert math.isnan(interval.high)  # type: ignore[attr-defined]
    assert not interval.contains(3)  # type: ignore[attr-defined]


def test_refusals() -> None:
    """No values, no common repeat, and values that are not positive have no interval."""
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])
    with pytest.raises(ValueError, match="at least one"):
        paired_ratio_interval({0: 1.0}, {1: 1.0})
    for ours, theirs in ((0.0, 1.0), (math.nan, 1.0), (math.nan, -1.0)):
        with pytest.raises(ValueError, match="positive"):
            paired_ratio_interval({0: 1.0, 1: ours}, {0: 1.0, 1: theirs})


@pytest.mark.nightly
def test_coverage() -> None:
    """Intervals at 95 % hold the truth in about 95 % of samples."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        ratios = np.exp(generator.normal(math.log(3), 0.2, 6))
        above = {index: float(ratio) for index, ratio in enumerate(ratios)}
        hits += paired_ratio_interval(above, dict.fromkeys(above, 1.0)).contains(3)
    assert 0.93 < hits / 2000 < 0.97
