"""Global norm of the mean gradient over all ranks, from each rank's shard, and the factor that clips."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.unit.unit import Unit

LARGEST_POWER: Final = 8  # of a norm: fp32 gradients to this power stay within fp64
_LEAST: Final = 1e-6  # beside the norm, which may be 0; as torch's own clipping has it


def gradient_norm(units: Sequence[Unit], wire: Wire, norm_type: float = 2.0) -> Tensor:
    """() fp64 global norm of the mean gradient: :meth:`impl.engine.engine.Zero.grad_norm`.

    Raises:
        ZeroError: ``norm_type`` is neither inf nor in (0, 8].
    """
    power, largest = float(norm_type), norm_type == math.inf
    if not (largest or 0 < power <= LARGEST_POWER):
        raise ZeroError(f"norm_type = {norm_type}: expected inf, or above 0 and at most {LARGEST_POWER}")
    add = torch.maximum if largest else torch.add  # both pass a NaN on

    def part_of(gradient: Tensor) -> Tensor:
        if largest:
            return gradient.abs().amax().double()
        wide = gradient.double()
        return (wide.square() if power == 2 else wide.abs().pow(power)).sum()

    device = wire.mesh.device
    sums: dict[torch.device, Tensor] = {}
    for unit in units:
        for gradient in unit.master_shard.own_gradients():
            part, place = part_of(gradient), gradient.device
            sums[place] = add(sums[place], part) if place in sums else part
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in sums.values():
        total = add(total, part.to(device))
    norm = torch.zeros_like(total)
    for part in wire.all_gather_small(total.view(1)).view(-1):  # NORM_BYTES of each rank
        norm = add(norm, part)
    if largest:
        return norm
    return norm.sqrt() if power == 2 else norm.pow(1 / power)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """() what gradients of global ``norm`` are multiplied by so that it is at most ``max_norm``.

    NaN of a norm that is not finite, so that all gradients say so.
    """
    factor = (max_norm / (norm + _LEAST)).clamp(max=1.0)
    return torch.where(norm.isfinite(), factor, math.nan)
