"""Runs work on a second stream of a GPU while the first stream computes, and shows when the work has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Arrival:
    """Lets other streams or the host wait until some work on a side stream has ended.

    ``event`` is None in two cases: the work is still being enqueued, or there is no work.  In these cases :meth:`join`
    and :meth:`finish` return at once.
    """

    event: torch.cuda.Event | None = None  # recorded on the side stream after the work
    joined: bool = False  # whether the stream of the computation has been made to wait for the event

    def join(self) -> None:
        """Make all later work of the current stream wait until the side stream has finished this work."""
        if self.event is not None:
            self.event.wait()

    def is_completed(self) -> bool:
        """Return whether the work has ended; False if ``event`` is None."""
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
        """Return a context whose GPU work runs on this stream, after all earlier work of the current stream.

        The context yields an :class:`Arrival`, with which other streams or the host can wait for the end of the body's
        work.  The ``event`` of the :class:`Arrival` is set when the context is left.

        Args:
            posted: True if the body begins by waiting for messages that the current stream has just posted.  The
                context then does not make this stream wait for the current stream.  Waiting for the messages is enough,
                because they are sent after all earlier work of the current stream.
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
