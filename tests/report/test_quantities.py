"""Quantities: each has a formula, and the columns that they name are there."""

from __future__ import annotations

from report.data.frames import frames_of
from report.data.metrics import derive
from report.quantities import QUANTITIES, formula
from tests.report.records import records_of


def test_a_column_that_a_quantity_names_is_one_of_the_trials() -> None:
    """And no column is two quantities'."""
    named = [row["column"] for row in QUANTITIES.values() if row["column"]]
    assert len(named) == len(set(named)) > 20
    assert set(named) <= set(derive(frames_of(records_of("quickstart", repeats=1))).trials.columns)


def test_a_caption_has_no_markup() -> None:
    """Each quantity is a sentence without what Markdown marks code and bars by."""
    for name, row in QUANTITIES.items():
        assert row["formula"]
        assert not {"`", "\\"} & set(told := formula(name))
        assert told.endswith(".")
