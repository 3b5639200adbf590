"""Claims of a suite's records: speed, bytes and validation loss of each configuration."""

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

_STEPS: Final = ("where", "beside", "configuration", "speed-up", "expected again", "pairs", "share of bytes")
_LOSSES: Final = ("beside", "configuration", "validation loss", "difference, nats", "expected again", "seeds")


def steps(derived: Derived) -> list[tuple[str, ...]]:
    """Rows of :data:`_STEPS` for speed-ups whose interval excludes 1; none if seconds are disturbed."""
    if derived.mostly_disturbed:
        return []
    pairs = derived.pairs
    compared = pairs[pairs["configuration"] != pairs["baseline_configuration"]]
    rows: list[tuple[str, ...]] = []
    for (where, configuration, baseline), group in groups(
        compared, ["where", "configuration", "baseline_configuration"]
    ):
        gain, shares = speedup(group), group["bytes_ratio"].dropna().unique()
        sent = f"{shares[0]:.4f}" if len(shares) == 1 and math.isfinite(shares[0]) else NOTHING
        if gain.known and not gain.contains(1):
            rows.append(
                (where, baseline, configuration, *_again(gain, ".2f", ratio=True), str(len(group)), sent)
            )
    return rows


def losses(derived: Derived) -> list[tuple[str, ...]]:
    """Rows of :data:`_LOSSES` for every configuration with a verdict."""
    return [
        (
            row["base"],
            row["configuration"],
            row["verdict"],
            *_again(row["difference"], "+.4f", ratio=False),
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
    if shown := [_table(title, head, rows) for title, head, rows in tables if rows]:
        return "\n".join(shown)
    if derived.pairs.empty:
        return "No steps of training are compared.\n"
    return f"Nothing is claimed: {'disturbed seconds' if derived.mostly_disturbed else 'too few pairs'}.\n"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells that all rows share stand in a line above it, a place only in its first row."""
    table = pd.DataFrame(rows, columns=list(head))
    if "where" in table and len(set(table["where"])) > 1:
        shared, places = common_and_rest(table["where"])
        title, table["where"] = ", ".join((title, *shared)), table["where"].map(places)
    common = [name for name in table if len(set(table[name])) == 1 and name != "configuration"]
    cells = [(name, table[name].iloc[0]) for name in common]
    above = "; ".join((title, *(f"{name}: {markdown(cell)}" for name, cell in cells if cell != NOTHING)))
    table = table.drop(columns=common).map(markdown)
    if "where" in table:
        table["where"] = table["where"].mask(table["where"].eq(table["where"].shift()), "")
    lines: list[list[str]] = [list(map(str, table)), ["---"] * table.shape[1], *table.to_numpy().tolist()]
    return f"{above}.\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _again(interval: Interval, form: str, *, ratio: bool) -> tuple[str, str]:
    """An estimate, and the range in which a further sweep is expected to find it."""
    again = of_another_sweep(interval, ratio=ratio)
    return f"{interval.estimate:{form}}", f"{again.low:{form}} to {again.high:{form}}"
