"""The timeline of a step: what a rank computes, encodes and waits for, in the order of the schedule.

Pure: no torch.  All ranks do the same at the same time, so this follows one of them.  It is driven by the
engine's own :class:`~impl.plan.prefetch_schedule.Schedule` and
:class:`~impl.plan.reduction_queue.ReductionQueue`, and posts messages when the engine
(:mod:`impl.unit.unit`) does: a gather's first hop when it starts and each further one in the wait for the
weights; a reduction's first hop at the unit's last gradient, each further one at the first gradient of the
next trained unit.  Tests hold the order of both (``tests/impl/plan/test_issue_order.py``).

Three resources serve one request at a time, in order: the rank's *processor* (or GPU stream), the node's
*adapter* to other nodes, and the connection of ranks *inside* the node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from impl.plan.prefetch_schedule import MOST_AHEAD, Schedule
from impl.plan.reduction_queue import Progress, ReductionQueue

Seconds = float | NDArray[np.float64]
FIRST_GRADIENT: Final = 1 / 3  # of a unit's backward pass has run when the first of its gradients arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One exchange of a collective, in seconds."""

    adapter: float  # of all messages of a node on its adapter
    inside: float = 0.0  # of all messages of a rank inside its node
    latency: float = 0.0  # from the end of sending to the arrival, beside other messages
    before: float = 0.0  # of the processor, to encode or copy the message
    follows: int = 1  # how many places before it stands the hop that must have arrived; 0 for none
    sends: bool = True  # False for a hop along an axis of one rank, which only takes its turn
    at_once: bool = False  # whether it is posted together with the hop before it, not at the next event


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Hops in the order in which they are posted, and the processor's seconds after the last, to decode."""

    hops: tuple[Hop, ...] = ()
    after: float = 0.0
    # Whether the last hop crosses nodes: a reduction's is then waited for when the bucket is full or the pass
    # over, else at the next event.
    crosses: bool = True


