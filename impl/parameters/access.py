"""Reads and writes the fp32 weights, the gradient and the optimizer state of one parameter.

:class:`Weights`, :class:`Gradient` and :class:`OptimizerState` have the same four methods; for example::

    Weights(zero, "head.weight").full()          # all elements, gathered from all ranks, in the parameter's shape
    Weights(zero, model.head.weight).local()     # (n,) the elements in this rank's shard

The second argument is the parameter: the object that its module holds, or its name in the unsharded model.  *Full*
values have the parameter's shape.  All ranks must call the methods that return or set full values, and must set equal
values.  *Local* values are the elements of the parameter in this rank's shard, 1-D and in order; there may be none.

Values are returned as copies.  Full values are fp32, on the engine's device.  Local values are on the device that
holds this rank's shard; they are fp32, except for optimizer state, which keeps its type.

Some optimizer state is a single number for a whole parameter, such as Adam's ``step``.  Such state is returned and set
as a 0-dimensional tensor, both as full and as local values.

All three classes raise a :class:`~impl.errors.ZeroError` in each of these cases: the second argument is no parameter of
the model; a value to set has the wrong shape; a forward or backward pass is running.
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
    """Reads and writes the values of one parameter.  Subclasses read and write the elements in this rank's shard."""

    # whether the values are an optimizer's state that is a single number, not one number for each element
    _is_number = False

    def __init__(self, zero: Zero, which: Which) -> None:
        zero.hooks.check_idle("access to a parameter's values")
        if isinstance(which, str):
            shown = dict(zero.model.named_parameters(remove_duplicate=False))
            if which not in shown:
                raise ZeroError(
                    f"the model has no parameter {which!r}: pass a name of model.named_parameters()"
                )
            which = shown[which]
        if (owner := find(which)) is None or owner.engine is not zero:
            shape = tuple(which.shape)
            raise ZeroError(
                f"got a parameter of shape {shape} that does not belong to this sharded model: pass a parameter that "
                "a module of the model holds, or the parameter's name"
            )
        self._zero, self._unit, self._number = owner
        self._whole, self._slot = WholeValues(self._unit), self._unit.geometry.slots[self._number]
        self._local = slice(*self._whole.part(self._number))
        self._length = self._local.stop - self._local.start

    @abstractmethod
    def _get(self) -> Tensor | None:
        """Return the values (n,) of the elements in this rank's shard, without copying them.

        An optimizer's state that is a single number is returned as a 0-dimensional tensor.  Returns None in place of a
        gradient that does not exist yet.
        """

    @abstractmethod
    def _set(self, part: Tensor) -> None:
        """Overwrite the values of the elements in this rank's shard with ``part`` (n,) fp32.

        For an optimizer's state that is a single number, ``part`` is 0-dimensional.
        """

    def full(self) -> Tensor | None:
        """Gather and return the values of the whole parameter in fp32, in its shape; all ranks must call it.

        Returns None in place of a gradient that does not exist yet.  An optimizer's state that is a single number is
        returned as a 0-dimensional tensor of its own type.
        """
        part = self.local()
        if part is None or part.dim() == 0:
            return part
        return self._whole.gather_member(self._number, part.float())

    def local(self) -> Tensor | None:
        """Return a copy of the values (n,) of the elements in this rank's shard; n may be 0.

        Returns None in place of a gradient that does not exist yet.  An optimizer's state that is a single number is
        returned as a 0-dimensional tensor.
        """
        return None if (part := self._get()) is None else part.clone()

    def set_full(self, value: Tensor) -> None:
        """Overwrite the values of the whole parameter with ``value``, which has the parameter's shape.

        All ranks must call it with equal values.  For an optimizer's state that is a single number, ``value`` is
        0-dimensional.
        """
        whole = self._checked(value, self._slot.spec.shape)
        geometry, rank = self._unit.geometry, self._unit.wire.mesh.rank
        self._set(whole if self._is_number else part_of(whole, geometry, self._slot, rank))

    def set_local(self, value: Tensor) -> None:
        """Overwrite the values of the elements in this rank's shard with ``value`` (n,).

        For an optimizer's state that is a single number, ``value`` is 0-dimensional.
        """
        self._set(self._checked(value, (self._length,)))

    def _checked(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return ``value`` in fp32, on the engine's device.

        Raises:
            ZeroError: if the value is complex, is on the meta device, or does not have ``shape``.  For an optimizer's
                state that is a single number, ``shape`` is ignored, and the value must be 0-dimensional.
        """
        shape = () if self._is_number else shape
        if tuple(value.shape) != shape:
            raise ZeroError(
                f"value for {self._slot.spec.name!r} has shape {tuple(value.shape)}, expected {shape}"
            )
        if value.is_complex() or value.is_meta:
            kind = "complex" if value.is_complex() else "on the meta device"
            raise ZeroError(f"value for {self._slot.spec.name!r} is {kind}: pass a real tensor with values")
        return value.detach().to(self._unit.wire.mesh.device, torch.float32)


class Weights(_Values):
    """Reads and writes a parameter's weights in the masters: the fp32 weights of the ranks' shards.

    If the policy's field ``frozen`` names a codec, frozen weights are stored in this codec.  Reading then decodes them,
    and writing encodes the new values.
    """

    def _get(self) -> Tensor:
        return self._unit.master_shard.master[self._local].detach()

    def _set(self, part: Tensor) -> None:
        self._zero.check_hidden("access.Weights")
        self._whole.write_part(self._number, part)


class Gradient(_Values):
    """Reads and writes a parameter's gradient for the next optimizer step: the mean over ranks, summed over
    micro-batches.

    Raises a ZeroError in each of these cases: the parameter is frozen; the last backward pass failed; this rank has
    added up gradients locally (``zero.accumulating()``), and they are not reduced yet.
    """

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
    """Reads and writes the state ``key`` (such as ``exp_avg``) that ``optimizer`` keeps for a parameter.

    Raises a ZeroError if the parameter is frozen, or if the optimizer has no such state of the parameter.  In the
    second case, the message names the states that the optimizer has.
    """

    def __init__(self, zero: Zero, which: Which, optimizer: Optimizer, key: str) -> None:
        super().__init__(zero, which)
        name, group = self._slot.spec.name, self._slot.spec.group
        spans = self._unit.geometry.spans(self._unit.wire.mesh.rank)
        # a frozen unit has spans, but no masters
        masters = zip(spans, self._unit.master_shard.masters, strict=False)
        spans_of_group = ((first, master) for (span, first, _), (_, master) in masters if span == group)
        if (pair := next(spans_of_group, None)) is None:
            raise ZeroError(f"parameter {name!r} is frozen: no optimizer holds it, so it has no state")
        first, master = pair
        state = optimizer.state.get(master, {})
        if not isinstance(held := state.get(key), Tensor):
            keys, kind = ", ".join(sorted(state)) or "none", type(optimizer).__name__
            raise ZeroError(
                f"{kind} has no state {key!r} of parameter {name!r} (its states: {keys}): pass the name of one of its "
                "states, or take a step first"
            )
        self._is_number = held.dim() == 0
        self._state = held if self._is_number else held[self._local.start - first :][: self._length]

    def _get(self) -> Tensor:
        return self._state

    def _set(self, part: Tensor) -> None:
        self._state.copy_(part)
