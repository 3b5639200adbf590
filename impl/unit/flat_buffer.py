"""The memory of one unit's gathered weights, and the parameters that are views of it.

[Note: flat buffer]
A gathered unit is one tensor (P,), P its padded elements, in the type that is computed in.  Each parameter
is a leaf of its own whose ``data`` is a view of it, at the slot that
:class:`~impl.plan.shard_layout.UnitGeometry` gives. Parameters are given that view through ``data``: so each
counts its own versions, and filling the buffer again for backward is no in-place change of what autograd
saved.  The memory comes from a pool, and frames are decoded to it.  While the unit is sharded there is no
such tensor, and modules hold placeholders; touching one asks the engine and never crashes.

Autograd may still hold views when the unit is resharded: of weights that were used outside a forward pass,
or in a block that is computed again.  Such memory is not given away, for it would show another unit's
weights: it is kept until nobody looks at it.  Who looks is told by the count of handles that torch keeps of
the storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from impl.codecs.reference import DTYPES
from impl.plan.shard_layout import UnitGeometry
from impl.unit.context import UnitContext
from impl.unit.member import Gathers, Holder, InUnit, Member, Place, Taken
from impl.unit.placeholder import Placeholder, hide, keep, release


class FlatBuffer:
    """One unit's flat buffer on one rank; the only place that gives parameters their memory.

    Args:
        geometry, context: of the unit, with its own policy.
        unit: asked for the values of placeholders that are used.
        originals: the model's parameters in slot order; they lose their values.
        holders: for each of them, the modules that hold it.

    Attributes:
        members: of the unit, in slot order.
        bounds: addresses where the gathered weights begin and end; equal while there is no memory.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        context: UnitContext,
        unit: Gathers,
        originals: Sequence[nn.Parameter],
        holders: Sequence[Sequence[Holder]],
    ) -> None:
        self._geometry, self._meter, self._reserve = geometry, context.meter, context.weights
        self._dtype = DTYPES[context.policy.compute]
        nowhere = torch.full((), math.nan, dtype=self._dtype, device=context.wire.mesh.device)
        self.members = [
            self._member(nowhere, unit, number, original, where)
            for number, (original, where) in enumerate(zip(originals, holders, strict=True))
        ]
        self.bounds = (0, 0)
        self._flat: Tensor | None = None  # (P,) the gathered weights, while there is memory for them
        self._own_views = 0  # handles of that memory that are this object's and the parameters'
        self._marks: list[tuple[int, int]] = []  # of the members, when they were gathered

    def _member(
        self,
        nowhere: Tensor,
        unit: Gathers,
        number: int,
        original: nn.Parameter,
        holders: Sequence[Holder],
    ) -> Member:
        shape, slot = original.shape, self._geometry.slots[number]
        trainable, name = self._geometry.trainable, slot.spec.name
        no_values = nowhere.expand(shape)
        # Of ``data``, so that each counts its own versions: views of one tensor share a counter.
        parameter = nn.Parameter(no_values.data, requires_grad=trainable)
        placeholder = nn.Parameter(no_values.data, requires_grad=trainable)
        parameter.__dict__ = placeholder.__dict__ = original.__dict__  # what users say of it
        release(placeholder, InUnit(unit, name, number))
        keep(parameter, InUnit(unit, name, number))
        hide(parameter)
        strides = torch.empty(shape, device="meta").stride()
        place = Place(nowhere.dtype, shape, strides, slot.offset)
        member = Member(parameter, placeholder, holders, place, no_values)
        member.put(placeholder)
        # A reference that a module keeps outside its parameters would train nothing: its first use is an
        # error.
        release(original, Taken(name))
        return member

    # Memory

    def attach(self) -> Tensor:
        """(P,) memory for the gathered weights, of which the parameters become views."""
        if self._flat is None:
            flat = self._reserve.take(self._geometry.padded)
            self._lay(flat)
            self._flat, self._own_views = flat, _handles(flat)
            self.bounds = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return self._flat

    def attach_bytes(self) -> Tensor:
        """(bytes,) uint8 the same memory, where frames are its elements."""
        return self.attach().view(torch.uint8)

    def detach(self) -> None:
        """Give the memory back, unless somebody looks at it ([Note: flat buffer])."""
        flat = self._flat
        if flat is None or _handles(flat) != self._own_views:
            return
        for member in self.members:
            if member.whole is not None:
                return
        self._flat, self.bounds = None, (0, 0)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member in self.members:
                member.parameter.data = member.no_values
        self._reserve.give_back(flat)

    def lay_again(self) -> None:
        """Make the parameters views of the flat buffer again: somebody may have given them other memory."""
        if self._flat is not None:
            self._lay(self._flat)

    def _lay(self, flat: Tensor) -> None:
        """Let the parameters that are not seen whole be views of ``flat`` (P,)."""
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member in self.members:
                if member.whole is None:
                    place = member.place
                    member.parameter.data = flat.as_strided(place.shape, place.stride, place.offset)

    # What is seen of it

    def show(self, *, gathered: bool) -> None:
        """Let modules hold the parameters, or their placeholders."""
        for member in self.members:
            shown = member.parameter if gathered else member.placeholder
            for holder in member.holders:
                holder.module._parameters[holder.name] = shown  # noqa: SLF001  # setattr would re-register

    def unhide(self) -> None:
        """Let modules hold the parameters, with their values: what is written from here on is noticed."""
        self._marks = marks = []
        for member in self.members:
            parameter = member.parameter
            parameter.__class__ = nn.Parameter
            marks.append((parameter._version, parameter.data_ptr()))  # noqa: SLF001  # the public way warns
            for holder in member.holders:
                holder.module._parameters[holder.name] = parameter  # noqa: SLF001

    def hide(self) -> None:
        """Let modules hold placeholders; whoever took a parameter during a pass asks for its values."""
        for member in self.members:
            member.parameter.__class__ = Placeholder
            for holder in member.holders:
                holder.module._parameters[holder.name] = member.placeholder  # noqa: SLF001

    def written(self) -> list[str]:
        """Names of the parameters that were written in place since :meth:`unhide`, or lie elsewhere now.

        Not those written through a tensor that shares no version counter with them, as ``.data``.
        """
        names = []
        for slot, member, mark in zip(self._geometry.slots, self.members, self._marks, strict=True):
            parameter = member.parameter
            if member.whole is None and (parameter._version, parameter.data_ptr()) != mark:  # noqa: SLF001
                names.append(slot.spec.name)
        return names

    def show_member(self, number: int) -> None:
        """Let member ``number``, which was seen whole, be a view of the flat buffer again, if it is there."""
        member = self.members[number]
        member.parameter.data = member.no_values if self._flat is None else member.place.in_flat(self._flat)
        if self._marks:
            self._marks[number] = member.mark  # it may have been written

    def locate(self, tensor: Tensor) -> Place:
        """Where ``tensor``, a view of the gathered weights, lies in them."""
        offset = int(tensor.storage_offset())
        return Place(tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def view(self, place: Place) -> Tensor:
        """The view of the gathered weights at ``place``."""
        assert self._flat is not None  # noqa: S101  # it is gathered
        view = place.in_flat(self._flat if place.dtype == self._flat.dtype else self._flat.view(place.dtype))
        view = view.conj() if place.conj else view
        return torch._neg_view(view) if place.neg else view  # noqa: SLF001  # there is no public one


def _handles(tensor: Tensor) -> int:
    """Tensors that share the memory of ``tensor``, and handles of it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001
