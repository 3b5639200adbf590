"""Scores of predicted steps: errors by setting and trial, order and regret, for made-up predictions."""

from __future__ import annotations

import pytest

from harness.records.trial_record import Foreseen, Record
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.figures.predictions import measured_over, score, score_in_words
from report.figures.speed import PREDICTED
from tests.report.records import changed, records_of


def _derived(factor: dict[str, float]) -> Derived:
    """Records whose predicted steps are ``factor`` by strategy times the real ones."""
    records = [record for record in records_of("quickstart", repeats=2) if record.trial["strategy"] in factor]
    seconds = derive(frames_of(records)).trials.set_index("id")["step_seconds"]

    def foreseen(record: Record) -> Foreseen:
        parts = {"compute": seconds[record.id], "wire": seconds[record.id], "spread": 0.0}
        total = seconds[record.id] * factor[record.trial["strategy"]]
        return Foreseen(machine="m", calibrated=True, seconds=total, **parts)

    return derive(frames_of([changed(record, foreseen=foreseen(record)) for record in records]))


def test_errors_are_those_that_were_made_up() -> None:
    """Predictions 10 % short, and twice too long without overlap; the order is right throughout."""
    rows = measured_over(_derived({"zero3": 0.9, "zeropp": 0.9, "qwz": 0.9}))
    scores = score(rows)
    assert (scores["median"], scores["ninth"]) == pytest.approx((0.1, 0.1))
    assert scores["trial_median"] == pytest.approx(0.1)
    assert scores["naive_median"] == pytest.approx(1.0)
    assert (scores["settings"], scores["ordered"], scores["regret"]) == (3, 1.0, 0.0)
    assert rows["over_constant"].median() == pytest.approx(1.0)
    assert "90th percentile" in score_in_words(rows)


def test_a_wrong_order_is_counted_and_has_its_price() -> None:
    """If the slowest is predicted to be the fastest, the regret is its excess."""
    derived = _derived({"zero3": 0.01, "zeropp": 1.0})
    rows = measured_over(derived)
    seconds = rows.groupby("strategy")["step_seconds"].median()
    scores = score(rows)
    assert scores["ordered"] == 0.0
    assert scores["regret"] == pytest.approx(seconds["zero3"] / seconds["zeropp"] - 1)
    assert PREDICTED.caption(rows)
