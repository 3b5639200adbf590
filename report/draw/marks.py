"""Defines marks, the ways to draw a tidy table: rows, lines, stacked bars, a Pareto front, or a timeline.

Each mark also writes the sentences of the caption that say what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas.api.types import is_integer_dtype

from harness.records.confidence_intervals import Interval
from report.data import caveats
from report.data.frames import groups
from report.data.text import listed, number, sentence
from report.draw import axes, theme
from report.draw.names_of_rows import by_configuration, by_setting, configurations
from report.draw.theme import Look, Style

_THREE_DIGITS: Final = number(3)
_FEW: Final = 8  # an axis with fewer integer values has a tick at each of them
_PANEL_INCHES: Final = 2.3
_MOST_SETTINGS: Final = 8  # a figure with rows shows at most so many settings
_COLUMNS: Final = 3  # largest number of panels in a row, for figures that have a single measure
_MARKERS: Final = {"o": "circles", "x": "crosses", "|": "strokes"}
_DOT: Final = {"s": 9, "color": theme.INK, "linewidth": 0.3, "zorder": 2.5, "legend": False}


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that a figure shows: its column of raw values, its label and definition, and how it is drawn."""

    column: str
    label: str  # label of the quantity's axis, with the unit; ``{base}`` stands for the baseline's name
    says: str  # definition of the quantity, which becomes a part of a sentence in the caption
    # Returns the value of one configuration in one setting, with its interval, from the configuration's rows.  If it is
    # None, the value is the median of the column, without an interval.
    estimate: Callable[[pd.DataFrame], Interval] | None = None
    form: Callable[[float], str] = _THREE_DIGITS  # formats an estimate
    bar: bool = True  # whether values are drawn as lengths from 0; if not, as points on any axis
    log: bool = False  # whether the quantity's axis is logarithmic
    line: float | None = None  # value at which a reference line is drawn; None: no line
    stroke: str = ""  # another column, whose median is drawn as a stroke across the bar; empty: none
    stroke_label: str = ""  # name of the stroke in the caption; by default the name of its column
    dot: str = "trial"  # what one dot stands for

    def interval(self, group: pd.DataFrame) -> Interval:
        """Return the quantity's value with its interval; ``group`` are rows of one configuration in one setting.

        A setting is what a trial runs in: cluster, model, batch and so on.
        """
        if self.estimate is not None:
            return self.estimate(group)
        return Interval(float(group[self.column].median()), math.nan, math.nan, len(group))


def _measured(measures: Sequence[Measure], data: pd.DataFrame) -> list[Measure]:
    """Return the measures that have a value in any row of ``data``, with ``{base}`` replaced in their labels.

    A measure is a quantity that the figure shows (:class:`Measure`).  ``{base}`` becomes the name of the baseline, or
    the names if ``data`` has several baselines.
    """
    base = listed(list(data["baseline_configuration"].unique())) if "baseline_configuration" in data else ""
    known = [measure for measure in measures if data[measure.column].notna().any()]
    return [replace(measure, label=measure.label.format(base=base)) for measure in known]


def _definitions(measures: Sequence[Measure]) -> str:
    """Return the sentence of a caption that defines the measures: ``label: definition; label: definition.``"""
    return sentence("; ".join(f"{measure.label}: {measure.says}" for measure in measures if measure.says))


def _dots(measures: Sequence[Measure]) -> str:
    """Return words that say what one dot of a figure stands for: ``one trial``.

    A measure is a quantity that the figure shows (:class:`Measure`).  If a dot stands for a trial in some measures and
    for something else in other measures, each meaning is followed by its measures in parentheses: ``one trial (step
    time), or one pair of trials (speed-up)``.
    """
    labels: dict[str, list[str]] = {}
    for measure in measures:
        labels.setdefault(measure.dot, []).append(measure.label)
    if len(labels) == 1:
        return f"one {measures[0].dot}"
    return ", or ".join(f"one {dot} ({listed(names)})" for dot, names in labels.items())


