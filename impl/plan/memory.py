"""Predicts the bytes of memory that a rank needs, part by part, from the policy and the units' layout alone.

A unit is a set of parameters that are gathered and reduced together.  Tests check that the engine holds exactly the
bytes that :func:`memory` predicts.  Pure: no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from impl.codecs.codec import BF16, ITEM_BYTES
from impl.plan.gathered_weights import most_gathered, taken_at_start
from impl.plan.hops import copy_bytes, outer_hops, reduction_hops
from impl.plan.messages import message_bytes
from impl.plan.owners import MOMENTUM_BYTES, Owners
from impl.plan.prefetch_schedule import Schedule, small_units
from impl.plan.traffic import MASTER_BYTES, placements_of
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Axis, Topology

ADAM_BYTES: Final = 8  # bytes of Adam's state for each element: two moments in fp32
STAGED: Final = 2  # most mean gradients that are being copied to the host at one time
PARTS: Final = (
    "masters", "frozen", "gradients", "optimizer", "secondary", "feedback", "gathered", "local_gradients",
    "frames", "staging", "messages",
    "host_masters", "host_frozen", "host_gradients", "host_optimizer", "host_secondary", "host_frames",
)  # fmt: skip
"""The names of the parts of a rank's memory, which :func:`memory` describes."""


