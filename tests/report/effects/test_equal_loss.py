"""Steps to equal losses agree with closed forms, are paired by seed, and are never extrapolated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.effects.equal_loss import equal_loss
from report.effects.loss_verdicts import first_at
from tests.support.params import nightly

STEPS = (100, 200, 300, 400)
NOISE = np.array([0.01, -0.01, 0.005, -0.005, 0.002, -0.002])
_FALL = st.floats(0.05, 2.0)


def lines(ends: Sequence[float], steps: Sequence[int] = STEPS, *, first: int = 0) -> pd.DataFrame:
    """Validations of seeds from ``first`` on, whose losses fall from 5 before training to these on straight lines."""
    return pd.DataFrame(
        [
            {"seed": seed, "step": step, "loss": 5 + (end - 5) * step / steps[-1]}
            for seed, end in enumerate(ends, first)
            for step in steps
        ]
    )


def curves(by_seed: Mapping[int, Sequence[float]], steps: Sequence[int] = STEPS) -> pd.DataFrame:
    """Validations by seed."""
    return pd.DataFrame(
        [
            {"seed": seed, "step": step, "loss": loss}
            for seed, losses in by_seed.items()
            for step, loss in zip(steps, losses, strict=True)
        ]
    )


@pytest.mark.parametrize("worse", [0.3, -0.3, 0.0, 1.5])
def test_straight_curves_have_a_ratio_in_closed_form(worse: float) -> None:
    """Curves from 5 nats that end at 2 and at 2 + d reach equal losses at steps with the ratio (3 - d) / 3; the one
    that ends higher takes all steps.
    """
    found = equal_loss(lines([2 + worse + noise for noise in NOISE]), lines([2.0] * 6))
    assert found.why == ""
    assert found.ratio.estimate == pytest.approx((3 - worse) / 3)
    assert (found.loss, found.base) == pytest.approx((2 + worse, 2.0))
    assert found.target == max(found.loss, found.base)
    assert (found.steps if worse >= 0 else found.base_steps) == pytest.approx(400)
    assert found.base_steps / found.steps == pytest.approx(found.ratio.estimate)
    assert found.ratio.n == 6


def test_the_interval_is_that_of_the_difference_on_the_curves() -> None:
    """Its ends are the ratios in closed form at the ends of Student's interval of the differences."""
    found = equal_loss(lines([2.3 + noise for noise in NOISE]), lines([2.0] * 6))
    half = 2.5705818366147395 * NOISE.std(ddof=1) / math.sqrt(6)  # Student's t, 5 degrees of freedom
    ends = [(3 - difference) / 3 for difference in (0.3 + half, 0.3 - half)]
    assert (found.ratio.low, found.ratio.high) == pytest.approx(ends)


def test_pairing_by_seed_cancels_what_seeds_share() -> None:
    """A spread of 0.5 nats between seeds leaves the interval as narrow as the spread of differences does."""
    of_seeds = 0.1 * np.arange(6)
    paired = equal_loss(lines(2.3 + of_seeds + NOISE), lines(2.0 + of_seeds))
    shuffled = equal_loss(lines(2.3 + of_seeds[::-1] + NOISE), lines(2.0 + of_seeds))
    assert paired.ratio.estimate == pytest.approx(shuffled.ratio.estimate)
    assert paired.ratio.high - paired.ratio.low < 0.05 * (shuffled.ratio.high - shuffled.ratio.low)


@pytest.mark.parametrize(
    ("ends", "reached", "significant"),
    [
        ([2.3 + noise for noise in NOISE], False, True),
        ([1.7 + noise for noise in NOISE], True, True),
        ([2.001 + noise for noise in NOISE], True, False),  # a little higher, and not significantly
        ([1.999 + noise for noise in NOISE], True, False),
        ([2.001], False, False),  # of one seed, which has no interval
        ([1.999], True, False),
    ],
)
def test_a_loss_is_reached_unless_the_end_is_higher_and_no_interval_says_otherwise(
    ends: Sequence[float], *, reached: bool, significant: bool
) -> None:
    """A difference that is not significant does not count as unreached, and its ratio's interval contains 1."""
    found = equal_loss(lines(ends), lines([2.0] * len(ends)))
    assert found.reached is reached
    assert found.ratio.known is (len(ends) >= 6)
    if found.ratio.known:
        assert found.ratio.contains(1.0) is not significant


def test_seeds_that_only_one_has_do_not_count() -> None:
    """Neither for the curves nor for the difference; without a seed of both there is no ratio."""
    own = pd.concat([lines([2.3 + noise for noise in NOISE]), lines([9.0] * 3, first=20)])
    base = pd.concat([lines([2.0] * 6), lines([0.5] * 3, first=40)])
    assert equal_loss(own, base) == equal_loss(lines([2.3 + noise for noise in NOISE]), lines([2.0] * 6))
    apart = equal_loss(lines([2.3] * 6), lines([2.0] * 6, first=10))
    assert apart.why == "no seed has losses of both"
    assert math.isnan(apart.ratio.estimate)


def test_repeats_of_a_seed_are_one_curve() -> None:
    """Their mean; three repeats of two seeds are two seeds."""
    own = pd.concat([lines([2.2, 2.4]), lines([2.4, 2.6]), lines([2.3, 2.5])])
    found = equal_loss(own, lines([2.0, 2.2]))
    assert found.ratio.n == 2
    assert found.loss == pytest.approx(2.4)


