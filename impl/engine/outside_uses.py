"""Uses of weights that escape the events of modules: by other modules, and by what autograd saves.

[Note: saved tensors]
Events of modules say when a unit is gathered and resharded, but a use of weights can escape them: a block
applied twice in a row, outputs that hide tensors, a detached copy.  So during a forward pass a tensor in a
unit's flat buffer (P,) is saved as its :data:`~impl.unit.flat_buffer.View` and the version of the weights;
unpacking it in backward gathers the unit if need be: a missed event costs time, never a crash.  Saved-tensor
hooks switch off torch's check of in-place changes, so it is made here.
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
    gathered: list[bool] = []  # by call under way, the innermost last

    def before(*_: Any) -> None:
        gathered.append(not recomputing() and not unit.in_use)  # a block that runs again gathers by use
        if gathered[-1]:
            unit.gather_outside()

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if gathered and gathered.pop():  # none if an earlier hook failed
            unit.end_use_outside({memory_of(tensor) for tensor in tensors_in(output)})

    module.register_forward_pre_hook(before)  # after the engine's own
    module.register_forward_hook(after, always_call=True)


# Tuples, one for every tensor that a forward pass saves: a dataclass takes five times as long to make.
_Saved = tuple[Tensor, int]  # a tensor that autograd keeps, and its version
_SavedView = tuple[Unit, View, Version]  # a view of a unit's weights, of a version: gathered again


def _unpack(saved: _Saved | _SavedView) -> Tensor:
    """The saved tensor, if unchanged; weights are gathered again if need be."""
    if len(saved) == 2:  # mypy narrows the union by it
        tensor, version = saved
        if tensor._version != version:  # noqa: SLF001
            raise ZeroError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
                "operation"
            )
        return tensor
    unit, view, weights_version = saved
    if weights_version != unit.master_shard.version:
        raise ZeroError(
            f"the weights of unit {unit.geometry.name!r} changed between its forward and its backward pass"
        )
    unit.all_gather("backward")  # unless gathered
    return unit.flat.attach().as_strided(*view)


class SavedTensors:
    """The hooks of one engine, active from :meth:`begin` to :meth:`end` of a forward pass."""

    def __init__(self, units: Sequence[Unit], weights_at: Mapping[int, int]) -> None:
        self._units, self._weights_at = units, weights_at  # unit index by address: see Passes
        self._active = contextlib.ExitStack()
        self.active = False

    def begin(self) -> None:
        """Take over the saving of tensors by autograd."""
        self.active = True
        self._active.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def end(self) -> None:
        """Give it back."""
        self._active.close()
        self.active = False

    def _pack(self, tensor: Tensor) -> _Saved | _SavedView:
        """Autograd keeps this in place of a tensor: of a view of a unit's weights, its place there."""
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
        # Detached, since an output kept with its graph would keep itself; see [Note: saved tensors].
        return tensor.detach(), tensor._version  # noqa: SLF001


def memory_of(tensor: Tensor) -> int:
    """Address of the memory of ``tensor``; 0 if it has none, or several: sparse, wrappers."""
    if tensor.layout is not torch.strided or (tensor.numel() and not tensor.data_ptr()):
        return 0
    return tensor.untyped_storage().data_ptr()
