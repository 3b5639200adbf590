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
from report.draw import drawing, theme
from report.draw.plot import Plot, common_to

_MIB: Final = 2**20


def _memory_data(derived: Derived) -> pd.DataFrame:
    found = bytes_and_memory.memory(derived.frames, derived.trials)
    found = found[found["source"].isin(["engine", "formula"])]
    found = found.merge(derived.trials[["id", "first", "nodes", "ranks_per_node", "model"]], on="id")
    return found if found[found["source"] == "engine"]["secondary"].nunique() >= 2 else found.iloc[:0]


def _draw_memory(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    keys = ["nodes", "ranks_per_node", "model"]
    places = [group for _, group in groups(data.sort_values(keys, kind="stable"), keys)]
    tables = [_memory_rows(group) for group in places]
    rows = sum(max(len(table), 2) for table, _ in tables)
    figure, grid = drawing.panels(1, len(places), height=0.8 + 0.5 * len(places) + drawing.ROW_INCHES * rows)
    for (ax,), group, (engine, formulas) in zip(grid, places, tables, strict=True):
        bare = formulas.isna() & engine.gt(0)
        labels = {part: part.replace("_", " ") for part in engine.columns}
        drawing.Stack(list(engine.index), engine, theme.MEMORY, labels, hatched=bare).draw(ax)
        if bare.any(axis=None):
            ax.barh(0, 0, color="white", edgecolor=theme.FAINT, hatch=theme.HATCH, label="no formula")
        formula = formulas.sum(axis=1, min_count=1)
        ax.plot(formula, np.arange(len(formula)), "|", color=theme.INK, ms=14, mew=1.4, label="formula")
        for place, (covered, beyond) in enumerate(
            zip(engine.mask(bare).sum(axis=1), engine.where(bare).sum(axis=1), strict=True)
        ):
            most = np.nanmax([covered + beyond, formula.iloc[place]])
            drawing.beside(ax, float(most), place, _total_told(covered, beyond), points=6)
        ax.set_xlim(0, np.nanmax([*engine.sum(axis=1), *formula]) * 1.12)
        if len(places) > 1:
            first = group.iloc[0]
            ax.set_title(f"{first['nodes']}x{first['ranks_per_node']} ranks, {plain(first['model'])}")
    grid[-1][0].set_xlabel("MiB on the fullest rank")
    entries, fullest = max(
        ((len(ax.get_legend_handles_labels()[1]), ax) for (ax,) in grid), key=lambda found: found[0]
    )
    drawing.legend_above(figure, fullest, columns=entries if entries <= 7 else 5)
    return figure


def _total_told(covered: float, beyond: float) -> str:
    """Label of a total: parts with a formula, and after a plus those without."""
    told = [number(4)(size) for size in (covered, beyond) if size > 0]
    return " + ".join(told) or "0"


def _memory_rows(group: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Parts that the engine holds and their formulas (NaN if none), in MiB by contender, ordered
    by hpZ group.  Parts that no contender has a formula for stand last.  A formula of a part that
    was not measured has a column of its own on the right only.
    """
    order = group.drop_duplicates("contender").sort_values(["secondary", "place", "first"], kind="stable")
    names = {
        str(name): _with_group(str(name), ranks)
        for name, ranks in zip(order["contender"], order["secondary"], strict=True)
    }
    mib = group.assign(mib=group["bytes"] / _MIB)
    wide = {
        source: mib[mib["source"] == source].pivot_table(
            index="contender", columns="part", values="mib", aggfunc="median"
        )
        for source in ("engine", "formula")
    }
    usual = list(theme.MEMORY)
    parts = sorted(
        wide["engine"].columns,
        key=lambda part: (
            part not in wide["formula"].columns,
            usual.index(part) if part in usual else len(usual),
            part,
        ),
    )
    unmeasured = [part for part in wide["formula"].columns if part not in parts]
    engine = wide["engine"].reindex(index=list(names), columns=[*parts, *unmeasured]).fillna(0)
    formula = wide["formula"].reindex(index=list(names), columns=engine.columns)
    used = engine.gt(0).any() | formula.gt(0).any()  # what nobody holds is not in the legend
    engine, formula = engine.loc[:, used], formula.loc[:, used]
    return engine.rename(index=names), formula.rename(index=names)


def _with_group(name: str, ranks: int) -> str:
    if not ranks or "groups of" in name:
        return name
    return f"{name[:-1]}, groups of {ranks})" if name.endswith(")") else f"{name} (groups of {ranks})"


def _memory_caption(data: pd.DataFrame) -> str:
    measured = data[(data["source"] == "engine") & (data["bytes"] > 0)]
    foreseen = data[data["source"] == "formula"]
    bare = {*zip(measured["id"], measured["part"], strict=True)} - {
        *zip(foreseen["id"], foreseen["part"], strict=True)
    }
    hatched = (
        "; hatched: parts without a formula, left out of that total and told after a plus" if bare else ""
    )
    return (
        "Bytes that the engine owns on the fullest rank, by part, at their worst moment (bars), against the "
        f"total of the formulas of impl.plan.traffic.memory ( | ){hatched}. "
        "Ordered by the number of ranks that share one "
        "hpZ copy of the weights: the smaller the group, the more memory, the fewer hops in backward. Median "
        f"over repeats. {common_to(data)}"
    )


def _memory_alt(data: pd.DataFrame) -> str:
    engine = data[data["source"] == "engine"]
    totals = engine.groupby(["contender", "secondary", "id"], sort=False)["bytes"].sum()
    medians = totals.groupby(["contender", "secondary"], sort=False).median() / _MIB
    told = [f"{key[0]} {value:.4g} MiB" for key, value in zip(medians.index.to_list(), medians, strict=True)]
    return f"Stacked bars of memory per rank: {listed(told[:12])}."


PLOTS: Final = (
    Plot(
        name="memory",
        title="Memory per rank",
        suite="hpz_group",
        data=_memory_data,
        draw=_draw_memory,
        caption=_memory_caption,
        alt=_memory_alt,
    ),
)
