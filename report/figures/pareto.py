"""Figure of error, loss and time against bytes between nodes, with the Pareto front of each."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.data import communication
from report.data.contender import is_baseline
from report.data.metrics import Derived
from report.data.text import listed, number
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_cell, by_contender, common_to, contenders

_FEWEST: Final = 4  # contenders of a cell
_KEPT: Final = ["id", "strategy", "contender", "place", "first", "cell", "where", "seed", "repeat"]
_VALUES: Final = {
    "vnmse": "vNMSE of what was sent",
    "excess": "loss less the baseline's, nats",
    "step_seconds": "seconds per step",
}


def _data(derived: Derived) -> pd.DataFrame:
    """One row per trial of cells with enough contenders whose bytes and errors are known."""
    found = derived.trials
    found = found.assign(
        m=found["sent_bytes"] / found["m_bytes"],
        vnmse=found["id"].map(_errors(derived)),
        excess=found["validation_loss"] - _losses_of_baseline(found),
    )
    found = found[found["m"].gt(0) & found["vnmse"].gt(0)]
    enough = found.groupby("cell")["contender"].transform("nunique") >= _FEWEST
    kept: pd.DataFrame = found[enough]
    return kept[[*_KEPT, "m", *_VALUES]]


def _errors(derived: Derived) -> pd.Series[float]:
    """The larger of weights' and gradients' error from end to end, at the last measured step, by trial."""
    found = communication.errors(derived.frames, derived.trials)
    found = found[found["hop"].isna() & found["repeated"].eq(1)]
    last = found[found["step"] == found.groupby("id")["step"].transform("max")]
    largest: pd.Series[float] = last.groupby("id")["vnmse"].max()
    return largest


def _losses_of_baseline(found: pd.DataFrame) -> pd.Series[float]:
    """Of each trial the baseline's loss in its cell and of its seed; NaN where there is none."""
    base = found[is_baseline(found)].groupby(["cell", "seed"])["validation_loss"].mean()
    keys = pd.MultiIndex.from_frame(found[["cell", "seed"]])
    return pd.Series(base.reindex(keys).to_numpy(), index=found.index)


def front(points: pd.DataFrame) -> list[int]:
    """Places of the rows of (bytes, value) that none beats in one and equals or beats in the other.

    In ascending order of bytes; of equal rows the first.
    """
    kept: list[int] = []
    best = np.inf
    for place in np.lexsort((points.iloc[:, 1], points.iloc[:, 0])):
        if points.iloc[place, 1] < best:
            best = points.iloc[place, 1]
            kept.append(int(place))
    return kept


def _draw(data: pd.DataFrame) -> Figure:
    values = [value for value in _VALUES if data[value].notna().any()]
    cells = by_cell(data)
    height = 0.45 + 2.6 * len(cells) + chart_parts.legend_height(data["contender"].nunique())
    figure, grid = chart_parts.panels(len(values), len(cells), height=height)
    for row, (title, mine) in zip(grid, cells, strict=True):
        looks = chart_parts.looks_of(contenders(mine))
        for ax, value in zip(row, values, strict=True):
            _panel(ax, mine.dropna(subset=[value]), value, looks)
            ax.set_xlabel("bytes between nodes, in M")
            ax.set_ylabel(_VALUES[value])
        row[0].set_title(title)
    chart_parts.legend_above(figure, grid[0][0], columns=3)
    return figure


def _panel(ax: Axes, mine: pd.DataFrame, value: str, looks: dict[str, chart_parts.Look]) -> None:
    """Every contender's median, each trial as a dot, and the front as steps."""
    middles = mine.groupby("contender", sort=False)[["m", value]].median()
    if value == "excess":
        ax.axhline(0, color=theme.FAINT, lw=0.8, zorder=1)
    ahead = middles.iloc[front(middles)]
    ax.plot(ahead["m"], ahead[value], drawstyle="steps-post", color=theme.FAINT, lw=1.1, zorder=1.5)
    for _, contender, group in by_contender(mine):
        look = looks[contender]
        ax.plot(group["m"], group[value], ".", color=look.colour, ms=2.5, alpha=0.45, zorder=1.9)
        ax.plot(
            *middles.loc[contender], look.marker, color=look.colour, mec="white", mew=0.5, ms=6,
            linestyle="none", label=contender,
        )  # fmt: skip
    if value == "vnmse":
        low, high = mine[value].min(), mine[value].max()
        ax.set_ylim(low / 2, high * 2)
        chart_parts.decades(ax)
    ax.set_xlim(0, mine["m"].max() * 1.08)


def _caption(data: pd.DataFrame) -> str:
    loss = (
        " The loss of the last validation, less the baseline's of the same seed."
        if data["excess"].notna().any()
        else ""
    )
    return (
        "What fewer bytes between nodes cost. Markers: medians over seeds and repeats; dots: trials; grey: "
        "the Pareto front of the medians, whom none beats in bytes without being worse in the other. Error: "
        "the larger of that of gradients against the exact mean and that of weights against their masters, "
        f"vNMSE = sum of squared errors / sum of squares, at the last measured step.{loss} {common_to(data)}"
    )


def _alt(data: pd.DataFrame) -> str:
    told = []
    for title, mine in by_cell(data):
        for value, words in _VALUES.items():
            middles = mine.dropna(subset=[value]).groupby("contender", sort=False)[["m", value]].median()
            ahead = middles.iloc[front(middles)]
            names = [
                f"{name} ({number(3)(row['m'])} M, {number(3)(row[value])})" for name, row in ahead.iterrows()
            ]
            if names:
                told.append(f"{words}{f', {title}' if title else ''}: {listed(names)}")
    return f"Pareto fronts. {'. '.join(told)}."


PLOTS: Final = (Plot("pareto", "What fewer bytes cost", _draw, _caption, _alt, _data, "bits"),)
