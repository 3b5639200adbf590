"""Full state dicts of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from impl.errors import ZeroError
from impl.unit.master_shard import sliced
from impl.unit.unit import Unit
from impl.unit.whole_values import WholeValues

EXTRA: Final = "_extra_state"  # ends the name of what a module's get_extra_state() returned


def parameter_names(model: nn.Module, units: Sequence[Unit]) -> dict[str, str]:
    """For each name of a sharded parameter in the state dict, the parameter's own; tied ones have several."""
    own = {
        id(visible): slot.spec.name
        for unit in units
        for visible, slot in zip(unit.visible, unit.geometry.slots, strict=True)
    }
    held = model.state_dict(keep_vars=True)
    return {name: own[id(value)] for name, value in held.items() if id(value) in own}


def is_extra(name: str) -> bool:
    """Whether an entry of a state dict is what a module's ``get_extra_state()`` returned."""
    return name.rpartition(".")[2] == EXTRA


def load_entry(model: nn.Module, name: str, held: object, value: Any) -> None:
    """Give a buffer ``held``, or a module's extra state, its value."""
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
    own = dict(model.state_dict(keep_vars=True))
    given = {id(own[name]): value for name, value in state.items() if name in own}
    state = {name: given[id(value)] for name, value in own.items() if id(value) in given} | dict(state)
    if own.keys() != state.keys():
        odd = sorted(own.keys() ^ state.keys())
        raise ZeroError(f"state does not match the model: {len(odd)} names differ, first {odd[0]!r}")
    for name, value in own.items():
        if isinstance(value, Tensor) and not is_extra(name) and value.shape != state[name].shape:
            raise ZeroError(f"state {name!r} is {tuple(state[name].shape)}, expected {tuple(value.shape)}")
    names = {id(value): name for name, value in own.items()}
    for unit in units:
        values = [state[names.pop(id(parameter))] for parameter in unit.visible]
        device = unit.master_shard.held.device
        WholeValues(unit).load_shard(sliced(unit.geometry, unit.wire.mesh.rank, values, device))
    for name, value in own.items():
        if id(value) in names:  # not sharded
            load_entry(model, name, value, state[name])
