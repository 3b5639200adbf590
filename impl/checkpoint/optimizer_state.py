"""Optimizer states in checkpoints: saved and restored by parameter name instead of by shard.

What an optimizer keeps for each element of a master is cut into ranges of parameters; options and numbers
(Adam's ``step``) belong to every parameter of the master.  So another layout, whose masters join other
parameters, can be given the state again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from impl.checkpoint.commit import CheckpointError
from impl.checkpoint.json_values import from_json, to_json
from impl.checkpoint.manifest import check_names
from impl.checkpoint.resharding import Parts, Range, ranges
from impl.unit.unit import Unit


class Owned(NamedTuple):
    """Of a master: its parameters with elements on any rank, what it holds here, and what of it is saved."""

    names: list[str]
    held: list[Range]
    saved: list[Range]


class SavedMasters:
    """The masters of one engine on one rank, which the optimizers must hold once each, and nothing else."""

    def __init__(self, units: Sequence[Unit], rank: int, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._owned: dict[int, Owned] = {}
        for unit in units:
            geometry = unit.geometry
            spans = geometry.spans(rank) if geometry.trainable else ()
            for (_, master), (group, *span) in zip(unit.master_shard.masters, spans, strict=True):
                specs = [slot.spec for slot in geometry.slots if slot.spec.group == group and slot.spec.numel]
                held, saved = ([*ranges(geometry, rank, span, saved=part)] for part in (False, True))
                self._owned[id(master)] = Owned([one.name for one in specs], held, saved)
        free = set(self._owned)
        for number, optimizer in enumerate(optimizers):
            for one in map(id, _masters(optimizer)):
                if one not in free:
                    why = "twice a master of this" if one in self._owned else "what is no master of this"
                    raise CheckpointError(
                        f"optimizer {number} holds {why} engine: build it of Zero.param_groups()"
                    )
                free.remove(one)

    def _names(self, masters: Sequence[Tensor]) -> list[str]:
        return [name for master in masters for name in self._owned[id(master)].names]

    def described(self) -> list[dict[str, Any]]:
        """What the manifest says of optimizers, the same on all ranks; refuses what JSON has not."""
        said = []
        for number, optimizer in enumerate(self._optimizers):
            parameters: dict[str, dict[str, Any]] = {}
            for group in optimizer.param_groups:
                options = {key: value for key, value in group.items() if key != "params"}
                written = to_json(options, f"optimizer {number}: options")
                for master in group["params"]:
                    state = optimizer.state.get(master)
                    one = {"options": written, "numbers": _numbers(state, master, number) if state else None}
                    parameters |= dict.fromkeys(self._owned[id(master)].names, one)
            said.append({"kind": type(optimizer).__name__, "parameters": parameters})
        return said

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank saves: each range of each state by element, (n,)."""
        for number, optimizer in enumerate(self._optimizers):
            for master in _masters(optimizer):
                for key, value in optimizer.state.get(master, {}).items():
                    for one in self._owned[id(master)].saved if _by_element(value) else ():
                        yield one.key(f"optimizer{number}.{key}"), value[one.here]

    def check(self, saved: Sequence[dict[str, Any]]) -> None:
        """Refuse state that these optimizers cannot take over; nothing is changed."""
        if len(saved) != (here := len(self._optimizers)):
            raise CheckpointError(f"it holds {len(saved)} optimizers, {here} are to be loaded")
        for number, (optimizer, one) in enumerate(zip(self._optimizers, saved, strict=True)):
            kind, held = type(optimizer).__name__, one["parameters"]
            if kind != one["kind"]:
                raise CheckpointError(f"optimizer {number} is {kind}, it holds the state of {one['kind']}")
            check_names(self._names(_masters(optimizer)), held, f"parameters of optimizer {number}")
            for group in optimizer.param_groups:
                self._shared(held, group["params"], "options")
                for master in group["params"]:
                    self._shared(held, [master], "numbers")

    def _shared(self, held: dict[str, Any], masters: Sequence[Tensor], what: str) -> Any:
        """The saved options, or numbers, that all parameters of some masters must share; None of none."""
        names = self._names(masters)
        for name in names:
            if held[name][what] != held[names[0]][what]:
                raise CheckpointError(f"{names[0]!r} and {name!r} share {what} here, but not in it")
        return from_json(held[names[0]][what]) if names else None

    def load(self, saved: Sequence[dict[str, Any]], parts: Parts) -> None:
        """Take over state that :meth:`check` let pass."""
        for number, (optimizer, one) in enumerate(zip(self._optimizers, saved, strict=True)):
            state: dict[int, dict[str, Any]] = {}
            masters, prefix = _masters(optimizer), f"optimizer{number}."
            for index, master in enumerate(masters):
                if (numbers := self._shared(one["parameters"], [master], "numbers")) is not None:
                    names, held, _ = self._owned[id(master)]
                    state[index] = numbers
                    for kind in sorted(one for one in parts.ranges[names[0]] if one.startswith(prefix)):
                        dtype = parts.read(kind, names[0], 0, 0).dtype
                        empty = torch.zeros(master.numel(), dtype=dtype)  # of its padding it stays so
                        state[index][kind.removeprefix(prefix)] = parts.fill(empty, kind, held)
            groups = optimizer.state_dict()["param_groups"]
            for group, own in zip(groups, optimizer.param_groups, strict=True):
                group.update(self._shared(one["parameters"], own["params"], "options") or {})
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            for index, values in state.items():
                own = optimizer.state[masters[index]]
                for key, value in values.items():
                    if isinstance(value, Tensor) and own[key].dtype != value.dtype:
                        # torch gives all state the master's type, which may hold less, or another thing.
                        own[key] = value.to(own[key].device)


def _masters(optimizer: Optimizer) -> list[Tensor]:
    return [master for group in optimizer.param_groups for master in group["params"]]


def _numbers(state: dict[str, Any], master: Tensor, number: int) -> dict[str, Any]:
    """What ``state`` of a master has that is not of each element, in JSON."""
    for key, value in state.items():
        if _by_element(value) and value.numel() != master.numel():
            raise CheckpointError(
                f"optimizer {number}: state {key!r} has {value.numel()} elements for a master of "
                f"{master.numel()}: it is not of each element, and cannot be cut"
            )
    plain = {key: value for key, value in state.items() if not _by_element(value)}
    return {key: to_json(value, f"optimizer {number}: {key!r}") for key, value in plain.items()}


def _by_element(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
