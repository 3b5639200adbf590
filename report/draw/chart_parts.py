"""Drawing helpers for figures: panels, log axes, intervals, labels beside lines, stacked bars."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final, Literal

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.records.confidence_intervals import Interval
from report.draw import theme

LINE_POINTS: Final = 10.5  # height of a label, with its air
ROW_INCHES: Final = 0.3  # height of a bar with its air
LANES_INCHES: Final = 0.13 * (len(theme.LANES) + 1)  # height of the lanes of a rank
_APART: Final = 1.35  # least ratio of neighbouring ticks
_LABEL_LETTERS: Final = 20  # of a label in one line
_LETTER_INCHES: Final = 0.062  # of a legend's label, on the average
_COLUMN_INCHES: Final = 0.4  # of a legend, beside its labels: handle and gaps


def panels(
    columns: int,
    rows: int = 1,
    *,
    height: float,
    width: float | None = None,
    sharex: bool = False,
    sharey: bool = False,
    height_ratios: Sequence[float] | None = None,
) -> tuple[Figure, list[list[Axes]]]:
    """Create a figure of ``rows`` x ``columns`` axes, all in one column where the figure is narrow.

    Args:
        columns: of axes.
        rows: of axes.
        height: of all rows, in inches.
        width: in inches; :func:`theme.inches` by default.
        sharex: whether the axes of a column share their x axis; not where all stand in one.
        sharey: whether the axes of a row share their y axis.
        height_ratios: of the rows.
    """
    if theme.stacked():
        figure = Figure(figsize=(theme.inches(), height * columns), layout="constrained")
        ratios = [ratio for ratio in height_ratios or [1.0] * rows for _ in range(columns)]
        axes = figure.subplots(rows * columns, 1, squeeze=False, height_ratios=ratios).reshape(rows, columns)
        for row in axes if sharey else ():
            for ax in row[1:]:
                ax.sharey(row[0])
    else:
        figure = Figure(figsize=(width or theme.inches(), height), layout="constrained")
        axes = figure.subplots(
            rows,
            columns,
            squeeze=False,
            sharex="col" if sharex else "none",
            sharey="row" if sharey else "none",
            height_ratios=height_ratios,
        )
    return figure, [list(row) for row in axes]


def panels_of(
    count: int, columns: int, *, height: float, width: float | None = None
) -> tuple[Figure, list[Axes]]:
    """Create a figure of ``count`` axes in rows of ``columns``; ``height`` is that of a row, in inches."""
    if theme.stacked():
        columns = 1
    rows = -(-count // columns)
    figure, grid = panels(columns, rows, height=0.4 + rows * height, width=width)
    places = [ax for row in grid for ax in row]
    for ax in places[count:]:
        ax.set_axis_off()
    return figure, places[:count]


def bars_height(rows: int, *, room: float = 0.95, row: float = ROW_INCHES) -> float:
    """Height in inches of a figure with this many horizontal bars."""
    return room + row * max(rows, 2)


def log_ticks(ax: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic with plain labels at ``values`` that are far enough apart to be legible."""
    kept: list[float] = []
    for value in sorted(float(v) for v in values if v > 0):
        if not kept or value / kept[-1] >= _APART:
            kept.append(value)
    ax.set_xscale("log")
    _ticks(ax.xaxis, kept)


def _ticks(axis: Axis, at: Sequence[float]) -> None:
    """Plain labels at these places and no others."""
    axis.set_major_locator(FixedLocator(at))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def decades(ax: Axes, axis: str = "y") -> None:
    """Make a log axis with plain labels at decades, or more where too few are in view."""
    getattr(ax, f"set_{axis}scale")("log")
    part = ax.xaxis if axis == "x" else ax.yaxis
    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), tuple(range(1, 10))):  # the fewest that give two ticks
        ticks = [step * 10.0**power for power in powers for step in steps]
        if sum(low <= tick <= high for tick in ticks) > 1:
            break
    _ticks(part, ticks)
    (ax.set_xlim if axis == "x" else ax.set_ylim)(low, high)


@dataclass(frozen=True, slots=True)
class Look:
    """Style of one contender's line: its strategy's colour and marker, its own dashes."""

    colour: str
    marker: str
    line: str
    fill: str | None = None  # of the markers, with an edge in their colour; None fills them with it


def looks_of(contenders: Sequence[tuple[str, str]]) -> dict[str, Look]:
    """Styles by contender, from (strategy, contender): those of one strategy differ in all three."""
    dashes: dict[str, Iterator[str]] = defaultdict(lambda: cycle(("-", "--", ":", "-.")))
    return {
        contender: Look(
            theme.colour(strategy, contender), theme.marker(strategy, contender), next(dashes[strategy])
        )
        for strategy, contender in contenders
    }


