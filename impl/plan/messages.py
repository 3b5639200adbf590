"""Predicts the bytes of the buffers that carry a rank's messages on a GPU, from the policy and the units' layout.

The prediction is for a GPU whose stream waits for messages, as with NCCL (:mod:`impl.comm.exchanges`).  The host
then runs one collective after the other, so that the buffers in use at once are those of one collective.  Units,
hops and purposes share buffers whose sizes are in one class (:func:`size_class`).  Tests check that the exchanges
hold exactly the predicted bytes.

Pure: no torch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from impl.codecs.codec import Codec, Raw
from impl.plan.policy import Policy
from impl.plan.prefetch_schedule import kept_units
from impl.plan.shard_layout import UnitGeometry
from impl.plan.topology import Topology
from impl.plan.traffic import gather_hops, reduction_hops

SPARE: Final = 1  # free buffers of a class that are not reused, so that a user seldom waits for the last one
_SMALLEST: Final = 512  # bytes of the smallest class, as in torch's allocator
_FINENESS: Final = 4  # significant bits of a class: there are eight classes from one power of two to the next


def size_class(nbytes: int) -> int:
    """Returns the bytes of the buffer for a message of ``nbytes``: at most an eighth more, or 512."""
    step = 1 << max(0, nbytes.bit_length() - _FINENESS)
    return max(_SMALLEST, -(-nbytes // step) * step)


def message_bytes(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    *,
    micro_batches: int = 1,
    backward: bool = True,
) -> int:
    """Returns the bytes of all buffers for one rank's messages of weights and gradients, from the third step on.

    The arguments are those of :func:`impl.plan.memory.memory`.  The result is an upper bound with a budget, for
    any choice of its codecs, and with differences that are never refreshed, since the first step alone sends
    weights.
    """
    most = Counter[int]()  # by class, the most buffers in use at once
    kept = kept_units(policy, units)
    for index, unit in enumerate(units):
        rules = policy.for_unit(unit)
        # Backward gathers from hpZ's copy, and so does the forward pass of a further micro-batch.
        again = policy.stage == 3 and backward and (index not in kept or micro_batches > 1)
        for codec in rules.candidates.get("weights", (rules.weights,)):
            for held in _gathers(rules.with_choice("weights", codec), topology, unit, again=again):
                most |= Counter(map(size_class, held))
        if not (backward and unit.trainable):
            continue
        for codec in rules.candidates.get("gradients", (rules.gradients[1],)):
            for held in _reduction(rules.with_choice("gradients", codec), topology, unit):
                most |= Counter(map(size_class, held))
    return sum(nbytes * (count + SPARE) for nbytes, count in most.items())


def _gathers(
    policy: Policy, topology: Topology, unit: UnitGeometry, *, again: bool
) -> Iterator[Sequence[int]]:
    """Yield the bytes of the buffers in use at each moment of a unit's gathers; ``again`` from hpZ's copy too."""
    spared = policy.gather_axes(topology)[1]
    ways = [(codec, False) for codec in {policy.weights, policy.differences or policy.weights}]
    ways += [(policy.copy_codec, True)] if again and spared else []
    for codec, from_copy in ways:
        hops = [(hop[0].size, hop[3]) for hop in gather_hops(policy, topology, unit, codec, again=from_copy)]
        between = 0 if from_copy else spared
        # Axes of one rank are left out.  If the hops on one side of hpZ's copy have no others, an exchange of the
        # rank with itself copies their message.
        parts = [part for part in (hops[:between], hops[between:]) if part]
        sending = [[hop for hop in part if hop[0] > 1] or part[:1] for part in parts]
        if not spared and sending == [hops[:1]] and hops[0][0] == 1 and _are_elements(codec, policy):
            continue  # one rank casts its masters straight into the gathered weights
        yield from _forwarded([size * nbytes for part in sending for size, nbytes in part])


def _reduction(policy: Policy, topology: Topology, unit: UnitGeometry) -> Iterator[Sequence[int]]:
    """Yield the bytes of the buffers in use at each moment of the reduction of a unit's gradient."""
    hops = [
        (axis, [axis.size * size for size in sizes])
        for axis, _, _, sizes in reduction_hops(policy, topology, unit.piece, policy.grain)
    ]
    if policy.reduce == "ring":  # each step ends before the next one begins
        yield from ([size // axis.size] * 2 for axis, sizes in hops for size in sizes)
    elif hops:
        # By chunk, the message of its present hop, which takes as much room as what the rank receives.
        chunks, under_way = len(hops[0][1]), dict[int, int]()
        for turn in range(chunks + len(hops) - 1):
            for hop in range(len(hops)):
                if 0 <= (chunk := turn - hop) < chunks:
                    size = hops[hop][1][chunk]
                    yield [*under_way.values(), size] * 2
                    under_way[chunk] = size
    axes, codec = policy.replica_axes(topology)
    sizes = itertools.accumulate(
        (axis.size for axis in axes), int.__mul__, initial=codec.frame_bytes(unit.piece)
    )
    yield from _forwarded(list(sizes)[1:])


def _forwarded(sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the buffers in use at each hop of a gather; ``sizes`` are the bytes that each hop receives.

    A hop's own message lies in what it receives, and is copied from what the hop before has received.
    """
    yield from (sizes[max(0, hop - 1) : hop + 1] for hop in range(len(sizes)))


def _are_elements(codec: Codec, policy: Policy) -> bool:
    """Returns whether a frame of ``codec`` is the elements of the gathered weights, bit by bit."""
    return isinstance(codec, Raw) and codec.dtype == policy.compute
