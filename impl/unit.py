"""A unit: one block of the model as a flat buffer, of which each rank owns a shard.

The only place that resizes storage.  While a unit is released its parameters are stand-ins on the
meta device: touching one from outside is a clear error of torch, never a crash on freed memory.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from impl import ops
from impl.codec import FP32, Codec, FloatCodec, Raw
from impl.collectives import Reduction, Transfer, gather_frames, gathered, placed, reduced
from impl.feedback import Errors
from impl.geometry import UnitGeometry, pieces
from impl.noise import Clock
from impl.policy import Policy
from impl.reference import DTYPES
from impl.traffic import Phase
from impl.wire import Tag, Wire


class ZeroError(RuntimeError):
    """The engine is used in a way that would train something else; the message says how."""


class Life(enum.Enum):
    """Of hpZ's secondary shard.  CURRENT until the weights change; STALE is never used."""

    EMPTY = enum.auto()
    CURRENT = enum.auto()
    STALE = enum.auto()


@dataclass(slots=True, eq=False)
class Holder:
    """A module that holds a parameter under a name; tied weights have several."""

    module: nn.Module
    name: str

    def put(self, parameter: nn.Parameter) -> None:
        """Let the module see ``parameter``."""
        self.module._parameters[self.name] = parameter  # noqa: SLF001  # setattr would re-register


@dataclass(slots=True, eq=False)
class Member:
    """A parameter of a unit.

    Attributes:
        parameter: the leaf view of the flat buffer; valid while the unit is gathered.
        stand_in: what modules see while it is not: same shape and type, on the meta device.
        holders: where modules hold it.
        gradient: its view of the unit's gradient buffer.
    """

    parameter: nn.Parameter
    stand_in: nn.Parameter
    holders: Sequence[Holder]
    gradient: Tensor | None


class Place(NamedTuple):
    """A view of a unit's flat buffer: type, shape, strides and offset in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True, eq=False)
class Secondary:
    """hpZ's copy: the frames that the spared hops brought, and whether they are still true."""

    frames: Tensor | None = None  # (sizes of the spared axes, F) as bytes
    life: Life = Life.EMPTY

    def end(self) -> None:
        """The weights changed."""
        if self.life is Life.CURRENT:
            self.life = Life.STALE


@dataclass(slots=True, eq=False)
class Meter:
    """Bytes that the engine holds now and held at most, by part (keys of ``traffic.memory``)."""

    now: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, nbytes: int) -> None:
        """Count an allocation, or a release when negative."""
        self.now[part] = self.now.get(part, 0) + nbytes
        self.peak[part] = max(self.peak.get(part, 0), self.now[part])


def _keeps_zeros(codec: Codec) -> bool:
    """Whether a zero decodes to zero whatever else is in its block."""
    if isinstance(codec, Raw | FloatCodec):
        return not codec.hadamard
    return not (codec.asymmetric or codec.hadamard)


