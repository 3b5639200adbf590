"""Predicts how many elements of weights a rank has gathered at one time in a step of stage 3.

The engine gathers a unit, which is a group of parameters such as those of a block, into a flat buffer
(:mod:`impl.unit.flat_buffer`).  The unit takes its buffer either when its all-gather starts, or later, when its
messages have arrived and are decoded.  The unit frees its buffer when its block has run.  The prediction walks through
a forward and a backward pass in the engine's order of gathers, and counts the elements of all buffers.  It shares the
decisions of :class:`~impl.plan.prefetch_schedule.Schedule` with the engine and with the simulation of a step's time
(:mod:`impl.plan.timeline`).

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from impl.plan.hops import arrives_decoded, casts_alone, gather_hops
from impl.plan.prefetch_schedule import Schedule
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Axis, Topology


def taken_at_start(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    *,
    streams: bool,
    in_place: Callable[[Axis], bool],
) -> frozenset[int]:
    """Returns the indices of the units that get the memory for their weights when their all-gather starts.

    A unit is a group of parameters that are gathered together.  All other units get the memory later, when their
    messages are decoded.  If a user's class gathers a unit, the unit always gets the memory later.  Any other unit gets
    the memory at the start in each of these cases, as in :meth:`impl.unit.weight_gather.WeightGather.start`:

    - a GPU's stream waits for messages (``streams``);
    - the gather only casts the rank's own weights;
    - the messages arrive in the memory of the weights.

    If the policy has a bit budget, the codec of a unit is chosen during training and is not known yet.  The result then
    contains the unit if one of these cases holds with at least one of the codecs to choose from.

    Args:
        policy: the policy of the model, without a schedule.
        topology: nodes and ranks.
        units: the model's units, in model order.
        streams: whether a GPU's stream waits for messages, as with NCCL.
        in_place: a function that returns whether the transport lets messages along an axis arrive in the memory of
            the weights.
    """

    def early(rules: Policy, shard: int) -> bool:
        if not (hops := gather_hops(rules, topology, shard)):  # a user's own gather
            return False
        arrives = arrives_decoded(hops, rules.compute) and in_place(hops[0].axis)
        return streams or arrives or casts_alone(hops, rules.compute)

    return frozenset(
        index
        for index, unit in enumerate(units)
        if any(early(rules, unit.shard) for rules in policy.for_unit(unit).choices("weights"))
    )


def most_gathered(schedule: Schedule, early: Collection[int], *, backward: bool) -> int:
    """Returns the largest number of elements that all flat buffers together have at one time in a pass of stage 3.

    A flat buffer holds the gathered weights of one unit (group of parameters).

    Args:
        schedule: which units are gathered ahead, and which stay gathered.
        early: the indices of the units that take their flat buffer when their all-gather starts
            (:func:`taken_at_start`).
        backward: True for a forward and a backward pass; False for a forward pass alone, after which no unit stays
            gathered.
    """
    held = _Held(schedule, early)
    for unit in schedule.outer:
        held.gather(unit, schedule.ahead_in_forward[unit])
    for units in schedule.runs:
        for unit in units:
            held.gather(unit, schedule.ahead_in_forward[unit])
        held.free(unit for unit in units if not (backward and unit in schedule.kept))
    if not backward:
        return held.most
    held.free(unit for unit in schedule.outer if unit not in schedule.kept)
    for unit in schedule.outer:
        held.gather(unit, schedule.ahead_in_backward[unit])
    frozen: Sequence[int] = ()  # those of the block that ran before
    for units in reversed(schedule.runs):
        for unit in units:
            held.gather(unit, schedule.ahead_in_backward[unit])
        # Frozen units are freed when the gradients of their block's inputs arrive.  The same gradients start the
        # backward pass of the block before, which gathers its own units first.
        held.free(frozen)
        frozen = [unit for unit in units if unit in schedule.frozen]
        held.free(unit for unit in units if unit not in schedule.frozen)
    return held.most


class _Held:
    """Counts the elements of all flat buffers while units are gathered and freed; nothing is sent.

    A unit is a group of parameters that are gathered together, into one flat buffer.
    """

    def __init__(self, schedule: Schedule, early: Collection[int]) -> None:
        self.most = 0  # most elements of all flat buffers at one time
        self._schedule, self._early, self._now = schedule, early, 0
        self._ready: dict[
            int, bool
        ] = {}  # by unit: True if it is gathered, False while its all-gather is under way

    def gather(self, unit: int, ahead: Sequence[int]) -> None:
        """Start the all-gathers of ``unit`` and of the units ``ahead``, and wait for the all-gather of ``unit``.

        The method only counts elements; nothing is sent.  Units (groups of parameters) are given by their indices.  A
        unit of ``ahead`` is skipped if it is gathered already, or if too many all-gathers are under way.
        """
        if unit not in self._ready:
            self._start(unit)
        under_way = sum(not ready for ready in self._ready.values())
        for units in self._schedule.starting(ahead, self._ready, under_way):
            for each in units:
                self._start(each)
        if not self._ready[unit]:
            self._ready[unit] = True
            if unit not in self._early:
                self._take(unit)

    def free(self, units: Iterable[int]) -> None:
        """Count the flat buffers of ``units`` as freed; units that are not gathered are left out."""
        for unit in units:
            if self._ready.pop(unit, False):
                self._now -= self._schedule.sizes[unit]

    def _start(self, unit: int) -> None:
        self._ready[unit] = False
        if unit in self._early:
            self._take(unit)

    def _take(self, unit: int) -> None:
        self._now += self._schedule.sizes[unit]
        self.most = max(self.most, self._now)
