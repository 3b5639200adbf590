"""Ranges, the unit of saving: which elements of which parameters a shard holds, and a rank saves.

Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from impl.plan.geometry import Slot, UnitGeometry


class Range(NamedTuple):
    """Elements [start, end) of a parameter, which begin at element ``at`` of a shard."""

    slot: Slot
    start: int
    end: int
    at: int

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.slot.spec.name


def _ranges(geometry: UnitGeometry, low: int, high: int, origin: int) -> Iterator[Range]:
    """What elements [low, high) of a unit, whose shard begins at ``origin``, hold; padding is nobody's."""
    for slot in geometry.slots:
        begin, end = max(slot.offset, low), min(slot.end, high)
        if begin < end:
            yield Range(slot, begin - slot.offset, end - slot.offset, begin - origin)


def held_ranges(geometry: UnitGeometry, rank: int) -> Iterator[Range]:
    """What ``rank``'s shard holds."""
    low, high = geometry.bounds(rank)
    return _ranges(geometry, low, high, low)


def saved_ranges(geometry: UnitGeometry, rank: int) -> Iterator[Range]:
    """What ``rank`` saves: of groups that hold copies of one another, each a part, so nothing twice."""
    first, _ = geometry.bounds(rank)
    low, high = geometry.own_piece(rank)
    return _ranges(geometry, first + low, first + high, first)
