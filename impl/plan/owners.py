"""Assigns each matrix that Muon orthogonalises to one rank, its owner, and computes the sizes of messages to owners.

The shards of several ranks have parts of a matrix, but the Newton-Schulz iteration needs the whole matrix.  Masters
(fp32 weights), gradients and momentum stay in shards.  In each optimizer step two exchanges take place among the ranks
that share one copy of all sharded states:

1. *momentum*: every rank sends its part of each matrix's momentum to the matrix's owner;
2. *update*: the owner, which has orthogonalised the matrix, sends every rank its part of the update back.

In a message, the part of each matrix is encoded by itself, so no block of a codec (elements that share a scale) spans
two matrices.  Messages differ in length; a rank that holds no part of an owner's matrices sends this owner nothing.

The assignment is a pure function of layout and topology, so every rank computes the same.  Pure: no torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from impl.codecs.codec import Codec
from impl.errors import ZeroError
from impl.policy.policy import Policy
from impl.policy.shard_layout import Slot, UnitGeometry
from impl.policy.topology import Axis, Topology

MATRICES: Final = 1  # the optimizer group of matrices; all other groups are stepped by AdamW
MOMENTUM_BYTES: Final = 4  # Muon's state for each element of a matrix: the momentum in fp32
NEWTON_SCHULZ_STEPS: Final = 5  # torch's default
_REST: Final = "leave the parameter to AdamW: let the group_of= of shard() return another group for it"


class Part(NamedTuple):
    """The elements of one matrix that are in one rank's shard."""

    matrix: int  # index of the matrix
    start: int  # place of the part's first element in the shard
    first: int  # place of the part's first element in the matrix
    numel: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that Muon steps, and its owner: the rank that orthogonalises it."""

    unit: int  # index of its unit among the model's units
    slot: Slot
    owner: int  # index of the owner among the ranks that share one copy of all sharded states

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, (rows, columns)."""
        return self.slot.spec.shape


Sizes = tuple[tuple[int, ...], ...]
"""``sizes[source][destination]``: bytes of the message from rank ``source`` to rank ``destination``.

Ranks are counted from 0 along :attr:`Owners.axis`.  ``sizes[i][i]`` are bytes that rank i keeps and does not send."""


@dataclass(frozen=True)
class Owners:
    """The owner of each matrix that Muon steps, and the parts of the matrices that each rank holds.

    The owner of a matrix is the rank that orthogonalises the matrix.
    """

    axis: Axis  # the ranks that share one copy of all sharded states
    matrices: tuple[Matrix, ...]  # in model order
    # ``parts[i]``: the parts that rank i of the axis holds, in the order of ``matrices``; parts have 1 element or more.
    parts: tuple[tuple[Part, ...], ...]
    momentum: Codec  # codec of the messages to owners
    update: Codec  # codec of the messages from owners

    @functools.cached_property
    def to_owners(self) -> Sizes:
        """Bytes of the messages that bring momentum to owners: ``sizes[i][j]`` from rank i to the owner, rank j."""
        return self._sizes(self.momentum)

    @functools.cached_property
    def from_owners(self) -> Sizes:
        """Bytes of the messages that bring updates back: ``sizes[i][j]`` from the owner, rank i, to rank j."""
        return tuple(zip(*self._sizes(self.update), strict=True))

    def _sizes(self, codec: Codec) -> Sizes:
        """Returns the bytes of the messages in which the parts of matrices are sent, encoded in ``codec``.

        ``sizes[holder][owner]`` is for the parts that rank ``holder`` holds of all matrices whose owner is rank
        ``owner``.
        """
        sizes = [[0] * self.axis.size for _ in self.parts]
        for row, parts in zip(sizes, self.parts, strict=True):
            for part in parts:
                row[self.matrices[part.matrix].owner] += codec.frame_bytes(part.numel)
        return tuple(map(tuple, sizes))

    def frames(self, holder: int, owner: int, codec: Codec) -> Iterator[tuple[Part, int, int]]:
        """Yield (part, start, end) for each part that rank ``holder`` holds of a matrix whose owner is rank ``owner``.

        The message between the two ranks consists of these parts, each encoded in ``codec``.  A part takes the bytes
        [start, end) of the message.
        """
        start = 0
        for part in self.parts[holder]:
            if self.matrices[part.matrix].owner == owner:
                end = start + codec.frame_bytes(part.numel)
                yield part, start, end
                start = end

    @functools.cached_property
    def digest(self) -> str:
        """A hash of all owners and of both codecs, which ranks compare to find out whether their owners are the same.

        The codecs are those of the momentum and of the updates.
        """
        text = repr([(matrix.unit, matrix.slot.spec.name, matrix.owner) for matrix in self.matrices])
        return hashlib.sha256(f"{text} {self.momentum} {self.update}".encode()).hexdigest()[:12]

    @functools.cached_property
    def loads(self) -> tuple[float, ...]:
        """For each rank, the floating-point operations in one step to orthogonalise the matrices that the rank owns."""
        loads = [0.0] * self.axis.size
        for matrix in self.matrices:
            loads[matrix.owner] += newton_schulz_flops(matrix.shape)
        return tuple(loads)


