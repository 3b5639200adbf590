"""A page gives a quantity of one configuration by one number, whichever table or figure says it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import pandas as pd
import pytest

from harness.records.confidence_intervals import Interval
from harness.records.trial_record import Record
from harness.suites.trial import Cluster, Trial
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.data.speedups import step_interval
from report.draw.marks import Front, Lines, Measure, Rows, Stacked
from report.effects import effects, loss_verdicts
from report.figures.all_figures import FIGURES
from report.tables import all_tables
from tests.report.records import changed, changed_steps, committed, ending_at, records_of

SKEWED = (1.0, 1.02, 1.9, 0.97, 1.3, 1.01, 1.6)  # mean, median and geometric mean are far apart


def unequal(*strategies: str, rates: tuple[str, ...] = ("50 Mbit/s",)) -> list[Record]:
    """Records with skewed steps, losses, rates and interfaces, of seeds with unequal repeats, in three
    sweeps of unequal lengths.
    """
    records = []
    runs = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1), (1, 2, 1), (2, 0, 2), (2, 1, 2), (2, 2, 2), (3, 0, 2)]
    for (number, (seed, repeat, sweep)), strategy, rate in product(enumerate(runs), strategies, rates):
        stretch = SKEWED[(number + len(strategy)) % len(SKEWED)]
        trial = Trial(
            strategy=strategy, seed=seed, repeat=repeat, steps=120, warmup=0, validate_every=30,
            cluster=Cluster(rate=rate),
        )  # fmt: skip
        record = changed_steps(
            ending_at(trial, 2.0 * stretch, seconds=100 * stretch),
            lambda step, stretch=stretch: {"total": stretch * step.total},
        )
        assert record.interfaces is not None
        counters = [
            counted.model_copy(update={"tx_bytes": int(stretch * counted.tx_bytes)})
            for counted in record.interfaces
        ]
        records.append(changed(record, sweep=sweep, interfaces=counters, order=len(records)))
    return records


def _of_a_front() -> list[Record]:
    """Committed records of eight configurations, with six seeds each."""
    records = [r for r in committed("frontier") if r.trial["seed"] < 6]
    names = list(dict.fromkeys(str(r.trial["policy"]) + r.trial["strategy"] for r in records))[:8]
    return [r for r in records if str(r.trial["policy"]) + r.trial["strategy"] in names]


SUITES: dict[str, Callable[[], list[Record]]] = {
    "one rate": lambda: unequal("zero3", "zero3-flat", "hpz", "zeropp"),
    "several rates": lambda: unequal("zero3", "zeropp", rates=("12.5 Mbit/s", "50 Mbit/s")),
    "peers": lambda: unequal("zero3", "zeropp", "ddp"),
    "one strategy": lambda: unequal("zeropp"),
    "quickstart": lambda: records_of("quickstart"),
    "frontier": _of_a_front,
}


def estimate(value: Any) -> float:
    return float(value.estimate if isinstance(value, Interval) else value)


def same(values: list[float]) -> bool:
    known = [value for value in values if not math.isnan(value)]
    return all(value == pytest.approx(known[0], rel=1e-9) for value in known)


@pytest.mark.parametrize("suite", SUITES)
def test_tables_give_a_quantity_of_a_configuration_by_one_number(suite: str) -> None:
    """Columns of one name in all tables, and the loss of Summary and Losses, which have two names."""
    derived = derive(frames_of(SUITES[suite]()))
    numbers: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for table in all_tables.all_tables(derived):
        if not {"where", "configuration"} <= {*table.data}:
            continue
        for row in table.data.to_dict("records"):
            for column in table.columns:
                value = row[column.key]
                key = "validation_loss" if (table.name, column.key) == ("losses", "loss") else column.key
                if isinstance(value, Interval | float) and (table.name, key) not in _OF_OTHER_ROWS:
                    numbers[str(row["where"]), str(row["configuration"]), key].append(estimate(value))
    assert {key: values for key, values in numbers.items() if not same(values)} == {}
    shared = {key for (_, _, key), values in numbers.items() if len(values) > 1}
    assert {"step_seconds", "share"} <= shared
    assert ("validation_loss" in shared) == bool(loss_verdicts.losses(derived))


_OF_OTHER_ROWS = {("sent_error", "weights")}
"""Columns of a name that another table has for another quantity."""


def markers(derived: Derived, name: str) -> dict[tuple[str, str, str], float]:
    """By column, setting and configuration, where a figure's estimates stand."""
    figure = next(figure for figure in FIGURES if figure.name == name)
    data, mark = figure.table(derived), figure.mark
    if data.empty:
        return {}
    places = {}
    for (setting, configuration), rows in data.groupby(["setting", "configuration"]):
        if isinstance(mark, Rows | Lines | Front):
            for measure in mark.measures:
                places[measure.column, setting, configuration] = measured(measure, rows)
        elif isinstance(mark, Stacked):
            parts = rows[rows["kind"] == "bar"].groupby("part")[mark.value].agg(mark.middle)
            places[mark.value, setting, configuration] = float(parts.sum())
    return places