class Unit:
    """One unit on one rank.

    Args:
        geometry: its layout.
        originals: the model's parameters in slot order, with their values.
        holders: for each of them, the modules that hold it.
        wire: what sends.
        policy: what is sent.
        meter: where its memory is counted.
        clock: what stochastic codecs and feedback go by.

    Attributes:
        master: (S,) fp32, this rank's shard of the weights: the truth.
        masters: leaf views of it, one per optimizer group, empty where the group has no elements
            here, so that all ranks have as many: (group, view).
        missing: parameters whose gradient has not arrived in this backward pass.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        originals: Sequence[nn.Parameter],
        holders: Sequence[Sequence[Holder]],
        *,
        wire: Wire,
        policy: Policy,
        meter: Meter,
        clock: Clock,
    ) -> None:
        self.geometry = geometry
        self.wire, self.policy, self.meter, self.clock = wire, policy, meter, clock
        self.secondary = Secondary()
        self._changes = 0  # of the weights, as far as the engine was told
        topology, rank = wire.mesh.topology, wire.mesh.rank
        self._axes, self._spared = policy.gather_axes(topology)
        self._frame = policy.weights.frame_bytes(geometry.shard)
        self._pieces = pieces(geometry.shard, policy.chunks, policy.grain)
        self._secondary_bytes = self._frame * math.prod(axis.size for axis in self._axes[: self._spared])
        device, dtype = wire.mesh.device, DTYPES[policy.compute]

        self.master = self._cut(originals, rank, device)  # (S,) fp32
        self.meter.add("masters", self.master.nbytes)
        self.masters = [
            (group, nn.Parameter(self.master[start:end], requires_grad=True))
            for group, start, end in geometry.spans(rank)
            if geometry.trainable
        ]
        self._spans = [(start, end) for _, start, end in geometry.spans(rank)]
        self._mean: Tensor | None = None  # (S,) fp32, accumulated mean gradient
        self._errors: Errors | None = None  # of the gradient codecs, from the first reduction on
        # An offset, or a rotation, makes something of padding's zeros; it must not reach norms or weights.
        self._pads = () if all(map(_keeps_zeros, policy.gradients)) else geometry.pads(rank)

        self._flat = torch.zeros(geometry.padded, dtype=dtype, device=device)
        # A second handle with a version counter of its own: refilling through it does not look
        # like an in-place change of what autograd saved.
        self._storage = self._flat.data
        self._gradient = torch.zeros(geometry.padded if geometry.trainable else 0, dtype=dtype, device=device)
        self.meter.add("gathered", self._flat.nbytes)
        self.meter.add("local_gradients", self._gradient.nbytes)
        self.members = [
            self._member(slot.offset, original, where)
            for slot, original, where in zip(geometry.slots, originals, holders, strict=True)
        ]
        self._resize(self._flat, full=False)
        self._resize(self._gradient, full=False)
        self.gathered = False
        self._gather: Transfer | None = None
        self._secondary_version = -1
        self.missing: set[int] = set()
        self.armed = False
        self._show(gathered=False)
        for original in originals:
            # A reference that a module keeps outside its parameters would train nothing; without
            # elements, its first use is an error instead.
            original.data = original.data.new_empty(0)

    def _cut(self, originals: Sequence[nn.Parameter], rank: int, device: torch.device) -> Tensor:
        """This rank's slice of the laid-out values."""
        shard = self.geometry.shard
        low, high = rank * shard, (rank + 1) * shard
        master = torch.zeros(shard, dtype=torch.float32, device=device)
        for slot, original in zip(self.geometry.slots, originals, strict=True):
            begin, end = max(slot.offset, low), min(slot.end, high)
            if begin < end:
                values = original.detach().reshape(-1)[begin - slot.offset : end - slot.offset]
                master[begin - low : end - low] = values
        return master

    def _member(self, offset: int, original: nn.Parameter, holders: Sequence[Holder]) -> Member:
        shape, numel = original.shape, original.numel()
        view = self._flat[offset : offset + numel].view(shape)
        parameter = nn.Parameter(view, requires_grad=self.geometry.trainable)
        empty = torch.empty(shape, dtype=view.dtype, device="meta")
        stand_in = nn.Parameter(empty, requires_grad=self.geometry.trainable)
        gradient = self._gradient[offset : offset + numel].view(shape) if self.geometry.trainable else None
        return Member(parameter, stand_in, holders, gradient)

    def _resize(self, tensor: Tensor, *, full: bool) -> None:
        part = "gathered" if tensor is self._flat else "local_gradients"
        nbytes = tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        wanted = nbytes if full else 0
        if storage.nbytes() != wanted:
            self.meter.add(part, wanted - storage.nbytes())
            storage.resize_(wanted)

    def _show(self, *, gathered: bool) -> None:
        for member in self.members:
            for holder in member.holders:
                holder.put(member.parameter if gathered else member.stand_in)

    def reserve(self) -> None:
        """Make room in shared memory for this unit's largest messages."""
        held = self._frame
        for axis in self._axes:
            self.wire.reserve(axis, held)
            held *= axis.size
        slices = self.wire.mesh.topology.world
        for axis, codec in self.policy.reduce_axes(self.wire.mesh.topology):
            largest = max(codec.frame_bytes(end - start) for start, end in self._pieces)
            self.wire.reserve(axis, slices * largest)
            slices //= axis.size

    # Weights

    @property
    def weights_version(self) -> int:
        """Changes whenever the master does: told of, or written in place where torch counts it."""
        return self._changes + self.master._version  # noqa: SLF001  # the public way warns for views

    def weights_changed(self) -> None:
        """The master has new values: what was kept of the old ones is stale."""
        self._changes += 1
        self.secondary.end()

    @property
    def storage_address(self) -> int:
        """Where the gathered weights lie; 0 while released."""
        return self._flat.untyped_storage().data_ptr()

    def locate(self, tensor: Tensor) -> Place:
        """Where ``tensor``, a view of the gathered weights, lies in them."""
        return Place(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, place: Place) -> Tensor:
        """The view of the gathered weights at ``place``."""
        flat = self._storage if place.dtype == self._storage.dtype else self._storage.view(place.dtype)
        return flat.as_strided(place.shape, place.stride, place.offset)

    @property
    def in_use(self) -> bool:
        """Gathered, or on its way."""
        return self.gathered or self._gather is not None

    def gather(self, phase: Phase) -> None:
        """Start gathering, unless it is gathered or on its way."""
        if not self.in_use:
            self._gather = Transfer(self._gathering(phase))

    def wait(self) -> None:
        """Finish gathering: parameters have their values when this returns."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
            self.gathered = True
            self._show(gathered=True)

    def release(self) -> None:
        """Free the weights; what is on its way is awaited first, as its bytes are sent."""
        self.wait()
        if self.gathered:
            self.gathered = False
            self._show(gathered=False)
            self._resize(self._flat, full=False)

    def _gathering(self, phase: Phase) -> Generator[None, None, None]:
        tag = Tag(phase, "weights", self.geometry.name)
        codec, axes, spared = self.policy.weights, self._axes, self._spared
        nbytes = self._frame
        if self.secondary.life is Life.CURRENT and self._secondary_version != self.weights_version:
            self.secondary.end()  # a master was written by hand
        if spared and self.secondary.life is not Life.CURRENT:
            exchange = yield from gather_frames(self.wire, axes[:spared], self._encode_master, nbytes, tag)
            self._keep(exchange.wait())
            exchange.close()
        if spared:
            write, nbytes, axes = self._copy_secondary, self._secondary_bytes, axes[spared:]
        else:
            write = self._encode_master
        ring = self.policy.gather == "flat"
        exchange = yield from gather_frames(self.wire, axes, write, nbytes, tag, ring=ring)
        frames = gathered(exchange, axes, nbytes)
        frames = frames.view(*(axis.size for axis in reversed(self._axes)), self._frame)
        self._resize(self._flat, full=True)
        ops.decode(codec, frames, placed(self._storage, self._axes[::-1], self.geometry.shard))
        exchange.close()

    def _encode_master(self, frame: Tensor) -> None:
        codec, noise = self.policy.weights, None
        if codec.stochastic:
            key = self.clock.weights(self.geometry.name)
            noise = key.noise(self.wire.mesh.rank * self.geometry.shard)
        ops.encode(codec, self.master, frame, noise=noise)

    def _copy_secondary(self, frame: Tensor) -> None:
        assert self.secondary.frames is not None  # noqa: S101  # current
        frame.copy_(self.secondary.frames)

    def _keep(self, received: Tensor) -> None:
        """Keep what the spared hops brought."""
        if self.secondary.frames is None:
            with torch.inference_mode(mode=False):  # it outlives a pass in inference mode
                self.secondary.frames = torch.empty(
                    received.numel(), dtype=torch.uint8, device=self.wire.mesh.device
                )
            self.meter.add("secondary", received.numel())
        self.secondary.frames.view(received.shape).copy_(received)
        self.secondary.life = Life.CURRENT
        self._secondary_version = self.weights_version

    # Gradients

    def arm(self) -> None:
        """Get ready to collect this backward pass's gradients: a zeroed buffer, all missing."""
        self._resize(self._gradient, full=True)
        self._gradient.zero_()
        for member in self.members:
            member.parameter.grad = member.gradient
        self.missing = set(range(len(self.members)))
        self.armed = True

    def collect(self, index: int) -> bool:
        """The gradient of member ``index`` has been accumulated; True when none is missing."""
        member = self.members[index]
        if not self.armed:  # its pre-backward event was not seen: the gradient is a loose tensor
            loose = member.parameter.grad
            self.arm()
            member.parameter.grad = loose
        if member.parameter.grad is not member.gradient:
            assert member.gradient is not None  # noqa: S101  # trainable
            assert member.parameter.grad is not None  # noqa: S101  # just accumulated
            member.gradient.copy_(member.parameter.grad)
            member.parameter.grad = member.gradient
        self.missing.discard(index)
        return not self.missing

    def reduce(self) -> Transfer:
        """Start averaging the collected gradient over all ranks."""
        if not self.armed:
            self.arm()  # no gradient reached it: the others may have one, zeros are sent
        transfer = Transfer(self._reducing())
        for member in self.members:
            member.parameter.grad = None
        self._resize(self._gradient, full=False)
        self.armed = False
        return transfer

    def _reducing(self) -> Generator[None, None, None]:
        topology, rank = self.wire.mesh.topology, self.wire.mesh.rank
        how = Reduction(
            wire=self.wire,
            hops=self.policy.reduce_axes(topology),
            tag=Tag("backward", "gradients", self.geometry.name),
            pieces=self._pieces,
            key=self.clock.gradients(self.geometry.name, rank),
            errors=self._feedback(),
        )
        self._accumulate((yield from reduced(how, self.policy.reduce, self._gradient)))

    def _feedback(self) -> Errors | None:
        """The errors that this step's reduction starts with."""
        if self.policy.feedback is None:
            return None
        if self._errors is None:
            mesh = self.wire.mesh
            self._errors = Errors.zero(self.policy, mesh.topology, self.geometry.shard, mesh.device)
            assert self._errors is not None  # noqa: S101  # there is feedback
            self.meter.add("feedback", self._errors.nbytes)
        self._errors.begin(self.clock.step)
        return self._errors

    def clear_feedback(self) -> None:
        """Forget the errors of the gradient codecs: the gradients they belong to are not used."""
        if self._errors is not None:
            self._errors.clear()

    def feedback_state(self) -> dict[str, Tensor]:
        """The errors of the gradient codecs, as :meth:`load_feedback` takes them."""
        errors = self._feedback() if self.geometry.trainable else None
        return {} if errors is None else errors.state()

    def check_feedback(self, state: Mapping[str, Tensor]) -> None:
        """Refuse errors that :meth:`load_feedback` could not take over.

        Raises:
            ZeroError: naming the unit and what does not fit.
        """
        errors = self._feedback() if self.geometry.trainable else None
        where = f"feedback state of unit {self.geometry.name!r}"
        if errors is None and state:
            raise ZeroError(f"{where}, which has no feedback")
        try:
            if errors is not None:
                errors.check_state(state)
        except ValueError as error:
            raise ZeroError(f"{where}: {error}") from None

    def load_feedback(self, state: Mapping[str, Tensor]) -> None:
        """Take over errors that :meth:`feedback_state` gave, and :meth:`check_feedback` let pass."""
        errors = self._feedback() if self.geometry.trainable else None
        if errors is not None:
            errors.load(state)

    def _accumulate(self, mean: Tensor) -> None:
        """Add ``mean`` (S,) to the masters' gradients."""
        for start, end in self._pads:
            mean[start:end] = 0
        if self._mean is None:
            self._mean = torch.zeros_like(self.master)
            self.meter.add("gradients", self._mean.nbytes)
        if all(master.grad is None for _, master in self.masters):
            self._mean.copy_(mean)
            for (_, master), (start, end) in zip(self.masters, self._spans, strict=True):
                master.grad = self._mean[start:end]
        else:
            for (_, master), (start, end) in zip(self.masters, self._spans, strict=True):
                if master.grad is None:
                    master.grad = self._mean[start:end].zero_()
                master.grad.add_(mean[start:end])

    def mean_gradient(self) -> Tensor | None:
        """(S,) fp32 accumulated mean gradient of this rank's shard, None before the first."""
        if self._mean is None or all(master.grad is None for _, master in self.masters):
            return None
        return self._mean

    # Whole values

    def full_master(self) -> list[Tensor]:
        """All parameters in fp32, gathered from the masters: one tensor per slot."""
        world = self.wire.mesh.topology.world_axis
        nbytes = FP32.frame_bytes(self.geometry.shard)
        tag = Tag("step", "state", self.geometry.name)
        exchange = self.wire.all_gather(world, nbytes, tag)
        ops.encode(FP32, self.master, exchange.send)
        exchange.post()
        whole = torch.empty((world.size, self.geometry.shard), device=self.master.device)
        ops.decode(FP32, exchange.wait(), whole)
        exchange.close()
        flat = whole.view(-1)
        return [flat[slot.offset : slot.end].view(slot.spec.shape).clone() for slot in self.geometry.slots]

    def load_master(self, values: Sequence[Tensor]) -> None:
        """Overwrite the weights with ``values``, one tensor per slot; ends the secondary's life."""
        shard, rank = self.geometry.shard, self.wire.mesh.rank
        low, high = rank * shard, (rank + 1) * shard
        for slot, value in zip(self.geometry.slots, values, strict=True):
            begin, end = max(slot.offset, low), min(slot.end, high)
            if begin < end:
                part = value.detach().reshape(-1)[begin - slot.offset : end - slot.offset]
                self.master[begin - low : end - low] = part
        self.weights_changed()
