"""Table of decoding: speed of tokens and bytes between nodes, beside the published rates."""

from __future__ import annotations

from typing import Any

import pandas as pd

from report.data import decoding, footnotes, published
from report.data.contender import NAMES
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import NOTHING, number, with_interval
from report.draw.figure_definition import by_contender
from report.tables.table import Column, Table, placed


def generation(derived: Derived) -> Table:
    """Table of decoding: tokens per second and bytes between nodes, beside the published rates."""
    columns = (
        Column("contender", "Contender"),
        Column("generations_told", "n", str),
        Column("speed_told", "Tokens/s per rank", str),
        Column("later_tokens_per_second", "without the first token", number(3)),
        Column("speedup_told", f"over {derived.compared.baseline}'s", str),
        Column("exposed", "Exposed share", number(2)),
        Column("first_mb", "Between nodes, first token, MB", number(4)),
        Column("later_mb", "each later one, MB", number(4)),
    )
    caption = (
        "Medians over generations and repeats with their 95 % interval; the ratio is the geometric mean over "
        "generations of the same number, seed and repeat. n: generations. A rank decodes several sequences "
        "at once; a token takes as long as on the slowest rank. Bytes: by the ledger, all ranks. Published: "
        "the ZeRO++ blog's RLHF figure, tokens/s per GPU, whose batches and models are others."
    )
    table = derived.generations
    if table.empty:
        return Table("generation", "Generation", caption, pd.DataFrame(), columns)
    rows = [
        _generation_row(mine)
        for _, of_cell in groups(table, ["cell"])
        for _, _, mine in by_contender(of_cell)
    ]
    for one in published.generation().to_dict("records"):
        for name in ("zero3", "zeropp"):
            told = f"published: {NAMES[name]}, {one['model']} on {one['gpus']} GPUs"
            row = {"where": rows[0]["where"], "contender": told, "generations_told": NOTHING}
            row |= {"tokens_per_second": one[name], "speed_told": number(3)(one[name])}
            ratio = one["speedup"] if name == "zeropp" else 1.0
            rows.append(row | {"speedup": ratio, "speedup_told": f"{ratio:.2f}"})
    caption += footnotes.in_words(row["generations_told"] for row in rows)
    return placed("generation", "Generation", caption, rows, *columns)


def _generation_row(mine: pd.DataFrame) -> dict[str, Any]:
    speed, paired = decoding.speed(mine), mine.dropna(subset=["baseline"])
    row = {
        "where": mine["where"].iloc[0],
        "contender": mine["contender"].iloc[0],
        "generations": len(mine),
        "generations_told": footnotes.trials(mine),
        "tokens_per_second": speed.estimate,
        "tokens_per_second_low": speed.low,
        "tokens_per_second_high": speed.high,
        "speed_told": with_interval(speed, number(3)),
        "speedup_told": NOTHING,
        "first_mb": mine["first_bytes"].median() / 1e6,
        "later_mb": mine["later_bytes"].median() / 1e6,
    }
    row |= {key: mine[key].median() for key in ("later_tokens_per_second", "exposed")}
    if len(paired):
        ratio = decoding.speedup(paired)
        row |= {"speedup": ratio.estimate, "speedup_low": ratio.low, "speedup_high": ratio.high}
        row["speedup_told"] = with_interval(ratio, "{:.2f}".format)
    return row
