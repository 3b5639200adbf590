"""Parts of figures that all marks share: grids of panels, ticks, names of rows, legends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from report.draw import theme
from report.draw.theme import Look, Style

ROW_INCHES: Final = 0.32  # height of a row with its air
_FEW_DECADES: Final = 1e3  # ratio of an axis' ends
_MOST_TICKS: Final = 9
_LETTER_INCHES: Final = 0.062  # average width of a letter of a legend's label
_ENTRY_INCHES: Final = 0.45  # width of a legend's entry without its label
_LINE_INCHES: Final = 0.17  # height of a legend's line
_EDGES_INCHES: Final = 0.1  # of a figure, left and right of what is drawn


def grid(
    style: Style, rows: int, columns: int, heights: Sequence[float], *, share_y: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of panels, in one column where it is narrow; ``heights`` in inches, with titles and axes."""
    shape = (rows * columns, 1) if style.narrow else (rows, columns)
    ratios = [height for height in heights for _ in range(shape[0] // rows)]
    figure = Figure(figsize=(style.inches, sum(ratios)), layout="constrained")
    sharey: Literal["row", "none"] = "row" if share_y and not style.narrow else "none"
    axes = figure.subplots(*shape, squeeze=False, height_ratios=ratios, sharey=sharey)
    return figure, [list(row) for row in axes.reshape(rows, columns)]


def rows_inches(count: int) -> float:
    """Height of a panel with this many rows, its axis and its title."""
    return 0.75 + ROW_INCHES * max(count, 2)


def wrapped(name: str, limit: int = 26, most: int | None = None) -> str:
    """Break a long name near its middle, before a parenthesis or after a comma; past ``most`` at slashes."""
    if most is not None and len(name) > most:
        name = name.replace("/", "/\n")
    places = [match.start() for match in re.finditer(r"(?<=,) | (?=\()", name)]
    if len(name) <= limit or not places:
        return name
    place = min(places, key=lambda place: abs(place - len(name) / 2))
    return f"{name[:place]}\n{name[place + 1 :]}"


def name_rows(ax: Axes, names: Sequence[str], *, first: bool = True) -> None:
    """Write the names of rows, the first on top; of panels that share rows only the ``first`` shows them."""
    ax.set_yticks(range(len(names)), [wrapped(name) for name in names])
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.set_ylabel("")
    ax.tick_params(axis="y", length=0, labelleft=first)
    ax.grid(visible=False, axis="y")


def log_ticks(ax: Axes, axis: Literal["x", "y"]) -> None:
    """Make an axis logarithmic with plain labels at decades, or at 1, 2 and 5 of each if they are few."""
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    part, (low, high) = (ax.xaxis, ax.get_xlim()) if axis == "x" else (ax.yaxis, ax.get_ylim())
    subs = (1, 2, 5) if high / low < _FEW_DECADES else (1,)
    part.set_major_locator(LogLocator(subs=subs, numticks=_MOST_TICKS))
    part.set_major_formatter(StrMethodFormatter("{x:g}"))
    part.set_minor_locator(NullLocator())


def beside(ax: Axes, x: float, y: float, text: str) -> None:
    """Write a small label to the right of a bar's end or a point."""
    if not math.isnan(x):
        ax.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=7.5)


def room(ax: Axes, *, zero: bool, share: float = 0.2) -> None:
    """Leave room for labels on the right; the axis begins at 0, or near the least value."""
    low, high = ax.dataLim.x0, ax.dataLim.x1
    if not (math.isfinite(low) and math.isfinite(high)):
        return
    air = (high - low) or abs(high) * 0.01 or 1.0
    ax.set_xlim(min(0.0, low) if zero else low - 0.15 * air, high + share * (high if zero else air) + 1e-12)


def lines(looks: Mapping[str, Look], **changes: Any) -> dict[str, Artist]:
    """A legend's entries of lines or, with ``changes`` of the artist, points."""
    entries: dict[str, Artist] = {
        name: Line2D([], [], color=look.colour, marker=look.marker, dashes=look.dashes)
        for name, look in looks.items()
    }
    for entry in entries.values():
        entry.set(**changes)
    return entries


def patches(colours: Mapping[str, str]) -> dict[str, Artist]:
    """A legend's entries of bars."""
    return {name: Patch(color=colour) for name, colour in colours.items()}


def legend(figure: Figure, entries: Mapping[str, Artist], style: Style) -> None:
    """Draw a legend above all panels, in as many columns as fit, and make the figure higher by it."""
    parts = [name.split("\n") for name in entries]
    longest = _ENTRY_INCHES + _LETTER_INCHES * max(len(part) for name in parts for part in name)
    columns = max(1, min(len(entries), int((style.inches - _EDGES_INCHES) / longest)))
    rows = [parts[row :: -(-len(parts) // columns)] for row in range(-(-len(parts) // columns))]
    lines = sum(max(map(len, row)) for row in rows)
    figure.set_figheight(figure.get_figheight() + _LINE_INCHES * lines)
    figure.legend(list(entries.values()), list(entries), loc="outside upper left", ncols=columns)


def line_at(ax: Axes, value: float | None, *, across: bool) -> None:
    """A faint line at a value: upright, or ``across``."""
    if value is not None:
        (ax.axhline if across else ax.axvline)(value, color=theme.FAINT, lw=0.8, zorder=1)
