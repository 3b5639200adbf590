"""Full state dicts of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

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


def full_state_dict(model: nn.Module, units: Sequence[Unit]) -> dict[str, Tensor]:
    """The unsharded model's state: :meth:`impl.engine.engine.Zero.full_state_dict`, of equal buffers."""
    whole: dict[int, Any] = {}
    for unit in units:
        whole |= zip(map(id, unit.visible), WholeValues(unit).masters(), strict=True)
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
        if isinstance(tensor, Tensor) and not is_extra(name):
            _check_value(name, tensor, state[name])
    names = {id(tensor): name for name, tensor in held.items()}
    for unit in units:
        whole = [state[names.pop(id(parameter))] for parameter in unit.visible]
        device = unit.master_shard.held.device
        WholeValues(unit).load_shard(shard_of(unit.geometry, unit.wire.mesh.rank, whole, device))
    for name, tensor in held.items():
        if id(tensor) in names:  # not sharded
            load_entry(model, name, tensor, state[name])


def _check_value(name: str, held: Tensor, value: Any) -> None:
    """Refuse, on all ranks, a value that cannot be written to ``held``, or would lose a part."""
    if not isinstance(value, Tensor):
        raise ZeroError(f"state {name!r} is a {type(value).__name__}, expected a tensor")
    if held.shape != value.shape:
        raise ZeroError(f"state {name!r} is {tuple(value.shape)}, expected {tuple(held.shape)}")
    if value.is_complex() and not held.is_complex():
        raise ZeroError(f"state {name!r} is {value.dtype}, and the model's is real: load value.real")
    if value.layout != torch.strided or value.device.type == "meta":
        what = (
            "on the meta device" if value.device.type == "meta" else str(value.layout).removeprefix("torch.")
        )
        raise ZeroError(f"state {name!r} is {what}, expected a dense tensor with values")
