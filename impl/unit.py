"""A unit: one block of the model as a flat buffer, of which each rank owns a shard.

The only place that gives parameters their memory.  While a unit is released its modules hold stand-ins
without values (:mod:`impl.released`): touching one from outside asks the engine, never crashes.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from impl import ops
from impl.codec import Codec, FloatCodec, Raw
from impl.collectives import (
    Reduction,
    Replication,
    Steps,
    Transfer,
    are_elements,
    as_frames,
    gather_frames,
    gathered,
    opened,
    placed,
    reduced,
    replicated,
    sending,
    whole_of,
)
from impl.feedback import Errors
from impl.geometry import UnitGeometry, chunked
from impl.homes import Homes, Stay
from impl.local_gradient import LocalGradient
from impl.noise import Clock, apart
from impl.offload import MEMORY, Arrival, Host
from impl.policy import Policy
from impl.pool import Meter, Pool, Reserve
from impl.reference import DTYPES
from impl.released import Released, hide, keep, release, restore, unhide
from impl.tiers import ON_DEVICE, Tier
from impl.topology import Axis
from impl.traffic import Phase, Purpose
from impl.wire import Exchange, Tag, Wire


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

    @property
    def held(self) -> nn.Parameter | None:
        """What the module sees now."""
        return self.module._parameters.get(self.name)  # noqa: SLF001

    def put(self, parameter: nn.Parameter) -> None:
        """Let the module see ``parameter``."""
        self.module._parameters[self.name] = parameter  # noqa: SLF001  # setattr would re-register


@dataclass(slots=True, eq=False)
class Member:
    """A parameter of a unit.

    Attributes:
        parameter: the leaf view of the flat buffer; without values, as the stand-in, unless it is gathered.
        stand_in: what modules see outside of their passes: same shape and type, no values.
        holders: where modules hold it.
        place: in the flat buffer.
        released: its values while there is no flat buffer: NaN.
    """

    parameter: nn.Parameter
    stand_in: nn.Parameter
    holders: Sequence[Holder]
    place: Place
    released: Tensor


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


def _handles(tensor: Tensor) -> int:
    """Tensors that share the memory of ``tensor``, and handles of it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """Differs once ``parameter`` was written in place, or lies elsewhere."""
    return parameter._version, parameter.data_ptr()  # noqa: SLF001  # the public way warns for views


def _pass_on(received: Exchange, frame: Tensor) -> None:
    """Write what an exchange brought to the next one's message."""
    rows = received.wait()
    frame.view(rows.shape).copy_(rows)
    received.close()


class _InUnit:
    """Keeper of a stand-in: the unit whose member it stands for."""

    def __init__(self, unit: Unit, number: int) -> None:
        self.name = unit.geometry.slots[number].spec.name
        self._unit, self._number = weakref.ref(unit), number

    def use(self, parameter: Released, together: Sequence[Released]) -> Tensor:
        unit = self._unit()
        if unit is None:
            raise ZeroError(f"parameter {self.name!r} of a sharded model whose engine is gone")
        unit.used_outside(self.name)
        return unit.members[self._number].parameter


class _Taken:
    """Keeper of what a model held before it was sharded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, parameter: Released, together: Sequence[Released]) -> Tensor:
        raise ZeroError(
            f"parameter {self.name!r} was taken from its module before the model was sharded: take it "
            "from the module again"
        )


def sliced(geometry: UnitGeometry, rank: int, values: Sequence[Tensor], device: torch.device) -> Tensor:
    """(S,) fp32 of ``rank``: its slice of the laid-out ``values``, one tensor per slot."""
    low, _ = geometry.bounds(rank)
    shard = torch.zeros(geometry.shard, dtype=torch.float32, device=device)
    for slot, value in zip(geometry.slots, values, strict=True):
        begin, end = geometry.overlap(slot, rank)
        if begin < end:
            part = value.detach().reshape(-1)[begin - slot.offset : end - slot.offset]
            shard[begin - low : end - low] = part
    return shard


def _keeps_zeros(codec: Codec) -> bool:
    """Whether a zero decodes to zero whatever else is in its block."""
    if isinstance(codec, Raw | FloatCodec):
        return not codec.hadamard
    return not (codec.asymmetric or codec.hadamard)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the units of one engine share.

    Attributes:
        wire: what sends.
        policy: the model's; a unit's own follows from it.
        meter: where memory is counted.
        clock: what stochastic codecs and feedback go by.
        gradients: where buffers of local gradients come from.
        weights: where buffers of gathered weights come from.
        host: the host's memory, of units that are offloaded.
        under_way: units that are being gathered.
    """

    wire: Wire
    policy: Policy
    meter: Meter
    clock: Clock
    gradients: Pool
    weights: Reserve
    host: Host
    under_way: set[Unit] = field(default_factory=set)


