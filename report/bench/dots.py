"""Dot plots of a benchmark: ratios to the reference, which is the line at 1, in named rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records.statistics import Interval
from report.data.frames import groups
from report.draw import drawing, theme
from report.draw.plot import Drawing

_WIDE: Final = 300.0  # an axis whose ends have a larger ratio is labelled at decades only
_MOST_TOLD: Final = 24  # dots that a description names one by one
_ONE_COLOUR: Final = "#0072b2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """Definition of a dot plot over the rows of a board; columns are named by their keys.

    Attributes:
        name: of the file; the values of ``split`` are appended.
        title: on the page; likewise.
        caption: describes the figure.
        measure: column to plot; its interval is in ``<measure>_low`` and ``<measure>_high``.
        label: of the axis.
        row: column whose values have a row each.
        panel: column whose values have a panel each, side by side.
        below: column whose values have a row of panels each.
        split: columns whose values have a figure each, with all values that they may take.
        colours: a column, and the colour of each of its values; None for one colour.
        log: whether the axis is.
    """

    name: str
    title: str
    caption: str
    measure: str
    label: str
    row: str
    panel: str
    below: str | None = None
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    colours: tuple[str, Mapping[str, str]] | None = None
    log: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """File names of all figures that it may produce."""
        return tuple("-".join((self.name, *values)) for values in product(*self.split.values()))

    def drawings(
        self, data: pd.DataFrame, derive: Callable[[pd.DataFrame], pd.DataFrame]
    ) -> Iterator[tuple[Drawing, pd.DataFrame]]:
        """One figure per value of ``split``, with its rounds; ``derive`` turns them into rows."""
        for name, values in zip(self.names, product(*self.split.values()), strict=True):
            mine = data
            for column, value in zip(self.split, values, strict=True):
                mine = mine[mine[column] == value]
            if len(mine):
                drawn = Drawing(
                    name=name,
                    title=", ".join((self.title, *(value.replace("_", "-") for value in values))),
                    draw=lambda rounds: self.draw(derive(rounds)),
                    caption=lambda _: self.caption,
                    alt=lambda rounds: self.told(derive(rounds)),
                )
                yield drawn, mine

    def told(self, rows: pd.DataFrame) -> str:
        """Alternative text: every dot, or the ranges of many."""
        keys = [self.row] if len(rows) <= _MOST_TOLD else []
        keys += [] if self.colours is None else [self.colours[0]]
        told = []
        for places, here in groups(rows, [key for key in (self.below, self.panel) if key]):
            parts = []
            for values, group in groups(here, keys):
                low, high = group[self.measure].min(), group[self.measure].max()
                found = f"{low:.3g}" if len(group) == 1 else f"{low:.3g} to {high:.3g}"
                parts.append(f"{', '.join(str(value) for value in values)} {found}")
            told.append(f"{', '.join(places)}: {'; '.join(parts)}.")
        return f"{self.label[:1].upper()}{self.label[1:]}, by the median. {' '.join(told)}"

    def draw(self, rows: pd.DataFrame) -> Figure:
        """Draw rows, with a dashed line at 1."""
        lines = [(("",), rows)] if self.below is None else groups(rows, [self.below])
        titles = list(dict.fromkeys(rows[self.panel]))
        most = max(here[self.row].nunique() for _, here in lines)
        height = drawing.bars_height(most, room=1.0, row=0.22) * len(lines) + 0.2
        figure, grid = drawing.panels(len(titles), len(lines), height=height, width=8.4)
        limits = self._limits([self._interval(row) for row in rows_of(rows)])
        for axes, ((place,), here) in zip(grid, lines, strict=True):
            names = list(dict.fromkeys(here[self.row]))
            for ax, title in zip(axes, titles, strict=True):
                for row in rows_of(here[here[self.panel] == title]):
                    self._dot(ax, names.index(row[self.row]), row)
                self._axis(ax, limits)
                drawing.row_names(ax, [str(name) for name in names])
                ax.grid(visible=True, axis="y")
                head = drawing.wrapped(str(title), 20)
                ax.set_title(f"{place if ax is axes[0] else ''}\n{head}" if place else head)
                ax.tick_params(axis="y", labelleft=ax is axes[0])
        figure.supxlabel(self.label, fontsize=9)
        if self.colours is not None:
            column, colours = self.colours
            handles = [
                Line2D([], [], ls="", marker="o", ms=6, color=colour, label=name)
                for name, colour in colours.items()
                if (rows[column] == name).any()
            ]
            figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), columnspacing=1.3)
        return figure

    def _interval(self, row: dict[str, Any]) -> Interval:
        estimate, low, high = (row[f"{self.measure}{end}"] for end in ("", "_low", "_high"))
        return Interval(estimate, low, high, row["rounds"])

    def _dot(self, ax: Axes, at: int, row: dict[str, Any]) -> None:
        colour = _ONE_COLOUR if self.colours is None else self.colours[1][row[self.colours[0]]]
        drawing.error_bar(ax, at, self._interval(row), colour)
        ax.plot(row[self.measure], at, "o", color=colour, ms=5, mec="white", mew=0.5, zorder=4)

    def _limits(self, found: Sequence[Interval]) -> tuple[float, float]:
        """Limits of an axis that shows all intervals and the line at 1."""
        ends = [1.0, *(one.estimate for one in found)]
        ends += [end for one in found for end in (one.low, one.high) if not math.isnan(end)]
        if self.log:
            return min(ends) / 1.4, max(ends) * 1.4
        air = 0.1 * (max(ends) - min(ends) or 1.0)
        return min(ends) - air, max(ends) + air

    def _axis(self, ax: Axes, limits: tuple[float, float]) -> None:
        ax.set_xscale("log" if self.log else "linear")
        ax.set_xlim(*limits)
        ax.axvline(1, color=theme.INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
        if self.log and limits[1] / limits[0] < _WIDE:
            ticks = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
            drawing.log_ticks(ax, [tick for tick in ticks if limits[0] <= tick <= limits[1]])
        elif self.log:
            drawing.decades(ax, "x")


def rows_of(data: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of a frame as dictionaries by column."""
    return [{str(key): value for key, value in row.items()} for row in data.to_dict("records")]
