"""Lays out units: where each parameter, each rank's shard and the padding lie in a unit's flat buffer.

A unit holds the parameters of one block of the model in one flat buffer, which is cut into equal shards, one
for each rank.  Every parameter and every shard starts on a multiple of the grain, which is a common multiple
of all codecs' blocks.  So no block spans two parameters, and no shard boundary cuts a block.

Pure: no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

FROZEN: Final = ".frozen"  # suffix of the name of a block's second unit, which holds its frozen parameters
PERSISTENT: Final = "persistent"  # name of the unit of small parameters, which stays gathered
ROOT: Final = "root"  # name of the unit of parameters outside all blocks
MUCH_PADDING: Final = 0.05  # share of padding in a model beyond which report pages mark the model's bytes


class GeometryError(ValueError):
    """A unit cannot be laid out; the message names the unit and the numbers."""


class PaddingError(GeometryError):
    """A unit would have too much padding; ``needed`` is the smallest ``max_padding`` that allows it."""

    def __init__(self, message: str, needed: float) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter before it is laid out."""

    name: str  # qualified, as in ``named_parameters()``
    shape: tuple[int, ...]
    group: int = 0  # index of its optimizer group (weight decay, learning rate)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Band(NamedTuple):
    """Consecutive bands of one matrix in a shard; each band has the same number of whole rows."""

    start: int  # first element, relative to the shard
    bands: int  # how many bands follow one another
    columns: int  # elements of a row


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter: elements [offset, offset + numel) of its unit's flat buffer."""

    spec: ParameterSpec
    offset: int

    @property
    def end(self) -> int:
        """One past the parameter's last element in the flat buffer."""
        return self.offset + self.spec.numel


