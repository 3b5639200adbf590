"""Reads and writes a parameter's fp32 weights, gradient and optimizer state, whole or this rank's part.

``Weights(zero, which).full()`` and its like: ``which`` is a parameter as its module shows it, or its name in
the unsharded model.  *Full* values have the parameter's shape, and are gathered along the ranks that share
one copy: all must call it.  *Local* values are those of the elements in this rank's shard, 1-D, in order,
possibly none.  Returned values are fp32 copies; all ranks must set full values, and equal ones.

All raise :class:`~impl.errors.ZeroError` for anything but a parameter of the model, for values of another
shape, and inside a forward or backward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.engine.engine import Zero, find
from impl.errors import ZeroError
from impl.unit.master_shard import part_of
from impl.unit.whole_values import WholeValues

Which = str | nn.Parameter


class _Values(ABC):
    """Values of one parameter; ``_local`` are this rank's elements in the shard."""

    _is_number = False

    def __init__(self, zero: Zero, which: Which) -> None:
        zero.hooks.check_idle("access to a parameter's values")
        if isinstance(which, str):
            shown = dict(zero.model.named_parameters(remove_duplicate=False))
            if which not in shown:
                raise ZeroError(f"the model has no parameter {which!r}")
            which = shown[which]
        if (owner := find(which)) is None or owner.engine is not zero:
            shape = tuple(which.shape)
            raise ZeroError(f"a parameter of shape {shape} that is not one of this sharded model")
        self._zero, self._unit, self._number = owner
        self._whole, self._slot = WholeValues(self._unit), self._unit.geometry.slots[self._number]
        self._local = slice(*self._whole.part(self._number))
        self._length = self._local.stop - self._local.start

    @abstractmethod
    def _get(self) -> Tensor | None:
        """(n,) the local values, or () for a state that is one number."""

    @abstractmethod
    def _set(self, part: Tensor) -> None:
        """Overwrite the local values."""

    def full(self) -> Tensor | None:
        """(shape) full values; None for a gradient before there is one; () for a state that is one number."""
        part = self.local()
        if part is None or part.dim() == 0:
            return part
        return self._whole.gather_member(self._number, part.float())

    def local(self) -> Tensor | None:
        """(n,) local values; None and () as :meth:`full`."""
        return None if (part := self._get()) is None else part.clone()

    def set_full(self, value: Tensor) -> None:
        """Overwrite them with ``value`` (shape)."""
        whole = self._checked(value, self._slot.spec.shape)
        geometry, rank = self._unit.geometry, self._unit.wire.mesh.rank
        self._set(whole if self._is_number else part_of(whole, geometry, self._slot, rank))

    def set_local(self, value: Tensor) -> None:
        """Overwrite them with ``value`` (n,)."""
        self._set(self._checked(value, (self._length,)))

    def _checked(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``value``, if it has ``shape``, or () for a state that is one number."""
        shape = () if self._is_number else shape
        if tuple(value.shape) != shape:
            raise ZeroError(f"value for {self._slot.spec.name!r} is {tuple(value.shape)}, expected {shape}")
        if value.is_complex() or value.is_meta:
            kind = "complex" if value.is_complex() else "on the meta device"
            raise ZeroError(f"value for {self._slot.spec.name!r} is {kind}: give real values")
        return value.detach().to(self._unit.wire.mesh.device, torch.float32)


class Weights(_Values):
    """From the masters; weights held as codes are decoded."""

    def _get(self) -> Tensor:
        return self._unit.master_shard.master[self._local].detach()

    def _set(self, part: Tensor) -> None:
        self._zero.check_hidden("access.Weights")
        self._whole.write_part(self._number, part)


class Gradient(_Values):
    """The mean gradient for the next step; refused after a backward pass that failed."""

    def __init__(self, zero: Zero, which: Which) -> None:
        zero.hooks.check_finished("access to a gradient")
        super().__init__(zero, which)
        if not self._unit.geometry.trainable:
            raise ZeroError(f"parameter {self._slot.spec.name!r} is frozen: it has no gradient")

    def _get(self) -> Tensor | None:
        mean = self._unit.master_shard.mean_gradient()
        return None if mean is None else mean[self._local]

    def _set(self, part: Tensor) -> None:
        self._unit.master_shard.load_gradient(self._local.start, self._local.stop, part)


class OptimizerState(_Values):
    """State ``key`` (``exp_avg``, ...) of an optimizer; a ZeroError names those that it has."""

    def __init__(self, zero: Zero, which: Which, optimizer: Optimizer, key: str) -> None:
        super().__init__(zero, which)
        name, group = self._slot.spec.name, self._slot.spec.group
        spans = self._unit.geometry.spans(self._unit.wire.mesh.rank)
        masters = zip(spans, self._unit.master_shard.masters, strict=False)  # none of a frozen unit
        spans_of_group = ((first, master) for (span, first, _), (_, master) in masters if span == group)
        if (pair := next(spans_of_group, None)) is None:
            raise ZeroError(f"parameter {name!r} is frozen: no optimizer holds it")
        first, master = pair
        state = optimizer.state.get(master, {})
        if not isinstance(held := state.get(key), Tensor):
            keys, kind = ", ".join(sorted(state)) or "none", type(optimizer).__name__
            raise ZeroError(f"{kind} has no state {key!r} of {name!r}; it has: {keys}")
        self._is_number = held.dim() == 0
        self._state = held if self._is_number else held[self._local.start - first :][: self._length]

    def _get(self) -> Tensor:
        return self._state

    def _set(self, part: Tensor) -> None:
        self._state.copy_(part)
