"""The picture of a traced step: a row of lanes for each rank, over the time of the step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from harness.bench.trace import Traced, told
from harness.records.trace_record import LANES
from report.draw import chart_parts, theme

_ROOM_INCHES: Final = 0.9  # title, axis and legend


def draw(title: str, ranks: Sequence[Traced]) -> Figure:
    """A panel for each rank; lanes as in the trace, computing on top."""
    height = _ROOM_INCHES + len(ranks) * chart_parts.LANES_INCHES
    figure = Figure(figsize=(theme.inches(), height), layout="constrained")
    start = min(span.begin for rank in ranks for span in rank.spans)
    panels = figure.subplots(len(ranks), 1, squeeze=False, sharex=True)[:, 0]
    for number, (ax, rank) in enumerate(zip(panels, ranks, strict=True)):
        chart_parts.lanes(ax, [(s.lane, 1e3 * (s.begin - start), 1e3 * (s.end - start)) for s in rank.spans])
        ax.set_ylabel(f"rank {number}", rotation=0, ha="right", va="center")
    panels[0].set_title(f"{title}: {told(ranks)}", fontsize=8)
    panels[-1].set_xlabel("ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(LANES))
    return figure


def write(path: Path, title: str, ranks: Sequence[Traced]) -> None:
    """Write the picture as SVG, by a rename."""
    buffer = io.BytesIO()
    with theme.style():
        draw(title, ranks).savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    aside = path.with_suffix(".tmp")
    aside.write_bytes(buffer.getvalue())
    aside.replace(path)
