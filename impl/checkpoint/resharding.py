"""Resharding: which ranges a rank holds and saves, and reading any range of a saved layout for another one.

Pure: no torch.  So a checkpoint is loaded onto another world size, stage, group or block size: each rank asks
for the ranges that it holds, wherever other ranks saved their elements.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from impl.checkpoint.manifest import BUFFER, Manifest, SavedParameter, key_of
from impl.checkpoint.safetensors_file import Reader
from impl.plan.shard_layout import Slot, UnitGeometry

if TYPE_CHECKING:
    from torch import Tensor


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


def saved_parameters(geometries: Sequence[UnitGeometry], topology_world: int) -> dict[str, SavedParameter]:
    """What all ranks save of all parameters, as any of them can tell from the layout."""
    found: dict[str, SavedParameter] = {}
    for geometry in geometries:
        ranges: dict[str, list[tuple[int, int, int]]] = {slot.spec.name: [] for slot in geometry.slots}
        for rank in range(topology_world):
            for one in saved_ranges(geometry, rank):
                ranges[one.name].append((one.start, one.end, rank))
        for slot in geometry.slots:
            name, shape = slot.spec.name, list(slot.spec.shape)
            found[name] = SavedParameter(
                shape=shape, trainable=geometry.trainable, ranges=sorted(ranges[name])
            )
    return found


def overlapping(saved: SavedParameter, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The saved ranges that hold elements of [start, end)."""
    first = bisect.bisect_right(saved.ranges, start, key=lambda one: one[1])
    return itertools.takewhile(lambda one: one[0] < end, saved.ranges[first:])


class Parts:
    """The files of a checkpoint in folder ``path``, to be read by ranges of parameters."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self.manifest = path, manifest
        self._readers: dict[int, Reader] = {}

    def file(self, number: int) -> Reader:
        """One file.

        Raises:
            CheckpointError: if it cannot be read.
        """
        if number not in self._readers:
            self._readers[number] = Reader(self._path / self.manifest.files[number].name)
        return self._readers[number]

    def buffer(self, name: str) -> Tensor:
        """A buffer, or an extra state that is a tensor, in its shape."""
        return self.file(0).tensor(f"{BUFFER}/{name}")

    def dtype(self, kind: str, name: str) -> str:
        """The type of what was saved of a parameter that has elements."""
        start, _, number = self.manifest.parameters[name].ranges[0]
        return self.file(number).entry(key_of(kind, name, start)).dtype

    def read(self, kind: str, name: str, start: int, end: int) -> Iterator[tuple[int, Tensor]]:
        """Elements [start, end) of a parameter: (offset from ``start``, values) of each run.

        Raises:
            CheckpointError: for a parameter or kind that was not saved.
        """
        for low, high, number in overlapping(self.manifest.parameters[name], start, end):
            first, last = max(start, low), min(end, high)
            yield first - start, self.file(number).read(key_of(kind, name, low), first - low, last - low)
