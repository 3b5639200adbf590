"""Dot plots of a benchmark: ratios to the reference, which is the line at 1, in named rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.records.statistics import Interval
from report.bench.boards import Board
from report.data.frames import groups
from report.draw import drawing, theme
from report.draw.plot import Drawing

_WIDE: Final = 300.0  # an axis whose ends have a larger ratio is labelled at decades only
_MOST_TOLD: Final = 24  # dots that a description names one by one
_ONE_COLOUR: Final = "#0072b2"


def drawings(
    board: Board, data: pd.DataFrame, derive: Callable[[pd.DataFrame], pd.DataFrame]
) -> Iterator[tuple[Drawing, pd.DataFrame]]:
    """One figure per value of ``board.split``, with its rounds; ``derive`` turns them into rows."""
    _, title = board.plotted
    for name, values in zip(board.figures, product(*board.split.values()), strict=True):
        mine = data
        for column, value in zip(board.split, values, strict=True):
            mine = mine[mine[column] == value]
        if len(mine):
            drawn = Drawing(
                name=name,
                title=", ".join((board.title, *(value.replace("_", "-") for value in values))),
                draw=lambda rounds: _draw(board, derive(rounds)),
                caption=lambda _: (
                    f"{title.capitalize()}: medians over rounds with 95 % intervals. {board.line}"
                ),
                alt=lambda rounds: _told(board, derive(rounds)),
            )
            yield drawn, mine


def _told(board: Board, rows: pd.DataFrame) -> str:
    """Alternative text: every dot, or the ranges of many."""
    measure, title = board.plotted
    keys = [board.below, board.panel, board.row if len(rows) <= _MOST_TOLD else None]
    keys += [None if board.colours is None else board.colours[0]]
    told = []
    for names, group in groups(rows, [key for key in keys if key]):
        low, high = group[measure].min(), group[measure].max()
        found = f"{low:.3g}" if len(group) == 1 else f"{low:.3g} to {high:.3g}"
        told.append(f"{', '.join(map(str, names))}: {found}")
    return f"{title.capitalize()}, by the median. {'; '.join(told)}."


def _draw(board: Board, rows: pd.DataFrame) -> Figure:
    """Draw rows, with a dashed line at 1."""
    measure, label = board.plotted
    lines = [(("",), rows)] if board.below is None else groups(rows, [board.below])
    titles = list(dict.fromkeys(rows[board.panel]))
    most = max(here[board.row].nunique() for _, here in lines)
    height = drawing.bars_height(most, room=1.0, row=0.22) * len(lines) + 0.2
    figure, grid = drawing.panels(len(titles), len(lines), height=height, width=8.4)
    column, colours = board.colours or (board.row, dict.fromkeys(rows[board.row], _ONE_COLOUR))
    ends = rows[[measure, f"{measure}_low", f"{measure}_high"]].to_numpy(float)
    limits = min(1.0, float(np.nanmin(ends))), max(1.0, float(np.nanmax(ends)))
    for axes, ((place,), here) in zip(grid, lines, strict=True):
        names = list(dict.fromkeys(here[board.row]))
        for ax, title in zip(axes, titles, strict=True):
            for row in here[here[board.panel] == title].to_dict("records"):
                at, colour = names.index(row[board.row]), colours[row[column]]
                found = Interval(row[measure], row[f"{measure}_low"], row[f"{measure}_high"], row["rounds"])
                drawing.error_bar(ax, at, found, colour, across=True)
                ax.plot(found.estimate, at, "o", color=colour, ms=5, mec="white", mew=0.5, zorder=4)
            _axis(ax, limits, log=board.log)
            drawing.row_names(ax, [str(name) for name in names])
            ax.grid(visible=True, axis="y")
            head = drawing.wrapped(str(title), 20)
            ax.set_title(f"{place if ax is axes[0] else ''}\n{head}" if place else head)
            ax.tick_params(axis="y", labelleft=ax is axes[0])
    figure.supxlabel(label, fontsize=9)
    if board.colours is not None:
        there = [name for name in colours if (rows[column] == name).any()]
        for name in there:
            grid[0][0].plot([], [], "o", ms=6, color=colours[name], label=name)
        drawing.legend_above(figure, grid[0][0], columns=len(there))
    return figure


def _axis(ax: Axes, ends: tuple[float, float], *, log: bool) -> None:
    """Limits with some air around all intervals and the line at 1, ticks, and that line."""
    low, high = ends
    air = 0.1 * (high - low or 1.0)
    low, high = (low / 1.4, high * 1.4) if log else (low - air, high + air)
    ax.set_xscale("log" if log else "linear")
    ax.set_xlim(low, high)
    ax.axvline(1, color=theme.INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
    if log and high / low < _WIDE:
        ticks = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
        drawing.log_ticks(ax, [tick for tick in ticks if low <= tick <= high])
    elif log:
        drawing.decades(ax, "x")
