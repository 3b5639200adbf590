"""Notes when messages are under way, and when this rank waits for them: for a picture of one step.

A :class:`Timeline` is given to a wire for a while (:meth:`impl.comm.wire.Wire.traced`).  A message is under
way from the moment that it was posted until it was waited for: a transport does not say when it arrived.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import Tensor

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


class _Exchange(Protocol):
    send: Tensor

    def post(self) -> None: ...
    def wait(self) -> Tensor: ...
    def whole(self) -> Tensor: ...
    def close(self) -> None: ...


class Noted:
    """An exchange whose time under way is noted."""

    def __init__(self, exchange: _Exchange, timeline: Timeline, lane: str, name: str, nbytes: int) -> None:
        self._exchange, self._timeline = exchange, timeline
        self._said = (lane, name, nbytes)
        self._begin: float | None = None
        self.send = exchange.send

    def post(self) -> None:
        """See :meth:`impl.comm.wire.Exchange.post`."""
        self._begin = time.perf_counter()
        self._exchange.post()

    def wait(self) -> Tensor:
        """See :meth:`impl.comm.wire.Exchange.wait`."""
        found = self._exchange.wait()
        self._end()
        return found

    def whole(self) -> Tensor:
        """See :meth:`impl.comm.wire.Exchange.whole`."""
        found = self._exchange.whole()
        self._end()
        return found

    def close(self) -> None:
        """See :meth:`impl.comm.wire.Exchange.close`."""
        self._end()
        self._exchange.close()

    def _end(self) -> None:
        if self._begin is not None:
            lane, name, nbytes = self._said
            self._timeline.add(lane, name, self._begin, nbytes)
            self._begin = None
