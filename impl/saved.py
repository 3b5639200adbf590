"""What backward needs of the weights is found again, not kept.

Events of modules say when a unit is gathered and released, but a use of weights can escape them (a
block applied twice in a row, outputs that hide tensors, a detached copy).  So during a forward pass
autograd saves only the *place* of a view of a unit's weights, and asking for it in backward gathers
the unit if need be: a missed event costs time, never a crash.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from impl.released import Released, values_of
from impl.unit import Place, Unit, ZeroError


@dataclass(slots=True)
class _Tensor:
    """A tensor that autograd keeps, and its version then."""

    tensor: Tensor
    version: int


@dataclass(slots=True)
class _Weight:
    """A view of a unit's weights that autograd will ask for: not kept, but found again."""

    unit: Unit
    version: int
    place: Place


def _unpack(saved: _Tensor | _Weight) -> Tensor:
    """The tensor that was saved; of weights, gathered again if they were released.

    Raises:
        ZeroError: if it is not what it was.
    """
    if isinstance(saved, _Tensor):
        if saved.tensor._version != saved.version:  # noqa: SLF001
            raise ZeroError(
                f"a tensor of shape {tuple(saved.tensor.shape)} that backward needs was modified by an "
                "inplace operation"
            )
        return saved.tensor
    if saved.version != saved.unit.weights_version:
        raise ZeroError(
            f"the weights of unit {saved.unit.geometry.name!r} changed between its forward and its "
            "backward pass"
        )
    # Usually gathered by its event.  Where a use escapes the events (a module called twice in a
    # row, outputs that hide tensors, a detached copy), this costs time, not a crash.
    saved.unit.gather("backward")
    saved.unit.wait()
    return saved.unit.view(saved.place)


@dataclass(slots=True)
class SavedTensors:
    """The hooks of one engine, active from :meth:`begin` to :meth:`end` of a forward pass.

    Attributes:
        active: whether they are.
    """

    active: bool = False
    _at: dict[int, Unit] = field(default_factory=dict)  # by the address of their weights, last gathered
    _active: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def begin(self) -> None:
        """Take over what autograd saves."""
        self._at.clear()
        self.active = True
        self._active.enter_context(saved_tensors_hooks(self._pack, _unpack))

    def end(self) -> None:
        """Give it back."""
        self._active.close()
        self.active = False

    def gathered(self, unit: Unit) -> None:
        """``unit``'s weights are there; views of them are to be recognised."""
        self._at[unit.storage_address] = unit

    def _pack(self, tensor: Tensor) -> _Tensor | _Weight:
        """What autograd keeps of a tensor: of a view of a unit's weights, where to find it again."""
        if isinstance(tensor, Released):  # an argument of an autograd.Function, which asks for no values
            tensor = values_of(tensor)
        address = tensor.untyped_storage().data_ptr()
        unit = self._at.get(address)
        if unit is not None and unit.gathered and unit.storage_address == address:
            return _Weight(unit, unit.weights_version, unit.locate(tensor))
        # Detached, since an output kept as it is would keep its graph and so itself; with its
        # version, since hooks switch torch's own check off.
        return _Tensor(tensor.detach(), tensor._version)  # noqa: SLF001
