"""A unit: one block of the model as a flat buffer, of which each rank owns a shard.

The only place that gives parameters their memory.  While a unit is released its modules hold placeholders
without values (:mod:`impl.unit.placeholder`): touching one from outside asks the engine, never crashes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from impl import ops
from impl.codecs.reference import DTYPES
from impl.comm.collectives import (
    Steps,
    Transfer,
    are_elements,
    as_frames,
    gather_frames,
    gathered,
    placed,
    sending,
    whole_of,
)
from impl.comm.wire import Exchange, Tag, Wire
from impl.errors import WrittenError, ZeroError
from impl.plan.geometry import UnitGeometry
from impl.plan.offload_plan import ON_DEVICE, Placement
from impl.plan.topology import Axis
from impl.plan.traffic import Phase, Purpose
from impl.transport.zero_copy import Lease, Passing, SharedRegions
from impl.unit.context import Shared
from impl.unit.gradient_buffer import GradientBuffer
from impl.unit.gradient_reduction import GradientReduction
from impl.unit.host_memory import MEMORY
from impl.unit.master_shard import MasterShard, Version, sliced
from impl.unit.placeholder import Placeholder, hide, keep, keeper_of, release, restore, unhide
from impl.unit.secondary_shard import SecondaryShard


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
        parameter: the leaf view of the flat buffer; without values, as the placeholder, unless it is
            gathered.
        stand_in: what modules see outside of their passes: same shape and type, no values.
        holders: where modules hold it.
        place: in the flat buffer.
        released: its values while there is no flat buffer: NaN.
    """

    parameter: nn.Parameter
    placeholder: nn.Parameter
    holders: Sequence[Holder]
    place: Place
    released: Tensor


class Place(NamedTuple):
    """A view of a unit's flat buffer: type, shape, strides and offset in elements.

    ``conj`` and ``neg`` are torch's bits of views whose values are computed when they are read.
    """

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool = False
    neg: bool = False


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
    """Keeper of a placeholder: the unit whose member it stands for."""

    def __init__(self, unit: Unit, number: int) -> None:
        self.name = unit.geometry.slots[number].spec.name
        self._unit, self._number = weakref.ref(unit), number

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        unit = self._unit()
        if unit is None:
            raise ZeroError(f"parameter {self.name!r} of a sharded model whose engine is gone")
        unit.used_outside(self.name)
        return unit.members[self._number].parameter


def check_plain(model: nn.Module) -> None:
    """Refuse a model of which a part is sharded already.

    Raises:
        ZeroError: naming one of its parameters.
    """
    for name, parameter in model.named_parameters():
        if isinstance(keeper_of(parameter), _InUnit):
            raise ZeroError(
                f"parameter {name!r} of this model is sharded already: call shard() once, for a model as a "
                "whole, and go on with the engine that it returned"
            )


