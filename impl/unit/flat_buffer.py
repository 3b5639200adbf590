"""The memory of one unit's gathered weights, and the parameters that are views of it.

[Note: flat buffer]
A gathered unit is one tensor (P,), P its padded elements, in the compute type.  Each parameter is a leaf of
its own whose ``data`` is a view of it: so each counts its own versions, and filling the buffer again for
backward is no in-place change of saved tensors.  The memory comes from a reserve.  While the unit is sharded
there is no such tensor, and modules hold placeholders.

Autograd may still hold views when the unit is resharded: of weights that were used outside a forward pass,
or in a block that is computed again.  Such memory is not reused, or the views would show another unit's
weights.  Torch's count of the storage's handles shows whether there are views.
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
from impl.plan.shard_layout import UnitGeometry
from impl.unit.context import UnitContext
from impl.unit.placeholder import Placeholder, keep, keeper_of, release


class Holder(NamedTuple):
    """A module that holds a parameter under a name; tied weights have several."""

    module: nn.Module
    name: str

    @property
    def held(self) -> nn.Parameter | None:
        """The parameter that the module holds now."""
        return self.module._parameters.get(self.name)  # noqa: SLF001


View = tuple[torch.Size, tuple[int, ...], int]  # of a unit's flat buffer: shape, strides and offset


@dataclass(slots=True, eq=False)
class Member:
    """A parameter of a unit."""

    # the leaf view of the flat buffer; without values, like the placeholder, while sharded
    parameter: nn.Parameter
    placeholder: nn.Parameter  # held by modules outside of their passes: same shape and type, no values
    holders: Sequence[Holder]
    view: View  # of the flat buffer
    no_values: Tensor  # its values while there is no flat buffer: one NaN, expanded

    def place(self, shown: nn.Parameter) -> None:
        """Let all its holders hold ``shown``: the parameter or the placeholder."""
        for module, name in self.holders:
            module._parameters[name] = shown  # noqa: SLF001  # setattr would re-register


class FlatBuffer:
    """One unit's flat buffer on one rank, of ``members`` in slot order; ``originals`` lose their values."""

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
            parameter.__dict__ = placeholder.__dict__ = original.__dict__  # users' attributes
            for leaf in (parameter, placeholder):
                keep(leaf, InUnit(self, name, len(self.members)))
            view = shape, torch.empty(shape, device="meta").stride(), slot.offset
            self.members.append(Member(parameter, placeholder, places, view, no_values))
            self.members[-1].place(placeholder)
            release(original, Taken(name))
        self.address = 0  # of the gathered weights, while there is memory
        self.shown: dict[int, Tensor] = {}  # by member, the values (shape) that GatheredParameters shows
        self.used_outside: Callable[[str], None]  # the unit's, of a parameter's name: gathers or refuses
        self._flat: Tensor | None = None  # (P,) the gathered weights, while there is memory for them
        self._own_views = 0  # handles of that memory by this object and the parameters
        self._marks: list[tuple[int, int]] = []  # of the members, when they were gathered

    def attach(self) -> Tensor:
        """(P,) memory for the gathered weights; the parameters become views of it."""
        if self._flat is None:
            flat = self._flat = self._reserve.take(self._geometry.padded)
            self.lay()
            self._own_views, self.address = handles(flat), flat.data_ptr()
        return self._flat

    def detach(self) -> None:
        """Give the memory back, unless there are other views of it ([Note: flat buffer])."""
        flat = self._flat
        if flat is None or self.shown or handles(flat) != self._own_views:
            return
        self._flat, self.address = None, 0
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member in self.members:
                member.parameter.data = member.no_values
        self._reserve.give_back(flat)

    def lay(self) -> None:
        """Make parameters views of the flat buffer, except those seen whole; users may have moved them."""
        if (flat := self._flat) is None:
            return
        with torch.inference_mode(mode=False), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for number, member in enumerate(self.members):
                if number not in self.shown:
                    member.parameter.data = flat.as_strided(*member.view)

    def expose(self) -> None:
        """Let modules hold the parameters with their values; :meth:`written` notices writes from here on."""
        self._marks = marks = []
        for member in self.members:
            parameter = member.parameter
            parameter.__class__ = nn.Parameter
            marks.append((parameter._version, parameter.data_ptr()))  # noqa: SLF001  # the public way warns
            for module, name in member.holders:
                module._parameters[name] = parameter  # noqa: SLF001  # as Member.place() does, in fewer calls

    def conceal(self, *, sharded: bool) -> None:
        """Let modules hold placeholders; once ``sharded``, taken parameters are placeholders too."""
        self._marks = []
        for member in self.members:
            if sharded:
                member.parameter.__class__ = Placeholder
            for module, name in member.holders:
                module._parameters[name] = member.placeholder  # noqa: SLF001

    def written(self) -> list[str]:
        """Names of the parameters written since :meth:`expose`, by their version counters."""
        names = []
        for slot, member, mark in zip(self._geometry.slots, self.members, self._marks, strict=False):
            if (member.parameter._version, member.parameter.data_ptr()) != mark:  # noqa: SLF001
                names.append(slot.spec.name)  # a call less than a comprehension
        return names


class InUnit:
    """Keeper of a member's placeholder; holds the flat buffer weakly."""

    def __init__(self, flat: FlatBuffer, name: str, number: int) -> None:
        self.name, self.flat, self.number = name, weakref.ref(flat), number

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """The member's values, gathered or refused by its unit."""
        if (flat := self.flat()) is None:
            raise ZeroError(f"parameter {self.name!r} of a sharded model whose engine is gone")
        flat.used_outside(self.name)
        return flat.members[self.number].parameter


class Taken:
    """Keeper of a parameter taken from a model before it was sharded: a use of it would train nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Refuse."""
        raise ZeroError(
            f"parameter {self.name!r} was taken from its module before the model was sharded: take it "
            "from the module again"
        )


def check_hooks(name: str, parameter: nn.Parameter, *, allowed: int = 0) -> None:
    """Refuse, with a ZeroError, gradient hooks beyond those ``allowed``, the engine's; no values are used."""
    after = parameter._post_accumulate_grad_hooks or ()  # noqa: SLF001  # there is no public way
    hooks = parameter._backward_hooks or (after if len(after) > allowed else ())  # noqa: SLF001
    if hooks:
        hook = list(hooks.values())[-1]
        raise ZeroError(
            f"parameter {name!r} has a gradient hook, {getattr(hook, '__qualname__', hook)}, which would see "
            "one rank's gradient, not the mean: remove it, and change the masters' after the backward pass"
        )


def check_plain(model: nn.Module) -> None:
    """Refuse, with a ZeroError, a model with parameters that are sharded, have hooks, or are subclasses."""
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
            raise ZeroError(f"parameter {name!r} is a {kind}: only plain parameters can be sharded")


def handles(tensor: Tensor) -> int:
    """The number of tensors that share the memory of ``tensor``, and handles of it."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # noqa: SLF001
