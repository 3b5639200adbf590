"""Reads traces of single steps, which ``zeropp trace`` writes next to the records.  No torch.

A trace is a file in Chrome's trace format, for the viewer Perfetto.  In the trace, each rank is a process, and each
kind of activity is a lane (a row of the picture): computing, encoding and decoding, sending inside nodes, sending
between nodes, and waiting.  A span is one interval of activity in a lane.  Reports read the spans, and the id of the
traced trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from harness.records.trial_record import RecordError, wrong_field
from impl import regular_file
from impl.comm.ledger import ACROSS, BETWEEN, INSIDE, WAITING, Span

COMPUTE: Final = "computing"
CODING: Final = "encoding, decoding"
LANES: Final = (COMPUTE, CODING, INSIDE, BETWEEN, WAITING)
FOLDER: Final = "traces"
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Event(BaseModel, extra="ignore", frozen=True):
    """One event of Chrome's trace format.

    If ``ph`` is ``X``, the event is an interval of one kind of activity of a rank.  Each kind, such as computing or
    waiting, has a row of its own in the picture, called a lane.  If ``ph`` is ``M``, the event gives a rank or a lane
    its name.
    """

    ph: Literal["X", "M"]
    name: str
    pid: Annotated[int, Field(ge=0)]  # the rank
    cat: str = ""  # the lane
    ts: _Seconds = 0.0  # beginning, in microseconds since the first event
    dur: _Seconds = 0.0  # duration in microseconds

    @model_validator(mode="after")
    def _in_a_lane(self) -> Self:
        if self.ph == "X" and self.cat not in LANES:
            raise ValueError(f"unknown lane {self.cat[:40]!r}: expected one of {', '.join(LANES)}")
        return self


class About(BaseModel, extra="ignore", frozen=True):
    """Facts about a trace: the traced trial, the machine, and how long a step takes with and without tracing."""

    trial: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    pool: str  # hash of machine and code, as in records
    seconds: _Seconds  # of the traced step, on the slowest rank
    before: _Seconds  # of the step before the traced one, which was not traced itself
    shows: str  # one line on what the trace shows


class Trace(BaseModel, extra="ignore", frozen=True):
    """A trace file of one step: the events, and facts about the trace."""

    traceEvents: list[Event]  # noqa: N815  # the format's name
    otherData: About  # noqa: N815

    def spans(self) -> list[tuple[int, Span]]:
        """Return the pair (rank, span) for each interval of activity in the trace, with times in seconds."""
        return [
            (event.pid, Span(event.cat, event.name, event.ts / 1e6, (event.ts + event.dur) / 1e6))
            for event in self.traceEvents
            if event.ph == "X"
        ]


def path_of(folder: Path, identity: str) -> Path:
    """Return the path of a trial's trace in its suite's results folder; ``identity`` is the trial's id."""
    return folder / FOLDER / f"trace-{identity}.json"


def read_traces(folder: Path) -> list[Trace]:
    """Read all traces of a results folder.

    Raises:
        RecordError: If a trace is unreadable or invalid, or its file is named after another trial.
    """
    traces = []
    for path in sorted((folder / FOLDER).glob("trace-*.json")):
        try:
            trace = Trace.model_validate_json(regular_file.read_bytes(path))
        except OSError as error:
            raise RecordError(
                f"{path}: cannot be read: {error.strerror or error}; make it readable, or delete it"
            ) from error
        except ValidationError as error:
            why = wrong_field(error)
            raise RecordError(
                f"{path}: is not the trace of a step: {why}; delete the file, or write it again with `zeropp trace`"
            ) from error
        if path != path_of(folder, trace.otherData.trial):
            raise RecordError(
                f"{path}: holds the trace of trial {trace.otherData.trial}; name the file after this trial, or "
                "delete the file"
            )
        traces.append(trace)
    return traces


def overlap(spans: Sequence[Span]) -> tuple[float, float]:
    """Return how long one rank sent messages between nodes, and how much of this time it did not wait for other nodes.

    Args:
        spans: The intervals of activity of one rank.

    Returns:
        (seconds in which messages between nodes were under way, seconds of this time in which the rank did not wait for
        messages from other nodes).
    """
    under_way = [span for span in spans if span.lane == BETWEEN]
    waited = [span for span in spans if (span.lane, span.name) == (WAITING, ACROSS)]
    return _covered(under_way), _covered(under_way + waited) - _covered(waited)


def _covered(spans: Sequence[Span]) -> float:
    """Return the seconds that are covered by at least one span."""
    seconds, until = 0.0, -math.inf
    for begin, end in sorted((span.begin, span.end) for span in spans):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds
