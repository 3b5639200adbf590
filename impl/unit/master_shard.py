"""A rank's master shard of a unit: (S,) fp32 weights, with the mean gradient that steps them.

Frozen weights may be held as codes instead.  An offloaded shard lies in host memory with its gradient, and
its encoded frame is copied to the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from impl import ops
from impl.codecs.codec import Codec
from impl.codecs.rounding_noise import Noise
from impl.plan.shard_layout import Slot, UnitGeometry
from impl.plan.traffic import Placement
from impl.transport.side_stream import Arrival
from impl.unit.context import MEMORY, UnitContext


def shard_of(geometry: UnitGeometry, rank: int, values: Iterable[Tensor], device: torch.device) -> Tensor:
    """(S,) fp32 of ``rank``: its slice of the laid-out ``values``, one tensor per slot."""
    shard = torch.zeros(geometry.shard, dtype=torch.float32, device=device)
    for slot, value in zip(geometry.slots, values, strict=True):
        start, end = geometry.part(slot, rank)
        if start < end:
            shard[start:end] = part_of(value, geometry, slot, rank)
    return shard


def part_of(value: Tensor, geometry: UnitGeometry, slot: Slot, rank: int) -> Tensor:
    """(n,) the elements of ``rank``'s shard from the whole ``value`` of ``slot``."""
    first, end = geometry.overlap(slot, rank)
    return value.detach().reshape(-1)[first - slot.offset : end - slot.offset]


Version = tuple[int, int]  # of weights: changes reported to the engine, and changes counted by torch


class MasterShard:
    """One rank's ``shard`` (S,) fp32 of one unit; the policy of ``context`` is the unit's own."""

    def __init__(
        self, geometry: UnitGeometry, context: UnitContext, placement: Placement, shard: Tensor
    ) -> None:
        policy, mesh = context.policy, context.wire.mesh
        self.placement, self.crosses = placement, placement.shard or placement.frames  # to the device
        self._geometry, self._mesh, self._host = geometry, mesh, context.host
        self._clock = context.clock
        self.encode_as(policy.weights)
        self.changes = 0  # of the weights, reported to the engine
        self._encoded: Tensor | None = None  # (F,) on the host: the frame of an offloaded master
        self._sent: Tensor | None = None  # (F,) the same on the device, unless frames are offloaded too
        self._encoded_of: tuple[Version, int] | None = None  # its master's version, and noise
        self._sent_of: tuple[Version, int] | None = None
        self.arrival = Arrival()  # of the last gather's copies from the host
        # (S,) fp32 masters, or the frame (F,) uint8 of weights held as codes
        self.held, self.codes = shard.to(MEMORY if placement.shard else mesh.device), None
        if not geometry.trainable and policy.frozen is not None:
            codes = self._host.empty("frozen", self._frame_bytes, host=placement.shard)
            ops.encode(self._codec, self.held, codes, noise=self.noise(self._codec))
            self.held = self.codes = codes
        else:
            context.meter.add("masters", self.held.nbytes, host=placement.shard)
        # (group, leaf view of the master), empty where the group has no elements here; as many on all ranks
        self.masters: list[tuple[int, nn.Parameter]] = []
        self._spans: list[tuple[nn.Parameter, int, int]] = []  # the same, with their bounds in the shard
        for group, start, end in geometry.spans(mesh.rank) if geometry.trainable else ():
            master = nn.Parameter(self.held[start:end], requires_grad=True)
            self.masters.append((group, master))
            self._spans.append((master, start, end))
        self._mean: Tensor | None = None  # (S,) fp32, accumulated mean gradient
        self._landing: tuple[Arrival, Tensor] | None = None  # (S,) a mean on its way to the host
        self._landed: Tensor | None = None  # (S,) where it arrives if added to another

    # Weights

    @property
    def version(self) -> Version:
        """Changes whenever the weights do, by a report or a write that torch counts."""
        return self.changes, self.held._version  # noqa: SLF001  # the public way warns

    @property
    def master(self) -> Tensor:
        """(S,) fp32 this rank's shard of the weights, on the host if offloaded; codes are decoded."""
        if self.codes is None:
            return self.held
        master = torch.empty(self._geometry.shard, dtype=torch.float32, device=self.codes.device)
        ops.decode(self._codec, self.codes, master)
        return master

    def load_part(self, start: int, end: int, values: Tensor) -> None:
        """Overwrite elements [start, end) with ``values`` (end - start,) fp32."""
        master = self.master
        with torch.no_grad():
            master[start:end] = values
        if self.codes is not None and start < end:
            self.arrival.finish()  # of a copy from them to the device
            ops.encode(self._codec, master, self.codes, noise=self.noise(self._codec))

    def load_codes(self, frame: Tensor) -> None:
        """Overwrite weights that are held as codes, in the same layout."""
        assert self.codes is not None  # noqa: S101  # checkpoints have codes for no other unit
        self.arrival.finish()  # of a copy from them to the device
        self.codes.copy_(frame)

    # Frames

    def encode_as(self, codec: Codec) -> None:
        """Write frames in this codec from here on."""
        self._codec, self._frame_bytes = codec, codec.frame_bytes(self._geometry.shard)

    def write_frame(self, frame: Tensor) -> None:
        """Write this rank's frame to a message."""
        if not self.placement.shard:
            if self.codes is None:
                ops.encode(self._codec, self.held, frame, noise=self.noise(self._codec))
            else:
                frame.copy_(self.codes)
            return
        source, name = self._kept_frame() if self.codes is None else self.codes, self._geometry.name
        if self.placement.frames:
            self._host.copy("to_device", source, frame, "weights", name)
            return
        if self._sent is None:
            self._sent = self._host.empty("frames", self._frame_bytes, host=False)
        if self._sent_of != self._encoded_of:
            self._host.copy("to_device", source, self._sent, "weights", name)
            self._sent_of = self._encoded_of
        frame.copy_(self._sent)

    def _kept_frame(self) -> Tensor:
        """(F,) uint8 on the host: the frame of an offloaded master, encoded anew if master or noise is."""
        varies = self._codec.stochastic and self._geometry.trainable
        now = (self.version, self._clock.step if varies else 0)
        if self._encoded is None:
            self._encoded = self._host.empty("frames", self._frame_bytes)
        if self._encoded_of != now:
            self.arrival.finish()  # of the last copy from it
            ops.encode(self._codec, self.held, self._encoded, noise=self.noise(self._codec))
            self._encoded_of = now
        return self._encoded

    def noise(self, codec: Codec) -> Noise | None:
        """The random bits of this rank's shard for a stochastic ``codec``."""
        if not codec.stochastic:
            return None
        key = self._clock.weights(self._geometry.name, frozen=not self._geometry.trainable)
        return key.noise(self._geometry.bounds(self._mesh.rank)[0])

    # Gradients

    @property
    def fresh(self) -> bool:
        """Whether the masters have no gradients yet."""
        for _, master in self.masters:  # noqa: SIM110  # one call in place of one for each master
            if master.grad is not None:
                return False
        return True

    def take(self, mean: Tensor) -> None:
        """Add ``mean`` (S,) fp32 to the masters' gradients; where offloaded, in :meth:`land`."""
        if not self.placement.shard:
            self._accumulate(mean)
            return
        staged = self._host.stage(self._geometry.shard)
        staged.copy_(mean)
        target = self.gradient()
        if not self.fresh:
            if self._landed is None:
                self._landed = self._host.empty("gradients", self._geometry.shard, torch.float32)
            target = self._landed
        arrival = self._host.download(staged, target, "gradients", self._geometry.name)
        self._landing = arrival, target

    def land(self) -> None:
        """Wait for a mean gradient on its way to the host, and accumulate it."""
        if self._landing is not None:
            arrival, mean = self._landing
            arrival.finish()
            self._landing = None
            self._accumulate(mean)

    def _accumulate(self, mean: Tensor) -> None:
        """Add ``mean`` (S,) to the masters' gradients."""
        gradient = self.gradient()
        for master, start, end in self._spans:
            if master.grad is not None:
                master.grad.add_(mean[start:end])
                continue
            master.grad = gradient[start:end]
            if mean is not gradient:
                master.grad.copy_(mean[start:end])

    def gradient(self) -> Tensor:
        """(S,) fp32 the memory of the masters' gradients."""
        if self._mean is None:
            numel, host = self._geometry.shard, self.placement.shard
            self._mean = self._host.empty("gradients", numel, torch.float32, host=host).zero_()
        return self._mean

    def mean_gradient(self) -> Tensor | None:
        """(S,) fp32 accumulated mean gradient of this rank's shard, None before the first."""
        return None if self.fresh else self._mean

    def own_gradients(self) -> Iterator[Tensor]:
        """Parts of the masters' gradients that this rank alone counts in a norm over all ranks."""
        low, high = self._geometry.own_piece(self._mesh.rank)
        for master, start, end in self._spans:
            first, last = max(start, low), min(end, high)
            if master.grad is not None and first < last:
                yield master.grad[first - start : last - start]

    def load_gradient(self, start: int, end: int, values: Tensor) -> None:
        """Overwrite elements [start, end) of the mean gradient with ``values`` (end - start,) fp32."""
        gradient = self.gradient()
        for master, first, last in self._spans:
            if master.grad is None:
                master.grad = gradient[first:last].zero_()
        gradient[start:end] = values
