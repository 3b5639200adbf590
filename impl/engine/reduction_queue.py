"""Starts the reductions of units in one order on all ranks, with a limit on those under way."""

from __future__ import annotations

from collections.abc import Sequence

from impl.comm.transfer import Transfer
from impl.unit.unit import Unit


class ReductionQueue:
    """The reductions of one backward pass after the other.

    Args:
        bucket: elements that may be under way at once; an earlier one is finished before the one that would
            exceed it begins.

    Attributes:
        order: indices of all units in the order of their reductions; it may change between passes.
        started: indices of the units whose reduction has begun in this pass.
    """

    def __init__(self, units: Sequence[Unit], order: Sequence[int], bucket: int) -> None:
        self.order = order
        self.started: set[int] = set()
        self._units, self._bucket = units, bucket
        self._ready: set[int] = set()
        self._position = 0  # in the order
        self._transfers: dict[int, Transfer] = {}  # under way, by unit, as they were started
        self._proceeded = True  # since the last one was started

    def next(self) -> int | None:
        """The unit whose gradient is the next to be reduced."""
        while self._position < len(self.order):
            index = self.order[self._position]
            if self._units[index].geometry.trainable and index not in self.started:
                return index
            self._position += 1
        return None

    def ready(self, unit: int) -> None:
        """All gradients of ``unit`` are there: start it in its turn, and those that waited for it."""
        self._ready.add(unit)
        while (index := self.next()) is not None and index in self._ready:
            self._start(index)

    def proceed(self) -> None:
        """Let every reduction under way post its next message, so that no link idles.

        Once for each reduction that was started: when the first gradient after it arrives, or else when the
        next one starts.  So ranks post in one order, whichever units bring them gradients.
        """
        if not self._proceeded:
            self._proceeded = True
            for transfer in self._transfers.values():
                transfer.proceed()

    def start_all(self) -> None:
        """Start what has not been started, whether gradients came or not."""
        while (index := self.next()) is not None:
            self._start(index)

    def drop_failed(self) -> None:
        """Forget those that were interrupted: their gradients are lost."""
        self._transfers = {i: transfer for i, transfer in self._transfers.items() if not transfer.failed}

    def finish(self) -> None:
        """Wait for all that are under way; the pass is over."""
        for transfer in self._transfers.values():
            transfer.wait()
        self._transfers.clear()
        self.started.clear()
        self._ready.clear()
        self._position = 0

    def _start(self, index: int) -> None:
        """Start one, after the others have gone on by a message, within the limit on those under way."""
        self.proceed()
        self._proceeded = False
        left = self._bucket - self._units[index].geometry.padded
        under_way = {i: self._units[i].geometry.padded for i, t in self._transfers.items() if not t.complete}
        for earlier in list(under_way):
            if sum(under_way.values()) > left:
                self._transfers[earlier].wait()
                del under_way[earlier]
        self._transfers = {i: transfer for i, transfer in self._transfers.items() if not transfer.complete}
        self._transfers[index] = self._units[index].reduce()
        self.started.add(index)
