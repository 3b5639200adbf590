"""Optimizer states in checkpoints: saved and restored by parameter name instead of by shard.

A master is the part of a shard that belongs to one optimizer group.  What an optimizer keeps for each
of its elements is cut into ranges of parameters; numbers (Adam's ``step``) belong to every parameter of
the master.  So another layout, whose masters join other parameters, can be given the state again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.checkpoint.atomic_files import CheckpointError
from impl.checkpoint.json_values import NUMBER, from_json, to_json
from impl.checkpoint.manifest import SavedGroup, SavedOptimizer, SavedState, check_names
from impl.checkpoint.resharding import Parts, Range, held_ranges, saved_ranges
from impl.checkpoint.tensor_bytes import DTYPES, NAMES
from impl.plan.shard_layout import UnitGeometry
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

    def only(self, ranges: Iterator[Range]) -> Iterator[Range]:
        """Those of its group."""
        return (one for one in ranges if one.slot.spec.group == self.group)


class SavedMasters:
    """The masters of one engine on one rank, in the optimizers that hold them, and nothing else.

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
        groups: dict[str, SavedGroup] = {}  # one that lies on two devices is two of the optimizer's
        for masters, group in zip(self._owned[number], self._optimizers[number].param_groups, strict=True):
            options = {
                key: _plain(value, f"{where}: option {key!r}")
                for key, value in group.items()
                if key != "params"
            }
            for own, names in _by_group(masters).items():
                empty = SavedGroup(number=own, parameters=[], options=options)
                groups.setdefault(json.dumps([own, options]), empty).parameters.extend(names)
        kind = type(self._optimizers[number]).__name__
        return SavedOptimizer(kind=kind, groups=list(groups.values()), state=state)

    def _states(self, number: int) -> Iterator[tuple[Owned, Mapping[str, Any]]]:
        """Each master with its state, in the order in which the optimizer counts them."""
        state = self._optimizers[number].state_dict()["state"]
        for index, owned in enumerate(self._flat(number)):
            yield owned, state.get(index, {})

    def _flat(self, number: int) -> list[Owned]:
        return [one for group in self._owned[number] for one in group]

    def elements(self) -> Iterator[tuple[str, Range, Tensor]]:
        """What this rank saves: (kind, range, (n,) values) of each range of each state by element."""
        for number in range(len(self._optimizers)):
            for owned, held in self._states(number):
                for key, value in held.items():
                    if _by_element(value):
                        for one in owned.only(saved_ranges(owned.geometry, self._rank)):
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
        own, held = _by_group(self._flat(number)), dict[int, list[str]]()
        for group in saved.groups:
            held.setdefault(group.number, []).extend(group.parameters)
        for index in sorted(own.keys() | held.keys()):
            what = f"parameters of optimizer {number}, group {index},"
            check_names(own.get(index, ()), held.get(index, ()), what)
        for index in range(len(self._owned[number])):
            self._options(number, index, saved)
        for owned in self._flat(number):
            self._shared_state(number, owned, saved)

    def _options(self, number: int, index: int, saved: SavedOptimizer) -> dict[str, Any]:
        """The saved options of a group here, which may not join what had different ones; none of none."""
        names = {name for one in self._owned[number][index] for name in one.names}
        found = [group for group in saved.groups if names & set(group.parameters)]
        for other in found[1:]:
            if other.options != found[0].options:
                first, second = found[0].parameters[0], other.parameters[0]
                raise CheckpointError(
                    f"optimizer {number}: {first!r} and {second!r} share options here, but not in it"
                )
        return {key: _value(value) for key, value in found[0].options.items()} if found else {}

    @staticmethod
    def _shared_state(number: int, owned: Owned, saved: SavedOptimizer) -> SavedState | None:
        """What all parameters of a master have, which must be equal; None for no state."""
        found = {name: saved.state.get(name) for name in owned.names}
        first = next(iter(found), "")
        for name, state in found.items():
            if state != found[first]:
                raise CheckpointError(
                    f"optimizer {number}: {first!r} and {name!r} share a master here, but not the state's "
                    "numbers in the checkpoint"
                )
        if (shared := found.get(first)) is None:
            return None
        return SavedState(
            numbers={key: _value(value) for key, value in shared.numbers.items()}, elements=shared.elements
        )

    def load(self, saved: Sequence[SavedOptimizer], parts: Parts) -> None:
        """Take over state that :meth:`check` let pass.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        for number, one in enumerate(saved):
            state = {
                index: {
                    **{key: self._values(parts, kind_of(number, key), owned) for key in shared.elements},
                    **shared.numbers,
                }
                for index, owned in enumerate(self._flat(number))
                if (shared := self._shared_state(number, owned, one)) is not None
            }
            optimizer = self._optimizers[number]
            groups = optimizer.state_dict()["param_groups"]
            for index, group in enumerate(groups):
                group.update(self._options(number, index, one))
            optimizer.load_state_dict({"state": state, "param_groups": groups})
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
        for one in owned.only(held_ranges(owned.geometry, self._rank)):
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
    """What :func:`_plain` was given; what that never gives is refused."""
    if isinstance(value, dict) and value.keys() == {NUMBER}:
        match value[NUMBER]:
            case [str(dtype), number] if dtype in DTYPES:
                with suppress(TypeError, ValueError, RuntimeError, OverflowError):
                    return torch.tensor(from_json(number), dtype=DTYPES[dtype]).view(())
        raise CheckpointError(f"{str(value)[:60]!r} is no number of an optimizer")
    return from_json(value)
