"""Figure of memory per rank: engine against formula, by size of the hpZ group."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from report.data import bytes_and_memory
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import listed, number, plain
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, common_to

_MIB: Final = 2**20
_SOURCES: Final = ("engine", "formula")
_GROUP: Final = ["contender", "secondary"]


def _memory_data(derived: Derived) -> pd.DataFrame:
    found = bytes_and_memory.memory(derived.frames, derived.trials)
    found = found[found["source"].isin(_SOURCES)]
    return found if found[found["source"] == "engine"]["secondary"].nunique() >= 2 else found.iloc[:0]


def _draw_memory(data: pd.DataFrame) -> Figure:
    keys = ["nodes", "ranks_per_node", "model"]
    places = [group for _, group in groups(data.sort_values(keys, kind="stable"), keys)]
    tables = [_memory_rows(group) for group in places]
    rows = sum(max(len(table), 2) for table, _ in tables)
    figure, grid = chart_parts.panels(
        1, len(places), height=0.8 + 0.5 * len(places) + chart_parts.ROW_INCHES * rows
    )
    for (ax,), group, (engine, formulas) in zip(grid, places, tables, strict=True):
        bare = formulas.isna() & engine.gt(0)
        labels = {part: part.replace("_", " ") for part in engine.columns}
        chart_parts.stacked_bars(ax, engine, theme.MEMORY, labels, hatched=bare)
        if bare.any(axis=None):
            ax.barh(0, 0, color="white", edgecolor=theme.FAINT, hatch=theme.HATCH, label="no formula")
        formula = formulas.sum(axis=1, min_count=1)
        ax.plot(formula, np.arange(len(formula)), "|", color=theme.INK, ms=14, mew=1.4, label="formula")
        ends = formula.combine(engine.sum(axis=1), np.fmax)
        parts = zip(engine.mask(bare).sum(axis=1), engine.where(bare).sum(axis=1), strict=True)
        for place, sizes in enumerate(parts):  # with a formula, and without
            told = " + ".join(number(4)(size) for size in sizes if size > 0) or "0"
            chart_parts.beside(ax, float(ends.iloc[place]), place, told, points=6)
        ax.set_xlim(0, ends.max() * 1.12)
        if len(places) > 1:
            first = group.iloc[0]
            ax.set_title(f"{first['nodes']}x{first['ranks_per_node']} ranks, {plain(first['model'])}")
    grid[-1][0].set_xlabel("MiB on the fullest rank")
    fullest = max((ax for (ax,) in grid), key=lambda ax: len(ax.get_legend_handles_labels()[1]))
    entries = len(fullest.get_legend_handles_labels()[1])
    chart_parts.legend_above(figure, fullest, columns=entries if entries <= 7 else 5)
    return figure


def _memory_rows(group: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Parts that the engine holds and their formulas (NaN if none), in MiB by contender, ordered
    by hpZ group.  Parts that no contender has a formula for stand last.  A formula of a part that
    was not measured has a column of its own on the right only.
    """
    order = group.drop_duplicates("contender").sort_values(["secondary", "place", "first"], kind="stable")
    names = [str(name) for name in order["contender"]]
    mib = group.assign(mib=group["bytes"] / _MIB)
    wide = mib.pivot_table(index="contender", columns=["source", "part"], values="mib", aggfunc="median")
    engine, formula = (wide.reindex(columns=[source], level=0).droplevel(0, axis=1) for source in _SOURCES)
    usual = [part for part in theme.MEMORY if part in engine.columns]
    parts = sorted([*usual, *engine.columns.difference(usual)], key=lambda part: part not in formula.columns)
    parts += list(formula.columns.difference(parts))
    engine, formula = (found.reindex(index=names, columns=parts) for found in (engine, formula))
    used = engine.gt(0).any() | formula.gt(0).any()  # what nobody holds is not in the legend
    engine, formula = engine.loc[:, used].fillna(0), formula.loc[:, used]
    return engine, formula


def _groups_in_words(data: pd.DataFrame) -> str:
    """Ranks that share a copy, by contender, for those whose names do not say it."""
    order = data.drop_duplicates("contender").sort_values(["secondary", "place", "first"], kind="stable")
    found = [(str(name), int(ranks)) for name, ranks in order[_GROUP].to_numpy()]
    told = [f"{name} {ranks}" for name, ranks in found if ranks and "groups of" not in name]
    return f" ({listed(told)})" if told else ""


def _memory_caption(data: pd.DataFrame) -> str:
    measured = data[(data["source"] == "engine") & (data["bytes"] > 0)]
    foreseen = data[data["source"] == "formula"]
    pairs = [pd.MultiIndex.from_frame(found[["id", "part"]]) for found in (measured, foreseen)]
    bare = not pairs[0].isin(pairs[1]).all()
    hatched = "; hatched: parts without a formula, not in that total, told after a plus" if bare else ""
    return (
        "Bytes that the engine owns on the fullest rank, by part, at their worst moment (bars), against the "
        f"total of the formulas of impl.plan.memory.memory ( | ){hatched}. "
        "Ordered by the number of ranks that share one "
        f"hpZ copy of the weights{_groups_in_words(data)}: the smaller the group, the more memory, the fewer "
        f"hops in backward. Median over repeats. {common_to(data)}"
    )


def _memory_alt(data: pd.DataFrame) -> str:
    engine = data[data["source"] == "engine"]
    keys = ["contender", "secondary"]
    totals = engine.groupby([*keys, "id"], sort=False)["bytes"].sum() / _MIB
    medians = totals.groupby(keys, sort=False).median().reset_index()
    told = [f"{row.contender} {row.bytes:.4g} MiB" for row in medians.itertuples()]
    return f"Stacked bars of memory per rank: {listed(told[:12])}."


PLOTS: Final = (
    Plot("memory", "Memory per rank", _draw_memory, _memory_caption, _memory_alt, _memory_data, "hpz_group"),
)
