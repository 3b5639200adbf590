"""Figure of energy: joules per token and utilisation of GPUs, by policy."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from harness.records.confidence_intervals import Interval, median_interval
from report.data.metrics import Derived
from report.data.text import listed, number, sweeps_in_words
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_cell, by_contender, common_to, contenders

_KEPT: Final = [
    "id", "strategy", "contender", "place", "first", "cell", "where", "sweep", "seed", "repeat",
    "joules_per_token", "watts", "utilisation", "throttled", "gpu_others",
]  # fmt: skip


def _data(derived: Derived) -> pd.DataFrame:
    return derived.trials[derived.trials["joules_per_token"].notna()][_KEPT]


def _median(values: pd.Series[float], sweeps: pd.Series[int]) -> Interval:
    return median_interval(list(values), list(sweeps))


def _draw(data: pd.DataFrame) -> Figure:
    cells = by_cell(data)
    height = sum(chart_parts.bars_height(mine["contender"].nunique()) for _, mine in cells)
    figure, grid = chart_parts.panels(2, len(cells), height=height, sharey=True)
    for row, (title, mine) in zip(grid, cells, strict=True):
        chart_parts.row_names(row[0], [contender for _, contender in contenders(mine)])
        for place, (strategy, contender, group) in enumerate(by_contender(mine)):
            colour = theme.colour(strategy, contender)
            for ax, name, told in (
                (row[0], "joules_per_token", number(3)),
                (row[1], "utilisation", number(2)),
            ):
                found = _median(group[name], group["sweep"])
                text = told(found.estimate)
                chart_parts.interval_bar(ax, place, found, group[name], colour=colour, text=text)
        row[0].set_title(title)
        row[0].set_xlim(0, row[0].dataLim.x1 * 1.25)
        row[1].set_xlim(0, 1.25)
        chart_parts.same_rows(row[1])
    grid[-1][0].set_xlabel("J per token, all GPUs")
    grid[-1][1].set_xlabel("utilisation of a GPU")
    return figure


def _caption(data: pd.DataFrame) -> str:
    held = int((data["throttled"].gt(0.05) | data["gpu_others"].gt(0)).sum())
    told = f"In {held} of them a GPU was held down or shared (table Energy). " if held else ""
    return (
        "Energy of all GPUs over the timed steps and the validations between them, by their own counters "
        "where they have one, divided by the tokens of all ranks; and the share of time in which a kernel "
        "ran, which a kernel that waits for a message does too. Bars are medians over trials with their "
        f"95 % interval, dots single trials. {told}{common_to(data)}{sweeps_in_words(data['sweep'])}"
    ).rstrip()


def _alt(data: pd.DataFrame) -> str:
    told = [
        f"{contender} {number(3)(group['joules_per_token'].median())} J"
        for _, contender, group in by_contender(data)
    ]
    return f"Bars of energy per token: {listed(told[:12])}."


PLOTS: Final = (Plot("energy", "Energy per token", _draw, _caption, _alt, _data, extra=True),)
