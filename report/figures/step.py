"""Figures of a step's time: what each technique takes off it, and where it goes."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from report.data import footnotes, metrics
from report.data.contender import COMBINATIONS, NAMES, PROPOSED, TECHNIQUES
from report.data.metrics import Derived
from report.data.text import listed, number, sweeps_in_words
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_cell, by_contender, common_to, contenders, peers_note
from report.figures.speed import KEPT, differing_in_words, interval_in_words


def _ablation_data(derived: Derived) -> pd.DataFrame:
    rows = derived.pairs[
        derived.pairs["strategy"].isin(COMBINATIONS)
        & (derived.pairs["contender"] == derived.pairs["strategy"].map(NAMES))
        & (derived.pairs["nodes"] > 1)
    ]
    ran = rows.groupby("cell")["strategy"].transform(lambda names: len(set(names) & set(COMBINATIONS)))
    kept = [
        *KEPT,
        "baseline",
        "baseline_contender",
        "baseline_seconds",
        "step_seconds",
        "speedup",
        "bytes_ratio",
        "sent_bytes",
    ]
    return rows[ran == len(COMBINATIONS)][[*kept, "rates_differ"]]


def _draw_ablation(data: pd.DataFrame) -> Figure:
    cells = by_cell(data)
    figure, grid = chart_parts.panels(
        2, len(cells), height=chart_parts.bars_height(8) * len(cells), sharey=True
    )
    for (left, right), (title, mine) in zip(grid, cells, strict=True):
        chart_parts.row_names(left, [contender for _, contender in contenders(mine)])
        for place, (strategy, contender, group) in enumerate(by_contender(mine)):
            found, colour = metrics.speedup(group), theme.colour(strategy, contender)
            told = f"{found.estimate:.2f}"
            chart_parts.interval_bar(left, place, found, group["speedup"], colour=colour, text=told)
            ratio = group["bytes_ratio"].median()
            right.barh(place, ratio, 0.66, color=colour)
            chart_parts.beside(right, ratio, place, f"{ratio:.3f}")
        left.set_xlim(0, left.dataLim.x1 * 1.18)
        right.set_xlim(0, mine["bytes_ratio"].max() * 1.18)
        chart_parts.same_rows(right)
        left.set_title(f"{title}{footnotes.rates(mine)}".strip())
    base = listed(list(data["baseline_contender"].unique()))
    grid[-1][0].set_xlabel(f"speed-up over {base}")
    grid[-1][1].set_xlabel(f"bytes between nodes over {base}'s")
    return figure


def _ablation_caption(data: pd.DataFrame) -> str:
    told = []
    for title, mine in by_cell(data):
        found = {s: metrics.speedup(g).estimate for s, g in mine.groupby("strategy")}
        product = float(np.prod([found[name] for name in TECHNIQUES]))
        where = f" ({title})" if title else ""
        told.append(f"{product:.2f} against {found[PROPOSED]:.2f}{where}")
    return (
        "All eight combinations of quantised weight gathers (qwZ), the weight copy inside a node (hpZ) and "
        "quantised two-hop gradient reductions (qgZ). Speed-up: geometric mean over repeats "
        f"{interval_in_words(data)}, dots are single pairs; bytes: ledger, all ranks. Product of the three "
        f"single speed-ups against all three measured together: {'; '.join(told)}. "
        f"{common_to(data)}{differing_in_words(data)}{sweeps_in_words(data['sweep'])}"
    )


def _ablation_alt(data: pd.DataFrame) -> str:
    told = [
        f"{contender} {metrics.speedup(group).estimate:.2f} with {group['bytes_ratio'].median():.3f} of the "
        "bytes"
        for (_, contender), group in data.groupby(["cell", "contender"], sort=False)
    ]
    return f"Bars of speed-up and bytes: {listed(told[:8])}."


def _split_data(derived: Derived) -> pd.DataFrame:
    parts = metrics.split(derived.frames)
    return derived.trials[[*KEPT, "step_seconds"]].merge(parts, on="id")


def _draw_split(data: pd.DataFrame) -> Figure:
    cells = by_cell(data)
    columns = 1 if len(cells) == 1 else 2
    most = max(mine["contender"].nunique() for _, mine in cells)
    figure, places = chart_parts.panels_of(len(cells), columns, height=0.55 + 0.26 * max(most, 2))
    for ax, (title, mine) in zip(places, cells, strict=True):
        table = mine.pivot_table(index="contender", columns="part", values="seconds", aggfunc="mean")
        names = [contender for _, contender in contenders(mine)]
        values = table.reindex(index=names, columns=[part for part in theme.PARTS if part in table.columns])
        steps = {
            name: metrics.step_interval(group.drop_duplicates("id")).estimate
            for _, name, group in by_contender(mine)
        }
        values = values.mul(pd.Series(steps) / values.sum(axis=1), axis=0)
        chart_parts.stacked_bars(ax, values, theme.PARTS, {})
        for place, total in enumerate(values.sum(axis=1)):
            chart_parts.beside(ax, float(total), place, number()(total))
        ax.set_xlim(0, values.sum(axis=1).max() * 1.12)
        ax.set_title(title)
    for ax in places[-columns:]:
        ax.set_xlabel("seconds per step")
    chart_parts.legend_above(figure, places[0], columns=6)
    return figure


def _split_caption(data: pd.DataFrame) -> str:
    return (
        "Where a step's time goes, on the slowest rank of each step: the step of the Summary, divided as the "
        "mean of all timed steps and repeats is. Pale parts are "
        f"exposed communication: time in which the rank only waited. {_unexposed_in_words(data)}"
        f"{peers_note(data)}{common_to(data)}"
    )


def _unexposed_in_words(data: pd.DataFrame) -> str:
    """Of whom exposed communication is not known, ending with a space, where there are such contenders."""
    known = set(data[data["part"].str.startswith("exposed")]["contender"])
    without = [contender for _, contender in contenders(data) if contender not in known]
    if not without:
        return ""
    return f"For {listed(without)} it is not known: it is part of forward and backward. "


def _split_alt(data: pd.DataFrame) -> str:
    keys, exposed = ["where", "contender"], data[data["part"].str.startswith("exposed")]
    waited = exposed.groupby([*keys, "id"], sort=False)["seconds"].sum().groupby(keys, sort=False).mean()
    told = [f"{row.contender} ({row.where}) {row.seconds:.3g} s" for row in waited.reset_index().itertuples()]
    return f"Stacked bars of a step's time; exposed communication: {listed(told[:10]) or 'not measured'}."


PLOTS: Final = (
    Plot(
        "ablation", "Ablation", _draw_ablation, _ablation_caption, _ablation_alt, _ablation_data, "ablation"
    ),
    Plot("step_split", "Where a step's time goes", _draw_split, _split_caption, _split_alt, _split_data),
)
