"""Saved-tensor hooks: autograd keeps (unit, place) instead of a view of weights, and backward gathers it
again.

[Note: saved tensors]
Events of modules say when a unit is gathered and resharded, but a use of weights can escape them: a block
applied twice in a row, outputs that hide tensors, a detached copy.  Autograd would then read memory that is
gone.  So during a forward pass, of a tensor that lies in a unit's flat buffer (P,) only its
:class:`~impl.unit.member.Place` (type, shape, strides, offset) and the version of the weights are saved;
unpacking it in backward gathers the unit if need be: a missed event costs time, never a crash.  The hooks
switch torch's check of in-place changes off, so what is kept as it is has its version checked here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from impl.errors import ZeroError
from impl.pytree import memory_of
from impl.unit.master_shard import Version
from impl.unit.member import Place
from impl.unit.placeholder import Placeholder, values_of
from impl.unit.unit import Unit

# Tuples, as every tensor that a forward pass saves becomes one: a dataclass takes five times as long to make.
_Kept = tuple[Tensor, int]  # a tensor that autograd keeps, and its version then
_Found = tuple[Unit, Place, Version]  # a view of a unit's weights, of a version: not kept, but found again


def _unpack(saved: _Kept | _Found) -> Tensor:
    """The tensor that was saved; of weights, gathered again if they were released.

    Raises:
        ZeroError: if it is not what it was.
    """
    if len(saved) == 2:  # mypy tells the two apart by it
        tensor, version = saved
        if tensor._version != version:  # noqa: SLF001
            raise ZeroError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace "
                "operation"
            )
        return tensor
    unit, place, stood = saved
    if stood != unit.master_shard.version:
        raise ZeroError(
            f"the weights of unit {unit.geometry.name!r} changed between its forward and its backward pass"
        )
    # Usually gathered by its event.  Where a use escapes the events (a module called twice in a
    # row, outputs that hide tensors, a detached copy), this costs time, not a crash.
    unit.all_gather("backward")
    return unit.flat.view(place)


class SavedTensors:
    """The hooks of one engine, active from :meth:`begin` to :meth:`end` of a forward pass.

    Args:
        units: of the model.
        weights_at: by address of memory, the index of the unit whose gathered weights came there last.
    """

    def __init__(self, units: Sequence[Unit], weights_at: Mapping[int, int]) -> None:
        self._units, self._weights_at = units, weights_at
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
            if unit.gathered and unit.flat.bounds[0] == address:
                return unit, unit.flat.locate(tensor), unit.master_shard.version
        # Detached, since an output kept as it is would keep its graph and so itself; with its
        # version, since hooks switch torch's own check off.
        return tensor.detach(), tensor._version  # noqa: SLF001
