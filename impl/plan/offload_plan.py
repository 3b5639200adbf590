"""Which units' states lie in host memory, and what is copied for it between host and device.

Pure: no torch.  Whole units are offloaded, in model order, until the policy's share is reached, so that a
unit's shard stays one contiguous tensor that one place steps, encodes and sends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from impl.plan.policy import Offload, Policy
from impl.plan.shard_layout import UnitGeometry

Direction = Literal["to_host", "to_device"]
Copied = Literal["weights", "secondary", "gradients", "state"]


class CopyKey(NamedTuple):
    """What was copied between host and device, which way, and of which unit."""

    direction: Direction
    purpose: Copied
    unit: str


@dataclass(frozen=True, slots=True)
class Placement:
    """What of one unit lies in host memory."""

    # This rank's shard itself: the fp32 master with its mean gradient and optimizer state, or the frozen
    # shard, as fp32 or as codes.
    shard: bool = False
    frames: bool = False  # what is sent of the weights: the encoded shard, and hpZ's secondary frames

    @property
    def crosses(self) -> bool:
        """Whether a gather brings bytes from the host."""
        return self.shard or self.frames


ON_DEVICE = Placement()


def placements_of(offload: Offload, units: Sequence[UnitGeometry]) -> list[Placement]:
    """Where every unit's states lie; ``units`` are in model order, shares are of padded elements.

    Of a trained unit whose master stays on the device there is no frame to offload, since it is encoded from
    the master on its way out; hpZ's secondary frames of it go to the host all the same.
    """
    stepped = _chosen([unit.padded if unit.trainable else 0 for unit in units], offload.optimizer)
    framed = _chosen([unit.padded for unit in units], offload.weights)
    return [
        Placement(shard=index in (stepped if unit.trainable else framed), frames=index in framed)
        for index, unit in enumerate(units)
    ]


def realised(policy: Policy, placements: Iterable[Placement], units: Sequence[UnitGeometry]) -> Offload:
    """The shares of elements of which something lies in host memory.

    That is at least what was asked for and less than a unit more, but for weights of which there is nothing
    to offload: of trained units whose master stays on the device, and of which hpZ keeps no frames.
    """
    trained = stepped = framed = 0
    for placement, unit in zip(placements, units, strict=True):
        own = policy.of(unit)
        trained += unit.padded * unit.trainable
        stepped += unit.padded * (placement.shard and unit.trainable)
        framed += unit.padded * (placement.frames and bool(placement.shard or own.secondary))
    held = sum(unit.padded for unit in units)
    return Offload(optimizer=stepped / max(trained, 1), weights=framed / max(held, 1))


def _chosen(sizes: Sequence[int], share: float) -> frozenset[int]:
    """The first units, by index, that hold at least ``share`` of the sum of ``sizes``; none of no size."""
    wanted = share * sum(sizes)
    before = itertools.accumulate(sizes, initial=0)
    return frozenset(
        index for index, (size, held) in enumerate(zip(sizes, before, strict=False)) if size and held < wanted
    )