class Unit:
    """One unit on one rank.

    Args:
        geometry: its layout.
        originals: the model's parameters in slot order, with their values.
        holders: for each of them, the modules that hold it.
        shared: with the other units.
        tier: what of it lies in host memory.
        cut: (S,) fp32 this rank's slice of the values, if the originals are without them already.

    Attributes:
        tier: as given.
        master: (S,) fp32, this rank's shard of the weights: the truth; on the host if offloaded.  Of
            weights that are held as codes, what they decode to.
        masters: leaf views of it, one per optimizer group, empty where the group has no elements
            here, so that all ranks have as many: (group, view).
        used_outside: called with the name of a parameter that is used while modules do not show it;
            gathers the unit, or refuses.
        whole: members that are seen whole and unsharded now, by number.
        storage_bounds: addresses where the gathered weights begin and end; equal while released.
        local: gradients of this backward pass.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        originals: Sequence[nn.Parameter],
        holders: Sequence[Sequence[Holder]],
        shared: Shared,
        tier: Tier = ON_DEVICE,
        *,
        cut: Tensor | None = None,
    ) -> None:
        self.geometry, self.tier = geometry, tier
        self.wire, self.meter, self.clock = shared.wire, shared.meter, shared.clock
        self._host, self._under_way = shared.host, shared.under_way
        self.policy = shared.policy.of_unit(trainable=geometry.trainable, persistent=geometry.persistent)
        self.secondary = Secondary()
        self._tags: dict[tuple[Phase, Purpose], Tag] = {}
        self._stays = self.policy.stage < 3  # gathered until the weights change
        self._changes = 0  # of the weights, as far as the engine was told
        topology, rank = self.wire.mesh.topology, self.wire.mesh.rank
        self._axes, self._spared = self.policy.gather_axes(topology)
        self._ring = self._axes == (topology.world_axis,)
        self._hops = self.policy.reduce_axes(topology)
        self._replicas = self.policy.replica_axes(topology)
        stride = geometry.piece_stride
        whole = geometry.shards == topology.world
        self._strides = None if whole else [stride(axis.stride) for axis, _ in self._hops]
        self._draws = any(codec.stochastic for codec in self.policy.gradients)
        self._frame = self.policy.weights.frame_bytes(geometry.shard)
        self._lands = self._arrive_in_place()
        self._chunks = chunked(geometry.piece, self.policy.chunks, self.policy.grain)
        self._secondary_bytes = self._frame * math.prod(axis.size for axis in self._axes[: self._spared])
        device, dtype = self.wire.mesh.device, DTYPES[self.policy.compute]

        self._codes: Tensor | None = None  # this rank's frame, of weights that are held as codes
        home = MEMORY if tier.shard else device
        self._master: Tensor | None = (  # (S,) fp32
            sliced(geometry, rank, originals, home) if cut is None else cut.to(home)
        )
        self._encoded: Tensor | None = None  # (F,) on the host: of an offloaded master
        self._sent: Tensor | None = None  # (F,) the same on the device, unless frames are offloaded too
        self._encoded_of = self._sent_of = (-1, 0)  # which master, and noise, they are of
        self._arrival = Arrival()  # of what the last gather brought from the host
        coded = not geometry.trainable and self.policy.frozen is not None
        if coded:
            self._hold_codes()
        self.meter.add(self._part("frozen" if coded else "masters", host=tier.shard), self.held.nbytes)
        self.masters = [
            (group, nn.Parameter(self.master[start:end], requires_grad=True))
            for group, start, end in geometry.spans(rank)
            if geometry.trainable
        ]
        self._spans = [(start, end) for _, start, end in geometry.spans(rank) if geometry.trainable]
        self._mean: Tensor | None = None  # (S,) fp32, accumulated mean gradient
        self._landing: tuple[Arrival, Tensor] | None = None  # (S,) a mean on its way to the host
        self._landed: Tensor | None = None  # (S,) where it arrives if it is to be added to another
        self._errors: Errors | None = None  # of the gradient codecs, from the first reduction on
        # An offset, or a rotation, makes something of padding's zeros; it must not reach norms or weights.
        self._pads = () if all(map(_keeps_zeros, self.policy.gradients)) else geometry.pads(rank)

        # What a parameter shows while its unit is released: whoever computes with it sees it.
        nowhere = torch.full((), math.nan, dtype=dtype, device=device)
        self.members = [
            self._member(nowhere, number, original, where)
            for number, (original, where) in enumerate(zip(originals, holders, strict=True))
        ]
        self.used_outside: Callable[[str], None] = _refuse_use
        self.whole: dict[int, Tensor] = {}
        self._reserve = shared.weights
        self._flat: Tensor | None = None  # (padded,) the gathered weights, while there is memory for them
        self.storage_bounds = (0, 0)
        self._own_views = 0  # handles of its memory that are the unit's and its parameters'
        self._home: tuple[Homes, int] | None = None  # in shared memory, where they stay as they arrived
        self._stay: Stay | None = None  # what they lie in, if it is that
        self._laid: Tensor | None = None  # the memory of a home that parameters are views of, gathered or not
        self._marks: list[tuple[int, int]] = []  # version and address of the members, when gathered
        self.gathered = False
        self._gather: Transfer | None = None
        self._gathered_version = self._secondary_version = -1
        self.local = LocalGradient(geometry, dtype, shared.gradients, shared.meter)
        self._shown = False
        for member in self.members:
            for holder in member.holders:
                holder.put(member.stand_in)
        for slot, original in zip(geometry.slots, originals, strict=True):
            # A reference that a module keeps outside its parameters would train nothing: its first use
            # is an error instead.
            release(original, _Taken(slot.spec.name))

    @property
    def master(self) -> Tensor:
        """(S,) fp32 this rank's shard of the weights."""
        if self._master is not None:
            return self._master
        assert self._codes is not None  # noqa: S101  # one of them is there
        master = torch.empty(self.geometry.shard, dtype=torch.float32, device=self._codes.device)
        ops.decode(self.policy.weights, self._codes, master)
        return master

    @property
    def held(self) -> Tensor:
        """What this rank keeps of its shard: fp32 masters, or codes."""
        held = self._master if self._codes is None else self._codes
        assert held is not None  # noqa: S101  # one of them is there
        return held

    def _hold_codes(self) -> None:
        """Encode the master once and for all, and let it go."""
        codes = self._bytes(self._frame, host=self.tier.shard)
        self._encode_master(codes)
        self._codes, self._master = codes, None

    def _bytes(self, numel: int, *, host: bool) -> Tensor:
        """(numel,) uint8 of any content, on the host or on the device, that outlives inference mode."""
        if host:
            return self._host.empty(numel, torch.uint8)
        with torch.inference_mode(mode=False):
            return torch.empty(numel, dtype=torch.uint8, device=self.wire.mesh.device)

    @staticmethod
    def _part(name: str, *, host: bool) -> str:
        """As what memory is counted: a key of ``traffic.memory``."""
        return f"host_{name}" if host else name

    def _member(
        self, nowhere: Tensor, number: int, original: nn.Parameter, holders: Sequence[Holder]
    ) -> Member:
        shape, slot = original.shape, self.geometry.slots[number]
        released = nowhere.expand(shape)
        # Of ``data``, so that each counts its own versions: views of one tensor share a counter.
        parameter = nn.Parameter(released.data, requires_grad=self.geometry.trainable)
        stand_in = nn.Parameter(released.data, requires_grad=self.geometry.trainable)
        release(stand_in, _InUnit(self, number))
        keep(parameter, _InUnit(self, number))
        hide(parameter)
        strides = torch.empty(shape, device="meta").stride()
        place = Place(nowhere.dtype, shape, strides, slot.offset)
        return Member(parameter, stand_in, holders, place, released)

    def _attach(self) -> Tensor:
        """(padded,) memory for the gathered weights, of which the parameters become views.

        They are given it through ``data``: their version counters are their own, so that filling it does
        not look like an in-place change of what autograd saved.
        """
        if self._flat is None:
            flat = self._reserve.take(self.geometry.padded)
            self._lay(flat)
            self._flat = self._lie_in(flat)
        return self._flat

    def _attach_to(self, stay: Stay) -> None:
        """Let the parameters be views of what has arrived; mostly they are since the last time."""
        with torch.inference_mode(mode=False):
            flat = stay.rows.view(-1).view(DTYPES[self.policy.compute])
        if self._laid is not stay.memory:
            self._lay(flat)
            self._laid = stay.memory
        self._flat, self._stay = self._lie_in(flat), stay
        self.meter.add("gathered", flat.nbytes)

    def _lie_in(self, flat: Tensor) -> Tensor:
        """From here on ``flat`` (padded,) are the gathered weights; only parameters look at them."""
        self._own_views = _handles(flat)
        self.storage_bounds = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return flat

    def _lay(self, flat: Tensor) -> None:
        """Let the parameters that are not seen whole be views of ``flat`` (padded,)."""
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for number, member in enumerate(self.members):
                if number not in self.whole:
                    place = member.place
                    member.parameter.data = flat.as_strided(place.shape, place.stride, place.offset)

    def _detach(self) -> None:
        """Give the memory of the gathered weights back: not from under a view that somebody holds.

        Autograd holds views of what was used outside a forward pass of the model, or in a block that is
        computed again; they would show another unit's weights.  Where weights stay as they arrived, such
        views keep a copy; else :meth:`release` tries again.
        """
        if self._flat is None or self.whole:
            return
        others = _handles(self._flat) != self._own_views
        if others:
            if self._stay is None:
                return
            self._stay.leave()
        flat, stay = self._flat, self._stay
        self._flat = self._stay = None
        if stay is None:
            self._empty()
            self._reserve.give_back(flat)
        else:
            if stay.left:  # else they may be the same views again
                self._move_out()
            self.meter.add("gathered", -flat.nbytes)
            stay.end()
        self.storage_bounds = (0, 0)

    def _move_out(self) -> None:
        """Parameters that are not gathered are views of a home no more."""
        if self._stay is None and self._laid is not None:
            self._laid = None
            self._empty()

    def _empty(self) -> None:
        """Take the values of all parameters away."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member in self.members:
                member.parameter.data = member.released

    def _show(self, *, gathered: bool) -> None:
        if gathered == self._shown:
            return
        self._shown = gathered
        for member in self.members:
            for holder in member.holders:
                holder.put(member.parameter if gathered else member.stand_in)

    def check_held(self) -> None:
        """Refuse parameters that were put in the place of this unit's.

        Raises:
            ZeroError: naming the first.
        """
        for member, shown, slot in zip(self.members, self.visible, self.geometry.slots, strict=True):
            for holder in member.holders:
                if holder.held is not shown:
                    raise ZeroError(
                        f"parameter {slot.spec.name!r} was replaced by another object in its module after "
                        "the model was sharded: write its values under GatheredParameters"
                    )

    def reserve(self) -> None:
        """Make room in shared memory for this unit's largest messages."""
        held = self._frame
        for axis in self._axes:
            self.wire.reserve(axis, held)
            held *= axis.size
        slices = self.wire.mesh.topology.world
        for axis, codec in self.policy.reduce_axes(self.wire.mesh.topology):
            largest = max(codec.frame_bytes(end - start) for start, end in self._chunks)
            self.wire.reserve(axis, slices * largest)
            slices //= axis.size

    def _plain_hop(self) -> Axis | None:
        """The axis along which one hop brings the elements themselves, in rank order; else None."""
        axis, *more = sending(self._axes)
        if more or self._spared:
            return None
        plain = are_elements(self.policy.weights, DTYPES[self.policy.compute], self.geometry.shard)
        return axis if plain and axis.size > 1 else None

    def _arrive_in_place(self) -> bool:
        """Whether messages may arrive where the gathered weights lie, to be used as they are.

        So they may where the wire lets go of their memory: a reference of its own would look like somebody's
        view (:meth:`_detach`).
        """
        axis = self._plain_hop()
        return axis is not None and self.wire.lets_go(axis)

    def shared_axis(self) -> Axis | None:
        """The axis whose ranks share the memory where gathered weights may stay as they arrive; else None.

        Weights that cross to the host, or stay gathered, would keep others from their home.
        """
        axis = self._plain_hop()
        if axis is None or self._stays or self.tier.crosses or not self.geometry.padded:
            return None
        return axis if self.wire.shares_memory(axis) else None

    def live_at(self, homes: Homes, home: int) -> None:
        """From here on gathered weights stay in shared memory, at ``home``; see :meth:`shared_axis`."""
        self._home = homes, home
        homes.settle(home, self._move_out)

    # Weights

    @property
    def weights_version(self) -> int:
        """Changes whenever the master does: told of, or written in place where torch counts it."""
        held = self._master if self._codes is None else self._codes
        return self._changes + held._version  # type: ignore[union-attr]  # noqa: SLF001  # the public way warns for views

    def weights_changed(self) -> None:
        """The master has new values: what was kept of the old ones is stale."""
        self._changes += 1
        self.secondary.end()
        self.wait()
        self._let_go()
        if not self._stays:
            self._detach()

    @property
    def storage_address(self) -> int:
        """Where the gathered weights lie; 0 while released."""
        return self.storage_bounds[0]

    def locate(self, tensor: Tensor) -> Place:
        """Where ``tensor``, a view of the gathered weights, lies in them."""
        return Place(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def view(self, place: Place) -> Tensor:
        """The view of the gathered weights at ``place``."""
        assert self._flat is not None  # noqa: S101  # it is gathered
        flat = self._flat if place.dtype == self._flat.dtype else self._flat.view(place.dtype)
        return flat.as_strided(place.shape, place.stride, place.offset)

    @property
    def in_use(self) -> bool:
        """Gathered, or on its way."""
        return self.gathered or self._gather is not None

    def gather(self, phase: Phase) -> None:
        """Start gathering, unless it is gathered or on its way.

        Raises:
            ZeroError: while a parameter of it is seen whole.
        """
        if self.whole:
            name = self.geometry.slots[next(iter(self.whole))].spec.name
            raise ZeroError(f"a pass inside GatheredParameters of {name!r}: leave its context first")
        if self.gathered and self._gathered_version != self.weights_version:
            self._let_go()  # a master was written by hand
        if not self.in_use:
            if self._stay is not None:  # of other weights
                self._detach()
            self._gathered_version = self.weights_version
            if self.tier.crosses:
                with self._host.ahead() as arrival:
                    self._gather = Transfer(self._gathering(phase))
                self._arrival = arrival
            else:
                self._gather = Transfer(self._gathering(phase))
            self._under_way.add(self)

    def bring(self, phase: Phase) -> None:
        """:meth:`gather` and :meth:`wait`."""
        if not (self._shown and self._gathered_version == self.weights_version) or self.whole:
            self.gather(phase)
            self.wait()

    def wait(self) -> None:
        """Finish gathering: parameters have their values when this returns."""
        if self._gather is not None:
            self._arrival.join()
            self._gather.wait()
            self._gather = None
            self._under_way.discard(self)
            self.gathered = True
            for member in self.members:
                unhide(member.parameter)
            self._marks = [_mark(member.parameter) for member in self.members]
        if self.gathered:
            self._show(gathered=True)

    def release(self) -> None:
        """Free the weights; what is on its way is awaited first, as its bytes are sent.

        Below stage 3 they stay until they change, unseen by modules.

        Raises:
            ZeroError: if one was written, or given other values, since it was gathered, naming it.
        """
        self.wait()
        self._show(gathered=False)
        if not self._stays:
            written = self._written() if self.gathered else None
            if written is not None and self._flat is not None:
                self._lay(self._flat)  # whose memory somebody may have taken away
            self._let_go()
            self._detach()
            if written is not None:
                raise ZeroError(
                    f"parameter {written!r} was written in place or through .data during a pass, which "
                    "reaches no master: write it between passes, under GatheredParameters"
                )

    def _written(self) -> str | None:
        """The first parameter that was written in place since it was gathered, or lies elsewhere now.

        Not one that was written through a tensor that shares no version counter with it, as ``.data``.
        """
        for number, (member, mark) in enumerate(zip(self.members, self._marks, strict=True)):
            if number not in self.whole and _mark(member.parameter) != mark:
                return self.geometry.slots[number].spec.name
        return None

    def _let_go(self) -> None:
        """The gathered weights are not to be used any more."""
        if self.gathered:
            self.gathered = False
            self._show(gathered=False)
            for member in self.members:  # whoever took one during a pass asks for its values from now on
                hide(member.parameter)

    def _gathering(self, phase: Phase) -> Steps[None]:
        tag = self._tag(phase, "persistent" if self.geometry.persistent else "weights")
        codec, axes, spared = self.policy.weights, self._axes, self._spared
        nbytes = self._frame
        if self.secondary.life is Life.CURRENT and self._secondary_version != self.weights_version:
            self.secondary.end()  # a master was written by hand
        write = self._write_shard
        if spared:
            if self.secondary.life is Life.CURRENT:
                write = self._write_secondary
            else:
                first = yield from gather_frames(self.wire, axes[:spared], write, nbytes, tag)
                self._keep(first.wait())
                write = partial(_pass_on, first)
            nbytes, axes = self._secondary_bytes, axes[spared:]
        ring = self._ring
        into = as_frames(codec, self._attach(), self.geometry.shard) if self._lands else None
        stay = None
        if self._home is not None:
            stay = Stay(*self._home, nbytes)
            write = partial(self._write_to, stay, phase)
        exchange = yield from gather_frames(
            self.wire, axes, write, nbytes, tag, ring=ring, into=into, stay=stay
        )
        if into is None and stay is None:
            frames = gathered(exchange, axes, nbytes)
            frames = frames.view(*(axis.size for axis in reversed(self._axes)), self._frame)
            ops.decode(codec, frames, placed(self._attach(), self._axes[::-1], self.geometry.shard))
        exchange.close()
        if stay is not None:
            del exchange  # its views would look like somebody's
            self._attach_to(stay)

    def _tag(self, phase: Phase, purpose: Purpose) -> Tag:
        """The same one each time."""
        tag = self._tags.get((phase, purpose))
        if tag is None:
            tag = self._tags[phase, purpose] = Tag(phase, purpose, self.geometry.name)
        return tag

    def _write_to(self, stay: Stay, phase: Phase, frame: Tensor) -> None:
        """Write this rank's frame to its home; in backward it mostly lies there since the forward pass."""
        stands = self.geometry.name, self._changes, self.held._version  # noqa: SLF001
        stay.write(stands, partial(self._write_shard, frame), anew=phase != "backward")

    def _write_shard(self, frame: Tensor) -> None:
        """Write this rank's frame to a message."""
        if not self.tier.shard:
            if self._codes is None:
                self._encode_master(frame)
            else:
                frame.copy_(self._codes)
            return
        source, name = self._codes if self._codes is not None else self._kept_frame(), self.geometry.name
        if self.tier.frames:
            self._host.upload(source, frame, "weights", name)
            return
        if self._sent is None:
            self._sent = self._bytes(self._frame, host=False)
            self.meter.add("frames", self._sent.nbytes)
        if self._sent_of != self._encoded_of:
            self._host.upload(source, self._sent, "weights", name)
            self._sent_of = self._encoded_of
        frame.copy_(self._sent)

    def _kept_frame(self) -> Tensor:
        """(F,) uint8 on the host: the frame of an offloaded master, encoded there when it is another.

        Whenever a master on the device would be encoded with the same noise to the same bits, the frame
        stays; so offloading changes no bit.
        """
        ages = self.policy.weights.stochastic and self.geometry.trainable
        now = (self.weights_version, self.clock.step if ages else 0)
        if self._encoded is None:
            self._encoded = self._bytes(self._frame, host=True)
            self.meter.add("host_frames", self._encoded.nbytes)
        if self._encoded_of != now:
            self._arrival.finish()  # of the last copy from it
            self._encode_master(self._encoded)
            self._encoded_of = now
        return self._encoded

    def _encode_master(self, frame: Tensor) -> None:
        codec, noise = self.policy.weights, None
        if codec.stochastic:
            key = self.clock.weights(self.geometry.name, frozen=not self.geometry.trainable)
            noise = key.noise(self.geometry.bounds(self.wire.mesh.rank)[0])
        ops.encode(codec, self.master, frame, noise=noise)

    def _write_secondary(self, frame: Tensor) -> None:
        assert self.secondary.frames is not None  # noqa: S101  # current
        if self.tier.frames:
            self._host.upload(self.secondary.frames, frame, "secondary", self.geometry.name)
        else:
            frame.copy_(self.secondary.frames)

    def _keep(self, received: Tensor) -> None:
        """Keep what the spared hops brought."""
        host = self.tier.frames
        if self.secondary.frames is None:
            self.secondary.frames = self._bytes(received.numel(), host=host)
            self.meter.add(self._part("secondary", host=host), received.numel())
        kept = self.secondary.frames.view(received.shape)
        if host:
            self._host.keep(received, kept, "secondary", self.geometry.name)
        else:
            kept.copy_(received)
        self.secondary.life = Life.CURRENT
        self._secondary_version = self.weights_version

    # Gradients

    def collect(self, index: int, *, in_turn: bool = False) -> bool:
        """Take the gradient of member ``index``, which has just arrived; True when none is missing.

        Args:
            index: of the member.
            in_turn: whether this unit is the next to be reduced, so that its message may be opened now
                and, where frames are the elements themselves, be collected in place.
        """
        if not self.local.armed:  # its pre-backward event was not seen
            self.local.arm()
        if in_turn and not self.local.held and self.policy.reduce != "ring":
            message = opened(self._reduction(), self.geometry.piece, DTYPES[self.policy.compute])
            if message is not None:
                self.local.lie_in(message)
        self.local.add(index, self.members[index].parameter)
        self.local.missing.discard(index)
        return not self.local.missing

    def collect_outside(self, index: int) -> None:
        """Take the gradient that arrived at the stand-in of member ``index``.

        An ``autograd.Function`` that was given the stand-in leads there.  Others of the parameter may be
        yet to come, so it stays missing; if none comes, the unit is reduced at the end of the pass.

        Raises:
            ZeroError: while the parameter is seen whole: no optimizer would see the gradient.
        """
        if index in self.whole:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                self.members[index].stand_in.grad = None
            raise ZeroError(
                f"backward() to parameter {self.geometry.slots[index].spec.name!r} under GatheredParameters, "
                "which no optimizer would see: compute the loss in a pass of the model, or use "
                "torch.no_grad()"
            )
        if not self.local.armed:
            self.local.arm()
        self.local.add(index, self.members[index].stand_in)

    def reduce(self) -> Transfer:
        """Start averaging the collected gradient over all ranks."""
        transfer = Transfer(self._reducing(self.local.whole()))
        self.local.forget()
        return transfer

    def _reduction(
        self, *, opened: Exchange | None = None, out: Tensor | None = None, goes_on: bool = False
    ) -> Reduction:
        """How this unit's gradient is reduced now."""
        return Reduction(
            wire=self.wire,
            hops=self._hops,
            tag=self._tag("backward", "gradients"),
            strides=self._strides,
            chunks=self._chunks,
            key=self.clock.gradients(self.geometry.name, self.wire.mesh.rank) if self._draws else None,
            errors=self._feedback(),
            opened=opened,
            out=out,
            goes_on=goes_on,
        )

    def _reducing(self, gradient: Tensor) -> Steps[None]:
        axes, codec = self._replicas
        fresh = all(master.grad is None for _, master in self.masters)
        into = self._kept_mean() if fresh and not axes and not self.tier.shard else None
        how = self._reduction(opened=self.local.opened, out=into, goes_on=bool(axes))
        mean = yield from reduced(how, self.policy.reduce, gradient)
        if axes:
            mean = yield from replicated(self.wire, self._replication(how, axes, codec), how.tag, mean)
        for start, end in self._pads:
            mean[start:end] = 0
        if self.tier.shard:
            self._send_home(mean)
        else:
            self._accumulate(mean)

    def _send_home(self, mean: Tensor) -> None:
        """Start copying ``mean`` (S,) to the host; :meth:`land` accumulates it there."""
        staged = self._host.stage(self.geometry.shard)
        staged.copy_(mean)
        target = self._kept_mean()
        if any(master.grad is not None for _, master in self.masters):
            if self._landed is None:
                self._landed = self._host.empty(self.geometry.shard, torch.float32)
                self.meter.add("host_gradients", self._landed.nbytes)
            target = self._landed
        arrival = self._host.download(staged, target, "gradients", self.geometry.name)
        self._landing = arrival, target

    def land(self) -> None:
        """Wait for a mean gradient that is on its way to the host, and accumulate it."""
        if self._landing is not None:
            arrival, mean = self._landing
            arrival.finish()
            self._landing = None
            self._accumulate(mean)

    def _replication(self, how: Reduction, axes: Sequence[Axis], codec: Codec) -> Replication:
        """How this rank's mean comes to the other groups."""
        rank, piece = self.wire.mesh.rank, self.geometry.piece
        noise = None
        if codec.stochastic and how.key is not None:
            number = self.geometry.bounds(rank)[0] // piece + rank // self.geometry.shards
            noise = replace(how.key, hop=len(how.hops)).noise(number * apart(piece))
        strides = [self.geometry.piece_stride(axis.stride) for axis in axes]
        return Replication(axes=axes, strides=strides, codec=codec, noise=noise)

    def _feedback(self) -> Errors | None:
        """The errors that this step's reduction starts with."""
        if self.policy.feedback is None:
            return None
        if self._errors is None:
            mesh = self.wire.mesh
            self._errors = Errors.zero(self.policy, mesh.topology, self.geometry.piece, mesh.device)
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
        """Add ``mean`` (S,) to the masters' gradients, where they lie."""
        kept = self._kept_mean()
        if all(master.grad is None for _, master in self.masters):
            if mean is not kept:
                kept.copy_(mean)
            for (_, master), (start, end) in zip(self.masters, self._spans, strict=True):
                master.grad = kept[start:end]
        else:
            for (_, master), (start, end) in zip(self.masters, self._spans, strict=True):
                if master.grad is None:
                    master.grad = kept[start:end].zero_()
                master.grad.add_(mean[start:end])

    def _kept_mean(self) -> Tensor:
        """(S,) fp32 where the masters' gradients lie."""
        if self._mean is None:
            if self.tier.shard:
                self._mean = self._host.empty(self.geometry.shard, torch.float32).zero_()
            else:
                self._mean = torch.zeros(self.geometry.shard, device=self.wire.mesh.device)
            self.meter.add(self._part("gradients", host=self.tier.shard), self._mean.nbytes)
        return self._mean

    def mean_gradient(self) -> Tensor | None:
        """(S,) fp32 accumulated mean gradient of this rank's shard, None before the first."""
        if self._mean is None or all(master.grad is None for _, master in self.masters):
            return None
        return self._mean

    def own_gradients(self) -> Iterator[Tensor]:
        """Parts of the masters' gradients that no other rank counts, in a norm over all ranks."""
        low, high = self.geometry.own_piece(self.wire.mesh.rank)
        for (_, master), (start, end) in zip(self.masters, self._spans, strict=True):
            first, last = max(start, low), min(end, high)
            if master.grad is not None and first < last:
                yield master.grad[first - start : last - start]

    def check_flags(self) -> None:
        """Refuse parameters that were frozen, or unfrozen, since the model was sharded.

        Raises:
            ZeroError: naming the first.
        """
        trainable = self.geometry.trainable
        for number, member in enumerate(self.members):
            if member.parameter.requires_grad is trainable is member.stand_in.requires_grad:
                continue
            was, now = ("trained", "frozen") if trainable else ("frozen", "trained")
            raise ZeroError(
                f"parameter {self.geometry.slots[number].spec.name!r} was {was} when the model was sharded "
                f"and is now {now}: set requires_grad before"
            )

    # Whole values

    @property
    def visible(self) -> list[nn.Parameter]:
        """What modules show now, in slot order."""
        return [member.parameter if self._shown else member.stand_in for member in self.members]

    def full_master(self) -> list[Tensor]:
        """All parameters in fp32, gathered from the masters: one tensor per slot."""
        master = self.master
        if self.tier.shard:
            master = torch.empty(self.geometry.shard, device=self.wire.mesh.device)
            self._host.upload(self.master, master, "state", self.geometry.name)
        whole = whole_of(self.wire, self._state_axes(), master, self._state_tag()).view(-1)
        return [whole[slot.offset : slot.end].view(slot.spec.shape).clone() for slot in self.geometry.slots]

    def gather_member(self, number: int, part: Tensor) -> Tensor:
        """(shape of the parameter) fp32, gathered from the parts that ranks hold of it.

        Args:
            number: of the member.
            part: (elements here,) fp32, this rank's, as :meth:`part` bounds it.
        """
        axes, tag, part = self._state_axes(), self._state_tag(), part.to(self.wire.mesh.device)
        return assembled(self.geometry, number, part, axes, wire=self.wire, tag=tag)

    def part(self, number: int) -> tuple[int, int]:
        """(start, end) of member ``number`` in this rank's shard; maybe empty."""
        low, _ = self.geometry.bounds(self.wire.mesh.rank)
        first, end = self.geometry.overlap(self.geometry.slots[number], self.wire.mesh.rank)
        return first - low, end - low

    def show_whole(self, number: int, values: Tensor) -> nn.Parameter:
        """From here on whoever holds member ``number`` sees ``values`` (shape), which it may write.

        Returns:
            What modules hold.
        """
        self.wait()
        self._show(gathered=False)
        member = self.members[number]
        self.whole[number] = values
        self.meter.add("gathered", values.nbytes)
        restore(member.stand_in, values)
        unhide(member.parameter)
        member.parameter.data = values  # whoever took it during a pass
        return member.stand_in

    def hide_whole(self, number: int) -> None:
        """End what :meth:`show_whole` began; nothing is written back."""
        member = self.members[number]
        for holder in member.holders:
            holder.put(member.stand_in)  # in place of what may have replaced it
        self.meter.add("gathered", -self.whole.pop(number).nbytes)
        flat, place = self._flat, member.place
        self._laid = None
        member.parameter.data = (
            member.released if flat is None else flat.as_strided(place.shape, place.stride, place.offset)
        )
        if self.gathered:
            self._marks[number] = _mark(member.parameter)  # it may have been written
        torch.autograd.graph.increment_version(member.stand_in)  # what backward would need of it is gone
        release(member.stand_in, _InUnit(self, number))
        if not self.gathered:
            hide(member.parameter)

    def write_part(self, number: int, part: Tensor) -> None:
        """Overwrite this rank's part of member ``number``; ends the secondary's life.

        Args:
            number: of the member.
            part: (elements here,) fp32.
        """
        start, end = self.part(number)
        master = self.master
        with torch.no_grad():
            master[start:end] = part
        if self._codes is not None and start < end:
            self._master, self._codes = master, None
            self._hold_codes()
        self.weights_changed()

    def write_gradient(self, number: int, part: Tensor) -> None:
        """Overwrite this rank's part of member ``number``'s mean gradient; (elements here,) fp32."""
        start, end = self.part(number)
        kept = self._kept_mean()
        for (_, master), (first, last) in zip(self.masters, self._spans, strict=True):
            if master.grad is None:
                master.grad = kept[first:last].zero_()
        kept[start:end] = part

    def _state_axes(self) -> Sequence[Axis]:
        """Along which ranks share one copy."""
        topology = self.wire.mesh.topology
        axes, outside = topology.gather_axes(self.policy.group_ranks(topology))
        return axes[outside:]

    def _state_tag(self) -> Tag:
        return Tag("step", "state", self.geometry.name)

    def load_master(self, values: Sequence[Tensor]) -> None:
        """Overwrite the weights with ``values``, one tensor per slot; ends the secondary's life."""
        self.load_shard(sliced(self.geometry, self.wire.mesh.rank, values, self.held.device))

    def load_shard(self, values: Tensor) -> None:
        """Overwrite this rank's shard with ``values`` (S,) fp32; ends the secondary's life."""
        if self._codes is None:
            self.master.copy_(values)
        else:
            self._master, self._codes = values.to(self.held.device), None
            self._hold_codes()
        self.weights_changed()

    @property
    def codes(self) -> Tensor | None:
        """(F,) uint8 this rank's frame of weights that are held as codes; None of others."""
        return self._codes

    def load_codes(self, frame: Tensor) -> None:
        """Overwrite weights that are held as codes with a frame of equal layout and codec.

        Encoding again what a frame decodes to may give another one.

        Raises:
            ZeroError: if they are not held as codes, or the frame is of another size.
        """
        held = 0 if self._codes is None else self._codes.numel()
        if self._codes is None or frame.numel() != held:
            raise ZeroError(f"unit {self.geometry.name!r}: {frame.numel()} bytes of codes, it holds {held}")
        self._arrival.finish()  # of a copy from them to the device
        self._codes.copy_(frame)
        self.weights_changed()


def assembled(
    geometry: UnitGeometry, number: int, part: Tensor, axes: Sequence[Axis], *, wire: Wire, tag: Tag
) -> Tensor:
    """(shape) fp32: slot ``number``, of which each rank along ``axes`` gives its part (elements here,)."""
    slot = geometry.slots[number]
    bounds = [geometry.overlap(slot, rank) for rank in range(geometry.shards)]
    longest = torch.zeros(max(end - first for first, end in bounds), device=part.device)
    longest[: part.numel()] = part
    rows = whole_of(wire, axes, longest, tag)
    parts = [row[: end - first] for row, (first, end) in zip(rows, bounds, strict=True)]
    return torch.cat(parts).view(slot.spec.shape)


def _refuse_use(name: str) -> None:
    raise ZeroError(f"parameter {name!r} is used, but no engine trains its model")
