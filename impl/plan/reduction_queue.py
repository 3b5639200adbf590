"""Decides when the gradient reductions of a backward pass start, post messages and end.

:class:`ReductionQueue` starts reductions in one order on all ranks, and limits the number of elements that are being
reduced at one time.  A reduction sends its messages in hops; a hop is one exchange along one axis of ranks.  The engine
(:mod:`impl.unit.gradient_reduction`) and the simulation of a step (:mod:`impl.plan.timeline`) both use this class, so
that a prediction follows the same schedule as a run.

Pure: no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Progress(enum.IntEnum):
    """The progress of the reduction of one unit's gradient in one backward pass."""

    COLLECTING = 0  # gradients of this pass are missing
    READY = 1  # all gradients have arrived, and the reduction waits for its turn
    REDUCING = 2  # messages are under way
    REDUCED = 3  # the mean is in this rank's shard
    FAILED = 4  # an error interrupted the reduction while messages were under way; the gradients are lost


class Reducing(Protocol):
    """The interface through which :class:`ReductionQueue` drives the reduction of one unit's gradient."""

    elements: int  # number of elements of the gradient, with padding
    progress: Progress

    def start(self) -> None:
        """Post the messages of the first hop, which is an exchange along one axis of ranks.

        ``progress`` becomes REDUCING, or REDUCED if the reduction has no hop, as on a single rank.
        """

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the messages of the next hop; a hop is an exchange along one axis of ranks.

        With ``finish``, post the messages of all remaining hops and wait for the mean; ``progress`` is then REDUCED.
        If ``progress`` is not REDUCING when the method is called, it does nothing.
        """


class ReductionQueue:
    """Starts the gradient reductions of a backward pass in an order that is the same on all ranks.

    A reduction is under way from its start until its mean has arrived.  At most ``bucket`` elements are under way at
    one time.  A gradient with more elements than ``bucket`` is reduced when no other reduction is under way.
    """

    def __init__(self, bucket: float) -> None:
        self._order: Sequence[Reducing] = ()  # the reductions of all trained units
        self._bucket = bucket
        self._started = 0  # number of reductions that have started in this pass
        self.next: Reducing | None = None  # the next reduction to start; None once all have started
        self._under_way: list[Reducing] = []  # the started reductions that have not ended, in order
        self._behind = False  # whether a reduction has started since the last call of post_next_hops()

    def follow(self, order: Sequence[Reducing]) -> None:
        """Start reductions in this ``order`` from the next pass on.

        ``order`` has the reductions of all trained units.  It must be the same on all ranks.
        """
        self._order, self.next = order, order[0] if order else None

    def start_ready(self) -> None:
        """Start the next reductions in order, and stop before the first whose gradients have not all arrived."""
        while self.next is not None and self.next.progress is Progress.READY:
            self._start(self.next)

    def finish(self, *, start: bool) -> None:
        """End a backward pass: post the remaining messages of all reductions under way, and wait for their means.

        With ``start``, first start all reductions that have not started, even those whose gradients have not all
        arrived.  Without ``start``, no reduction is started.
        """
        while start and self.next is not None:
            self._start(self.next)
        for reduction in self._under_way:
            reduction.post_next_hop(finish=True)
        self._under_way.clear()
        self._started, self._behind = 0, False
        self.next = self._order[0] if self._order else None

    def post_next_hops(self) -> None:
        """Post the next hop of every reduction under way, if a reduction has started since the last call.

        A hop is an exchange along one axis of ranks.  If no reduction has started since the last call of this method,
        it does nothing.  Thus the order in which hops are posted depends only on the order in which reductions start.
        This order is the same on all ranks, even if different units have gradients on different ranks.
        """
        if self._behind:
            self._behind = False
            for reduction in self._under_way:
                reduction.post_next_hop()

    def drop_failed(self) -> None:
        """Remove from the queue all reductions that an error has interrupted; their gradients are lost."""
        self._under_way = [r for r in self._under_way if r.progress is not Progress.FAILED]

    @property
    def elements_under_way(self) -> int:
        """Number of elements, with padding, of all gradients that are being reduced."""
        return sum(r.elements for r in self._under_way if r.progress is Progress.REDUCING)

    def _start(self, reduction: Reducing) -> None:
        """Complete earlier reductions until ``reduction`` fits within the limit of elements under way, and start it.

        First, each reduction under way posts its next hop.  Then the earliest reductions under way are completed one by
        one, until the elements of the remaining reductions and of ``reduction`` are at most ``bucket`` together.
        """
        self.post_next_hops()
        for earlier in self._under_way:
            if self.elements_under_way + reduction.elements <= self._bucket:
                break
            earlier.post_next_hop(finish=True)
        self._under_way = [r for r in self._under_way if r.progress is not Progress.REDUCED]
        self._under_way.append(reduction)
        self._started, self._behind = self._started + 1, True
        self.next = self._order[self._started] if self._started < len(self._order) else None
        reduction.start()
