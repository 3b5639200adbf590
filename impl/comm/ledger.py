"""The ledger: bytes and messages that a rank has sent, by purpose.

The wire books every message; ``impl.plan.traffic`` predicts the same rows (docs/reference/metrics.md).

A timeline, for a picture of one step, can be attached to a wire (:meth:`impl.comm.wire.Wire.traced`).  A
message is under way from its post to the end of its wait: transports do not say when it arrived.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from impl.plan.traffic import LedgerKey, Link, Sent

BETWEEN: Final = "between nodes"
INSIDE: Final = "inside the node"
WAITING: Final = "waiting"
ACROSS: Final = "for other nodes"  # names of waits
WITHIN: Final = "for this node"


@dataclass(slots=True)
class Ledger:
    """Bytes and messages that this rank has sent."""

    # bytes and messages
    booked: dict[LedgerKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def rows(self) -> dict[LedgerKey, Sent]:
        """A copy of everything booked."""
        return {key: Sent(*row) for key, row in self.booked.items()}

    def total(self, link: Link) -> int:
        """Bytes over one kind of link."""
        return sum(row[0] for key, row in self.booked.items() if key.link == link)


@dataclass(frozen=True, slots=True)
class Span:
    """A message or wait in time."""

    lane: str  # a message is between nodes if this rank's bytes leave the node
    name: str
    # in seconds of ``time.perf_counter()``, which ranks of one machine share
    begin: float
    end: float
    nbytes: int = 0  # of this rank's message


@dataclass(slots=True)
class Timeline:
    """All spans so far, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    def add(self, lane: str, name: str, begin: float, nbytes: int = 0) -> None:
        """Add a span from ``begin`` until now."""
        self.spans.append(Span(lane, name, begin, time.perf_counter(), nbytes))
