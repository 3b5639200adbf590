"""This rank's fp32 masters and mean gradients, as an optimizer sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from impl.errors import ZeroError
from impl.unit.unit import Unit


class Masters:
    """Those of one sharded model on one rank."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        # By id(): those that no optimizer has stepped since their gradient came.
        self._unused: set[int] = set()

    def __iter__(self) -> Iterator[Tensor]:
        return (master for unit in self._units for _, master in unit.master_shard.masters)

    def groups(self, options: Mapping[int, Mapping[str, Any]] | None) -> list[dict[str, Any]]:
        """For an optimizer: :meth:`impl.engine.engine.Zero.param_groups`."""
        given: Any = {} if options is None else options
        if not isinstance(given, Mapping) or not all(isinstance(one, Mapping) for one in given.values()):
            raise ZeroError(
                "param_groups(options=...): expected a table of each group's options by its number, as "
                '{0: {"lr": 1e-3}}'
            )
        numbers = sorted({slot.spec.group for unit in self._units for slot in unit.geometry.slots})
        groups = []
        for number in numbers:
            of_device: dict[torch.device, list[Tensor]] = {}
            for unit in self._units:
                for group, master in unit.master_shard.masters:
                    if group == number:
                        of_device.setdefault(master.device, []).append(master)
            groups += [
                {"params": masters, **given.get(number, {})} for masters in of_device.values() or ([],)
            ]
        return groups

    # Gradients

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients, where they are there."""
        factors: dict[torch.device, float | Tensor] = {}  # a tensor is read from its device once
        for master in self:
            if master.grad is None:
                continue
            device = master.grad.device
            if device not in factors:
                factors[device] = factor.to(device) if isinstance(factor, Tensor) else factor
            master.grad.mul_(factors[device])

    def zero_gradients(self, *, set_to_none: bool) -> None:
        """Take them away, or make them 0 where they are there."""
        for master in self:
            if set_to_none:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()

    # Steps

    def check_complete(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse optimizers that do not hold all masters with gradients.

        Raises:
            ZeroError: counting those that are missing.
        """
        held = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        given = [master for master in self if master.grad is not None]
        missing = sum(id(master) not in held for master in given)
        if missing:
            raise ZeroError(
                f"step() of optimizers that lack {missing} of {len(given)} masters with gradients: "
                "with a loss scale, give all optimizers to one step()"
            )

    def arrived(self) -> None:
        """A backward pass has brought all of them gradients."""
        self._unused.update(map(id, self))

    def stepped(self, masters: Iterable[Tensor]) -> None:
        """An optimizer that holds ``masters``, among other tensors, has stepped."""
        self._unused.difference_update(map(id, masters))

    @property
    def unused_gradients(self) -> int:
        """Those whose gradient waits for its optimizer's step."""
        return sum(master.grad is not None and id(master) in self._unused for master in self)
