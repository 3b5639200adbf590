"""Holds the memory of one unit's gathered weights, and the parameters that are views of it.

[Note: flat buffer]
The weights of a gathered unit are one tensor (P,) in the compute type, the flat buffer; P is the number of the unit's
elements with padding.  Each parameter is an autograd leaf whose ``data`` is a view of the flat buffer.  Assigning
``data`` gives each parameter a version counter of its own.  Therefore, when the buffer is filled again for backward,
autograd does not see an in-place change of tensors that it has saved.  The memory comes from a pool, the reserve
(:class:`~impl.unit.context.Reserve`).  While the unit is sharded it has no flat buffer, and modules hold placeholders,
which have no values (:mod:`impl.unit.placeholder`).

When the unit is resharded (its gathered weights are freed), autograd may still hold views of the flat buffer.  They
come from weights that were used outside a forward pass, or in a block that is recomputed.  A flat buffer with such
views is not given back to the reserve: if another unit got this memory, the views would show that unit's weights.
Torch's reference count of the buffer's storage (:func:`handles`) shows whether there are such views.

gloo's thread may hold such views too, for some milliseconds after a message has arrived in the buffer.  A unit that is
resharded within this time keeps its buffer until it is resharded again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from impl.codecs.reference import DTYPES
from impl.errors import ZeroError
from impl.policy.shard_layout import UnitGeometry
from impl.unit.context import UnitContext
from impl.unit.placeholder import Placeholder, keep, keeper_of, release


class Holder(NamedTuple):
    """A module and the name under which it holds a parameter.

    A parameter that several modules share (a tied parameter) has several holders.
    """

    module: nn.Module
    name: str

    @property
    def held(self) -> nn.Parameter | None:
        """The parameter that the module holds under this name now."""
        return self.module._parameters.get(self.name)  # noqa: SLF001


View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view of a unit's flat buffer


@dataclass(slots=True, eq=False)
class Member:
    """One parameter of a unit, as two objects: ``parameter`` and ``placeholder``.

    ``parameter`` has values while the unit is gathered, and ``placeholder`` never has values.  Modules hold
    ``parameter`` while the unit is in use, and ``placeholder`` at other times.
    """

    # the leaf that operations compute with: a view of the flat buffer; it has no values while the unit is sharded
    parameter: nn.Parameter
    # the parameter that modules hold between their passes: the same shape, type and device, but no values
    placeholder: nn.Parameter
    holders: Sequence[Holder]
    view: View  # where the parameter is in the flat buffer
    no_values: Tensor  # the data of both leaves while there is no flat buffer: one NaN, expanded to the shape

    def place(self, shown: nn.Parameter) -> None:
        """Put ``shown``, which is ``parameter`` or ``placeholder``, into all modules that hold this member."""
        for module, name in self.holders:
            module._parameters[name] = shown  # noqa: SLF001  # setattr would register the parameter anew


class FlatBuffer:
    """The memory of one unit's gathered weights on one rank, and the parameters that are views of this memory.

    ``members`` are the unit's parameters, in the order in which they lie in the flat buffer.

    ``originals`` are the user's parameters, in the order of ``members``.  For each of them, ``holders`` lists the
    modules that hold the parameter.  The constructor frees the values of these parameters, and puts placeholders
    (parameters without values) into the modules instead.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        context: UnitContext,
        originals: Sequence[nn.Parameter],
        holders: Sequence[Sequence[Holder]],
    ) -> None:
        self._geometry, self._reserve = geometry, context.weights
        self.dtype = DTYPES[context.policy.compute]
        nan = torch.full((), math.nan, dtype=self.dtype, device=context.wire.mesh.device)
        self.members: list[Member] = []
        for slot, original, places in zip(geometry.slots, originals, holders, strict=True):
            name, shape, no_values = slot.spec.name, original.shape, nan.expand(original.shape)
            parameter = nn.Parameter(no_values.data, requires_grad=geometry.trainable)
            placeholder = nn.Parameter(no_values.data, requires_grad=geometry.trainable)
            parameter.__dict__ = placeholder.__dict__ = original.__dict__  # attributes that users have set
            for leaf in (parameter, placeholder):
                keep(leaf, InUnit(self, name, len(self.members)))
            view = shape, torch.empty(shape, device="meta").stride(), slot.offset
            self.members.append(Member(parameter, placeholder, places, view, no_values))
            self.members[-1].place(placeholder)
            release(original, Taken(name))
        self.address = 0  # the address of the flat buffer; 0 while there is none
        # for each parameter in an open GatheredParameters context, its index and its whole values (shape)
        self.shown: dict[int, Tensor] = {}
        # A function that the unit sets.  It is called with the name of a parameter that an operation uses while modules
        # hold placeholders.  It gathers the unit, or raises an error.
        self.used_outside: Callable[[str], None]
        self._flat: Tensor | None = None  # (P,) the flat buffer, while the unit has one
        # how many references to the flat buffer's memory, as handles() counts them, this object and the parameters hold
        self._own_views = 0
        self._marks: list[tuple[int, int]] = []  # version and address of each member, from expose() on

    def attach(self) -> Tensor:
        """Return the flat buffer (P,).

        P is the number of the unit's elements with padding.  If the unit has no flat buffer, the method takes memory
        from the reserve (a pool), and the parameters become views of this memory.
        """
        if self._flat is None:
            flat = self._flat = self._reserve.take(self._geometry.padded)
            self.lay()
            self._own_views, self.address = handles(flat), flat.data_ptr()
        return self._flat

    def detach(self) -> None:
        """Give the flat buffer's memory back to the reserve (a pool); the parameters then have no values.

        Nothing happens if autograd or a user holds views of this memory ([Note: flat buffer]), or if a parameter of the
        unit is in an open GatheredParameters context.
        """
        flat = self._flat
        if flat is None or self.shown or handles(flat) != self._own_views:
            return
        self._flat, self.address = None, 0
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member in self.members:
                member.parameter.data = member.no_values
        self._reserve.give_back(flat)

    def lay(self) -> None:
        """Make each parameter a view of the flat buffer again, after a user has assigned another tensor to ``p.data``.

        Parameters in an open GatheredParameters context are not changed.  Without a flat buffer, nothing happens.
        """
        if (flat := self._flat) is None:
            return
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for number, member in enumerate(self.members):
                if number not in self.shown:
                    member.parameter.data = flat.as_strided(*member.view)

    def expose(self) -> None:
        """Put the parameters, with their values, into the modules in place of the placeholders, which have none.

        From now on, :meth:`written` reports writes to the parameters.
        """
        self._marks = marks = []
        for member in self.members:
            parameter = member.parameter
            parameter.__class__ = nn.Parameter
            marks.append((parameter._version, parameter.data_ptr()))  # noqa: SLF001  # the public name warns
            for module, name in member.holders:  # Member.place(), without the cost of its call
                module._parameters[name] = parameter  # noqa: SLF001

    def conceal(self, *, sharded: bool) -> None:
        """Put the placeholders, which have no values, into the modules in place of the parameters.

        ``sharded`` says that the weights are about to be freed, or are stale.  In that case the parameter objects
        themselves become placeholders too.  A user may have kept such an object from a pass.  If an operation uses it
        later, the unit is gathered again or an error is raised; no operation computes with old or missing values.
        """
        self._marks = []
        for member in self.members:
            if sharded:
                member.parameter.__class__ = Placeholder
            for module, name in member.holders:
                module._parameters[name] = member.placeholder  # noqa: SLF001

    def written(self) -> list[str]:
        """Return the names of the parameters that were written, or given other memory, since :meth:`expose`.

        The list is empty while modules hold placeholders (parameters without values), that is, after :meth:`conceal`.
        """
        names = []
        # A loop, since a comprehension would be a further function call for each unit.
        for slot, member, mark in zip(self._geometry.slots, self.members, self._marks, strict=False):
            if (member.parameter._version, member.parameter.data_ptr()) != mark:  # noqa: SLF001
                names.append(slot.spec.name)
        return names


