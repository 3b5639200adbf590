"""Figures of the loss: over steps, time and bytes, and the final loss."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report.data import metrics
from report.data.frames import groups, rate_text
from report.data.metrics import Derived
from report.data.text import byte_unit, counted, listed, span
from report.draw import chart_parts, theme
from report.draw.figure_definition import (
    Plot,
    by_cell,
    by_cell_and_contender,
    by_contender,
    common_to,
    contenders,
    peers_note,
)

_KEPT: Final = ["id", "strategy", "contender", "place", "first", "cell", "where", "seed", "repeat"]
_SAME_LOSS: Final = 1e-6  # relative; trials of other rates compute the same sums in the same order
_CURVES: Final = {
    "step": "optimizer steps",
    "train_seconds": "wall-clock seconds in steps",
    "inter_bytes": "{} sent between nodes",
}


def _loss_data(derived: Derived) -> pd.DataFrame:
    long = derived.trials[derived.trials["validation_loss"].notna()]  # trained long enough
    found = long[_KEPT].merge(derived.frames.validations, on="id")
    often = found.groupby("id")["step"].transform("nunique") >= 3
    return found.assign(inter_bytes=pd.to_numeric(found["inter_bytes"]))[often]


def _draw_loss(data: pd.DataFrame) -> Figure:
    size, unit = byte_unit(data["inter_bytes"].max())
    cells = by_cell(data.assign(inter_bytes=data["inter_bytes"] / size))
    height = 0.45 + 2.3 * len(cells) + chart_parts.legend_height(data["contender"].nunique())
    figure, grid = chart_parts.panels(3, len(cells), height=height, sharey=True)
    for row, (title, mine) in zip(grid, cells, strict=True):
        looks = chart_parts.looks_of(contenders(mine))
        for ax, (column, told) in zip(row, _CURVES.items(), strict=True):
            for _, contender, group in by_contender(mine):
                _loss_line(ax, group, column, looks[contender])
            ax.set_xlabel(told.format(unit))
            ax.set_xlim(left=0)
            ax.locator_params(axis="x", nbins=5)  # three panels stand side by side
        row[0].set_title(title)
        row[0].set_ylabel("validation loss, nats")
    chart_parts.legend_above(figure, grid[0][0], columns=4)
    return figure


def _loss_line(ax: Axes, mine: pd.DataFrame, column: str, look: chart_parts.Look) -> None:
    """Draw the mean over seeds at each step, in a band from the lowest to the highest seed."""
    of_seeds = mine.assign(at=mine[column]).groupby(["seed", "step"])[["at", "loss"]].mean()
    at = of_seeds["at"].groupby("step").mean()
    loss = of_seeds["loss"].groupby("step").agg(["mean", "min", "max"])
    if at.isna().any():  # what peers send is not always counted
        return
    ax.plot(
        at, loss["mean"], look.line, color=look.colour, marker=look.marker, mec="white", mew=0.5, ms=4.5,
        lw=1.4, label=str(mine["contender"].iloc[0]),
    )  # fmt: skip
    ax.fill_between(at, loss["min"], loss["max"], color=look.colour, alpha=0.15, lw=0)


def _loss_caption(data: pd.DataFrame) -> str:
    return (
        "Validation loss against optimizer steps, seconds spent in steps and bytes that all ranks had sent "
        f"between nodes. Lines: mean over {counted(data['seed'].nunique(), 'seed')}, each of which counts "
        f"once; bands: lowest to highest. {peers_note(data)}{common_to(data)}"
    )


def _loss_alt(data: pd.DataFrame) -> str:
    last = data.sort_values("step").groupby("id").tail(1).groupby("contender", sort=False)
    told = [
        f"{name} {group['loss'].mean():.3f} after {group['train_seconds'].mean():.3g} s"
        for name, group in last
    ]
    return f"Loss curves; last values: {listed(told[:10])}."


def _final_data(derived: Derived) -> pd.DataFrame:
    """Final losses; cells that differ only in their rate, with equal losses, are merged."""
    found = derived.trials.dropna(subset=["validation_loss"])
    elsewhere = [metrics.cell_without_rate(derived.frames, identity) for identity in found["id"]]
    found = found.assign(elsewhere=elsewhere, same_at_rates=1)
    merged = [_without_rate(group) for _, group in groups(found, ["elsewhere"])]
    kept = [*_KEPT, "validation_loss", "validation_step", "same_at_rates"]
    return pd.concat(merged, ignore_index=True)[kept] if merged else found[kept]


def _once(group: pd.DataFrame) -> pd.Series[float]:
    """A contender's loss of each seed: repeats train the same again, and are drawn once."""
    return group.groupby("seed")["validation_loss"].mean()


