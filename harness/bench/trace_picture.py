"""The picture of a traced step: a row of lanes for each rank, over the time of the step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from harness.bench.trace import LANES, Traced, told
from report.draw import theme

_LANE_INCHES: Final = 0.13
_ROOM_INCHES: Final = 0.9  # title, axis and legend
_COLOURS: Final = dict(zip(LANES, ("#009e73", "#e69f00", "#56b4e9", "#0072b2", "#bbbbbb"), strict=True))


def draw(title: str, ranks: Sequence[Traced]) -> Figure:
    """A panel for each rank; lanes as in the trace, computing on top."""
    height = _ROOM_INCHES + len(ranks) * (len(LANES) + 1) * _LANE_INCHES
    figure = Figure(figsize=(theme.WIDTH, height), layout="constrained")
    start = min(span.begin for rank in ranks for span in rank.spans)
    panels = figure.subplots(len(ranks), 1, squeeze=False, sharex=True)[:, 0]
    for number, (ax, rank) in enumerate(zip(panels, ranks, strict=True)):
        for place, lane in enumerate(LANES):
            spans = [span for span in rank.spans if span.lane == lane]
            bars = [(1e3 * (span.begin - start), 1e3 * (span.end - span.begin)) for span in spans]
            ax.broken_barh(bars, (place - 0.45, 0.9), color=_COLOURS[lane], lw=0, label=lane)
        ax.set_ylim(len(LANES) - 0.5, -0.5)
        ax.set_yticks([])
        ax.set_ylabel(f"rank {number}", rotation=0, ha="right", va="center")
        ax.grid(visible=False, axis="y")
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
