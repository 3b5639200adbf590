"""What the records of a suite claim: of each contender its speed and bytes, and its validation loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval, of_another_sweep
from report.data import loss_verdicts
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.speedups import speedup
from report.data.text import NOTHING
from report.draw.names_of_rows import common_and_rest
from report.tables.table import markdown

_STEPS: Final = ("where", "beside", "contender", "speed-up", "expected again", "pairs", "share of bytes")
_LOSSES: Final = ("beside", "contender", "validation loss", "difference, nats", "expected again", "seeds")


def steps(derived: Derived) -> list[tuple[str, ...]]:
    """Rows of :data:`_STEPS`: of speed-ups whose interval does not hold 1; none of disturbed seconds."""
    if derived.mostly_disturbed:
        return []
    pairs = derived.pairs
    compared = pairs[pairs["contender"] != pairs["baseline_contender"]]
    rows: list[tuple[str, ...]] = []
    for (where, contender, baseline), mine in groups(compared, ["where", "contender", "baseline_contender"]):
        fast, shares = speedup(mine), mine["bytes_ratio"].dropna().unique()
        sent = f"{shares[0]:.4f}" if len(shares) == 1 and math.isfinite(shares[0]) else NOTHING
        if fast.known and not fast.contains(1):
            rows.append((where, baseline, contender, *_told(fast, ".2f", ratio=True), str(len(mine)), sent))
    return rows


def losses(derived: Derived) -> list[tuple[str, ...]]:
    """Rows of :data:`_LOSSES`: of every contender with a verdict."""
    return [
        (
            row["base"],
            row["contender"],
            row["verdict"],
            *_told(row["difference"], "+.4f", ratio=False),
            str(row["seeds"]),
        )
        for row in loss_verdicts.losses(derived)
        if row["verdict"] and row["difference"].known and row["seeds"] >= FEWEST
    ]


def table(derived: Derived) -> str:
    """The claims of a suite as tables in Markdown."""
    tables = (
        ("Tables *Summary* and *Volume between nodes*", _STEPS, steps(derived)),
        (f"Table *Losses*, by {loss_verdicts.allowed(derived)}", _LOSSES, losses(derived)),
    )
    if shown := [_table(*one) for one in tables if one[-1]]:
        return "\n".join(shown)
    if derived.pairs.empty:
        return "No steps of training are compared.\n"
    return f"Nothing is claimed: {'disturbed seconds' if derived.mostly_disturbed else 'too few pairs'}.\n"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what all rows share stands in the line above it, a place in its first row alone."""
    found = pd.DataFrame(rows, columns=list(head))
    if "where" in found and len(set(found["where"])) > 1:
        shared, places = common_and_rest(found["where"])
        title, found["where"] = ", ".join((title, *shared)), found["where"].map(places)
    common = [name for name in found if len(set(found[name])) == 1 and name != "contender"]
    told = [(name, found[name].iloc[0]) for name in common]
    said = "; ".join((title, *(f"{name}: {markdown(cell)}" for name, cell in told if cell != NOTHING)))
    found = found.drop(columns=common).map(markdown)
    if "where" in found:
        found["where"] = found["where"].mask(found["where"].eq(found["where"].shift()), "")
    lines: list[list[str]] = [list(map(str, found)), ["---"] * found.shape[1], *found.to_numpy().tolist()]
    return f"{said}.\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _told(found: Interval, form: str, *, ratio: bool) -> tuple[str, str]:
    """An estimate, and the ends between which a further sweep is expected to find it."""
    again = of_another_sweep(found, ratio=ratio)
    return f"{found.estimate:{form}}", f"{again.low:{form}} to {again.high:{form}}"
