"""Counts the bytes and messages that a rank has sent, by purpose, and records when messages were under way.

The wire, which sends all messages, books every message in its :class:`Ledger`, under the message's phase, purpose,
unit, axis and kind of link.  ``impl.plan.traffic`` predicts the same numbers (docs/reference/metrics.md).

A :class:`Timeline` records when messages were under way and when the rank waited, so that a step can be drawn.  It can
be attached to a wire (:meth:`impl.comm.wire.Wire.traced`).  A message counts as under way from the moment at which it
was posted to the end of the wait for it, because transports do not tell when it arrived.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from impl.plan.traffic import LedgerKey, Link, Purpose, Sent

BETWEEN: Final = "between nodes"
INSIDE: Final = "inside the node"
WAITING: Final = "waiting"
ACROSS: Final = "for other nodes"  # the name of a wait for messages that cross between nodes
WITHIN: Final = "for this node"  # the name of any other wait
_LINKS: Final[tuple[Link, ...]] = ("inter", "intra")


@dataclass(slots=True)
class Ledger:
    """Counts the bytes and messages that this rank has sent."""

    # for each key, a list of two numbers: bytes and messages
    booked: dict[LedgerKey, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def rows(self) -> dict[LedgerKey, Sent]:
        """Return a copy of the bytes and messages booked so far, by phase, purpose, unit, axis and kind of link."""
        return {key: Sent(*row) for key, row in self.booked.items()}

    def total(self, link: Link) -> int:
        """Return the bytes sent over one kind of link: ``inter`` (between nodes) or ``intra`` (inside nodes)."""
        return sum(row[0] for key, row in self.booked.items() if key.link == link)

    def by_purpose(self) -> dict[tuple[Purpose, Link], Sent]:
        """Return the bytes and messages for each purpose and kind of link, summed over phases, units and hops."""
        sums: defaultdict[tuple[Purpose, Link], list[int]] = defaultdict(lambda: [0, 0])
        for key, (nbytes, messages) in self.booked.items():
            row = sums[key.purpose, key.link]
            row[0] += nbytes
            row[1] += messages
        return {key: Sent(*row) for key, row in sums.items()}

    def __str__(self) -> str:
        """Return a table of bytes and messages, with a line for each purpose and a last line for their sum."""
        sums, nothing = self.by_purpose(), Sent(0, 0)
        rows: list[tuple[str, ...]] = [
            ("sent by this rank", "bytes between nodes", "bytes inside nodes", "messages")
        ]
        total = [0, 0, 0]
        for purpose in dict.fromkeys(purpose for purpose, _ in sums):
            inter, intra = (sums.get((purpose, link), nothing) for link in _LINKS)
            figures = inter.bytes, intra.bytes, inter.messages + intra.messages
            total = [sum(pair) for pair in zip(total, figures, strict=True)]
            rows.append((purpose, *(f"{figure:,}" for figure in figures)))
        rows.append(("total", *(f"{figure:,}" for figure in total)))
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = []
        for name, *texts in rows:
            cells = (text.rjust(width) for text, width in zip(texts, others, strict=True))
            lines.append("  ".join([name.ljust(first), *cells]))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Span:
    """The time during which a message was under way, or during which this rank waited for messages."""

    # The line of the drawing that shows the span: BETWEEN for a message from which bytes leave this rank's node, INSIDE
    # for any other message, WAITING for a wait.
    lane: str
    name: str  # for a message: its purpose and unit; for a wait: ACROSS or WITHIN
    # in seconds of ``time.perf_counter()``, a clock that the ranks of one machine share
    begin: float
    end: float
    nbytes: int = 0  # bytes of this rank's message


@dataclass(slots=True)
class Timeline:
    """The times of one rank's messages and waits, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    def add(self, lane: str, name: str, begin: float, nbytes: int = 0) -> None:
        """Add a message or a wait that began at ``begin``, in seconds of ``time.perf_counter()``, and ends now.

        ``lane`` is the line of the drawing that shows the message or the wait, and ``name`` says what it is for
        (:class:`Span`).  ``nbytes`` are the bytes of this rank's message; 0 for a wait.
        """
        self.spans.append(Span(lane, name, begin, time.perf_counter(), nbytes))
