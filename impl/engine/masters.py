"""This rank's fp32 masters and mean gradients, as an optimizer sees them; their global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.unit.unit import Unit

LARGEST_POWER: Final = 8  # of a norm: fp32 gradients to this power stay within fp64


class Masters:
    """Those of one sharded model on one rank."""

    def __init__(self, units: Sequence[Unit], wire: Wire) -> None:
        self._units, self._wire = units, wire
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

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """() fp64 global norm of the mean gradient: :meth:`impl.engine.engine.Zero.grad_norm`."""
        power, largest = float(norm_type), norm_type == math.inf
        if not (largest or 0 < power <= LARGEST_POWER):
            raise ZeroError(f"norm_type = {norm_type}: expected inf, or above 0 and at most {LARGEST_POWER}")
        add = torch.maximum if largest else torch.add  # both pass a NaN on

        def part_of(gradient: Tensor) -> Tensor:
            if largest:
                return gradient.abs().amax().double()
            wide = gradient.double()
            return (wide.square() if power == 2 else wide.abs().pow(power)).sum()

        device = self._wire.mesh.device
        sums: dict[torch.device, Tensor] = {}
        for unit in self._units:
            for gradient in unit.master_shard.own_gradients():
                part, place = part_of(gradient), gradient.device
                sums[place] = add(sums[place], part) if place in sums else part
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in sums.values():
            total = add(total, part.to(device))
        norm = torch.zeros_like(total)
        for part in self._wire.all_gather_small(total.view(1)).view(-1):  # NORM_BYTES of each rank
            norm = add(norm, part)
        if largest:
            return norm
        return norm.sqrt() if power == 2 else norm.pow(1 / power)

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
