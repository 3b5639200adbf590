"""Lays out units: where each parameter, each rank's shard and the padding lie in a unit's flat buffer.

A unit holds the parameters of one block of the model in one flat buffer, which is cut into equal shards, one for each
rank.  Every parameter and every shard starts on a multiple of the *grain*, a number of elements that is a common
multiple of all codecs' quantisation blocks.  Therefore no quantisation block spans two parameters or two shards.

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
    """Raised if a unit cannot be laid out; the message names the unit, and gives the numbers that are in conflict."""


class PaddingError(GeometryError):
    """Raised if a unit needs more padding than ``max_padding`` allows.

    ``needed`` is the smallest ``max_padding`` that allows the unit.
    """

    def __init__(self, message: str, needed: float) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """The name, the shape and the optimizer group of one parameter; a :class:`Slot` adds its place in a unit."""

    name: str  # qualified, as in ``named_parameters()``
    shape: tuple[int, ...]
    group: int = 0  # index of its optimizer group (weight decay, learning rate)

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


class Band(NamedTuple):
    """The bands of one matrix in one rank's shard: where the first band starts, and how many bands there are.

    A band is a fixed number of successive whole rows, which is quantised in blocks along columns.  With bands of 2
    rows, a shard that holds 5 whole rows of a matrix has 2 bands of this matrix.
    """

    start: int  # first element of the first band, relative to the shard
    bands: int  # number of bands, which follow one another without a gap
    columns: int  # elements of a row


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter: elements [offset, offset + numel) of its unit's flat buffer."""

    spec: ParameterSpec
    offset: int

    @property
    def end(self) -> int:
        """The place in the unit's flat buffer one past the parameter's last element."""
        return self.offset + self.spec.numel


