"""Gathers and loads full state dicts: those that the unsharded model would have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from impl.engine.module_buffers import write
from impl.engine.narrowing import Narrowing, dtype_of
from impl.errors import ZeroError
from impl.unit.master_shard import shard_of
from impl.unit.placeholder import Placeholder
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues

EXTRA: Final = "_extra_state"  # the last part of the name under which torch saves get_extra_state()


def parameter_names(model: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """Map each name of a sharded parameter in the state dict to the parameter's name in its unit.

    A tied parameter has several names in the state dict and one in its unit.
    """
    names = {
        id(visible): slot.spec.name
        for unit in units
        for visible, slot in zip(unit.visible, unit.geometry.slots, strict=True)
    }
    held = model.state_dict(keep_vars=True)
    return {key: names[id(tensor)] for key, tensor in held.items() if id(tensor) in names}


def is_extra(name: str) -> bool:
    """Return whether an entry of a state dict is a module's ``get_extra_state()``."""
    return name.rpartition(".")[2] == EXTRA


def load_entry(model: nn.Module, name: str, held: object, value: Any) -> None:
    """Write ``value`` to the buffer ``held``, or set it as a module's extra state, according to ``name``."""
    if is_extra(name):
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    elif isinstance(held, Tensor):
        check_repeated(name, held, value)
        write(held, value)


def check_repeated(name: str, held: Tensor, value: Tensor) -> None:
    """Raise a ZeroError if an expanded buffer cannot take ``value``.

    Along an expanded dimension the buffer has one value in memory, so all values must be equal there.
    """
    if held.layout is not torch.strided:
        return
    for dim, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True)):
        if size > 1 and not stride and not torch.equal(value, value.narrow(dim, 0, 1).expand_as(value)):
            raise ZeroError(
                f"state {name!r} has {size} different values along dimension {dim}, where the buffer was made "
                "by expand() and holds one value: register a contiguous() copy of the buffer"
            )


def check_value(name: str, held: Tensor, value: object) -> None:
    """Raise a ZeroError for a ``value`` that the parameter or buffer ``held`` cannot take without loss."""
    if not isinstance(value, Tensor):
        raise ZeroError(f"state {name!r} is a {type(value).__name__}, expected a tensor")
    if value.shape != held.shape:
        raise ZeroError(f"state {name!r} has shape {tuple(value.shape)}, expected {tuple(held.shape)}")
    if value.is_complex() and not held.is_complex():
        raise ZeroError(f"state {name!r} is {value.dtype}, but the model's tensor is real: load value.real")
    odd = {
        "on the meta device": value.is_meta,
        "a parameter of a sharded model": isinstance(value, Placeholder),
        "quantized": value.is_quantized,
        str(value.layout).removeprefix("torch."): value.layout != torch.strided,
    }
    for what in (text for text, found in odd.items() if found):
        raise ZeroError(f"state {name!r} is {what}, expected a dense tensor with values")
    if not isinstance(held, nn.Parameter):
        check_repeated(name, held, value)
    dtype = torch.float32 if isinstance(held, nn.Parameter) else held.dtype  # masters are fp32
    if value.is_floating_point() and dtype.is_floating_point:
        if torch.finfo(value.dtype).max > torch.finfo(dtype).max:
            narrowing = Narrowing(dtype)
            narrowing.cast(name, value.detach())
            if (overflow := narrowing.overflow()) is not None:
                raise ZeroError(f"state: {overflow}")
        return
    # A parameter with one byte for each element is quantised, and its scales are not in this tensor.
    codes = isinstance(held, nn.Parameter) and value.itemsize == 1
    if codes or not (dtype.is_complex or _same(value.to(dtype).to(value.dtype), value)):
        kind, wanted = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
        raise ZeroError(f"state {name!r} is {kind}, expected {wanted}: convert it first")


def _same(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal shapes and values, where NaN equals NaN."""
    if value is other:
        return True
    first, second = (t.double() if t.is_floating_point() else t for t in (value, other))
    return first.shape == second.shape and bool((first.eq(second) | (first.isnan() & second.isnan())).all())


def full_state_dict(
    model: nn.Module, units: Sequence[Unit], dtype: torch.dtype | str, *, allow_overflow: bool
) -> dict[str, Tensor]:
    """Gather the unsharded model's state dict; see :meth:`impl.engine.engine.Zero.full_state_dict`.

    Buffers must have been made equal on all ranks before.
    """
    narrowing = Narrowing(dtype_of(dtype))
    whole: dict[int, Any] = {}
    for unit in units:
        for visible, slot, values in zip(
            unit.visible, unit.geometry.slots, WholeValues(unit).masters(), strict=True
        ):
            same = narrowing.dtype == values.dtype
            whole[id(visible)] = values if same else narrowing.cast(slot.spec.name, values)
    if not allow_overflow and (overflow := narrowing.overflow()) is not None:
        raise ZeroError(f"full_state_dict(): {overflow}; pass a wider dtype, or allow_overflow=True")
    state: dict[str, Any] = {}
    for name, held in model.state_dict(keep_vars=True).items():
        if id(held) in whole:
            state[name] = whole[id(held)]
        else:
            state[name] = held.detach().clone() if isinstance(held, Tensor) else copy.deepcopy(held)
    return state


def load_full_state_dict(model: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """Load an unsharded model's state dict; see :meth:`impl.engine.engine.Zero.load_full_state_dict`.

    A tied parameter may be given under any one of its names.
    """
    held, given = dict(model.state_dict(keep_vars=True)), dict(state)
    # for each parameter and buffer, a name under which it is given
    name_of = {id(tensor): name for name, tensor in held.items() if name in given}
    given = {name: given[name_of[id(t)]] for name, t in held.items() if id(t) in name_of} | given
    if odd := sorted(held.keys() ^ given.keys()):
        raise ZeroError(
            f"state does not match the model: {len(odd)} names are in only one of them, the first is {odd[0]!r}"
        )
    for name, tensor in held.items():
        if isinstance(tensor, Tensor) and not is_extra(name):
            check_value(name, tensor, given[name])
            if not _same(given[name], given[other := name_of[id(tensor)]]):
                raise ZeroError(
                    f"state {name!r} differs from {other!r}, but the model ties these parameters: give equal values"
                )
    state = given
    names = {id(tensor): name for name, tensor in held.items()}
    for unit in units:
        whole = [state[names.pop(id(parameter))] for parameter in unit.visible]
        device = unit.master_shard.held.device
        WholeValues(unit).load_shard(shard_of(unit.geometry, unit.wire.mesh.rank, whole, device))
    for name, tensor in held.items():
        if id(tensor) in names:  # a buffer or an extra state, since sharded parameters were popped
            load_entry(model, name, tensor, state[name])
