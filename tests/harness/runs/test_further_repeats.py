"""Further repeats follow from measured seconds, and stop at intervals that hold the ratio."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from harness.records.confidence_intervals import FEWEST
from harness.runs.further_repeats import Batch, Timing, batches, narrow, speed_up, timing_of
from harness.suites.repeat_order import BEYOND, Repeats
from harness.suites.suite import Suite
from harness.suites.trial import Cluster, PolicyChanges, Trial
from report.data import decoding, metrics, speedups
from report.data.frames import frames_of
from tests.report.records import changed_steps, record_of, records_of, taken_by_others

SETTINGS = tuple(
    Trial(strategy=strategy, cluster=Cluster(rate=rate))
    for rate in ("50 Mbit/s", "200 Mbit/s")
    for strategy in ("zero3", "zeropp", "qwz")
)


def suite(repeats: Repeats, settings: tuple[Trial, ...] = SETTINGS) -> Suite:
    return Suite.model_construct(name="t", question="?", combinations=tuple(settings), repeats=repeats)


def measured(
    spread: Callable[[Trial], float], disturbed: Callable[[Trial], bool] = lambda _: False
) -> Callable[[Trial], Timing | None]:
    """Return a timing of any trial: noise that follows from the trial, and so is the same each time.

    Disturbed trials take ten times as much noise.
    """

    def timing(trial: Trial) -> Timing | None:
        taken = disturbed(trial)
        noise = np.random.default_rng(int(trial.id, 16)).lognormal(0, spread(trial) * (10 if taken else 1))
        return Timing(float(noise), taken)

    return timing


def halves(batched: list[Batch], timing: Callable[[Trial], Timing | None], rate: float) -> list[float]:
    """Return half the widths of the intervals of one rate's ratios over ZeRO-3, after all batches."""
    took: dict[str, dict[tuple[int, int], Timing]] = {}
    for trial in (trial for batch in batched for trial in batch.trials if trial.cluster.rate == rate):
        value = timing(trial)
        assert value is not None
        took.setdefault(trial.strategy, {})[0, trial.repeat] = value
    return [speed_up(took["zero3"], took[name]).half for name in ("zeropp", "qwz")]


def test_a_number_of_repeats_is_one_batch_a_sweep() -> None:
    """Three sweeps of two repeats are three batches, each with its own repeats."""
    batched = list(batches(suite(Repeats(2, None, 2)), 3, lambda _: None))
    assert [batch.sweep for batch in batched] == [0, 1, 2]
    assert [{trial.repeat for trial in batch.trials} for batch in batched] == [{0, 1}, {2, 3}, {4, 5}]


def test_repeats_go_on_until_intervals_are_narrow_where_they_are_not() -> None:
    """A setting with much scatter is repeated until its intervals are narrow or the limit is reached; a calm one
    stops.
    """
    seconds = measured(lambda trial: 0.004 if trial.cluster.rate == 50 else 0.012)
    batched = list(batches(suite(Repeats(6, 0.01, 40)), 1, seconds))
    for rate in (50, 200):
        assert max(halves(batched, seconds, rate)) <= 0.01
    counts = {
        rate: sum(trial.cluster.rate == rate for batch in batched for trial in batch.trials) / 3
        for rate in (50, 200)
    }
    assert counts[50] == FEWEST + BEYOND < counts[200] < 40
    for batch in batched[1:]:  # every repeat is whole: the baseline beside its configurations
        rates = [trial.cluster.rate for trial in batch.trials]
        assert all(rates.count(rate) == 3 for rate in rates)
        assert len({trial.repeat for trial in batch.trials}) == 1
    wild = list(batches(suite(Repeats(6, 0.01, 12)), 2, measured(lambda _: 0.5)))
    assert max(trial.repeat for batch in wild for trial in batch.trials if batch.sweep == 0) == 11
    assert {trial.repeat for batch in wild for trial in batch.trials if batch.sweep == 1} == {*range(12, 24)}


def test_a_run_that_goes_on_has_the_same_batches() -> None:
    """The batches of an interrupted run follow again from its records alone."""
    seconds = measured(lambda _: 0.01)
    whole = list(batches(suite(Repeats(6, 0.01, 30)), 2, seconds))
    ran: set[str] = set()

    def so_far(trial: Trial) -> Timing | None:
        assert trial.id in ran  # no batch follows from a trial that did not run
        return seconds(trial)

    again = []
    for batch in batches(suite(Repeats(6, 0.01, 30)), 2, so_far):
        ran |= {trial.id for trial in batch.trials}
        again.append(batch)
    assert again == whole
    assert len(whole) > 4


def test_what_failed_is_not_repeated() -> None:
    """A configuration without results is not repeated; if the baseline failed, none is."""
    noise = measured(lambda _: 0.5)

    def failing(name: str) -> Callable[[Trial], Timing | None]:
        return lambda trial: None if trial.strategy == name else noise(trial)

    repeats = Repeats(6, 0.01, 9)
    batched = list(batches(suite(repeats), 1, failing("qwz")))
    assert {trial.strategy for batch in batched[1:] for trial in batch.trials} == {"zero3", "zeropp"}
    assert len(batched) == 4
    assert len(list(batches(suite(repeats), 1, failing("zero3")))) == 1


