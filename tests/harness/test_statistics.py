"""Intervals agree with scipy's own tests, cover what they should, and scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from harness.statistics import (
    mean_interval,
    median_interval,
    paired_ratio_interval,
    ratio_interval,
)

values = st.floats(0.001, 1000)
samples = st.lists(values, min_size=2, max_size=12)


@given(samples)
def test_mean(sample: list[float]) -> None:
    """The interval of a mean is Student's."""
    found = mean_interval(sample)
    assert found.n == len(sample)
    assert found.estimate == pytest.approx(np.mean(sample))
    if np.std(sample) > 1e-9:
        expected = stats.ttest_1samp(sample, 0).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


@given(samples)
@example([1.0, 1.0])
@example([320.3041638060336, 320.3041638060336])
def test_median(sample: list[float]) -> None:
    """The interval of a median holds it, lies within the sample, and is the same every time."""
    found = median_interval(sample)
    assert min(sample) <= found.low <= found.estimate <= found.high <= max(sample)
    assert found == median_interval(sample)


@given(samples, samples, st.floats(0.1, 10))
def test_ratio_scales(above: list[float], below: list[float], factor: float) -> None:
    """Scaling the numerator scales the ratio and its interval; swapping inverts them."""
    found = ratio_interval(above, below)
    scaled = ratio_interval([factor * value for value in above], below)
    swapped = ratio_interval(below, above)
    assert scaled.estimate == pytest.approx(factor * found.estimate)
    assert (scaled.low, scaled.high) == pytest.approx((factor * found.low, factor * found.high), rel=1e-6)
    assert (1 / swapped.high, 1 / swapped.low) == pytest.approx((found.low, found.high), rel=1e-6)


def test_ratio_is_welch() -> None:
    """The interval of a ratio is Welch's on the logarithms."""
    above, below = [2.0, 2.2, 1.9, 2.1], [1.0, 1.3, 0.8]
    expected = stats.ttest_ind(np.log(above), np.log(below), equal_var=False).confidence_interval(0.95)
    found = ratio_interval(above, below)
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))


@given(st.lists(values, min_size=2, max_size=8), st.floats(0.1, 10))
def test_pairing_cancels_drift(drift: list[float], factor: float) -> None:
    """A drift that both sides share leaves a paired ratio exact."""
    below = {index: value for index, value in enumerate(drift)}  # noqa: C416 - says what is the key
    above = {index: factor * value for index, value in enumerate(drift)}
    found = paired_ratio_interval(above, below)
    assert (found.estimate, found.low, found.high) == pytest.approx((factor,) * 3)


def test_pairs_only() -> None:
    """A repeat that one side lacks is left out of a paired ratio."""
    found = paired_ratio_interval({0: 2.0, 1: 4.0, 2: 100.0}, {0: 1.0, 1: 2.0})
    assert found.n == 2
    assert found.estimate == pytest.approx(2)


@pytest.mark.parametrize(
    "interval",
    [
        mean_interval([3.0]),
        median_interval([3.0]),
        ratio_interval([3.0], [1.0]),
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
        mean_interval([])
    with pytest.raises(ValueError, match="at least one"):
        paired_ratio_interval({0: 1.0}, {1: 1.0})
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 0.0], [1.0])


@pytest.mark.nightly
def test_coverage() -> None:
    """Intervals at 95 % hold the truth in about 95 % of samples."""
    generator = np.random.default_rng(0)
    hits = sum(mean_interval(generator.normal(5, 1, 6).tolist()).contains(5) for _ in range(2000))
    assert 0.93 < hits / 2000 < 0.97
