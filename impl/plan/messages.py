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

from impl.plan.hops import (
    Hop,
    Sends,
    casts_alone,
    forwards_in_place,
    gather_hops,
    in_phase,
    in_turns,
    outer_hops,
    reduction_hops,
)
from impl.plan.prefetch_schedule import kept_units
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology

# Number of free buffers of each class that are left unused.  The next message takes the buffer that was used longest
# ago, and so seldom has to wait until the buffer's last use has ended.
SPARE: Final = 1
_SMALLEST: Final = 512  # bytes of the smallest class, as in torch's allocator
_FINENESS: Final = 4  # significant bits of a class: there are eight classes from one power of two to the next


def size_class(nbytes: int) -> int:
    """Returns the bytes of a buffer for a message of ``nbytes``: 512, or at most an eighth more than the message."""
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

    The arguments are those of :func:`impl.plan.memory.memory`.  With a schedule, the buffers of all its spans are
    counted.  With a budget, the result is an upper bound for any choice of codecs.  With differences that are never
    refreshed, the result is an upper bound too, since the buffers for weights are counted, and only the first step
    sends weights.
    """
    most = Counter[int]()  # by class, the most buffers in use at once
    kept = kept_units(policy, units)
    seen = dict[tuple[int, int, int, bool, bool], Policy]()  # most units of a model need the same buffers
    for (index, unit), phase in itertools.product(enumerate(units), policy.phases):
        rules = phase.for_unit(unit)
        # Backward gathers from hpZ's copy, and so does the forward pass of a further micro-batch.
        again = policy.stage == 3 and backward and (index not in kept or micro_batches > 1)
        key = id(rules), unit.shard, unit.piece, unit.trainable, again
        if key in seen:
            continue
        seen[key] = rules  # kept, so that no other policy gets its identity
        for chosen in rules.choices("weights"):
            for held in _gathers(chosen, topology, unit, again=again, backward=backward):
                most |= Counter(map(size_class, held))
        if not (backward and unit.trainable):
            continue
        for chosen in rules.choices("gradients"):
            for hops_of in (reduction_hops, outer_hops):
                for held in _reduction(hops_of(chosen, topology, unit.piece, chosen.grain)):
                    most |= Counter(map(size_class, held))
    return sum(nbytes * (count + SPARE) for nbytes, count in most.items())


def _gathers(
    policy: Policy, topology: Topology, unit: UnitGeometry, *, again: bool, backward: bool
) -> Iterator[Sequence[int]]:
    """Yield the bytes of the buffers in use at each moment of a unit's gathers.

    With ``again``, the gathers from hpZ's copy are included.
    """
    forward = "forward" if backward else "evaluate"
    every: list[tuple[str, Sends]] = [(forward, "weights"), (forward, "differences")]
    if again:
        every += [("backward", "copy"), (forward, "copy")]
    for phase, sends in every:
        hops = gather_hops(policy, topology, unit.shard, in_phase(policy, phase, sends))
        if hops and not casts_alone(hops, policy.compute):  # a user's own gather has none
            yield from _forwarded(hops)


def _reduction(every: Sequence[Hop]) -> Iterator[Sequence[int]]:
    """Yield the bytes of the buffers in use at each moment of a reduction with the hops ``every``."""
    hops = [hop for hop in every if hop.kind == "all_to_all"]
    # Each step of a ring ends before the next step begins.
    yield from ([hop.nbytes] * 2 for hop in every if hop.kind == "shift")
    # By chunk, the bytes of its message on the present hop; the rank receives as many.
    under_way = dict[int, int]()
    for number, chunk in itertools.chain(*in_turns(len(hops), len(hops[0].chunks) if hops else 0)):
        size = hops[number].axis.size * hops[number].sizes[chunk]
        yield [*under_way.values(), size] * 2
        under_way[chunk] = size
    yield from _forwarded([hop for hop in every if hop.kind == "all_gather"])


def _forwarded(hops: Sequence[Hop]) -> Iterator[Sequence[int]]:
    """Yield the bytes of the buffers in use at each hop of a gather.

    A hop receives into one buffer, in which the rank's own message lies too.  If the second hop only forwards what the
    first hop receives, the first hop needs no buffer of its own.  What later hops receive is copied to the next hop's
    buffer.
    """
    sizes, first = [hop.axis.size * hop.nbytes for hop in hops], int(forwards_in_place(hops))
    yield from (sizes[max(first, number - 1) : number + 1] for number in range(first, len(sizes)))
