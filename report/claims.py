"""What the records of a suite claim, one line each: the statement, its interval, the command, the table.

Each is of one cell (the same model, batch, link and seeds) and one contender, beside what it is compared
with.
"""

from __future__ import annotations

import math
from typing import Any, Final

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval
from harness.suites.labels import counted
from report.data import learning
from report.data.frames import groups
from report.data.metrics import Derived, speedup
from report.tables.table import markdown

HEAD: Final = ("claim", "by the records", "expected again", "table")
_EXACT: Final = "the same"


def claims(derived: Derived) -> list[tuple[str, str, str, str]]:
    """(claim, by the records, expected again, table) of every contender; speeds from 6 pairs on."""
    found: list[tuple[str, str, str, str]] = []
    pairs = derived.pairs
    compared = pairs[pairs["contender"] != pairs["baseline_contender"]]
    keys = ["where", "contender", "baseline_contender"]
    for (where, contender, baseline), mine in groups(compared, keys):
        found += _of_pairs(f"{contender} beside {baseline}, {where}", mine)
    return found + _of_losses(derived)


def table(derived: Derived, suite: str) -> str:
    """The claims of a suite as a table in Markdown, under the command that tries them again."""
    rows = claims(derived)
    head = f"`zeropp run suites/{suite}.toml`, then `zeropp report {suite}`.\n\n"
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    lines += [f"| {' | '.join(markdown(cell) for cell in row)} |" for row in rows]
    return head + "\n".join(lines) + "\n" if rows else f"{head}Nothing is compared in it.\n"


def _of_pairs(what: str, mine: pd.DataFrame) -> list[tuple[str, str, str, str]]:
    found = []
    fast = speedup(mine)
    if fast.known:
        count = counted(len(mine), "pair")
        found.append((f"{what}: speed-up", f"{fast.estimate:.2f}, {count}", _ends(fast, ".2f"), "Summary"))
    shares = mine["bytes_ratio"].dropna().unique()
    if len(shares) == 1 and math.isfinite(shares[0]):
        found.append(
            (f"{what}: share of its bytes between nodes", f"{shares[0]:.4f}", _EXACT, "Volume between nodes")
        )
    return found


def _of_losses(derived: Derived) -> list[tuple[str, str, str, str]]:
    rows: list[dict[str, Any]] = learning.losses(derived).to_dict("records")  # type: ignore[assignment]
    margin = f"{learning.MARGIN:.0%}"
    return [
        (
            f"{row['contender']}: validation loss is {row['verdict']} to {row['base']}'s by {margin}",
            f"{row['difference'].estimate:+.4f} nats, {counted(row['seeds'], 'seed')}",
            _ends(row["difference"], "+.4f"),
            "Losses",
        )
        for row in rows
        if row["verdict"] and row["difference"].known and row["seeds"] >= FEWEST
    ]


def _ends(found: Interval, form: str) -> str:
    return f"{found.low:{form}} to {found.high:{form}}"
