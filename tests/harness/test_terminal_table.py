"""Tables fit the terminal: nothing is cut, and columns that are left out are named."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import terminal, terminal_table
from harness.runs.feasibility import any_host, forecast
from harness.suites.suite_file import load
from harness.terminal_table import BYTES, Column
from tests.support.params import nightly

SUITES = Path(__file__).parents[2] / "suites"


def shown(rows: list[dict[str, Any]], columns: list[Column], width: int) -> str:
    file = io.StringIO()
    terminal_table.show(rows, columns, Console(file=file, width=width), whole="--csv has all")
    return file.getvalue()


@pytest.mark.parametrize("name", ["quickstart", "bits", "peers", *nightly("paper_scale")])
def test_plans_fit_the_terminal(name: str) -> None:
    """No line is longer than the terminal, no word of a heading is cut, and columns left out are named."""
    suite = load(SUITES / f"{name}.toml")
    forecasts = forecast(suite.trials, any_host())
    for width in (80, 100, 120, 170, 190):
        file = io.StringIO()
        terminal.plan(suite, forecasts, Console(file=file, width=width))
        text = file.getvalue()
        assert max(map(len, text.splitlines())) <= width
        heading = text.partition("\u2500")[0].split()
        assert "strategy" in heading
        assert not {"strateg", "policy.seco", "policy.gradient", "seconda"} & set(heading)
        assert "memory/rank" in text.partition("between nodes, inside nodes:")[0]
    assert "left out" not in text


def test_what_does_not_vary_is_a_line() -> None:
    """Columns with one value become a line with their units; a table of one row keeps all columns with a value."""
    columns = [
        Column("strategy"),
        Column("sent", "", BYTES, "/step", mark=lambda row: row["mark"]),
        Column("lost"),
    ]
    row = {"strategy": "a", "sent": 2e6, "mark": " ¶", "lost": None}
    assert "The same in all rows: sent: 2 ¶ MB/step.\n" in shown([row, row | {"strategy": "b"}], columns, 80)
    single = shown([row], columns, 80)
    assert "The same" not in single
    assert "sent,\n" in re.sub(" +\n", "\n", single)
    assert "lost" not in single


def test_the_least_important_columns_are_left_out_first() -> None:
    """Columns in which rows differ stay, and are folded if nothing else helps."""
    rows = [
        {"model.name": "gpt-small", "strategy": "zero3", "step": 0, "sequence": 128, "memory": 0},
        {"model.name": "bert-tiny", "strategy": "zeropp", "step": 1, "sequence": 64, "memory": 1},
    ]
    columns = [
        Column("model.name"), Column("strategy"), Column("step", form="d", unit="s"),
        Column("sequence", rank=3), Column("memory", form="d", unit="MB", rank=5),
    ]  # fmt: skip
    assert "left out" not in shown(rows, columns, 80)
    assert "1 column left out: memory;" in " ".join(shown(rows, columns, 42).split())
    assert "2 columns left out: sequence, memory; --csv has all." in " ".join(
        shown(rows, columns, 28).split()
    )
    assert "2 columns left out: sequence, memory;" in " ".join(shown(rows, columns, 14).split())


def test_bytes_of_a_column_have_one_unit() -> None:
    """All cells have the unit that suits the largest value, which is in the heading; None is a dash."""
    rows = [{"sent": sent} for sent in (1_500_000, 2_000, None)]
    cells = shown(rows, [Column("sent", "", BYTES, "/step")], 80).split()
    assert cells[:2] == ["sent,", "MB/step"]
    assert cells[3:] == ["1.5", "0.002", "-"]
