"""Where each parameter, pad and shard of a unit lies.

Pure: no torch.  A unit is one flat buffer per block of the model.  Every parameter starts on the grain, a
multiple of all codec blocks, so no block straddles two parameters and shards are cut on block boundaries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

FROZEN: Final = ".frozen"  # suffix of the name of a block's second unit, of its frozen parameters
PERSISTENT: Final = "persistent"  # the unit of parameters too small to be worth a gather each time
ROOT: Final = "root"  # the unit of parameters outside all blocks
MUCH_PADDING: Final = 0.05  # share of a model's elements beyond which its bytes and memory are marked


class GeometryError(ValueError):
    """A unit cannot be laid out; the message names it and the numbers."""


class PaddingError(GeometryError):
    """A unit would have too much padding; ``needed`` is the least ``max_padding`` that allows it."""

    def __init__(self, message: str, needed: float) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter before it is laid out, by its qualified name in the model."""

    name: str
    shape: tuple[int, ...]
    group: int = 0  # its optimizer group (weight decay, learning rate)

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Band(NamedTuple):
    """``bands`` of a matrix's rows side by side in a shard, from element ``start`` on."""

    start: int
    bands: int
    columns: int


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter's place: elements [offset, offset + numel) of its unit's flat buffer."""

    spec: ParameterSpec
    offset: int

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.offset + self.spec.numel


@dataclass(frozen=True, slots=True)
class UnitGeometry:
    """A unit's layout for one world size."""

    name: str  # of the block, with the suffix :data:`FROZEN` if not trainable
    slots: tuple[Slot, ...]  # parameters, ordered by optimizer group
    padded: int  # elements of the flat buffer, a multiple of ``world * grain``
    world: int  # all ranks; each ends a gradient's reduction with ``piece = padded / world`` elements
    trainable: bool = True  # False for a unit of frozen parameters, which sends no gradients
    # ranks that share one copy of the unit, with ``shard = padded / group`` elements each; 0 for all.  Ranks
    # ``k * group`` to ``(k + 1) * group - 1`` are one group
    group: int = 0

    @property
    def block(self) -> str:
        """The name of its block, whose units are gathered together."""
        return self.name if self.trainable else self.name.removesuffix(FROZEN)

    @property
    def persistent(self) -> bool:
        """Whether it holds the small parameters that stay gathered."""
        return self.block == PERSISTENT

    @property
    def outer(self) -> bool:
        """Whether it is in use around all blocks."""
        return self.block in (ROOT, PERSISTENT)

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(slot.spec.numel for slot in self.slots)

    @property
    def shards(self) -> int:
        """Ranks that share one copy."""
        return self.group or self.world

    @property
    def shard(self) -> int:
        """Elements of one rank's shard."""
        return self.padded // self.shards

    @property
    def piece(self) -> int:
        """Elements of which one rank has the mean gradient after a reduction: a part of its shard."""
        return self.padded // self.world

    def piece_stride(self, stride: int) -> int:
        """Distance in pieces, in unit order, between the pieces of ranks an axis's ``stride`` apart.

        The pieces of a shard lie together: rank ``k * group + i`` has piece ``i * (world / group) + k``.
        """
        return stride * (self.world // self.shards) if stride < self.shards else stride // self.shards

    def bounds(self, rank: int) -> tuple[int, int]:
        """(first, end) elements of the unit that ``rank``'s shard holds."""
        index = rank % self.shards
        return index * self.shard, (index + 1) * self.shard

    def overlap(self, slot: Slot, rank: int) -> tuple[int, int]:
        """(first, end) elements of the unit that are both ``slot``'s and in ``rank``'s shard; maybe empty."""
        low, _ = self.bounds(rank)
        start, end = self.part(slot, rank)
        return low + start, low + end

    def part(self, slot: Slot, rank: int) -> tuple[int, int]:
        """(start, end) of ``slot``'s elements in ``rank``'s shard, relative to the shard; maybe empty."""
        return self._clipped(slot.offset, slot.end, rank)

    def _clipped(self, start: int, end: int, rank: int) -> tuple[int, int]:
        """Elements [start, end) of the unit cut to ``rank``'s shard, relative to the shard; maybe empty."""
        low, high = self.bounds(rank)
        return min(max(start, low), high) - low, min(max(end, low), high) - low

    def own_piece(self, rank: int) -> tuple[int, int]:
        """(first, end) elements of the shard that ``rank`` alone reduces: all ranks' count each once."""
        replica = rank // self.shards
        return replica * self.piece, (replica + 1) * self.piece

    def received_piece(self, rank: int) -> tuple[int, int]:
        """(first, end) elements of the unit: a piece of the mean on ``rank``; all ranks' pieces fill it."""
        low, _ = self.bounds(rank)
        first, end = self.own_piece((rank + self.shards) % self.world)
        return low + first, low + end

    def spans(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """(group, start, end) of an optimizer group with its padding, relative to the shard, maybe empty."""
        starts: dict[int, int] = {}  # by group, its first element in the unit
        for slot in self.slots:
            starts.setdefault(slot.spec.group, slot.offset)
        bounds = zip(starts, itertools.pairwise([*starts.values(), self.padded]), strict=True)
        return tuple((group, *self._clipped(start, end, rank)) for group, (start, end) in bounds)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the unit's padding, none empty."""
        starts = [0, *(slot.end for slot in self.slots)]
        ends = [*(slot.offset for slot in self.slots), self.padded]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def pads(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, end) of the padding inside ``rank``'s shard, relative to the shard, none empty."""
        clipped = (self._clipped(start, end, rank) for start, end in self.gaps)
        return tuple((start, end) for start, end in clipped if start < end)

    def bands(self, rank: int, rows: int) -> tuple[Band, ...]:
        """Bands of ``rows`` whole rows in ``rank``'s shard, of matrices whose columns ``rows`` divides."""
        bands = []
        low, _ = self.bounds(rank)
        for slot in self.slots:
            start, end = self.part(slot, rank)
            columns = math.prod(slot.spec.shape[1:])
            if len(slot.spec.shape) > 1 and columns and columns % rows == 0:
                start += (slot.offset - low - start) % columns
                bands.append(Band(start, max(0, end - start) // (rows * columns), columns))
        return tuple(band for band in bands if band.bands)


def lay_out(
    name: str,
    parameters: Iterable[ParameterSpec],
    *,
    grain: int,
    world: int,
    max_padding: float,
    trainable: bool = True,
    group: int = 0,
    grain_in_words: str = "",
) -> UnitGeometry:
    """Place parameters one after the other, ordered by group and then in their order, each on the grain.

    ``max_padding`` is a share of the unit's elements; all else is as in :class:`UnitGeometry`.

    Raises PaddingError: if padding exceeds ``max_padding``.
    """
    specs = sorted(parameters, key=lambda spec: spec.group)
    *offsets, end = itertools.accumulate((-(-spec.numel // grain) * grain for spec in specs), initial=0)
    padded = -(-end // (grain * world)) * grain * world
    slots = tuple(map(Slot, specs, offsets))
    unit = UnitGeometry(name, slots, padded, world, trainable, 0 if group == world else group)
    padding = padded - unit.numel
    if padding > max_padding * unit.numel:
        needed = -(-100 * padding // unit.numel) / 100
        codecs = f" ({grain_in_words})" if grain_in_words else ""
        share = f"{padding / unit.numel:.1%} of {unit.numel}, allowed {max_padding:.1%} by max_padding"
        raise PaddingError(
            f"unit {name!r}: {padding} of {padded} elements would be padding ({share}) for blocks of "
            f"{grain}{codecs} on {world} ranks; use smaller blocks or raise max_padding to {needed:.2f}",
            needed,
        )
    return unit


def padding_share(units: Iterable[tuple[int, int]]) -> float:
    """Padding over elements of ``units``, (elements, elements with padding) each; 0 without elements."""
    sizes = list(units)
    numel = sum(elements for elements, _ in sizes)
    return (sum(padded for _, padded in sizes) - numel) / numel if numel else 0.0


def chunked(piece: int, chunks: int, grain: int) -> tuple[tuple[int, int], ...]:
    """(start, end) of the chunks of a piece, in their order, none empty.

    There are at most ``chunks``, which start on ``grain`` elements.  From three on they are as 1:3:...:3:1 as
    ``grain`` allows: ``n`` equal ones hide at most ``1 - 1 / n`` of the shorter hop, 1:3:3:1 seven eighths.
    """
    whole = max(1, piece // grain)
    weights = [1] * chunks if chunks < 3 else [1, *[3] * (chunks - 2), 1]
    starts = itertools.accumulate(weights[:-1], initial=0)
    bounds = [*(whole * start // sum(weights) * grain for start in starts), piece]
    return tuple((start, end) for start, end in itertools.pairwise(bounds) if start < end)
