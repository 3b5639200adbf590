"""Uses of weights that escape the events of modules: by other modules, and by what autograd saves.

[Note: saved tensors]
Events of modules say when a unit is gathered and resharded, but a use of weights can escape them: a block
applied twice in a row, outputs that hide tensors, a detached copy.  So during a forward pass, of a tensor
that lies in a unit's flat buffer (P,) only its :data:`~impl.unit.flat_buffer.View` and the version of the
weights are saved; unpacking it in backward gathers the unit if need be: a missed event costs time, never a
crash.  The hooks switch torch's check of in-place changes off, so it is made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from impl.errors import ZeroError
from impl.pytree import tensors_in
from impl.unit.context import recomputing
from impl.unit.flat_buffer import View
from impl.unit.master_shard import Version
from impl.unit.placeholder import Placeholder, values_of
from impl.unit.unit import Unit


def register(module: nn.Module, unit: Unit) -> None:
    """Gather ``unit`` ahead of each forward pass of ``module``, and reshard it after."""
    gathered: list[bool] = []  # by each call under way, the last one's last

    def before(*_: Any) -> None:
        gathered.append(not recomputing() and not unit.in_use)  # computed again, uses bring what they need
        if gathered[-1]:
            unit.gather_outside()

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if gathered and gathered.pop():  # none if an earlier hook failed
            unit.end_use_outside({memory_of(tensor) for tensor in tensors_in(output)})

    module.register_forward_pre_hook(before)  # after the engine's own
    module.register_forward_hook(after, always_call=True)


# Tuples, as every tensor that a forward pass saves becomes one: a dataclass takes five times as long to make.
_Kept = tuple[Tensor, int]  # a tensor that autograd keeps, and its version then
_Found = tuple[Unit, View, Version]  # a view of a unit's weights, of a version: not kept, but found again


def _unpack(saved: _Kept | _Found) -> Tensor:
    """The tensor that was saved, if it is what it was; of weights, gathered again if need be."""
    if len(saved) == 2:  # mypy tells the two apart by it
        tensor, version = saved
        if tensor._version != version:  # noqa: SLF001
            raise ZeroError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
                "operation"
            )
        return tensor
    unit, view, stood = saved
    if stood != unit.master_shard.version:
        raise ZeroError(
            f"the weights of unit {unit.geometry.name!r} changed between its forward and its backward pass"
        )
    unit.all_gather("backward")  # if its event has not
    return unit.flat.attach().as_strided(*view)


class SavedTensors:
    """The hooks of one engine, active from :meth:`begin` to :meth:`end` of a forward pass."""

    def __init__(self, units: Sequence[Unit], weights_at: Mapping[int, int]) -> None:
        self._units, self._weights_at = units, weights_at  # by address, the index of a unit: see Passes
        self._active = contextlib.ExitStack()
        self.active = False

    def begin(self) -> None:
        """Take over what autograd saves."""
        self.active = True
        self._active.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def end(self) -> None:
        """Give it back."""
        self._active.close()
        self.active = False

    def _pack(self, tensor: Tensor) -> _Kept | _Found:
        """What autograd keeps of a tensor: of a view of a unit's weights, where to find it again."""
        if type(tensor) is Placeholder:  # an argument of an autograd.Function, which asks for no values
            tensor = values_of(tensor)
        address = memory_of(tensor)
        index = self._weights_at.get(address)
        if index is not None:
            unit = self._units[index]
            if unit.gathered and unit.flat.address == address:
                if tensor.dtype != unit.flat.dtype or tensor.is_conj() or tensor.is_neg():
                    tensor = tensor.detach().clone()  # seen as complex numbers, or negated when read
                else:
                    view = tensor.shape, tensor.stride(), int(tensor.storage_offset())
                    return unit, view, unit.master_shard.version
        # Detached, since an output kept as it is would keep its graph and so itself; with its
        # version, since hooks switch torch's own check off.
        return tensor.detach(), tensor._version  # noqa: SLF001


def memory_of(tensor: Tensor) -> int:
    """Address of the memory that ``tensor`` is a view of; 0 if it has none, or several: sparse, wrappers."""
    if tensor.layout is not torch.strided or (tensor.numel() and not tensor.data_ptr()):
        return 0
    return tensor.untyped_storage().data_ptr()