def measured(measure: Measure, rows: pd.DataFrame) -> float:
    return measure.interval(rows).estimate


@pytest.mark.parametrize("suite", SUITES)
def test_figures_and_verdicts_give_the_numbers_of_the_tables(suite: str) -> None:
    """Losses, speed-ups, throughput, shares, bytes, and the parts of a step in figures; and in the head."""
    derived = derive(frames_of(SUITES[suite]()))
    summary = all_tables.summary(derived).data
    losses = {(row["setting"], row["configuration"]): row for row in loss_verdicts.losses(derived)}
    setting_of = dict(zip(derived.trials["where"], derived.trials["setting"], strict=True))
    of_table = {
        (key, setting_of[row["where"]], row["configuration"]): estimate(row[key])
        for row in summary.to_dict("records")
        for key in ("speedup", "share", "tokens_per_second", "step_seconds", "validation_loss")
    }
    of_table |= {("excess", *key): row["difference"].estimate for key, row in losses.items()}
    volume = {
        (row["configuration"]): row["ledger"] for row in all_tables.volume(derived).data.to_dict("records")
    }
    compared = 0
    for name in ("speedup", "share", "speedup_over_rates", "throughput", "final_loss", "frontier", "pareto",
                 "step_split", "volume", "beside_published"):  # fmt: skip
        for (drawn, setting, configuration), value in markers(derived, name).items():
            column = {"seconds": "step_seconds"}.get(drawn, drawn)
            expected = of_table.get((column, setting, configuration), math.nan)
            if name == "volume":
                expected = volume[configuration]
            if math.isnan(expected):
                continue
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12), (name, column, configuration)
            compared += 1
    assert compared >= (3 if suite == "one strategy" else 10)
    for key, effect in effects.speeds(derived).items():
        assert effect.change.estimate == pytest.approx(of_table["speedup", *key])
    for (setting, configuration), trials in derived.trials.groupby(["setting", "configuration"]):
        step = step_interval(trials).estimate
        assert of_table["step_seconds", setting, configuration] == pytest.approx(step)


def test_losses_of_unequal_repeats_are_means_over_seeds() -> None:
    """A seed that was trained three times counts once, in the Summary and in Losses, and captions say so."""
    records = [
        ending_at(Trial(seed=seed, repeat=repeat, steps=120, warmup=0, validate_every=30), end)
        for seed, repeat, end in ((0, 0, 2.0), (1, 0, 3.0), (1, 1, 3.0), (1, 2, 3.0))
    ]  # fmt: skip
    derived = derive(frames_of(records))
    for table in (all_tables.summary(derived), all_tables.losses(derived)):
        (settings,) = table.rows()
        titles = [column.title for column in table.columns]
        assert settings[titles.index("Validation loss, mean")] == "2.500"
        assert "mean over seeds" in table.description
