"""Figures of speed over links: throughput, speed-up, parity with published numbers."""

from __future__ import annotations

from itertools import cycle
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.records.confidence_intervals import FEWEST
from report.data import emulation, footnotes, metrics, published
from report.data.contender import PROPOSED
from report.data.metrics import Derived
from report.data.text import FEWEST_IN_WORDS, listed, span, sweeps_in_words
from report.draw import chart_parts, theme
from report.draw.figure_definition import (
    Plot,
    by_cell_and_contender,
    by_contender,
    common_to,
    contenders,
    peers_note,
)

_PANEL_INCHES: Final = 2.35
KEPT: Final = [
    "id", "strategy", "contender", "place", "first", "cell", "where", "sweep", "seed", "repeat", "nodes",
    "ranks_per_node", "tokens_per_rank", "rate_mbit", "achieved_mbit", "link_kind",
]  # fmt: skip


def _by_size(data: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) of each panel: a batch per rank on a number of nodes and ranks."""
    place = ["nodes", "ranks_per_node"]
    several = len(data[place].drop_duplicates()) > 1
    return [
        (f"{tokens} tokens per rank" + (f",\n{nodes}x{ranks} ranks" if several else ""), mine)
        for (nodes, ranks, tokens), mine in data.groupby([*place, "tokens_per_rank"])
    ]


def _lines(ax: Axes, data: pd.DataFrame, value: str) -> list[chart_parts.Ending]:
    """Draw one line per contender through its cells' middles, raw values as dots; returns the end labels."""
    looks = chart_parts.looks_of(contenders(data))
    return [_line(ax, mine, value, name, looks[name]) for _, name, mine in by_contender(data)]


def _line(ax: Axes, data: pd.DataFrame, value: str, name: str, look: chart_parts.Look) -> chart_parts.Ending:
    """Draw a line through the cells' geometric means of ``value``, as in the Summary; medians of shares."""
    cells = data.groupby("cell")
    middle = cells[value].median() if value == "share" else cells[value].agg(metrics.geometric)
    middle = middle.set_axis(cells["achieved_mbit"].median()).sort_index()
    return chart_parts.trend(ax, middle, data.set_index("achieved_mbit")[value], name, look)


def _rate_axis(ax: Axes, data: pd.DataFrame) -> None:
    rates = data.groupby("cell")["achieved_mbit"].median()
    chart_parts.log_ticks(ax, [float(f"{rate:.2g}") for rate in rates])


def _mark_differing(ax: Axes, data: pd.DataFrame, value: str) -> None:
    """Mark each cell of a panel over rates whose links achieved different rates."""
    for _, cell in data[data["rates_differ"]].groupby("cell"):
        at = (cell["achieved_mbit"].median(), cell[value].max())
        ax.annotate(footnotes.RATES, at, (0, 4), textcoords="offset points", ha="center")


def differing_in_words(data: pd.DataFrame) -> str:
    """Caption text for that mark, if it is drawn."""
    return f" {footnotes.RATES_IN_WORDS}" if data["rates_differ"].any() else ""


def _throughput_data(derived: Derived) -> pd.DataFrame:
    return metrics.several_rates(derived.trials)[[*KEPT, "step_seconds", "tokens_per_second", "rates_differ"]]


def _draw_throughput(data: pd.DataFrame) -> Figure:
    sizes = _by_size(data)
    figure, places = chart_parts.panels_of(len(sizes), min(len(sizes), 2), height=_PANEL_INCHES)
    for ax, (title, mine) in zip(places, sizes, strict=True):
        _rate_axis(ax, mine)
        endings = _lines(ax, mine, "tokens_per_second")
        ax.set_ylim(0, mine["tokens_per_second"].max() * 1.08)
        _mark_differing(ax, mine, "tokens_per_second")
        ax.set_title(title)
        ax.set_ylabel("tokens/s")
        ax.set_xlabel("achieved rate of a node's link, Mbit/s")
        chart_parts.label_ends(ax, endings, _PANEL_INCHES * 0.72)
    return figure


