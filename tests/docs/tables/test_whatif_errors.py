"""The page of errors holds what its table says, and its suite has the trials that the table predicts."""

from __future__ import annotations

import pandas as pd
import pytest

from docs.tables import whatif_errors
from docs.tables.whatif_errors import PAGE, SUITE, TABLE, order, page, questions, rising
from harness.suites.suite_file import load


def test_the_page_is_that_of_the_table() -> None:
    """docs/whatif_errors.md holds what ``python -m docs.tables.whatif_errors`` would write."""
    assert PAGE.read_text(encoding="utf-8") == page(pd.read_csv(TABLE))


def test_every_trial_of_the_suite_is_predicted() -> None:
    """The table has a row for each trial and trace, and the first two trials are those that are traced."""
    suite, table = load(SUITE), pd.read_csv(TABLE)
    asked = questions(suite)
    assert [question.row["trial"] for question in asked] == list(table["trial"])
    assert {trial.id for trial in suite.trials} == set(table["trial"])
    assert [trial.strategy for trial in whatif_errors.sources(suite).values()] == ["fsdp2", "ddp"]


def test_orders_are_counted() -> None:
    """Pairs of one setting count unless their measured steps are nearly equal or those of one trial."""
    rows = pd.DataFrame({
        "trial": ["a", "b", "c", "c"], "topology": "2x1", "rate_mbit": 50.0,
        "measured": [1.0, 2.0, 2.05, 2.05], "predicted": [1.0, 3.0, 0.9, 1.1],
    })  # fmt: skip
    assert order(rows) == (2, 3)


def test_a_page_without_measurements_says_so() -> None:
    """Predictions that are not measured yet have no errors."""
    table = pd.read_csv(TABLE).drop(columns=["measured", "load"])
    assert "No setting is measured yet." in page(table)


def test_several_runs_show_their_spread() -> None:
    """With several runs the page says how far the steps of one trial are apart."""
    table = pd.read_csv(TABLE)
    twice = page(table.assign(**{"run 1": table["measured"], "run 2": 1.5 * table["measured"]}))
    assert "longer than its shortest by 50% in the median and by up to 50%" in twice


@pytest.mark.parametrize(("seconds", "count"), [([2.0, 1.0], 0), ([1.0, 2.0], 1)])
def test_steps_that_take_longer_at_a_higher_rate_are_counted(seconds: list[float], count: int) -> None:
    """A measured step that is longer although its link is faster shows how much the machine's load changed."""
    rows = pd.DataFrame({
        "strategy": "ddp", "types": "fp32", "topology": "2x1", "trial": ["a", "b"], "rate_mbit": [50.0, 100.0],
        "measured": seconds,
    })  # fmt: skip
    assert len(rising(rows)) == count
