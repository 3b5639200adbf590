"""Figures of what training reaches: loss over steps, time and bytes, and the final loss."""

from __future__ import annotations

from typing import Final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report import drawing, theme
from report.metrics import Derived
from report.plot import Plot, common_to, contenders, titles_of
from report.wording import listed

_KEPT: Final = ["id", "strategy", "contender", "place", "first", "cell", "where", "seed", "repeat"]
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
    figure, grid = drawing.panels(3, len(titles), height=0.45 + 2.3 * len(titles), sharey="row")
    for row, (cell, title) in zip(grid, titles.items(), strict=True):
        mine = data[data["cell"] == cell]
        looks = drawing.looks_of(contenders(mine))
        for ax, (column, told) in zip(row, _CURVES.items(), strict=True):
            for _, contender in contenders(mine):
                _loss_line(ax, mine[mine["contender"] == contender], column, looks[contender])
            ax.set_xlabel(told)
            ax.set_xlim(left=0)
        row[0].set_title(title)
        row[0].set_ylabel("validation loss, nats per byte")
    drawing.legend_above(figure, grid[0][0], columns=4)
    return figure


def _loss_line(ax: Axes, mine: pd.DataFrame, column: str, look: drawing.Look) -> None:
    """The mean over seeds at each step, in a band from the lowest to the highest seed."""
    scale = 1e-9 if column == "inter_bytes" else 1.0
    at = mine.groupby("step")[column].mean() * scale
    loss = mine.groupby("step")["loss"].agg(["mean", "min", "max"])
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
        f"between nodes. Lines: mean over {data['seed'].nunique()} seed(s); bands: lowest to highest. "
        f"{common_to(data)}"
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
        f"0. {common_to(data)}"
    )


def _final_alt(data: pd.DataFrame) -> str:
    means = data.groupby(["cell", "contender"], sort=False)["validation_loss"].mean()
    told = [f"{key[1]} {value:.4f}" for key, value in zip(means.index.to_list(), means, strict=True)]
    return f"Final validation loss: {listed(told[:12])}."


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
)