def with_state(parts: dict[str, int], size: int) -> dict[str, int]:
    """Returns the bytes of each part of a rank's memory with another optimizer than Adam.

    ``parts`` are the bytes with Adam, which :func:`memory` has returned.  ``size`` is the number of bytes of state that
    the other optimizer has for each element; Adam has 8.
    """
    return parts | {part: size * (parts[part] // ADAM_BYTES) for part in ("optimizer", "host_optimizer")}


def with_muon(
    parts: dict[str, int], units: Sequence[UnitGeometry], owners: Owners, rank: int
) -> dict[str, int]:
    """Returns the bytes of each part of the memory of ``rank`` if Muon steps the model's matrices.

    ``parts`` are the bytes with Adam, which :func:`memory` has returned.  The result differs from ``parts`` in two
    entries:

    - ``optimizer``: 4 bytes (the momentum) for each element of a matrix in the rank's shards, and 8 bytes (Adam's two
      moments) for each other trained element in these shards
    - ``owned``: two buffers in fp32.  The first has the size of the largest matrix that the rank orthogonalises (it is
      the owner of this matrix).  In each unit, the elements of matrices occupy one part of the rank's shard, padding
      included; the second buffer has the size of the largest such part

    The messages to and from the owners of matrices are not counted.
    """
    group = owners.matrices[0].slot.spec.group
    spans = [
        (number == group, end - start)
        for unit in units
        if unit.trainable
        for number, start, end in unit.spans(rank)
    ]
    me = owners.axis.digit(rank)
    owned = [matrix.slot.spec.numel for matrix in owners.matrices if matrix.owner == me]
    buffers = max(owned, default=0) + max(numel for matrices, numel in spans if matrices)
    state = sum((MOMENTUM_BYTES if matrices else ADAM_BYTES) * numel for matrices, numel in spans)
    return parts | {"optimizer": state, "owned": MASTER_BYTES * buffers}


def memory(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    *,
    micro_batches: int = 1,
    backward: bool = True,
    streams: bool = False,
    in_place: Callable[[Axis], bool] = lambda _: False,
) -> dict[str, int]:
    """Returns for each part of one rank's memory the most bytes that the part has at one time during a step.

    S is the number of elements of the rank's shards of all units, and T the number of elements of its shards of trained
    units.  The parts are:

    - ``masters``: 4 S, the fp32 weights
    - ``frozen``: frozen weights, if the policy keeps them encoded; these weights do not count as ``masters``
    - ``gradients``: 4 T, the mean gradients
    - ``optimizer``: 8 T, Adam's two moments
    - ``secondary``: hpZ's copy of the weights.  If a budget or a schedule changes the codec of the copy, the codec that
      needs most bytes counts
    - ``feedback``: the carried errors of gradient codecs (error feedback).  If only some steps of a schedule use error
      feedback, the errors are kept in the other steps as well
    - ``outer``, with local steps only: 4 T for the anchor, that is, the weights after the last outer step, and 4 T for
      the outer momentum, if the policy has one
    - ``gathered``: unsharded weights in the compute type (see below)
    - ``local_gradients``: unsharded gradients of trained units.  If the gradients of several micro-batches are added up
      locally, this part has the gradients of all trained units, in fp32.  Otherwise it has the gradients of the outer
      units and of the largest unit of a block, in the compute type
    - ``messages``: the buffers of messages (:mod:`impl.plan.messages`), only with ``streams``

    Outer units are the unit of the root module's own parameters and the unit of the persistent parameters.

    Below stage 3, the part ``gathered`` has the weights of all units.  In stage 3, units are gathered and freed during
    a pass (:mod:`impl.plan.gathered_weights`), and the part is the most that is gathered at one time.  These weights
    count:

    - those of the outer units, and of the block that runs;
    - those of blocks that stay gathered for backward;
    - those of blocks that are gathered ahead of their use (``memory.prefetch``), if the memory of the weights is taken
      when the all-gather starts.  That is so if the all-gather has no message to decode, or if a GPU's stream waits for
      messages (``streams``).  In all other cases, and always if a user's class gathers the unit, the memory is taken
      when the messages are decoded, just before the block runs;
    - in backward, those of the frozen units of the block that has just run, which are freed a little later.

    Offload adds parts.  A part in host memory has the prefix ``host_``:

    - ``frames``: on the device, the encoded weights of offloaded masters, unless the encoded weights are offloaded too
    - ``host_frames``: the encoded weights of masters in host memory
    - ``staging``: on the device, two mean gradients of the largest offloaded unit, while they are copied to the host
    - ``host_gradients``: the mean gradients of offloaded units.  If the mean gradients of several micro-batches are
      added up on the host, they count twice

    Args:
        policy: the policy of the model.
        topology: nodes and ranks.
        units: the model's units, in model order.
        micro_batches: the number of micro-batches in a step.
        backward: False for steps without a backward pass, for which no units stay gathered.
        streams: True if a GPU's stream waits for messages, as with NCCL; False if the host waits for them.
        in_place: a function that returns whether the transport lets messages along an axis arrive in the memory of the
            gathered weights, as gloo does over TCP (:meth:`impl.comm.wire.Wire.lets_go`).  By default it returns False.
    """
    item = ITEM_BYTES[policy.compute]
    parts = dict.fromkeys(PARTS, 0)

    def add(part: str, nbytes: int, *, host: bool) -> None:
        parts[f"host_{part}" if host else part] += nbytes

    landing = 1 if micro_batches == 1 or not policy.reduces_each_micro_batch else 2
    for unit, placement in zip(units, placements_of(policy.offload, units), strict=True):
        phases = [phase.for_unit(unit) for phase in policy.phases]
        unit_policy = phases[0]
        frame, fp32 = unit_policy.weights.frame_bytes(unit.shard), MASTER_BYTES * unit.shard
        coded = not unit.trainable and policy.frozen is not None
        add("frozen" if coded else "masters", frame if coded else fp32, host=placement.shard)
        choices = itertools.chain.from_iterable(phase.choices("weights") for phase in phases)
        add("secondary", max(copy_bytes(p, topology, unit.shard) for p in choices), host=placement.frames)
        if placement.shard and not coded:
            parts["host_frames"] += frame
            parts["frames"] += 0 if placement.frames else frame
        if unit.trainable:
            add("gradients", fp32 * (landing if placement.shard else 1), host=placement.shard)
            add("optimizer", ADAM_BYTES * unit.shard, host=placement.shard)
            carrying = next((phase for phase in phases if phase.feedback is not None), None)
            if carrying is not None and (feedback := carrying.feedback) is not None:
                hops = reduction_hops(carrying, topology, unit.piece, carrying.grain)
                hops += outer_hops(carrying, topology, unit.piece, carrying.grain)
                kept = sum(hop.axis.size * hop.elements for hop in hops if hop.keeps == "errors")
                parts["feedback"] += ITEM_BYTES[feedback.state] * kept
            if policy.local_steps is not None:
                parts["outer"] = parts.get("outer", 0) + outer_bytes(policy, unit.shard)
            if placement.shard:
                parts["staging"] = max(parts["staging"], STAGED * fp32)
    parts["gathered"] = item * _gathered(
        policy, topology, units, backward=backward, streams=streams, in_place=in_place
    )
    trained = [unit for unit in units if unit.trainable]
    parts["local_gradients"] = item * _around_and_most(trained, [u.padded for u in trained if not u.outer])
    if micro_batches > 1 and not policy.reduces_each_micro_batch:
        parts["local_gradients"] = max(item, MASTER_BYTES) * sum(unit.padded for unit in trained)
    if streams:
        parts["messages"] = message_bytes(
            policy, topology, units, micro_batches=micro_batches, backward=backward
        )
    return parts


def outer_bytes(policy: Policy, shard: int) -> int:
    """Returns the bytes of memory that local steps add for a shard of ``shard`` elements.

    With local steps, groups of ranks train apart from one another, and average their weights in outer steps.  For each
    element, a rank needs 4 bytes for the anchor (the weight after the last outer step).  If the policy has an outer
    momentum, the rank needs 4 more bytes for it.
    """
    return MASTER_BYTES * shard * (2 if policy.outer_momentum else 1)


def _gathered(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    *,
    backward: bool,
    streams: bool,
    in_place: Callable[[Axis], bool],
) -> int:
    """Returns the most elements of weights that are gathered at one time; the arguments are those of :func:`memory`."""
    if policy.stage < 3:
        return sum(unit.padded for unit in units)
    small = small_units(policy, topology, units) if streams else frozenset[int]()
    schedule = Schedule.for_units(policy, units, small)
    early = {
        taken_at_start(phase, topology, units, streams=streams, in_place=in_place) for phase in policy.phases
    }
    return max(most_gathered(schedule, indices, backward=backward) for indices in early)


def _around_and_most(units: Sequence[UnitGeometry], sizes: Sequence[int]) -> int:
    """Returns the number of elements of all outer units among ``units``, plus the largest of ``sizes``.

    Outer units, such as the unit of the root module's own parameters, are in use during the whole pass.  If ``sizes``
    are the elements of the other units, the result is the most elements in use when one unit runs at a time.
    """
    return sum(unit.padded for unit in units if unit.outer) + max(sizes, default=0)


def secondary_either_way(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry]
) -> tuple[int, int] | None:
    """Returns the bytes of hpZ's copy of the weights on one rank, for two ways of keeping the copy.

    The result is (bytes if the copy is kept in the codec of the weights, bytes if the copy is kept in bf16).  If the
    policy's settings change while training (a schedule), the first settings with hpZ are used.  Returns None without
    hpZ.
    """
    copying = next((phase for phase in policy.phases if phase.secondary != 0), None)
    if copying is None:
        return None
    pairs = [(copying.for_unit(unit), unit) for unit in units]
    frames = sum(copy_bytes(rules, topology, unit.shard, rules.weights) for rules, unit in pairs)
    return frames, sum(copy_bytes(rules, topology, unit.shard, BF16) for rules, unit in pairs)
