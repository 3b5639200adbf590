"""Cells, tables and facts of the pages of suites, and numbers that suites are planned with."""

from __future__ import annotations

import tomllib
from functools import cache
from typing import Any

import pandas as pd

from docs.numbers.estimate import DocumentError
from docs.numbers.records import ROOT, derived, suites
from harness import plan_rows
from harness.errors import Refusal
from harness.measure import machine_file
from harness.records.trial_record import OTHERS_WITHIN
from harness.runs import feasibility
from harness.suites import suite_file
from report import page
from report.data.text import counted, listed
from report.figures.all_figures import FIGURES
from report.tables import all_tables
from report.tables.table import markdown


def cell(suite: str, table: str, row: str, column: str) -> str:
    """Return a cell of a report table as printed.

    ``table`` is the table's name, ``row`` holds parts of the row's cells, and ``column`` is the column's title.
    """
    try:
        shown = all_tables.MAKERS[table](derived(suite))
        printed = shown.column(column)
        return markdown(printed.cell(shown.data.iloc[shown.row(row)][printed.key]))
    except KeyError as wrong:
        names = ", ".join(all_tables.MAKERS)
        raise DocumentError(f"no table {table!r}: expected one of {names}") from wrong
    except Refusal as refusal:
        raise DocumentError(f"{suite}: {refusal}") from refusal


def table(suite: str, name: str) -> str:
    """Return a table of a suite's page as Markdown, without its caption."""
    shown = all_tables.all_tables(derived(suite), (name,))
    if not shown:
        raise DocumentError(
            f"{suite}: table {name!r} has no rows, so the suite's page lacks it: name another table"
        )
    return shown[0].markdown_rows()


def title_of_figure(name: str) -> str:
    """Return the title of the figure with this name."""
    titles = {figure.name: figure.title for figure in FIGURES}
    if name not in titles:
        raise DocumentError(f"no figure {name!r}: expected one of {', '.join(titles)}")
    return titles[name]


def question(suite: str) -> str:
    """Return the question that a suite asks."""
    return markdown(" ".join(derived(suite).frames.questions))


def fact(suite: str, name: str) -> str:
    """Return a fact of the page's head: ``trials``, ``ran``, ``processor``, ``commit``, ``link``, ..."""
    facts = dict(page.facts(derived(suite)))
    if name not in facts:
        raise DocumentError(f"{suite}: no fact {name!r}: expected one of {', '.join(facts)}")
    return markdown(facts[name])


def facts(suite: str) -> str:
    """Return a line on a suite's records: trials, sweeps, machine, date, commit, and how many were disturbed."""
    known = dict(page.facts(derived(suite)))
    sweeps, machines, occasions = (count(suite, what) for what in ("sweeps", "machines", "occasions"))
    trials = known["trials"]
    if sweeps > 1:
        trials += f", in {sweeps} sweeps at {counted(occasions, 'occasion')}"
        trials += f" on {machines} machines" if machines > 1 else ""
    changed = f" ({known['checkout']})" if "checkout" in known else ""
    parts = [
        f"Trials: {trials}",
        f"processor: {known['processor']}",
        f"ran: {known['ran']}",
        f"commit: {known['commit']}{changed}",
    ]
    if len(derived(suite).disturbed):
        share = f"{OTHERS_WITHIN:.0%}"
        parts.append(f"in {disturbed(suite)} trials others took more than {share} of the processors' time")
    return markdown("; ".join(parts) + ".")


def as_predicted(suite: str) -> str:
    """Return the number of trials in which the ledger's bytes equal the prediction: ``210 of 210``."""
    equal = derived(suite).trials["predicted_equal"].dropna().astype(bool)
    return f"{int(equal.sum())} of {len(equal)}"


def count(suite: str, what: str = "trials") -> int:
    """Return how many ``what`` the finished trials of a suite have.

    ``what`` is ``trials``, ``configurations``, ``sweeps``, ``occasions``, ``machines`` (pools) or ``seeds``.
    """
    ran = derived(suite).finished
    counts = {
        "trials": len(ran),
        "sweeps": int(ran["sweep"].nunique()),
        "occasions": int(ran["occasion"].nunique()),
        "machines": len(derived(suite).frames.pools),
        "seeds": int(ran["seed"].nunique()),
        "configurations": int(derived(suite).trials["configuration"].nunique()),
    }
    if what not in counts:
        raise DocumentError(f"count of {what!r}: expected one of {', '.join(counts)}")
    return counts[what]


def several_occasions() -> str:
    """Return the suites whose trials ran at more than one occasion (start of a machine): ``peers and quickstart``."""
    return listed([suite for suite in suites() if count(suite, "occasions") > 1])


def model_sizes() -> str:
    """Return the smallest and the largest model of all records, in million parameters: ``0.14 to 14.3``."""
    sizes = pd.concat([derived(suite).finished["parameters"] for suite in suites()]) / 1e6
    return f"{sizes.min():.2f} to {sizes.max():.1f}"


def disturbed(suite: str) -> str:
    """Return in how many trials other programs took so much processor time that seconds are marked: ``17 of 28``."""
    ran = derived(suite)
    return f"{len(ran.disturbed)} of {len(ran.finished)}"


def seconds_on_record(suite: str) -> str:
    """Return how long a suite says that it takes, from its key ``time``."""
    with (ROOT / "suites" / f"{suite}.toml").open("rb") as file:
        return str(tomllib.load(file)["time"])


@cache
def _plan(suite: str, machine: str) -> list[dict[str, Any]]:
    calibrated = machine_file.read(ROOT / "suites/machines" / f"{machine}.toml") if machine else None
    trials = suite_file.load(ROOT / "suites" / f"{suite}.toml").trials
    return plan_rows.rows(feasibility.forecast(trials, feasibility.any_host()), calibrated)


def planned(suite: str, column: str, machine: str = "", **row: object) -> float:
    """Return a number that ``zeropp plan`` predicts for the one trial whose columns have the values of ``row``."""
    rows = [each for each in _plan(suite, machine) if all(each.get(key) == row[key] for key in row)]
    if len(rows) != 1 or not isinstance(rows[0].get(column), int | float):
        raise DocumentError(
            f"{suite}: {len(rows)} planned trials with {row}, column {column!r}: expected one trial, with a number in "
            "this column"
        )
    return float(rows[0][column])
