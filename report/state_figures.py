"""Figures of what training reaches and holds: loss, memory, quantisation error, codec sweeps."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from report import drawing, metrics, theme
from report.metrics import Derived
from report.plot import Plot, common_to, contenders, listed, titles_of

_KEPT: Final = ["id", "strategy", "contender", "place", "first", "cell", "where", "seed", "repeat"]
_MIB: Final = 2**20
_CURVES: Final = {
    "step": "optimizer steps",
    "train_seconds": "wall-clock seconds in steps",
    "inter_bytes": "GB sent between nodes",
}


def _loss_data(derived: Derived) -> pd.DataFrame:
    found = derived.trials[_KEPT].merge(derived.frames.validations, on="id")
    often = found.groupby("id")["step"].transform("nunique") >= 3
    return found.assign(inter_bytes=pd.to_numeric(found["inter_bytes"]))[often]


def _draw_loss(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    titles = titles_of(data)
    figure, grid = drawing.panels(3, len(titles), height=0.35 + 2.3 * len(titles), sharey="row", width=8.2)
    for row, (cell, title) in zip(grid, titles.items(), strict=True):
        mine = data[data["cell"] == cell]
        for ax, (column, told) in zip(row, _CURVES.items(), strict=True):
            endings = [
                _loss_line(ax, mine[mine["contender"] == contender], column, strategy)
                for strategy, contender in contenders(mine)
            ]
            ax.set_xlabel(told)
            ax.set_xlim(left=0)
            if ax is row[-1]:
                drawing.label_ends(ax, [e for e in endings if not np.isnan(e.x)], 1.75)
        row[0].set_title(title)
        row[0].set_ylabel("validation loss, nats per byte")
    return figure


def _loss_line(ax: Axes, mine: pd.DataFrame, column: str, strategy: str) -> drawing.Ending:
    """The mean over seeds at each step, in a band from the lowest to the highest seed."""
    scale = 1e-9 if column == "inter_bytes" else 1.0
    at = mine.groupby("step")[column].mean() * scale
    loss = mine.groupby("step")["loss"].agg(["mean", "min", "max"])
    colour = theme.colour(strategy)
    if at.notna().all():
        ax.plot(at, loss["mean"], color=colour, lw=1.4)
        ax.fill_between(at, loss["min"], loss["max"], color=colour, alpha=0.15, lw=0)
    return drawing.Ending(at.iloc[-1], loss["mean"].iloc[-1], str(mine["contender"].iloc[0]), colour)


def _loss_caption(data: pd.DataFrame) -> str:
    return (
        "Validation loss against optimizer steps, seconds spent in steps and bytes that all ranks had sent "
        f"between nodes. Lines: mean over {data['seed'].nunique()} seed(s); bands: lowest to highest. "
        f"{common_to(data)}."
    )


def _loss_alt(data: pd.DataFrame) -> str:
    last = data.sort_values("step").groupby("id").tail(1).groupby("contender", sort=False)
    told = [
        f"{name} {group['loss'].mean():.3f} after {group['train_seconds'].mean():.3g} s"
        for name, group in last
    ]
    return f"Loss curves; last values: {listed(told[:10])}."


def _final_data(derived: Derived) -> pd.DataFrame:
    found = derived.trials.dropna(subset=["validation_loss"])
    return found[[*_KEPT, "validation_loss"]]


def _draw_final(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    titles = titles_of(data)
    names, groups = [], []
    for cell, title in titles.items():
        mine = data[data["cell"] == cell]
        for strategy, contender in contenders(mine):
            names.append(f"{contender}, {title}" if title else contender)
            groups.append((strategy, mine[mine["contender"] == contender]["validation_loss"]))
    figure, ((ax,),) = drawing.panels(1, height=drawing.bars_height(len(names)))
    drawing.row_names(ax, names)
    for place, (strategy, losses) in enumerate(groups):
        colour = theme.colour(strategy)
        ax.plot([losses.min(), losses.max()], [place, place], color=colour, lw=1.2, alpha=0.6)
        ax.plot(losses, [place] * len(losses), ".", color=colour, ms=5, alpha=0.6)
        ax.plot(losses.mean(), place, theme.marker(strategy), color=colour, mec="white", ms=7)
        drawing.beside(ax, float(losses.max()), place, f"{losses.mean():.4f}", points=8)
    low, high = data["validation_loss"].min(), data["validation_loss"].max()
    room = max(0.15 * (high - low), 0.002 * high)
    ax.set_xlim(low - room, high + 1.6 * room)
    ax.set_xlabel("final validation loss, nats per byte")
    return figure


def _final_caption(data: pd.DataFrame) -> str:
    return (
        "Loss of the last validation: each run (dots), their mean (marker and number) and spread. "
        f"{data['seed'].nunique()} seed(s), {data['repeat'].nunique()} repeat(s). The axis does not start at "
        f"0. {common_to(data)}."
    )


def _final_alt(data: pd.DataFrame) -> str:
    means = data.groupby(["cell", "contender"], sort=False)["validation_loss"].mean()
    told = [f"{key[1]} {value:.4f}" for key, value in zip(means.index.to_list(), means, strict=True)]
    return f"Final validation loss: {listed(told[:12])}."


def _memory_data(derived: Derived) -> pd.DataFrame:
    found = metrics.memory(derived.frames, derived.trials)
    found = found[found["source"].isin(["engine", "formula"])]
    found = found.merge(derived.trials[["id", "first", "nodes", "ranks_per_node", "model"]], on="id")
    return found if found[found["source"] == "engine"]["secondary"].nunique() >= 2 else found.iloc[:0]


def _draw_memory(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    keys = ["nodes", "ranks_per_node", "model"]
    groups = [group for _, group in data.groupby(keys, sort=True)]
    tables = [_memory_rows(group) for group in groups]
    rows = sum(max(len(table), 2) for table, _ in tables)
    figure, grid = drawing.panels(1, len(groups), height=0.8 + 0.5 * len(groups) + drawing.ROW_INCHES * rows)
    for (ax,), group, (engine, formula) in zip(grid, groups, tables, strict=True):
        drawing.Stack(list(engine.index), engine, theme.MEMORY, {"local_gradients": "local gradients"}).draw(
            ax
        )
        ax.plot(formula, np.arange(len(formula)), "|", color=theme.INK, ms=14, mew=1.4, label="formula")
        for place, total in enumerate(engine.sum(axis=1)):
            most = max(total, formula.iloc[place]) if not np.isnan(formula.iloc[place]) else total
            drawing.beside(ax, float(most), place, f"{total:.4g}", points=6)
        ax.set_xlim(0, max(engine.sum(axis=1).max(), formula.max()) * 1.1)
        if len(groups) > 1:
            first = group.iloc[0]
            ax.set_title(f"{first['nodes']}x{first['ranks_per_node']} ranks, {first['model']}")
    grid[-1][0].set_xlabel("MiB on the fullest rank")
    drawing.legend_above(figure, grid[0][0], columns=7)
    return figure


def _memory_rows(group: pd.DataFrame) -> tuple[pd.DataFrame, pd.Series[float]]:
    """Engine's parts and the formula's total in MiB by contender, ordered by hpZ group."""
    order = group.drop_duplicates("contender").sort_values(["secondary", "place", "first"], kind="stable")
    names = {
        str(row.contender): f"{row.contender}, "
        + (f"groups of {row.secondary}" if row.secondary else "no copy")
        for row in order.itertuples()
    }
    mib = group.assign(mib=group["bytes"] / _MIB)
    wide = {
        source: mib[mib["source"] == source].pivot_table(
            index="contender", columns="part", values="mib", aggfunc="median"
        )
        for source in ("engine", "formula")
    }
    known = [part for part in theme.MEMORY if part in wide["engine"].columns]
    rest = [part for part in wide["engine"].columns if part not in known]
    engine = wide["engine"].reindex(index=list(names), columns=known + rest).fillna(0)
    formula = wide["formula"].reindex(index=list(names)).sum(axis=1, min_count=1)
    return engine.rename(index=names), formula


def _memory_caption(data: pd.DataFrame) -> str:
    return (
        "Bytes that the engine owns on the fullest rank, by part, at their worst moment (bars), against the "
        "total of the formulas of impl.traffic.memory ( | ), ordered by the number of ranks that share one "
        "hpZ copy of the weights: the smaller the group, the more memory, the fewer hops in backward. Median "
        f"over repeats. {common_to(data)}."
    )


def _memory_alt(data: pd.DataFrame) -> str:
    engine = data[data["source"] == "engine"]
    totals = engine.groupby(["contender", "secondary", "id"], sort=False)["bytes"].sum()
    medians = totals.groupby(["contender", "secondary"], sort=False).median() / _MIB
    told = [f"{key[0]} {value:.4g} MiB" for key, value in zip(medians.index.to_list(), medians, strict=True)]
    return f"Stacked bars of memory per rank: {listed(told[:12])}."


def _error_data(derived: Derived) -> pd.DataFrame:
    found = metrics.codecs(derived.frames, derived.trials)
    several = found.groupby("purpose")["codec"].transform("nunique") >= 3
    return found[several]


def _block_places(values: pd.Series[str]) -> dict[str, float]:
    """Log2 of each block size; one scale a shard stands right of the largest."""
    sizes = sorted({int(value) for value in values if value != "shard"})
    places = {str(size): float(np.log2(size)) for size in sizes}
    if (values == "shard").any():
        places["shard"] = (max(places.values()) if places else 0.0) + 1.5
    return places


def _error_axis(data: pd.DataFrame) -> tuple[str, str]:
    """What runs along the axis and what makes lines: blocks if they vary, else bits."""
    return ("block", "bits") if len(data["block"].unique()) > 1 else ("bits", "block")


def _places(data: pd.DataFrame, axis: str) -> dict[str, float]:
    if axis == "block":
        return _block_places(data["block"])
    return {str(bits): float(bits) for bits in sorted(data["bits"].unique())}


def _mark_places(ax: Axes, places: dict[str, float], axis: str) -> None:
    ax.xaxis.set_major_locator(FixedLocator(list(places.values())))
    ax.set_xticklabels(list(places), rotation=45 if len(places) > 6 else 0)
    ax.set_xlabel("elements per block" if axis == "block" else "bits per element")


def _line_name(line: str, value: object, asymmetric: object) -> str:
    told = f"{value} bits" if line == "bits" else f"blocks of {value}"
    return told + (", asym." if asymmetric else "")


def _draw_error(data: pd.DataFrame) -> Figure | None:
    if data.empty:
        return None
    purposes = sorted(data["purpose"].unique(), reverse=True)
    figure, grid = drawing.panels(2, len(purposes), height=0.3 + 2.3 * len(purposes))
    for row, purpose in zip(grid, purposes, strict=True):
        mine = data[data["purpose"] == purpose]
        axis, line = _error_axis(mine)
        places = _places(mine, axis)
        for ax, value in zip(row, ("vnmse", "largest"), strict=True):
            endings = []
            for index, ((held, asymmetric), group) in enumerate(mine.groupby([line, "asymmetric"])):
                colour = theme.SEQUENCE[index % len(theme.SEQUENCE)]
                at = group[axis].astype(str).map(places)
                middle = group.groupby(at)[value].median()
                ax.plot(middle.index, middle, "o-", color=colour, mec="white", mew=0.6)
                ax.plot(at, group[value], ".", color=colour, ms=2.5, alpha=0.4)
                name = _line_name(line, held, asymmetric)
                endings.append(drawing.Ending(float(middle.index[-1]), float(middle.iloc[-1]), name, colour))
            drawing.decades(ax)
            _mark_places(ax, places, axis)
            drawing.label_ends(ax, endings, 1.7)
        row[0].set_title(purpose)
        row[0].set_ylabel("vNMSE")
        row[1].set_ylabel("largest error / largest value")
    return figure


def _error_caption(data: pd.DataFrame) -> str:
    return (
        "Error of integer codecs on tensors of the trials, from the frames that were sent: vNMSE = "
        "sum((decoded - x)^2) / sum(x^2), and the largest |decoded - x| over the largest |x|. Markers: "
        f"median over {data['unit'].nunique()} unit(s) and repeats; dots: each. 'shard': one scale for a "
        "whole shard, the paper's non-blocked baseline."
    )


def _error_alt(data: pd.DataFrame) -> str:
    medians = data.groupby(["purpose", "codec"], sort=False)["vnmse"].median()
    told = [
        f"{key[0]} {key[1]} {value:.2g}" for key, value in zip(medians.index.to_list(), medians, strict=True)
    ]
    return f"Median vNMSE: {listed(told[:14])}."


def _sweep_data(derived: Derived, axis: str) -> pd.DataFrame:
    found = metrics.sweeps(derived.trials, axis)
    found = found.assign(m=found["sent_bytes"] / found["m_bytes"])
    kept = [*_KEPT, "swept", "line", "bits", "block", "step_seconds", "sent_bytes", "m", "validation_loss"]
    return found[kept]


def _block_data(derived: Derived) -> pd.DataFrame:
    return _sweep_data(derived, "block")


def _bits_data(derived: Derived) -> pd.DataFrame:
    return _sweep_data(derived, "bits")


_SWEEP_VALUES: Final = {
    "step_seconds": "seconds per step",
    "m": "bytes between nodes, in M",
    "validation_loss": "final validation loss",
}


def _draw_sweep(data: pd.DataFrame, axis: str) -> Figure | None:
    if data.empty:
        return None
    values = [value for value in _SWEEP_VALUES if data[value].notna().any()]
    titles = titles_of(data)
    keys = ["swept", "cell"]
    groups = list(data.groupby(keys, sort=False))
    figure, grid = drawing.panels(len(values), len(groups), height=0.3 + 2.2 * len(groups), width=8.2)
    for row, ((swept, cell), mine) in zip(grid, groups, strict=True):
        places = _places(mine, axis)
        for ax, value in zip(row, values, strict=True):
            endings = []
            lines = mine.groupby(["place", "strategy", "line"], sort=True)
            for index, ((_, strategy, line), group) in enumerate(lines):
                alone = len(mine[mine["strategy"] == strategy]["line"].unique()) == 1
                colour = theme.colour(str(strategy)) if alone else theme.SEQUENCE[index % len(theme.SEQUENCE)]
                at = group[axis].astype(str).map(places)
                middle = group.groupby(at)[value].median().dropna()
                if middle.empty:
                    continue
                ax.plot(
                    middle.index,
                    middle,
                    color=colour,
                    marker=theme.marker(str(strategy)),
                    mec="white",
                    mew=0.6,
                )
                ax.plot(at, group[value], ".", color=colour, ms=2.5, alpha=0.4)
                name = f"{str(group['contender'].iloc[0]).partition(' (')[0]}, {line}"
                endings.append(drawing.Ending(float(middle.index[-1]), float(middle.iloc[-1]), name, colour))
            if value != "validation_loss":
                ax.set_ylim(0, mine[value].max() * 1.1)
            _mark_places(ax, places, axis)
            ax.set_ylabel(_SWEEP_VALUES[value])
            if ax is row[-1]:
                drawing.label_ends(ax, endings, 1.6)
        told = "weights and gradients" if swept == "both" else str(swept)
        row[0].set_title(told + (f", {titles[str(cell)]}" if titles[str(cell)] else ""))
    return figure


def _draw_block(data: pd.DataFrame) -> Figure | None:
    return _draw_sweep(data, "block")


def _draw_bits(data: pd.DataFrame) -> Figure | None:
    return _draw_sweep(data, "bits")


def _sweep_caption(data: pd.DataFrame) -> str:
    return (
        "What changes when only the named codec does: median step seconds, bytes between nodes per step "
        "(ledger, in units of M, see 'Bytes between nodes') and loss of the last validation (its axis does "
        f"not start at 0). Markers: median over repeats; dots: each. {common_to(data)}."
    )


def _sweep_alt(data: pd.DataFrame) -> str:
    medians = data.groupby(["swept", "strategy", "bits", "block"], sort=False)[["step_seconds", "m"]].median()
    told = [
        f"{key[0]} at {key[2]} bits and blocks of {key[3]}: {row.step_seconds:.3g} s, {row.m:.3g} M"
        for key, row in zip(medians.index.to_list(), medians.itertuples(), strict=True)
    ]
    return f"{'; '.join(told[:12])}."


PLOTS: Final = (
    Plot(
        name="loss",
        title="Loss against steps, time and bytes",
        suite="convergence",
        data=_loss_data,
        draw=_draw_loss,
        caption=_loss_caption,
        alt=_loss_alt,
    ),
    Plot(
        name="final_loss",
        title="Final validation loss",
        suite="convergence",
        data=_final_data,
        draw=_draw_final,
        caption=_final_caption,
        alt=_final_alt,
    ),
    Plot(
        name="memory",
        title="Memory per rank",
        suite="hpz_group",
        data=_memory_data,
        draw=_draw_memory,
        caption=_memory_caption,
        alt=_memory_alt,
    ),
    Plot(
        name="error",
        title="Quantisation error",
        suite="block_size",
        data=_error_data,
        draw=_draw_error,
        caption=_error_caption,
        alt=_error_alt,
    ),
    Plot(
        name="block_sweep",
        title="Block size",
        suite="block_size",
        data=_block_data,
        draw=_draw_block,
        caption=_sweep_caption,
        alt=_sweep_alt,
    ),
    Plot(
        name="bits_sweep",
        title="Bits",
        suite="bits",
        data=_bits_data,
        draw=_draw_bits,
        caption=_sweep_caption,
        alt=_sweep_alt,
    ),
)
