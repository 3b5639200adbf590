"""Notes when messages are under way, and when this rank waits for them: for a picture of one step.

A :class:`Timeline` is given to a wire for a while (:meth:`impl.comm.wire.Wire.traced`).  A message is under
way from the moment that it was posted until it was waited for: a transport does not say when it arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

BETWEEN: Final = "between nodes"
INSIDE: Final = "inside the node"
WAITING: Final = "waiting"
ACROSS: Final = "for other nodes"  # names of waits
WITHIN: Final = "for this node"


@dataclass(frozen=True, slots=True)
class Span:
    """What was going on for a while.

    Attributes:
        lane: whom it occupied; a message is between nodes if what this rank sends leaves the node.
        begin, end: in seconds of ``time.perf_counter()``, which ranks of one machine share.
        nbytes: that this rank sent, of a message.
    """

    lane: str
    name: str
    begin: float
    end: float
    nbytes: int = 0


@dataclass(slots=True)
class Timeline:
    """All spans so far, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    def add(self, lane: str, name: str, begin: float, nbytes: int = 0) -> None:
        """Note what began at ``begin`` and ends now."""
        self.spans.append(Span(lane, name, begin, time.perf_counter(), nbytes))