def _throughput_caption(data: pd.DataFrame) -> str:
    return (
        "Tokens per second of all ranks over the rate that the link between nodes achieved (log scale). "
        f"Markers: geometric mean of repeats; small dots: each repeat. {peers_note(data)}{common_to(data)}"
        f"{differing_in_words(data)}"
    )


def _throughput_alt(data: pd.DataFrame) -> str:
    rates = data["achieved_mbit"]
    told = []
    for rate in (rates.min(), rates.max()):
        near = data[data["cell"] == data.loc[(rates - rate).abs().idxmin(), "cell"]]
        values = near.groupby("contender", sort=False)["tokens_per_second"].agg(metrics.geometric)
        told.append(
            f"near {rate:.3g} Mbit/s " + listed([f"{name} {value:.0f}" for name, value in values.items()])
        )
    return f"Lines of throughput over link rate; tokens per second: {'; '.join(told)}."


def baseline_of(data: pd.DataFrame) -> str:
    """Printed name of what the rows of pairs are compared with."""
    return listed(list(data["baseline_contender"].unique()))


def _speedup_data(derived: Derived) -> pd.DataFrame:
    rows = derived.pairs[derived.pairs["nodes"] > 1]
    if not (rows["id"] != rows["baseline"]).any():
        return rows.iloc[:0]
    kept = [
        *KEPT,
        "baseline",
        "baseline_contender",
        "baseline_seconds",
        "step_seconds",
        "schedule_seconds",
        "processor_seconds",
    ]
    kept += ["best_seconds", "speedup", "allowed", *metrics.SHARES, "alone", "rates_differ"]
    return rows[kept]


def _draw_speedup(data: pd.DataFrame) -> Figure:
    over_rates = metrics.several_rates(data)
    return _speedup_lines(over_rates) if len(over_rates) else _speedup_dots(data)


def _speedup_lines(data: pd.DataFrame) -> Figure:
    sizes = _by_size(data)
    rows = 2 if data["share"].notna().any() else 1
    beside = chart_parts.labels_inches([contender for _, contender in contenders(data)])
    panel = max(1.6, beside)  # without titles and ticks
    figure, grid = chart_parts.panels(
        len(sizes),
        rows,
        height=0.4 + (panel + 0.5) * rows,
        sharex=True,
        sharey=True,
    )
    for column, (title, mine) in enumerate(sizes):
        for row, value in enumerate(["speedup", "share"][:rows]):
            ax = grid[row][column]
            _rate_axis(ax, mine)
            endings = _lines(ax, mine.dropna(subset=[value]), value)
            ax.axhline(1, color=theme.FAINT, lw=0.8, zorder=1)
            if row == 0:
                ax.set_title(title)
                ax.set_ylim(0, data["speedup"].max() * 1.08)
                _mark_differing(ax, mine, "speedup")
            else:
                if _knows_processors(data):
                    _of_schedule(ax, mine)
                ax.set_ylim(0, max(1.1, data["share"].max() * 1.05))
            if column == len(sizes) - 1:
                chart_parts.label_ends(ax, endings, panel)
        grid[-1][column].set_xlabel("achieved rate, Mbit/s")
    grid[0][0].set_ylabel(f"speed-up over {baseline_of(data)}")
    if rows == 2:
        dash = "\n(dash: share\nof schedule)" if _knows_processors(data) else ""
        grid[1][0].set_ylabel(f"share of what is allowed{dash}")
    return figure


def _of_schedule(ax: Axes, data: pd.DataFrame) -> None:
    """Draw the schedule's share under the markers of the attainable share."""
    for strategy, contender, mine in by_contender(data):
        middle = mine.groupby("cell")[["achieved_mbit", "schedule_share"]].median()
        colour = theme.colour(strategy, contender)
        ax.plot(middle["achieved_mbit"], middle["schedule_share"], "_", color=colour, ms=9, mew=1.3, zorder=2)


def _speedup_dots(data: pd.DataFrame) -> Figure:
    rows = by_cell_and_contender(data)
    height = chart_parts.bars_height(len(rows), row=0.38)
    figure, ((left, right),) = chart_parts.panels(2, height=height, sharey=True)
    chart_parts.row_names(left, [name + footnotes.rates(group) for name, _, group in rows])
    for place, (_, strategy, group) in enumerate(rows):
        contender = str(group["contender"].iloc[0])
        colour, marker = theme.colour(strategy, contender), theme.marker(strategy, contender)
        found = metrics.speedup(group)
        chart_parts.error_bar(left, place, found, colour)
        chart_parts.value_dots(left, group["speedup"], place, colour)
        left.plot(found.estimate, place, marker, color=colour, mec="white", mew=0.6, zorder=4)
        left.annotate(
            f"{found.estimate:.2f}", (found.estimate, place), (0, 7), textcoords="offset points", ha="center",
            fontsize=7.5, color=colour,
        )  # fmt: skip
        left.plot(group["allowed"].median(), place, "|", color=theme.INK, ms=11, mew=1.3, zorder=3)
        share = group["share"].median()
        right.barh(place, share, 0.6, color=colour)
        chart_parts.beside(right, share, place, f"{share:.0%}{footnotes.above(share)}")
        if _knows_processors(data):
            alone = group["schedule_share"].median()
            right.plot(alone, place, "|", color=theme.INK, ms=11, mew=1.3, zorder=3)
    top = np.nanmax([data["speedup"].max(), data["allowed"].max()])
    top = max(top, left.dataLim.x1)
    left.set_xlim(0, top * 1.08)
    left.axvline(1, color=theme.FAINT, lw=0.8, zorder=1)
    right.axvline(1, color=theme.FAINT, lw=0.8, zorder=1)
    right.set_xlim(0, max(1.2, float(np.nan_to_num(data["share"].max())) * 1.15))
    chart_parts.same_rows(right)
    left.set_xlabel(f"speed-up over {baseline_of(data)} ( | : allowed)")
    stroke = "\n( | : share of schedule)" if _knows_processors(data) else ""
    right.set_xlabel(f"share of what is allowed{stroke}")
    return figure


def _speedup_caption(data: pd.DataFrame) -> str:
    shown = (
        "markers: geometric mean over pairs, small dots: single pairs; intervals are in the Summary table"
        if len(metrics.several_rates(data))
        else f"geometric mean {interval_in_words(data)}, dots are single pairs"
    )
    return (
        f"Speed-up: {baseline_of(data)}'s step seconds over the contender's, paired by repeat in the same "
        "cell; "
        f"{shown}. What is allowed: the scheduled step is the engine's schedule driven with "
        f"{_computation_in_words(data)} and a link that carries what the busiest node sent to others at the "
        f"achieved rate, one message after the other{_processors_in_words(data)}; the share is that step "
        "over the measured one. "
        f"{_above_in_words(data)}{peers_note(data)}{common_to(data)}{differing_in_words(data)}"
        f"{sweeps_in_words(data['sweep'])}"
    )


def _computation_in_words(data: pd.DataFrame) -> str:
    """Which computation the scheduled step has."""
    alone = data["alone"].eq(other=True)
    if alone.all():
        return "the computation of the model by itself (on all ranks at once, of the slowest)"
    measured = (
        "the computation measured (forward and backward less exposed communication, in each step of the rank "
        "for which it is longest)"
    )
    return f"{measured}, of some trials that of the model by itself," if alone.any() else measured


def _above_in_words(data: pd.DataFrame) -> str:
    """Caption text on shares above 1, if one is drawn; ends with a space."""
    drawn = data.groupby(["cell", "contender"])["share"].median()
    if not drawn.round(2).gt(1).any():
        return ""
    lines = len(metrics.several_rates(data))  # which have no marks
    return footnotes.above_in_words(data[[*metrics.SHARES[1:], "alone"]], marked=not lines)


def _knows_processors(data: pd.DataFrame) -> bool:
    """Whether the CPU bound is known for any trial, so that the schedule's bound is shown beside it."""
    return bool(data["processor_seconds"].notna().any())


