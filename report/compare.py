"""Compares two results folders of one suite, before and after a change, by pairs of trials with the same id.

The trials of the two folders ran at different times, so the ratios also contain everything else that changed in
between, for example the state of the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from harness.measure.machine import MUST_AGREE
from harness.records.confidence_intervals import Interval, mean_interval
from report.data.frames import ReportError, groups, load
from report.data.metrics import trials
from report.data.speedups import speedup
from report.data.text import left_out_in_words, occasions_in_words
from report.page import render_template
from report.tables.table import Column, Table

Verdict = Literal["better", "worse", "same", "inconclusive"]
_OUTCOMES: Final[tuple[Verdict, ...]] = ("worse", "inconclusive", "same", "better")
_COLUMNS: Final = (
    Column("where", "where"),
    Column("configuration", "configuration"),
    Column("pairs", "pairs", str),
    Column("step", "step, after/before", "{:.3f}".format),
    Column("verdict", "verdict"),
    Column("bytes", "bytes", "{:.3f}".format),
    Column("loss", "loss", "{:+.4f}".format),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two results folders: a table and notes."""

    names: tuple[str, str]  # paths of the first and the second folder
    # One row per setting and configuration, with these columns besides:
    # - ``step``, an :class:`Interval`: the seconds of a step in the second folder over those in the first.
    # - ``verdict``: the verdict on this ratio.
    # - ``bytes``: the bytes between nodes in the second folder over those in the first.
    # - ``loss``: the last validation loss in the second folder minus that in the first, in nats; NaN if no trial was
    #   validated in both.
    table: Table
    notes: tuple[str, ...]  # sentences below the table, beginning with the counts of verdicts

    @property
    def worse(self) -> int:
        """Number of rows with the verdict ``worse``."""
        return int(self.table.data["verdict"].eq("worse").sum())


def judge(ratio: Interval, margin: float) -> Verdict:
    """Return the verdict on a ratio of step times: the time after a change over the time before it.

    The verdict is ``same`` if the interval lies between ``1 / (1 + margin)`` and ``1 + margin``.  Otherwise it is
    ``better`` if the interval lies below 1, ``worse`` if it lies above 1, and ``inconclusive`` if it contains 1.
    A ratio without an interval is ``inconclusive``.
    """
    if not ratio.known:
        return "inconclusive"
    if 1 / (1 + margin) < ratio.low and ratio.high < 1 + margin:
        return "same"
    if ratio.high < 1:
        return "better"
    return "worse" if ratio.low > 1 else "inconclusive"


def compare(first: Path, second: Path, margin: float) -> Comparison:
    """Return the comparison of two results folders, by the trials that finished in both.

    Folder ``first`` is from before a change, and ``second`` from after it.

    ``margin`` is a share: with 0.02, step times that differ by less than 2 % count as the same (:func:`judge`).

    Raises a ReportError if a folder has no records, or if no trial finished in both folders.
    """
    loaded = [load(folder, across_pools=True) for folder in (first, second)]
    before, after = map(trials, loaded)
    columns = ["id", "step_seconds", "sent_bytes", "validation_loss", "disturbed", "occasion"]
    both = before.merge(after[columns], on="id", suffixes=("", "_after"))
    if both.empty:
        raise ReportError(
            f"{first} and {second}: no trial finished in both folders; name results folders of two runs of one suite"
        )
    # Pairs are of one occasion only if their trials are, in both folders.
    both["occasion"] = both.groupby(["occasion", "occasion_after"]).ngroup()
    settings = groups(both, ["where", "configuration"])
    rows = pd.DataFrame(
        [{"where": key[0], "configuration": key[1]} | _row(setting, margin) for key, setting in settings]
    )
    counts = rows["verdict"].value_counts()
    outcomes = ", ".join(f"{counts[name]} {name}" for name in _OUTCOMES if name in counts)
    notes = [
        f"Of {len(rows)} comparisons: {outcomes} (same: the whole interval is within {margin:.3g} of 1)."
    ]
    steps = [step for step in rows["step"] if isinstance(step, Interval)]
    if any(step.n > 0 and not step.known for step in steps):
        notes.append("Rows with too few pairs are inconclusive: run more repeats in both folders.")
    if any(step.n == 0 for step in steps):
        notes.append(
            "Rows with 0 pairs are inconclusive: their ranks were threads, whose steps are not timed."
        )
    occasions = max((step.occasions for step in steps if step.known), default=0)
    notes += filter(None, [occasions_in_words(occasions), left_out_in_words(steps)])
    notes.append(
        "The two folders ran at different times, so the ratios also contain whatever else changed in between."
    )
    for fact in (*MUST_AGREE, "packages.torch"):
        tables = [frames.facts[frames.facts["fact"] == f"machine.{fact}"] for frames in loaded]
        value, other = (" and ".join(sorted(set(table["value"]))) or "not recorded" for table in tables)
        if value != other:
            name = fact.rpartition(".")[2]
            notes.append(f"Machines differ: {name} is {value} in the first folder and {other} in the second.")
    for folder, trained in ((first, before), (second, after)):
        if ids := sorted(set(trained["id"]) - set(both["id"])):
            some = ", ".join(ids[:5]) + (", ..." if len(ids) > 5 else "")
            notes.append(f"Only in {folder}: {some} ({len(ids)}).")
    table = Table("compare", "Comparison", "", rows, _COLUMNS)
    return Comparison((str(first), str(second)), table, tuple(notes))


def page(comparison: Comparison) -> str:
    """Render the comparison as a page of HTML."""
    return render_template("compare.html", {"comparison": comparison})


def _row(group: pd.DataFrame, margin: float) -> dict[str, Any]:
    either = group["disturbed"].astype(bool) | group["disturbed_after"].astype(bool)
    step = speedup(group.assign(disturbed=either), "step_seconds_after", "step_seconds")
    losses = (group["validation_loss_after"] - group["validation_loss"]).dropna()
    return {
        "pairs": step.n,
        "step": step,
        "verdict": judge(step, margin),
        "bytes": (group["sent_bytes_after"] / group["sent_bytes"]).median(),
        "loss": mean_interval(list(losses)) if len(losses) else math.nan,
    }
