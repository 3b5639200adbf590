"""Draws what all kinds of figures (bars, lines, points) have in common: grids of panels, ticks, row names, legends."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, StrMethodFormatter

from report.data.text import number
from report.draw import theme
from report.draw.theme import Look, Style

ROW_INCHES: Final = 0.32  # height of a row with the space around it
AROUND_INCHES: Final = 0.75  # height of the title and the axis of a panel with rows
_FEW_DECADES: Final = 1e3  # an axis whose ends have a smaller ratio has ticks inside its decades
_MOST_TICKS: Final = 9
_FEW_VALUES: Final = 8  # a logarithmic axis of at most so many values has its ticks at the values
_BETWEEN_TICKS: Final = 1 / 12  # least distance of two ticks at values, as a share of the axis
_LETTER_INCHES: Final = 0.062  # average width of a letter of a legend's label
_LABEL_SHARE: Final = 0.8  # share of a panel's width that the label of its axis may fill
_ENTRY_INCHES: Final = 0.45  # width of a legend's entry without its label
_LINE_INCHES: Final = 0.17  # height of a legend's line
_EDGES_INCHES: Final = 0.1  # width of a figure's empty edges, left and right together


def grid(
    style: Style,
    rows: int,
    columns: int,
    heights: Sequence[float],
    *,
    share_y: bool = False,
    around: float = 0.0,
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure with ``rows`` x ``columns`` panels, and the panels as a list of rows.

    With a narrow ``style``, the figure shows all panels in one column, and no panels share an axis.  The returned list
    still has ``rows`` lists of ``columns`` panels.

    Args:
        style: The style of the figure.
        rows: Number of rows.
        columns: Number of columns.
        heights: Heights of the rows in inches.
        share_y: Whether the panels of a row share their y axis.
        around: Inches that are added to each height for the panels' titles and x axes.  If it is 0, ``heights`` include
            the titles and axes.
    """
    shape = (rows * columns, 1) if style.narrow else (rows, columns)
    ratios = [height for height in heights for _ in range(shape[0] // rows)]
    inches = sum(ratios) + around * len(ratios)
    figure = Figure(figsize=(style.inches, inches), layout="constrained")
    sharey: Literal["row", "none"] = "row" if share_y and not style.narrow else "none"
    axes = figure.subplots(*shape, squeeze=False, height_ratios=ratios, sharey=sharey)
    return figure, [list(row) for row in axes.reshape(rows, columns)]


def rows_inches(count: int) -> float:
    """Return the height in inches of a panel with ``count`` rows of bars or points, without its axis and its title.

    A panel with one row is as high as a panel with two.
    """
    return ROW_INCHES * max(count, 2)


def wrapped(name: str, limit: int = 26, most: int | None = None) -> str:
    """Return a name with line breaks, if it is long.

    A name of more than ``limit`` characters gets one break, before a parenthesis or after a comma near its middle.
    A name of more than ``most`` characters also gets a break after every slash.
    """
    if most is not None and len(name) > most:
        name = name.replace("/", "/\n")
    places = [match.start() for match in re.finditer(r"(?<=,) | (?=\()", name)]
    if len(name) <= limit or not places:
        return name
    place = min(places, key=lambda place: abs(place - len(name) / 2))
    return f"{name[:place]}\n{name[place + 1 :]}"


def filled(text: str, inches: float) -> str:
    """Return a text with line breaks between words, so that each line fits below a panel that is ``inches`` wide."""
    letters = max(1, int(inches / _LETTER_INCHES * _LABEL_SHARE))
    return "\n".join(textwrap.fill(line, letters, break_long_words=False) for line in text.split("\n"))


def name_rows(ax: Axes, names: Sequence[str], *, first: bool = True) -> None:
    """Write the names of rows on a panel's y axis, the first name on top.

    ``first`` says whether the panel is the first of its row; other panels get the ticks, but no names.
    """
    ax.set_yticks(range(len(names)), [wrapped(name) for name in names])
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.set_ylabel("")
    ax.tick_params(axis="y", length=0, labelleft=first)
    ax.grid(visible=False, axis="y")


def log_ticks(ax: Axes, axis: Literal["x", "y"], values: Iterable[float] = ()) -> None:
    """Make an axis logarithmic, with plain labels such as 0.5 and 100.

    ``values`` are all values of the data along this axis.  They decide where the ticks are:

    * With few values, there is a tick at each value.  A value gets no tick if it is too near to a smaller value with a
      tick.
    * With many values, or if none are given, there are ticks at powers of 10.  If the axis covers less than three
      decades, there are also ticks at 2 and 5 times each power of 10.
    """
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log")
    part, (low, high) = (ax.xaxis, ax.get_xlim()) if axis == "x" else (ax.yaxis, ax.get_ylim())
    part.set_minor_locator(NullLocator())
    ticks, distinct = list[float](), sorted({*values})
    for value in distinct:
        if not ticks or value / ticks[-1] > (high / low) ** _BETWEEN_TICKS:
            ticks.append(value)
    if 0 < len(distinct) <= _FEW_VALUES:
        part.set_major_locator(FixedLocator(ticks))
        part.set_major_formatter(FuncFormatter(lambda tick, _: number(3)(tick)))
        return
    subs = (1, 2, 5) if high / low < _FEW_DECADES else (1,)
    part.set_major_locator(LogLocator(subs=subs, numticks=_MOST_TICKS))
    part.set_major_formatter(StrMethodFormatter("{x:g}"))


def beside(ax: Axes, x: float, y: float, text: str) -> None:
    """Write a small label to the right of the point (x, y), such as a bar's end; write nothing if ``x`` is NaN."""
    if not math.isnan(x):
        ax.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=7.5)


def room(panels: Sequence[Axes], *, zero: bool, share: float = 0.2) -> None:
    """Set the ends of the x axis of all panels, so that there is room for labels on the right of their data.

    With ``zero``, the axis begins at 0, or at the smallest value if it is negative; the room is ``share`` times the
    largest value.  Without ``zero``, the axis begins just below the smallest value, and the room is ``share`` times the
    difference between the largest and the smallest value.
    """
    ends = [(ax.dataLim.x0, ax.dataLim.x1) for ax in panels]
    ends = [(low, high) for low, high in ends if math.isfinite(low) and math.isfinite(high)]
    if not ends:
        return
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    air = (high - low) or abs(high) * 0.01 or 1.0
    left, right = min(0.0, low) if zero else low - 0.15 * air, high + share * (high if zero else air) + 1e-12
    for ax in panels:
        ax.set_xlim(left, right)


def lines(looks: Mapping[str, Look], **changes: Any) -> dict[str, Artist]:
    """Return a legend's entries for lines, by name: each has the colour, marker and dashes of its look.

    ``looks`` has the look of each name.  ``changes`` are properties of matplotlib's lines that are set on every entry,
    such as ``linestyle="none"``.
    """
    entries: dict[str, Artist] = {
        name: Line2D([], [], color=look.colour, marker=look.marker, dashes=look.dashes)
        for name, look in looks.items()
    }
    for entry in entries.values():
        entry.set(**changes)
    return entries


def patches(colours: Mapping[str, str]) -> dict[str, Artist]:
    """Return a legend's entries for bars, by name: a patch in the colour of each name."""
    return {name: Patch(color=colour) for name, colour in colours.items()}


def legend(figure: Figure, entries: Mapping[str, Artist], style: Style) -> None:
    """Draw a legend above all panels, in as many columns as fit, and make the figure higher by the legend's height."""
    parts = [name.split("\n") for name in entries]
    longest = _ENTRY_INCHES + _LETTER_INCHES * max(len(part) for name in parts for part in name)
    columns = max(1, min(len(entries), int((style.inches - _EDGES_INCHES) / longest)))
    rows = [parts[row :: -(-len(parts) // columns)] for row in range(-(-len(parts) // columns))]
    lines = sum(max(map(len, row)) for row in rows)
    figure.set_figheight(figure.get_figheight() + _LINE_INCHES * lines)
    figure.legend(list(entries.values()), list(entries), loc="outside upper left", ncols=columns)


def line_at(ax: Axes, value: float | None, *, across: bool) -> None:
    """Draw a faint line at ``value``, horizontal if ``across`` and otherwise vertical; no line if ``value`` is None."""
    if value is not None:
        (ax.axhline if across else ax.axvline)(value, color=theme.FAINT, lw=0.8, zorder=1)
