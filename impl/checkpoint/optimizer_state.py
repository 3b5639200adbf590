"""Saves optimizer states by parameter name instead of by shard, so that a run with another sharding can load them.

An optimizer updates *masters*.  A master is an fp32 tensor: the part of a rank's shard that belongs to one optimizer
group.  It can hold elements of several parameters, and a run with another layout has other masters.  Therefore an
optimizer's state is saved as follows:

- State with a value for each element of a master, such as Adam's ``exp_avg``, is cut where one parameter ends and the
  next begins.  Each piece is saved under the name of its parameter.
- A group's options, and a master's numbers such as Adam's ``step``, are saved once for each parameter.
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
    """Lists the parameters in one master, and the parts of these parameters that this rank saves.

    A master is an fp32 tensor that an optimizer steps: a part of the rank's shard.
    """

    names: list[str]  # the parameters with elements in this master on any rank
    ranges: list[Range]  # the parts of the parameters in this rank's master
    saved: list[Range]  # the parts that this rank saves; other ranks save the rest


class SavedMasters:
    """Saves and loads the states of one engine's optimizers, on one rank.

    The optimizers step the engine's masters: fp32 tensors, each of which is a part of the rank's shard of a unit.

    Args:
        units: the engine's units.
        rank: this rank.
        optimizers: the optimizers, which must hold masters of this engine.
        copy: the prefix of the names in this rank's file, or None:

            - With local steps (DiLoCo), each state group (ranks that share one copy of all states) saves all elements
              under its own prefix.  The prefix is empty for the first group and ``group1:`` for the second.
            - Without local steps, ``copy`` is None.  Names have no prefix, and all ranks together save each element
              once.

    Raises:
        CheckpointError: if an optimizer holds a tensor that is not a master of this engine, or if two optimizers hold
            the same master.
    """

    def __init__(
        self, units: Sequence[Unit], rank: int, optimizers: Sequence[Optimizer], copy: str | None = None
    ) -> None:
        self._optimizers, self._copy = optimizers, copy or ""
        self._ranges: dict[int, MasterRanges] = {}
        for unit in units:
            geometry = unit.geometry
            spans = geometry.spans(rank) if geometry.trainable else ()
            for (_, master), (group, *span) in zip(unit.master_shard.masters, spans, strict=True):
                specs = [slot.spec for slot in geometry.slots if slot.spec.group == group and slot.spec.numel]
                local, saved = ([*ranges(geometry, rank, span, saved=part)] for part in (False, copy is None))
                self._ranges[id(master)] = MasterRanges([spec.name for spec in specs], local, saved)
        unclaimed = set(self._ranges)
        for number, optimizer in enumerate(optimizers):
            for key in map(id, _masters(optimizer)):
                if key not in unclaimed:
                    why = "a master of this engine that is already held by an optimizer"
                    if key not in self._ranges:
                        why = "a tensor that is not a master of this engine"
                    raise CheckpointError(
                        f"optimizer {number} holds {why}: build each optimizer from masters of its own, which "
                        "Zero.param_groups() returns, and pass each optimizer once"
                    )
                unclaimed.remove(key)

    def _names(self, masters: Sequence[Tensor]) -> list[str]:
        return [name for master in masters for name in self._ranges[id(master)].names]

    def manifest_entries(self) -> list[dict[str, Any]]:
        """Returns, for each optimizer, the dict that the checkpoint's manifest stores; it is equal on all ranks.

        The dict has two keys.  ``kind`` is the name of the optimizer's class.  ``parameters`` has, for the name of each
        parameter, its options (such as the learning rate) and its numbers (such as Adam's ``step``).

        Raises CheckpointError: for options or states that cannot be saved.
        """
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
        """Yield (name, values (n,)) for the optimizer states that this rank saves.

        A master (an fp32 tensor that an optimizer steps) may hold parts of several parameters.  There is one pair for
        each part, and for each state with one value for each element of the master, such as Adam's ``exp_avg``.  Names
        have the form of :meth:`Range.key`.
        """
        for number, optimizer in enumerate(self._optimizers):
            for master in _masters(optimizer):
                for key, value in optimizer.state.get(master, {}).items():
                    for part in self._ranges[id(master)].saved if _by_element(value) else ():
                        yield part.key(f"{self._copy}optimizer{number}.{key}"), value[part.place]

    def check(self, saved: Sequence[dict[str, Any]]) -> None:
        """Raise CheckpointError if these optimizers cannot load ``saved``, the manifest's entries of optimizers.

        The number of optimizers, their classes and their parameters must be the same as in ``saved``.  If parameters
        share an optimizer group here, their saved options must be equal.  If parameters share a master, their saved
        numbers, such as Adam's ``step``, must be equal.  The optimizers are not changed.
        """
        if len(saved) != (count := len(self._optimizers)):
            raise CheckpointError(
                f"the number of saved optimizers is {len(saved)}, but load() was given {count}: pass as many "
                "optimizers as were saved, or none"
            )
        for number, (optimizer, entry) in enumerate(zip(self._optimizers, saved, strict=True)):
            kind, parameters = type(optimizer).__name__, entry["parameters"]
            if kind != entry["kind"]:
                raise CheckpointError(
                    f"has the state of {entry['kind']} for optimizer {number}, which is {kind}: pass an optimizer of "
                    "the saved class"
                )
            check_names(self._names(_masters(optimizer)), parameters, f"parameters of optimizer {number}")
            for group in optimizer.param_groups:
                self._shared(parameters, group["params"], "options")
                for master in group["params"]:
                    self._shared(parameters, [master], "numbers")

    def _shared(self, parameters: dict[str, Any], masters: Sequence[Tensor], key: str) -> Any:
        """Returns the options, or the numbers, with which all parameters of ``masters`` were saved.

        Args:
            parameters: a part of the manifest: for the name of each parameter, a dict with its options and numbers.
            masters: the masters of one optimizer group, or one master.
            key: ``options`` for options such as the learning rate, ``numbers`` for numbers such as Adam's ``step``.

        Returns:
            The value, converted from JSON's types.  None if the masters hold no parameters.

        Raises:
            CheckpointError: if two parameters of ``masters`` were saved with different values.
        """
        names = self._names(masters)
        for name in names:
            if parameters[name][key] != parameters[names[0]][key]:
                kind = "options (such as lr)" if key == "options" else "numbers (such as step)"
                raise CheckpointError(
                    f"has different {kind} for parameters {names[0]!r} and {name!r}, which are in one optimizer group "
                    "here: pass a group_of= to shard() that puts the two into different groups"
                )
        return from_json(parameters[names[0]][key]) if names else None

    def load(self, saved: Sequence[dict[str, Any]], parts: Parts, copy: str) -> None:
        """Load the states of the optimizers.

        Args:
            saved: the manifest's entries of the optimizers, which must have passed :meth:`check`.  They have the
                options, and numbers such as Adam's ``step``.
            parts: the files, which have the states with a value for each element, such as Adam's ``exp_avg``.
            copy: the prefix of the names under which the values were saved.  It is empty if the saved run had no local
                steps.  If the run had local steps, each state group has saved its own values: the prefix of the first
                group is empty, and that of the second group is ``group1:``.
        """
        for number, (optimizer, entry) in enumerate(zip(self._optimizers, saved, strict=True)):
            state: dict[int, dict[str, Any]] = {}
            masters, prefix = _masters(optimizer), f"{copy}optimizer{number}."
            for index, master in enumerate(masters):
                if (numbers := self._shared(entry["parameters"], [master], "numbers")) is not None:
                    names, local, _ = self._ranges[id(master)]
                    state[index] = numbers
                    for kind in sorted(key for key in parts.ranges[names[0]] if key.startswith(prefix)):
                        dtype = parts.read(kind, names[0], 0, 0).dtype
                        empty = torch.zeros(master.numel(), dtype=dtype)  # the padding stays 0
                        state[index][kind.removeprefix(prefix)] = parts.fill(empty, kind, local)
            groups = optimizer.state_dict()["param_groups"]
            for options, group in zip(groups, optimizer.param_groups, strict=True):
                options.update(self._shared(entry["parameters"], group["params"], "options") or {})
            optimizer.load_state_dict({"state": state, "param_groups": groups})
            for index, values in state.items():
                loaded = optimizer.state[masters[index]]
                for key, value in values.items():
                    if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                        # torch has cast the state to the master's type, which may have lost bits.
                        loaded[key] = value.to(loaded[key].device)


def _masters(optimizer: Optimizer) -> list[Tensor]:
    return [master for group in optimizer.param_groups for master in group["params"]]


def _numbers(state: dict[str, Any], master: Tensor, number: int) -> dict[str, Any]:
    """Returns the entries of a master's optimizer state that are not tensors with dimensions, such as Adam's ``step``.

    The values are converted to JSON's types.  ``number`` is the number of the optimizer, for messages.

    Raises CheckpointError: if a tensor with dimensions has another number of elements than the master, or if
    :func:`to_json` cannot convert a value.
    """
    for key, value in state.items():
        if _by_element(value) and value.numel() != master.numel():
            raise CheckpointError(
                f"optimizer {number}: state {key!r} has {value.numel()} elements for a master of "
                f"{master.numel()} elements, and cannot be saved: expected a number, or a tensor with one "
                "value for each element of the master"
            )
    plain = {key: value for key, value in state.items() if not _by_element(value)}
    return {key: to_json(value, f"optimizer {number}: {key!r}") for key, value in plain.items()}


def _by_element(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
