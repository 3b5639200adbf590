"""Optimizer states in checkpoints: saved and restored by parameter name instead of by shard.

An optimizer's state by element of a master is cut into ranges of parameters; options and numbers (Adam's
``step``) are saved for every parameter of the master.  So another layout, whose masters join other
parameters, can load the state.
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


class MasterRanges(NamedTuple):
    """A master's parameters with elements on any rank, its ranges on this rank, and those that it saves."""

    names: list[str]
    ranges: list[Range]
    saved: list[Range]


class SavedMasters:
    """The masters of one engine on one rank, which the optimizers must hold once each, and nothing else."""

    def __init__(self, units: Sequence[Unit], rank: int, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._ranges: dict[int, MasterRanges] = {}
        for unit in units:
            geometry = unit.geometry
            spans = geometry.spans(rank) if geometry.trainable else ()
            for (_, master), (group, *span) in zip(unit.master_shard.masters, spans, strict=True):
                specs = [slot.spec for slot in geometry.slots if slot.spec.group == group and slot.spec.numel]
                local, saved = ([*ranges(geometry, rank, span, saved=part)] for part in (False, True))
                self._ranges[id(master)] = MasterRanges([spec.name for spec in specs], local, saved)
        unclaimed = set(self._ranges)
        for number, optimizer in enumerate(optimizers):
            for key in map(id, _masters(optimizer)):
                if key not in unclaimed:
                    why = "twice a master of this" if key in self._ranges else "what is no master of this"
                    raise CheckpointError(
                        f"optimizer {number} holds {why} engine: build it of Zero.param_groups()"
                    )
                unclaimed.remove(key)

    def _names(self, masters: Sequence[Tensor]) -> list[str]:
        return [name for master in masters for name in self._ranges[id(master)].names]

    def manifest_entries(self) -> list[dict[str, Any]]:
        """The manifest's entries of the optimizers, equal on all ranks; refuses values that JSON lacks."""
        entries = []
        for number, optimizer in enumerate(self._optimizers):
            parameters: dict[str, dict[str, Any]] = {}
            for group in optimizer.param_groups:
                plain = {key: value for key, value in group.items() if key != "params"}
                options = to_json(plain, f"optimizer {number}: options")
                for master in group["params"]:
                    state = optimizer.state.get(master)
                    numbers = _numbers(state, master, number) if state else None
                    entry = {"options": options, "numbers": numbers}
                    parameters |= dict.fromkeys(self._ranges[id(master)].names, entry)
            entries.append({"kind": type(optimizer).__name__, "parameters": parameters})
        return entries

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's part of the state by element, as ranges (n,) by name."""
        for number, optimizer in enumerate(self._optimizers):
            for master in _masters(optimizer):
                for key, value in optimizer.state.get(master, {}).items():
                    for part in self._ranges[id(master)].saved if _by_element(value) else ():
                        yield part.key(f"optimizer{number}.{key}"), value[part.place]

    def check(self, saved: Sequence[dict[str, Any]]) -> None:
        """Refuse a state that these optimizers cannot load; changes nothing."""
        if len(saved) != (count := len(self._optimizers)):
            raise CheckpointError(f"it holds {len(saved)} optimizers, {count} are to be loaded")
        for number, (optimizer, entry) in enumerate(zip(self._optimizers, saved, strict=True)):
            kind, parameters = type(optimizer).__name__, entry["parameters"]
            if kind != entry["kind"]:
                raise CheckpointError(f"optimizer {number} is {kind}, it holds the state of {entry['kind']}")
            check_names(self._names(_masters(optimizer)), parameters, f"parameters of optimizer {number}")
            for group in optimizer.param_groups:
                self._shared(parameters, group["params"], "options")
                for master in group["params"]:
                    self._shared(parameters, [master], "numbers")

    def _shared(self, parameters: dict[str, Any], masters: Sequence[Tensor], key: str) -> Any:
        """The saved ``options`` or ``numbers``, which ``masters`` must share; None without parameters."""
        names = self._names(masters)
        for name in names:
            if parameters[name][key] != parameters[names[0]][key]:
                raise CheckpointError(f"{names[0]!r} and {name!r} share {key} here, but not in it")
        return from_json(parameters[names[0]][key]) if names else None

    def load(self, saved: Sequence[dict[str, Any]], parts: Parts) -> None:
        """Load a state that passed :meth:`check`."""
        for number, (optimizer, entry) in enumerate(zip(self._optimizers, saved, strict=True)):
            state: dict[int, dict[str, Any]] = {}
            masters, prefix = _masters(optimizer), f"optimizer{number}."
            for index, master in enumerate(masters):
                if (numbers := self._shared(entry["parameters"], [master], "numbers")) is not None:
                    names, local, _ = self._ranges[id(master)]
                    state[index] = numbers
                    for kind in sorted(key for key in parts.ranges[names[0]] if key.startswith(prefix)):
                        dtype = parts.read(kind, names[0], 0, 0).dtype
                        empty = torch.zeros(master.numel(), dtype=dtype)  # as padding stays
                        state[index][kind.removeprefix(prefix)] = parts.fill(empty, kind, local)
            groups = optimizer.state_dict()["param_groups"]
            for options, group in zip(groups, optimizer.param_groups, strict=True):
                options.update(self._shared(entry["parameters"], group["params"], "options") or {})
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            for index, values in state.items():
                loaded = optimizer.state[masters[index]]
                for key, value in values.items():
                    if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                        # torch casts all state to the master's type, which may lose bits.
                        loaded[key] = value.to(loaded[key].device)


def _masters(optimizer: Optimizer) -> list[Tensor]:
    return [master for group in optimizer.param_groups for master in group["params"]]


def _numbers(state: dict[str, Any], master: Tensor, number: int) -> dict[str, Any]:
    """The state of a master that is not by element, in JSON."""
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