def _without_rate(group: pd.DataFrame) -> pd.DataFrame:
    """Merge cells of several rates if each contender and seed has one loss; else leave them."""
    rates = group["rate_mbit"].fillna(np.inf).nunique()
    losses = group.groupby(["contender", "seed"])["validation_loss"].agg(["min", "max"])
    if rates < 2 or not np.allclose(losses["min"], losses["max"], rtol=_SAME_LOSS, atol=0):
        return group
    where = [
        text.replace(f", {rate_text(rate)}", "", 1)
        for text, rate in zip(group["where"], group["rate_mbit"], strict=True)
    ]
    return group.assign(cell=group["elsewhere"], where=where, same_at_rates=rates)


def _after_steps(data: pd.DataFrame) -> str:
    """Caption text such as ``after 5 steps`` or ``after 5 to 40 steps``."""
    return f"after {span(data['validation_step'], 'step')}"


def _draw_final(data: pd.DataFrame) -> Figure:
    rows = by_cell_and_contender(data)
    figure, ((ax,),) = chart_parts.panels(1, height=chart_parts.bars_height(len(rows)))
    chart_parts.row_names(ax, [name for name, _, _ in rows])
    for place, (_, strategy, group) in enumerate(rows):
        contender = str(group["contender"].iloc[0])
        colour, losses = theme.colour(strategy, contender), _once(group)
        ax.plot([losses.min(), losses.max()], [place, place], color=colour, lw=1.2, alpha=0.6)
        ax.plot(losses, [place] * len(losses), ".", color=colour, ms=5, alpha=0.6)
        ax.plot(losses.mean(), place, theme.marker(strategy, contender), color=colour, mec="white", ms=7)
        chart_parts.beside(ax, float(losses.max()), place, f"{losses.mean():.4f}", points=8)
    low, high = data["validation_loss"].min(), data["validation_loss"].max()
    room = max(0.15 * (high - low), 0.002 * high)
    ax.set_xlim(low - room, high + 1.6 * room)
    ax.set_xlabel(f"validation loss {_after_steps(data)}, nats")
    return figure


def _final_caption(data: pd.DataFrame) -> str:
    rates = int(data["same_at_rates"].max())
    once = f" The same at each of {rates} rates of the link, and drawn once." if rates > 1 else ""
    return (
        f"Loss of the last validation, {_after_steps(data)} (warm-ups included): each seed (dots), their "
        f"mean (marker and number), and from the lowest to the highest (line).{once} "
        f"{counted(data['seed'].nunique(), 'seed')}; repeats of a seed train the same again, and are drawn "
        "once. What the differences say, and with which power, is in the table Losses. The axis does not "
        f"start at 0. {peers_note(data)}{common_to(data)}"
    )


def _final_alt(data: pd.DataFrame) -> str:
    told = [f"{key[1]} {_once(group).mean():.4f}" for key, group in groups(data, ["cell", "contender"])]
    return f"Validation loss {_after_steps(data)}: {listed(told[:12])}."


PLOTS: Final = (
    Plot(
        "loss",
        "Loss against steps, time and bytes",
        _draw_loss,
        _loss_caption,
        _loss_alt,
        _loss_data,
        "convergence",
    ),
    Plot(
        "final_loss",
        "Final validation loss",
        _draw_final,
        _final_caption,
        _final_alt,
        _final_data,
        "convergence",
    ),
)
