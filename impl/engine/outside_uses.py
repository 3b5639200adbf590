"""Uses of parameters outside of the modules that hold them: gathered where they are used."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from impl.errors import ZeroError
from impl.pytree import memory_of, tensors_in
from impl.unit.context import Passes
from impl.unit.unit import Unit


def recomputing() -> bool:
    """Whether this runs inside a backward pass: a block is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # there is no public one


class OutsideUses:
    """Those of one sharded model on one rank.

    Attributes:
        gathered: of the units that a module uses beside its own, what calls under way have gathered.
    """

    def __init__(self, units: Sequence[Unit], passes: Passes) -> None:
        self._units, self._passes = units, passes
        self._external: dict[nn.Module, list[Unit]] = {}
        self.gathered: list[list[Unit]] = []
        for unit in units:
            unit.used_outside = _OutsideUse(self, unit)

    def register(self, module: nn.Module, unit: Unit) -> None:
        """Gather ``unit`` ahead of each forward pass of ``module``, and reshard it after."""
        if module not in self._external:
            self._external[module] = []
            module.register_forward_pre_hook(self._pre_forward)  # after the engine's own
            module.register_forward_hook(self._post_forward, always_call=True)
        if unit not in self._external[module]:
            self._external[module].append(unit)

    def _pre_forward(self, module: nn.Module, _: Any) -> None:
        # While a block is computed again, uses bring what they need.
        fresh = [] if recomputing() else [unit for unit in self._external[module] if not unit.in_use]
        self.gathered.append(fresh)
        for unit in fresh:
            self._all_gather(unit)

    def _post_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        addresses = {memory_of(tensor) for tensor in tensors_in(output)}
        kept = self._passes.schedule.kept if torch.is_grad_enabled() else ()
        for unit in self.gathered.pop() if self.gathered else ():  # none if an earlier hook failed
            if unit.flat.bounds[0] not in addresses:
                self._passes.escaped.discard(unit.index)
                if unit.index not in kept:
                    unit.release()

    def use(self, unit: Unit, name: str) -> None:
        """A parameter is used while its unit is not shown: in a pass it is gathered, else refused.

        Raises:
            ZeroError: outside of passes, naming the parameter.
        """
        if recomputing():
            unit.all_gather("backward")
        elif self._passes.running:
            self._all_gather(unit)
        else:
            raise ZeroError(
                f"parameter {name!r} is used outside of a forward pass, where its values are sharded: read "
                "or change it under GatheredParameters; gradients are the masters' "
                "(Zero.clip_grad_norm_(), impl.parameters.access)"
            )

    def _all_gather(self, unit: Unit) -> None:
        """Gather a unit that is used outside of its module; it stays until the forward pass ends."""
        self._passes.escaped.add(unit.index)
        unit.all_gather("forward" if torch.is_grad_enabled() else "evaluate")


class _OutsideUse:
    """Tells the engine that a parameter of ``unit`` is used."""

    def __init__(self, uses: OutsideUses, unit: Unit) -> None:
        self._uses, self._unit = weakref.ref(uses), weakref.ref(unit)

    def __call__(self, name: str) -> None:
        uses, unit = self._uses(), self._unit()
        if uses is None or unit is None:
            raise ZeroError(f"parameter {name!r} of a sharded model whose engine is gone")
        uses.use(unit, name)
