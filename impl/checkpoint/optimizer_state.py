"""The state of optimizers over masters, by parameter name instead of by shard.

A master is the part of a shard that belongs to one optimizer group.  What an optimizer keeps for each
of its elements is cut into ranges of parameters; numbers (Adam's ``step``) belong to every parameter of
the master.  So another layout, whose masters join other parameters, can be given the state again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.json_values import NUMBER, from_json, to_json
from impl.checkpoint.manifest import (
    Parts,
    SavedGroup,
    SavedOptimizer,
    SavedState,
)
from impl.checkpoint.ranges import Range, held_ranges, saved_ranges
from impl.checkpoint.tensor_bytes import DTYPES, NAMES
from impl.plan.geometry import UnitGeometry
from impl.unit.unit import Unit


@dataclass(frozen=True, slots=True)
class Owned:
    """A master: its unit's layout, its optimizer group, and where it lies in the shard."""

    geometry: UnitGeometry
    group: int
    start: int
    end: int

    @property
    def names(self) -> list[str]:
        """Of the parameters with elements that its unit holds of its group, on any rank."""
        slots = (slot.spec for slot in self.geometry.slots if slot.spec.group == self.group)
        return [spec.name for spec in slots if spec.numel]

    def held(self, rank: int) -> Iterator[Range]:
        """What it holds of parameters."""
        return (one for one in held_ranges(self.geometry, rank) if one.slot.spec.group == self.group)

    def saved(self, rank: int) -> Iterator[Range]:
        """What of that its rank saves."""
        return (one for one in saved_ranges(self.geometry, rank) if one.slot.spec.group == self.group)


class Masters:
    """The masters of one engine on one rank, in the optimizers that hold them.

    Args:
        units: of the engine.
        rank: this one.
        optimizers: over the masters, and nothing else.

    Raises:
        CheckpointError: for an optimizer that holds something else, or a master that two hold.
    """

    def __init__(self, units: Sequence[Unit], rank: int, optimizers: Sequence[Optimizer]) -> None:
        self._rank = rank
        self._optimizers = list(optimizers)
        owned = {
            id(master): Owned(unit.geometry, group, start, end)
            for unit in units
            for (group, master), (_, start, end) in zip(
                unit.master_shard.masters,
                unit.geometry.spans(rank) if unit.geometry.trainable else (),
                strict=True,
            )
        }
        self._owned: list[list[list[Owned]]] = []  # by optimizer, group and parameter
        seen: set[int] = set()
        for number, optimizer in enumerate(self._optimizers):
            groups = [[id(master) for master in group["params"]] for group in optimizer.param_groups]
            for one in (one for group in groups for one in group):
                if one not in owned or one in seen:
                    why = "a master that is held twice" if one in seen else "what is no master of this engine"
                    raise CheckpointError(f"optimizer {number} holds {why}: build it of Zero.param_groups()")
                seen.add(one)
            self._owned.append([[owned[one] for one in group] for group in groups])

    def described(self) -> list[SavedOptimizer]:
        """What rank 0 writes down; the same on all ranks.

        Raises:
            CheckpointError: for state or options that are neither by element nor plain values.
        """
        return [self._described(number) for number in range(len(self._optimizers))]

    def _described(self, number: int) -> SavedOptimizer:
        where = f"optimizer {number}"
        state: dict[str, SavedState] = {}
        for owned, held in self._states(number):
            if held:
                numbers = {
                    key: _plain(value, f"{where}: {key!r}")
                    for key, value in held.items()
                    if not _by_element(value)
                }
                elements = [key for key, value in held.items() if _by_element(value)]
                for key in elements:
                    if held[key].numel() != owned.end - owned.start:
                        raise CheckpointError(
                            f"{where}: state {key!r} has {held[key].numel()} elements for a master of "
                            f"{owned.end - owned.start}: it is not of each element, and cannot be cut"
                        )
                state |= {name: SavedState(numbers=numbers, elements=elements) for name in owned.names}
        groups: list[SavedGroup] = []
        for masters, group in zip(self._owned[number], self._optimizers[number].param_groups, strict=True):
            options = {
                key: _plain(value, f"{where}: option {key!r}")
                for key, value in group.items()
                if key != "params"
            }
            for own, names in _by_group(masters).items():
                # A group that lies on two devices is two of the optimizer's.
                for one in groups:
                    if (one.number, one.options) == (own, options):
                        one.parameters.extend(names)
                        break
                else:
                    groups.append(SavedGroup(number=own, parameters=names, options=options))
        kind = type(self._optimizers[number]).__name__
        return SavedOptimizer(kind=kind, groups=groups, state=state)

    def _states(self, number: int) -> Iterator[tuple[Owned, Mapping[str, Any]]]:
        """Each master with its state, in the order in which the optimizer counts them."""
        state = self._optimizers[number].state_dict()["state"]
        flat = [one for group in self._owned[number] for one in group]
        for index, owned in enumerate(flat):
            yield owned, state.get(index, {})

    def elements(self) -> Iterator[tuple[str, Range, Tensor]]:
        """What this rank saves: (kind, range, (n,) values) of each range of each state by element."""
        for number in range(len(self._optimizers)):
            for owned, held in self._states(number):
                for key, value in held.items():
                    if _by_element(value):
                        for one in owned.saved(self._rank):
                            first = one.at - owned.start
                            yield kind_of(number, key), one, value[first : first + one.end - one.start]

    def check(self, saved: Sequence[SavedOptimizer]) -> None:
        """Refuse state that these optimizers cannot take over; nothing is changed.

        Raises:
            CheckpointError: naming the first difference.
        """
        if len(saved) != len(self._optimizers):
            raise CheckpointError(
                f"it holds {len(saved)} optimizers, {len(self._optimizers)} are to be loaded"
            )
        for number, one in enumerate(saved):
            self._check(number, one)

    def _check(self, number: int, saved: SavedOptimizer) -> None:
        kind = type(self._optimizers[number]).__name__
        if kind != saved.kind:
            raise CheckpointError(f"optimizer {number} is {kind}, it holds the state of {saved.kind}")
        flat = [one for group in self._owned[number] for one in group]
        own = {index: set(names) for index, names in _by_group(flat).items()}
        held: dict[int, set[str]] = {}
        for group in saved.groups:
            held.setdefault(group.number, set()).update(group.parameters)
        for index in sorted(own.keys() | held.keys()):
            names = own.get(index, set())
            if odd := sorted(names ^ held.get(index, set())):
                side = "only here" if odd[0] in names else "only in the checkpoint"
                raise CheckpointError(
                    f"optimizer {number}, group {index}: {len(odd)} names differ, first {odd[0]!r} {side}"
                )
        for index in range(len(self._owned[number])):
            for value in self._options(number, index, saved).values():
                _value(value)
        for owned in flat:
            shared = self._shared_state(number, owned, saved)
            for value in () if shared is None else shared.numbers.values():
                _value(value)

    def _options(self, number: int, index: int, saved: SavedOptimizer) -> dict[str, Any]:
        """The saved options of an optimizer's group here; its own where it holds nothing.

        Raises:
            CheckpointError: if it joins what had different ones.
        """
        names = {name for one in self._owned[number][index] for name in one.names}
        found = [group for group in saved.groups if names & set(group.parameters)]
        for other in found[1:]:
            if other.options != found[0].options:
                first, second = found[0].parameters[0], other.parameters[0]
                raise CheckpointError(
                    f"optimizer {number}: {first!r} and {second!r} share options here, but not in it"
                )
        return found[0].options if found else {}

    @staticmethod
    def _shared_state(number: int, owned: Owned, saved: SavedOptimizer) -> SavedState | None:
        """What all parameters of a master have; None for no state.

        Raises:
            CheckpointError: if they differ.
        """
        found = {name: saved.state.get(name) for name in owned.names}
        if not found:
            return None
        first, *others = found
        for other in others:
            if found[other] != found[first]:
                raise CheckpointError(
                    f"optimizer {number}: {first!r} and {other!r} share a master here, but not the state's "
                    "numbers in the checkpoint"
                )
        return found[first]

    def load(self, saved: Sequence[SavedOptimizer], parts: Parts) -> None:
        """Take over state that :meth:`check` let pass.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        for number, one in enumerate(saved):
            state: dict[int, dict[str, Any]] = {}
            flat = [owned for group in self._owned[number] for owned in group]
            for index, owned in enumerate(flat):
                shared = self._shared_state(number, owned, one)
                if shared is not None:
                    state[index] = {
                        key: self._values(parts, kind_of(number, key), owned) for key in shared.elements
                    } | {key: _value(value) for key, value in shared.numbers.items()}
            optimizer = self._optimizers[number]
            groups = optimizer.state_dict()["param_groups"]
            loaded = [
                {**group, **{key: _value(value) for key, value in self._options(number, index, one).items()}}
                for index, group in enumerate(groups)
            ]
            optimizer.load_state_dict({"state": state, "param_groups": loaded})
            masters = [master for group in optimizer.param_groups for master in group["params"]]
            for index, values in state.items():
                own = optimizer.state[masters[index]]
                for key, value in values.items():
                    if isinstance(value, Tensor) and own[key].dtype != value.dtype:
                        # torch gives all state the master's type, which may hold less, or another thing.
                        own[key] = value.to(own[key].device)

    def _values(self, parts: Parts, kind: str, owned: Owned) -> Tensor:
        """(n,) what the files hold for each element of a master; zeros for its padding."""
        found = {parts.dtype(kind, name) for name in owned.names}
        if len(found) != 1:
            raise CheckpointError(f"{kind} of {owned.names[0]!r} and others of its master: types differ")
        out = torch.zeros(owned.end - owned.start, dtype=DTYPES[found.pop()])
        for one in owned.held(self._rank):
            for offset, values in parts.read(kind, one.name, one.start, one.end):
                first = one.at - owned.start + offset
                out[first : first + len(values)] = values
        return out


def kind_of(number: int, key: str) -> str:
    """What the entries of state ``key`` of an optimizer are called."""
    return f"optimizer{number}.{key}"


def _by_group(owned: Iterable[Owned]) -> dict[int, list[str]]:
    """Names of parameters by the engine's group."""
    found: dict[int, list[str]] = {}
    for one in owned:
        if one.names:
            found.setdefault(one.group, []).extend(one.names)
    return found


def _by_element(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _plain(value: object, where: str) -> Any:
    """A number, option or tensor without dimensions as JSON."""
    if isinstance(value, Tensor):
        if value.dim() or value.dtype not in NAMES:
            raise CheckpointError(f"{where}: a tensor of {tuple(value.shape)} {value.dtype} is no number")
        return {NUMBER: [NAMES[value.dtype], to_json(value.item(), where)]}
    return to_json(value, where)


def _value(value: Any) -> Any:
    """What :func:`_plain` was given.

    Raises:
        CheckpointError: for what it never gives.
    """
    if isinstance(value, dict) and value.keys() == {NUMBER}:
        match value[NUMBER]:
            case [str(dtype), number] if dtype in DTYPES:
                with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                    return torch.tensor(from_json(number), dtype=DTYPES[dtype]).view(())
        raise CheckpointError(f"{str(value)[:60]!r} is no number of an optimizer")
    return from_json(value)
