"""hpZ's secondary shard: the frames from the hops between nodes, kept for the backward all-gather.

[Note: lifetime of the secondary]
The frames (node, F) from the hops between nodes are this rank's copy of weights of one version, kept as they
arrived, or decoded and cast to 16 bits (paper section 3.2).  They are CURRENT until the weights change: by
a step, a load, or a write under GatheredParameters or by hand, which :meth:`SecondaryShard.holds` notices
by the version.  Then they are STALE and never used as weights again.  Only this file decides that;
DeepSpeed, which decides it in many places, trained on stale copies in eight ways.

[Note: differences]
Stale copies are equal on all ranks that hold them, so the next all-gather may send the masters' differences
from them (SDP4Bit, 2410.15526).  Every rank, the owner too, adds the decoded difference in fp32 and rounds
the sum to the type of the copy: copies stay equal to the bit, and errors of encoding and rounding are part of
the next difference.  After a load, or a master written by hand, the weights themselves are sent; unchanged
weights that are gathered again differ by zero, so evaluations leave no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Raw
from impl.codecs.reference import DTYPES
from impl.plan.shard_layout import UnitGeometry
from impl.plan.topology import Axis
from impl.unit.context import UnitContext
from impl.unit.master_shard import Version

Change = Literal["stepped", "loaded", "unchanged"]
"""Why weights are gathered anew: an optimizer stepped them, they were written otherwise, or nothing did."""


class SecondaryShard:
    """One unit's secondary shard on one rank, which spares the hops along ``axes``, between nodes.

    An ``offloaded`` one lies on the host; the policy of ``context`` is the unit's own.  F below is the bytes
    of a frame, K those of a copy in ``codec``.
    """

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, axes: Sequence[Axis], *, offloaded: bool
    ) -> None:
        self._policy, self.codec = context.policy, context.policy.copy_codec
        self._unit, self._numel, self._offloaded = geometry.name, geometry.shard, offloaded
        self._host, self._meter = context.host, context.meter
        self.copies, self._index = 1, 0  # of shards of S elements, and the index of this rank's shard
        for axis in axes:
            self._index += axis.digit(context.wire.mesh.rank) * self.copies
            self.copies *= axis.size
        self._frames: Tensor | None = None  # (copies * K,) uint8
        self._version: Version | None = None  # of the weights they are of, while CURRENT
        # optimizer steps before the last gather of the weights themselves; None if they are sent next
        self.begun: int | None = None
        self._settled: int | None = None  # torch's version of the master that the copies have the values of

    def holds(self, version: Version) -> bool:
        """Whether the frames are of the weights' ``version``; no version occurs twice."""
        return self._version == version

    def end(self, change: Change) -> None:
        """Make the frames stale after a ``change``."""
        self._version = None
        if change == "loaded":
            self.distrust()
        if change != "unchanged":
            self._settled = None

    def distrust(self) -> None:
        """Have the weights themselves sent next: a gather was interrupted, maybe not on all ranks alike."""
        self.begun = None

    def keep(self, received: Tensor, version: Version, *, step: int = 0) -> None:
        """Keep the frames (..., F) uint8 that the spared hops brought of the weights' ``version``."""
        cast = self._cast(received) if self.codec != self._policy.weights else received
        kept = self._memory().view(cast.shape)
        if self._offloaded:
            self._host.copy("to_host", cast, kept, "secondary", self._unit)
        else:
            kept.copy_(cast)
        self._version, self.begun, self._settled = version, step, version[1]

    def _memory(self) -> Tensor:
        """(copies * K,) uint8, the memory of the frames."""
        if self._frames is None:
            nbytes = self.copies * self.codec.frame_bytes(self._numel)
            self._frames = self._host.empty("secondary", nbytes, host=self._offloaded).zero_()
        return self._frames

    def let_go(self) -> None:
        """Give the frames' memory back, before gathers in another codec."""
        if self._frames is not None:
            self._meter.add("secondary", -self._frames.nbytes, host=self._offloaded)
            self._frames = None

    def _cast(self, received: Tensor) -> Tensor:
        """(..., K) uint8: the frames (..., F), decoded and encoded again in the copy's codec."""
        codec, ranks = self.codec, received.shape[:-1]
        dtype = DTYPES[codec.dtype] if isinstance(codec, Raw) else torch.float32
        values = torch.empty((*ranks, self._numel), dtype=dtype, device=received.device)
        ops.decode(self._policy.weights, received, values)
        if isinstance(codec, Raw):
            return values.view(torch.uint8)
        kept = received.new_empty((*ranks, codec.frame_bytes(self._numel)))
        ops.encode(codec, values, kept)
        return kept

    def write(self, message: Tensor) -> None:
        """Write the frames to a message of equal size."""
        assert self._frames is not None  # noqa: S101  # current
        if self._offloaded:
            self._host.copy("to_device", self._frames, message, "secondary", self._unit)
        else:
            message.copy_(self._frames)

    # Differences ([Note: differences])

    def sends_difference(self, step: int) -> bool:
        """Whether the gather of optimizer step ``step`` sends differences; the same answer on all ranks."""
        refresh = self._policy.refresh
        if self._policy.differences is None or self.begun is None:
            return False
        return not refresh or step - self.begun < refresh

    def settled(self, version: Version) -> bool:
        """Whether the copies have the master's values already, though of another ``version``."""
        return self._settled == version[1]

    def _values(self) -> Tensor:
        """(copies, S) the kept weights."""
        assert isinstance(self.codec, Raw)  # noqa: S101  # a policy adds differences to nothing else
        return self._memory().view(DTYPES[self.codec.dtype]).view(self.copies, -1)[:, : self._numel]

    def copy_of_shard(self) -> Tensor:
        """(S,) the copy of this rank's shard, equal on all ranks that hold it."""
        return self._values()[self._index]

    def add(self, received: Tensor, version: Version) -> None:
        """Add the differences (copies, D) uint8 that the spared hops brought of the weights' ``version``."""
        assert self._policy.differences is not None  # noqa: S101  # they were sent
        kept = self._values()
        sums = torch.empty(kept.shape, device=kept.device)
        ops.decode(self._policy.differences, received.view(self.copies, -1), sums)
        kept.copy_(sums.add_(kept))
        self._version, self._settled = version, version[1]

    def state(self, version: Version) -> dict[str, Tensor]:
        """The copies of a master of ``version``, to be loaded again; empty without differences."""
        if self._policy.differences is None:
            return {}
        begun = torch.tensor([-1 if self.begun is None else self.begun, self.settled(version)])
        return {"copy": self._values().clone(), "begun": begun}

    def load(self, state: Mapping[str, Tensor], version: Version) -> None:
        """Take over the :meth:`state` of the same rank, for weights that are now of ``version``."""
        self._version = self.begun = self._settled = None
        if "copy" in state:
            self._values().copy_(state["copy"])
            begun, settled = map(int, state["begun"])
            self.begun = begun if begun >= 0 else None
            self._settled = version[1] if settled else None
