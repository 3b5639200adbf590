"""Figures of codecs: error by bits and block size, and sweeps of speed, bytes and loss."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from report.data import codec_sweeps, metrics
from report.data.contender import BASELINE, NAMES
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, common_to, titles_of

_KEPT: Final = [
    "id", "strategy", "contender", "place", "first", "cell", "where", "seed", "repeat", "swept", "line",
    "held", "bits", "block", "step_seconds", "sent_bytes", "m", "validation_loss",
]  # fmt: skip
_REFERENCE: Final = "ZeRO-3, 16 bits"
_LINE: Final = ["strategy", "line", "held"]  # what trials of one line share
_SWEEP_VALUES: Final = {
    "step_seconds": "seconds per step",
    "m": "bytes between nodes, in M",
    "validation_loss": "final validation loss",
}


def _error_data(derived: Derived) -> pd.DataFrame:
    found = codec_sweeps.codecs(derived.frames, derived.trials)
    several = found.groupby("purpose")["codec"].transform("nunique") >= 3
    return found[several]


def _places(data: pd.DataFrame, axis: str) -> dict[str, float]:
    """Where each value stands: bits as they are, blocks at their log2, one scale per shard right of them."""
    values = {str(value) for value in data[axis]}
    sizes = sorted(int(value) for value in values if value != "shard")
    if axis == "bits":
        return {str(bits): float(bits) for bits in sizes}
    places = {str(size): float(np.log2(size)) for size in sizes}
    if "shard" in values:
        places["shard"] = max(places.values(), default=0.0) + 1.5
    return places


def _mark_places(ax: Axes, places: dict[str, float], axis: str) -> None:
    ax.xaxis.set_major_locator(FixedLocator(list(places.values())))
    ax.set_xticklabels(list(places), rotation=45 if len(places) > 5 else 0)
    ax.set_xlabel("elements per block" if axis == "block" else "bits per element")


def _draw_error(data: pd.DataFrame) -> Figure:
    purposes = sorted(data["purpose"].unique(), reverse=True)
    figure, grid = chart_parts.panels(2, len(purposes), height=0.3 + 2.3 * len(purposes))
    for row, purpose in zip(grid, purposes, strict=True):
        mine = data[data["purpose"] == purpose]
        axis, line = ("block", "bits") if len(mine["block"].unique()) > 1 else ("bits", "block")
        places = _places(mine, axis)
        for ax, value in zip(row, ("vnmse", "largest"), strict=True):
            endings = []
            lines = groups(mine.sort_values([line, "options"], kind="stable"), [line, "options"])
            for ((held, options), group), colour in zip(lines, chart_parts.shades(len(lines)), strict=True):
                values = group.set_index(group[axis].astype(str).map(places))[value]
                middle = values.groupby(level=0).median()
                name = f"{held} bits" if line == "bits" else f"blocks of {held}"
                name += f", {options}" if options else ""
                look = chart_parts.Look(colour, "o", "-")
                endings.append(chart_parts.trend(ax, middle, values, name, look))
            chart_parts.decades(ax)
            _mark_places(ax, places, axis)
            chart_parts.label_ends(ax, endings, 1.7)
        row[0].set_title(purpose)
        row[0].set_ylabel("vNMSE")
        row[1].set_ylabel("largest error / largest value")
    return figure


def _error_caption(data: pd.DataFrame) -> str:
    return (
        "Integer codecs, each tried once on the weights and the reduced gradients that training left to "
        f"{data['contender'].iloc[0]}, whichever was sent (for that see Error of what was sent): vNMSE = "
        "sum((decoded - x)^2) / sum(x^2), and the largest |decoded - x| over the largest |x|. Markers: "
        f"median over {counted(data['unit'].nunique(), 'unit')} and repeats; dots: each. 'shard': one scale "
        "for a whole shard, the paper's non-blocked baseline."
    )


def _error_alt(data: pd.DataFrame) -> str:
    medians = data.groupby(["purpose", "codec"], sort=False, as_index=False)["vnmse"].median()
    told = [f"{row.purpose} {row.codec} {row.vnmse:.2g}" for row in medians.itertuples()]
    return f"Median vNMSE: {listed(told[:14])}."


def _sweep_data(derived: Derived, axis: str) -> pd.DataFrame:
    found = codec_sweeps.sweeps(derived.frames, derived.trials, axis)
    return found.assign(m=found["sent_bytes"] / found["m_bytes"])[_KEPT]


def _draw_sweep(data: pd.DataFrame, axis: str) -> Figure:
    values = [value for value in _SWEEP_VALUES if data[value].notna().any()]
    titles = titles_of(data)
    swept_rows = data[data["swept"] != codec_sweeps.REFERENCE].astype({"bits": int})
    found = groups(swept_rows, ["swept", "cell"])
    beside = [[_line_of(*key) for key, _ in groups(mine, _LINE)] for _, mine in found]
    panel = max(1.6, *(chart_parts.labels_inches([*names, _REFERENCE]) for names in beside))
    figure, grid = chart_parts.panels(
        len(values), len(found), height=0.3 + (panel + 0.6) * len(found), width=8.2
    )
    for row, ((swept, cell), mine) in zip(grid, found, strict=True):
        base = data[(data["swept"] == codec_sweeps.REFERENCE) & (data["cell"] == cell)]
        places = _places(mine, axis)
        for ax, value in zip(row, values, strict=True):
            ends = _sweep_lines(ax, mine, value, axis, places)
            reference = float(base[value].median()) if len(base) else np.nan
            if not np.isnan(reference):
                colour = theme.colour(BASELINE)
                ax.axhline(reference, color=colour, lw=1.1, ls=(0, (4, 3)), zorder=1)
                ends.append(chart_parts.Ending(ax.get_xlim()[1], reference, _REFERENCE, colour))
            if value != "validation_loss":
                ax.set_ylim(0, np.nanmax([mine[value].max(), reference]) * 1.1)
            _mark_places(ax, places, axis)
            ax.set_ylabel(_SWEEP_VALUES[value])
            if ax is row[-1]:
                chart_parts.label_ends(ax, ends, panel)
        row[0].set_title(str(swept) + (f", {titles[str(cell)]}" if titles[str(cell)] else ""))
    return figure


def _line_of(strategy: str, line: str, _held: str) -> str:
    """Label of a line."""
    return f"{NAMES.get(strategy, strategy)}, {line}"


def _sweep_lines(
    ax: Axes, mine: pd.DataFrame, value: str, axis: str, places: dict[str, float]
) -> list[chart_parts.Ending]:
    """Draw one line per strategy and fixed fields; returns their end labels."""
    ends = []
    lines = groups(mine.sort_values(["place", "line"], kind="stable"), _LINE)
    for (key, group), shade in zip(lines, chart_parts.shades(len(lines)), strict=True):
        alone = sum(other[0] == key[0] for other, _ in lines) == 1
        look = chart_parts.Look(theme.colour(key[0]) if alone else shade, theme.marker(key[0]), "-")
        values = group.set_index(group[axis].astype(str).map(places))[value]
        middle = values.groupby(level=0).median().dropna()
        if len(middle):
            ends.append(chart_parts.trend(ax, middle, values, _line_of(*key), look))
    return ends


def _sweep_caption(data: pd.DataFrame) -> str:
    base = " Dashed: ZeRO-3 in 16 bits." if (data["swept"] == codec_sweeps.REFERENCE).any() else ""
    drawn = [
        words
        for value, words in (
            ("step_seconds", "seconds of a step"),
            ("m", "bytes between nodes per step (ledger, in units of M, see 'Bytes between nodes')"),
            ("validation_loss", "loss of the last validation (its axis does not start at 0)"),
        )
        if data[value].notna().any()
    ]
    return (
        f"What changes when only the named codecs do: {listed(drawn)}. Markers: median over repeats; dots: "
        f"each.{base} {common_to(data)}"
    )


def _sweep_alt(data: pd.DataFrame) -> str:
    swept = data[data["swept"] != codec_sweeps.REFERENCE]
    told = [
        f"{key[0]} of {NAMES.get(str(key[1]), key[1])} at {int(key[2])} bits, blocks of {key[3]} ({key[4]}): "
        f"{metrics.geometric(group['step_seconds']):.3g} s, {group['m'].median():.3g} M"
        for key, group in groups(swept, ["swept", "strategy", "bits", "block", "line", "held"])
    ]
    return f"{'; '.join(told[:12])}."


def _sweep(name: str, title: str, axis: str, suite: str) -> Plot:
    """The figure of the sweeps along ``axis``."""
    return Plot(
        name, title, partial(_draw_sweep, axis=axis), _sweep_caption, _sweep_alt,
        partial(_sweep_data, axis=axis), suite,
    )  # fmt: skip


PLOTS: Final = (
    Plot(
        "error",
        "Codecs tried on one trial's tensors",
        _draw_error,
        _error_caption,
        _error_alt,
        _error_data,
        "block_size",
    ),
    _sweep("block_sweep", "Block size", "block", "block_size"),
    _sweep("bits_sweep", "Bits", "bits", "bits"),
)
