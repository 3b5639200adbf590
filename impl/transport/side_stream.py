"""Runs work of a GPU concurrently with its computation, on a separate stream, and tells when the work has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Arrival:
    """The end of some work on a side stream.

    Without an event there is nothing to wait for: the work has ended already, or is still being enqueued.
    """

    event: torch.cuda.Event | None = None  # recorded on the side stream after the work
    joined: bool = False  # whether the stream of the computation waits for the end already

    def join(self) -> None:
        """Make later work of the current stream wait until this work on the side stream has ended."""
        if self.event is not None:
            self.event.wait()

    def is_completed(self) -> bool:
        """Return whether the work has ended; False while it is being enqueued."""
        return self.event is not None and bool(self.event.query())  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        """Block this thread until the work has ended, so that the host may read or overwrite the work's memory."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """A second stream of a GPU, for work that overlaps with the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def beside(self, *, posted: bool = False) -> Iterator[Arrival]:
        """Enqueue the body's work on this stream, after all earlier work of the current stream.

        Yields the end of the body's work; it may be waited for once the context is left.

        ``posted`` says that the body begins by waiting for messages that the current stream has just posted.  They are
        sent after all earlier work of the current stream.  Therefore this wait puts the two streams in order, and no
        event is needed.
        """
        arrival = Arrival()
        if not posted:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            try:
                yield arrival
            finally:
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record(self._stream)
                arrival.event = event
