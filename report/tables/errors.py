"""Tables of errors: of what was sent, and of codecs that were tried on it."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from report.data import communication, footnotes
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import number
from report.draw.figure_definition import by_contender
from report.tables.table import Column, Table, placed


def sent_error(derived: Derived) -> Table:
    """Table of the error of what was sent, hop by hop and end to end, at the measured steps."""
    found = communication.errors(derived.frames, derived.trials)
    rows = [
        _sent_error_row(mine, derived)
        for _, of_step in groups(found, ["cell", "step"])
        for _, _, mine in by_contender(of_step)
    ]
    rows.sort(key=lambda row: row["order"])
    columns = (
        Column("contender", "Contender"),
        Column("step", "Step", str),
        Column("trials_told", "n", str),
        Column("cosine", "Cosine of ranks", number(3)),
        Column("hops_told", "Each hop"),
        Column("end_to_end", "End to end", number(3)),
        Column("repeated", f"of {_repeated(found)} reductions' sum", number(3)),
        Column("weights", "Weights", number(3)),
        Column("secondary", "from hpZ's copy", number(3)),
    )
    caption = (
        "vNMSE, sums over all units; medians over repeats and seeds. Each hop: the decoded frames that it "
        "sends, against the values that were encoded there (error feedback included). End to end: "
        "sum((reduced - mean)^2) / sum(mean^2), the mean being that of all ranks' gradients, sent as they "
        "are in fp32 and added up in fp64. Cosine: between ranks' gradients, mean over all pairs: the less "
        "they agree, the smaller their mean, and the larger the same error of a hop is beside it. With error "
        "feedback the error of one step includes what earlier ones left over; what it lowers, as random "
        "rounding does, is the error of the sum of steps: here of so many reductions of the same gradients, "
        "which for all others is that of one. Weights: gathered against "
        "fp32 masters. Measured just before the step of that number, in passes that are not timed."
        f"{footnotes.in_words(row['trials_told'] for row in rows)}"
    )
    if not rows:
        return Table("sent_error", "Error of what was sent", caption, pd.DataFrame(), columns)
    return placed("sent_error", "Error of what was sent", caption, rows, *columns)


def _repeated(found: pd.DataFrame) -> str:
    """How many reductions were added up."""
    return ", ".join(str(count) for count in sorted(set(found["repeated"]) - {1}))


def _sent_error_row(mine: pd.DataFrame, derived: Derived) -> dict[str, Any]:
    """One contender in one cell at one step."""
    ends = communication.end_to_end(mine)
    hops = communication.of_hops(mine)
    first = mine.iloc[0]
    ran = derived.trials[derived.trials["id"].isin(mine["id"])]
    return {
        "where": first["where"],
        "contender": first["contender"],
        "step": int(first["step"]),
        "trials": len(ran),
        "trials_told": footnotes.trials(ran),
        "cosine": communication.median(ends, "cosine"),
        "hops_told": communication.hops_told(hops),
        "smallest_of_a_hop": float(hops["vnmse"].min()),
        "largest_of_a_hop": float(hops["vnmse"].max()),
        "end_to_end": communication.median(ends),
        "repeated": communication.median(communication.end_to_end(mine, repeated=True)),
        "weights": communication.median(communication.end_to_end(mine, "weights")),
        "secondary": communication.median(communication.end_to_end(mine, "secondary")),
        "order": int(ran.index[0]),
    }


def quantisation(derived: Derived) -> Table:
    """Table of the median vNMSE of each codec that was tried, by block size."""
    caption = (
        "Median vNMSE = sum((decoded - x)^2) / sum(x^2) over units and trials, by elements per block; "
        "'shard' is one scale for a whole shard."
    )
    return _tried(derived, "quantisation", "Codecs tried", caption, "vnmse")


def largest_error(derived: Derived) -> Table:
    """Table of the largest error of each codec that was tried, by block size."""
    caption = "Largest |decoded - x| over the largest |x|, of any unit and trial, by elements per block."
    return _tried(derived, "largest_error", "Codecs tried: largest error", caption, "largest")


def _tried(derived: Derived, name: str, title: str, caption: str, value: str) -> Table:
    """Errors with one row per tensor, bits and kind of codec, and one column per block size."""
    found, where = communication.tried(derived.frames, derived.trials)
    caption += (
        f" Each codec encodes once what training left to {where}: weights, and reduced gradients. Nothing of "
        "it is sent; what was sent has a table of its own."
    )
    parts = [[*str(codec).split(":", 2), "", ""][:3] for codec in found["codec"]]
    kinds = [f"{head} {options}".strip() for head, _, options in parts]
    told = found.assign(kind=kinds, block=[block or "none" for _, block, _ in parts])
    wide = told.pivot_table(
        index=["purpose", "kind"],
        columns="block",
        values=value,
        aggfunc="median" if value == "vnmse" else "max",
    )
    blocks = sorted(wide.columns, key=lambda block: float(block) if block.isdecimal() else math.inf)
    columns = (
        Column("purpose", "Of"),
        Column("kind", "Codec"),
        *(Column(block, "no blocks" if block == "none" else block, number(3)) for block in blocks),
    )
    return Table(name, title, caption, wide[blocks].reset_index(), columns)
