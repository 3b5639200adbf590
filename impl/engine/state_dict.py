"""Full state dicts of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from impl.engine.narrowing import Narrowing, dtype_of
from impl.errors import ZeroError
from impl.unit.master_shard import shard_of
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues

EXTRA: Final = "_extra_state"  # suffix of the entry of a module's get_extra_state()


def parameter_names(model: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """Maps names of sharded parameters in the state dict to the units' names; tied ones have several."""
    names = {
        id(visible): slot.spec.name
        for unit in units
        for visible, slot in zip(unit.visible, unit.geometry.slots, strict=True)
    }
    held = model.state_dict(keep_vars=True)
    return {key: names[id(tensor)] for key, tensor in held.items() if id(tensor) in names}


def is_extra(name: str) -> bool:
    """Whether an entry of a state dict is a module's ``get_extra_state()``."""
    return name.rpartition(".")[2] == EXTRA


def load_entry(model: nn.Module, name: str, held: object, value: Any) -> None:
    """Write ``value`` to a buffer ``held``, or to a module's extra state."""
    if is_extra(name):
        model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    elif isinstance(held, Tensor):
        with torch.no_grad():
            held.copy_(value)


def full_state_dict(
    model: nn.Module, units: Sequence[Unit], dtype: torch.dtype | str, *, allow_overflow: bool
) -> dict[str, Tensor]:
    """The unsharded model's state: :meth:`impl.engine.engine.Zero.full_state_dict`, of equal buffers."""
    narrowing = Narrowing(dtype_of(dtype))
    whole: dict[int, Any] = {}
    for unit in units:
        for visible, slot, values in zip(
            unit.visible, unit.geometry.slots, WholeValues(unit).masters(), strict=True
        ):
            same = narrowing.dtype == values.dtype
            whole[id(visible)] = values if same else narrowing.cast(slot.spec.name, values)
    if not allow_overflow and (overflow := narrowing.overflow()) is not None:
        raise ZeroError(f"full_state_dict(): {overflow}; take a wider type, or pass allow_overflow=True")
    state: dict[str, Any] = {}
    for name, held in model.state_dict(keep_vars=True).items():
        if id(held) in whole:
            state[name] = whole[id(held)]
        else:
            state[name] = held.detach().clone() if isinstance(held, Tensor) else copy.deepcopy(held)
    return state


def load_full_state_dict(model: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """:meth:`impl.engine.engine.Zero.load_full_state_dict`; of tied parameters one name is enough."""
    held = dict(model.state_dict(keep_vars=True))
    values = {id(held[name]): value for name, value in state.items() if name in held}
    state = {name: values[id(tensor)] for name, tensor in held.items() if id(tensor) in values} | dict(state)
    if odd := sorted(held.keys() ^ state.keys()):
        raise ZeroError(f"state does not match the model: {len(odd)} names differ, first {odd[0]!r}")
    for name, tensor in held.items():
        if isinstance(tensor, Tensor) and not is_extra(name) and tensor.shape != state[name].shape:
            raise ZeroError(f"state {name!r} is {tuple(state[name].shape)}, expected {tuple(tensor.shape)}")
    names = {id(tensor): name for name, tensor in held.items()}
    for unit in units:
        whole = [state[names.pop(id(parameter))] for parameter in unit.visible]
        device = unit.master_shard.held.device
        WholeValues(unit).load_shard(shard_of(unit.geometry, unit.wire.mesh.rank, whole, device))
    for name, tensor in held.items():
        if id(tensor) in names:  # not sharded
            load_entry(model, name, tensor, state[name])
