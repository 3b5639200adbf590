"""Work beside a GPU's computation: a stream of its own, and an event at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Arrival:
    """The end of work under way; without an event it has ended."""

    event: torch.cuda.Event | None = None  # recorded on its stream, after it

    def join(self) -> None:
        """Let later work of the current stream wait for the end."""
        if self.event is not None:
            self.event.wait()

    def finish(self) -> None:
        """Block this thread until the end, so that it may read or overwrite the work's memory."""
        if self.event is not None:
            self.event.synchronize()


class SideStream:
    """A stream of a GPU beside that of its computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def beside(self) -> Iterator[Arrival]:
        """Enqueue the body here, after the current stream's earlier work; yields its end."""
        arrival = Arrival()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield arrival
            arrival.event = self._stream.record_event()