def shades(count: int) -> list[str]:
    """Ordered colours for lines that are not policies, legible on white."""
    return list(sns.color_palette("viridis", count + 1).as_hex())[:count]  # the last is too pale


def error_bar(ax: Axes, at: float, found: Interval, colour: str) -> None:
    """Draw an interval as a horizontal line at height ``at``; NaN ends draw nothing."""
    if not math.isnan(found.low):
        ends = [found.low, found.high]
        ax.plot(ends, [at, at], color=colour, lw=1.4, solid_capstyle="butt", zorder=3)


def value_dots(ax: Axes, values: pd.Series[float], place: float, colour: str) -> None:
    """Draw each value as a dot under the row's interval, so that both are visible."""
    ax.plot(values, [place + 0.2] * len(values), "o", color=colour, ms=3, mec="white", mew=0.4, zorder=4)


def interval_bar(
    ax: Axes, place: float, found: Interval, values: pd.Series[float], *, colour: str, text: str
) -> None:
    """Draw a horizontal bar with its interval, each value as a dot, and its label to the right of all."""
    ax.barh(place, found.estimate, 0.66, color=colour)
    error_bar(ax, place, found, theme.INK)
    value_dots(ax, values, place, theme.INK)
    beside(ax, float(np.nanmax([found.estimate, found.high, values.max()])), place, text)


@dataclass(frozen=True, slots=True)
class Ending:
    """Label at the right end of a line: its position and its text."""

    x: float
    y: float
    text: str
    colour: str


def trend(ax: Axes, middle: pd.Series[float], values: pd.Series[float], name: str, look: Look) -> Ending:
    """Draw a line through middles and every value as a small dot, both by place; returns the line's label."""
    edge = {"mec": "white", "mew": 0.6} if look.fill is None else {"mfc": look.fill}
    ax.plot(middle.index, middle, look.line, color=look.colour, marker=look.marker, **edge)
    ax.plot(values.index, values, ".", color=look.colour, ms=2.5, alpha=0.45, zorder=1.9)
    return Ending(float(middle.index[-1]), float(middle.iloc[-1]), name, look.colour)