def newton_schulz_flops(shape: Sequence[int], steps: int = NEWTON_SCHULZ_STEPS) -> float:
    """Returns the number of floating-point operations of ``steps`` Newton-Schulz iterations on one matrix.

    The matrix has this ``shape``, with ``s`` the smaller and ``l`` the larger dimension.  Each iteration multiplies
    matrices three times: (s, l) by (l, s), (s, s) by (s, s), and (s, s) by (s, l).
    """
    small, large = sorted(shape)
    return steps * (4.0 * small * small * large + 2.0 * small**3)


def owners_of(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], group: int = MATRICES
) -> Owners | None:
    """Chooses for each matrix that Muon steps an owner: the rank that orthogonalises the matrix.

    The floating-point operations of Newton-Schulz are spread evenly over ranks.  As far as an even spread allows, the
    owner of a matrix is the rank whose shard has most of the matrix, since the owner need not send its own part.

    Args:
        policy: the policy of the model.
        topology: nodes and ranks.
        units: the model's units, in model order.
        group: index of the optimizer group of the parameters that Muon steps.

    Returns:
        The owners, or None if the group has no trained parameter with elements.

    Raises:
        ZeroError: if a parameter of the group does not have 2 dimensions, or if masters are offloaded.
    """
    size = policy.group_ranks(topology)
    usual = {axis.size: axis for axis in (topology.local_axis, topology.world_axis)}
    axis = usual.get(size) or Axis("group", size, 1)
    slots = [
        (index, slot)
        for index, unit in enumerate(units)
        for slot in (unit.slots if unit.trainable else ())
        if slot.spec.group == group and slot.spec.numel
    ]
    if not slots:
        return None
    for _, slot in slots:
        if len(shape := slot.spec.shape) != 2:
            raise ZeroError(
                f"Muon: parameter {slot.spec.name!r} has shape {shape}, and only a matrix, of 2 dimensions, can be "
                f"orthogonalised: {_REST}"
            )
    if policy.offload.optimizer:
        raise ZeroError(
            f"Muon: offload.optimizer={policy.offload.optimizer:g} keeps masters on the host, where matrices are not "
            "orthogonalised: set offload.optimizer=0, or use AdamW"
        )

    def part(number: int, holder: int) -> Part:
        index, slot = slots[number]
        start, end = units[index].part(slot, holder)
        return Part(number, start, units[index].overlap(slot, holder)[0] - slot.offset, end - start)

    parts = [[part(number, holder) for number in range(len(slots))] for holder in range(size)]
    costs = [newton_schulz_flops(slot.spec.shape) for _, slot in slots]
    held = [[row[number].numel for row in parts] for number in range(len(slots))]
    owner = _assign(costs, held)
    matrices = tuple(Matrix(index, slot, owner[number]) for number, (index, slot) in enumerate(slots))
    kept = tuple(tuple(part for part in row if part.numel) for row in parts)
    return Owners(axis, matrices, kept, *policy.owned)


def _assign(costs: Sequence[float], held: Sequence[Sequence[int]]) -> list[int]:
    """Returns for each matrix the index of its owner, the rank that orthogonalises it.

    ``costs[matrix]`` are floating-point operations, and ``held[matrix][rank]`` is the number of the matrix's elements
    that ``rank`` holds.

    There are two passes over the matrices, and each pass starts with the most expensive matrix.  The first pass gives
    each matrix to the rank with the least cost so far.  The largest cost of a rank after this pass is the limit for the
    second pass.  The second pass assigns all matrices anew.  A matrix fits on a rank if the rank's cost, with this
    matrix, is within the limit.  Among the ranks on which a matrix fits, the second pass chooses the rank that holds
    most of the matrix.  If some matrix fits on no rank, the owners of the first pass are returned.
    """
    ranks, order = range(len(held[0])), sorted(range(len(costs)), key=lambda number: -costs[number])
    loads, even = [0.0] * len(ranks), [0] * len(costs)
    for number in order:
        even[number] = min(ranks, key=lambda rank: (loads[rank], -held[number][rank], rank))
        loads[even[number]] += costs[number]
    limit, loads, near = max(loads), [0.0] * len(ranks), [0] * len(costs)
    for number in order:
        below = [rank for rank in ranks if loads[rank] + costs[number] <= limit]
        if not below:
            return even
        near[number] = min(below, key=lambda rank: (-held[number][rank], loads[rank], rank))
        loads[near[number]] += costs[number]
    return near
