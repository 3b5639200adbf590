"""No text of a record or suite is a formula in a spreadsheet."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pandas as pd
import pytest

from harness.csv_cells import safe_cell, safe_cells
from harness.plan_rows import as_csv, record_rows
from harness.records.trial_record import Failure
from harness.suites.trial import Trial
from report.data.frames import frames_of
from report.data.metrics import derive
from report.tables.all_tables import all_tables
from tests.report.records import record_of

FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1+1", "\r=1+1", "=cmd|' /C calc'!A0", "-x"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_that_begins_like_a_formula_is_quoted(text: str) -> None:
    """With an apostrophe, behind which the text is readable."""
    assert str(safe_cell(text)).startswith(f"'{text[0] if text[0] != chr(13) else chr(92)}")


@pytest.mark.parametrize(
    "value", [-1, -1.5, None, True, "-1", "+1.5", "-inf", "-1e-3", "-", "", "a=1", "int8:128"]
)
def test_numbers_and_usual_texts_stay_as_they_are(value: object) -> None:
    """A negative number is no formula, whether it is a number or a text; a dash is an unknown value."""
    assert safe_cell(value) is value or safe_cell(value) == value


def test_control_characters_are_escaped() -> None:
    """A CSV that is printed moves no cursor; an end of line inside of a cell stays."""
    assert safe_cell("a\x1b[2Jb\nc") == "a\\x1b[2Jb\nc"


def test_columns_of_numbers_are_not_touched() -> None:
    """A table keeps its types, its missing values and the order of its columns."""
    table = pd.DataFrame({"a": [-1, 2], "b": ["=x", None], "c": [-0.5, float("nan")], "d": [True, False]})
    safe = safe_cells(table)
    assert list(safe.columns) == list(table.columns)
    pd.testing.assert_frame_equal(safe[["a", "c", "d"]], table[["a", "c", "d"]])
    assert safe.to_csv(index=False) == "a,b,c,d\n-1,'=x,-0.5,True\n2,,,False\n"


def test_every_csv_that_is_written_is_safe(tmp_path: Path) -> None:
    """The rows of show and plan, and the tables of a page, of records with formulas in their texts."""
    failure = Failure(kind="crashed", message="=cmd|' /C calc'!A0", log=None)
    records = [record_of(Trial(steps=2, warmup=0, seed=seed)) for seed in range(2)]
    records.append(record_of(Trial(steps=2, warmup=0, seed=2), failure=failure))
    texts = [as_csv(record_rows(records))]
    texts += [table.csv() for table in all_tables(derive(frames_of(records)))]
    assert any("'=cmd|" in text for text in texts[1:])
    assert "'=cmd|" in texts[0]
    for text in texts:
        for row in csv.reader(io.StringIO(text)):
            assert all(safe_cell(cell) == cell for cell in row), row
