"""Losses are paired by seed, count each seed once, and claim nothing without power."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from harness.records.confidence_intervals import FEWEST, Interval, mean_interval
from harness.records.trial_record import Record
from harness.suites.trial import Cluster, Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from report.effects.loss_verdicts import ENOUGH_POWER, MARGIN, losses, non_inferiority, power
from report.tables import all_tables
from tests.report.records import changed, ending_at, record_of
from tests.support.params import nightly

STEPS = 120


def records(
    last_losses: Mapping[str, Iterable[float]],
    *,
    repeats: int = 1,
    steps: int = STEPS,
    pace: float = 1.0,
    cluster: Cluster = Cluster(rate="50 Mbit/s"),  # noqa: B008  # immutable
) -> list[Record]:
    """Trials with losses that fall from 5 to the last, by strategy and seed; ZeRO++ is ``pace`` as fast."""
    return [
        ending_at(
            Trial(
                strategy=strategy, seed=seed, repeat=repeat, steps=steps, warmup=0, validate_every=30,
                cluster=cluster,
            ),
            loss,
            seconds=100.0 / (pace if strategy == "zeropp" else 1.0),
        )
        for strategy, losses in last_losses.items()
        for seed, loss in enumerate(losses)
        for repeat in range(repeats)
    ]  # fmt: skip


def row_of(records: list[Record]) -> Any:
    return next(row for row in losses(derive(frames_of(records))) if row["configuration"] == "ZeRO++")


BASE = [2.0, 2.1, 1.9, 2.05, 1.95, 2.0]
NOISE = np.array([0.001, -0.002, 0.001, 0.0, 0.002, -0.001])


def test_differences_are_of_the_same_seed() -> None:
    """Differences between seeds cancel: 0.2 % worse in each seed is, with power, within the margin of 1 %."""
    row = row_of(records({"zero3": BASE, "zeropp": 1.002 * np.array(BASE) + NOISE}))
    assert row["difference"].n == 6
    assert row["difference"].estimate == pytest.approx(0.004, abs=1e-3)
    assert row["margin"] == pytest.approx(MARGIN * 2.0)
    assert row["power"] > 0.99
    assert row["verdict"] == "within the margin"


@pytest.mark.parametrize(("margin", "verdict"), [(10, "within the margin"), (1, "beyond the margin")])
def test_a_margin_in_steps_is_what_the_baseline_gains_in_them(margin: int, verdict: str) -> None:
    """ZeRO-3's loss falls by 0.1 nats over the last 30 of 120 steps, so ten are worth a thirtieth; one
    validation gives no margin, no power and no verdict.
    """
    curves = []
    for record in records({"zero3": BASE, "zeropp": np.array(BASE) + 0.02 + NOISE}):
        last = record.validations[-1]
        curve = [last.model_copy(update={"step": step, "loss": last.loss + above})
                 for step, above in ((60, 0.9), (90, 0.1), (120, 0.0))]  # fmt: skip
        curves.append(changed(record, validations=curve, margin=margin))
    row = row_of(curves)
    assert row["margin"] == pytest.approx(margin * 0.1 / 30)
    assert row["verdict"] == verdict
    row = row_of([changed(record, validations=record.validations[-1:]) for record in curves])
    assert math.isnan(row["margin"])
    assert row["verdict"] == "no power"


def test_a_configuration_that_trains_worse_is_beyond_the_margin() -> None:
    """A configuration that ends 15 % above ZeRO-3 is beyond the margin, and reaches no target."""
    row = row_of(records({"zero3": BASE, "zeropp": 1.15 * np.array(BASE) + NOISE}))
    assert row["verdict"] == "beyond the margin"
    assert (row["reached"], row["gain"].n) == (0, 0)


def test_repeats_of_a_seed_are_no_repeats_of_a_loss() -> None:
    """Two seeds three times each are two losses: no interval, and too few for a verdict."""
    row = row_of(records({"zero3": BASE[:2], "zeropp": BASE[:2]}, repeats=3))
    assert row["seeds"] == row["difference"].n == 2
    assert not row["difference"].known
    assert math.isnan(row["power"])
    assert row["verdict"] == "too few: 2 seeds of 6"


def test_seeds_that_scatter_say_nothing() -> None:
    """Differences as wide as the margin leave no power, and the table says so in place of a verdict."""
    scattered = np.array(BASE) + np.array([0.05, -0.06, 0.04, -0.05, 0.06, -0.04])
    trials = records({"zero3": BASE, "zeropp": scattered})
    row = row_of(trials)
    assert row["power"] < 0.5
    assert row["verdict"] == "no power"
    table = all_tables.losses(derive(frames_of(trials)))
    assert "no power" in table.markdown()
    assert "the margin is 1% of ZeRO-3's loss (here 0.020 nats)" in table.description


def test_seeds_that_reach_the_target_are_counted_without_seconds() -> None:
    """With ranks as threads, whose steps are not timed, all seeds reach the target, and after how long is not known."""
    level = [2.0 + 0.001 * seed for seed in range(6)]
    trials = records({"zero3": level, "zeropp": level}, cluster=Cluster(ranks="threads"))
    row = row_of(trials)
    assert row["reached"] == 6
    assert math.isnan(row["seconds"])
    assert row["gain"].n == 0
    assert "seeds reach it" not in all_tables.losses(derive(frames_of(trials))).markdown()


def test_time_to_the_target_is_paired_and_has_an_interval() -> None:
    """Twice as fast to the same loss is 2, by seed; where a seed never gets there, there is no ratio."""
    same = records({"zero3": BASE, "zeropp": BASE}, pace=2.0)
    row = row_of(same)
    assert row["target"] == pytest.approx(2.02)
    assert row["reached"] == 4  # seeds of ZeRO-3 itself end above the mean of all and the margin
    assert row["gain"].n == 0
    assert "4 of 6 seeds reach it" in all_tables.losses(derive(frames_of(same))).markdown()
    level = [2.0 + 0.001 * seed for seed in range(6)]
    row = row_of(records({"zero3": level, "zeropp": level}, pace=2.0))
    assert row["reached"] == row["gain"].n == 6
    assert row["gain"].low <= row["gain"].estimate <= row["gain"].high
    assert row["gain"].estimate == pytest.approx(2.0)
    assert 48 < row["seconds"] < 50  # of 50 seconds: a little before the last validation


def test_a_single_validation_of_few_steps_is_no_loss() -> None:
    """A trial validated once, after 96 steps, has no validation loss in any table."""
    once = [
        record_of(Trial(strategy=strategy, steps=96, warmup=0, validate_every=0), suite="once")
        for strategy in ("zero3", "zeropp")
    ]
    derived = derive(frames_of(once))
    assert not losses(derived)
    assert "validation_loss" not in {column.key for column in all_tables.summary(derived).columns}


@pytest.mark.parametrize("n", [6, *nightly(12)])
@pytest.mark.parametrize("spread", [0.3, 3.0, *nightly(1.0)])
def test_verdicts_are_wrong_no_more_often_than_they_may_be(n: int, spread: float) -> None:
    """With differences at the margin itself, neither verdict comes more often than in 2.5 % of samples."""
    differences = np.random.default_rng(n).normal(1.0, spread, (4000, n))
    verdicts = [non_inferiority(mean_interval(row), margin=1.0) for row in differences]
    assert verdicts.count("within the margin") / 4000 < 0.033  # four standard errors
    assert verdicts.count("beyond the margin") / 4000 < 0.033


@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("spread", [0.4, 0.8, 1.6])
def test_power_is_how_often_equals_pass(n: int, spread: float) -> None:
    """Of equal configurations the upper end lies below the margin as often as the power of that spread says."""
    rows = np.random.default_rng(n).normal(0, spread, (4000, n))
    passed = sum(mean_interval(row).high < 1.0 for row in rows) / 4000
    half = stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n)
    assert power(Interval(0.0, -half, half, n), 1.0) == pytest.approx(passed, abs=0.025)


def test_no_verdict_without_power() -> None:
    """Few seeds, or scattered ones, say nothing; what lies beyond the margin for sure is called so."""
    assert non_inferiority(mean_interval([0.0] * (FEWEST - 1)), 1.0) == "no power"
    wide = mean_interval([-9.0, 9.0, -8.0, 8.0, -7.0, 6.0])
    assert power(wide, 1.0) < ENOUGH_POWER
    assert non_inferiority(wide, 1.0) == "no power"
    assert non_inferiority(mean_interval([-30.0, -9.0, -12.0, -9.0, -25.0, -14.0]), 1.0) == "no power"
    assert non_inferiority(mean_interval([30.0, 9.0, 12.0, 9.0, 25.0, 14.0]), 1.0) == "beyond the margin"
    assert non_inferiority(mean_interval([0.1, -0.1, 0.2, -0.2, 0.0, 0.1]), 1.0) == "within the margin"
    assert non_inferiority(mean_interval([0.7, 0.9, 1.2, 1.1, 0.8, 1.0]), 1.0) == "inconclusive"