def _processors_in_words(data: pd.DataFrame) -> str:
    """Caption text on the CPU bound beside the schedule's."""
    if not _knows_processors(data):
        return ""
    return (
        "; but no step is shorter than the processor seconds of all ranks, the engine's own included, over "
        "the processors that they share. What is allowed is the longer of the two"
    )


def interval_in_words(data: pd.DataFrame) -> str:
    """Caption text on the interval drawn and its number of pairs; few have none."""
    pairs = data.groupby(["cell", "contender"]).size()
    if pairs.max() < FEWEST:
        told = "one pair" if pairs.max() == 1 else span(pairs, "pair")
        return f"of {told}, so without an interval"
    few = f"; none of fewer than {FEWEST}" if pairs.min() < FEWEST else ""
    return f"with its 95 % interval (line; Student's t from {span(pairs, 'pair')}{few})"


def _speedup_alt(data: pd.DataFrame) -> str:
    told = [
        f"{contender} ({where}) {metrics.speedup(group).estimate:.2f}"
        for (where, contender), group in data.groupby(["where", "contender"], sort=False)
        if not group["id"].eq(group["baseline"]).all()
    ]
    return (
        f"Speed-up over {baseline_of(data)}: {listed(told[:12])}{', and others' if len(told) > 12 else ''}."
    )


def _beside_data(derived: Derived) -> pd.DataFrame:
    return metrics.beside_published(derived.pairs)[[*KEPT, "baseline", "speedup"]]


def _draw_beside(data: pd.DataFrame) -> Figure:
    theirs = published.throughput()
    figure, ((left, right),) = chart_parts.panels(2, height=2.9, sharey=True)
    _rate_axis(left, data)
    endings = []
    for (title, mine), colour in zip(_by_size(data), cycle(theme.BATCHES), strict=False):
        name = title.replace(" tokens per rank", " tok.").replace(" ranks", "").replace("\n", " ")
        endings.append(_line(left, mine, "speedup", name, chart_parts.Look(colour, "D", "-")))
    chart_parts.log_ticks(right, list(theirs["inter_node_gbps"]))
    published_ends = []
    colours = cycle((theme.PUBLISHED, theme.FAINT))
    for (tokens, group), colour in zip(theirs.groupby("tokens_per_gpu"), colours, strict=False):
        ratios, look = (
            group.set_index("inter_node_gbps")["speedup"],
            chart_parts.Look(colour, "o", "-", fill="white"),
        )
        medians = ratios.groupby(level=0).median()
        published_ends.append(chart_parts.trend(right, medians, ratios, f"{tokens} tok.", look))
    top = max(data["speedup"].max(), theirs["speedup"].max()) * 1.08
    for ax in (left, right):
        ax.set_ylim(0, top)
        ax.axhline(1, color=theme.FAINT, lw=0.8, zorder=1)
    left.set_title("here")
    right.set_title("published (384 V100)")
    left.set_ylabel("speed-up of ZeRO++ over ZeRO-3")
    left.set_xlabel("achieved rate, Mbit/s")
    right.set_xlabel("InfiniBand of a node, Gbit/s")
    chart_parts.label_ends(left, endings, 2.2)
    chart_parts.label_ends(right, published_ends, 2.2)
    return figure


def _beside_caption(data: pd.DataFrame) -> str:
    return (
        "Speed-up of ZeRO++ over ZeRO-3 by link rate and tokens per rank, beside the numbers printed in the "
        "ZeRO++ blog's figures (June 2023: 18 to 138 B parameters on 24 nodes of 16 V100; TFLOPs per GPU, "
        "rounded to integers there; dots are models, lines their medians). Rates and hardware differ by "
        "orders of magnitude: compare shapes, not positions. "
        f"{emulation.note(data['link_kind'])}{common_to(data)}"
    )


def _beside_alt(data: pd.DataFrame) -> str:
    ours, theirs = data["speedup"], published.throughput()["speedup"]
    return (
        f"Our speed-ups lie between {ours.min():.2f} and {ours.max():.2f}, the published between "
        f"{theirs.min():.2f} and {theirs.max():.2f}."
    )


