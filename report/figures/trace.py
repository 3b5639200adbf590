"""Draws one traced step of a contender: what the first rank computed, encoded, sent and waited for, and when.

Data are beside the records where ``zeropp trace`` ran (:mod:`harness.records.trace_record`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from harness.records.trace_record import hidden
from impl.comm.timeline import Span
from report.data.metrics import Derived
from report.data.text import listed
from report.draw import chart_parts, theme
from report.draw.figure_definition import Plot, by_cell_and_contender, common_to
from report.figures.speed import KEPT

_ROOM_INCHES: Final = 0.25  # a panel's title


def _data(derived: Derived) -> pd.DataFrame:
    spans = derived.frames.traces
    return derived.trials[KEPT].merge(spans[spans["rank"] == 0], on="id")


def _traced(data: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """(title, spans) of each trial."""
    for title, _, group in by_cell_and_contender(data):
        for identity, spans in group.groupby("id", sort=False):
            yield f"{title} ({identity})", spans


def _under_way(spans: pd.DataFrame) -> tuple[float, float]:
    """Seconds in which messages between nodes were under way, and the share without waiting for one."""
    columns = (spans["lane"], spans["name"], spans["begin"], spans["end"])
    total, apart = hidden([Span(*row) for row in zip(*columns, strict=True)])
    return total, apart / total if total else 0.0


def _draw(data: pd.DataFrame) -> Figure:
    shown = list(_traced(data))
    figure, grid = chart_parts.panels(
        1, len(shown), height=len(shown) * (chart_parts.LANES_INCHES + _ROOM_INCHES) + 0.8
    )
    last = data["end"].max()
    for (ax,), (title, spans) in zip(grid, shown, strict=True):
        bars = zip(spans["lane"], 1e3 * spans["begin"], 1e3 * spans["end"], strict=True)
        chart_parts.lanes(ax, bars)
        ax.set_xlim(0, 1e3 * last)
        ax.set_title(title)
    grid[-1][0].set_xlabel("ms")
    chart_parts.legend_above(figure, grid[0][0], columns=len(theme.LANES))
    return figure


def _told(data: pd.DataFrame) -> list[str]:
    told = []
    for title, spans in _traced(data):
        total, share = _under_way(spans)
        seconds, before = spans["seconds"].iloc[0], spans["before"].iloc[0]
        told.append(
            f"{title}: {total:.3g} s under way, {share:.0%} of it hidden, in a step of {seconds:.3g} s "
            f"(the one before, which nothing noted: {before:.3g} s)"
        )
    return told


def _caption(data: pd.DataFrame) -> str:
    return (
        "One step of the first rank, noted by `zeropp trace` apart from the trials. Messages are under way "
        "from when they are posted until they are waited for; hidden: without waiting for one between nodes. "
        f"{'; '.join(_told(data))}. {common_to(data)}"
    )


def _alt(data: pd.DataFrame) -> str:
    return f"Lanes of one step: {listed(_told(data)[:4])}."


PLOTS: Final = (Plot("trace", "One step, taken apart", _draw, _caption, _alt, _data, extra=True),)