class _Taken:
    """Keeper of what a model held before it was sharded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        raise ZeroError(
            f"parameter {self.name!r} was taken from its module before the model was sharded: take it "
            "from the module again"
        )


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
        owned: this rank's shard, with its mean gradient.
        secondary: hpZ's copy.
        averaging: how gradients become means.
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
        placement: Placement = ON_DEVICE,
        *,
        cut: Tensor | None = None,
    ) -> None:
        self.geometry = geometry
        self.wire, self.meter, self.clock = shared.wire, shared.meter, shared.clock
        self._host, self._under_way = shared.host, shared.under_way
        own = shared.policy.of_unit(trainable=geometry.trainable, persistent=geometry.persistent)
        self.policy, shared = own, replace(shared, policy=own)
        topology, rank = self.wire.mesh.topology, self.wire.mesh.rank
        region = MEMORY if placement.shard else self.wire.mesh.device
        shard = sliced(geometry, rank, originals, region) if cut is None else cut
        self.master_shard = MasterShard(geometry, shared, placement, shard)
        self.reduction = GradientReduction(geometry, shared, self.master_shard)
        self.secondary = SecondaryShard(geometry.name, shared.host, self.meter, offloaded=placement.frames)
        self._tags: dict[tuple[Phase, Purpose], Tag] = {}
        self._stays = self.policy.stage < 3  # gathered until the weights change
        self._axes, self._spared = self.policy.gather_axes(topology)
        self._ring = self._axes == (topology.world_axis,)
        self._frame = self.policy.weights.frame_bytes(geometry.shard)
        self._lands = self._arrive_in_place()
        self._secondary_bytes = self._frame * math.prod(axis.size for axis in self._axes[: self._spared])
        device, dtype = self.wire.mesh.device, DTYPES[self.policy.compute]

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
        self._region: tuple[SharedRegions, int] | None = (
            None  # in shared memory, where they stay as they arrived
        )
        self._lease: Lease | None = None  # what they lie in, if it is that
        self._laid: Tensor | None = None  # the memory of a home that parameters are views of, gathered or not
        self._marks: list[tuple[int, int]] = []  # version and address of the members, when gathered
        self.gathered = False
        self._gather: Transfer | None = None
        self._gathered_version: Version | None = None
        self.local = GradientBuffer(geometry, dtype, shared.gradients, shared.meter)
        self._shown = False
        for member in self.members:
            for holder in member.holders:
                holder.put(member.placeholder)
        for slot, original in zip(geometry.slots, originals, strict=True):
            # A reference that a module keeps outside its parameters would train nothing: its first use
            # is an error instead.
            release(original, _Taken(slot.spec.name))

    def _member(
        self, nowhere: Tensor, number: int, original: nn.Parameter, holders: Sequence[Holder]
    ) -> Member:
        shape, slot = original.shape, self.geometry.slots[number]
        released = nowhere.expand(shape)
        # Of ``data``, so that each counts its own versions: views of one tensor share a counter.
        parameter = nn.Parameter(released.data, requires_grad=self.geometry.trainable)
        placeholder = nn.Parameter(released.data, requires_grad=self.geometry.trainable)
        release(placeholder, _InUnit(self, number))
        keep(parameter, _InUnit(self, number))
        hide(parameter)
        strides = torch.empty(shape, device="meta").stride()
        place = Place(nowhere.dtype, shape, strides, slot.offset)
        return Member(parameter, placeholder, holders, place, released)

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

    def _attach_to(self, lease: Lease) -> None:
        """Let the parameters be views of what has arrived; mostly they are since the last time."""
        with torch.inference_mode(mode=False):
            flat = lease.rows.view(-1).view(DTYPES[self.policy.compute])
        if self._laid is not lease.memory:
            self._lay(flat)
            self._laid = lease.memory
        self._flat, self._lease = self._lie_in(flat), lease
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
            if self._lease is None:
                return
            self._lease.leave()
        flat, lease = self._flat, self._lease
        self._flat = self._lease = None
        if lease is None:
            self._empty()
            self._reserve.give_back(flat)
        else:
            if lease.left:  # else they may be the same views again
                self._move_out()
            self.meter.add("gathered", -flat.nbytes)
            lease.end()
        self.storage_bounds = (0, 0)

    def _move_out(self) -> None:
        """Parameters that are not gathered are views of a home no more."""
        if self._lease is None and self._laid is not None:
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
                holder.put(member.parameter if gathered else member.placeholder)

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
        self.reduction.reserve()

    def _plain_hops(self) -> Sequence[Axis]:
        """The axes along which hops bring the elements themselves, of which none is kept; else ()."""
        axes = sending(self._axes)
        plain = are_elements(self.policy.weights, DTYPES[self.policy.compute], self.geometry.shard)
        return axes if plain and axes[0].size > 1 and not self._spared else ()

    def _arrive_in_place(self) -> bool:
        """Whether messages may arrive where the gathered weights lie, to be used as they are.

        So they may where the wire lets go of their memory: a reference of its own would look like somebody's
        view (:meth:`_detach`).
        """
        axes = self._plain_hops()
        return len(axes) == 1 and self.wire.lets_go(axes[0])

    def shared_axis(self) -> Axis | None:
        """The axis whose ranks share the memory where gathered weights may stay as they arrive; else None.

        Weights that cross to the host, or stay gathered, would keep others from their home.
        """
        axes = self._plain_hops()
        if not axes or self._stays or self.master_shard.placement.crosses or not self.geometry.padded:
            return None
        *before, axis = axes
        in_place = not before or (len(before) == 1 and self.wire.lets_go(before[0]))
        return axis if in_place and self.wire.shares_memory(axis) else None

    def live_at(self, regions: SharedRegions, region: int) -> None:
        """From here on gathered weights stay in shared memory, at ``region``; see :meth:`shared_axis`."""
        self._region = regions, region
        regions.settle(region, self._move_out)

    # Weights

    def weights_changed(self) -> None:
        """The weights have new values: what was kept of the old ones is stale."""
        self.master_shard.changed()
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
        offset = int(tensor.storage_offset())
        return Place(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def view(self, place: Place) -> Tensor:
        """The view of the gathered weights at ``place``."""
        assert self._flat is not None  # noqa: S101  # it is gathered
        flat = self._flat if place.dtype == self._flat.dtype else self._flat.view(place.dtype)
        view = flat.as_strided(place.shape, place.stride, place.offset)
        view = view.conj() if place.conj else view
        return torch._neg_view(view) if place.neg else view  # noqa: SLF001  # there is no public one

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
        if self.gathered and self._gathered_version != self.master_shard.version:
            self._let_go()  # a master was written by hand
        if not self.in_use:
            if self._lease is not None:  # of other weights
                self._detach()
            self._gathered_version = self.master_shard.version
            if self.master_shard.placement.crosses:
                with self._host.ahead() as arrival:
                    self._gather = Transfer(self._gathering(phase))
                self.master_shard.arrival = arrival
            else:
                self._gather = Transfer(self._gathering(phase))
            self._under_way.add(self)

    def bring(self, phase: Phase) -> None:
        """:meth:`gather` and :meth:`wait`."""
        if not (self._shown and self._gathered_version == self.master_shard.version) or self.whole:
            self.gather(phase)
            self.wait()

    def wait(self) -> None:
        """Finish gathering: parameters have their values when this returns."""
        if self._gather is not None:
            gather, self._gather = self._gather, None  # first: one that was interrupted brought nothing
            self._under_way.discard(self)
            self.master_shard.arrival.join()
            gather.wait()
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
            WrittenError: if some were written, or given other values, since they were gathered, naming them.
        """
        self.wait()
        self._show(gathered=False)
        if not self._stays:
            written = self.written()
            if written and self._flat is not None:
                self._lay(self._flat)  # whose memory somebody may have taken away
            self._let_go()
            self._detach()
            if written:
                raise WrittenError(written)

    def written(self) -> Sequence[str]:
        """The parameters that were written in place since they were gathered, or lie elsewhere now.

        Not those written through a tensor that shares no version counter with them, as ``.data``; none below
        stage 3, where gathered weights stay.
        """
        found: Sequence[str] = ()
        if not self.gathered or self._stays:
            return found
        for number, (member, mark) in enumerate(zip(self.members, self._marks, strict=True)):
            if number not in self.whole and _mark(member.parameter) != mark:
                found = [*found, self.geometry.slots[number].spec.name]
        return found

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
        write: Callable[[Tensor], None] = self.master_shard.write_frame
        if spared:
            if self.secondary.holds(self.master_shard.version):
                write = self.secondary.write
            else:
                first = yield from gather_frames(self.wire, axes[:spared], write, nbytes, tag)
                self.secondary.keep(first.wait(), self.master_shard.version)
                write = partial(_pass_on, first)
            nbytes, axes = self._secondary_bytes, axes[spared:]
        ring = self._ring
        into = as_frames(codec, self._attach(), self.geometry.shard) if self._lands else None
        lease = None
        if self._region is not None:
            lease = Lease(*self._region, nbytes, self._passing())
            write = partial(self._write_to, lease, phase)
        exchange = yield from gather_frames(
            self.wire, axes, write, nbytes, tag, ring=ring, into=into, lease=lease
        )
        if into is None and lease is None:
            frames = gathered(exchange, axes, nbytes)
            frames = frames.view(*(axis.size for axis in reversed(self._axes)), self._frame)
            ops.decode(codec, frames, placed(self._attach(), self._axes[::-1], self.geometry.shard))
        exchange.close()
        if lease is not None:
            del exchange  # its views would look like somebody's
            self._attach_to(lease)

    def _passing(self) -> Passing | None:
        """Which rows at its home this rank fills with what other nodes send; None if they send nothing."""
        first, *more = sending(self._axes)
        if not more:
            return None
        (last,) = more
        here = last.digit(self.wire.mesh.rank) * last.stride
        through = slice(here, here + first.size * first.stride, first.stride)
        return Passing(first.size * last.size, through, self._finish_gather)

    def _finish_gather(self) -> None:
        """Carry a gather under way to its end; where its unit is next used, it has arrived."""
        gather = self._gather
        if gather is None:
            return
        try:
            gather.wait()
        except BaseException:  # as in :meth:`wait`: it brought nothing
            self._gather = None
            self._under_way.discard(self)
            raise

    def _tag(self, phase: Phase, purpose: Purpose) -> Tag:
        """The same one each time."""
        tag = self._tags.get((phase, purpose))
        if tag is None:
            tag = self._tags[phase, purpose] = Tag(phase, purpose, self.geometry.name)
        return tag

    def _write_to(self, lease: Lease, phase: Phase, frame: Tensor) -> None:
        """Write this rank's frame to its home; in backward it mostly lies there since the forward pass."""
        stands = self.geometry.name, self.master_shard.version
        lease.write(stands, partial(self.master_shard.write_frame, frame), anew=phase != "backward")

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
        if in_turn and not self.local.held:
            message = self.reduction.open_message(DTYPES[self.policy.compute])
            if message is not None:
                self.local.lie_in(message)
        self.local.add(index, self.members[index].parameter)
        self.local.missing.discard(index)
        return not self.local.missing

    def collect_outside(self, index: int) -> None:
        """Take the gradient that arrived at the placeholder of member ``index``.

        An ``autograd.Function`` that was given the placeholder leads there.  Others of the parameter may be
        yet to come, so it stays missing; if none comes, the unit is reduced at the end of the pass.

        Raises:
            ZeroError: while the parameter is seen whole: no optimizer would see the gradient.
        """
        if index in self.whole:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                self.members[index].placeholder.grad = None
            raise ZeroError(
                f"backward() to parameter {self.geometry.slots[index].spec.name!r} under GatheredParameters, "
                "which no optimizer would see: compute the loss in a pass of the model, or use "
                "torch.no_grad()"
            )
        if not self.local.armed:
            self.local.arm()
        self.local.add(index, self.members[index].placeholder)

    def reduce(self) -> Transfer:
        """Start averaging the collected gradient over all ranks."""
        transfer = Transfer(self.reduction.reducing(self.local.whole(), self.local.opened))
        self.local.forget()
        return transfer

    def check_flags(self) -> None:
        """Refuse parameters that were frozen, or unfrozen, since the model was sharded.

        Raises:
            ZeroError: naming the first.
        """
        trainable = self.geometry.trainable
        for number, member in enumerate(self.members):
            if member.parameter.requires_grad is trainable is member.placeholder.requires_grad:
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
        return [member.parameter if self._shown else member.placeholder for member in self.members]

    def full_master(self) -> list[Tensor]:
        """All parameters in fp32, gathered from the masters: one tensor per slot."""
        master = self.master_shard.master
        if self.master_shard.placement.shard:
            master = torch.empty(self.geometry.shard, device=self.wire.mesh.device)
            self._host.upload(self.master_shard.master, master, "state", self.geometry.name)
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
        if self._region is not None and self._lease is None and self._laid is not None:
            # Whoever stays at this home tells by the number of views whether somebody looks at it.
            regions, region = self._region
            regions.vacate(region)
            self._move_out()
        member = self.members[number]
        self.whole[number] = values
        self.meter.add("gathered", values.nbytes)
        restore(member.placeholder, values)
        unhide(member.parameter)
        member.parameter.data = values  # whoever took it during a pass
        return member.placeholder

    def hide_whole(self, number: int) -> None:
        """End what :meth:`show_whole` began; nothing is written back."""
        member = self.members[number]
        for holder in member.holders:
            holder.put(member.placeholder)  # in place of what may have replaced it
        self.meter.add("gathered", -self.whole.pop(number).nbytes)
        flat, place = self._flat, member.place
        member.parameter.data = (
            member.released if flat is None else flat.as_strided(place.shape, place.stride, place.offset)
        )
        if self.gathered:
            self._marks[number] = _mark(member.parameter)  # it may have been written
        torch.autograd.graph.increment_version(member.placeholder)  # what backward would need of it is gone
        release(member.placeholder, _InUnit(self, number))
        if not self.gathered:
            hide(member.parameter)

    def write_part(self, number: int, part: Tensor) -> None:
        """Overwrite this rank's part of member ``number``; ends the secondary's life.

        Args:
            number: of the member.
            part: (elements here,) fp32.
        """
        self.master_shard.load_part(*self.part(number), part)
        self.weights_changed()

    def _state_axes(self) -> Sequence[Axis]:
        """Along which ranks share one copy."""
        topology = self.wire.mesh.topology
        axes, outside = topology.gather_axes(self.policy.group_ranks(topology))
        return axes[outside:]

    def _state_tag(self) -> Tag:
        return Tag("step", "state", self.geometry.name)

    def load_master(self, values: Sequence[Tensor]) -> None:
        """Overwrite the weights with ``values``, one tensor per slot; ends the secondary's life."""
        self.load_shard(sliced(self.geometry, self.wire.mesh.rank, values, self.master_shard.held.device))

    def load_shard(self, values: Tensor) -> None:
        """Overwrite this rank's shard with ``values`` (S,) fp32; ends the secondary's life."""
        self.master_shard.load(values)
        self.weights_changed()

    def load_codes(self, frame: Tensor) -> None:
        """Overwrite weights that are held as codes; see :meth:`MasterShard.load_codes`."""
        self.master_shard.load_codes(frame)
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
