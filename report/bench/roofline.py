"""Draws the roofline of codecs: elements a second against elements per byte moved, below what a copy allows.

A codec does little arithmetic for each byte, so the roof that counts is memory's: the copy's bytes a second,
times the elements for which an operation reads and writes one byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from report.bench.boards import BACKENDS, BOARDS, OPERATIONS
from report.data.frames import groups
from report.data.text import listed
from report.draw import chart_parts, theme
from report.draw.figure_definition import Drawing

_SPLIT: Final = BOARDS["codec"].split
_MARKERS: Final = dict(zip(OPERATIONS.values(), "osDP^<>", strict=True))
_AIR: Final = 1.25  # a factor of both axes around the dots
_LEAST_RANGE: Final = 4.0  # of the x axis: the roof's slope is seen
NAMES: Final = tuple("-".join(("roofline", *values)) for values in product(*_SPLIT.values()))
"""File names of all figures that there may be."""


def rooflines(data: pd.DataFrame) -> Iterator[tuple[Drawing, pd.DataFrame]]:
    """One figure for each type of elements and device that rounds of codecs have, with its rounds."""
    for name, values in zip(NAMES, product(*_SPLIT.values()), strict=True):
        mine = data
        for column, value in zip(_SPLIT, values, strict=True):
            mine = mine[mine[column] == value]
        if len(mine):
            yield Drawing(name, f"Roofline of codecs, {', '.join(values)}", _draw, _caption, _described), mine


def points(rounds: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """One row for each backend, operation and codec, and the roof, in GB/s.

    Columns: ``intensity``, elements per byte moved; ``rate``, the median of 10^9 elements a second;
    ``reached``, that over what the roof allows: the median rate of copies of as many elements.  The roof that
    is returned, and drawn, is that of the longest.
    """
    rounds = rounds.assign(
        intensity=rounds["numel"] / rounds["moved_bytes"],
        rate=rounds["numel"] / rounds["seconds"] / 1e9,
        roof=2 * rounds["element_bytes"] / rounds["reference_seconds"] / 1e9,
    )
    roofs = rounds.groupby("numel")["roof"].median()
    keys = ["backend", "operation", "codec", "numel"]
    found = rounds.groupby(keys, sort=False)[["intensity", "rate"]].median().reset_index()
    found["reached"] = found["rate"] / (found["numel"].map(roofs) * found["intensity"])
    return found, float(roofs.iloc[-1])


def _draw(rounds: pd.DataFrame) -> Figure:
    found, roof = points(rounds)
    figure, ((ax,),) = chart_parts.panels(1, height=3.4)
    for (backend, operation), dots in groups(found, ["backend", "operation"]):
        ax.plot(
            dots["intensity"],
            dots["rate"],
            _MARKERS[str(operation)],
            color=BACKENDS[str(backend)],
            ms=5,
            mec="white",
            mew=0.5,
            ls="",
        )
    low, high = float(found["intensity"].min()) / _AIR, float(found["intensity"].max()) * _AIR
    wider = max(1.0, (_LEAST_RANGE * low / high) ** 0.5)
    ends = np.array([low / wider, high * wider])
    ax.plot(ends, roof * ends, color=theme.INK, lw=1.1, ls=(0, (4, 3)), label=f"copy, {roof:.3g} GB/s")
    ax.set_xlim(*ends)
    bottom, top = float(found["rate"].min()) / _AIR, max(float(found["rate"].max()), roof * ends[1]) * _AIR
    ax.set_yscale("log")
    ax.set_ylim(bottom, top)
    chart_parts.decades(ax)
    chart_parts.log_ticks(ax, [value for value in (0.02, 0.05, 0.1, 0.2, 0.5) if ends[0] <= value <= ends[1]])
    ax.set_xlim(*ends)
    for backend in dict.fromkeys(found["backend"]):
        ax.plot([], [], "o", ms=6, color=BACKENDS[str(backend)], label=backend)
    for operation in dict.fromkeys(found["operation"]):
        ax.plot([], [], _MARKERS[str(operation)], ms=6, mfc="none", mec=theme.INK, label=operation)
    ax.set_xlabel("elements per byte read or written")
    ax.set_ylabel("10⁹ elements/s")
    chart_parts.legend_above(figure, ax, columns=4)
    return figure


def _caption(rounds: pd.DataFrame) -> str:
    _, roof = points(rounds)
    return (
        "Elements a second against elements per byte moved, medians over rounds; a dot is a codec, its "
        f"colour the backend and its marker the operation. Dashed: {roof:.3g} GB/s, the median rate of a "
        "copy of the longest row: on it memory is the limit, below it arithmetic. A codec that writes less "
        "than it reads can be above it."
    )


def _described(rounds: pd.DataFrame) -> str:
    found, roof = points(rounds)
    told = [
        f"{backend}, {operation}: {dots['reached'].min():.2g} to {dots['reached'].max():.2g}"
        for (backend, operation), dots in groups(found, ["backend", "operation"])
    ]
    return f"The roof is {roof:.3g} GB/s. Share of a copy of as many elements: {listed(told)}."
