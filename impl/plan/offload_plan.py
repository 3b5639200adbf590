"""Which units' states lie in host memory, and what is copied for it between host and device.

Pure: no torch.  Whole units are offloaded, in model order, until the policy's share is reached, so that a
unit's shard stays one contiguous tensor that one place steps, encodes and sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from impl.plan.geometry import UnitGeometry
from impl.plan.policy import Offload, Policy

Direction = Literal["to_host", "to_device"]
Copied = Literal["weights", "secondary", "gradients", "state"]


class CopyKey(NamedTuple):
    """What was copied between host and device, which way, and of which unit."""

    direction: Direction
    purpose: Copied
    unit: str


@dataclass(frozen=True, slots=True)
class Placement:
    """What of one unit lies in host memory.

    Attributes:
        shard: this rank's shard itself: the fp32 master with its mean gradient and optimizer state, or the
            frozen shard, as fp32 or as codes.
        frames: what is sent of the weights: the encoded shard, and hpZ's secondary frames.
    """

    shard: bool = False
    frames: bool = False

    @property
    def crosses(self) -> bool:
        """Whether a gather brings bytes from the host."""
        return self.shard or self.frames


ON_DEVICE = Placement()


def placements_of(offload: Offload, units: Sequence[UnitGeometry]) -> list[Placement]:
    """The tier of every unit.

    Of a trained unit whose master stays on the device there is no frame to offload, since it is encoded from
    the master on its way out; hpZ's secondary frames of it go to the host all the same.

    Args:
        offload: the shares, of padded elements: of trained units, and of all.
        units: in model order.
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
    pairs = list(zip(placements, units, strict=True))
    trained = sum(unit.padded for unit in units if unit.trainable)
    stepped = sum(unit.padded for placement, unit in pairs if placement.shard and unit.trainable)
    framed = sum(
        unit.padded
        for placement, unit in pairs
        if placement.frames
        and (
            placement.shard or policy.of_unit(trainable=unit.trainable, persistent=unit.persistent).secondary
        )
    )
    return Offload(
        optimizer=stepped / max(trained, 1), weights=framed / max(sum(unit.padded for unit in units), 1)
    )


def _chosen(sizes: Sequence[int], share: float) -> frozenset[int]:
    """The first units, by index, that hold at least ``share`` of the sum of ``sizes``; none of no size."""
    wanted, held = share * sum(sizes), 0
    chosen: set[int] = set()
    for index, size in enumerate(sizes):
        if held >= wanted:
            break
        if size:
            chosen.add(index)
            held += size
    return frozenset(chosen)
