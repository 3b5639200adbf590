"""Figure of workload ``generate``: tokens per second by policy, and bytes between nodes per token."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.data import decoding, published
from report.data.contender import NAMES, PROPOSED
from report.data.metrics import Derived
from report.data.text import FEWEST_IN_WORDS, byte_unit, listed, number, sweeps_in_words
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_cell, by_contender, common_to, contenders

_KEPT: Final = [
    "id", "baseline", "strategy", "contender", "place", "first", "cell", "where", "sweep", "seed", "repeat",
    "step", "tokens", "sequences", "seconds", "tokens_per_second", "later_tokens_per_second", "first_bytes",
    "later_bytes", "baseline_tokens_per_second", "speedup",
]  # fmt: skip


def _data(derived: Derived) -> pd.DataFrame:
    return derived.generations[_KEPT]


def _draw(data: pd.DataFrame) -> Figure:
    cells = by_cell(data)
    height = sum(chart_parts.bars_height(mine["contender"].nunique(), row=0.34) for _, mine in cells)
    figure, grid = chart_parts.panels(3, len(cells), height=height, sharey=True)
    size, unit = byte_unit(float(np.nan_to_num(data[["first_bytes", "later_bytes"]].max().max())))
    for row, (title, mine) in zip(grid, cells, strict=True):
        # Without ZeRO-3 beside them there is no ratio of ours, and the published ones stand alone.
        top = float(np.nanmax([mine["speedup"].max(), published.generation()["speedup"].max()]))
        chart_parts.row_names(row[0], [contender for _, contender in contenders(mine)])
        for place, (strategy, contender, group) in enumerate(by_contender(mine)):
            colour, speeds = theme.colour(strategy, contender), group["tokens_per_second"]
            found = decoding.speed(group)
            chart_parts.interval_bar(
                row[0], place, found, speeds, colour=colour, text=number(3)(found.estimate)
            )
            _ratio(row[1], group, place, colour)
            for offset, part, alpha in ((-0.16, "first_bytes", 1.0), (0.16, "later_bytes", 0.45)):
                sent = group[part].median() / size
                row[2].barh(place + offset, sent, 0.3, color=colour, alpha=alpha)
                chart_parts.beside(row[2], sent, place + offset, number(3)(float(sent)))
        row[0].set_title(title)
        row[0].set_xlim(0, row[0].dataLim.x1 * 1.2)
        row[1].axvline(1, color=theme.FAINT, lw=0.8, zorder=1)
        for one in published.generation().to_dict("records"):
            row[1].axvline(one["speedup"], color=theme.PUBLISHED, lw=0.9, ls=":", zorder=1)
        row[1].set_xlim(0, max(top, row[1].dataLim.x1) * 1.25)
        row[2].set_xlim(0, max(mine[["first_bytes", "later_bytes"]].max().max() / size, 1e-9) * 1.3)
        for ax in row[1:]:
            chart_parts.same_rows(ax)
    grid[-1][0].set_xlabel("tokens/s per rank")
    grid[-1][1].set_xlabel("over ZeRO-3's\n( : published)")
    grid[-1][2].set_xlabel(f"{unit} between nodes:\nfirst, later token")
    return figure


def _ratio(ax: Axes, group: pd.DataFrame, place: int, colour: str) -> None:
    paired = group.dropna(subset=["baseline"])
    if paired.empty:
        return
    found = decoding.speedup(paired)
    ax.barh(place, found.estimate, 0.6, color=colour)
    chart_parts.error_bar(ax, place, found, theme.INK)
    chart_parts.beside(ax, float(np.nanmax([found.estimate, found.high])), place, f"{found.estimate:.2f}")


def _caption(data: pd.DataFrame) -> str:
    theirs = published.generation()
    told = [f"{one['speedup']:.2f} ({one['model']})" for one in theirs.to_dict("records")]
    first = data.iloc[0]
    return (
        f"Greedy decoding of {first['tokens']} tokens for each of {first['sequences']} sequences a rank, "
        "keys and values kept, on weights that have just changed. Left: decoded tokens per second of one "
        "rank, prompt included: median of the trials, dots are single generations. Middle: over ZeRO-3's of "
        f"the same repeat, geometric mean of the trials ({FEWEST_IN_WORDS}); dotted: what the ZeRO++ blog "
        f"prints for generation in RLHF on 32 GPUs, {listed(told)}. Right: bytes that all ranks sent "
        "between nodes for the first token (full colour) and for each later one (pale), by the ledger. "
        "Gradient codecs (qgZ) change nothing here: nothing is reduced. "
        f"{common_to(data)}{sweeps_in_words(data['sweep'])}"
    )


def _alt(data: pd.DataFrame) -> str:
    told = [
        f"{contender} {decoding.speed(group).estimate:.3g} tokens/s, between nodes "
        f"{group['first_bytes'].median():.3g} bytes for the first token, "
        f"{group['later_bytes'].median():.3g} for a later one"
        for contender, group in data.groupby("contender", sort=False)
    ]
    return f"Bars per policy: {listed(told[:12])}. {NAMES[PROPOSED]} keeps weights inside the node."


PLOTS: Final = (
    Plot("generation", "Decoding with sharded weights", _draw, _caption, _alt, _data, "generation"),
)
