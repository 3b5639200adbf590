"""The table of losses: who trains as well as ZeRO-3, by which test, and how soon."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.records.confidence_intervals import CONFIDENCE, ENOUGH_POWER, FEWEST, Interval
from harness.suites.question import LEAST_STEPS
from report.data import learning
from report.data.metrics import Derived
from report.data.text import NOTHING, listed, number
from report.draw.figure_definition import peers_note
from report.tables.table import Column, Table, placed


def losses(derived: Derived) -> Table:
    """Table of the last validation losses, their difference from ZeRO-3's, and time to its loss."""
    found = learning.losses(derived)
    if found.empty:
        return Table("losses", "Losses", "", pd.DataFrame(), ())
    rows = [_told(row) for row in found.to_dict("records")]
    base = listed([name for name in dict.fromkeys(found["base"]) if name]) or "the baseline"
    columns = (
        Column("contender", "Contender"),
        Column("seeds", "Seeds", str),
        Column("loss", "Validation loss", number(4)),
        Column("difference_told", f"less {base}'s", str),
        Column("verdict", "Verdict", str),
        Column("power", "Power", number(2)),
        Column("seconds", "To the target, s", number(3)),
        Column("gain_told", f"{base}'s over it", str),
    )
    margins = [float(row["margin"]) for row in rows if row["margin"] == row["margin"]]
    margin = f" (here {number(2)(min(margins))} nats)" if margins else ""
    caption = (
        "Last validation loss, mean over seeds: repeats of a seed train the same again, and count once. "
        f"Difference: of the same seed, mean with its {CONFIDENCE:.0%} interval, Student's t, from {FEWEST} "
        f"seeds on. Verdict: against a margin of {learning.MARGIN:.0%} of {base}'s loss{margin}; "
        "not inferior: the interval's upper end lies below it; inferior: its lower end lies above it; "
        "cannot tell: the margin lies inside. Power: probability that an equal contender would be found not "
        f"inferior with this spread; below {ENOUGH_POWER:g} the verdict is 'no power', and nothing is "
        "claimed, unless the contender is inferior. Each of the first two verdicts is wrong in at most 2.5 % "
        "of cases. Target: "
        f"{base}'s mean loss and the margin, by the line between validations; its ratio is "
        "paired by seed, and there is none unless all seeds of both reach it. Losses after fewer than "
        f"{LEAST_STEPS} steps have no verdict: they hardly depend on what is compared. {peers_note(found)}"
    )
    return placed("losses", "Losses", caption.rstrip(), rows, *columns)


def _told(row: dict[Any, Any]) -> dict[str, Any]:
    difference, gain = row.pop("difference"), row.pop("gain")
    few = row["target"] == row["target"] and row["reached"] < row["seeds"]
    reached = f"{row['reached']} of {row['seeds']} reach it" if few else ""
    return {str(key): value for key, value in row.items()} | {
        "difference": difference.estimate,
        "difference_low": difference.low,
        "difference_high": difference.high,
        "difference_told": _interval(difference, "+.4f"),
        "verdict": row["verdict"] or NOTHING,
        "gain": gain.estimate,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "gain_told": reached or _interval(gain, ".2f"),
    }


def _interval(found: Interval, form: str) -> str:
    if not found.n:
        return NOTHING
    ends = f" ({found.low:{form}} to {found.high:{form}})" if found.known else ""
    return f"{found.estimate:{form}}{ends}"
