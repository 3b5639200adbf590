"""Gathers and loads full state dicts, which are equal to the state dicts of the unsharded model."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from impl.engine.module_buffers import write
from impl.engine.narrowing import Narrowing, dtype_of
from impl.errors import ZeroError
from impl.unit.context import MEMORY
from impl.unit.master_shard import part_of, shard_of
from impl.unit.placeholder import Placeholder
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues

EXTRA: Final = "_extra_state"  # the last part of the name under which torch saves get_extra_state()


def parameter_names(model: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """Return a dict from the name of a parameter in the model's state dict to its name in its unit.

    A unit is a group of parameters that are gathered together.  The dict has all sharded parameters.  A tied parameter
    has one name in its unit, but several in the state dict; the dict has an entry for each of them.
    """
    names = {
        id(visible): slot.spec.name
        for unit in units
        for visible, slot in zip(unit.visible, unit.geometry.slots, strict=True)
    }
    held = model.state_dict(keep_vars=True)
    return {key: names[id(tensor)] for key, tensor in held.items() if id(tensor) in names}


def is_extra(name: str) -> bool:
    """Return whether the entry ``name`` of a state dict comes from a module's ``get_extra_state()``."""
    return name.rpartition(".")[2] == EXTRA


def load_entry(model: nn.Module, name: str, held: object, value: Any) -> None:
    """Write one entry of a state dict into the model: a buffer, or the extra state of a module.

    A buffer is overwritten in place.  An extra state is set with the module's ``set_extra_state()``.

    Args:
        model: the model.
        name: the name of the entry.
        held: what the model has under this name now, such as the buffer.
        value: the value to write.
    """
    if is_extra(name):
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    elif isinstance(held, Tensor):
        check_repeated(name, held, value)
        write(held, value)


def check_repeated(name: str, held: Tensor, value: Tensor) -> None:
    """Raise a ZeroError if the buffer ``held`` was made by ``expand()`` and cannot take ``value``.

    Along an expanded dimension, all elements of the buffer are one value in memory.  ``value`` must therefore have
    equal values along this dimension.  ``name`` is the buffer's name, for the error message.
    """
    if held.layout is not torch.strided:
        return
    for dim, (size, stride) in enumerate(zip(held.shape, held.stride(), strict=True)):
        if size > 1 and not stride and not torch.equal(value, value.narrow(dim, 0, 1).expand_as(value)):
            raise ZeroError(
                f"state {name!r} has unequal values along dimension {dim}, where the buffer was made by expand() and "
                f"holds one value for all {size} elements: register a contiguous() copy of the buffer"
            )


def check_value(name: str, held: Tensor, value: object) -> None:
    """Raise a ZeroError if the parameter or buffer ``held`` cannot take ``value``, the entry ``name`` of a state dict.

    The value must be a dense tensor with data, and must have the shape of ``held``.  Types may differ:

    - From one floating-point or complex type to another, values are rounded, but no finite value may become infinite.
      A complex buffer also takes real values, under the same rules.
    - In every other conversion, all values must stay equal.
    - A parameter takes no integers or booleans of one byte, even if their values stay equal: they are probably
      quantised codes, whose scales are missing.
    """
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
    kind, wanted = (str(kind).removeprefix("torch.") for kind in (value.dtype, dtype))
    if dtype.is_complex:  # both parts of a complex number are checked as real numbers
        dtype = dtype.to_real()
        value = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value
    if value.is_floating_point() and dtype.is_floating_point:
        if torch.finfo(value.dtype).max > torch.finfo(dtype).max:
            narrowing = Narrowing(dtype)
            narrowing.cast(name, value.detach())
            if (overflow := narrowing.overflow()) is not None:  # counts real and imaginary parts one by one
                raise ZeroError(f"state: {overflow}; clip these values before loading")
        return
    # A parameter with one byte for each element is quantised, and its scales are not in this tensor.
    codes = isinstance(held, nn.Parameter) and value.itemsize == 1
    if codes or not _same(value.to(dtype).to(value.dtype), value):
        raise ZeroError(
            f"state {name!r} is {kind}, expected {wanted}: convert it to {wanted} before loading, and dequantise it if "
            "it has quantised codes; loading it as it is would change values, or take codes for values"
        )


