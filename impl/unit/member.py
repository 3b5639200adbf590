"""A parameter of a unit: the leaf that holds its values, and the placeholder that modules show meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from impl.errors import ZeroError
from impl.unit.placeholder import Placeholder, keeper_of


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

    def in_flat(self, flat: Tensor) -> Tensor:
        """The view of ``flat`` (padded,)."""
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class Member:
    """A parameter of a unit.

    Attributes:
        parameter: the leaf view of the flat buffer; without values, as the placeholder, while it is sharded.
        placeholder: what modules see outside of their passes: same shape and type, no values.
        holders: where modules hold it.
        place: in the flat buffer.
        no_values: its values while there is no flat buffer: one NaN, seen everywhere.
        whole: (shape) its values while :class:`~impl.parameters.gathered.GatheredParameters` shows them.
    """

    parameter: nn.Parameter
    placeholder: nn.Parameter
    holders: Sequence[Holder]
    place: Place
    no_values: Tensor
    whole: Tensor | None = None

    def put(self, shown: nn.Parameter) -> None:
        """Let all modules that hold it see ``shown``: the parameter or the placeholder."""
        for holder in self.holders:
            holder.put(shown)

    @property
    def mark(self) -> tuple[int, int]:
        """Differs once the parameter was written in place, or lies elsewhere."""
        return self.parameter._version, self.parameter.data_ptr()  # noqa: SLF001  # the public way warns


class Gathers(Protocol):
    """Who gathers the values of a placeholder that is used: its unit."""

    used_outside: Callable[[str], None]

    @property
    def members(self) -> Sequence[Member]:
        """Its parameters, in slot order."""


class InUnit:
    """Keeper of a placeholder: the unit, held weakly, whose member it stands for."""

    def __init__(self, unit: Gathers, name: str, number: int) -> None:
        self.name = name
        self._unit, self._number = weakref.ref(unit), number

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """The member's values, gathered or refused by its unit."""
        unit = self._unit()
        if unit is None:
            raise ZeroError(f"parameter {self.name!r} of a sharded model whose engine is gone")
        unit.used_outside(self.name)
        return unit.members[self._number].parameter


class Taken:
    """Keeper of what a model held before it was sharded: a use of it trains nothing, so it is refused."""

    def __init__(self, name: str) -> None:
        self.name = name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Refuse."""
        raise ZeroError(
            f"parameter {self.name!r} was taken from its module before the model was sharded: take it "
            "from the module again"
        )


def check_hooks(name: str, parameter: nn.Parameter, *, own: bool = False) -> None:
    """Refuse gradient hooks of a parameter; call it under ``DisableTorchFunctionSubclass``.

    Args:
        name: of the parameter.
        parameter: plain, or a placeholder.
        own: whether one of its hooks is the engine's.

    Raises:
        ZeroError: naming the parameter and a hook.
    """
    after = parameter._post_accumulate_grad_hooks or ()  # noqa: SLF001  # there is no public way
    hooks = parameter._backward_hooks or (after if len(after) > own else ())  # noqa: SLF001
    if hooks:
        hook = list(hooks.values())[-1]
        raise ZeroError(
            f"parameter {name!r} has a gradient hook, {getattr(hook, '__qualname__', hook)}, which would see "
            "one rank's gradient, not the mean: remove it, and change the masters' after the backward pass"
        )


def check_plain(model: nn.Module) -> None:
    """Refuse a model of which a part is sharded already, or parameters with hooks or of other classes.

    Raises:
        ZeroError: naming one of its parameters.
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
            raise ZeroError(
                f"parameter {name!r} is a {type(parameter).__name__}: only plain parameters can be sharded"
            )


def refuse_use(name: str) -> None:
    """What :attr:`Gathers.used_outside` does before an engine trains the model."""
    raise ZeroError(f"parameter {name!r} is used, but no engine trains its model")
