"""A stream of a GPU that runs only when a test lets it, with events that know when it passed them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Stream:
    """A simulated stream of a device: work, in seconds, and events are queued, and run when the test lets them."""

    def __init__(self) -> None:
        self.queued: list[Any] = []
        self.now = 0.0

    def run(self) -> None:
        """Run everything that is queued."""
        for item in self.queued:
            if isinstance(item, float):
                self.now += item
            else:
                item.at = self.now
        self.queued.clear()

    def event(self, *, enable_timing: bool) -> Any:
        """Return an event like ``torch.cuda.Event``."""
        event = SimpleNamespace(at=-1.0, query=lambda: event.at >= 0)
        event.record = lambda *_: self.queued.append(event)
        event.elapsed_time = lambda end: 1e3 * (end.at - event.at)
        return event
