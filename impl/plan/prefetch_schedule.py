"""Decides which units are gathered before they run, which stay gathered, and in which order gradients are reduced.

A :class:`Schedule` holds these decisions.  The engine (:mod:`impl.unit.unit`) looks them up during a pass, and so does
the simulation of a step (:mod:`impl.plan.timeline`).  A unit is a set of parameters that are gathered and reduced
together, and is represented by its index in model order.

To *gather a unit ahead* is to start its all-gather while an earlier unit computes.  *Outer* units are in use during the
whole pass: they are the unit of the root module's own parameters, and the unit of the persistent parameters.

Pure: no torch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from impl.plan.hops import gather_hops
from impl.policy.policy import MOST_LIVE, Policy
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology

MOST_AHEAD: Final = 4  # most units gathered ahead at one time; each occupies a slot of the shared memory


@dataclass(frozen=True)
class Schedule:
    """The order in which units run, the units that are gathered before they run, and the units that stay gathered.

    A unit that stays gathered is not freed between its forward and its backward pass.  A unit is represented by its
    index in model order.
    """

    sizes: Sequence[int]  # padded elements of each unit, by index
    order: tuple[int, ...]  # the units that run one after the other, in forward order
    outer: tuple[int, ...]  # the units in use during the whole pass (the root's, and the persistent ones)
    # Most elements of all units that are gathered ahead at one time.  The unit that runs next is gathered ahead even if
    # it is larger.  0: no unit is gathered ahead.
    prefetch: int
    # Most elements of all units that are gathered at one time.  A unit with which there would be more is not gathered
    # ahead.  None: ``MOST_LIVE``, but the unit that runs next is gathered ahead whatever its size.
    max_live: int | None = None
    kept: frozenset[int] = frozenset()  # the units that stay gathered from forward to backward
    # The order in which gradients are reduced.  True, as below stage 3: in reverse model order.  False: in the reverse
    # of ``order``, which is the order in which gradients arrive, so that no reduction waits for its turn.
    in_model_order: bool = False
    frozen: frozenset[int] = frozenset()  # the units without gradients, which are not reduced
    blocks: Sequence[str] = ()  # for each unit, the block with which it runs; empty: each unit runs by itself
    # The units that are gathered ahead in pairs.  In the order in which units run, a pair is the second and the third,
    # the fourth and the fifth, and so on, if both are in this set.  The first unit is gathered alone, because the pass
    # waits for it.
    small: frozenset[int] = frozenset()

    @classmethod
    def for_units(
        cls, policy: Policy, units: Sequence[UnitGeometry], small: frozenset[int] = frozenset()
    ) -> Schedule:
        """Returns the schedule of a model whose ``units`` are in model order.

        ``small`` are the indices of the units that are gathered ahead in pairs (:func:`small_units`).
        """
        return cls(
            sizes=[unit.padded for unit in units],
            order=tuple(index for index, unit in enumerate(units) if not unit.outer),
            outer=tuple(index for index, unit in enumerate(units) if unit.outer),
            prefetch=policy.memory.prefetch,
            max_live=policy.memory.max_live,
            kept=kept_units(policy, units),
            in_model_order=policy.stage < 3,
            frozen=frozenset(index for index, unit in enumerate(units) if not unit.trainable),
            blocks=[unit.block for unit in units],
            small=small,
        )

    @cached_property
    def reduction_order(self) -> tuple[int, ...]:
        """The indices of the trained units, in the order in which all ranks start to reduce the units' gradients."""
        order = sorted(self.order) if self.in_model_order else self.order
        return tuple(unit for unit in (*reversed(order), *self.outer) if unit not in self.frozen)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the units of each block, as one tuple for each block, in the order of the forward pass.

        The units of a block run together.  Outer units (in use during the whole pass, such as the root's) are left out.
        For example, if unit 0 is the root's, and each of two blocks has a trained and a frozen unit: ((1, 2), (3, 4)).
        """
        groups = itertools.groupby(self.order, lambda unit: self.blocks[unit] if self.blocks else unit)
        return tuple(tuple(units) for _, units in groups)

    def after(self, seen: Sequence[int]) -> Schedule:
        """Returns a copy of this schedule in which the units run in the order ``seen``.

        ``seen`` are indices of units, such as the order in which a pass has used them.  Units that are not in ``seen``
        run last.
        """
        return replace(self, order=(*seen, *(index for index in self.order if index not in seen)))

    @cached_property
    def ahead_in_forward(self) -> Sequence[Sequence[int]]:
        """For each unit, the indices of the units whose all-gathers start when this unit is about to run in forward.

        ``ahead_in_forward[unit]`` lists the indices in the order in which the units will run.
        """
        return [self._ahead(unit, self.order) for unit in range(len(self.sizes))]

    @cached_property
    def ahead_in_backward(self) -> Sequence[Sequence[int]]:
        """For each unit, the indices of the units whose all-gathers start when this unit is about to run in backward.

        A unit is about to run in backward when the gradient of its output arrives.  ``ahead_in_backward[unit]`` lists
        the indices in the order in which the units will run.
        """
        return [self._ahead(unit, self.order[::-1]) for unit in range(len(self.sizes))]

    def _ahead(self, unit: int, order: tuple[int, ...]) -> list[int]:
        """Returns the indices of the units that are gathered ahead: their all-gathers start when ``unit`` runs.

        ``order`` are the indices of the units in the order in which they run.  The result has the units that follow
        ``unit`` in ``order``.  If ``unit`` is an outer unit (in use during the whole pass, such as the root's), the
        result has the first units of ``order``.  Three limits determine how many:

        - number: at most :data:`MOST_AHEAD` units are gathered ahead.
        - ``prefetch``: the units that are gathered ahead have at most ``prefetch`` elements in total.  The first of
          these units may exceed the limit.  A pair (two units that are gathered together) that begins with the first or
          the second of these units may exceed the limit too.  With ``prefetch=0`` no unit is gathered ahead.
        - ``max_live``: all units that are gathered at one time have at most ``max_live`` elements.  If ``max_live`` is
          None, they have at most ``MOST_LIVE`` elements, but the first unit is gathered ahead whatever its size.

        A pair is not split: if the limits allow only its first unit, this unit is left out too, so that both units are
        gathered together later.  There is one exception: if the limits allow only one unit in all, this unit is in the
        result even if it is the first of a pair.
        """
        start = 0 if unit in self.outer else order.index(unit) + 1 if unit in order else len(order)
        ahead: list[int] = []
        stays = sum(self.sizes[index] for index in {*self.outer, *self.kept, unit})
        free = (MOST_LIVE if self.max_live is None else self.max_live) - stays
        # The place of the next pair's first unit.  Pairs start at odd places, counted from 0.  If ``start`` is even,
        # the unit at ``start`` can only be the second unit of a pair, whose first unit is ``unit``.
        pair = start + 1 - start % 2
        near = pair + 2 - start if self._pair(pair, order) else 1  # units for which ``prefetch`` is no limit
        taken = 0
        for index in order[start : start + MOST_AHEAD] if self.prefetch else ():
            taken += self.sizes[index]
            if taken > self.prefetch and len(ahead) >= near:
                break
            if taken > free and not (not ahead and self.max_live is None):
                break
            ahead.append(index)
        last = start + len(ahead) - 1
        if len(ahead) > 1 and self._pair(last, order):
            ahead.pop()
        return ahead

    def starting(
        self, ahead: Sequence[int], started: Container[int], under_way: int
    ) -> list[tuple[int, ...]]:
        """Returns the units of ``ahead`` whose all-gathers start now, in the order in which they start.

        The result has one tuple for each start: (index of one unit,), or the two indices of a pair, whose all-gathers
        start together.  At most :data:`MOST_AHEAD` + 1 all-gathers are under way at one time.  If only one all-gather
        of a pair is within this limit, the pair does not start.

        Args:
            ahead: the indices of the units to gather ahead (:attr:`ahead_in_forward`, :attr:`ahead_in_backward`).
            started: the units that are gathered or whose all-gather is under way; they are left out.
            under_way: how many all-gathers are under way already.
        """
        starts, joined = list[tuple[int, ...]](), False
        for place, index in enumerate(ahead):
            if joined or index in started:
                joined = False
                continue
            pair = (*ahead[place : place + 2],)
            joined = pair in self.pairs and pair[1] not in started
            if under_way + joined > MOST_AHEAD:
                break
            starts.append(pair if joined else (index,))
            under_way += len(starts[-1])
        return starts

    def _pair(self, start: int, order: tuple[int, ...]) -> tuple[int, int] | None:
        """Returns the units at the places ``start`` and ``start + 1`` of ``order`` if they form a pair, else None.

        A pair are two small units that are gathered together; it begins at an odd place, counted from 0.
        """
        both = order[start : start + 2]
        if start % 2 == 0 or len(both) < 2 or not self.small.issuperset(both):
            return None
        return both[0], both[1]

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The pairs of units that are gathered together, in forward or in backward, as (first used, second used)."""
        orders = (self.order, self.order[::-1]) if self.small else ()
        found = (self._pair(start, order) for order in orders for start in range(len(order)))
        return frozenset(pair for pair in found if pair is not None)


def small_units(policy: Policy, topology: Topology, units: Sequence[UnitGeometry]) -> frozenset[int]:
    """Returns the indices of the units that are small enough to be gathered two at a time, in pairs.

    Only an engine on a GPU whose stream waits for messages (as with NCCL) gathers pairs: one call then posts the
    messages of both units.  A small unit belongs to a block, has at most ``memory.prefetch`` elements, and its first
    message has at most ``memory.pair_below`` bytes.  If a schedule changes the policy while training, or if a budget
    chooses the codec, the limit on the message must hold for all settings of the schedule and all codecs of the budget.
    ``units`` are in model order.

    The set is empty in each of these cases: ``memory.pair_below`` is 0; the stage is below 3; the policy has offload or
    a user's own gather; or gathers of weights send nothing.
    """
    limits, offload = policy.memory, policy.offload
    own = policy.own_gather is not None or offload.weights or offload.optimizer
    if not limits.pair_below or policy.stage < 3 or own:
        return frozenset()
    small = set[int]()
    for index, unit in enumerate(units):
        if unit.outer or unit.padded > limits.prefetch:
            continue
        chosen = [each for phase in policy.phases for each in phase.for_unit(unit).choices("weights")]
        firsts = [gather_hops(each, topology, unit.shard, "weights")[:1] for each in chosen]
        if all(first and first[0].axis.size > 1 and first[0].nbytes <= limits.pair_below for first in firsts):
            small.add(index)
    return frozenset(small)


def kept_units(policy: Policy, units: Sequence[UnitGeometry]) -> frozenset[int]:
    """Returns the indices of the units whose weights stay gathered from a forward pass to its backward pass.

    ``units`` are in model order.  Outer units (the root's own parameters, and persistent parameters) stay gathered,
    since they are used last in forward and first in backward.  Blocks stay gathered, beginning with the last block, as
    long as two limits allow it:

    - ``memory.max_reuse``: fewer than ``max_reuse`` elements run between the block's forward and its backward pass.
      These are the elements of all later blocks, counted twice, since a block runs in forward and in backward.  For the
      last block the number is 0.
    - ``memory.max_live``: all units that are gathered at one time have at most ``max_live`` elements.

    There are three exceptions:

    - With ``max_reuse=0`` no unit stays gathered, not even the outer units.
    - If forward and backward compute with differently quantised weights (``planes`` other than 1), no unit stays
      gathered.
    - On one rank, any ``max_reuse`` above 0 is no limit.  There, freeing weights saves only 2 bytes for each parameter,
      and gathering them again reads and writes 6 bytes, because the masters are cast again.
    """
    if policy.planes != 1:
        return frozenset()
    limits, sizes = policy.memory, Counter[str]()  # elements by block, in model order
    for unit in units:
        sizes.update({} if unit.outer else {unit.block: unit.padded})
    live = sum(unit.padded for unit in units if unit.outer)
    kept = {unit.block for unit in units if unit.outer and limits.max_reuse}
    reuse = math.inf if limits.max_reuse and units and units[0].world == 1 else limits.max_reuse
    between, max_live = 0, MOST_LIVE if limits.max_live is None else limits.max_live
    for name in reversed(sizes):
        others = max((size for other, size in sizes.items() if other != name), default=0)
        if between >= reuse or live + sizes[name] + others > max_live:
            break
        kept.add(name)
        live += sizes[name]
        between += 2 * sizes[name]
    return frozenset(index for index, unit in enumerate(units) if unit.block in kept)