def _strokes(measures: Sequence[Measure], mark: str) -> str:
    """Return the last clause of a caption's sentence, which says what the short strokes in the figure stand for.

    For example, ``; strokes ( | ): scheduled step / measured step``.  ``mark`` are the words before the colon, here
    ``strokes ( | )``.  The text is empty if no measure (:class:`Measure`) has strokes.
    """
    shown = [measure for measure in measures if measure.stroke]
    return "".join(f"; {mark}: {each.stroke_label or each.stroke.replace('_', ' ')}" for each in shown)


@dataclass(frozen=True, slots=True)
class Rows:
    """Draws a panel for each setting and each measure, with a row for each configuration.

    A setting is the cluster, model, batch and so on, and a measure is a quantity such as step time (:class:`Measure`).
    A row shows the configuration's value of the measure as a bar or point, its interval as a line, and each raw value
    as a dot.  The panels of one setting are side by side.  The panels of one measure are above one another, and their x
    axes have the same limits.
    At most :data:`_MOST_SETTINGS` settings are drawn, the first ones.
    """

    measures: tuple[Measure, ...]

    def draw(self, data: pd.DataFrame, style: Style) -> Figure:
        """Draw the table ``data``, which must have rows, and return the figure."""
        settings = by_setting(data)[:_MOST_SETTINGS]
        drawn = pd.concat([rows for _, rows in settings])
        shown = _measured(self.measures, drawn)
        heights = [axes.rows_inches(rows["configuration"].nunique()) for _, rows in settings]
        figure, panels = axes.grid(
            style, len(settings), len(shown), heights, share_y=True, around=axes.AROUND_INCHES
        )
        for row, (title, rows) in zip(panels, settings, strict=True):
            named = by_configuration(rows)
            names = [name + caveats.rates(group) for name, group in named]
            looks = [style.look(name) for name, _ in named]
            for ax, measure in zip(row, shown, strict=True):
                if rows[measure.column].notna().any():
                    _row_panel(ax, [group for _, group in named], measure, looks)
                axes.name_rows(ax, names, first=ax is row[0] or style.narrow)
                last = row is panels[-1] or style.narrow
                ax.set_xlabel(axes.wrapped(measure.label, 60 // len(shown)) if last else "")
                ax.tick_params(axis="x", labelbottom=last)
            row[0].set_title(title)
        for of_measure, measure in zip(zip(*panels, strict=True), shown, strict=True):
            if not measure.log:
                axes.room(of_measure, zero=measure.bar)
                continue
            values = drawn[measure.column].astype(float)
            for ax in of_measure:
                ax.set_xlim(values.min() / 1.5, values.max() * 3)
                axes.log_ticks(ax, "x")
        return figure

    def says(self, data: pd.DataFrame) -> str:
        """Return the caption's sentences on the measures, on dots and strokes, and on settings that are not drawn."""
        shown = _measured(self.measures, data)
        text = f"{_definitions(shown)} Each dot is {_dots(shown)}{_strokes(shown, 'strokes ( | )')}."
        count = data["setting"].nunique() if "setting" in data else 0
        if count > _MOST_SETTINGS:
            text += f" The figure shows the first {_MOST_SETTINGS} of {count} settings; its CSV has all."
        return text


def _row_panel(ax: Axes, rows: Sequence[pd.DataFrame], measure: Measure, looks: Sequence[Look]) -> None:
    """Draw one measure (a quantity such as step time) into a panel, with a row for each configuration.

    ``rows`` are the raw values of each configuration, and ``looks`` the colours and markers of the configurations.
    """
    places, column = np.arange(len(rows)), measure.column
    ends = pd.DataFrame([measure.interval(group) for group in rows])
    ends["stroke"] = [group[measure.stroke].median() if measure.stroke else np.nan for group in rows]
    colours = [look.colour for look in looks]
    common: dict[str, Any] = {"y": places, "hue": places, "palette": colours, "legend": False, "ax": ax}
    if measure.bar:
        sns.barplot(ends, x="estimate", **common, orient="h", width=0.62, saturation=1, native_scale=True)
    else:
        markers = [look.marker for look in looks]
        sns.scatterplot(ends, x="estimate", **common, style=places, markers=markers, s=40, zorder=3)
    inks = [theme.INK] * len(rows) if measure.bar else colours
    ax.hlines(places, ends["low"], ends["high"], colors=inks, zorder=3)
    values = pd.concat([group[[column]].astype(float).assign(place=row) for row, group in enumerate(rows)])
    sns.scatterplot(x=values[column], y=values["place"] + 0.22, ax=ax, **_DOT)
    if measure.stroke:
        ax.plot(ends["stroke"], places, "|", color=theme.INK, ms=11, mew=1.3, zorder=3)
    axes.line_at(ax, measure.line, across=False)
    ends["most"] = values.groupby("place")[column].max()
    right = ends[["estimate", "high", "most", "stroke"]].max(axis=1)
    for place, (end, estimate) in enumerate(zip(right, ends["estimate"], strict=True)):
        axes.beside(ax, end, place, measure.form(estimate))


@dataclass(frozen=True, slots=True)
class Lines:
    """Draws measures over the column ``x``, with a line for each configuration or for each value of column ``lines``.

    A measure is a quantity such as step time (:class:`Measure`).  There is a panel for each measure and each value of
    the table's column ``panel``.  With several measures, each measure has a row of panels.  With a single measure, its
    panels are in rows of at most :data:`_COLUMNS`.
    """

    x: str  # column of the x axis
    label: str  # label of the x axis; if it is empty, the titles of the panels are the labels of their x axes
    measures: tuple[Measure, ...]
    lines: str = "configuration"  # column with the names of the lines
    # Rows of a line with equal values in this column make one point, at the median of their ``x``.  If it is empty, the
    # column ``x`` is used.
    points: str = ""
    log: bool = False  # whether the x axis is logarithmic
    band: bool = False  # whether bands show the range of the raw values; if not, each raw value is a dot

    def draw(self, data: pd.DataFrame, style: Style) -> Figure:
        """Draw the table ``data``, which must have rows and a column ``panel``, and return the figure."""
        shown, titles = _measured(self.measures, data), list(data["panel"].unique())
        looks = theme.shades([str(name) for name in data[self.lines].unique()])
        if self.lines == "configuration":
            looks = {name: style.look(name) for name in configurations(data)}
        rows = -(-len(titles) // (_COLUMNS if len(shown) == 1 else len(titles)))
        columns, rows = -(-len(titles) // rows), rows * len(shown)
        figure, panels = axes.grid(style, rows, columns, [_PANEL_INCHES] * rows)
        places = [(measure, title) for measure in shown for title in titles]
        flat = [ax for row in panels for ax in row]
        for ax in flat[len(places) :]:
            ax.set_axis_off()
        for ax, (measure, title) in zip(flat, places, strict=False):
            group = data[data["panel"] == title].dropna(subset=[self.x, measure.column])
            if len(group):
                self._panel(ax, group, measure, looks)
            ax.set_title(axes.wrapped(title) if self.label and measure is shown[0] else "")
            below = self.label or axes.filled(title, style.inches / columns)
            ax.set_xlabel("" if self.label and not style.narrow else below)
            ax.set_ylabel(axes.wrapped(measure.label) if title == titles[0] or style.narrow else "")
            if measure.bar:
                ax.set_ylim(0, 1.08 * float(data[measure.column].max()))
        if self.label and not style.narrow:
            figure.supxlabel(self.label, fontsize=9)
        axes.legend(figure, axes.lines(looks), style)
        return figure

    def _panel(self, ax: Axes, rows: pd.DataFrame, measure: Measure, looks: Mapping[str, Look]) -> None:
        x, y, key = self.x, measure.column, self.points or self.x
        rows = rows.assign(line=rows[self.lines].astype(str))
        pairs = groups(rows, ["line", key])
        middles = [(line, group[x].median(), measure.interval(group).estimate) for (line, _), group in pairs]
        points = pd.DataFrame(middles, columns=["line", "x", "y"])
        names = [name for name in looks if (points["line"] == name).any()]
        colours = {name: looks[name].colour for name in names}
        sns.lineplot(
            points, x="x", y="y", hue="line", style="line", hue_order=names, style_order=names,
            palette=colours, markers={name: looks[name].marker for name in names},
            dashes={name: looks[name].dashes for name in names},
            estimator=None, markersize=5, linewidth=1.4, legend=False, ax=ax,
        )  # fmt: skip
        if self.band:
            for (line,), group in groups(rows, ["line"]):
                ends = group.groupby(key)[[x, y]].agg(["median", "min", "max"])
                low, high = ends[y, "min"], ends[y, "max"]
                ax.fill_between(ends[x, "median"], low, high, color=colours[line], alpha=0.15, lw=0)
        else:
            dots: dict[str, Any] = {"s": 7, "alpha": 0.5, "linewidth": 0, "legend": False}
            sns.scatterplot(rows, x=x, y=y, hue="line", palette=colours, ax=ax, **dots)
        if measure.stroke:
            strokes = rows.groupby(["line", key])[[x, measure.stroke]].median()
            for line, group in strokes.groupby(level=0):
                ax.plot(group[x], group[measure.stroke], "_", color=looks[str(line)].colour, ms=9, mew=1.3)
        axes.line_at(ax, measure.line, across=True)
        if "rates_differ" in rows:
            for _, setting in rows[rows["rates_differ"]].groupby("setting"):
                above = (setting[x].median(), setting[y].max())
                ax.annotate(caveats.RATES, above, (0, 4), textcoords="offset points", ha="center")
        if is_integer_dtype(rows[x]) and points["x"].nunique() < _FEW:
            ax.set_xticks(sorted(points["x"].unique()))
        if self.log:
            axes.log_ticks(ax, "x", rows.groupby(key)[x].median())
        if measure.log:
            axes.log_ticks(ax, "y")

    def says(self, data: pd.DataFrame) -> str:
        """Return the caption's sentences that define the measures, and that say what markers, dots and bands show."""
        shown = _measured(self.measures, data)
        raw = (
            "bands reach from the lowest to the highest value"
            if self.band
            else f"each small dot is {_dots(shown)}"
        )
        return f"{_definitions(shown)} Markers show the values defined above, and {raw}{_strokes(shown, 'dashes')}."


@dataclass(frozen=True, slots=True)
class Stacked:
    """Draws a stacked bar for each configuration, and marks on the bar that show totals from other sources.

    In the table, rows whose ``kind`` is "bar" are the parts of a bar.  Rows of another kind, such as "predicted", are
    totals.
    """

    value: str  # column with the lengths of parts and the positions of totals
    label: str  # label of the axis, with the unit
    says_parts: str  # the caption's sentence on the bars, without its full stop
    parts: tuple[str, ...]  # names of parts in the order of stacking; parts that are not named here follow
    # For each kind of total: its marker, the marker's colour, and its meaning.
    also: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    # The average over trials that is drawn; the page's tables print the same average.
    middle: Literal["mean", "median"] = "median"

    def draw(self, data: pd.DataFrame, style: Style) -> Figure:
        """Draw the table ``data`` with a panel for each value of its column ``panel``, and return the figure."""
        held = set(data[(data["kind"] == "bar") & data[self.value].gt(0)]["part"])
        known = [part for part in self.parts if part in held]
        colours = theme.of_parts([*known, *sorted(held - set(known))])
        rows = groups(data, ["panel"])
        heights = [
            axes.AROUND_INCHES + axes.rows_inches(group["configuration"].nunique()) for _, group in rows
        ]
        figure, panels = axes.grid(style, len(rows), 1, heights)
        for (ax,), ((title,), group) in zip(panels, rows, strict=True):
            self._panel(ax, group, colours)
            ax.set_title(title)
        panels[-1][0].set_xlabel(self.label)
        also = {kind: self.also[kind] for kind in self.also if kind in set(data["kind"])}
        looks = {kind: Look(colour, marker) for kind, (marker, colour, _) in also.items()}
        marks = axes.lines(looks, linestyle="none", markerfacecolor="none")
        axes.legend(figure, axes.patches(colours) | marks, style)
        return figure

    def _panel(self, ax: Axes, rows: pd.DataFrame, colours: dict[str, str]) -> None:
        names = configurations(rows)
        bars = rows[rows["kind"] == "bar"]
        wide = bars.pivot_table(index="configuration", columns="part", values=self.value, aggfunc=self.middle)
        wide = wide.reindex(index=names, columns=list(colours)).astype(float)
        if colours:
            looks = {"color": colours, "legend": False, "ec": "white", "lw": 0.5}
            wide.plot.barh(stacked=True, width=0.62, ax=ax, **looks)  # type: ignore[call-overload]
        ends = wide.sum(axis=1, min_count=1)
        totals = ends.copy()
        for kind, (marker, colour, _) in self.also.items():
            by_configuration = rows[rows["kind"] == kind].groupby("configuration")[self.value]
            middles = by_configuration.agg(self.middle).reindex(names)
            ax.plot(middles, range(len(names)), marker, color=colour, mfc="none", mew=1.2, ms=6)
            ends, totals = ends.combine(middles, np.fmax), totals.combine_first(middles)
        for place, (end, total) in enumerate(zip(ends, totals, strict=True)):
            axes.beside(ax, float(end), place, number(4)(float(total)))
        axes.name_rows(ax, names)
        axes.room([ax], zero=True, share=0.12)

    def says(self, data: pd.DataFrame) -> str:
        """Return the caption's sentences on the bars and the marks of totals."""
        also = [self.also[kind] for kind in self.also if kind in set(data["kind"])]
        marks = "".join(f"; {_MARKERS[marker]}: {meaning}" for marker, _, meaning in also)
        # Only the figure with the parts of a step shows means; its ``says_parts`` says how they are scaled.
        begin = "Bars and marks are medians over trials; the" if self.middle == "median" else "The"
        return f"{self.says_parts}{marks}. {begin} printed numbers are the lengths of the bars."


@dataclass(frozen=True, slots=True)
class Front:
    """Draws a point for each configuration, and the Pareto front of these points.

    A point's x is the configuration's median in column ``x``.  Its y is the configuration's value of a measure, such as
    the error (:class:`Measure`).
    """

    x: str  # column of the x axis
    label: str  # label of the x axis
    measures: tuple[Measure, ...]  # each has a panel in each setting
    log: bool = False  # whether ``x`` is on a logarithmic axis

    def draw(self, data: pd.DataFrame, style: Style) -> Figure:
        """Draw the table ``data`` with a row of panels for each of its settings, and return the figure."""
        shown, settings = _measured(self.measures, data), by_setting(data)
        figure, panels = axes.grid(
            style, len(settings), len(shown), [3.6 if self.log else 2.6] * len(settings)
        )
        for row, (title, rows) in zip(panels, settings, strict=True):
            for ax, measure in zip(row, shown, strict=True):
                known = rows.dropna(subset=[measure.column])
                middles = pd.DataFrame(
                    {name: self._middle(group, measure) for name, group in by_configuration(known)},
                    index=[self.x, measure.column],
                ).T
                ahead = front(middles).to_numpy().T
                ax.plot(*ahead, drawstyle="steps-post", color=theme.FAINT, lw=1.1, zorder=1.5)
                for name, group in by_configuration(known):
                    look = style.look(name)
                    dots = _DOT | {"color": look.colour, "s": 5}
                    sns.scatterplot(group, x=self.x, y=measure.column, ax=ax, **dots)
                    ax.plot(*middles.loc[name], look.marker, color=look.colour, mec="white", mew=0.5)
                axes.line_at(ax, measure.line, across=True)
                if measure.log:
                    ax.set_ylim(known[measure.column].min() / 2, known[measure.column].max() * 2)
                    axes.log_ticks(ax, "y")
                if self.log:
                    ax.set_xlim(rows[self.x].min() / 1.2, rows[self.x].max() * 1.2)
                    axes.log_ticks(ax, "x")
                else:
                    ax.set_xlim(0, rows[self.x].max() * 1.08)
                ax.set_xlabel(self.label)
                ax.set_ylabel(measure.label)
            row[0].set_title(title)
        looks = {axes.wrapped(name, 30, most=40): style.look(name) for name in configurations(data)}
        axes.legend(figure, axes.lines(looks, linestyle="none"), style)
        return figure

    def _middle(self, rows: pd.DataFrame, measure: Measure) -> list[float]:
        """Return x and y of a configuration's point, from the configuration's rows."""
        return [float(rows[self.x].median()), measure.interval(rows).estimate]

    def says(self, data: pd.DataFrame) -> str:
        """Return the caption's sentences on the measures and the front."""
        measures = _definitions(_measured(self.measures, data))
        return (
            f"{measures} Each marker is a configuration, at the median of its bytes, and each dot is one trial. The "
            "grey line is the Pareto front: a configuration lies on it if no other configuration is lower in one of "
            "the two quantities and at most equal in the other."
        )


def front(points: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a table with two columns (bytes, value) that are on its Pareto front, ordered by bytes.

    A row is on the front if no other row is lower in one column and at most equal in the other.  Of rows that are equal
    in both columns, only the first is returned.
    """
    ordered = points.sort_values(list(points.columns), kind="stable")
    values = ordered.iloc[:, 1]
    return ordered[values < values.cummin().shift(fill_value=np.inf)]


@dataclass(frozen=True, slots=True)
class Lanes:
    """Draws a traced step as a timeline, with one bar for each span of time.

    Spans of the same kind of work, such as computation or waiting, are drawn in one row, which is called a lane.  There
    is a panel for each value of the table's column ``panel``.
    """

    lanes: tuple[str, ...]  # names of the lanes, from top to bottom

    def draw(self, data: pd.DataFrame, style: Style) -> Figure:
        """Draw the table ``data``, one bar from ``begin`` to ``end`` (in seconds) for each row; return the figure."""
        rows, colours = groups(data, ["panel"]), theme.of_parts(self.lanes)
        height = 0.35 + 0.13 * len(self.lanes)
        figure, panels = axes.grid(style, len(rows), 1, [height] * (len(rows) - 1) + [height + 0.25])
        for (ax,), ((title,), group) in zip(panels, rows, strict=True):
            for place, lane in enumerate(self.lanes):
                spans = group[group["lane"] == lane]
                bars = list(zip(1e3 * spans["begin"], 1e3 * (spans["end"] - spans["begin"]), strict=True))
                ax.broken_barh(bars, (place - 0.45, 0.9), color=colours[lane], lw=0)
            ax.set_ylim(len(self.lanes) - 0.5, -0.5)
            ax.set_yticks([])
            ax.grid(visible=False, axis="y")
            ax.set_xlim(1e3 * data["begin"].min(), 1e3 * data["end"].max())
            ax.set_title(title)
        panels[-1][0].set_xlabel("ms")
        axes.legend(figure, axes.patches(colours), style)
        return figure

    def says(self, data: pd.DataFrame) -> str:
        """Return the caption's sentence: the texts in the table's column ``summary``, separated by semicolons."""
        return f"{'; '.join(data['summary'].unique())}."
