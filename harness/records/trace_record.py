"""Traces of steps beside the records of their trials, as ``zeropp trace`` writes them.  No torch.

Only the ranks' spans and the trial are read back from the Chrome trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from harness.records.trial_record import RecordError, wrong_field
from impl.comm.ledger import ACROSS, BETWEEN, INSIDE, WAITING, Span

COMPUTE: Final = "computing"
CODING: Final = "encoding, decoding"
LANES: Final = (COMPUTE, CODING, INSIDE, BETWEEN, WAITING)
FOLDER: Final = "traces"
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Event(BaseModel, extra="ignore", frozen=True):
    """One event of the format: a span of a rank's lane (``X``), or a name (``M``)."""

    ph: Literal["X", "M"]
    name: str
    pid: Annotated[int, Field(ge=0)]  # the rank
    cat: str = ""  # the lane
    ts: _Seconds = 0.0  # microseconds from the first
    dur: _Seconds = 0.0  # microseconds

    @model_validator(mode="after")
    def _in_a_lane(self) -> Self:
        if self.ph == "X" and self.cat not in LANES:
            raise ValueError(f"lane {self.cat[:40]!r}; expected one of {', '.join(LANES)}")
        return self


class About(BaseModel, extra="ignore", frozen=True):
    """A trace's trial, its machine, and its cost."""

    trial: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    pool: str  # of machine and code, as in records
    seconds: _Seconds  # of the slowest rank's step
    before: _Seconds  # of the step before it, which was not traced
    shows: str  # what the trace shows, in a line


class Trace(BaseModel, extra="ignore", frozen=True):
    """A file."""

    traceEvents: list[Event]  # noqa: N815  # the format's name
    otherData: About  # noqa: N815

    def spans(self) -> list[tuple[int, Span]]:
        """(rank, span) of every event of a lane, in seconds."""
        return [
            (event.pid, Span(event.cat, event.name, event.ts / 1e6, (event.ts + event.dur) / 1e6))
            for event in self.traceEvents
            if event.ph == "X"
        ]


def path_of(folder: Path, identity: str) -> Path:
    """The file of a trial's trace in its suite's results."""
    return folder / FOLDER / f"trace-{identity}.json"


def read_traces(folder: Path) -> list[Trace]:
    """All traces beside the records of a folder; a RecordError names an invalid one, or another trial's."""
    traces = []
    for path in sorted((folder / FOLDER).glob("trace-*.json")):
        try:
            trace = Trace.model_validate_json(path.read_bytes())
        except OSError as error:
            raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
        except ValidationError as error:
            raise RecordError(f"{path}: is no trace of a step: {wrong_field(error)}") from error
        if path != path_of(folder, trace.otherData.trial):
            raise RecordError(f"{path}: is of trial {trace.otherData.trial}")
        traces.append(trace)
    return traces


def overlap(spans: Sequence[Span]) -> tuple[float, float]:
    """Seconds of a rank in which messages between nodes were under way, and of them those without waiting."""
    under_way = [span for span in spans if span.lane == BETWEEN]
    waited = [span for span in spans if (span.lane, span.name) == (WAITING, ACROSS)]
    return _covered(under_way), _covered(under_way + waited) - _covered(waited)


def _covered(spans: Sequence[Span]) -> float:
    """Seconds of the spans' union."""
    seconds, until = 0.0, -math.inf
    for begin, end in sorted((span.begin, span.end) for span in spans):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds
