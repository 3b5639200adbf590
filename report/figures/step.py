"""Figures of a step's time: what each technique takes off it, and where it goes."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from report.data import footnotes, metrics
from report.data.contender import COMBINATIONS, NAMES, PROPOSED, TECHNIQUES
from report.data.metrics import Derived
from report.data.text import listed, number
from report.draw import drawing, theme
from report.draw.plot import Plot, common_to, contenders, peers_note, titles_of
from report.figures.speed import KEPT, differing_in_words, interval_in_words, pairs_as_dots, with_differing


def _ablation_data(derived: Derived) -> pd.DataFrame:
    rows = derived.pairs[
        derived.pairs["strategy"].isin(COMBINATIONS)
        & (derived.pairs["contender"] == derived.pairs["strategy"].map(NAMES))
        & (derived.pairs["nodes"] > 1)
    ]
    ran = rows.groupby("cell")["strategy"].transform(lambda names: len(set(names) & set(COMBINATIONS)))
    kept = [*KEPT, "baseline", "baseline_seconds", "step_seconds", "speedup", "bytes_ratio", "sent_bytes"]
    return with_differing(rows, derived)[ran == len(COMBINATIONS)][[*kept, "rates_differ"]]


def _draw_ablation(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    titles = titles_of(data)
    figure, grid = drawing.panels(2, len(titles), height=drawing.bars_height(8) * len(titles), sharey=True)
    for (left, right), (cell, title) in zip(grid, titles.items(), strict=True):
        mine = data[data["cell"] == cell]
        shown = contenders(mine)
        drawing.row_names(left, [contender for _, contender in shown])
        for place, (strategy, contender) in enumerate(shown):
            group = mine[mine["contender"] == contender]
            found = metrics.speedup(group)
            left.barh(place, found.estimate, 0.66, color=theme.colour(strategy))
            drawing.error_bar(left, place, found, theme.INK, across=True)
            pairs_as_dots(left, group["speedup"], place, theme.INK)
            high = np.nanmax([found.high, group["speedup"].max()])
            drawing.beside(left, max(high, found.estimate), place, f"{found.estimate:.2f}")
            ratio = group["bytes_ratio"].median()
            right.barh(place, ratio, 0.66, color=theme.colour(strategy))
            drawing.beside(right, ratio, place, f"{ratio:.3f}")
        top = mine["speedup"].max()
        left.set_xlim(0, max(top, min(left.dataLim.x1, 1.5 * top)) * 1.18)
        right.set_xlim(0, mine["bytes_ratio"].max() * 1.18)
        drawing.same_rows(right)
        left.set_title(f"{title} {footnotes.RATES}".strip() if mine["rates_differ"].any() else title)
    grid[-1][0].set_xlabel("speed-up over ZeRO-3")
    grid[-1][1].set_xlabel("bytes between nodes over ZeRO-3's")
    return figure


def _ablation_caption(data: pd.DataFrame) -> str:
    told = []
    for cell, title in titles_of(data).items():
        mine = data[data["cell"] == cell]
        found = {s: metrics.speedup(g).estimate for s, g in mine.groupby("strategy")}
        product = float(np.prod([found[name] for name in TECHNIQUES]))
        where = f" ({title})" if title else ""
        told.append(f"{product:.2f} against {found[PROPOSED]:.2f}{where}")
    return (
        "All eight combinations of quantised weight gathers (qwZ), the weight copy inside a node (hpZ) and "
        "quantised two-hop gradient reductions (qgZ). Speed-up: geometric mean over repeats "
        f"{interval_in_words(data)}, dots are single pairs; bytes: ledger, all ranks. Product of the three "
        f"single speed-ups against all three measured together: {'; '.join(told)}. "
        f"{common_to(data)}{differing_in_words(data)}"
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


def _draw_split(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    titles = titles_of(data)
    columns = 1 if len(titles) == 1 else 2
    rows = -(-len(titles) // columns)
    cells = list(titles)
    shown = {cell: contenders(data[data["cell"] == cell]) for cell in cells}
    most = max(len(names) for names in shown.values())
    height = 0.35 + rows * (0.55 + 0.26 * max(most, 2))
    figure, grid = drawing.panels(columns, rows, height=height)
    places = [ax for row in grid for ax in row]
    for ax, cell in zip(places, cells, strict=False):
        mine = data[data["cell"] == cell]
        table = mine.pivot_table(index="contender", columns="part", values="seconds", aggfunc="mean")
        names = [contender for _, contender in shown[cell]]
        parts = [part for part in theme.PARTS if part in table.columns]
        values = table.reindex(index=names, columns=parts)
        drawing.Stack(names, values, theme.PARTS, {}).draw(ax)
        for place, total in enumerate(values.sum(axis=1)):
            drawing.beside(ax, float(total), place, number()(total))
        ax.set_xlim(0, values.sum(axis=1).max() * 1.12)
        ax.set_title(titles[cell])
    for ax in places[len(cells) :]:
        ax.set_axis_off()
    for ax in places[max(0, len(cells) - columns) : len(cells)]:
        ax.set_xlabel("seconds per step")
    drawing.legend_above(figure, places[0], columns=6)
    return figure


def _split_caption(data: pd.DataFrame) -> str:
    return (
        "Where a step's time goes, on the slowest rank of each step, mean over timed steps and repeats "
        "(means, so that parts add up; elsewhere steps are summarised by their median). Pale parts are "
        f"exposed communication: time in which the rank only waited. {_unexposed_in_words(data)}"
        f"{peers_note(data)}{common_to(data)}"
    )


def _unexposed_in_words(data: pd.DataFrame) -> str:
    """Of whom exposed communication is not known, ending with a space, where there are such contenders."""
    known = set(data[data["part"].str.startswith("exposed")]["contender"])
    without = [contender for _, contender in contenders(data) if contender not in known]
    if not without:
        return ""
    return f"It is not known of {listed(without)}: theirs is inside forward and backward. "


def _split_alt(data: pd.DataFrame) -> str:
    exposed = data[data["part"].str.startswith("exposed")].groupby(["where", "contender", "id"], sort=False)
    shares = exposed["seconds"].sum().groupby(["where", "contender"], sort=False).mean()
    told = [f"{key[1]} ({key[0]}) {v:.3g} s" for key, v in zip(shares.index.to_list(), shares, strict=True)]
    return f"Stacked bars of a step's time; exposed communication: {listed(told[:10]) or 'not measured'}."


PLOTS: Final = (
    Plot(
        name="ablation",
        title="Ablation",
        suite="ablation",
        data=_ablation_data,
        draw=_draw_ablation,
        caption=_ablation_caption,
        alt=_ablation_alt,
    ),
    Plot(
        name="step_split",
        title="Where a step's time goes",
        suite="quickstart",
        data=_split_data,
        draw=_draw_split,
        caption=_split_caption,
        alt=_split_alt,
    ),
)