class InUnit:
    """Gathers a sharded unit when an operation uses one of its parameters, and returns the parameter's values.

    It is the *keeper* of a member's parameter or placeholder: the object that an operation asks for values if one of
    its arguments has none (:class:`~impl.unit.placeholder.Keeper`).  The keeper has only a weak reference to the flat
    buffer.
    """

    def __init__(self, flat: FlatBuffer, name: str, number: int) -> None:
        self.name, self.flat, self.number = name, weakref.ref(flat), number

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Have the unit gather its weights, and return the parameter, which then has values.

        The arguments ``parameter`` and ``together`` are not used; all keepers have them.

        Raises:
            ZeroError: if no pass is running, or if the model and its engine no longer exist.
        """
        if (flat := self.flat()) is None:
            raise ZeroError(
                f"parameter {self.name!r} belongs to a sharded model whose engine is gone: keep the model, or the "
                "engine that shard() returned, as long as its parameters are used"
            )
        flat.used_outside(self.name)
        return flat.members[self.number].parameter


class Taken:
    """Raises an error when an operation uses a parameter object that the model had before shard().

    shard() puts other objects into the modules.  A user may have kept the old object, for example in an optimizer, but
    computing with it would train nothing.  An operation asks the *keeper* of the old object for its values, and this
    class is that keeper (:class:`~impl.unit.placeholder.Keeper`).
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Raise a ZeroError, which says that sharding has replaced ``parameter`` in the model."""
        raise ZeroError(
            f"parameter {self.name!r} was replaced when the model was sharded, and the old object was used: get the "
            "parameter from its module again"
        )


def check_hooks(name: str, parameter: nn.Parameter, *, allowed: int = 0) -> None:
    """Raise a ZeroError if a user has registered gradient hooks on a parameter.

    ``allowed`` is the number of post-accumulate-grad hooks that the engine itself has registered on the parameter.
    Placeholders, which have no values, can be checked too.
    """
    after = parameter._post_accumulate_grad_hooks or ()  # noqa: SLF001  # there is no public name
    hooks = parameter._backward_hooks or (after if len(after) > allowed else ())  # noqa: SLF001
    if hooks:
        hook = list(hooks.values())[-1]
        raise ZeroError(
            f"parameter {name!r} has a gradient hook, {getattr(hook, '__qualname__', hook)}, which would see "
            "one rank's gradient, not the mean over ranks: remove the hook, and change the masters' gradients "
            "after the backward pass"
        )


def check_plain(model: nn.Module) -> None:
    """Raise a ZeroError unless all parameters of ``model`` can be sharded.

    A parameter cannot be sharded if it is sharded already, if it has gradient hooks, or if its class is neither
    ``nn.Parameter`` nor :class:`Placeholder`.
    """
    for name, parameter in model.named_parameters():
        if isinstance(keeper_of(parameter), InUnit):
            raise ZeroError(
                f"parameter {name!r} of this model is sharded already: call shard() once, for the whole model, "
                "and use the engine that shard() returned"
            )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            check_hooks(name, parameter)
        if type(parameter) not in (nn.Parameter, Placeholder):
            kind = type(parameter).__name__
            raise ZeroError(
                f"parameter {name!r} is a {kind}: only plain parameters can be sharded; make it an nn.Parameter"
            )


def handles(tensor: Tensor) -> int:
    """Return torch's reference count of the storage of ``tensor``: how many tensors and other objects refer to it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001
