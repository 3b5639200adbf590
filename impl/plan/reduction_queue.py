"""Decides when the gradient reductions of a backward pass start, post messages and end.

:class:`ReductionQueue` starts reductions in one order on all ranks, and limits the number of elements that are being
reduced at one time.  Both the engine (:mod:`impl.unit.gradient_reduction`) and the simulation of a step
(:mod:`impl.plan.timeline`) use this class, so that a prediction follows the same schedule as a run.

Pure: no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol


class Progress(enum.IntEnum):
    """The progress of a unit's reduction in one backward pass."""

    COLLECTING = 0  # gradients of this pass are missing
    READY = 1  # all gradients have arrived, and the reduction waits for its turn
    REDUCING = 2  # messages are under way
    REDUCED = 3  # the mean is in this rank's shard
    FAILED = 4  # an error interrupted the reduction while messages were under way; the gradients are lost


class Reducing(Protocol):
    """The reduction of one unit's gradient, as :class:`ReductionQueue` drives it."""

    elements: int  # number of elements of the gradient, with padding
    progress: Progress

    def start(self) -> None:
        """Post the first hop; ``progress`` becomes REDUCING, or REDUCED if the reduction has no hop."""

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the next hop.

        With ``finish``, post all hops that are left, and wait for the mean; ``progress`` is then REDUCED.  The method
        does nothing unless ``progress`` is REDUCING.
        """


class ReductionQueue:
    """Starts the reductions of a backward pass in one order, with at most ``bucket`` elements under way.

    A reduction of more elements than ``bucket`` starts when no other reduction is under way.
    """

    def __init__(self, bucket: float) -> None:
        self._order: Sequence[Reducing] = ()  # the reductions of all trained units
        self._bucket = bucket
        self._started = 0  # how many reductions have started in this pass
        self.next: Reducing | None = None  # the next reduction to start; None once all have started
        self._under_way: list[Reducing] = []  # the started reductions that have not ended, in order
        self._behind = False  # whether a reduction has started since the last call of post_next_hops()

    def follow(self, order: Sequence[Reducing]) -> None:
        """Start reductions in this ``order``, which is the same on all ranks, from the next pass on."""
        self._order, self.next = order, order[0] if order else None

    def start_ready(self) -> None:
        """Start reductions in order, as long as all gradients of the next reduction have arrived."""
        while self.next is not None and self.next.progress is Progress.READY:
            self._start(self.next)

    def finish(self, *, start: bool) -> None:
        """End a backward pass: wait for all reductions under way.

        With ``start``, the method first starts all reductions that have not started, even if gradients are missing.
        """
        while start and self.next is not None:
            self._start(self.next)
        for reduction in self._under_way:
            reduction.post_next_hop(finish=True)
        self._under_way.clear()
        self._started, self._behind = 0, False
        self.next = self._order[0] if self._order else None

    def post_next_hops(self) -> None:
        """Let every reduction under way post its next hop.

        The method does nothing if no reduction has started since its last call.  Therefore all ranks post hops in one
        order, even if different units have gradients on different ranks.
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
        """Start ``reduction``.

        Before, let each reduction under way post its next hop.  Then wait for the earliest reductions under way, until
        the elements of the others and of ``reduction`` fit into the bucket.
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
