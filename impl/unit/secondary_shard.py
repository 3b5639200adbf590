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

from torch import Tensor

from impl.unit.host_memory import HostMemory
from impl.unit.master_shard import Version, counted_as
from impl.unit.memory_pool import Meter


class SecondaryShard:
    """One unit's secondary shard on one rank; ``offloaded`` frames lie on the host."""

    def __init__(self, unit: str, host: HostMemory, meter: Meter, *, offloaded: bool) -> None:
        self._unit, self._host, self._meter, self._offloaded = unit, host, meter, offloaded
        self._frames: Tensor | None = None  # (sizes of the spared axes * F,) uint8
        self._version: Version | None = None  # of the weights they are of, while CURRENT

    def holds(self, version: Version) -> bool:
        """Whether the frames are those of the weights' ``version``, which never comes again."""
        return self._version == version

    @property
    def current(self) -> bool:
        """Whether there are frames, and the weights have not changed since as far as was told."""
        return self._version is not None

    def end(self) -> None:
        """The weights changed."""
        self._version = None

    def keep(self, received: Tensor, version: Version) -> None:
        """Keep what the spared hops brought of the weights' ``version``: (..., F) uint8."""
        if self._frames is None:
            self._frames = self._host.bytes(received.numel(), host=self._offloaded)
            self._meter.add(counted_as("secondary", host=self._offloaded), received.numel())
        kept = self._frames.view(received.shape)
        if self._offloaded:
            self._host.copy("to_host", received, kept, "secondary", self._unit)
        else:
            kept.copy_(received)
        self._version = version

    def write(self, message: Tensor) -> None:
        """Write the frames to a message of as many bytes."""
        assert self._frames is not None  # noqa: S101  # current
        if self._offloaded:
            self._host.copy("to_device", self._frames, message, "secondary", self._unit)
        else:
            message.copy_(self._frames)