def test_a_target_of_another_length_of_training_is_stale() -> None:
    """The baseline's last loss is no target for a curve that goes on, and the other way around."""
    longer = lines([2.3] * 6, (200, 400, 600, 800))
    for own, base in ((longer, lines([2.0] * 6)), (lines([2.0] * 6), longer)):
        found = equal_loss(own, base)
        assert found.why == "not every seed of both has a loss after 800 steps"
        assert not found.ratio.known
    ended_early = curves({seed: (4.0, 3.0, 2.5, 2.0 if seed else math.nan) for seed in range(6)})
    assert (
        equal_loss(ended_early, lines([2.0] * 6)).why == "not every seed of both has a loss after 400 steps"
    )


def test_one_validation_is_no_curve_and_nothing_lies_before_the_first() -> None:
    """A loss that the other curve has passed before its first validation has no steps, rather than guessed ones."""
    once = lines([2.3] * 6, (400,))
    assert equal_loss(once, lines([2.0] * 6)).why == "one validation; a curve needs two"
    far = equal_loss(
        lines([4.5] * 6), lines([2.0] * 6)
    )  # the baseline is at 4.25 nats in its first validation
    assert far.why == "a curve begins below that loss"
    assert math.isnan(far.ratio.estimate)
    assert not far.reached
    wide = equal_loss(
        lines(4.2 + 20 * NOISE), lines([2.0] * 6)
    )  # only the end of the interval lies before it
    assert wide.ratio.estimate > 0
    assert not wide.ratio.known


def test_the_curve_that_ends_higher_takes_all_its_steps() -> None:
    """Also if it rises at its end, and was lower before: the ratio is above 1 for the one that ends lower."""
    dipping = curves(dict.fromkeys(range(6), (3.0, 1.9, 1.8, 2.0)))
    same = equal_loss(dipping, dipping)
    assert (same.ratio.estimate, same.steps, same.base_steps) == (1.0, 400, 400)
    falling = curves(dict.fromkeys(range(6), (3.0, 2.5, 1.5, 1.0)))
    found = equal_loss(falling, dipping)
    assert (found.target, found.base_steps, found.steps) == pytest.approx((2.0, 400, 250))
    assert found.ratio.estimate == pytest.approx(1.6)
    assert equal_loss(dipping, falling).ratio.estimate == pytest.approx(1 / 1.6)


@given(_FALL, _FALL, st.floats(0.0, 0.2))
def test_exchanging_both_inverts_the_ratio(own: float, base: float, spread: float) -> None:
    """And its interval."""
    ends = [4.0 - own + 10 * spread * noise for noise in NOISE], [4.0 - base] * 6
    there = equal_loss(lines(ends[0]), lines(ends[1])).ratio
    back = equal_loss(lines(ends[1]), lines(ends[0])).ratio
    assert there.estimate == pytest.approx(1 / back.estimate)
    if there.known and back.known:
        assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))
        assert there.low <= there.estimate <= there.high


@given(st.lists(st.floats(0.1, 9.0), min_size=2, max_size=8), st.floats(0.0, 10.0), st.floats(0.1, 100.0))
def test_a_place_on_a_curve_lies_between_validations_and_scales_with_them(
    losses: list[float], target: float, scale: float
) -> None:
    """It is infinite below the curve, NaN where the curve begins below, and else between two validations."""
    curve, places = np.array(losses), np.arange(1.0, len(losses) + 1)
    place = first_at(curve, places, target)
    assert first_at(curve, scale * places, target) == pytest.approx(scale * place, nan_ok=True)
    if curve[0] <= target:
        assert math.isnan(place)
    elif curve.min() > target:
        assert place == math.inf
    else:
        assert 1.0 < place <= len(losses)
        assert np.interp(place, places, curve) == pytest.approx(target)


@pytest.mark.parametrize("seeds", [8, *nightly(6, 20)])
def test_intervals_hold_the_true_ratio_as_often_as_they_say(seeds: int) -> None:
    """In 0.92 to 0.98 of 300 samples of noisy curves, whose true ratio is known."""
    draw = np.random.default_rng(seeds)
    steps, hits = (350, 700, 1050, 1400), 0
    mean = np.array([2.25, 1.96, 1.78, 1.68])
    truth = (1050 + 350 * 0.08 / 0.10) / 1400  # the baseline is 0.02 nats above its end there
    for _ in range(300):
        shared = draw.normal(0, 0.03, (seeds, 1))
        base, own = (
            curves(dict(enumerate(mean + above + shared + draw.normal(0, 0.01, (seeds, 4)))), steps)
            for above in (0.0, 0.02)
        )
        hits += equal_loss(own, base).ratio.contains(truth)
    assert 0.92 < hits / 300 < 0.98


@pytest.mark.parametrize("place", [1, 3])
def test_infinite_losses_give_no_ratio(place: int) -> None:
    """A configuration whose loss overflowed has no ratio, and neither a warning nor a number that a page could show."""
    losses = [4.0, 3.0, 2.5, 2.0]
    falling = dict.fromkeys(range(2), losses)
    overflowed = {**falling, 1: [math.inf if i == place else loss for i, loss in enumerate(losses)]}
    for pair in ((overflowed, falling), (falling, overflowed)):
        found = equal_loss(*map(curves, pair))
        assert found.why == "an infinite loss"
        assert found.reached
        assert math.isnan(found.ratio.estimate)
