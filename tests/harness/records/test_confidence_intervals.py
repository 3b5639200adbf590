"""Intervals agree with scipy's, hold the true value as often as they claim, and scale with their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from harness.records.confidence_intervals import (
    FEWEST,
    FEWEST_UNDISTURBED,
    Interval,
    mean_interval,
    median_interval,
    of_another_run,
    paired_ratio_interval,
    product_interval,
    ratio_of_another_run,
    undecided,
)
from tests.support.params import nightly

values = st.floats(0.001, 1000)
samples = st.lists(values, min_size=FEWEST, max_size=20)


@given(st.lists(values, min_size=FEWEST, max_size=8), st.floats(0.1, 10))
def test_pairing_cancels_drift(drift: list[float], factor: float) -> None:
    """A drift that both sides share does not change a paired ratio."""
    below = {index: value for index, value in enumerate(drift)}  # noqa: C416 - says what is the key
    above = {index: factor * value for index, value in enumerate(drift)}
    ratio = paired_ratio_interval(above | {-1: 100.0}, below)  # a repeat that one side lacks is left out
    assert (ratio.estimate, ratio.low, ratio.high) == pytest.approx((factor,) * 3)


@given(samples)
def test_ratio_is_students(ratios: list[float]) -> None:
    """The interval of a paired ratio is Student's interval of the logarithms."""
    ratio = paired_ratio_interval(dict(enumerate(ratios)), dict.fromkeys(range(len(ratios)), 1.0))
    logs = np.log(ratios)
    assert ratio.n == len(ratios)
    assert ratio.estimate == pytest.approx(np.exp(logs.mean()))
    if np.std(logs) > 1e-9:
        expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((expected.low, expected.high))


@given(st.lists(values, min_size=1, max_size=FEWEST - 1))
@example([1.0, 2.0, 1000.0])
def test_few_values_have_no_interval(few: list[float]) -> None:
    """With fewer than six values, medians, ratios and crossings have an estimate but no ends."""
    ratio = paired_ratio_interval(dict(enumerate(few)), dict.fromkeys(range(len(few)), 1.0))
    for interval in (median_interval(few), ratio):
        assert interval.n == len(few)
        assert interval.estimate > 0
        assert not interval.known
        assert math.isnan(interval.low)
        assert math.isnan(interval.high)
        assert not interval.contains(interval.estimate)
        assert interval.why_none == f"n = {len(few)}: no interval; six are needed"
    sides = dict(enumerate([1.0] * 9)), {index: -value for index, value in enumerate(few)}
    assert undecided(*sides) == [(0.0, 1.0)]


def test_refusals() -> None:
    """Without values, without a common repeat, or with values that are not positive, there is no interval."""
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])
    with pytest.raises(ValueError, match="at least one"):
        paired_ratio_interval({0: 1.0}, {1: 1.0})
    for numerator, denominator in ((0.0, 1.0), (math.nan, 1.0), (math.nan, -1.0)):
        with pytest.raises(ValueError, match="positive"):
            paired_ratio_interval({0: 1.0, 1: numerator}, {0: 1.0, 1: denominator})


_DRAWS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], Any], float]] = {
    "normal": (lambda g, shape: g.normal(0, 1, shape), 0.0),
    "lognormal": (lambda g, shape: g.lognormal(0, 0.5, shape), 1.0),
    "uniform": (lambda g, shape: g.uniform(-1, 1, shape), 0.0),
    "exponential": (lambda g, shape: g.exponential(1, shape), math.log(2)),
}


@pytest.mark.parametrize("name", _DRAWS)
@pytest.mark.parametrize("n", [6, 9, *nightly(7, 8, 12, 20)])
def test_intervals_of_medians_hold_them_as_often_as_they_say(name: str, n: int) -> None:
    """Intervals hold the median in 0.93 to 0.97 of 2000 samples, whatever the distribution."""
    draw, median = _DRAWS[name]
    intervals = [median_interval(sample) for sample in draw(np.random.default_rng(n), (2000, n))]
    assert 0.93 < sum(interval.contains(median) for interval in intervals) / 2000 < 0.97


