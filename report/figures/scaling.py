"""Figures of size: throughput by number of nodes, and the largest model that one memory limit allows."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from report.data import metrics, scaling
from report.data.contender import NAMES
from report.data.frames import groups
from report.data.text import listed, number
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_contender, common_to, contenders, peers_note


def _draw_scaling(data: pd.DataFrame) -> Figure:
    panels = groups(data, ["kind", "title"])
    figure, grid = chart_parts.panels(
        len(panels), height=2.9, width=max(theme.inches(), 3.4 * len(panels)), sharey=True
    )
    looks = chart_parts.looks_of(contenders(data))
    for ax, ((_, title), mine) in zip(grid[0], panels, strict=True):
        endings = []
        for _, contender, group in by_contender(mine):
            speeds = group.set_index("nodes")["tokens_per_second"]
            middle = speeds.groupby(level=0).agg(metrics.geometric)
            endings.append(chart_parts.trend(ax, middle, speeds, contender, looks[contender]))
        ax.set_title(title)
        ax.set_xticks(sorted(mine["nodes"].unique()))
        ax.set_xlabel("nodes")
        ax.set_ylim(0, data["tokens_per_second"].max() * 1.08)
        if ax is grid[0][-1]:
            chart_parts.label_ends(ax, endings, 2.1)
    grid[0][0].set_ylabel("tokens/s of all ranks")
    return figure


def _scaling_caption(data: pd.DataFrame) -> str:
    return (
        "Throughput of all ranks by number of nodes: with as many tokens a rank (weak scaling), and with as "
        "many in all, dealt to more ranks (strong). Lines: geometric means over repeats; dots: trials. On "
        "one machine all nodes share its processors: a further node brings a link of its own and further "
        "ranks, not further arithmetic, so ideal weak scaling is no straight line through the origin here. "
        f"{peers_note(data)}{common_to(data)}"
    )


def _scaling_alt(data: pd.DataFrame) -> str:
    told = []
    for (title, contender), group in groups(data, ["title", "contender"]):
        middle = group.groupby("nodes")["tokens_per_second"].agg(metrics.geometric)
        points = listed([f"{value:.0f} on {nodes}" for nodes, value in middle.items()])
        told.append(f"{contender}, {title}: {points}")
    return f"Lines of tokens per second over nodes. {'; '.join(told)}."


def _draw_largest(data: pd.DataFrame) -> Figure:
    shown = by_contender(data)
    figure, ((ax,),) = chart_parts.panels(1, height=chart_parts.bars_height(len(shown), row=0.36))
    chart_parts.row_names(ax, [contender for _, contender, _ in shown])
    for place, (strategy, contender, group) in enumerate(shown):
        largest, smallest = scaling.largest(group)
        ax.barh(place, largest, 0.62, color=theme.colour(strategy, contender))
        ax.plot(smallest, place, "x", color=theme.INK, ms=6, label="" if place else "next size: not run")
        words = f"{number(3)(largest)} M" + (f", not {number(3)(smallest)} M" if smallest > 0 else "")
        chart_parts.beside(ax, np.fmax(largest, smallest), place, words, points=8)
    ax.set_xlim(0, np.nanmax([scaling.largest(group) for _, _, group in shown]) * 1.25)
    ax.set_xlabel("largest model that trained, million parameters")
    chart_parts.legend_above(figure, ax, columns=1, side="right")
    return figure


def _largest_caption(data: pd.DataFrame) -> str:
    limits = listed([f"{size / 2**20:g} MiB" for size in sorted(data["limit_bytes"].unique())])
    rows = data.drop_duplicates("nodes")
    places = listed([f"{row['nodes']}x{row['ranks_per_node']} ranks" for row in rows.to_dict("records")])
    return (
        f"The largest model whose training kept within {limits} a rank on {places}: masters, gradients, "
        "optimizer state, copies and gathered weights by formula before the run, and as the engine counted "
        "them after it; activations and buffers of the wire are not in it. A cross marks the next larger "
        "size of the suite, which was recorded as a failure with its numbers and not run."
    )


def _largest_alt(data: pd.DataFrame) -> str:
    told = [
        "{} {:.3g} M, not {:.3g} M".format(contender, *scaling.largest(group))
        for _, contender, group in by_contender(data)
    ]
    return f"Bars of the largest model that trained: {listed(told)}. {NAMES['zero3']} shards all states."


PLOTS: Final = (
    Plot("scaling", "More nodes", _draw_scaling, _scaling_caption, _scaling_alt, scaling.by_nodes, "nodes"),
    Plot(
        "largest_model",
        "The largest model under a memory limit",
        _draw_largest,
        _largest_caption,
        _largest_alt,
        scaling.under_limits,
        "stages",
    ),
)
