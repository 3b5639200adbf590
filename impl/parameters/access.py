"""Reads and writes a parameter's fp32 weights, gradient and optimizer state, whole or this rank's part.

``which`` is a parameter as its module shows it, or its name in the unsharded model.  The *full* functions
gather along the ranks that share one copy and must be called by all; they return fp32 tensors of the
parameter's shape.  The *local* functions send nothing; they return 1-D fp32 tensors of the elements that lie
in this rank's shard, in order, possibly none.  What a function returns is a copy.

All raise :class:`~impl.errors.ZeroError` for what is not a parameter of the model, for values of another
shape, and inside a forward or backward pass; those that set weights also under
:class:`~impl.parameters.gathered.GatheredParameters`; those of gradients also after a backward pass that
failed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.engine.engine import Zero, find
from impl.errors import ZeroError
from impl.unit.master_shard import part_of
from impl.unit.unit import WholeValues

Which = str | nn.Parameter


def full_fp32_param(zero: Zero, which: Which) -> Tensor:
    """The weights (shape), from the masters; of weights held as codes, what these decode to."""
    part = _Part(zero, which)
    return part.gather(part.weights())


def set_full_fp32_param(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the weights with ``value`` (shape), the same on all ranks."""
    part = _Part(zero, which)
    zero.check_hidden("set_full_fp32_param()")
    part.values.write_part(part.number, part.of_whole(value))


def local_fp32_param(zero: Zero, which: Which) -> Tensor:
    """The weights (elements here,)."""
    return _Part(zero, which).weights().clone()


def set_local_fp32_param(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the weights with ``value`` (elements here,); all ranks must call it."""
    part = _Part(zero, which)
    zero.check_hidden("set_local_fp32_param()")
    part.values.write_part(part.number, part.checked(value, part.shape))


def full_fp32_grad(zero: Zero, which: Which) -> Tensor | None:
    """The mean gradient (shape) that the next step will take; None before there is one."""
    part = _Part(zero, which, trained=True)
    return None if (own := part.gradient()) is None else part.gather(own)


def set_full_fp32_grad(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the mean gradient with ``value`` (shape), the same on all ranks."""
    part = _Part(zero, which, trained=True)
    part.set_gradient(part.of_whole(value))


def local_fp32_grad(zero: Zero, which: Which) -> Tensor | None:
    """The mean gradient (elements here,); None before there is one."""
    own = _Part(zero, which, trained=True).gradient()
    return None if own is None else own.clone()


def set_local_fp32_grad(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the mean gradient with ``value`` (elements here,); all ranks must call it."""
    part = _Part(zero, which, trained=True)
    part.set_gradient(part.checked(value, part.shape))


def full_optimizer_state(zero: Zero, which: Which, optimizer: Optimizer, key: str) -> Tensor:
    """State ``key`` (``exp_avg``, ...) of the parameter (shape); () for a state that is one number.

    Raises:
        ZeroError: if the optimizer has no such state, naming those that it has.
    """
    part = _Part(zero, which)
    state = part.state(optimizer, key)
    return state.clone() if state.dim() == 0 else part.gather(state.float())


def set_full_optimizer_state(zero: Zero, which: Which, value: Tensor, optimizer: Optimizer, key: str) -> None:
    """Overwrite state ``key`` with ``value`` (shape), the same on all ranks; () for one number."""
    part = _Part(zero, which)
    state = part.state(optimizer, key)
    state.copy_(value if state.dim() == 0 else part.of_whole(value))


def local_optimizer_state(zero: Zero, which: Which, optimizer: Optimizer, key: str) -> Tensor:
    """State ``key`` (elements here,); () for a state that is one number."""
    return _Part(zero, which).state(optimizer, key).clone()


def set_local_optimizer_state(
    zero: Zero, which: Which, value: Tensor, optimizer: Optimizer, key: str
) -> None:
    """Overwrite state ``key`` with ``value`` (elements here,); () for one number."""
    part = _Part(zero, which)
    state = part.state(optimizer, key)
    state.copy_(value if state.dim() == 0 else part.checked(value, part.shape))


class _Part:
    """This rank's part of one parameter, which for its gradient must be ``trained``."""

    def __init__(self, zero: Zero, which: Which, *, trained: bool = False) -> None:
        if trained:
            zero.hooks.check_finished("access to a gradient")
        zero.hooks.check_idle("access to a parameter's values")
        if isinstance(which, str):
            shown = dict(zero.model.named_parameters(remove_duplicate=False))
            if which not in shown:
                raise ZeroError(f"the model has no parameter {which!r}")
            which = shown[which]
        found = find(which)
        if found is None or found.engine is not zero:
            raise ZeroError(
                f"a parameter of shape {tuple(which.shape)} that is not one of this sharded model"
            )
        self.unit, self.number = found.unit, found.number
        self.values, self.slot = WholeValues(self.unit), self.unit.geometry.slots[self.number]
        self.here = slice(*self.values.part(self.number))  # of the shard
        self.shape = (self.here.stop - self.here.start,)
        if trained and not self.unit.geometry.trainable:
            raise ZeroError(f"parameter {self.slot.spec.name!r} is frozen: it has no gradient")

    def gather(self, part: Tensor) -> Tensor:
        return self.values.gather_member(self.number, part)

    def weights(self) -> Tensor:
        return self.unit.master_shard.master[self.here].detach()

    def gradient(self) -> Tensor | None:
        mean = self.unit.master_shard.mean_gradient()
        return None if mean is None else mean[self.here]

    def set_gradient(self, values: Tensor) -> None:
        self.unit.master_shard.load_gradient(self.here.start, self.here.stop, values)

    def state(self, optimizer: Optimizer, key: str) -> Tensor:
        """View of this rank's part of an optimizer's state."""
        name = self.slot.spec.name
        spans = self.unit.geometry.spans(self.unit.wire.mesh.rank)
        for (group, first, _), (_, master) in zip(spans, self.unit.master_shard.masters, strict=False):
            if group == self.slot.spec.group:
                state = optimizer.state.get(master, {})
                if not isinstance(held := state.get(key), Tensor):
                    known = ", ".join(sorted(state)) or "none"
                    raise ZeroError(
                        f"{type(optimizer).__name__} has no state {key!r} of {name!r}; it has: {known}"
                    )
                return held if held.dim() == 0 else held[self.here.start - first : self.here.stop - first]
        raise ZeroError(f"parameter {name!r} is frozen: no optimizer holds it")

    def of_whole(self, value: Tensor) -> Tensor:
        """(elements here,) of a whole ``value``."""
        whole = self.checked(value, self.slot.spec.shape)
        return part_of(whole, self.unit.geometry, self.slot, self.unit.wire.mesh.rank)

    def checked(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``value``, if it has ``shape``."""
        if tuple(value.shape) != shape:
            raise ZeroError(f"value for {self.slot.spec.name!r} is {tuple(value.shape)}, expected {shape}")
        return value.detach().to(self.unit.wire.mesh.device, torch.float32)
