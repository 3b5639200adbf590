"""Draws a traced step: the first rank as a figure on the page, and all ranks as a picture in the trace's folder."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Final

import pandas as pd

from harness.records.trace_record import LANES, Trace, overlap
from harness.records.trial_record import write_whole
from impl import regular_file
from impl.comm.ledger import Span
from report.data.metrics import KEPT, Derived
from report.draw.figure import Figure
from report.draw.marks import Lanes
from report.draw.names_of_rows import by_setting_and_configuration
from report.draw.theme import Style, fonts

_LANES: Final = Lanes(LANES)


def _traced(derived: Derived) -> pd.DataFrame:
    """Return what the first rank of each traced trial did and when, one row per span of time.

    Column ``summary`` holds a clause on the trial: for how long messages between nodes were under way, and during what
    share of this time the rank did not wait for them.
    """
    spans = derived.frames.traces
    table = derived.trials[KEPT].merge(spans[spans["rank"] == 0], on="id")
    parts = []
    for name, _, trials in by_setting_and_configuration(table):
        for identity, rows in trials.groupby("id", sort=False):
            total, apart = overlap([Span(*row) for row in rows[["lane", "name", "begin", "end"]].to_numpy()])
            share, first = apart / total if total else 0.0, rows.iloc[0]
            sentence = (
                f"{name} ({identity}): messages between nodes were under way for {total:.3g} s, {share:.0%} of this "
                "time hidden, in a step "
                f"of {first['seconds']:.3g} s (the step before it, untraced, took {first['before']:.3g} s)"
            )
            parts.append(rows.assign(panel=f"{name} ({identity})", summary=sentence))
    return pd.concat(parts, ignore_index=True) if parts else table


TRACE: Final = Figure(
    name="trace",
    title="One step, taken apart",
    question="What did the first rank compute, encode, send and wait for in one step, and when?",
    table=_traced,
    mark=_LANES,
    note="`zeropp trace` recorded the step, separately from the trials. A message is under way from when it is posted "
    "to the end of the rank's wait for it; this time is hidden while the rank waits for no message between nodes.",
)


def write(trace: Path) -> Path:
    """Draw a trace of ``zeropp trace`` into an SVG file of the same name and folder; return the path of this file."""
    record = Trace.model_validate_json(regular_file.read_bytes(trace))
    rows = [
        {"panel": f"rank {rank}", "lane": span.lane, "begin": span.begin, "end": span.end}
        for rank, span in record.spans()
    ]
    buffer = io.BytesIO()
    with fonts():
        figure = _LANES.draw(pd.DataFrame(rows), Style())
        figure.supxlabel(textwrap.fill(record.otherData.shows, 110), fontsize=8)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    picture = trace.with_suffix(".svg")
    write_whole(picture, buffer.getvalue())
    return picture
