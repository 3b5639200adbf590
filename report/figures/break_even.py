"""Figure of break-even: a map of speed-ups over rate and batch, with the line at which they are 1."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure

from report.data import emulation, metrics
from report.data.metrics import Derived
from report.data.text import FEWEST_IN_WORDS, listed, sweeps_in_words
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, common_to
from report.figures.speed import KEPT

_MAP: Final = "RdBu"  # faster than the baseline is blue
_PALE: Final = 2.0  # so that numbers are legible on the farthest colours
_ROOM: Final = 1.6  # factor between the outermost rates and the frame


def _data(derived: Derived) -> pd.DataFrame:
    return metrics.beside_published(derived.pairs)[
        [*KEPT, "baseline", "baseline_seconds", "step_seconds", "speedup"]
    ]


def _clusters(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) of each number of nodes and ranks."""
    return [
        (f"{nodes}x{ranks} ranks", mine) for (nodes, ranks), mine in data.groupby(["nodes", "ranks_per_node"])
    ]


def _draw(data: pd.DataFrame) -> Figure:
    clusters = _clusters(data)
    batches = max(mine["tokens_per_rank"].nunique() for _, mine in clusters)
    height = chart_parts.bars_height(batches, row=0.62)
    figure, grid = chart_parts.panels(1, len(clusters), height=height * len(clusters))
    farthest = float(np.abs(np.log(data.groupby("cell")["speedup"].median())).max())
    for (ax,), (title, mine) in zip(grid, clusters, strict=True):
        rates = mine.groupby("cell")["achieved_mbit"].median()
        chart_parts.log_ticks(ax, [float(f"{rate:.2g}") for rate in rates])
        ax.set_xlim(rates.min() / _ROOM, rates.max() * _ROOM)
        _cells(ax, mine, max(farthest, 0.1))
        _contour(ax, mine)
        ax.set_ylabel("tokens per rank")
        ax.set_title(title)
    grid[-1][0].set_xlabel("achieved rate, Mbit/s")
    return figure


def _cells(ax: Axes, mine: pd.DataFrame, farthest: float) -> None:
    """A square of each measured rate and batch, with its speed-up."""
    batches = sorted(mine["tokens_per_rank"].unique())
    for _, group in mine.groupby("cell"):
        found = metrics.speedup(group).estimate
        rate, place = group["achieved_mbit"].median(), batches.index(group["tokens_per_rank"].iloc[0])
        ax.scatter(
            rate, place, 420, [np.log(found)], marker="s", cmap=_MAP, norm=CenteredNorm(0, _PALE * farthest),
            edgecolors=theme.FAINT, linewidths=0.6, zorder=2,
        )  # fmt: skip
        ax.annotate(f"{found:.2f}", (rate, place), ha="center", va="center", fontsize=7.5, zorder=3)
    ax.set_yticks(range(len(batches)), [str(batch) for batch in batches])
    ax.set_ylim(-0.7, len(batches) - 0.3)


def _contour(ax: Axes, mine: pd.DataFrame) -> None:
    """The rate at which both are equally fast, batch by batch, with its interval."""
    batches, at = sorted(mine["tokens_per_rank"].unique()), []
    low, high = ax.get_xlim()
    for row in metrics.break_even(mine).to_dict("records"):
        if np.isnan(row["break_even_mbit"]):
            continue
        place = batches.index(row["tokens_per_rank"])
        at += [(row["break_even_mbit"], place - 0.3), (row["break_even_mbit"], place + 0.3)]
        ends = row["break_even_low_mbit"], row["break_even_high_mbit"]
        if not np.isnan(ends).any():
            ax.plot(np.clip(ends, low, high), [place, place], color=theme.RULE, lw=1.2, zorder=4)
    if at:
        ax.plot(*zip(*at, strict=True), "-", color=theme.RULE, lw=1.2, zorder=4)


def _caption(data: pd.DataFrame) -> str:
    return (
        "Speed-up of ZeRO++ over ZeRO-3 at each measured rate and batch (geometric mean of the pairs). Red: "
        f"the rate at which both are equally fast, with its 95 % interval ({FEWEST_IN_WORDS}), by the line "
        "between the two measured rates on its sides; where there is none, all measured rates lie on one "
        f"side. Table Break-even has the numbers.{sweeps_in_words(data['sweep'])} "
        f"{emulation.note(data['link_kind'])}{common_to(data)}"
    )


def _alt(data: pd.DataFrame) -> str:
    told = [
        f"{row['nodes']}x{row['ranks_per_node']} ranks, {row['tokens_per_rank']} tokens: "
        + ("not crossed" if np.isnan(row["break_even_mbit"]) else f"{row['break_even_mbit']:.3g} Mbit/s")
        for row in metrics.break_even(data).to_dict("records")
    ]
    return f"Break-even rate: {listed(told)}."


PLOTS: Final = (Plot("break_even_map", "Where ZeRO++ pays", _draw, _caption, _alt, _data, "bandwidth"),)