@pytest.mark.parametrize("between", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(("occasions", "repeats"), [(2, 6), (3, 2), (5, 3), *nightly((3, 6), (8, 6))])
def test_intervals_of_several_occasions_hold_what_an_occasion_would_find_on_average(
    occasions: int, repeats: int, between: float
) -> None:
    """Intervals hold the mean in 0.93 to 0.97 of 2000 samples, whether or not occasions differ; taking pairs as
    independent would miss it more often.
    """
    noise = np.random.default_rng(occasions * repeats)
    numbers = [occasion for occasion in range(occasions) for _ in range(repeats)]
    shifts = noise.normal(0, between, (2000, occasions)).repeat(repeats, axis=1)
    values = 0.5 + shifts + noise.normal(0, 0.03, (2000, len(numbers)))
    hits = sum(mean_interval(row, numbers).contains(0.5) for row in values)
    assert 0.93 < hits / 2000 < 0.97
    if between == 0.1:
        assert sum(mean_interval(row).contains(0.5) for row in values) / 2000 < 0.85


@pytest.mark.parametrize(
    ("occasions", "between"),
    [(0, 0.0), (2, 0.1), (3, 0.0), (3, 0.1), (5, 0.02), *nightly((2, 0.0), (8, 0.1))],
)
def test_a_further_run_is_found_where_it_is_expected_as_often_as_it_says(
    occasions: int, between: float
) -> None:
    """The prediction interval holds a further occasion's mean or ratio in 0.93 to 0.97 of 2000 samples; the confidence
    interval of the estimate does not.  Values that do not depend on the occasion (0) count as one run.
    """
    noise = np.random.default_rng(occasions)
    runs = max(1, occasions)
    numbers = [run for run in range(runs) for _ in range(6)] if occasions else None
    shifts = noise.normal(0, between, (2000, runs + 1)).repeat(6, axis=1)
    rows = 0.5 + shifts + noise.normal(0, 0.03, (2000, 6 * (runs + 1)))
    narrow = hits = 0
    for row in rows:
        mean, further = mean_interval(row[:-6], numbers), row[-6:].mean()
        narrow += mean.contains(further)
        hits += (expected := of_another_run(mean, ratio=False)).contains(further)
        logs = (math.exp(x) for x in (mean.estimate, mean.low, mean.high))
        ratio = of_another_run(Interval(*logs, mean.n, mean.occasions), ratio=True)
        assert math.isclose(math.log(ratio.high), expected.high, rel_tol=1e-9)
    assert 0.93 < hits / 2000 < 0.97
    assert narrow / 2000 < 0.91


def test_one_occasion_predicts_no_run_at_another() -> None:
    """Its interval is within this start, and the ends of a prediction are unknown."""
    one = mean_interval([1.0, 1.1, 1.2, 1.0, 1.1, 1.2], [4] * 6)
    assert (one.within_start, one.over) == (True, "within this start")
    assert not of_another_run(one, ratio=False).known
    several = mean_interval([1.0, 1.1, 1.2, 1.0, 1.1, 1.2], [0, 0, 0, 7, 7, 7])
    assert (several.within_start, several.over) == (False, "2 occasions")
    assert mean_interval([1.0] * 6).over == ""


def _at_occasions(slope: float, noise: np.random.Generator, occasions: int) -> list[tuple[float, float]]:
    """Seconds of computation and a speed-up for each occasion; its logarithm falls by ``slope`` a second."""
    seconds = noise.uniform(0.1, 0.3, occasions)
    logs = 1.0 - slope * (seconds - 0.2) + noise.normal(0, 0.02, occasions)
    return [(float(x), math.exp(y)) for x, y in zip(seconds, logs, strict=True)]


@pytest.mark.parametrize(("slope", "least", "most"), [(5.0, 0.95, 1.0), (0.0, 0.0, 0.45)])
def test_a_prediction_is_by_the_speed_of_machines_only_where_the_speed_explains(
    slope: float, least: float, most: float
) -> None:
    """A steep dependence is found nearly always, narrows the prediction, and is named with its place; three occasions
    never have one; of unrelated speeds fewer than half pass.
    """
    noise, chosen = np.random.default_rng(1), 0
    for _ in range(200):
        points = _at_occasions(slope, noise, 6)
        ratio = paired_ratio_interval(
            {key: value for key, (_, value) in enumerate(points)}, dict.fromkeys(range(6), 1.0),
            {key: key for key in range(6)},
        )  # fmt: skip
        found, plain = ratio_of_another_run(ratio, points), of_another_run(ratio, ratio=True)
        assert math.isnan(ratio_of_another_run(ratio, points[:3]).at)
        if math.isnan(found.at):
            assert (found.low, found.high) == (plain.low, plain.high)
            continue
        chosen += 1
        assert found.at == pytest.approx(np.mean([x for x, _ in points]))
        if slope:
            assert found.high / found.low < plain.high / plain.low
    assert least <= chosen / 200 <= most


def test_a_prediction_by_speed_holds_a_further_occasion_of_this_speed() -> None:
    """In 0.92 to 0.98 of 2000 samples, at the mean seconds of computation for which it is printed."""
    noise, hits = np.random.default_rng(2), 0
    for _ in range(2000):
        points = _at_occasions(5.0, noise, 6)
        ratio = paired_ratio_interval(
            {key: value for key, (_, value) in enumerate(points)}, dict.fromkeys(range(6), 1.0),
            {key: key for key in range(6)},
        )  # fmt: skip
        found = ratio_of_another_run(ratio, points)
        further = math.exp(1.0 - 5.0 * (found.at - 0.2) + noise.normal(0, 0.02))
        hits += found.low <= further <= found.high
    assert 0.92 < hits / 2000 < 0.98


def test_of_several_occasions_the_spread_between_them_is_in_every_interval() -> None:
    """Two occasions that find 2.81 and 3.03 have a wide interval, and three one that is far wider than that of all
    their pairs.
    """
    noise = np.random.default_rng(0)
    ratios = np.array([2.81, 3.03, 2.9]).repeat(6) * noise.lognormal(0, 0.002, 18)
    occasion_of = {pair: pair // 6 for pair in range(18)}
    above, below = dict(enumerate(ratios)), dict.fromkeys(occasion_of, 1.0)
    two = paired_ratio_interval({key: above[key] for key in range(12)}, below, occasion_of)
    assert (two.n, two.occasions) == (12, 2)
    assert two.contains(2.81)
    assert two.contains(3.03)
    three = paired_ratio_interval(above, below, occasion_of)
    assert (three.n, three.occasions) == (18, 3)
    assert three.contains(2.81)
    assert not paired_ratio_interval(above, below).contains(2.81)
    few = paired_ratio_interval({0: 2.8, 6: 2.9, 12: 3.0}, below, occasion_of)
    assert not few.known
    sides = [{key: value - by for key, value in above.items()} for by in (2.7, 3.1)]
    ((low, high),), ((inner, outer),) = undecided(*sides, occasion_of), undecided(*sides)
    assert high - low > 2 * (outer - inner)
    assert three.why_none == ""
    none_of_three = "3 occasions: no interval; six are needed"
    for numbers, why_none in ((occasion_of.values(), none_of_three), ([pair // 3 for pair in range(18)], "")):
        median = median_interval(list(above.values()), list(numbers))
        assert (median.known, median.why_none) == (not why_none, why_none)


@pytest.mark.parametrize("kept", range(1, 7))
def test_disturbed_pairs_count_for_the_six_but_three_must_remain(kept: int) -> None:
    """Of six measured pairs, three undisturbed ones have an interval; it is theirs alone."""
    values = [1.0, 1.2, 1.1, 1.3, 1.2, 1.1][:kept]
    mean = mean_interval(values, [0] * kept, left_out=6 - kept)
    assert (mean.n, mean.left_out) == (kept, 6 - kept)
    assert mean.known == (kept >= FEWEST_UNDISTURBED)
    assert not mean_interval(values[:5]).known
    if mean.known:
        expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
        assert (mean.low, mean.high) == pytest.approx((expected.low, expected.high))
        assert mean.why_none == ""
    else:
        assert mean.why_none == f"n = {kept} undisturbed of 6: no interval; three are needed"


@pytest.mark.parametrize("n", range(1, 10))
def test_order_statistics_of_fewer_than_six_do_not_hold_a_median_often_enough(n: int) -> None:
    """The range of n values misses the median with twice the probability of n heads in n throws of a coin."""
    missed = 2 * 0.5**n
    assert median_interval(list(range(1, n + 1))).known == (missed <= 0.05) == (n >= FEWEST)


@pytest.mark.parametrize("n", [6, *nightly(20)])
@pytest.mark.parametrize("shared", [0.2, *nightly(0.0)])
@pytest.mark.parametrize("spread", [(0.05, 0.05), (0.3, 0.3), (0.02, 0.3)])
def test_intervals_of_crossings_hold_them_as_often_as_they_say(
    n: int, shared: float, spread: tuple[float, float]
) -> None:
    """They hold the crossing in 0.93 to 0.97 of samples that cross, also with a shared drift or one noisier side."""
    generator, hits, crossed = np.random.default_rng(n), 0, 0
    for _ in range(2000):
        drift = generator.normal(0, shared, n)
        left = drift + generator.normal(0.3, spread[0], n)
        right = drift + generator.normal(-0.2, spread[1], n)
        if left.mean() * right.mean() >= 0:
            continue  # the report prints no crossing
        parts, place = undecided(dict(enumerate(left)), dict(enumerate(right))), left.mean()
        place /= left.mean() - right.mean()
        assert any(low <= place <= high for low, high in parts)
        hits, crossed = hits + any(low <= 0.6 <= high for low, high in parts), crossed + 1
    assert 0.93 < hits / crossed < 0.975


def test_where_a_mean_may_be_zero_itself_the_line_is_undecided_from_there_on() -> None:
    """If the mean at one end may be zero, the line is undecided up to that end; a line far from zero is decided
    everywhere.
    """
    about_zero, below = [0.1, -0.1, 0.2, -0.1, 0.1, -0.1], [-1.0, -1.1, -0.9, -1.0, -1.0, -1.0]
    ((low, high),) = undecided(dict(enumerate(about_zero)), dict(enumerate(below)))
    assert (low, 0 < high < 1) == (0.0, True)
    assert undecided(dict(enumerate(below)), dict(enumerate(below))) == []


@pytest.mark.parametrize(
    ("left", "right", "parts"),
    [
        (1.0, -1.0, [(0.5, 0.5)]), (1.0, 0.0, [(1.0, 1.0)]), (0.0, 1.0, [(0.0, 0.0)]), (1.0, 2.0, []),
        (0.0, 0.0, [(0.0, 1.0)]), (-3.0, 1.0, [(0.75, 0.75)]), (1.0, 1.0, []),
    ],
)  # fmt: skip
def test_without_spread_the_crossing_itself_is_all_that_is_undecided(
    left: float, right: float, parts: list[tuple[float, float]]
) -> None:
    """With six equal values at each end, the line is known exactly."""
    assert undecided(dict.fromkeys(range(6), left), dict.fromkeys(range(6), right)) == parts


@pytest.mark.parametrize(("left", "right"), [(6, 8), *nightly((6, 6), (24, 6))])
@pytest.mark.parametrize("spread", [1.0, *nightly(0.1, 10.0)])
def test_intervals_of_products_hold_them_as_often_as_they_say(left: int, right: int, spread: float) -> None:
    """Intervals hold the product in 0.93 to 0.98 of 2000 samples, whichever factor is the noisier one."""
    draw, hits = np.random.default_rng(left + right), 0
    for _ in range(2000):
        logs = draw.normal(0.7, 0.02 * spread, left), draw.normal(-0.05, 0.02, right)
        factors = (
            paired_ratio_interval(dict(enumerate(np.exp(each))), dict.fromkeys(range(len(each)), 1.0))
            for each in logs
        )
        hits += product_interval(*factors).contains(math.exp(0.65))
    assert 0.93 < hits / 2000 < 0.98


@given(st.floats(0.1, 10.0), st.floats(0.01, 1.0), st.floats(0.1, 10.0))
def test_a_counted_factor_scales_an_interval(value: float, half: float, factor: float) -> None:
    """It adds no width, and takes none of the other factor's occasions and disturbances away."""
    sampled = Interval(value, value / (1 + half), value * (1 + half), 7, 2, 1, disturbed=True)
    product = product_interval(sampled, Interval(factor, factor, factor, 0))
    assert (product.low, product.estimate, product.high) == pytest.approx(
        (factor * sampled.low, factor * value, factor * sampled.high)
    )
    assert (product.n, product.occasions, product.left_out, product.disturbed) == (7, 2, 1, True)


def test_a_product_counts_the_values_of_the_factor_with_fewer() -> None:
    """28 of 30 pairs times 6 seeds have n = 6 with nothing left out: the 2 pairs do not belong to the 6."""
    pairs, seeds = Interval(2.0, 1.9, 2.1, 28, 3, 2), Interval(0.9, 0.8, 1.0, 6)
    for product in (product_interval(pairs, seeds), product_interval(seeds, pairs)):
        assert (product.n, product.left_out, product.occasions) == (6, 0, 3)


def test_a_product_has_no_interval_unless_both_factors_have_one() -> None:
    """And none of what is zero or negative."""
    known, unknown = Interval(2.0, 1.9, 2.1, 6), Interval(0.9, math.nan, math.nan, 1)
    product = product_interval(known, unknown)
    assert product.estimate == pytest.approx(1.8)
    assert (product.known, product.n) == (False, 1)
    for wrong in (Interval(0.0, 0.0, 1.0, 6), Interval(1.0, -0.1, 2.0, 6)):
        with pytest.raises(ValueError, match="positive"):
            product_interval(known, wrong)
