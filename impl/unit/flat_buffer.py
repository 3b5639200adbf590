"""Holds the memory of one unit's gathered weights, and the parameters that are views of it.

[Note: flat buffer]
A gathered unit is one tensor (P,) in the compute type, where P counts the unit's elements with padding.  Each
parameter is a leaf of its own whose ``data`` is a view of this tensor.  Therefore each parameter has its own
version counter, and filling the buffer again for backward does not look like an in-place change of tensors
that autograd has saved.  The memory comes from a :class:`~impl.unit.context.Reserve`.  While the unit is
sharded there is no such tensor, and modules hold placeholders (:mod:`impl.unit.placeholder`).

Autograd may still hold views of the buffer when the unit is resharded: views of weights that were used
outside a forward pass, or in a block that is recomputed.  Memory with such views is not given back, since the
views would then show another unit's weights.  Torch's count of the storage's handles shows whether there are
such views.
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
    """A module and the name under which it holds a parameter; a tied parameter has several holders."""

    module: nn.Module
    name: str

    @property
    def held(self) -> nn.Parameter | None:
        """The parameter that the module holds under this name now."""
        return self.module._parameters.get(self.name)  # noqa: SLF001


View = tuple[torch.Size, tuple[int, ...], int]  # shape, strides and offset of a view of a unit's flat buffer


@dataclass(slots=True, eq=False)
class Member:
    """A parameter of a unit: the tensor to compute with, and the placeholder that modules hold while it is sharded."""

    # the leaf whose data is a view of the flat buffer; while the unit is sharded, it has no values
    parameter: nn.Parameter
    # the parameter that modules hold between their passes: the same shape, type and device, but no values
    placeholder: nn.Parameter
    holders: Sequence[Holder]
    view: View  # where the parameter is in the flat buffer
    no_values: Tensor  # the data of both leaves while there is no flat buffer: one NaN, expanded to the shape

    def place(self, shown: nn.Parameter) -> None:
        """Have all holders hold ``shown``, which is the parameter or the placeholder."""
        for module, name in self.holders:
            module._parameters[name] = shown  # noqa: SLF001  # setattr would register the parameter anew


class FlatBuffer:
    """One unit's flat buffer on one rank, with its parameters as ``members``, in slot order.

    The constructor replaces the model's parameters, ``originals``, in their ``holders`` by placeholders, and
    takes their values away.
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
        # for each member that GatheredParameters shows, its number and the values (shape) that are shown
        self.shown: dict[int, Tensor] = {}
        # The unit sets this function.  It is called with the name of a parameter that is used while modules
        # hold placeholders, and gathers the unit or refuses the use.
        self.used_outside: Callable[[str], None]
        self._flat: Tensor | None = None  # (P,) the flat buffer, while the unit has one
        # how many handles of the flat buffer's memory belong to this object and to the parameters
        self._own_views = 0
        self._marks: list[tuple[int, int]] = []  # version and address of each member, from expose() on

    def attach(self) -> Tensor:
        """Return the flat buffer (P,), taking memory for it if need be; the parameters become views of it."""
        if self._flat is None:
            flat = self._flat = self._reserve.take(self._geometry.padded)
            self.lay()
            self._own_views, self.address = handles(flat), flat.data_ptr()
        return self._flat

    def detach(self) -> None:
        """Give the flat buffer's memory back, unless others hold views of it ([Note: flat buffer])."""
        flat = self._flat
        if flat is None or self.shown or handles(flat) != self._own_views:
            return
        self._flat, self.address = None, 0
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member in self.members:
                member.parameter.data = member.no_values
        self._reserve.give_back(flat)

    def lay(self) -> None:
        """Make the parameters views of the flat buffer again, since users may have assigned other data.

        Parameters that GatheredParameters shows are left alone.
        """
        if (flat := self._flat) is None:
            return
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for number, member in enumerate(self.members):
                if number not in self.shown:
                    member.parameter.data = flat.as_strided(*member.view)

    def expose(self) -> None:
        """Have modules hold the parameters; :meth:`written` reports writes to them from now on."""
        self._marks = marks = []
        for member in self.members:
            parameter = member.parameter
            parameter.__class__ = nn.Parameter
            marks.append((parameter._version, parameter.data_ptr()))  # noqa: SLF001  # the public name warns
            for module, name in member.holders:  # Member.place(), without the cost of its call
                module._parameters[name] = parameter  # noqa: SLF001

    def conceal(self, *, sharded: bool) -> None:
        """Have modules hold the placeholders.

        If the unit becomes ``sharded``, the parameters turn into placeholders too, so that a parameter that a
        user took from a module during the pass is not read without values.
        """
        self._marks = []
        for member in self.members:
            if sharded:
                member.parameter.__class__ = Placeholder
            for module, name in member.holders:
                module._parameters[name] = member.placeholder  # noqa: SLF001

    def written(self) -> list[str]:
        """Return the names of the parameters that were written, or given other memory, since :meth:`expose`."""
        names = []
        # A loop, since a comprehension would be a further function call for each unit.
        for slot, member, mark in zip(self._geometry.slots, self.members, self._marks, strict=False):
            if (member.parameter._version, member.parameter.data_ptr()) != mark:  # noqa: SLF001
                names.append(slot.spec.name)
        return names


class InUnit:
    """The keeper of a member's placeholder and parameter; it holds the flat buffer weakly."""

    def __init__(self, flat: FlatBuffer, name: str, number: int) -> None:
        self.name, self.flat, self.number = name, weakref.ref(flat), number

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Have the unit gather the member's values, or refuse the use; return its parameter."""
        if (flat := self.flat()) is None:
            raise ZeroError(
                f"parameter {self.name!r} belongs to a sharded model whose engine is gone: keep the model, or the "
                "engine that shard() returned, as long as its parameters are used"
            )
        flat.used_outside(self.name)
        return flat.members[self.number].parameter


class Taken:
    """The keeper of a parameter that a user took from the model before shard() replaced it there.

    It refuses every use, since computing with the old parameter would train nothing.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Raise a ZeroError."""
        raise ZeroError(
            f"parameter {self.name!r} was taken from its module before the model was sharded: take it "
            "from the module again"
        )


def check_hooks(name: str, parameter: nn.Parameter, *, allowed: int = 0) -> None:
    """Raise a ZeroError if a parameter has gradient hooks of a user.

    ``allowed`` is the number of the engine's own hooks on the parameter.  The parameter's values are not needed.
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
    """Raise a ZeroError unless all parameters can be sharded.

    A parameter is refused if it is sharded already, has gradient hooks, or is of a subclass of nn.Parameter other than
    :class:`Placeholder`.
    """
    for name, parameter in model.named_parameters():
        if isinstance(keeper_of(parameter), InUnit):
            raise ZeroError(
                f"parameter {name!r} of this model is sharded already: call shard() once, for a model as a "
                "whole, and go on with the engine that it returned"
            )
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            check_hooks(name, parameter)
        if type(parameter) not in (nn.Parameter, Placeholder):
            kind = type(parameter).__name__
            raise ZeroError(
                f"parameter {name!r} is a {kind}: only plain parameters can be sharded; make it an nn.Parameter"
            )


def handles(tensor: Tensor) -> int:
    """Return torch's reference count of the storage of ``tensor``: how many tensors and other objects hold it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001
