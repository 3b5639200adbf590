"""Keeps hpZ's secondary shard: the encoded shards from other nodes, which the backward all-gather uses again.

[Note: lifetime of the secondary]
A frame is one encoded shard, F bytes.  The frames (node, F) that arrive from the hops between nodes are this rank's
secondary copy of the weights.  They are kept as they arrived, or in another codec, such as bf16 (paper section 3.2).
They are CURRENT until the weights change: by an optimizer step, by a load, or by a user's write to masters or under
GatheredParameters.  :meth:`SecondaryShard.sends` detects a change by comparing versions.  After a change the frames are
STALE and never used as weights again.  This file alone decides whether frames are current.  DeepSpeed decides it in
many places, and has trained on stale copies, for example after a checkpoint was loaded (its issue 7606).

[Note: differences]
The *master* of a shard is its fp32 values.  The copies of a shard are equal on all ranks that hold them, even when they
are stale.  Therefore the next all-gather need not send the master: it may send the difference between the master and
the copy (SDP4Bit, 2410.15526).  Every rank adds the decoded difference to its copy in fp32, and rounds the sum to the
type of the copy; the rank that has the master does the same.  Thus copies stay equal to the bit, and the errors of
encoding and rounding become part of the next difference.  After a load that does not restore the copies, and after a
call of ``Zero.weights_changed()``, the next gather sends the master instead of a difference.  If the weights are
gathered again without a change, the difference is zero, so an evaluation does not change later training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impl import ops
from impl.codecs.codec import Raw
from impl.codecs.reference import DTYPES
from impl.plan.hops import Hop, Sends
from impl.policy.own_method import Change
from impl.policy.shard_layout import UnitGeometry
from impl.unit.context import UnitContext
from impl.unit.master_shard import Version


class SecondaryShard:
    """Keeps, on one rank, hpZ's copy of a unit's weights: the encoded shards that came from other nodes.

    As long as the weights do not change, gathers send this copy inside the node, and skip the hops (exchanges of
    messages) between nodes.

    A *frame* is one encoded shard.  In the shapes below:

    - F is the number of bytes of a frame as it arrives;
    - K is the number of bytes of a frame as it is kept, encoded by the codec ``codec``;
    - ``copies`` is the number of frames that are kept, such as 2 with two nodes.

    Args:
        geometry: the unit's layout.
        context: what the units of the engine share, with the policy for this unit (``Policy.for_unit``).
        hops: the hops that a gather from the copy skips; empty without hpZ.
        offloaded: whether the frames are kept in host memory.
    """

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, hops: Sequence[Hop], *, offloaded: bool
    ) -> None:
        self._policy, self.codec = context.policy, context.policy.copy_codec
        self._unit, self._numel, self._offloaded = geometry.name, geometry.shard, offloaded
        self._host, self._meter = context.host, context.meter
        # How many encoded shards are kept, and which of them is this rank's own.
        self.copies, self._index = 1, 0
        for hop in hops:
            self._index += hop.axis.digit(context.wire.mesh.rank) * self.copies
            self.copies *= hop.axis.size
        self._frames: Tensor | None = None  # (copies * K,) uint8
        self._version: Version | None = None  # the version of the weights in the frames, while CURRENT
        # The optimizer step at the last gather of whole weights; None if the next gather must send whole
        # weights instead of differences.
        self.begun: int | None = None
        self._settled: int | None = None  # torch's version of the master whose values the copies have

    def sends(self, version: Version, step: int) -> Sends:
        """Return what a gather of this ``version`` of the weights has to send; the result is equal on all ranks.

        ``step`` is the number of optimizer steps so far.  The result is the first of these that applies:

        - ``copy``, the kept encoded shards: if they hold this version of the weights.
        - ``weights``, the values of the masters (fp32 weights): if one of these conditions holds:

          - The policy has no differences.
          - No gather has sent ``weights`` since the weights were created or loaded, or since the last call of
            :meth:`distrust` or :meth:`forget`.
          - The policy's ``refresh`` is above 0, and at least ``refresh`` optimizer steps have passed since a gather
            sent ``weights``.

        - ``differences``, the masters' values minus the kept copy: in all other cases.

        If :meth:`load` has restored a saved state, gathers before the state was saved count too.
        """
        if self._version == version:
            return "copy"
        refresh = self._policy.refresh
        if self._policy.differences is None or self.begun is None or 0 < refresh <= step - self.begun:
            return "weights"
        return "differences"

    def end(self, change: Change) -> None:
        """Make the kept copy of the weights stale, so that the next gather renews it.

        ``change`` says why, and decides what the next gather may send:

        - ``stepped``: an optimizer has stepped the masters (the fp32 weights); the gather may send differences between
          the masters and the kept copy;
        - ``loaded``: the masters were loaded, or written by a user; the gather sends the masters themselves, not
          differences;
        - ``unchanged``: the masters are the same, and are only sent anew; the gather may send differences, which are 0.
        """
        self._version = None
        if change == "loaded":
            self.distrust()
        if change != "unchanged":
            self._settled = None

    def distrust(self) -> None:
        """Let no gather send differences from the kept copy until a gather has sent the weights themselves.

        To be called if ranks may keep different copies, for example after a gather that was interrupted on some ranks
        only.
        """
        self.begun = None

    def keep(self, received: Tensor, version: Version, *, step: int = 0) -> None:
        """Keep ``received``, the encoded shards that came from other nodes, as the copy of the weights.

        ``received`` is (..., F) uint8, with F bytes for each shard.  If the copy is kept in another codec, the shards
        are decoded and encoded anew.  ``version`` is the version of these weights.  ``step`` is the number of optimizer
        steps so far.
        """
        cast = self._cast(received) if self.codec != self._policy.weights else received
        kept = self._memory().view(cast.shape)
        if self._offloaded:
            self._host.copy("to_host", cast, kept, "secondary", self._unit)
        else:
            kept.copy_(cast)
        self._version, self.begun, self._settled = version, step, version[1]

    @property
    def nbytes(self) -> int:
        """The bytes of all encoded shards that are kept."""
        return self.copies * self.codec.frame_bytes(self._numel)

    def _memory(self) -> Tensor:
        """Return the memory (copies * K,) uint8 of the kept encoded shards, allocated on first use."""
        if self._frames is None:
            self._frames = self._host.empty("secondary", self.nbytes, host=self._offloaded).zero_()
        return self._frames

    def share_memory(self, others: Sequence[SecondaryShard]) -> None:
        """Allocate the memory for this object's copy of the weights, and let ``others`` use the same memory.

        ``others`` are secondary shards of the same unit for other policies of a schedule.  None of them may need more
        bytes than this object.  Only one of these objects may be in use at a time.  When another object comes into use,
        the memory still has the copy of the former object.  Call :meth:`forget` of the new object before it is used.
        """
        memory = self._memory()
        for other in others:
            other.keep_in(memory)

    def keep_in(self, memory: Tensor) -> None:
        """From now on, keep the copy of the weights at the start of ``memory`` (n,) uint8.

        Another secondary shard has allocated this memory (:meth:`share_memory`).
        """
        self._frames = memory[: self.nbytes]

    def forget(self) -> None:
        """Make the next gather send the weights themselves: neither the kept copy, nor differences from the copy.

        Call this after another object has written to the memory of the copy.
        """
        self._version = self.begun = self._settled = None

    def let_go(self) -> None:
        """Free the memory of the copy; to be called before another secondary shard replaces this object."""
        if self._frames is not None:
            self._meter.add("secondary", -self._frames.nbytes, host=self._offloaded)
            self._frames = None

    def _cast(self, received: Tensor) -> Tensor:
        """Decode the shards ``received`` (..., F) uint8; return them encoded by the copy's codec, (..., K) uint8."""
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
        """Write the kept encoded shards to ``message`` (copies * K,) uint8, a message on the device."""
        assert self._frames is not None  # noqa: S101  # the frames are current
        if self._offloaded:
            self._host.copy("to_device", self._frames, message, "secondary", self._unit)
        else:
            message.copy_(self._frames)

    # Differences ([Note: differences])

    def settled(self, version: Version) -> bool:
        """Return whether the copies are up to date with the master, this rank's fp32 shard.

        If they are, a gather of differences sends zeros.  The copies are up to date if nothing has changed the master
        since the copies were last updated.  ``version`` is the present version of the master.  Only its second number,
        torch's count of writes, matters here.
        """
        return self._settled == version[1]

    def _values(self) -> Tensor:
        """Return the kept copy of the weights, (copies, S), as a view in the copy's floating-point type."""
        assert isinstance(self.codec, Raw)  # noqa: S101  # a policy adds differences to nothing else
        return self._memory().view(DTYPES[self.codec.dtype]).view(self.copies, -1)[:, : self._numel]

    def copy_of_shard(self) -> Tensor:
        """Return the kept copy of this rank's own shard, (S,) in the copy's floating-point type.

        It is a view, and has the same bits as the copies of this shard that other ranks keep.
        """
        return self._values()[self._index]

    def add(self, received: Tensor, version: Version) -> None:
        """Decode the differences ``received`` (..., D) uint8, which came from other nodes, and add them to the copies.

        D is the number of bytes of one shard's encoded difference.  Afterwards the copies hold this ``version`` of the
        weights.
        """
        assert self._policy.differences is not None  # noqa: S101  # differences were sent
        kept = self._values()
        sums = torch.empty(kept.shape, device=kept.device)
        ops.decode(self._policy.differences, received, sums.view(*received.shape[:-1], -1))
        kept.copy_(sums.add_(kept))
        self._version, self._settled = version, version[1]

    def state(self, version: Version) -> dict[str, Tensor]:
        """Return what a resumed run needs to send weights as differences from the values that were sent last.

        The dict is empty if the policy sends no differences.  Otherwise it has two entries:

        - ``copy``: (copies, S) the weights that were sent last, from which the next differences are computed
        - ``begun``: (2,) two integers.  The first is the optimizer step at the last gather that sent the weights
          themselves, or -1 if the next gather must not send differences.  The second is 1 if ``copy`` equals the
          master's present values (:meth:`settled`), else 0

        ``version`` is the present version of the master.
        """
        if self._policy.differences is None:
            return {}
        begun = torch.tensor([-1 if self.begun is None else self.begun, self.settled(version)])
        return {"copy": self._values().clone(), "begun": begun}

    def load(self, state: Mapping[str, Tensor], version: Version) -> None:
        """Continue from the ``state`` that :meth:`state` returned on this rank.

        ``version`` is the present version of the master, this rank's fp32 shard.
        """
        self._version = self.begun = self._settled = None
        if "copy" in state:
            self._values().copy_(state["copy"])
            begun, settled = map(int, state["begun"])
            self.begun = begun if begun >= 0 else None
            self._settled = version[1] if settled else None
