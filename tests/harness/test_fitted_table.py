"""Tables fit the terminal: nothing is cut, and what is not there is named."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from harness import fitted_table, terminal
from harness.fitted_table import Column, sizes, text
from harness.runs.feasibility import any_host, forecast
from harness.suites.suite_file import load
from tests.support.params import nightly

SUITES = Path(__file__).parents[2] / "suites"


def shown(columns: list[Column], width: int) -> str:
    file = io.StringIO()
    fitted_table.show(columns, Console(file=file, width=width), whole="--csv has all")
    return file.getvalue()


@pytest.mark.parametrize("name", ["quickstart", "bits", "peers", *nightly("paper_scale")])
def test_plans_fit_the_terminal(name: str) -> None:
    """No line of a shipped suite's plan is longer than the terminal, no word of its headings is cut, and the
    columns that are not there are named.
    """
    suite = load(SUITES / f"{name}.toml")
    found = forecast(suite.trials, any_host())
    for width in (80, 100, 120, 170, 190):
        file = io.StringIO()
        terminal.forecasts(suite, found, Console(file=file, width=width))
        said = file.getvalue()
        assert max(map(len, said.splitlines())) <= width
        heading = said.partition("\u2500")[0].split()
        assert "strategy" in heading
        assert not {"strateg", "policy.seco", "policy.gradient", "seconda"} & set(heading)
        assert "memory/rank" in said.partition("between, inside nodes:")[0]
    assert "left out" not in said


def test_what_does_not_vary_is_a_line() -> None:
    """With its unit; a table of one row keeps all its columns."""
    columns = [text("strategy", ["a", "b"]), sizes("sent", [2e6, 2e6], per="/step", marks=[" ¶", " ¶"])]
    assert "The same in all rows: sent 2 MB/step ¶.\n" in shown(columns, 80)
    one = shown([text("strategy", ["a"]), sizes("sent", [2e6])], 80)
    assert "The same" not in one
    assert "sent, MB" in one


def test_the_least_important_columns_are_left_out_first() -> None:
    """What tells rows apart stays, folded at last."""
    columns = [
        text("model.name", ["gpt-small", "bert-tiny"]),
        text("strategy", ["zero3", "zeropp"]),
        Column("step", ["0", "1"], "s"),
        text("sequence", ["128", "64"], rank=3),
        Column("memory", ["0", "1"], "MB", rank=5),
    ]
    assert "left out" not in shown(columns, 80)
    assert "1 column left out: memory;" in " ".join(shown(columns, 42).split())
    assert "2 columns left out: sequence, memory; --csv has all." in " ".join(shown(columns, 28).split())
    assert "2 columns left out: sequence, memory;" in " ".join(shown(columns, 14).split())


def test_bytes_of_a_column_have_one_unit() -> None:
    """That of the largest, in its heading; what is not known is a dash."""
    column = sizes("sent", [1_500_000, 2_000, None], per="/step")
    assert column.heading == "sent, MB/step"
    assert list(column.cells) == ["1.5", "0.002", "-"]
    assert sizes("sent", [None]).heading == "sent, B"
