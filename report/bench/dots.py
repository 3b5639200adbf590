"""What the pages of benchmarks share: intervals as text, and dots of ratios beside the reference."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harness.records.statistics import Interval, median_interval
from report.data.text import number, text
from report.draw import drawing, theme

TRANSPORTS: Final = {"shm": "shared memory", "backend": "gloo alone", "none": "nothing"}
COLOURS: Final = {"shm": "#0072b2", "backend": "#e69f00", "none": "#000000"}
_WIDE: Final = 300.0  # an axis whose ends have a larger ratio is labelled at decades only


@dataclass(frozen=True, slots=True)
class Dot:
    """A ratio in one row.

    Attributes:
        row: its row's name.
        found: estimate and interval.
        colour: what it belongs to.
        marker: likewise.
    """

    row: str
    found: Interval
    colour: str
    marker: str = "o"


def rows_of(data: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries by column."""
    return [{str(key): value for key, value in row.items()} for row in data.to_dict("records")]


@functools.cache
def median(values: tuple[float, ...]) -> Interval:
    """Their median with its interval; remembered, since figures, captions and tables of a page all ask."""
    return median_interval(values)


def told(found: Interval) -> str:
    """``1.23 [1.20, 1.31]``."""
    digits = number(3)
    if math.isnan(found.low):
        return digits(found.estimate)
    return f"{digits(found.estimate)} [{digits(found.low)}, {digits(found.high)}]"


def right(value: Any) -> str:
    """Formatter: text that is set flush right like numbers."""
    return text(value)


def whole(value: Any) -> str:
    """Formatter: a count."""
    return f"{value:d}"


def draw(ax: Axes, dots: Sequence[Dot], names: Sequence[str], limits: tuple[float, float]) -> None:
    """Dots on a log axis with a dashed line at 1, where the reference is; the names stand at the left."""
    ax.set_xscale("log")
    ax.set_xlim(*limits)
    ax.axvline(1, color=theme.INK, lw=1.1, ls=(0, (4, 3)), zorder=1)
    for dot in dots:
        at = names.index(dot.row)
        drawing.error_bar(ax, at, dot.found, dot.colour, across=True)
        ax.plot(dot.found.estimate, at, dot.marker, color=dot.colour, ms=5, mec="white", mew=0.5, zorder=4)
    drawing.row_names(ax, names)
    ax.grid(visible=True, axis="y")
    if limits[1] / limits[0] < _WIDE:
        ticks = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
        drawing.log_ticks(ax, [tick for tick in ticks if limits[0] <= tick <= limits[1]])
    else:
        drawing.decades(ax, "x")


def limits(found: Sequence[Interval]) -> tuple[float, float]:
    """Of an axis that shows all intervals and the line at 1."""
    ends = [1.0, *(one.estimate for one in found)]
    ends += [end for one in found for end in (one.low, one.high) if not math.isnan(end)]
    return min(ends) / 1.4, max(ends) * 1.4


def legend(figure: Figure, colours: dict[str, str]) -> None:
    """Names of colours above all panels."""
    handles = [
        Line2D([], [], ls="", marker="o", ms=6, color=colour, label=name) for name, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), columnspacing=1.3)
