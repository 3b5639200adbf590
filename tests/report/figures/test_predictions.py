"""How well steps were predicted: errors by cell and trial, order and regret, against numbers made up."""

from __future__ import annotations

import pytest

from harness.records.record import Foreseen, Record
from report.data.frames import frames_of
from report.data.metrics import Derived, derive
from report.figures.predictions import measured_over, score, score_in_words
from report.figures.speed import PREDICTED
from tests.report.records import changed, records_of


def _derived(factor: dict[str, float]) -> Derived:
    """Records whose steps were predicted to take ``factor`` by strategy of what they took."""
    records = [one for one in records_of("quickstart", repeats=2) if one.trial["strategy"] in factor]
    took = derive(frames_of(records)).trials.set_index("id")["step_seconds"]

    def foreseen(one: Record) -> Foreseen:
        parts = {"compute": took[one.id], "wire": took[one.id], "spread": 0.0}
        seconds = took[one.id] * factor[one.trial["strategy"]]
        return Foreseen(machine="m", calibrated=True, seconds=seconds, **parts)

    return derive(frames_of([changed(one, foreseen=foreseen(one)) for one in records]))


def test_errors_are_those_that_were_made_up() -> None:
    """Predictions 10 % short, and twice too long without overlap; the order is right throughout."""
    rows = measured_over(_derived({"zero3": 0.9, "zeropp": 0.9, "qwz": 0.9}))
    found = score(rows)
    assert (found["median"], found["ninth"]) == pytest.approx((0.1, 0.1))
    assert found["trial_median"] == pytest.approx(0.1)
    assert found["naive_median"] == pytest.approx(1.0)
    assert (found["cells"], found["ordered"], found["regret"]) == (3, 1.0, 0.0)
    assert rows["over_constant"].median() == pytest.approx(1.0)
    assert "90th percentile" in score_in_words(rows)


def test_a_wrong_order_is_counted_and_has_its_price() -> None:
    """Where the slowest is predicted to be the fastest, the regret is what it takes longer."""
    derived = _derived({"zero3": 0.01, "zeropp": 1.0})
    rows = measured_over(derived)
    took = rows.groupby("strategy")["step_seconds"].median()
    found = score(rows)
    assert found["ordered"] == 0.0
    assert found["regret"] == pytest.approx(took["zero3"] / took["zeropp"] - 1)
    assert PREDICTED.caption(rows)
