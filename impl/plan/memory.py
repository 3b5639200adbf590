"""Predicts the bytes of memory that a rank needs, part by part, from the policy and the units' layout alone.

Tests check that the engine holds exactly the bytes that :func:`memory` predicts.  Pure: no torch.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Final

from impl.codecs.codec import BF16, ITEM_BYTES
from impl.plan.hops import copy_bytes, outer_hops, reduction_hops
from impl.plan.messages import message_bytes
from impl.plan.owners import MOMENTUM_BYTES, Owners
from impl.plan.prefetch_schedule import kept_units
from impl.plan.traffic import MASTER_BYTES, placements_of
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology

ADAM_BYTES: Final = 8  # two fp32 moments per element
STAGED: Final = 2  # most mean gradients that are being copied to the host at once
PARTS: Final = (
    "masters", "frozen", "gradients", "optimizer", "secondary", "feedback", "gathered", "local_gradients",
    "frames", "staging", "messages",
    "host_masters", "host_frozen", "host_gradients", "host_optimizer", "host_secondary", "host_frames",
)  # fmt: skip
"""The parts of a rank's memory (:func:`memory`)."""


def with_state(parts: dict[str, int], size: int) -> dict[str, int]:
    """Returns the bytes by part with another optimizer, from the ``parts`` that :func:`memory` returned for Adam.

    ``size`` is the other optimizer's number of bytes of state for each element; Adam has 8.
    """
    return parts | {part: size * (parts[part] // ADAM_BYTES) for part in ("optimizer", "host_optimizer")}


def with_muon(
    parts: dict[str, int], units: Sequence[UnitGeometry], owners: Owners, rank: int
) -> dict[str, int]:
    """Returns the bytes by part if Muon steps the matrices, from the ``parts`` that :func:`memory` returned for Adam.

    - ``optimizer``: 4 bytes for each element of a matrix (the momentum), 8 for each other element
    - ``owned``: two buffers in fp32.  One is as large as the largest matrix that the rank owns; the other is as large
      as the matrices' part of the rank's shard, in the unit where this part is largest

    The bytes are those of ``rank``; other ranks own other matrices and hold other parts of matrices.  The messages of
    the exchanges with owners are not counted.
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
) -> dict[str, int]:
    """Returns the bytes that one rank holds, by part, at the moment of a step when that part is largest.

    With S the elements of all of the rank's shards, the parts are:

    - ``masters``: 4 S, the fp32 weights; frozen weights that are kept as codes count as ``frozen`` instead
    - ``gradients``: 4 S, the mean gradients of trainable units
    - ``optimizer``: 8 S, Adam's two moments of trainable units
    - ``secondary``: hpZ's copy; with a budget or a schedule, in the largest of its codecs
    - ``feedback``: the kept errors of gradient codecs; with a schedule, in all its spans
    - ``outer``, with local steps only: 4 S for the masters at the last exchange between groups, and 4 S for the
      outer momentum, if there is one
    - ``gathered``: unsharded weights in the compute type.  Below stage 3 all units; in stage 3 the outer units
      and either the largest block or, if they have more elements, the units kept for backward (without
      ``backward`` no units are kept)
    - ``local_gradients``: unsharded gradients.  All of them in fp32 where several micro-batches are added up
      locally, else those of the outer units and the largest block, in the compute type
    - ``messages``: the buffers of messages if a GPU's ``streams`` wait for messages, as with NCCL
      (:mod:`impl.plan.messages`); where the host waits for messages, their buffers are not counted

    Units gathered ahead of their use are not included; they add at most ``memory.prefetch`` elements,
    or the largest unit if that is more.

    With offload, parts in host memory have the prefix ``host_``, and there are further parts.  The device
    holds ``frames``, the encoded weights of offloaded masters, unless the encoded weights are offloaded too.  It
    also holds ``staging``, two of the largest mean gradients while they are copied to the host.  The host holds
    ``host_frames``, the encoded weights of its fp32 shards.  The host holds gradients twice if micro-batches are
    added up in shards.
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
    parts["gathered"] = item * _gathered(policy, units, backward=backward)
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
    """Returns the bytes that outer steps need for ``shard`` elements: the anchor, and the outer momentum if any."""
    return MASTER_BYTES * shard * (2 if policy.outer_momentum else 1)


def _gathered(policy: Policy, units: Sequence[UnitGeometry], *, backward: bool) -> int:
    """Returns the most elements of weights gathered at once, not counting units gathered ahead of their use."""
    if policy.stage < 3:
        return sum(unit.padded for unit in units)
    # In backward, a block's units are gathered while the frozen units of the block after it are still gathered:
    # frozen units are resharded when the gradients of their block's inputs arrive, and the same gradients start
    # the backward pass of the block before.
    whole, frozen = Counter[str](), Counter[str]()
    for unit in units:
        if not unit.outer:
            whole[unit.block] += unit.padded
            frozen[unit.block] += unit.padded if backward and not unit.trainable else 0
    together = map(operator.add, whole.values(), [*list(frozen.values())[1:], 0])
    kept = sum(units[index].padded for index in kept_units(policy, units) if not units[index].outer)
    return _around_and_most(units, [*together, kept if backward else 0])


def _around_and_most(units: Sequence[UnitGeometry], sizes: Sequence[int]) -> int:
    """Returns the elements of all outer units, plus the largest of ``sizes`` (elements)."""
    return sum(unit.padded for unit in units if unit.outer) + max(sizes, default=0)


def secondary_either_way(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry]
) -> tuple[int, int] | None:
    """Returns (bytes of hpZ's copy on one rank if the copy is kept as frames, its bytes if kept in 16 bits).

    Returns None for a policy without hpZ.  With a schedule, the first span with hpZ counts.
    """
    copying = next((phase for phase in policy.phases if phase.secondary != 0), None)
    if copying is None:
        return None
    pairs = [(copying.for_unit(unit), unit) for unit in units]
    frames = sum(copy_bytes(rules, topology, unit.shard, rules.weights) for rules, unit in pairs)
    return frames, sum(copy_bytes(rules, topology, unit.shard, BF16) for rules, unit in pairs)