@dataclass(frozen=True, slots=True)
class UnitGeometry:
    """The layout of one unit for one number of ranks.

    A *group* is a set of ranks that share one copy of the unit.  A *shard* is the part of the unit that one rank
    holds: ``padded / shards`` elements.  A *piece* is the part of the mean gradient that one rank receives from the
    reduction: ``padded / world`` elements.  If all ranks form one group, a piece is as large as a shard.  If there are
    several groups, each of them with a copy of the unit, a shard consists of several pieces.
    """

    name: str  # name of the block, with the suffix :data:`FROZEN` if the unit is not trainable
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
        """Whether the unit is in use from before the first block to after the last block of a pass.

        This holds for the unit of the parameters outside all blocks, and for the persistent unit.
        """
        return self.block in (ROOT, PERSISTENT)

    @property
    def numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(slot.spec.numel for slot in self.slots)

    @property
    def shards(self) -> int:
        """Number of shards into which one copy of the unit is cut: the number of ranks that share this copy."""
        return self.group or self.world

    @property
    def shard(self) -> int:
        """Number of elements of one rank's shard."""
        return self.padded // self.shards

    @property
    def piece(self) -> int:
        """Number of elements of the mean gradient that one rank receives; with several groups, a part of its shard."""
        return self.padded // self.world

    def bounds(self, rank: int) -> tuple[int, int]:
        """Returns (start, end): ``rank``'s shard consists of the unit's elements [start, end)."""
        index = rank % self.shards
        return index * self.shard, (index + 1) * self.shard

    def overlap(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Returns (start, end), counted in the unit, of the elements of ``slot`` that are in ``rank``'s shard.

        If no element of the slot is in the shard, start equals end.
        """
        low, _ = self.bounds(rank)
        start, end = self.part(slot, rank)
        return low + start, low + end

    def part(self, slot: Slot, rank: int) -> tuple[int, int]:
        """Returns (start, end), counted in ``rank``'s shard, of the elements of ``slot`` that are in this shard.

        If no element of the slot is in the shard, start equals end.
        """
        return self._clipped(slot.offset, slot.end, rank)

    def _clipped(self, start: int, end: int, rank: int) -> tuple[int, int]:
        """Returns which of the unit's elements [start, end) are in ``rank``'s shard.

        The result is (start, end) again, but counted in the shard.  If no such element is in the shard, start equals
        end.
        """
        low, high = self.bounds(rank)
        return min(max(start, low), high) - low, min(max(end, low), high) - low

    def own_piece(self, rank: int) -> tuple[int, int]:
        """Returns where the piece of a shard starts and ends that only ``rank`` includes in norms and checkpoints.

        Start and end are offsets into the rank's shard.
        If several groups hold copies of the unit, several ranks hold the same shard.  These ranks divide the shard
        among themselves, so that norms count each element once, and checkpoints save each element once.  With 4 ranks
        in groups of 2, ranks 0 and 2 hold the same shard: its first half is rank 0's own piece, and its second half is
        rank 2's own piece.  If all ranks form one group, the own piece is the whole shard.
        """
        replica = rank // self.shards
        return replica * self.piece, (replica + 1) * self.piece

    def received_piece(self, rank: int) -> tuple[int, int]:
        """Returns which elements of the mean gradient ``rank`` shows to observers, as (start, end) counted in the unit.

        An observer (:class:`impl.comm.wire.Observer`) is an object that looks at gradients.  Each rank shows one piece
        of the mean gradient.  The pieces of all ranks together cover the unit once.

        If all ranks form one group, the piece is the rank's whole shard.

        If several groups hold copies of the unit (MiCS, HSDP), every group has one rank that holds the same shard as
        ``rank``.  Each of these ranks reduces its own piece of the shard (:meth:`own_piece`), and sends the mean to the
        other ranks.  ``rank`` shows the piece that the rank in the next group has reduced; after the last group comes
        the first.  With 4 ranks in groups of 2, rank 0 shows the piece that rank 2 has reduced, and rank 2 shows the
        piece that rank 0 has reduced.
        """
        low, _ = self.bounds(rank)
        first, end = self.own_piece((rank + self.shards) % self.world)
        return low + first, low + end

    def spans(self, rank: int) -> tuple[tuple[int, int, int], ...]:
        """Returns (group, start, end) for each optimizer group in the unit: where the group lies in ``rank``'s shard.

        The elements [start, end) of the shard, padding included, belong to optimizer group number ``group``.  If the
        shard has no element of the group, ``start`` equals ``end``.  The groups are in ascending order.
        """
        starts: dict[int, int] = {}  # the first element of each group in the unit
        for slot in self.slots:
            starts.setdefault(slot.spec.group, slot.offset)
        bounds = zip(starts, itertools.pairwise([*starts.values(), self.padded]), strict=True)
        return tuple((group, *self._clipped(start, end, rank)) for group, (start, end) in bounds)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The stretches of padding in the unit, each as (start, end), counted in the unit; none is empty."""
        starts = [0, *(slot.end for slot in self.slots)]
        ends = [*(slot.offset for slot in self.slots), self.padded]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def pads(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns (start, end), counted in ``rank``'s shard, for each stretch of padding in this shard.

        No stretch is empty.
        """
        clipped = (self._clipped(start, end, rank) for start, end in self.gaps)
        return tuple((start, end) for start, end in clipped if start < end)

    def bands(self, rank: int, rows: int) -> tuple[Band, ...]:
        """Returns one :class:`Band` for each matrix that has bands of ``rows`` whole rows in ``rank``'s shard.

        A :class:`Band` says where the first band of a matrix starts in the shard, and how many bands follow one
        another.  A matrix has no bands if its number of columns is not a multiple of ``rows``, or if fewer than
        ``rows`` of its whole rows are in the shard.
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
    """Lay out a unit: place its parameters one after the other, ordered by optimizer group.

    Parameters of one group keep their order.  Every parameter and every shard starts on a multiple of ``grain``
    elements.  ``max_padding`` is the largest number of elements of padding, divided by the number of elements of the
    parameters.  ``grain_in_words`` says in the error message where the grain comes from.  :class:`UnitGeometry`
    explains the other arguments.

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
        share = f"{padding / unit.numel:.1%} of the {unit.numel} elements of parameters"
        share += f", and max_padding allows {max_padding:.1%}"
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
    """Cut a shard or a part of a shard into at most ``chunks`` chunks; returns (start, end) of each chunk, in order.

    ``piece`` is the number of elements to cut.  No chunk is empty, and each chunk starts on a multiple of ``grain``
    elements.  With three or more chunks, the first and the last chunk are a third as long as the chunks between them
    (1:3:...:3:1), as far as the grain allows.

    A reduction sends one chunk over its second hop while it sends the next chunk over its first hop.  Two transfers
    overlap with nothing: the first chunk on the first hop, and the last chunk on the second hop.  Therefore these two
    chunks are short.  With four chunks (1:3:3:1), each of the two is an eighth of the piece, and not a quarter as with
    four equal chunks.
    """
    whole = max(1, piece // grain)
    weights = [1] * chunks if chunks < 3 else [1, *[3] * (chunks - 2), 1]
    starts = itertools.accumulate(weights[:-1], initial=0)
    bounds = [*(whole * start // sum(weights) * grain for start in starts), piece]
    return tuple((start, end) for start, end in itertools.pairwise(bounds) if start < end)
