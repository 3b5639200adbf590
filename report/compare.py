"""Compares two result folders of one suite, before and after a change: step times, bytes and losses by pairs.

A pair is one trial in both folders.  The folders ran at different times: whatever else differed between them
is in the ratios, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.measure.machine import MUST_AGREE
from harness.records.confidence_intervals import Interval, mean_interval, paired_ratio_interval
from harness.records.record import Record, read_all
from report.data.frames import ReportError, frames_of, groups
from report.data.metrics import trials
from report.tables.table import Column, Table

Verdict = Literal["better", "worse", "same", "cannot tell"]
_HERE: Final = Path(__file__).parent
_OUTCOMES: Final[tuple[Verdict, ...]] = ("worse", "cannot tell", "same", "better")


@dataclass(frozen=True, slots=True)
class Compared:
    """One contender in one cell, in both folders.

    Attributes:
        step: seconds of a step in the second folder over those in the first, of its pairs.
        verdict: on ``step``, within the margin.
        sent: bytes between nodes likewise; NaN where they are not on record.
        loss: the last validation loss in the second folder less that in the first, in nats; None without any.
    """

    where: str
    contender: str
    step: Interval
    verdict: Verdict
    sent: float
    loss: Interval | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two folders side by side.

    Attributes:
        names: of the folders.
        margin: within which two step times are the same; 0.02 is 2 %.
        rows: by cell and contender.
        alone: ids of trials that finished in one folder only, by folder.
        differs: what else than code differs between their machines, with both values.
    """

    names: tuple[str, str]
    margin: float
    rows: tuple[Compared, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    differs: tuple[tuple[str, str, str], ...]

    @property
    def worse(self) -> int:
        """How many rows got worse."""
        return sum(row.verdict == "worse" for row in self.rows)

    @property
    def summary(self) -> str:
        """One sentence that counts the verdicts."""
        counts = {name: sum(row.verdict == name for row in self.rows) for name in _OUTCOMES}
        told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        return f"Of {len(self.rows)} comparisons: {told} (same: within {self.margin:.3g} of 1)."


def judge(ratio: Interval, margin: float) -> Verdict:
    """What an interval of a ratio of step times says: less is better.

    ``same``: all of it within ``1 / (1 + margin)`` to ``1 + margin``; ``better`` or ``worse``: all of it on
    one side of 1; else, and without an interval, ``cannot tell``.
    """
    if not ratio.known:
        return "cannot tell"
    if 1 / (1 + margin) < ratio.low and ratio.high < 1 + margin:
        return "same"
    if ratio.high < 1:
        return "better"
    return "worse" if ratio.low > 1 else "cannot tell"


def compare(first: Path, second: Path, margin: float) -> Comparison:
    """Compare the trials that two folders have in common.

    Raises:
        ReportError: without records, or without a trial that finished in both.
        RecordError: for a file that is no record.
    """
    records = [_records(folder) for folder in (first, second)]
    tables = [trials(frames_of(found, across_pools=True)) for found in records]
    a, b = tables
    shared = set(a["id"]) & set(b["id"])
    if not shared:
        raise ReportError(f"{first} and {second}: no trial finished in both; expected two runs of one suite")
    columns = ["id", "step_seconds", "sent_bytes", "validation_loss"]
    both = a[a["id"].isin(shared)].merge(b[columns], on="id", suffixes=("", "_after"))
    keys = ["where", "contender"]
    return Comparison(
        names=(str(first), str(second)),
        margin=margin,
        rows=tuple(_row(key, group, margin) for key, group in groups(both, keys)),
        alone=tuple(tuple(sorted(set(one["id"]) - shared)) for one in tables),  # type: ignore[arg-type]
        differs=_differs(*([record.machine for record in found] for found in records)),
    )


def page(found: Comparison) -> str:
    """The comparison as a page of HTML."""
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined)
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    text: str = environment.get_template("compare.html").render(
        style=style, found=found, table=table(found), notes=notes(found)
    )
    return text


def table(found: Comparison) -> Table:
    """The comparison as a table."""
    rows = [
        {
            "where": row.where, "contender": row.contender, "pairs": row.step.n, "step": row.step,
            "verdict": row.verdict, "bytes": row.sent, "loss": row.loss or math.nan,
        }
        for row in found.rows
    ]  # fmt: skip
    three = "{:.3f}".format
    columns = (
        Column("where", "where"),
        Column("contender", "contender"),
        Column("pairs", "pairs", str),
        Column("step", "step, after/before", three),
        Column("verdict", "verdict"),
        Column("bytes", "bytes", three),
        Column("loss", "loss", "{:+.4f}".format),
    )
    return Table("compare", "Comparison", "", pd.DataFrame(rows), columns)


def notes(found: Comparison) -> list[str]:
    """Sentences around the table."""
    said = [found.summary]
    if any(row.verdict == "cannot tell" and not row.step.known for row in found.rows):
        said.append("Rows of too few pairs cannot be told: more repeats, or --sweeps 3, in both folders.")
    said.append("The two folders ran at different times: what else differed between them is in the ratios.")
    said += [
        f"Machines differ: {name} is {one} in the first and {other} in the second."
        for name, one, other in found.differs
    ]
    for name, ids in zip(found.names, found.alone, strict=True):
        if ids:
            said.append(
                f"Only in {name}: {', '.join(ids[:5])}{', ...' if len(ids) > 5 else ''} ({len(ids)})."
            )
    return said


def _records(folder: Path) -> list[Record]:
    if not folder.is_dir():
        raise ReportError(f"{folder}: no such folder")
    if not (found := read_all(folder)):
        raise ReportError(f"{folder}: no records; `zeropp run SUITE` writes them")
    return found


def _row(key: Sequence[Any], group: pd.DataFrame, margin: float) -> Compared:
    pairs = group.set_index(["seed", "repeat"])
    before, after, sweeps = (
        pairs[name].to_dict() for name in ("step_seconds", "step_seconds_after", "sweep")
    )
    step = paired_ratio_interval(after, before, sweeps)
    losses = group["validation_loss_after"] - group["validation_loss"]
    known = losses.notna()
    loss = mean_interval(list(losses[known]), list(group["sweep"][known])) if known.any() else None
    sent = float((group["sent_bytes_after"] / group["sent_bytes"]).median())
    return Compared(str(key[0]), str(key[1]), step, judge(step, margin), sent, loss)


def _differs(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, str, str], ...]:
    """Facts of machines that must agree, where they do not, with both values."""

    def told(facts: Sequence[Mapping[str, Any]], name: str) -> str:
        values = [one.get("packages", {}).get(name) if name == "torch" else one.get(name) for one in facts]
        return " and ".join(sorted({str(value) for value in values}))

    named = ((name, told(first, name), told(second, name)) for name in (*MUST_AGREE, "torch"))
    return tuple(row for row in named if row[1] != row[2])
