"""Break-even rates: all crossings with intervals, or why there is none, by records whose curves are known."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np
import pytest

from harness.records.trial_record import Record
from harness.suites.trial import Cluster, Trial
from report.data.break_even import BreakEven, break_even, in_words
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables import all_tables
from report.verdicts import verdicts
from tests.report.records import changed, changed_steps, on_link, record_of

NOISE = (0.99, 1.01, 1.0, 1.005, 0.995, 1.0)


def records_over(
    speedups: Mapping[float, float],
    repeats: int = 6,
    *,
    spread: float = 1.0,
    missing: Sequence[tuple] = (),
    tokens: int = 512,
) -> list[Record]:
    """Records of ZeRO-3 and ZeRO++ whose speed-up at each rate is known, but for a noise of 1 % * ``spread``;
    those of ZeRO++ at (rate, repeat) ``missing`` never ran.  A rank has ``tokens`` in a step.
    """
    records = []
    for repeat, (index, (rate, speedup)) in product(range(repeats), enumerate(speedups.items())):
        for strategy, seconds in (("zero3", 1.0), ("zeropp", 1.0 / speedup)):
            if strategy == "zeropp" and (rate, repeat) in missing:
                continue
            cluster = Cluster(rate=f"{rate} Mbit/s")
            trial = Trial(strategy=strategy, repeat=repeat, cluster=cluster, tokens_per_rank=tokens)
            noise = NOISE[(repeat + index) % len(NOISE)] ** spread if strategy == "zeropp" else 1.0
            step = seconds * noise
            record = changed_steps(record_of(trial), lambda _, step=step: {"total": step})
            records.append(changed(on_link(record, rate), order=len(records)))
    return records


def found_in(records: list[Record]) -> BreakEven:
    ((found,),) = break_even(derive(frames_of(records)).pairs)[["found"]].to_numpy()
    return found


def test_a_clean_curve_has_one_crossing_between_the_rates_around_it() -> None:
    """On a logarithmic axis: a speed-up of 2 at 50 and of a half at 200 cross at 100, to within the noise."""
    found = found_in(records_over({25: 3.0, 50: 2.0, 200: 0.5, 800: 0.4}))
    ((crossing,), unclear) = found.crossings, found.unclear
    assert (found.outcome, unclear) == ("crosses", ())
    assert crossing.estimate == pytest.approx(100, rel=0.01)
    assert 97 < crossing.low < 100 < crossing.high < 103
    assert crossing.n == 6


def test_noise_widens_the_interval_and_reaches_into_the_neighbouring_lines() -> None:
    """Where the curve is flat it is told from 1 only beyond the rates on both sides of the crossing."""
    steep = found_in(records_over({25: 2.0, 50: 1.1, 200: 0.9, 800: 0.5})).crossings[0]
    noisy = found_in(records_over({25: 2.0, 50: 1.1, 200: 0.9, 800: 0.5}, spread=20)).crossings[0]
    assert 25 < noisy.low < 50 < steep.low < steep.high < 200 < noisy.high < 800


def test_two_crossings_are_both_listed() -> None:
    """Faster only between two rates: each crossing has its interval."""
    found = found_in(records_over({25: 0.5, 100: 2.0, 400: 0.5}))
    assert [crossing.estimate for crossing in found.crossings] == pytest.approx([50, 200], rel=0.01)
    assert all(crossing.known for crossing in found.crossings)
    assert in_words(found).count(" to ") == 2


@pytest.mark.parametrize(
    ("speedups", "outcome", "words"),
    [
        ((3.0, 2.0, 1.5), "pays", "none: faster at every measured rate"),
        ((0.9, 0.5, 0.4), "costs", "none: slower at every measured rate"),
    ],
)
def test_without_a_crossing_it_pays_everywhere_or_nowhere(
    speedups: tuple[float, ...], outcome: str, words: str
) -> None:
    """And the table says so."""
    records = records_over(dict(zip((25, 100, 400), speedups, strict=True)))
    assert found_in(records).outcome == outcome
    derived = derive(frames_of(records))
    assert words in all_tables.break_even(derived).markdown()


@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("speedups", [(1.1, 0.9, 1.1), (2.0, 1.5, 1.2), (2.0, 1.0, 0.5)])
def test_few_repeats_determine_nothing(repeats: int, speedups: tuple[float, ...]) -> None:
    """Whatever the curve: no number is stated, and how many repeats it takes is."""
    records = records_over(dict(zip((10, 50, 200), speedups, strict=True)), repeats)
    words = f"not determined (n = {repeats}: no interval; six are needed)"
    found = found_in(records)
    assert (found.outcome, found.crossings, in_words(found)) == ("not determined", (), words)
    derived = derive(frames_of(records))
    assert words in all_tables.break_even(derived).markdown()
    assert verdicts(derived).sentence.startswith("Inconclusive (")


def test_a_crossing_at_the_border_is_open_there() -> None:
    """At the highest rate the steps are equal: the upper end lies beyond what was measured."""
    for spread in (0.0, 1.0):
        found = found_in(records_over({25: 2.0, 100: 1.5, 400: 1.0}, spread=spread))
        if spread == 0.0:
            (crossing,) = found.crossings
            assert (crossing.estimate, crossing.low) == (pytest.approx(400), pytest.approx(400))
            assert crossing.high == math.inf
            assert in_words(found) == "400 (400 to beyond what was measured)"
        else:  # the noise's mean is 1 to four digits, and so is the speed-up
            assert found.outcome in ("crosses", "not determined")
    lowest = found_in(records_over({25: 1.0, 100: 0.5, 400: 0.4}, spread=0.0))
    assert in_words(lowest) == "25.0 (beyond what was measured to 25.0)"


def test_a_crossing_at_a_measured_rate_is_found() -> None:
    """A speed-up of exactly 1 at a rate is neither above nor below, and a crossing nevertheless."""
    (crossing,) = found_in(records_over({25: 2.0, 100: 1.0, 400: 0.5}, spread=0.0)).crossings
    assert crossing.estimate == pytest.approx(100)
    touching = found_in(records_over({25: 2.0, 100: 1.0, 400: 2.0}, spread=0.0))
    assert (touching.crossings, touching.outcome) == ((), "not determined")


def test_equal_steps_are_no_break_even() -> None:
    """Ties at every rate: nobody is faster anywhere."""
    found = found_in(records_over({25: 1.0, 100: 1.0}, spread=0.0))
    assert in_words(found) == "not determined (not significant from 25.0 to 100 Mbit/s)"


def test_a_wide_band_around_1_is_not_determined_but_a_side_that_is_known_bounds_it() -> None:
    """Told to be faster at the lowest rate alone, and slower on average at the highest: an open interval."""
    found = found_in(records_over({25: 3.0, 100: 1.05, 400: 0.98}, spread=10))
    (crossing,) = found.crossings
    assert 25 < crossing.low < crossing.estimate < 400
    assert crossing.high == math.inf
    everywhere = found_in(records_over({25: 1.02, 100: 1.0, 400: 0.98}, spread=20))
    assert (everywhere.outcome, everywhere.crossings) == ("not determined", ())


def test_unequal_repeats_are_those_that_both_rates_share() -> None:
    """A rate with one repeat left bounds nothing: the crossing lies between the rates around it."""
    missing = [(100, repeat) for repeat in range(1, 6)]
    found = found_in(records_over({25: 2.0, 50: 1.5, 100: 0.7, 400: 0.5}, missing=missing))
    (crossing,) = found.crossings
    assert (crossing.low, crossing.high) == (pytest.approx(50), pytest.approx(400))
    assert crossing.n == 1


def test_the_sentence_of_a_page_names_the_break_even() -> None:
    """All crossings, or that there is none, after the largest difference."""

    def sentence(speedups: Mapping[float, float], spread: float = 1.0) -> str:
        return verdicts(derive(frames_of(records_over(speedups, spread=spread)))).sentence

    twice = sentence({25: 0.5, 100: 2.1, 400: 0.5})
    assert twice.startswith("With 100 Mbit/s, ZeRO++ is 2.1")
    assert twice.partition(". ZeRO++ breaks even at ")[2].partition(" Mbit/s")[0].count(" to ") == 2
    slower = sentence({25: 0.9, 100: 0.6})
    assert slower.startswith("With 100 Mbit/s, a step of ZeRO++ takes 1.6")
    assert slower.count(". ZeRO++ is faster at no measured rate, up to 100 Mbit/s.") == 1
    faster = sentence({25: 3.0, 100: 2.0})
    assert faster.count(". ZeRO++ is faster at every measured rate, up to 100 Mbit/s.") == 1
    unclear = sentence({25: 2.0, 100: 1.01, 400: 1.01}, spread=3)
    assert ". ZeRO++'s break-even is not determined: its speed-up, interpolated between " in unclear


def test_the_sentence_names_each_size_with_its_own_break_even() -> None:
    """Of two batch sizes, one is always faster and one breaks even: neither clause stands for both."""
    small = records_over({25: 3.0, 100: 2.0})
    large = records_over({25: 2.0, 100: 0.5}, tokens=1024)
    text = verdicts(derive(frames_of([*small, *large]))).sentence
    always = " With 512 tokens/rank, ZeRO++ is faster at every measured rate, up to 100 Mbit/s."
    assert f"{always} With 1024 tokens/rank, ZeRO++ breaks even at 5" in text


def test_intervals_of_break_evens_hold_them_as_often_as_they_say() -> None:
    """About 0.95 of samples of a curve of four rates: 0.953 to 0.961 of 1,000."""
    generator, hits, stated = np.random.default_rng(1), 0, 0
    curve = {25: 1.6, 50: 1.15, 100: 0.95, 200: 0.7}
    logs = np.log([*curve.values()])
    true = math.exp(np.interp(0, -logs, np.log([*curve])))
    pairs = derive(frames_of(records_over(curve))).pairs.sort_values(["achieved_mbit", "repeat"])
    others = pairs[pairs["id"] != pairs["baseline"]]
    for _ in range(150):
        noise = np.exp(generator.normal(0, 0.05, len(others)))
        table = others.assign(step_seconds=others["baseline_seconds"] / np.repeat(np.exp(logs), 6) * noise)
        ((found,),) = break_even(table)[["found"]].to_numpy()
        stated += len(found.crossings)
        hits += sum(crossing.contains(true) for crossing in found.crossings)
    assert stated == 150
    assert 0.92 < hits / stated < 0.99
