"""hpZ's secondary shard: the frames that the hops between nodes brought, kept for the backward all-gather.

[Note: lifetime of the secondary]
The frames (node, F) that the hops between nodes brought are this rank's copy of weights of one version.
They are CURRENT until the weights change: an optimizer step, a load, a write under GatheredParameters, or a
master written by hand, which :meth:`SecondaryShard.holds` notices by the version.  Then they are STALE and
never used as weights again, only overwritten by the next forward all-gather.  All of that is decided here:
DeepSpeed, where many places must remember to refresh an attribute, trained on stale copies in eight
reported ways (paper section 3.2 for hpZ).
"""

from __future__ import annotations

import enum

from torch import Tensor

from impl.unit.host_memory import HostMemory
from impl.unit.master_shard import Version, counted_as
from impl.unit.memory_pool import Meter


class Life(enum.Enum):
    """Of hpZ's secondary shard.  CURRENT until the weights change; STALE is never used."""

    EMPTY = enum.auto()
    CURRENT = enum.auto()
    STALE = enum.auto()


class SecondaryShard:
    """One unit's secondary shard on one rank.

    Args:
        unit: its name.
        host: the host's memory.
        meter: where memory is counted.
        offloaded: whether the frames lie on the host.

    Attributes:
        life: whether the frames are still true.
    """

    def __init__(self, unit: str, host: HostMemory, meter: Meter, *, offloaded: bool) -> None:
        self._unit, self._host, self._meter, self._offloaded = unit, host, meter, offloaded
        self._frames: Tensor | None = None  # (sizes of the spared axes * F,) uint8
        self._version: Version | None = None  # of the weights they are of
        self.life = Life.EMPTY

    def holds(self, version: Version) -> bool:
        """Whether the frames are those of the weights' ``version``; others are stale from here on."""
        if self._version != version:
            self.end()  # a master was written by hand
        return self.life is Life.CURRENT

    def end(self) -> None:
        """The weights changed."""
        if self.life is Life.CURRENT:
            self.life = Life.STALE

    def keep(self, received: Tensor, version: Version) -> None:
        """Keep what the spared hops brought of the weights' ``version``: (..., F) uint8."""
        if self._frames is None:
            self._frames = self._host.bytes(received.numel(), host=self._offloaded)
            self._meter.add(counted_as("secondary", host=self._offloaded), received.numel())
        kept = self._frames.view(received.shape)
        if self._offloaded:
            self._host.keep(received, kept, "secondary", self._unit)
        else:
            kept.copy_(received)
        self.life, self._version = Life.CURRENT, version

    def write(self, message: Tensor) -> None:
        """Write the frames to a message of as many bytes."""
        assert self._frames is not None  # noqa: S101  # current
        if self._offloaded:
            self._host.upload(self._frames, message, "secondary", self._unit)
        else:
            message.copy_(self._frames)
