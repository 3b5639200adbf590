"""Figures of codecs: error by bits and block size, and sweeps of speed, bytes and loss."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from report.data import codec_sweeps
from report.data.contender import BASELINE, NAMES
from report.data.frames import groups
from report.data.metrics import Derived
from report.data.text import counted, listed
from report.draw import drawing, theme
from report.draw.plot import Plot, common_to, titles_of

_KEPT: Final = ["id", "strategy", "contender", "place", "first", "cell", "where", "seed", "repeat"]
_REFERENCE: Final = "ZeRO-3, 16 bits"
_SWEEP_VALUES: Final = {
    "step_seconds": "seconds per step",
    "m": "bytes between nodes, in M",
    "validation_loss": "final validation loss",
}


def _error_data(derived: Derived) -> pd.DataFrame:
    found = codec_sweeps.codecs(derived.frames, derived.trials)
    several = found.groupby("purpose")["codec"].transform("nunique") >= 3
    return found[several]


def _block_places(values: pd.Series[str]) -> dict[str, float]:
    """Log2 of each block size; a single scale per shard is right of the largest."""
    sizes = sorted({int(value) for value in values if value != "shard"})
    places = {str(size): float(np.log2(size)) for size in sizes}
    if (values == "shard").any():
        places["shard"] = (max(places.values()) if places else 0.0) + 1.5
    return places


def _error_axis(data: pd.DataFrame) -> tuple[str, str]:
    """Columns for the x axis and the lines: blocks on the axis if they vary, else bits."""
    return ("block", "bits") if len(data["block"].unique()) > 1 else ("bits", "block")


def _places(data: pd.DataFrame, axis: str) -> dict[str, float]:
    if axis == "block":
        return _block_places(data["block"])
    return {str(bits): float(bits) for bits in sorted(data["bits"].unique())}


def _mark_places(ax: Axes, places: dict[str, float], axis: str) -> None:
    ax.xaxis.set_major_locator(FixedLocator(list(places.values())))
    ax.set_xticklabels(list(places), rotation=45 if len(places) > 5 else 0)
    ax.set_xlabel("elements per block" if axis == "block" else "bits per element")


def _line_name(line: str, value: object, options: str) -> str:
    told = f"{value} bits" if line == "bits" else f"blocks of {value}"
    return f"{told}, {options}" if options else told


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
            lines = groups(mine.sort_values([line, "options"], kind="stable"), [line, "options"])
            for ((held, options), group), colour in zip(lines, drawing.shades(len(lines)), strict=True):
                at = group[axis].astype(str).map(places)
                middle = group.groupby(at)[value].median()
                ax.plot(middle.index, middle, "o-", color=colour, mec="white", mew=0.6)
                ax.plot(at, group[value], ".", color=colour, ms=2.5, alpha=0.4)
                name = _line_name(line, held, options)
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
        "Error of integer codecs, each tried on tensors of the trials, whichever they sent: vNMSE = "
        "sum((decoded - x)^2) / sum(x^2), and the largest |decoded - x| over the largest |x|. Markers: "
        f"median over {counted(data['unit'].nunique(), 'unit')} and repeats; dots: each. 'shard': one scale "
        "for a whole shard, the paper's non-blocked baseline."
    )


def _error_alt(data: pd.DataFrame) -> str:
    medians = data.groupby(["purpose", "codec"], sort=False)["vnmse"].median()
    told = [
        f"{key[0]} {key[1]} {value:.2g}" for key, value in zip(medians.index.to_list(), medians, strict=True)
    ]
    return f"Median vNMSE: {listed(told[:14])}."


def _sweep_data(derived: Derived, axis: str) -> pd.DataFrame:
    found = codec_sweeps.sweeps(derived.frames, derived.trials, axis)
    found = found.assign(m=found["sent_bytes"] / found["m_bytes"])
    kept = [
        *_KEPT,
        "swept",
        "line",
        "held",
        "bits",
        "block",
        "step_seconds",
        "sent_bytes",
        "m",
        "validation_loss",
    ]
    return found[kept]


def _block_data(derived: Derived) -> pd.DataFrame:
    return _sweep_data(derived, "block")


def _bits_data(derived: Derived) -> pd.DataFrame:
    return _sweep_data(derived, "bits")


def _draw_sweep(data: pd.DataFrame, axis: str) -> Figure | None:
    if data.empty:
        return None
    values = [value for value in _SWEEP_VALUES if data[value].notna().any()]
    titles = titles_of(data)
    swept_rows = data[data["swept"] != codec_sweeps.REFERENCE].astype({"bits": int})
    found = groups(swept_rows, ["swept", "cell"])
    beside = [_names_of_lines(mine) for _, mine in found]
    panel = max(1.6, *(drawing.labels_inches([*names, _REFERENCE]) for names in beside))
    figure, grid = drawing.panels(len(values), len(found), height=0.3 + (panel + 0.6) * len(found), width=8.2)
    for row, ((swept, cell), mine) in zip(grid, found, strict=True):
        base = data[(data["swept"] == codec_sweeps.REFERENCE) & (data["cell"] == cell)]
        places = _places(mine, axis)
        for ax, value in zip(row, values, strict=True):
            ends = _sweep_lines(ax, mine, value, axis, places)
            reference = float(base[value].median()) if len(base) else np.nan
            if not np.isnan(reference):
                colour = theme.colour(BASELINE)
                ax.axhline(reference, color=colour, lw=1.1, ls=(0, (4, 3)), zorder=1)
                ends.append(drawing.Ending(ax.get_xlim()[1], reference, _REFERENCE, colour))
            if value != "validation_loss":
                ax.set_ylim(0, np.nanmax([mine[value].max(), reference]) * 1.1)
            _mark_places(ax, places, axis)
            ax.set_ylabel(_SWEEP_VALUES[value])
            if ax is row[-1]:
                drawing.label_ends(ax, ends, panel)
        row[0].set_title(str(swept) + (f", {titles[str(cell)]}" if titles[str(cell)] else ""))
    return figure


def _line_of(strategy: object, line: object) -> str:
    return f"{NAMES.get(str(strategy), strategy)}, {line}"


def _names_of_lines(mine: pd.DataFrame) -> list[str]:
    """Labels of the lines of one panel."""
    return [_line_of(key[0], key[1]) for key, _ in groups(mine, ["strategy", "line", "held"])]


def _sweep_lines(
    ax: Axes, mine: pd.DataFrame, value: str, axis: str, places: dict[str, float]
) -> list[drawing.Ending]:
    """Draw one line per strategy and fixed fields; returns their end labels."""
    ends = []
    lines = groups(mine.sort_values(["place", "line"], kind="stable"), ["strategy", "line", "held"])
    shades = drawing.shades(len(lines))
    for index, ((strategy, line, _), group) in enumerate(lines):
        alone = sum(key[0] == strategy for key, _ in lines) == 1
        colour = theme.colour(str(strategy)) if alone else shades[index]
        middle = group.groupby(group[axis].astype(str).map(places))[value].median().dropna()
        if middle.empty:
            continue
        marker = theme.marker(str(strategy))
        ax.plot(middle.index, middle, color=colour, marker=marker, mec="white", mew=0.6, zorder=3)
        ax.plot(group[axis].astype(str).map(places), group[value], ".", color=colour, ms=2.5, alpha=0.4)
        name = _line_of(strategy, line)
        ends.append(drawing.Ending(float(middle.index[-1]), float(middle.iloc[-1]), name, colour))
    return ends


def _draw_block(data: pd.DataFrame) -> Figure | None:
    return _draw_sweep(data, "block")


def _draw_bits(data: pd.DataFrame) -> Figure | None:
    return _draw_sweep(data, "bits")


def _sweep_caption(data: pd.DataFrame) -> str:
    base = " Dashed: ZeRO-3 in 16 bits." if (data["swept"] == codec_sweeps.REFERENCE).any() else ""
    return (
        "What changes when only the named codecs do: median step seconds, bytes between nodes per step "
        "(ledger, in units of M, see 'Bytes between nodes') and loss of the last validation (its axis does "
        f"not start at 0). Markers: median over repeats; dots: each.{base} {common_to(data)}"
    )


def _sweep_alt(data: pd.DataFrame) -> str:
    swept = data[data["swept"] != codec_sweeps.REFERENCE]
    told = [
        f"{key[0]} of {NAMES.get(str(key[1]), key[1])} at {int(key[2])} bits, blocks of {key[3]} ({key[4]}): "
        f"{group['step_seconds'].median():.3g} s, {group['m'].median():.3g} M"
        for key, group in groups(swept, ["swept", "strategy", "bits", "block", "line", "held"])
    ]
    return f"{'; '.join(told[:12])}."


PLOTS: Final = (
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
