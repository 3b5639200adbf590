"""Full state dicts of a sharded model, and the state of its codecs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from impl.codecs.rounding_noise import Clock
from impl.engine.bit_renewal import Renewal
from impl.errors import ZeroError
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
    """The unsharded model's state: fp32 parameters and buffers by their original names.

    All ranks must call it, and all get it.
    """
    state = dict(model.state_dict(keep_vars=True))
    own = parameter_names(model, units)
    for unit in units:
        values = WholeValues(unit).masters()
        of = {slot.spec.name: value for slot, value in zip(unit.geometry.slots, values, strict=True)}
        state |= {name: of[parameter] for name, parameter in own.items() if parameter in of}
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def load_full_state_dict(model: nn.Module, units: Sequence[Unit], state: Mapping[str, Tensor]) -> None:
    """Overwrite weights and buffers with those of the unsharded model; of tied ones one name is enough.

    Raises:
        ZeroError: for missing, unexpected or misshapen entries, naming the first.
    """
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
    with torch.no_grad():
        for unit in units:
            WholeValues(unit).load_masters([state[names[id(parameter)]] for parameter in unit.visible])
    sharded = parameter_names(model, units)
    for name, value in own.items():
        if name not in sharded:
            load_entry(model, name, value, state[name])


def communication_state(units: Sequence[Unit], clock: Clock, *, renewal: Renewal | None) -> dict[str, Tensor]:
    """What this rank's codecs depend on beside weights: step, micro-batch, errors carried over, copies that
    differences of weights begin with, codecs that a budget chose.

    With masters and optimizer state, it makes a resumed run on the same topology and policy equal to
    an uninterrupted one, bit for bit.
    """
    state = {"step": torch.tensor(clock.step), "micro_batch": torch.tensor(clock.micro_batch)}
    if renewal is not None:
        state["budget"] = renewal.state()
    for unit in units:
        held = unit.reduction.feedback_state() | unit.weight_gather.secondary.state(unit.master_shard.version)
        state |= {f"{unit.geometry.name}/{name}": value for name, value in held.items()}
    return state


def load_communication_state(
    units: Sequence[Unit], clock: Clock, state: Mapping[str, Tensor], *, renewal: Renewal | None
) -> None:
    """Take over what :func:`communication_state` gave on the same rank of the same topology and policy.

    Raises:
        ZeroError: for errors or copies that do not fit, naming their unit, and for those of another budget;
            nothing is changed then.
    """
    found: list[tuple[Unit, dict[str, Tensor], dict[str, Tensor]]] = []  # errors, and copies
    for unit in units:
        prefix = f"{unit.geometry.name}/"
        own = {name.removeprefix(prefix): one for name, one in state.items() if name.startswith(prefix)}
        copies: dict[str, Tensor] = {name: own.pop(name) for name in ("copy", "begun") if name in own}
        unit.weight_gather.secondary.check_state(copies)
        feedback, where = unit.reduction.feedback(), f"feedback state of unit {unit.geometry.name!r}"
        if feedback is None and own:
            raise ZeroError(f"{where}, which has no feedback")
        try:
            if feedback is not None:
                feedback.check_state(own)
        except ValueError as error:
            raise ZeroError(f"{where}: {error}") from None
        found.append((unit, own, copies))
    if renewal is not None:
        renewal.check_state(state.get("budget"))
    elif "budget" in state:
        raise ZeroError("state of a budget, and this policy has none")
    clock.step, clock.micro_batch = int(state["step"]), int(state["micro_batch"])
    for unit, own, copies in found:
        if (feedback := unit.reduction.feedback()) is not None:
            feedback.load(own)
        unit.weight_gather.secondary.load(copies)
    if renewal is not None:
        renewal.load(state["budget"])
