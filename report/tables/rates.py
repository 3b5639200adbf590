"""Tables of what depends on the rate of the link: parity at a quarter of it, and break-even."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from harness.records.confidence_intervals import FEWEST, Interval
from report.data import footnotes, metrics, published
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import FEWEST_IN_WORDS, NOTHING, number, with_interval
from report.tables.table import Column, Table, placed


def parity(derived: Derived) -> Table:
    """Table of parity: ZeRO++ at rate B/4 over ZeRO-3 at B, ours and published."""
    ours = metrics.parity(derived.frames, derived.trials)
    if ours.empty:
        return Table("parity", "Parity", "", pd.DataFrame(), ())
    keys = ["nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "full_rate"]
    rows = [
        {
            "setting": f"{key[0]}x{key[1]} ranks, {key[2]} tokens/rank",
            "low": f"{key[3]:g} Mbit/s",
            "high": f"{key[4]:g} Mbit/s",
            "zeropp": metrics.geometric(group["tokens_per_second"]),
            "zero3": metrics.geometric(group["tokens_per_second_baseline"]),
            "unit": "tokens/s",
            "parity": (found := metrics.parity_interval(group)).estimate,
            "parity_low": found.low,
            "parity_high": found.high,
            "pairs": len(group),
            "verdict": _verdict(found),
            **_behind(derived, {*group["id"], *group["baseline"]}, "parity_told", found),
        }
        for key, group in groups(ours, keys)
    ]
    rows += [
        {
            "setting": f"published, {row['model']} on {row['gpus']} {row['gpu']}",
            "low": f"{row['low_gbps']:g} Gbit/s",
            "high": f"{row['high_gbps']:g} Gbit/s",
            "zeropp": float(row["zeropp"]),
            "zero3": float(row["zero3"]),
            "unit": "TFLOPs/GPU",
            "parity": row["parity"],
            "parity_told": number(3)(row["parity"]),
            "pairs": 1,
            "verdict": NOTHING,
            "trials_told": NOTHING,
        }
        for row in published.parity().to_dict("records")
    ]
    columns = (
        Column("setting", "Setting"),
        Column("trials_told", "n", str),
        Column("low", "ZeRO++ at"),
        Column("high", "ZeRO-3 at"),
        Column("zeropp", "ZeRO++", number(3)),
        Column("zero3", "ZeRO-3", number(3)),
        Column("unit", "Unit"),
        Column("parity_told", "Parity", str),
        Column("verdict", "Verdict"),
    )
    caption = (
        "Throughput of ZeRO++ at a quarter of the rate over ZeRO-3's at the full rate: geometric mean of the "
        f"pairs ({FEWEST_IN_WORDS}). Verdict: parity is held if the interval lies at 1 or above, missed if "
        "it lies below; with 1 inside it cannot be told. n: trials of both."
        f"{_marks_in_words(rows, 'parity_told')}"
    )
    return Table("parity", "Parity", caption, pd.DataFrame(rows), columns)


def _verdict(found: Interval) -> str:
    """Whether ZeRO++ makes up for a link of a quarter of the rate."""
    if not found.known:
        return NOTHING
    return "held" if found.low >= 1 else "missed" if found.high < 1 else "cannot tell"


def break_even(derived: Derived) -> Table:
    """Table of break-even rates, above which a contender is no longer faster than ZeRO-3."""
    columns = (
        Column("contender", "Contender"),
        Column("trials_told", "n", str),
        Column("break_even_told", "Break-even, Mbit/s", str),
        Column("low_mbit", "Lowest rate, Mbit/s", number(3)),
        Column("high_mbit", "Highest", number(3)),
        Column("low_speedup", "Speed-up at the lowest", number(3)),
        Column("high_speedup", "at the highest", number(3)),
    )
    rows: list[dict[str, Any]] = []
    for row in metrics.break_even(derived.pairs).to_dict("records"):
        where = f"{row['nodes']}x{row['ranks_per_node']} ranks, {row['tokens_per_rank']} tokens/rank"
        ids = str(row["records"]).split()
        ends = (row["break_even_mbit"], row["break_even_low_mbit"], row["break_even_high_mbit"])
        marked = _behind(derived, ids, "break_even_told", Interval(*ends, row["fewest_pairs"]))
        rows.append({str(key): value for key, value in row.items()} | {"where": where} | marked)
    caption = (
        f"Highest achieved rate at which the contender and {derived.compared.baseline} are equally fast, on "
        "the straight line between neighbouring measured rates (speed-up and rate logarithmic), of which "
        "the lowest and the highest stand beside it, with Fieller's 95 % interval from "
        f"{FEWEST} pairs on at both; "
        "'below' and 'above': it goes on beyond the neighbours, where nothing was measured. "
        f"{NOTHING}: not crossed between these. n: trials at all rates, the baseline's among them."
        f"{_marks_in_words(rows, 'break_even_told')}"
    )
    return placed("break_even", "Break-even", caption, rows, *columns)


def _behind(derived: Derived, records: Iterable[object], marked: str, value: Interval) -> dict[str, Any]:
    """Columns of a row of the trials with these ids: their number, the CPU time that others took, and, in
    column ``marked``, a value with its marks.
    """
    behind = derived.trials[derived.trials["id"].isin(list(records))]
    return {
        marked: with_interval(value, _end) + footnotes.rates(behind),
        "trials": len(behind),
        "trials_told": footnotes.trials(behind),
        "taken_share": behind["taken_share"].max(),
    }


def _end(value: float) -> str:
    """A number, or that it lies beyond what was measured."""
    return (
        number(3)(value) if math.isfinite(value) or math.isnan(value) else "above" if value > 0 else "below"
    )


def _marks_in_words(rows: list[dict[str, Any]], marked: str) -> str:
    """Caption text for the marks in this column and beside the numbers of trials."""
    return footnotes.in_words(str(row[key]) for row in rows for key in ("trials_told", marked))
