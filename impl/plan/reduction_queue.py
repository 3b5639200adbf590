"""Decides when the gradient reductions of a backward pass start, post messages and end.

:class:`ReductionQueue` starts reductions in one order on all ranks and limits how many elements are in
reduction at once.  It drives both the engine's reductions (:mod:`impl.unit.gradient_reduction`) and the
simulated ones (:mod:`impl.plan.timeline`), so that a prediction follows the same schedule as a run.

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

    elements: int  # of the gradient, with padding
    progress: Progress

    def start(self) -> None:
        """Post the first hop; the progress becomes REDUCING, or REDUCED if there is no hop."""

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the next hop.  With ``finish``, post all hops that are left, and wait until the progress is REDUCED.

        Does nothing unless the progress is REDUCING.
        """


class ReductionQueue:
    """Starts the reductions of a backward pass in one order, with at most ``bucket`` elements under way.

    A reduction that is larger than the bucket runs alone.
    """

    def __init__(self, bucket: float) -> None:
        self.order: Sequence[Reducing] = ()  # the reductions of all trained units, in one order on all ranks
        self._bucket = bucket
        self._position = 0  # in ``order``, of the next reduction to start
        self._under_way: list[Reducing] = []  # the started reductions that have not ended, in order
        self._behind = False  # whether a reduction was started since those under way last posted a message

    def is_next(self, reduction: Reducing) -> bool:
        """Returns whether ``reduction`` is the next to start."""
        return self._position < len(self.order) and self.order[self._position] is reduction

    def start_ready(self) -> None:
        """Start the next reductions in order, as long as all their gradients have arrived."""
        while self._position < len(self.order) and self.order[self._position].progress is Progress.READY:
            self._start()

    def finish(self, *, start: bool) -> None:
        """Wait for all reductions under way, and prepare the next pass.

        With ``start`` all reductions that have not started are started first, even if gradients are missing.
        """
        while start and self._position < len(self.order):
            self._start()
        for reduction in self._under_way:
            reduction.post_next_hop(finish=True)
        self._under_way.clear()
        self._position, self._behind = 0, False

    def post_next_hops(self) -> None:
        """Let every reduction under way post its next hop, at most once after each start of a reduction.

        In this way all ranks post in one order, even if their units with gradients differ, and no link is idle
        while a hop could be posted.
        """
        if self._behind:
            self._behind = False
            for reduction in self._under_way:
                reduction.post_next_hop()

    def drop_failed(self) -> None:
        """Forget the reductions that an error interrupted; their gradients are lost."""
        self._under_way = [r for r in self._under_way if r.progress is not Progress.FAILED]

    @property
    def elements_under_way(self) -> int:
        """The number of elements of all gradients that are being reduced."""
        return sum(r.elements for r in self._under_way if r.progress is Progress.REDUCING)

    def _start(self) -> None:
        """Start the next reduction, after those under way have posted a hop and enough of them have ended to fit it."""
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