def _parity_data(derived: Derived) -> pd.DataFrame:
    found = metrics.parity(derived.frames, derived.trials)
    kept = [*KEPT, "full_rate", "baseline", "achieved_mbit_baseline", "tokens_per_second"]
    return found[[*kept, "tokens_per_second_baseline", "parity"]]


def _draw_parity(data: pd.DataFrame) -> Figure:
    theirs = published.parity()
    keys = ["nodes", "ranks_per_node", "tokens_per_rank", "rate_mbit", "full_rate"]
    several = len(data[keys[:2]].drop_duplicates()) > 1
    found = list(data.groupby(keys))
    groups = [group for _, group in found]
    names = [
        (f"{nodes}x{ranks} ranks " if several else "")
        + f"{tokens} tokens/rank, {rate:g} over {full:g} Mbit/s"
        for (nodes, ranks, tokens, rate, full), _ in found
    ]
    names += [
        f"published {row.model}, {row.low_gbps:g} over {row.high_gbps:g} Gbit/s"
        for row in theirs.itertuples()
    ]
    figure, ((ax,),) = chart_parts.panels(1, height=chart_parts.bars_height(len(names)))
    chart_parts.row_names(ax, names)
    for place, group in enumerate(groups):
        found_here = metrics.parity_interval(group)
        middle = found_here.estimate
        chart_parts.error_bar(ax, place, found_here, theme.colour(PROPOSED))
        ax.plot(group["parity"], [place] * len(group), ".", color=theme.colour(PROPOSED), ms=3, alpha=0.5)
        ax.plot(middle, place, theme.marker(PROPOSED), color=theme.colour(PROPOSED), mec="white")
        furthest = float(np.nanmax([group["parity"].max(), found_here.high]))
        chart_parts.beside(ax, furthest, place, f"{middle:.2f}", points=8)
    for place, row in enumerate(theirs.itertuples(), start=len(groups)):
        ax.plot(float(str(row.parity)), place, "o", color=theme.PUBLISHED, mfc="white")
        chart_parts.beside(ax, float(str(row.parity)), place, f"{row.zeropp:g}/{row.zero3:g}", points=8)
    ax.axvline(1, color=theme.FAINT, lw=0.9, zorder=1)
    low, high = ax.dataLim.x0, ax.dataLim.x1
    ax.set_xlim(min(0.8, 0.92 * low), max(1.2, 1.12 * high))
    ax.set_xlabel("throughput of ZeRO++ at B/4 over ZeRO-3 at B")
    return figure


def _parity_caption(data: pd.DataFrame) -> str:
    return (
        "Parity: tokens per second of ZeRO++ on a link of a quarter of the rate over ZeRO-3 on the full one, "
        f"paired by repeat (geometric mean, {FEWEST_IN_WORDS}, dots are pairs); at 1, ZeRO++ makes up for a "
        f"four times slower link.{sweeps_in_words(data['sweep'])} Published: TFLOPs per GPU printed in the "
        "blog's figure 'bandwidth parity'. "
        f"{emulation.note(data['link_kind'])}{common_to(data)}"
    )


def _parity_alt(data: pd.DataFrame) -> str:
    told = [
        f"{tokens} tokens at {rate:g} Mbit/s {group.median():.2f}"
        for (tokens, rate), group in data.groupby(["tokens_per_rank", "full_rate"])["parity"]
    ]
    return f"Parity: {listed(told)}; published 1.06 and 1.00."


PLOTS: Final = (
    Plot("speedup", "Speed-up", _draw_speedup, _speedup_caption, _speedup_alt, _speedup_data),
    Plot(
        "throughput",
        "Throughput against bandwidth",
        _draw_throughput,
        _throughput_caption,
        _throughput_alt,
        _throughput_data,
        "bandwidth",
    ),
    Plot(
        "beside_published",
        "Speed-up beside the published",
        _draw_beside,
        _beside_caption,
        _beside_alt,
        _beside_data,
        "bandwidth",
    ),
    Plot(
        "parity",
        "Parity at a quarter of the bandwidth",
        _draw_parity,
        _parity_caption,
        _parity_alt,
        _parity_data,
        "bandwidth",
    ),
)
