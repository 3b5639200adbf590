"""The queue of a backward pass's gradient reductions: their order, and how many are under way at once.

Pure: no torch.  The engine's reductions (:mod:`impl.unit.gradient_reduction`) and the simulated ones
(:mod:`impl.plan.timeline`) are driven by this one class, so that what is predicted is what happens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Progress(enum.IntEnum):
    """Progress of a unit's reduction in one backward pass."""

    COLLECTING = 0  # some or all gradients of this pass are missing
    READY = 1  # none is missing; it waits for its turn
    REDUCING = 2  # hops are under way
    REDUCED = 3  # the mean is in this rank's shard
    FAILED = 4  # it was interrupted while hops were under way: its gradients are lost


class Reducing(Protocol):
    """The reduction of one unit's gradient."""

    elements: int  # of the gradient, with padding
    progress: Progress

    def start(self) -> None:
        """Post the first hop; afterwards it is REDUCING, or REDUCED where there is no hop."""

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the next hop, or ``finish``: afterwards it is REDUCED; nothing unless it is REDUCING."""


class ReductionQueue:
    """A backward pass's reductions in one order, with at most ``bucket`` elements under way."""

    def __init__(self, bucket: float) -> None:
        self.order: Sequence[Reducing] = ()  # of the trained units, equal on all ranks
        self._bucket = bucket
        self._position = 0  # of the next to start, in the order
        self._under_way: list[Reducing] = []  # in their order
        self._behind = False  # whether one was started since those under way last posted

    def is_next(self, reduction: Reducing) -> bool:
        """Whether ``reduction`` is the next to start."""
        return self._position < len(self.order) and self.order[self._position] is reduction

    def start_ready(self) -> None:
        """Start reductions with all gradients, up to the first in the order that lacks one."""
        while self._position < len(self.order) and self.order[self._position].progress is Progress.READY:
            self._start()

    def finish(self, *, start: bool) -> None:
        """Wait for all under way; with ``start`` start all others first, whether gradients arrived or not."""
        while start and self._position < len(self.order):
            self._start()
        for reduction in self._under_way:
            reduction.post_next_hop(finish=True)
        self._under_way.clear()
        self._position, self._behind = 0, False

    def post_next_hops(self) -> None:
        """Let every reduction under way post its next message, once for each reduction started."""
        if self._behind:  # so ranks post in one order, whichever units have gradients, and no link idles
            self._behind = False
            for reduction in self._under_way:
                reduction.post_next_hop()

    def drop_failed(self) -> None:
        """Forget interrupted reductions: their gradients are lost."""
        self._under_way = [r for r in self._under_way if r.progress is not Progress.FAILED]

    @property
    def elements_under_way(self) -> int:
        """Elements of all gradients that are being reduced."""
        return sum(r.elements for r in self._under_way if r.progress is Progress.REDUCING)

    def _start(self) -> None:
        """Start the next, after the others have posted a message, within the bucket."""
        self.post_next_hops()
        reduction = self.order[self._position]
        for earlier in self._under_way:
            if self.elements_under_way + reduction.elements <= self._bucket:
                break
            earlier.post_next_hop(finish=True)
        self._under_way = [r for r in self._under_way if r.progress is not Progress.REDUCED]
        self._under_way.append(reduction)
        self._position, self._behind = self._position + 1, True
        reduction.start()
