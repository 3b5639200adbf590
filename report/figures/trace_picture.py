"""The picture of a traced step: a row of lanes for each rank, over the time of the step."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path

import pandas as pd

from harness.records.trace_record import Trace
from report.draw.theme import Style, fonts
from report.figures.speed import LANES_OF_A_RANK


def write(trace: Path) -> Path:
    """Draw a trace that ``zeropp trace`` wrote beside it, as SVG, by a rename; returns where."""
    found = Trace.model_validate_json(trace.read_bytes())
    rows = [
        {"panel": f"rank {rank}", "lane": span.lane, "begin": span.begin, "end": span.end}
        for rank, span in found.spans()
    ]
    buffer = io.BytesIO()
    with fonts():
        figure = LANES_OF_A_RANK.draw(pd.DataFrame(rows), Style())
        figure.supxlabel(textwrap.fill(found.otherData.shows, 110), fontsize=8)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    picture, aside = trace.with_suffix(".svg"), trace.with_suffix(".tmp")
    aside.write_bytes(buffer.getvalue())
    return aside.replace(picture)