@pytest.mark.parametrize("spread", [0.01, 0.02, 0.03, 0.04, 0.06])
def test_intervals_that_were_waited_for_hold_the_ratio_as_often_as_they_say(spread: float) -> None:
    """Although repeats stop once the interval is narrow, intervals hold the ratio in 0.93 to 0.97 of 4000 samples;
    without the condition on earlier repeats it would be fewer.
    """
    within, most = 0.02, 20
    logs = np.random.default_rng(7).normal(0, spread, (4000, most))
    counts = np.arange(FEWEST, most + 1)
    means = np.cumsum(logs, axis=1)[:, counts - 1] / counts
    squares = np.cumsum(logs**2, axis=1)[:, counts - 1] - counts * means**2
    half = stats.t.ppf(0.975, counts - 1) * np.sqrt(squares / (counts - 1) / counts)
    at = [
        next((k for k in range(len(counts)) if narrow(list(row[: k + 1]), within)), len(counts) - 1)
        for row in np.expm1(half)
    ]
    rows = np.arange(len(logs))
    assert 0.93 < np.mean(np.abs(means[rows, at]) <= half[rows, at]) < 0.97


def test_one_narrow_interval_is_not_enough() -> None:
    """An interval must be narrow now, and have been narrow some repeats ago."""
    assert not narrow([0.01], 0.02)
    assert not narrow([0.01] * BEYOND, 0.02)
    assert narrow([0.01] * (BEYOND + 1), 0.02)
    assert not narrow([0.01] * 9 + [0.03], 0.02)
    assert not narrow([math.nan] * 9, 0.02)


def test_what_trials_took_is_what_the_report_says() -> None:
    """Repeats are decided by the same seconds from which the report forms speed-ups, for steps and generations."""
    schedule = PolicyChanges(schedule=[{"until": "75 %"}, {"gradients": "int8:256"}])
    scheduled = record_of(Trial(strategy="zeropp", policy=schedule, steps=8, warmup=2))
    late = changed_steps(scheduled, lambda step: {"total": 1.0 + step.index + 7.0 * (step.index > 6)})
    records = [*records_of("quickstart", repeats=1), late]
    for record in records:
        table = metrics.derive(frames_of([record])).trials.set_index("id")["step_seconds"]
        timing = timing_of(record)
        assert timing is not None
        assert timing.seconds == pytest.approx(table[record.id])
    records = records_of("generation", repeats=1)
    generations = decoding.generations(frames_of(records)).groupby("id")["seconds"]
    for record in records:
        timing = timing_of(record)
        assert timing is not None
        expected = math.exp(np.log(generations.get_group(record.id)).mean())
        assert timing == (pytest.approx(expected), record.disturbed)
    assert timing_of(None) is None
    assert timing_of(record.model_copy(update={"ranks": []})) is None


@pytest.mark.parametrize(
    "disturbed",
    [{}, {1: "zeropp", 4: "zero3"}, dict.fromkeys(range(5), "zero3"), dict.fromkeys(range(8), "zeropp")],
)
def test_the_interval_is_that_of_the_page(disturbed: dict[int, str]) -> None:
    """A disturbed pair counts for the decision only if it counts on the page; ``disturbed`` names trials by repeat."""
    records = [
        record
        for record in records_of("quickstart", repeats=8)
        if record.trial["strategy"] in ("zero3", "zeropp")
    ]
    records = [
        taken_by_others(
            changed_steps(record, lambda step, repeat=repeat: {"total": step.total * (3 + repeat)}), 0.3
        )
        if disturbed.get(repeat := record.trial["repeat"]) == record.trial["strategy"]
        else record
        for record in records
    ]
    derived = metrics.derive(frames_of(records))
    page = speedups.speedup(derived.pairs[derived.pairs["strategy"] == "zeropp"])
    times: dict[str, dict[tuple[int, int], Timing]] = {"zero3": {}, "zeropp": {}}
    for record in records:
        timing = timing_of(record)
        assert timing is not None
        times[record.trial["strategy"]][record.trial["seed"], record.trial["repeat"]] = timing
    ours = speed_up(times["zero3"], times["zeropp"])
    expected = (page.estimate, page.low, page.high, page.n, page.left_out)
    assert (ours.estimate, ours.low, ours.high, ours.n, ours.left_out) == pytest.approx(expected, nan_ok=True)
    assert ours.left_out == (len(disturbed) if len(disturbed) < 8 else 0)


def test_disturbed_pairs_do_not_keep_a_sweep_going() -> None:
    """Two disturbed repeats with much noise are left out, so that calm repeats end the sweep soon."""
    calm = list(batches(suite(Repeats(6, 0.01, 40)), 1, measured(lambda _: 0.004)))
    noisy = measured(lambda _: 0.004, lambda trial: trial.repeat in (2, 3))
    with_noise = list(batches(suite(Repeats(6, 0.01, 40)), 1, noisy))
    assert len(calm) == 1 + BEYOND
    assert len(with_noise) <= len(calm) + 2
    assert max(halves(with_noise, noisy, 50)) <= 0.01