@dataclass(frozen=True, slots=True)
class UnitGeometry:
    """The layout of one unit for one number of ranks.

    A *shard* is what one rank holds of a unit: ``padded / shards`` elements.  A *piece* is what one rank receives of
    the mean gradient: ``padded / world`` elements.  They are the same unless there are several groups, each of which
    holds the whole unit.
    """

    name: str  # of the block, with the suffix :data:`FROZEN` if not trainable
    slots: tuple[Slot, ...]  # the parameters, ordered by optimizer group
    padded: int  # elements of the flat buffer, padding included; a multiple of ``world * grain``
    world: int  # number of all ranks, over which gradients are reduced
    trainable: bool = True  # False for a unit of frozen parameters, which sends no gradients
    # Number of ranks that share one copy of the unit, 0 for all ranks.  Ranks ``k * group`` to
    # ``(k + 1) * group - 1`` form one group.
    group: int = 0

    @property
    def block(self) -> str:
        """The name of the unit's block; the units of one block are gathered together."""
        return self.name if self.trainable else self.name.removesuffix(FROZEN)

    @property
    def persistent(self) -> bool:
        """Whether the unit holds the small parameters that stay gathered."""
        return self.block == PERSISTENT

    @property
    def outer(self) -> bool:
        """Whether the unit is in use during the whole pass, from before the first block to after the last."""
        return self.block in (ROOT, PERSISTENT)

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(slot.spec.numel for slot in self.slots)

    @property
    def shards(self) -> int:
        """Number of shards in one copy of the unit, one for each rank of a group."""
        return self.group or self.world

    @property
    def shard(self) -> int:
        """Number of elements of one rank's shard."""
        return self.padded // self.shards

    @property
    def piece(self) -> int:
        """Number of elements of the mean gradient that one rank receives, which are a part of its shard."""
        return self.padded // self.world

    def bounds(self, rank: int) -> tuple[int, int]:
        """Returns (start, end) of ``rank``'s shard in the unit."""
        index = rank % self.shards
        return index * self.shard, (index + 1) * self.shard

    def overlap(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Returns (start, end) in the unit of ``slot``'s elements in ``rank``'s shard; it may be empty."""
        low, _ = self.bounds(rank)
        start, end = self.part(slot, rank)
        return low + start, low + end

    def part(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Returns (start, end) in ``rank``'s shard of ``slot``'s elements; it may be empty."""
        return self._clipped(slot.offset, slot.end, rank)

    def _clipped(self, start: int, end: int, rank: int) -> tuple[int, int]:
        """Returns the elements [start, end) of the unit that are in ``rank``'s shard, relative to the shard."""
        low, high = self.bounds(rank)
        return min(max(start, low), high) - low, min(max(end, low), high) - low

    def own_piece(self, rank: int) -> tuple[int, int]:
        """Returns (start, end) in ``rank``'s shard of the elements that only this rank counts or saves.

        Groups hold copies of one another; the own pieces of all ranks together cover each element once.
        """
        replica = rank // self.shards
        return replica * self.piece, (replica + 1) * self.piece

    def received_piece(self, rank: int) -> tuple[int, int]:
        """Returns (start, end) in the unit of a piece of the mean gradient that ``rank`` has after a reduction.

        With several groups this is the piece that a rank of the next group reduced, with one group the rank's own
        piece.  Together the pieces of all ranks cover the unit.
        """
        low, _ = self.bounds(rank)
        first, end = self.own_piece((rank + self.shards) % self.world)
        return low + first, low + end

    def spans(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Returns (group, start, end) for each optimizer group: its elements in ``rank``'s shard, padding included.

        ``start`` and ``end`` are relative to the shard, and may be equal.
        """
        starts: dict[int, int] = {}  # the first element of each group in the unit
        for slot in self.slots:
            starts.setdefault(slot.spec.group, slot.offset)
        bounds = zip(starts, itertools.pairwise([*starts.values(), self.padded]), strict=True)
        return tuple((group, *self._clipped(start, end, rank)) for group, (start, end) in bounds)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, end) in the unit of each stretch of padding, none of them empty."""
        starts = [0, *(slot.end for slot in self.slots)]
        ends = [*(slot.offset for slot in self.slots), self.padded]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def pads(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns (start, end) in ``rank``'s shard of each stretch of padding, none of them empty."""
        clipped = (self._clipped(start, end, rank) for start, end in self.gaps)
        return tuple((start, end) for start, end in clipped if start < end)

    def bands(self, rank: int, rows: int) -> tuple[Band, ...]:
        """Returns the bands of ``rows`` whole rows in ``rank``'s shard.

        Only matrices whose number of columns is a multiple of ``rows`` have bands.
        """
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
    """Lay out a unit: its parameters one after the other, ordered by optimizer group, each on the grain.

    Parameters of one group keep their order, and every parameter and shard starts on a multiple of ``grain``
    elements.  ``max_padding`` is the largest padding allowed, as a share of the parameters' elements;
    ``grain_in_words`` is the reason for the grain, for the error message.  The other arguments are explained in
    :class:`UnitGeometry`.

    Raises PaddingError: if padding exceeds ``max_padding``.
    """
    specs = sorted(parameters, key=lambda spec: spec.group)
    *offsets, end = itertools.accumulate((-(-spec.numel // grain) * grain for spec in specs), initial=0)
    padded = -(-end // (grain * world)) * grain * world
    slots = tuple(map(Slot, specs, offsets))
    unit = UnitGeometry(name, slots, padded, world, trainable, 0 if group == world else group)
    padding = padded - unit.numel
    if padding and padding / unit.numel > max_padding:  # a quotient: a product could round below ``needed``
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
    """Returns the number of elements of padding in all ``units``, divided by their number of elements without padding.

    Each unit is given as (elements, elements with padding).  Returns 0 if there are no elements.
    """
    sizes = list(units)
    numel = sum(elements for elements, _ in sizes)
    return (sum(padded for _, padded in sizes) - numel) / numel if numel else 0.0


def chunked(piece: int, chunks: int, grain: int) -> tuple[tuple[int, int], ...]:
    """Returns (start, end) of the chunks into which a piece is cut, in order, none of them empty.

    There are at most ``chunks``, and each starts on a multiple of ``grain``.  With three or more, the first
    and the last are a third as long as the others (1:3:...:3:1), as far as the grain allows.  These lengths
    hide more of the shorter hop behind the longer hop: four chunks 1:3:3:1 hide seven eighths of it, ``n`` equal
    chunks at most ``1 - 1 / n``.
    """
    whole = max(1, piece // grain)
    weights = [1] * chunks if chunks < 3 else [1, *[3] * (chunks - 2), 1]
    starts = itertools.accumulate(weights[:-1], initial=0)
    bounds = [*(whole * start // sum(weights) * grain for start in starts), piece]
    return tuple((start, end) for start, end in itertools.pairwise(bounds) if start < end)