def in_chunks(hops: Sequence[Sequence[Hop]]) -> tuple[Hop, ...]:
    """Hops of a reduction, each in as many chunks, in the order in which they are posted.

    A chunk is posted on its next hop as soon as the chunk after it was posted on this one, as
    :class:`impl.comm.reduce_scatter.Reduction` does.
    """
    chunks = len(hops[0]) if hops else 0
    posted, places = list[Hop](), dict[tuple[int, int], int]()

    def post(hop: int, chunk: int, *, at_once: bool) -> None:
        place = places[hop, chunk] = len(posted)
        follows = place - places[hop - 1, chunk] if hop else 0
        posted.append(replace(hops[hop][chunk], follows=follows, at_once=at_once))

    for turn in range(chunks + len(hops) - 1):
        if turn < chunks:
            post(0, turn, at_once=turn > 0)
        first = turn >= chunks  # of this event
        for hop in range(1, len(hops)):
            if 0 <= turn - hop < chunks:
                post(hop, turn - hop, at_once=not first)
                first = False
    return tuple(posted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one unit computes and sends in a pass."""

    forward: Seconds  # of computation; or (n,) of n passes at once
    backward: Seconds
    gather: Collective = Collective()  # of its weights, before its forward pass
    regather: Collective = Collective()  # before its backward pass
    reduce: Collective = Collective()  # of its gradient
    engine: float = 0.0  # further seconds of the processor in each of forward and backward


def pass_time(
    schedule: Schedule,
    loads: Sequence[Load],
    *,
    bucket: float = math.inf,
    first_gradient: float = FIRST_GRADIENT,
    least_forward: Seconds = 0.0,
    reduces: bool = True,
) -> Pass:
    """One forward and backward pass of ``loads``, by unit, with ``bucket`` elements in reduction at most.

    Outer units (embedding, head) compute where most of their computation is done: after the blocks in
    forward, before them in backward, which does not begin before ``least_forward``.  A block computes once
    all its units are gathered.  A pass that only accumulates gradients (not ``reduces``) sends none.
    """
    run, outer = Pass(schedule, loads, bucket), [loads[unit] for unit in schedule.outer]
    for unit in schedule.outer:
        run.gather(unit, schedule.ahead_in_forward[unit])
    for units in schedule.runs:
        for unit in units:
            run.gather(unit, schedule.ahead_in_forward[unit])
        run.compute(sum(loads[unit].forward + loads[unit].engine for unit in units))
    run.compute(sum(load.forward + load.engine for load in outer))
    run.turn(least_forward)
    for unit in schedule.outer:
        run.gather(unit, schedule.ahead_in_backward[unit])
    run.compute(sum(load.backward + load.engine for load in outer))
    for units in reversed(schedule.runs):
        for unit in units:  # in model order, as the hook before a block's backward pass goes through them
            run.gather(unit, schedule.ahead_in_backward[unit])
        backward = sum(loads[unit].backward for unit in units)
        trained = [unit for unit in units if unit not in schedule.frozen]
        if trained:
            run.compute(backward * first_gradient)
            run.first_gradient()
            backward = backward * (1 - first_gradient)
        run.compute(backward + sum(loads[unit].engine for unit in units))
        run.last_gradient(units, trained if reduces else ())
    run.last_gradient(
        schedule.outer, [unit for unit in schedule.outer if unit not in schedule.frozen] if reduces else ()
    )
    run.finish(reduces=reduces)
    return run


def least_pass_seconds(schedule: Schedule, loads: Sequence[Load]) -> Seconds:
    """Least seconds of one forward and backward pass, of loads with computation and adapter times alone.

    Outer units compute while the adapter is free, and gradients arrive when backward begins.  Never above the
    prediction of :func:`pass_time` for the same loads or larger ones.
    """
    inner = [
        replace(load, forward=0.0, backward=0.0) if unit in schedule.outer else load
        for unit, load in enumerate(loads)
    ]
    forward = sum(load.forward for load in loads)
    least = pass_time(schedule, inner, first_gradient=0.0, least_forward=forward)
    return np.maximum(least.seconds, least.forward + sum(load.backward for load in loads))


@dataclass(slots=True)
class _UnderWay:
    """A collective under way: the hops posted so far are those with an arrival."""

    unit: int
    purpose: Literal["weights", "gradients"]
    collective: Collective
    arrivals: list[Seconds]

    @property
    def left(self) -> bool:
        """Whether a hop is still to be posted."""
        return len(self.arrivals) < len(self.collective.hops)


class _Reduction:
    """The simulated reduction of one unit, in the engine's queue."""

    def __init__(self, run: Pass, unit: int, elements: int, collective: Collective) -> None:
        self.elements, self.progress = elements, Progress.COLLECTING
        self._run, self._unit, self._collective = run, unit, collective
        self._under_way: _UnderWay | None = None

    def start(self) -> None:
        """Post the first hop."""
        self._under_way = self._run.start(self._unit, "gradients", self._collective)
        self.progress = Progress.REDUCING
        if not self._collective.hops:  # of one rank
            self.post_next_hop(finish=True)

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the next hop once the hop before has arrived, or ``finish``."""
        under_way = self._under_way
        if self.progress is not Progress.REDUCING or under_way is None:
            return
        if not finish and under_way.left:
            self._run.post(under_way)
        elif finish or not self._collective.crosses:
            self._run.complete(under_way)
            self.progress = Progress.REDUCED


class Pass:
    """A pass under way, in seconds since it began."""

    def __init__(self, schedule: Schedule, loads: Sequence[Load], bucket: float) -> None:
        self.seconds: Seconds = 0.0  # until now; in the end, until the last gradient is reduced
        self.forward: Seconds = 0.0  # of the forward pass
        self.exposed: Seconds = 0.0  # of waits for messages
        self.adapter = 0.0  # of the node's busy adapter
        # In order, each message that was posted, by its purpose, and each mean that was taken, with the unit.
        self.events: list[tuple[Literal["weights", "gradients", "mean"], int]] = []
        self._schedule, self._loads = schedule, loads
        self._backward = False
        self._adapter_free: Seconds = 0.0  # when all posted messages will have been sent
        self._inside_free: Seconds = 0.0
        self._gathers: dict[int, _UnderWay | None] = {}  # by unit, under way or finished (None)
        self._reductions = {
            unit: _Reduction(self, unit, schedule.sizes[unit], loads[unit].reduce)
            for unit in schedule.reduction_order
        }
        self._queue = ReductionQueue(bucket)
        self._queue.order = list(self._reductions.values())

    def compute(self, seconds: Seconds) -> None:
        """The processor works."""
        self.seconds = self.seconds + seconds

    def turn(self, least: Seconds) -> None:
        """End the forward pass: only units that the schedule keeps stay gathered."""
        self.seconds = self.forward = np.maximum(self.seconds, least)
        self._gathers = {unit: self._gathers[unit] for unit in self._gathers.keys() & self._schedule.kept}
        self._backward = True

    def gather(self, unit: int, ahead: Sequence[int]) -> None:
        """Gather ``unit`` and those ``ahead`` of it, unless gathered or under way; wait for ``unit``."""
        self._start_gather(unit)
        for index in ahead:
            under_way = sum(gather is not None for gather in self._gathers.values())
            if index not in self._gathers and under_way <= MOST_AHEAD:
                self._start_gather(index)
        self._finish_gather(unit)

    def _start_gather(self, unit: int) -> None:
        if unit in self._gathers:
            return
        if self._schedule.in_model_order and not self._backward:
            for earlier in range(unit):  # below stage 3 all ranks gather all units in one order
                self._start_gather(earlier)
                self._finish_gather(earlier)
        load = self._loads[unit]
        self._gathers[unit] = self.start(unit, "weights", load.regather if self._backward else load.gather)

    def _finish_gather(self, unit: int) -> None:
        if (under_way := self._gathers[unit]) is not None:
            self.complete(under_way)
            self._gathers[unit] = None

    def first_gradient(self) -> None:
        """The first gradient of a unit has arrived: every reduction under way posts its next hop."""
        self._queue.post_next_hops()

    def last_gradient(self, units: Sequence[int], reduced: Sequence[int]) -> None:
        """All gradients of ``units`` have arrived: drop their weights, and start the reductions of some."""
        for unit in units:
            del self._gathers[unit]
        for unit in reduced:
            self._reductions[unit].progress = Progress.READY
        self._queue.start_ready()

    def finish(self, *, reduces: bool) -> None:
        """Start all reductions if the pass ``reduces``, and wait for them."""
        self._queue.finish(start=reduces)

    def start(self, unit: int, purpose: Literal["weights", "gradients"], collective: Collective) -> _UnderWay:
        """Start a collective: post its first hop."""
        under_way = _UnderWay(unit, purpose, collective, [])
        if under_way.left:
            self.post(under_way)
        return under_way

    def complete(self, under_way: _UnderWay) -> None:
        """Post the hops that are left, wait for the last one, and decode."""
        while under_way.left:
            self.post(under_way)
        if under_way.arrivals:
            self._wait(under_way.arrivals[-1])
        self.compute(under_way.collective.after)
        if under_way.purpose == "gradients":
            self.events.append(("mean", under_way.unit))

    def post(self, under_way: _UnderWay) -> None:
        """Post the next hop, and those that are posted with it, each once the hop that it follows arrived."""
        hops, arrivals = under_way.collective.hops, under_way.arrivals
        self._post(under_way, hops[len(arrivals)])
        while under_way.left and hops[len(arrivals)].at_once:
            self._post(under_way, hops[len(arrivals)])

    def _post(self, under_way: _UnderWay, hop: Hop) -> None:
        if 0 < hop.follows <= len(under_way.arrivals):
            self._wait(under_way.arrivals[-hop.follows])
        self.compute(hop.before)
        arrival = self.seconds
        if hop.adapter:
            self._adapter_free = np.maximum(self._adapter_free, self.seconds) + hop.adapter
            arrival = self._adapter_free
            self.adapter += hop.adapter
        if hop.inside:
            self._inside_free = np.maximum(self._inside_free, self.seconds) + hop.inside
            arrival = np.maximum(arrival, self._inside_free)
        under_way.arrivals.append(arrival + hop.latency)
        if hop.sends:
            self.events.append((under_way.purpose, under_way.unit))

    def _wait(self, until: Seconds) -> None:
        waited = np.maximum(until - self.seconds, 0.0)
        self.exposed = self.exposed + waited
        self.seconds = self.seconds + waited
