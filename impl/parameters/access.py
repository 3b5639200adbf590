"""Reads and writes a parameter's fp32 weights, gradient and optimizer state, whole or this rank's part.

``which`` is a parameter as its module shows it, or its name in the unsharded model.  The *full* functions
gather along the ranks that share one copy and must be called by all; they return fp32 tensors of the
parameter's shape.  The *local* functions send nothing; they return 1-D fp32 tensors of the elements that lie
in this rank's shard, in order, possibly none.  What a function returns is a copy.

All raise :class:`~impl.errors.ZeroError` for what is not a parameter of the model, for values of another
shape,
and inside a forward or backward pass; those that set weights also while parameters are seen whole under
:class:`~impl.parameters.gathered.GatheredParameters`; those of gradients also before ``finish_backward()``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.engine.engine import Zero
from impl.engine.optimizer_hooks import find
from impl.errors import ZeroError
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues

Which = str | nn.Parameter


def full_fp32_param(zero: Zero, which: Which) -> Tensor:
    """The weights (shape), from the masters; of weights held as codes, what these decode to."""
    unit, number = _find(zero, which)
    return WholeValues(unit).gather_member(number, _weights(unit, number))


def set_full_fp32_param(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the weights with ``value`` (shape), the same on all ranks."""
    unit, number = _find(zero, which)
    zero.check_hidden("set_full_fp32_param()")
    WholeValues(unit).write_part(number, _part_of(unit, number, value))


def local_fp32_param(zero: Zero, which: Which) -> Tensor:
    """The weights (elements here,)."""
    return _weights(*_find(zero, which)).clone()


def set_local_fp32_param(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the weights with ``value`` (elements here,); all ranks must call it."""
    unit, number = _find(zero, which)
    zero.check_hidden("set_local_fp32_param()")
    WholeValues(unit).write_part(number, _checked(unit, number, value, local=True))


def full_fp32_grad(zero: Zero, which: Which) -> Tensor | None:
    """The mean gradient (shape) that the next step will take; None before there is one."""
    unit, number = _find_gradient(zero, which)
    part = _gradient(unit, number)
    return None if part is None else WholeValues(unit).gather_member(number, part)


def set_full_fp32_grad(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the mean gradient with ``value`` (shape), the same on all ranks."""
    unit, number = _find_gradient(zero, which)
    unit.master_shard.load_gradient(*WholeValues(unit).part(number), _part_of(unit, number, value))


def local_fp32_grad(zero: Zero, which: Which) -> Tensor | None:
    """The mean gradient (elements here,); None before there is one."""
    part = _gradient(*_find_gradient(zero, which))
    return None if part is None else part.clone()


def set_local_fp32_grad(zero: Zero, which: Which, value: Tensor) -> None:
    """Overwrite the mean gradient with ``value`` (elements here,); all ranks must call it."""
    unit, number = _find_gradient(zero, which)
    unit.master_shard.load_gradient(
        *WholeValues(unit).part(number), _checked(unit, number, value, local=True)
    )


def full_optimizer_state(zero: Zero, which: Which, optimizer: Optimizer, key: str) -> Tensor:
    """State ``key`` (``exp_avg``, ...) of the parameter (shape); () for a state that is one number.

    Raises:
        ZeroError: if the optimizer has no such state, naming those that it has.
    """
    unit, number = _find(zero, which)
    state = _state(unit, number, optimizer, key)
    return state.clone() if state.dim() == 0 else WholeValues(unit).gather_member(number, state.float())


def set_full_optimizer_state(zero: Zero, which: Which, value: Tensor, optimizer: Optimizer, key: str) -> None:
    """Overwrite state ``key`` with ``value`` (shape), the same on all ranks; () for one number."""
    unit, number = _find(zero, which)
    state = _state(unit, number, optimizer, key)
    state.copy_(value if state.dim() == 0 else _part_of(unit, number, value))


def local_optimizer_state(zero: Zero, which: Which, optimizer: Optimizer, key: str) -> Tensor:
    """State ``key`` (elements here,); () for a state that is one number."""
    return _state(*_find(zero, which), optimizer, key).clone()


def set_local_optimizer_state(
    zero: Zero, which: Which, value: Tensor, optimizer: Optimizer, key: str
) -> None:
    """Overwrite state ``key`` with ``value`` (elements here,); () for one number."""
    unit, number = _find(zero, which)
    state = _state(unit, number, optimizer, key)
    state.copy_(value if state.dim() == 0 else _checked(unit, number, value, local=True))


def _find(zero: Zero, which: Which) -> tuple[Unit, int]:
    zero.hooks.check_idle("access to a parameter's values")
    if isinstance(which, str):
        shown = dict(zero.model.named_parameters(remove_duplicate=False))
        if which not in shown:
            raise ZeroError(f"the model has no parameter {which!r}")
        which = shown[which]
    found = find(which)
    if found is None or found.engine is not zero:
        raise ZeroError(f"a parameter of shape {tuple(which.shape)} that is not one of this sharded model")
    return found.unit, found.number


def _find_gradient(zero: Zero, which: Which) -> tuple[Unit, int]:
    zero.hooks.backward.check_finished("access to a gradient")
    unit, number = _find(zero, which)
    if not unit.geometry.trainable:
        raise ZeroError(f"parameter {unit.geometry.slots[number].spec.name!r} is frozen: it has no gradient")
    return unit, number


def _weights(unit: Unit, number: int) -> Tensor:
    start, end = WholeValues(unit).part(number)
    return unit.master_shard.master[start:end].detach()


def _gradient(unit: Unit, number: int) -> Tensor | None:
    start, end = WholeValues(unit).part(number)
    mean = unit.master_shard.mean_gradient()
    return None if mean is None else mean[start:end]


def _state(unit: Unit, number: int, optimizer: Optimizer, key: str) -> Tensor:
    """View of this rank's part of an optimizer's state."""
    slot, (start, end) = unit.geometry.slots[number], WholeValues(unit).part(number)
    spans = unit.geometry.spans(unit.wire.mesh.rank)
    for (group, first, _), (_, master) in zip(spans, unit.master_shard.masters, strict=False):
        if group == slot.spec.group:
            state = optimizer.state.get(master, {})
            if not isinstance(state.get(key), Tensor):
                known = ", ".join(sorted(state)) or "none"
                raise ZeroError(
                    f"{type(optimizer).__name__} has no state {key!r} of {slot.spec.name!r}; it has: {known}"
                )
            held: Tensor = state[key]
            return held if held.dim() == 0 else held[start - first : end - first]
    raise ZeroError(f"parameter {slot.spec.name!r} is frozen: no optimizer holds it")


def _part_of(unit: Unit, number: int, value: Tensor) -> Tensor:
    """(elements here,) of a whole ``value``."""
    slot = unit.geometry.slots[number]
    first, end = unit.geometry.overlap(slot, unit.wire.mesh.rank)
    whole = _checked(unit, number, value, local=False)
    return whole.reshape(-1)[first - slot.offset : end - slot.offset]


def _checked(unit: Unit, number: int, value: Tensor, *, local: bool) -> Tensor:
    """``value``, if it has the parameter's shape, or that of its part here."""
    slot, (start, end) = unit.geometry.slots[number], WholeValues(unit).part(number)
    wanted = (end - start,) if local else slot.spec.shape
    if tuple(value.shape) != wanted:
        raise ZeroError(f"value for {slot.spec.name!r} is {tuple(value.shape)}, expected {wanted}")
    return value.detach().to(unit.wire.mesh.device, torch.float32)