def _same(value: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal shapes and equal values; NaN counts as equal to NaN."""
    if value is other:
        return True
    first, second = (t.double() if t.is_floating_point() else t for t in (value, other))
    return first.shape == second.shape and bool((first.eq(second) | (first.isnan() & second.isnan())).all())


def full_state_dict(
    model: nn.Module,
    units: Sequence[Unit],
    dtype: torch.dtype | str,
    *,
    allow_overflow: bool,
    device: torch.device,
    keep: bool,
) -> dict[str, Tensor]:
    """Gather the state dict of the unsharded model, parameters in ``dtype`` and buffers; all ranks must call it.

    Units, the groups of parameters that are gathered together, are gathered one after the other.  A rank therefore
    never holds more than the result and one whole unit.  Buffers must be equal on all ranks already.

    Args:
        model: the sharded model.
        units: the model's units.
        dtype: the type of the parameters in the result.
        allow_overflow: whether a finite value that is too large for ``dtype`` may become infinite.
        device: the device of the result.
        keep: whether this rank returns the state dict.  If False, the rank only takes part in the gathers, and the
            result is an empty dict.

    Raises:
        ZeroError: on all ranks, if finite values would become infinite and ``allow_overflow`` is False.
    """
    narrowing = Narrowing(dtype_of(dtype))
    whole: dict[int, Any] = {}
    for unit in units:
        whole.update(_of_unit(unit, narrowing, device if keep else None))
    if not allow_overflow and (overflow := narrowing.overflow()) is not None:
        raise ZeroError(f"full_state_dict(): {overflow}; pass a wider dtype, or allow_overflow=True")
    state: dict[str, Any] = {}
    for name, held in model.state_dict(keep_vars=True).items() if keep else ():
        if id(held) in whole:
            state[name] = whole[id(held)]
        else:
            state[name] = (
                held.detach().to(device, copy=True) if isinstance(held, Tensor) else copy.deepcopy(held)
            )
    return state


def _of_unit(unit: Unit, narrowing: Narrowing, device: torch.device | None) -> dict[int, Tensor]:
    """Gather the parameters of ``unit``, cast them with ``narrowing``, and return a copy of each on ``device``.

    A unit is a group of parameters that are gathered together.  The result is a dict with one entry for each parameter.
    The key is the :func:`id` of the object that modules hold as this parameter now, and the value is the copy.  If
    ``device`` is None, the dict is empty.

    All ranks must call this.  Ranks with ``device=None`` cast too, so that ``narrowing`` counts the same overflows on
    all ranks, and all ranks raise the same error.
    """
    whole = {}
    for visible, slot, values in zip(
        unit.visible, unit.geometry.slots, WholeValues(unit).masters(), strict=True
    ):
        cast = values if narrowing.dtype == values.dtype else narrowing.cast(slot.spec.name, values)
        if device is not None:
            whole[id(visible)] = cast.to(device, copy=True)
    return whole


def fill(model: nn.Module, units: Sequence[Unit], state: dict[str, Any], prefix: str) -> None:
    """Replace each sharded parameter in ``state``, the result of ``model.state_dict()``, by its whole values.

    The values are fp32, in host memory.  Entries keep their order.  Parameters in an open GatheredParameters context
    have their values already and are left alone.  Nothing is replaced if the state dict was collected with
    ``keep_vars=True``.  All ranks must call this.

    Args:
        model: the model.
        units: the model's units, groups of parameters that are gathered one after the other.
        state: the state dict of the model, or of a larger module that has the model as a submodule.
        prefix: the beginning of the names of the model's entries in ``state``.  It is the path of the model in the
            larger module, with a dot at its end, or empty.
    """
    held = {prefix + name: p for name, p in model.named_parameters(remove_duplicate=False)}
    names = defaultdict[int, list[str]](list)  # a tied parameter has several
    for name, parameter in held.items():
        if state.get(name) is parameter:
            return
        if name in state:
            names[id(parameter)].append(name)
    for unit in units:
        for number in unit.flat.shown:
            names.pop(id(unit.visible[number]), None)
        for key, values in _of_unit(unit, Narrowing(torch.float32), MEMORY).items():
            state.update(dict.fromkeys(names.pop(key, ()), values))


def load_full_state_dict(model: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """Overwrite the weights and buffers of a sharded ``model`` with the ``state`` dict of the unsharded model.

    For a tied parameter, which has several names, ``state`` needs only one of these names.

    Raises:
        ZeroError: before anything is changed, if an entry does not fit;
            :meth:`impl.engine.engine.Zero.load_full_state_dict` lists the cases.
    """
    held = dict(model.state_dict(keep_vars=True))
    given = _under_all_names(held, state)
    if odd := sorted(held.keys() ^ given.keys()):
        raise ZeroError(
            f"the names of state and model differ: {odd[0]!r} is in only one of the two (such names: {len(odd)}); load "
            "a state dict with the names of model.state_dict()"
        )
    _load(model, units, held, given)


def take(model: nn.Module, units: Sequence[Unit], state: dict[str, Any], prefix: str) -> set[str]:
    """Load the entries of ``state`` that belong to the model, and remove them from ``state``.

    ``state`` may lack some of the model's entries, and may have other entries.  It is the state dict of ``model``, or
    of a larger module that has ``model`` as a submodule.  ``prefix`` is the path of ``model`` in the larger module,
    with a dot at its end, or empty.

    Returns:
        The names of the loaded entries, each with ``prefix`` before it.  For a tied parameter all its names are
        returned, even if ``state`` has only one of them.  If the value of an entry is the very parameter or buffer that
        the model holds, nothing is written, and the entry counts as loaded.

    Raises:
        ZeroError: before anything is changed, if a value does not fit its parameter or buffer.
    """
    held = dict(model.state_dict(keep_vars=True))
    given = {name: state[prefix + name] for name in held if prefix + name in state}
    # torch's set_model_state_dict() passes the model's own parameters for entries that a state dict lacks
    kept = {name for name, value in given.items() if value is held[name]}
    given = _under_all_names(held, {name: value for name, value in given.items() if name not in kept})
    _load(model, units, held, given)
    loaded = {prefix + name for name in (*given, *kept)}
    for name in loaded:
        state.pop(name, None)
    return loaded


def _under_all_names(held: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``state`` that has the value of each tied parameter or buffer under all of its names.

    ``held`` is the state dict of the model.  Two names are tied if they have the same object in ``held``.  In
    ``state``, the value of a tied parameter may be under only one of its names.
    """
    tensors = {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}
    name_of = {id(tensor): name for name, tensor in tensors.items() if name in state}
    tied = {name: state[name_of[id(t)]] for name, t in tensors.items() if id(t) in name_of}
    every = tied | dict(state)
    return {name: every[name] for name in (*held, *every) if name in every}  # in the model's order


def _load(model: nn.Module, units: Sequence[Unit], held: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Load the entries ``given`` into the model.  ``held`` is the model's state dict, which has all names in ``given``.

    Raises:
        ZeroError: before anything is changed, if an entry cannot be loaded.
    """
    name_of = {id(held[name]): name for name in given}  # for each parameter and buffer, one of its names
    for name, value in given.items():
        tensor = held[name]
        if isinstance(tensor, Tensor) and not is_extra(name):
            check_value(name, tensor, value)
            if not _same(value, given[other := name_of[id(tensor)]]):
                raise ZeroError(
                    f"state {name!r} differs from {other!r}, but the model ties these parameters: give equal values"
                )
    for unit in units:
        values = {
            number: given[name_of.pop(id(parameter))]
            for number, parameter in enumerate(unit.visible)
            if id(parameter) in name_of
        }
        geometry, rank, whole = unit.geometry, unit.wire.mesh.rank, WholeValues(unit)
        if len(values) == len(geometry.slots):
            whole.load_shard(shard_of(geometry, rank, values.values(), unit.master_shard.held.device))
        else:
            for number, value in values.items():
                whole.write_part(number, part_of(value, geometry, geometry.slots[number], rank))
    for name, value in given.items():
        if id(held[name]) in name_of:  # a buffer or an extra state, since sharded parameters were popped
            load_entry(model, name, held[name], value)
