"""hpZ's secondary shard: what the hops between nodes brought, kept for the backward all-gather.

[Note: lifetime of the secondary]
The frames (node, F) that the hops between nodes brought are this rank's copy of weights of one version, kept
as they came or decoded and cast to 16 bits.
They are CURRENT until the weights change: an optimizer step, a load, a write under GatheredParameters, or a
master written by hand, which :meth:`SecondaryShard.holds` notices by the version.  Then they are STALE and
never used as weights again, only overwritten by the next forward all-gather.  All of that is decided here:
DeepSpeed, where many places must remember to refresh an attribute, trained on stale copies in eight
reported ways (paper section 3.2 for hpZ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Codec, Raw
from impl.codecs.reference import DTYPES
from impl.plan.policy import Policy
from impl.unit.host_memory import HostMemory
from impl.unit.master_shard import Version, counted_as
from impl.unit.memory_pool import Meter


class SecondaryShard:
    """One unit's secondary shard on one rank; an ``offloaded`` one lies on the host.

    Args:
        numel: elements of a shard, of which it holds several.
        policy: of the unit.

    Attributes:
        codec: how it is encoded: F below is a frame's bytes, K those of what is kept of it.
    """

    def __init__(
        self, unit: str, numel: int, policy: Policy, host: HostMemory, meter: Meter, *, offloaded: bool
    ) -> None:
        self._unit, self._host, self._meter, self._offloaded = unit, host, meter, offloaded
        self._came, self.codec, self._numel = policy.weights, policy.kept, numel
        self._frames: Tensor | None = None  # (sizes of the spared axes * K,) uint8
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
        """Keep what the spared hops brought of the weights' ``version``: (n, k * F) uint8."""
        cast = self._cast(received) if self.codec != self._came else received
        if self._frames is None:
            self._frames = self._host.bytes(cast.numel(), host=self._offloaded)
            self._meter.add(counted_as("secondary", host=self._offloaded), cast.numel())
        kept = self._frames.view(cast.shape)
        if self._offloaded:
            self._host.copy("to_host", cast, kept, "secondary", self._unit)
        else:
            kept.copy_(cast)
        self._version = version

    def _cast(self, received: Tensor) -> Tensor:
        """(n, k * K) uint8: the frames (n, k * F), decoded and encoded again as they are kept."""
        frame = self._came.frame_bytes(self._numel)
        rows = torch.unflatten(received, -1, (received.shape[-1] // frame, frame)) if frame else received
        values = torch.empty((*rows.shape[:-1], self._numel), dtype=_dtype(self.codec), device=rows.device)
        ops.decode(self._came, rows, values)
        return values.flatten(1).view(torch.uint8)

    def write(self, message: Tensor) -> None:
        """Write the frames to a message of as many bytes."""
        assert self._frames is not None  # noqa: S101  # current
        if self._offloaded:
            self._host.copy("to_device", self._frames, message, "secondary", self._unit)
        else:
            message.copy_(self._frames)


def _dtype(codec: Codec) -> torch.dtype:
    """The type of raw elements."""
    assert isinstance(codec, Raw)  # noqa: S101  # a policy keeps frames, or a type
    return DTYPES[codec.dtype]
