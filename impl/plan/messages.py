"""Predicts the bytes of the buffers that carry a rank's messages on a GPU, from the policy and the units' layout.

The prediction is for a GPU whose stream waits for messages, as with NCCL (:mod:`impl.comm.exchanges`).  There the host
enqueues one collective after the other, so only the buffers of one collective are in use at a time.  If two small units
are gathered together, the buffers of both gathers are in use (:func:`impl.plan.prefetch_schedule.small_units`).  The
number of buffers does not depend on how many units are gathered ahead of their use.  Buffer sizes are rounded up
(:func:`size_class`), and all messages with the same rounded size share buffers.  Tests check that the engine allocates
exactly the predicted bytes.

Pure: no torch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
from impl.plan.prefetch_schedule import Schedule, kept_units, small_units
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology

# Number of buffers of each size that are kept in addition to those in use at one time.  The next message takes the
# buffer that was used longest ago, so it seldom has to wait until the earlier use of that buffer has ended.
SPARE: Final = 1
_SMALLEST: Final = 512  # bytes of the smallest buffer, as in torch's allocator
_FINENESS: Final = 4  # significant bits of a buffer's size: eight sizes from one power of two to the next


def size_class(nbytes: int) -> int:
    """Returns the size in bytes of the buffer that carries a message of ``nbytes`` bytes.

    Sizes are rounded up, so that messages of similar sizes can share a buffer.  The result is at least 512 bytes.  A
    result above 512 exceeds ``nbytes`` by at most an eighth.  For a message of 1000 bytes: 1024.
    """
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
    """Returns the bytes of all buffers for one rank's messages of weights and gradients.

    The engine allocates a buffer when a message first needs it.  If all steps send messages of the same sizes, the
    engine has allocated all buffers after two steps.

    In two cases the result is an upper bound:

    - With a budget (``policy.budget``), the codec of each unit is chosen during training.  The bound holds for any
      choice of codecs.
    - With ``policy.differences`` and ``refresh=0``, only the first step sends the weights themselves.  Later steps send
      the differences between the weights and hpZ's copy.  The buffers of the first step are counted too.

    Args:
        policy: the policy of the model.  If its settings change while training (a schedule), the result is the bytes of
            the buffers for all these settings.
        topology: nodes and ranks.
        units: the model's units, in model order.
        micro_batches: the number of micro-batches in a step.
        backward: False for steps without a backward pass, which send no gradients.
    """
    most = Counter[int]()  # for each size of buffers, the most buffers in use at one time
    kept = kept_units(policy, units)
    seen = dict[tuple[int, int, int, bool, bool], Policy]()  # most units of a model need the same buffers
    for (index, unit), phase in itertools.product(enumerate(units), policy.phases):
        rules = phase.for_unit(unit)
        # The backward pass gathers from hpZ's copy, and so does the forward pass of the second and later micro-batches.
        again = policy.stage == 3 and backward and (index not in kept or micro_batches > 1)
        key = id(rules), unit.shard, unit.piece, unit.trainable, again
        if key in seen:
            continue
        seen[key] = rules  # kept, so that no other policy gets its identity
        for chosen in rules.choices("weights"):
            for hops in _gathers(chosen, topology, unit, again=again, backward=backward):
                for held in _in_step([hops]):
                    most |= Counter(map(size_class, held))
        if not (backward and unit.trainable):
            continue
        for chosen in rules.choices("gradients"):
            for hops_of in (reduction_hops, outer_hops):
                for held in _reduction(hops_of(chosen, topology, unit.piece, chosen.grain)):
                    most |= Counter(map(size_class, held))
    for (one, other), phase in itertools.product(_pairs(policy, topology, units, kept), policy.phases):
        again = policy.stage == 3 and backward and (not {one, other} & kept or micro_batches > 1)
        every = [
            [
                list(_gathers(chosen, topology, units[index], again=again, backward=backward))
                for chosen in phase.for_unit(units[index]).choices("weights")
            ]
            for index in (one, other)
        ]
        for first, second in itertools.product(*every):
            for both in zip(first, second, strict=False):
                for held in _in_step(both):
                    most |= Counter(map(size_class, held))
    return sum(nbytes * (count + SPARE) for nbytes, count in most.items())


def _pairs(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry], kept: Collection[int]
) -> list[tuple[int, int]]:
    """Return pairs of small units that are gathered together, as (index of the first unit, index of the second unit).

    Of several pairs that need the same buffers, only one is returned.  ``kept`` are the indices of the units that stay
    gathered from forward to backward.
    """
    schedule = Schedule.for_units(policy, units, small_units(policy, topology, units))
    rules = [[phase.for_unit(unit) for phase in policy.phases] for unit in units]
    alike = [
        (unit.shard, unit.trainable, index in kept, *map(id, rules[index]))
        for index, unit in enumerate(units)
    ]
    return list({(alike[one], alike[other]): (one, other) for one, other in sorted(schedule.pairs)}.values())


def _gathers(
    policy: Policy, topology: Topology, unit: UnitGeometry, *, again: bool, backward: bool
) -> Iterator[Sequence[Hop]]:
    """Yield the hops of each kind of gather that a unit may have in a step.

    The first gather of a step sends the weights, or the differences between the weights and hpZ's copy of the weights.
    ``again`` says that the unit is gathered more than once in a step.  If so, also yield the hops of the later gathers,
    which send hpZ's copy, or the weights if there is no hpZ.  With ``backward=False``, the gathers are those of an
    evaluation.  A gather that sends nothing, because a rank only casts its own weights, is left out.
    """
    forward = "forward" if backward else "evaluate"
    every: list[tuple[str, Sends]] = [(forward, "weights"), (forward, "differences")]
    if again:
        every += [("backward", "copy"), (forward, "copy")]
    for phase, sends in every:
        hops = gather_hops(policy, topology, unit.shard, in_phase(policy, phase, sends))
        if hops and not casts_alone(hops, policy.compute):  # a user's own gather has none
            yield hops


def _reduction(every: Sequence[Hop]) -> Iterator[Sequence[int]]:
    """Yield, for each message of a gradient reduction, the bytes of each buffer in use while the message is sent.

    A message is one chunk of one hop.  ``every`` are all hops of the reduction, in order.
    """
    hops = [hop for hop in every if hop.kind == "all_to_all"]
    # Each step of a ring ends before the next step begins.
    yield from ([hop.nbytes] * 2 for hop in every if hop.kind == "shift")
    # For each chunk, the bytes that the rank sends for it on the chunk's present hop.  The rank receives as many bytes.
    under_way = dict[int, int]()
    for number, chunk in itertools.chain(*in_turns(len(hops), len(hops[0].chunks) if hops else 0)):
        size = hops[number].axis.size * hops[number].sizes[chunk]
        yield [*under_way.values(), size] * 2
        under_way[chunk] = size
    yield from _in_step([[hop for hop in every if hop.kind == "all_gather"]])


def _in_step(gathers: Sequence[Sequence[Hop]]) -> Iterator[Sequence[int]]:
    """Yield, for each time at which hops of gathers are posted, the bytes of each buffer in use.

    ``gathers`` has the hops of each gather.  The gathers run together: first the first hops of all gathers are posted,
    then the second hops of all gathers, and so on.  The first list is for the first hops of all gathers, and each later
    list is for one later hop of one gather.

    Each hop has one buffer, which holds the message that the rank sends and the messages that the rank receives.
    Before the next hop, the received messages are copied to the next hop's buffer.  There is one exception: if the
    second hop only forwards what the first hop receives, both hops use the buffer of the second hop, and nothing is
    copied.  The second hop then has no list of its own.
    """
    left = [
        [hop.axis.size * hop.nbytes for hop in hops][int(forwards_in_place(hops)) :]
        for hops in gathers
        if hops
    ]
    held = [sizes.pop(0) for sizes in left]
    yield list(held)
    while any(left):
        for number, sizes in enumerate(left):
            if sizes:
                yield [*held, sizes[0]]
                held[number] = sizes.pop(0)
