"""Predicts a rank's bytes of memory, by part, from the policy alone.

Pure: no torch.  Tests demand that the engine holds the bytes of :func:`memory`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Final

from impl.codecs.codec import BF16, ITEM_BYTES
from impl.plan.policy import Policy
from impl.plan.prefetch_schedule import kept_units
from impl.plan.shard_layout import UnitGeometry
from impl.plan.topology import Topology
from impl.plan.traffic import MASTER_BYTES, placements_of, reduction_hops, secondary_bytes

ADAM_BYTES: Final = 8  # two fp32 moments per element
STAGED: Final = 2  # mean gradients on their way to the host at most
PARTS: Final = (
    "masters", "frozen", "gradients", "optimizer", "secondary", "feedback", "gathered", "local_gradients",
    "frames", "staging",
    "host_masters", "host_frozen", "host_gradients", "host_optimizer", "host_secondary", "host_frames",
)  # fmt: skip
"""The parts of a rank's memory (:func:`memory`)."""


def with_state(parts: dict[str, int], size: int) -> dict[str, int]:
    """The bytes by part of :func:`memory`, for ``size`` bytes of optimizer state an element."""
    return parts | {part: size * (parts[part] // ADAM_BYTES) for part in ("optimizer", "host_optimizer")}


def memory(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    *,
    micro_batches: int = 1,
    backward: bool = True,
) -> dict[str, int]:
    """Bytes that one rank holds, by part, at the worst moment of a step; S is the sum of shards.

    ``masters`` 4 S; ``frozen`` the codes of frozen weights, where the policy has a codec for them;
    ``gradients`` 4 S of trainable units; ``optimizer`` 8 S (Adam); ``secondary`` hpZ's copy, with a budget in
    the largest codec; ``feedback`` the kept errors; ``gathered`` in the compute type, unsharded: all below
    stage 3, else the outer units and the largest block or, if more, those that stay for backward (without
    ``backward`` none); ``local_gradients``: all, in fp32, where several micro-batches are added up locally,
    else the outer units' and the largest block's in the compute type.  Gathering ahead adds ``prefetch``.

    Parts in host memory have the prefix ``host_``.  For them the device holds ``frames``, those of offloaded
    masters unless frames are offloaded too, and ``staging``, two of the largest mean gradients on their way;
    the host holds ``host_frames``, those of its fp32 shards, and its gradients twice where shards add up.
    """
    item = ITEM_BYTES[policy.compute]
    parts = dict.fromkeys(PARTS, 0)

    def add(part: str, nbytes: int, *, host: bool) -> None:
        parts[f"host_{part}" if host else part] += nbytes

    landing = 1 if micro_batches == 1 or not policy.reduces_each_micro_batch else 2
    for unit, placement in zip(units, placements_of(policy.offload, units), strict=True):
        unit_policy = policy.for_unit(unit)
        frame, fp32 = unit_policy.weights.frame_bytes(unit.shard), MASTER_BYTES * unit.shard
        coded = not unit.trainable and policy.frozen is not None
        add("frozen" if coded else "masters", frame if coded else fp32, host=placement.shard)
        codecs = unit_policy.candidates.get("weights", (unit_policy.weights,))
        choices = [unit_policy.with_choice("weights", codec) for codec in codecs]
        add("secondary", max(secondary_bytes(p, topology, unit) for p in choices), host=placement.frames)
        if placement.shard and not coded:
            parts["host_frames"] += frame
            parts["frames"] += 0 if placement.frames else frame
        if unit.trainable:
            add("gradients", fp32 * (landing if placement.shard else 1), host=placement.shard)
            add("optimizer", ADAM_BYTES * unit.shard, host=placement.shard)
            if (feedback := unit_policy.feedback) is not None:
                hops = reduction_hops(unit_policy, topology, unit.piece, unit_policy.grain)
                pairs = zip(hops, unit_policy.feedback_hops(topology), strict=True)
                rows = sum(axis.size * slices for (axis, _, slices, _), keeps in pairs if keeps)
                parts["feedback"] += ITEM_BYTES[feedback.state] * rows * unit.piece
            if placement.shard:
                parts["staging"] = max(parts["staging"], STAGED * fp32)
    parts["gathered"] = item * _gathered(policy, units, backward=backward)
    trained = [unit for unit in units if unit.trainable]
    parts["local_gradients"] = item * _around_and_most(trained, [u.padded for u in trained if not u.outer])
    if micro_batches > 1 and not policy.reduces_each_micro_batch:
        parts["local_gradients"] = max(item, MASTER_BYTES) * sum(unit.padded for unit in trained)
    return parts


def _gathered(policy: Policy, units: Sequence[UnitGeometry], *, backward: bool) -> int:
    """Most elements of weights that are gathered at once, without those gathered ahead of their use."""
    if policy.stage < 3:
        return sum(unit.padded for unit in units)
    # A block's units and, in backward, the frozen ones of the next block: these are resharded when the
    # gradients of its inputs arrive, which also start the block before it.
    whole, frozen = Counter[str](), Counter[str]()
    for unit in units:
        if not unit.outer:
            whole[unit.block] += unit.padded
            frozen[unit.block] += unit.padded if backward and not unit.trainable else 0
    together = map(operator.add, whole.values(), [*list(frozen.values())[1:], 0])
    kept = sum(units[index].padded for index in kept_units(policy, units) if not units[index].outer)
    return _around_and_most(units, [*together, kept if backward else 0])


def _around_and_most(units: Sequence[UnitGeometry], sizes: Sequence[int]) -> int:
    """Elements of the outer units, plus the largest of ``sizes``."""
    return sum(unit.padded for unit in units if unit.outer) + max(sizes, default=0)


def secondary_either_way(
    policy: Policy, topology: Topology, units: Sequence[UnitGeometry]
) -> tuple[int, int] | None:
    """Bytes of hpZ's copy on one rank, kept as frames and in 16 bits; None for a policy without one."""
    if policy.secondary == 0:
        return None
    pairs = [(policy.for_unit(unit), unit) for unit in units]
    frames = sum(secondary_bytes(rules, topology, unit, rules.weights) for rules, unit in pairs)
    return frames, sum(secondary_bytes(rules, topology, unit, BF16) for rules, unit in pairs)
