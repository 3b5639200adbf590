"""Starts the reductions of units in one order on all ranks, with a limit on those under way."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final, Protocol

from impl.errors import ZeroError


class Phase(enum.Enum):
    """Of a unit's reduction, in one backward pass.

    Attributes:
        IDLE: no gradient of this pass has arrived, and none is expected yet.
        COLLECTING: some are missing.
        READY: none is missing; it waits for its turn.
        REDUCING: hops are under way.
        REDUCED: the mean is in this rank's shard.
        FAILED: it was interrupted while hops were under way: its gradients are lost.
    """

    IDLE = enum.auto()
    COLLECTING = enum.auto()
    READY = enum.auto()
    REDUCING = enum.auto()
    REDUCED = enum.auto()
    FAILED = enum.auto()


_NEXT: Final = (
    (Phase.IDLE, Phase.COLLECTING),
    (Phase.IDLE, Phase.READY),  # no gradient will come
    (Phase.COLLECTING, Phase.READY),
    (Phase.COLLECTING, Phase.IDLE),  # the pass reduces nothing, or failed
    (Phase.READY, Phase.REDUCING),
    (Phase.READY, Phase.IDLE),
    (Phase.REDUCING, Phase.REDUCED),
    (Phase.REDUCING, Phase.FAILED),
    (Phase.REDUCED, Phase.IDLE),
    (Phase.FAILED, Phase.IDLE),
)


def checked(unit: str, now: Phase, then: Phase) -> Phase:
    """``then``, if a reduction may go there from ``now``, or is there.

    Raises:
        ZeroError: naming the unit and both.
    """
    if now is not then and (now, then) not in _NEXT:
        raise ZeroError(f"the reduction of unit {unit!r} goes from {now.name} to {then.name}")
    return then


class Reducing(Protocol):
    """A unit's reduction: :class:`impl.unit.gradient_reduction.GradientReduction`."""

    phase: Phase

    @property
    def elements(self) -> int:
        """Of its gradient."""

    def end_collecting(self) -> None:
        """No gradient is missing any more."""

    def start(self) -> None:
        """Post the first hop."""

    def post_next_hop(self) -> None:
        """Go on by a message, if that does not wait for the slowest link."""

    def finish(self) -> None:
        """Wait until the mean is there."""


class ReductionQueue:
    """The reductions of one backward pass after the other."""

    def __init__(self) -> None:
        self._order: Sequence[Reducing] = ()
        self._bucket = 0
        self._position = 0  # in the order, of the next to be started
        self._under_way: list[Reducing] = []  # as they were started
        self._behind = False  # whether one was started since those under way last went on

    def follow(self, order: Sequence[Reducing], bucket: int) -> None:
        """Start reductions in this order, from the next pass on.

        Args:
            order: of the units that are trained, equal on all ranks.
            bucket: elements that may be under way at once; an earlier reduction is finished before the one
                that would exceed it begins.
        """
        self._order, self._bucket = order, bucket

    def is_next(self, reduction: Reducing) -> bool:
        """Whether ``reduction`` is the next to be started."""
        return self._position < len(self._order) and self._order[self._position] is reduction

    def start_ready(self) -> None:
        """Start what has all its gradients, as far as everything before it in the order has been started."""
        while self._position < len(self._order) and self._order[self._position].phase is Phase.READY:
            self._start(self._order[self._position])

    def start_all(self) -> None:
        """Start what has not been started, whether gradients came or not."""
        while self._position < len(self._order):
            reduction = self._order[self._position]
            reduction.end_collecting()
            self._start(reduction)

    def post_next_hops(self) -> None:
        """Let every reduction under way post its next message, so that no link idles.

        Once for each reduction that was started: when the first gradient after it arrives, or else when the
        next one starts.  So ranks post in one order, whichever units bring them gradients.
        """
        if self._behind:
            self._behind = False
            for reduction in self._under_way:
                reduction.post_next_hop()

    def drop_failed(self) -> None:
        """Forget those that were interrupted: their gradients are lost."""
        self._under_way = [one for one in self._under_way if one.phase is not Phase.FAILED]

    def finish(self) -> None:
        """Wait for all that are under way; the pass is over."""
        for reduction in self._under_way:
            reduction.finish()
        self._under_way.clear()
        self._position, self._behind = 0, False

    @property
    def elements_under_way(self) -> int:
        """Of the gradients whose reduction has begun and not ended."""
        return sum(one.elements for one in self._under_way if one.phase is Phase.REDUCING)

    def _start(self, reduction: Reducing) -> None:
        """Start one, after the others have gone on by a message, within the limit on those under way."""
        self.post_next_hops()
        for earlier in self._under_way:
            if self.elements_under_way + reduction.elements <= self._bucket:
                break
            earlier.finish()
        self._under_way = [one for one in self._under_way if one.phase is not Phase.REDUCED]
        self._under_way.append(reduction)
        self._position, self._behind = self._position + 1, True
        reduction.start()
