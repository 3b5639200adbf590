"""Intervals agree with scipy's own tests, cover what they should, and scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from harness.records.statistics import FEWEST, crossing, median_interval, paired_ratio_interval

values = st.floats(0.001, 1000)
samples = st.lists(values, min_size=FEWEST, max_size=20)


@given(samples)
@example([1.0] * 6)
@example([320.3041638060336] * 7)
def test_median(sample: list[float]) -> None:
    """The interval of a median holds it, lies within the sample, and is the same every time."""
    found = median_interval(sample)
    assert min(sample) <= found.low <= found.estimate <= found.high <= max(sample)
    assert found == median_interval(sample)


@given(st.lists(values, min_size=FEWEST, max_size=8), st.floats(0.1, 10))
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


@given(st.lists(values, min_size=1, max_size=FEWEST - 1))
@example([1.0, 2.0, 1000.0])
def test_few_values_have_no_interval(few: list[float]) -> None:
    """Below six there is an estimate without ends, of medians, ratios and crossings."""
    ratio = paired_ratio_interval(dict(enumerate(few)), dict.fromkeys(range(len(few)), 1.0))
    for found in (median_interval(few), ratio):
        assert found.n == len(few)
        assert found.estimate > 0
        assert not found.known
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert not found.contains(found.estimate)
    assert np.isnan(crossing([1.0] * 9, [-value for value in few])[1:]).all()


def test_refusals() -> None:
    """No values, no common repeat, and values that are not positive have no interval."""
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])
    with pytest.raises(ValueError, match="at least one"):
        paired_ratio_interval({0: 1.0}, {1: 1.0})
    for ours, theirs in ((0.0, 1.0), (math.nan, 1.0), (math.nan, -1.0)):
        with pytest.raises(ValueError, match="positive"):
            paired_ratio_interval({0: 1.0, 1: ours}, {0: 1.0, 1: theirs})


_DRAWS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], Any], float]] = {
    "normal": (lambda g, shape: g.normal(0, 1, shape), 0.0),
    "lognormal": (lambda g, shape: g.lognormal(0, 0.5, shape), 1.0),
    "uniform": (lambda g, shape: g.uniform(-1, 1, shape), 0.0),
    "exponential": (lambda g, shape: g.exponential(1, shape), math.log(2)),
}


@pytest.mark.parametrize("name", _DRAWS)
@pytest.mark.parametrize("n", [6, 7, 8, 9, 12, 20])
def test_intervals_of_medians_hold_them_as_often_as_they_say(name: str, n: int) -> None:
    """In 0.93 to 0.97 of 4000 samples, whatever the distribution."""
    draw, median = _DRAWS[name]
    found = [median_interval(sample) for sample in draw(np.random.default_rng(n), (4000, n))]
    assert 0.93 < sum(one.contains(median) for one in found) / 4000 < 0.97


@pytest.mark.parametrize("n", [6, 9, 20])
def test_intervals_of_ratios_hold_them_as_often_as_they_say(n: int) -> None:
    """In 0.93 to 0.97 of 2000 samples; without an effect 1 is outside in as few: no more false positives."""
    for effect in (1.0, 3.0):
        ratios = effect * np.random.default_rng(n).lognormal(0, 0.2, (2000, n))
        found = [paired_ratio_interval(dict(enumerate(row)), dict.fromkeys(range(n), 1.0)) for row in ratios]
        assert 0.93 < sum(one.contains(effect) for one in found) / 2000 < 0.97


@pytest.mark.parametrize("n", [6, 20])
@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_intervals_of_crossings_hold_them_as_often_as_they_say(n: int, spread: float) -> None:
    """In 0.93 to 0.97 of samples that cross; a line too uncertain to cross for sure has open ends."""
    generator, hits, crossed = np.random.default_rng(n), 0, 0
    for _ in range(3000):
        left, right = generator.normal(0.3, spread, n), generator.normal(-0.2, spread, n)
        if left.mean() * right.mean() >= 0:
            continue  # the report prints no crossing
        place, low, high = crossing(left, right)
        assert low <= place <= high
        hits, crossed = hits + (low <= 0.6 <= high), crossed + 1
    assert 0.93 < hits / crossed < 0.97


def test_a_crossing_that_was_not_measured_has_open_ends() -> None:
    """Means that may be zero themselves bound nothing on their side."""
    place, low, high = crossing([0.1, -0.1, 0.2, -0.1, 0.1, -0.1], [-1.0, -1.1, -0.9, -1.0, -1.0, -1.0])
    assert 0 < place < high < 1
    assert low == -math.inf
