"""Figure of the error of gradients that were sent: each hop's beside that of the end."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from report.data import communication
from report.data.metrics import Derived
from report.data.text import listed, number
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_cell_and_contender, common_to


def _data(derived: Derived) -> pd.DataFrame:
    found = communication.errors(derived.frames, derived.trials)
    gradients = (found["purpose"] == "gradients") & (found["repeated"] == 1)
    shown: pd.DataFrame = found[gradients & found["vnmse"].gt(0)]
    return shown  # of exact messages a logarithm shows nothing


def _last(mine: pd.DataFrame) -> pd.DataFrame:
    found: pd.DataFrame = mine[mine["step"] == mine["step"].max()]
    return found


def _draw(data: pd.DataFrame) -> Figure:
    rows = by_cell_and_contender(data)
    figure, ((ax,),) = chart_parts.panels(1, height=chart_parts.bars_height(len(rows), room=1.2))
    chart_parts.row_names(ax, [name for name, _, _ in rows])
    for place, (_, strategy, mine) in enumerate(rows):
        contender = str(mine["contender"].iloc[0])
        colour, ends = theme.colour(strategy, contender), communication.end_to_end(mine)
        hops = communication.of_hops(_last(mine)).groupby(["hop", "axis", "codec"])["vnmse"].median()
        last = communication.median(communication.end_to_end(_last(mine)))
        first_row = place == 0
        ax.plot(
            hops, [place - 0.14] * len(hops), "o", color=colour, mfc="none", ms=5,
            label="each hop, at the last step" if first_row else None,
        )  # fmt: skip
        ax.plot(
            ends["vnmse"], [place + 0.14] * len(ends), ".", color=colour, ms=5, alpha=0.6,
            label="end to end, at each measured step" if first_row else None,
        )  # fmt: skip
        ax.plot(
            last, place + 0.14, theme.marker(strategy, contender), color=colour, mec="white", ms=7,
            label="end to end, at the last" if first_row else None,
        )  # fmt: skip
        largest = max([last, *hops, *ends["vnmse"]])
        chart_parts.beside(ax, largest, place, f"{number(2)(last)}", points=8)
    low, high = data["vnmse"].min(), data["vnmse"].max()
    ax.set_xlim(low / 1.4, high * 2)
    chart_parts.decades(ax, "x")
    ax.set_xlabel("vNMSE of gradients")
    chart_parts.legend_above(figure, ax, columns=3)
    return figure


def _caption(data: pd.DataFrame) -> str:
    return (
        "Error of gradients: rings, each hop's decoded frames against the values that were encoded there; "
        "below them, end to end, sum((reduced - exact mean)^2) / sum(exact mean^2), the number being that of "
        "the last measured step. Sums over all units, each contender and setting by itself. A ring has a hop "
        "for each of its steps; whose name tells no way of reduction, reduces in two hops. "
        f"{common_to(data)}"
    )


def _alt(data: pd.DataFrame) -> str:
    told = [
        f"{name} {communication.median(communication.end_to_end(_last(mine))):.2g}"
        for name, _, mine in by_cell_and_contender(data)
    ]
    return f"End to end, at the last measured step: {listed(told[:14])}."


PLOTS: Final = (Plot("sent_error", "Error of what was sent", _draw, _caption, _alt, _data, "algorithms"),)