def label_ends(ax: Axes, endings: Sequence[Ending], height_inches: float) -> None:
    """Write labels to the right of an axes, beside the ends of their lines, without overlap.

    They stay within the height of the axes where it has room for all (:func:`labels_inches`), so that
    those of panels above one another do not meet.

    Args:
        ax: with its final limits and scales.
        endings: one per line.
        height_inches: about the height of the axes.
    """
    if not endings:
        return
    ax.autoscale_view()  # limits are worked out late otherwise
    to_axes = ax.transScale + ax.transLimits
    line = LINE_POINTS / 72 / height_inches
    ends = sorted(
        ((*to_axes.transform((e.x, e.y)), e) for e in endings), key=lambda found: (found[1], found[2].text)
    )
    names = [wrapped(end[2].text, _LABEL_LETTERS) for end in ends]
    sizes = [line * (1 + name.count("\n")) for name in names]
    heights = spread([float(end[1]) for end in ends], sizes, within=(0.0, 1.0))
    for (x, y, ending), name, height in zip(ends, names, heights, strict=True):
        ax.annotate(
            name,
            xy=(x, y),
            xytext=(1.05, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=ending.colour,
            va="center",
            ha="left",
            fontsize=8,
            linespacing=1.1,
            annotation_clip=False,
            arrowprops={  # from the middle of the name's left edge: else it would cross other names
                "arrowstyle": "-",
                "color": ending.colour,
                "lw": 0.5,
                "relpos": (0.0, 0.5),
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )


def labels_inches(names: Sequence[str]) -> float:
    """Least height in inches of an axes beside which :func:`label_ends` can write these labels."""
    return sum(1 + wrapped(name, _LABEL_LETTERS).count("\n") for name in names) * LINE_POINTS / 72


def spread(
    values: list[float], sizes: Sequence[float], within: tuple[float, float] | None = None
) -> list[float]:
    """Positions of labels without overlap, moved as little as possible from the wanted ones.

    Args:
        values: wanted centres, sorted.
        sizes: of the labels.
        within: limits of their edges; ignored if too narrow for all.
    """
    from scipy.optimize import isotonic_regression

    middles = np.cumsum(sizes) - np.asarray(sizes) / 2
    below = middles - middles[0]  # from the first middle to each, where labels touch
    starts = isotonic_regression(np.asarray(values) - below).x
    if within is not None and sum(sizes) <= within[1] - within[0]:
        starts = starts.clip(within[0] + sizes[0] / 2, within[1] - sizes[-1] / 2 - below[-1])
    return [float(start) for start in starts + below]


def stacked_bars(
    ax: Axes,
    values: pd.DataFrame,
    colours: Mapping[str, str],
    labels: Mapping[str, str],
    hatched: pd.DataFrame | None = None,
) -> None:
    """Draw stacked horizontal bars with their legend entries.

    Args:
        ax: where; its rows run from top to bottom.
        values: names as rows, parts as columns.
        colours: by part.
        labels: printed names of the parts; a part's own name where it has none.
        hatched: which values are hatched, as ``values``; None for none.
    """
    places, left = np.arange(len(values)), np.zeros(len(values))
    for part in values.columns:
        sizes = values[part].to_numpy(dtype=float)
        colour = colours.get(part, theme.OTHER)
        bars = ax.barh(places, sizes, 0.62, left=left, color=colour, edgecolor="white", linewidth=0.5)
        ax.barh(0, 0, color=colour, label=labels.get(part, part))  # the legend's, never hatched
        if hatched is not None:
            for bar, marked in zip(bars, hatched[part], strict=True):
                bar.set_hatch(theme.HATCH if marked else "")
        left += np.nan_to_num(sizes)
    row_names(ax, list(values.index))


def wrapped(name: str, limit: int = 24) -> str:
    """Break a long name into two lines, before its last parenthesis or after a comma."""
    if len(name) <= limit:
        return name
    for mark, kept in ((" (", "\n("), (", ", ",\n")):
        if mark in name:
            head, _, tail = name.rpartition(mark) if mark == " (" else name.partition(mark)
            return f"{head}{kept}{tail}"
    return name


def row_names(ax: Axes, names: Sequence[str]) -> None:
    """Write the names of horizontal bars, the first on top; keep only vertical grid lines."""
    ax.set_yticks(range(len(names)), [wrapped(name) for name in names])
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")


def same_rows(ax: Axes) -> None:
    """Give an axes the rows of its left neighbour, without names where that stands beside it."""
    ax.tick_params(axis="y", length=0, labelleft=theme.stacked())
    ax.grid(visible=False, axis="y")


def lanes(ax: Axes, spans: Iterable[tuple[str, float, float]]) -> None:
    """Draw what a rank did in a step, a row for each of :data:`theme.LANES`: (lane, begin, end) by x."""
    found: dict[str, list[tuple[float, float]]] = {lane: [] for lane in theme.LANES}
    for lane, begin, end in spans:
        found[lane].append((begin, end - begin))
    for place, (lane, bars) in enumerate(found.items()):
        ax.broken_barh(bars, (place - 0.45, 0.9), color=theme.LANES[lane], lw=0, label=lane)
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_yticks([])
    ax.grid(visible=False, axis="y")


def legend_above(figure: Figure, ax: Axes, *, columns: int, side: Literal["left", "right"] = "left") -> None:
    """Draw a legend above all panels, from the handles of ``ax``, at the left or the right.

    Over panels in one column there is room for one: the right one goes below them.
    """
    handles, labels = ax.get_legend_handles_labels()
    place: Literal["outside upper left", "outside upper right", "outside lower left"]
    place = "outside upper left" if side == "left" else "outside upper right"
    if theme.stacked():
        place = "outside upper left" if side == "left" else "outside lower left"
    figure.legend(
        handles,
        labels,
        loc=place,
        ncols=_fitting(labels, columns),
        handlelength=1.2,
        columnspacing=1.3,
    )


def legend_height(entries: int) -> float:
    """Height in inches that a figure needs above its panels for a legend of contenders, in three columns."""
    return LINE_POINTS * 1.1 / 72 * -(-entries // 3)


def _fitting(labels: Sequence[str], most: int) -> int:
    """Number of columns of a legend, at most ``most``, in which its labels are no wider than the figure."""
    for columns in range(most, 1, -1):
        parts = [
            part for part in np.array_split(np.array([len(label) for label in labels]), columns) if len(part)
        ]
        if sum(_COLUMN_INCHES + _LETTER_INCHES * int(part.max()) for part in parts) <= theme.inches():
            return columns
    return 1


def beside(ax: Axes, x: float, y: float, text: str, *, colour: str = theme.INK, points: float = 4) -> None:
    """Write a small label to the right of a bar's end or a point."""
    if math.isnan(x):
        return
    ax.annotate(
        text, (x, y), (points, 0), textcoords="offset points", va="center", fontsize=7.5, color=colour
    )
