"""Simulates a forward and a backward pass: when one rank computes, encodes, sends and waits.

All ranks do the same at the same time, so the simulation follows one rank.  The engine and the simulation share the
classes :class:`~impl.plan.prefetch_schedule.Schedule` and :class:`~impl.plan.reduction_queue.ReductionQueue`, and post
messages at the same events (:mod:`impl.unit.unit`).  A gather or a reduction of a unit consists of hops, which are
exchanges along one axis of ranks.  Hops are posted at these times:

- the first hop of a gather when the gather starts, and each later hop while the rank waits for the weights;
- the first hop of a reduction at the unit's last gradient, and each later hop at the first gradient of the next trained
  unit.

``tests/impl/plan/test_issue_order.py`` checks that the simulation and the engine have the same order of events.

Small units may be gathered together in pairs (:attr:`~impl.plan.prefetch_schedule.Schedule.pairs`): one call posts a
hop of both units, and both units are ready when the messages of both units have arrived and are decoded.  Schedules
have pairs only for a GPU whose stream waits for messages, as with NCCL.

There are three resources: the rank's *processor* (or GPU stream), the node's *adapter* to other nodes, and the links
between ranks *inside* the node.  Each resource serves one request at a time, in the order of the requests.

Pure: no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from impl.plan.hops import Hop, in_turns
from impl.plan.prefetch_schedule import Schedule
from impl.plan.reduction_queue import Progress, ReductionQueue

Seconds = float | NDArray[np.float64]
FIRST_GRADIENT: Final = 1 / 3  # share of a unit's backward pass that runs before the unit's first gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedHop:
    """One exchange of messages in a gather or a reduction, with its times in seconds."""

    adapter: float  # time in which a node's adapter sends all messages of the node's ranks
    inside: float = 0.0  # time in which a rank sends all its messages to ranks of its node
    latency: float = 0.0  # time from the end of sending to the arrival, in which other messages can be sent
    before: float = 0.0  # time in which the processor decodes, encodes or copies before the exchange
    # Part of ``before`` in which the processor posts the messages.  If one call posts two exchanges, this part is spent
    # only once.
    call: float = 0.0
    # Which earlier exchange of the same gather or reduction must have arrived before this one is posted: 1 means the
    # exchange before this one, 2 the exchange before that one, and so on; 0 means none.
    follows: int = 1
    sends: bool = True  # False for a hop along an axis of one rank, which sends nothing but takes its turn
    at_once: bool = False  # True: posted together with the exchange before; False: posted at the next event
    hop: Hop | None = None  # the hop to which the exchange belongs, for readers of :attr:`Pass.messages`
    nbytes: int = 0  # bytes of the message to each other rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One gather or reduction of a unit, as exchanges with their times."""

    hops: tuple[TimedHop, ...] = ()  # in the order in which they are posted
    after: float = 0.0  # seconds in which the processor decodes after the last hop
    # Whether the last hop crosses nodes.  If so, a reduction waits for its last hop only when the reduce bucket (the
    # limit of elements that are being reduced) is full, or when the pass ends.  If not, it waits at the first gradient
    # of the next trained unit.
    crosses: bool = True


def in_chunks(hops: Sequence[Sequence[TimedHop]]) -> tuple[TimedHop, ...]:
    """Returns all exchanges of a reduction that is sent in chunks, in the order in which they are posted.

    A hop of such a reduction consists of one exchange for each chunk: ``hops[hop][chunk]``.
    :func:`impl.plan.hops.in_turns` gives the order.  In the returned exchanges, the fields ``follows`` and ``at_once``
    are set for this order.
    """
    posted, places = list[TimedHop](), dict[tuple[int, int], int]()
    for turn in in_turns(len(hops), len(hops[0]) if hops else 0):
        for number, (hop, chunk) in enumerate(turn):
            place = places[hop, chunk] = len(posted)
            follows = place - places[hop - 1, chunk] if hop else 0
            posted.append(replace(hops[hop][chunk], follows=follows, at_once=number > 0))
    return tuple(posted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The computation and the collectives of one unit in a forward and a backward pass; times are in seconds.

    If ``forward`` and ``backward`` are arrays (n,), n passes with these times are simulated at once.
    """

    forward: Seconds  # computation in the forward pass
    backward: Seconds  # computation in the backward pass
    gather: Collective = Collective()  # gather of the weights before the forward pass
    regather: Collective = Collective()  # gather of the weights before the backward pass
    reduce: Collective = Collective()  # reduction of the gradient
    # Time of the engine's own work on the processor, once in forward and once more in backward.
    engine: float = 0.0


def pass_time(
    schedule: Schedule,
    loads: Sequence[Load],
    *,
    bucket: float = math.inf,
    first_gradient: float = FIRST_GRADIENT,
    least_forward: Seconds = 0.0,
    reduces: bool = True,
) -> Pass:
    """Simulates one forward and backward pass, and returns the simulated pass.

    A block computes as soon as all its units are gathered.  Outer units (such as embedding and head) compute after all
    blocks in forward and before all blocks in backward, since most of their work is done at those times.

    Args:
        schedule: the order in which units run, are gathered and are reduced.
        loads: the computation and the collectives of each unit, by the unit's index.
        bucket: most elements that are being reduced at one time.
        first_gradient: share of a unit's backward pass that has run when the unit's first gradient arrives.
        least_forward: earliest time, in seconds, at which the backward pass may begin.
        reduces: False for a pass that only adds gradients up locally and reduces none.
    """
    run, outer = Pass(schedule, loads, bucket), [loads[unit] for unit in schedule.outer]
    for unit in schedule.outer:
        run.gather(unit, schedule.ahead_in_forward[unit])
    for units in schedule.runs:
        for unit in units:
            run.gather(unit, schedule.ahead_in_forward[unit])
        run.compute(sum(loads[unit].forward + loads[unit].engine for unit in units), "forward", units)
    run.compute(sum(load.forward + load.engine for load in outer), "forward", schedule.outer)
    run.turn(least_forward)
    for unit in schedule.outer:
        run.gather(unit, schedule.ahead_in_backward[unit])
    run.compute(sum(load.backward + load.engine for load in outer), "backward", schedule.outer)
    for units in reversed(schedule.runs):
        for unit in units:  # in model order, in which the hook before a block's backward pass gathers them
            run.gather(unit, schedule.ahead_in_backward[unit])
        backward = sum(loads[unit].backward for unit in units)
        trained = [unit for unit in units if unit not in schedule.frozen]
        if trained:
            run.compute(backward * first_gradient, "backward", units)
            run.first_gradient()
            backward = backward * (1 - first_gradient)
        run.compute(backward + sum(loads[unit].engine for unit in units), "backward", units)
        run.last_gradient(units, trained if reduces else ())
    run.last_gradient(
        schedule.outer, [unit for unit in schedule.outer if unit not in schedule.frozen] if reduces else ()
    )
    run.finish(reduces=reduces)
    return run


def least_pass_seconds(schedule: Schedule, loads: Sequence[Load]) -> Seconds:
    """Returns a lower bound of the seconds that a forward and a backward pass take together.

    The time that :func:`pass_time` returns for these ``loads``, or for loads with longer times, is never below the
    bound.  Two assumptions make the bound shorter than a real pass: the computation of outer units (such as embedding
    and head) delays no message, and the first gradient of a unit arrives when the unit's backward pass begins.

    In ``loads``, only two kinds of times may be above 0: those of the model's computation and of the node's adapter.
    """
    inner = [
        replace(load, forward=0.0, backward=0.0) if unit in schedule.outer else load
        for unit, load in enumerate(loads)
    ]
    forward = sum(load.forward for load in loads)
    least = pass_time(schedule, inner, first_gradient=0.0, least_forward=forward)
    return np.maximum(least.seconds, least.forward + sum(load.backward for load in loads))


class Stretch(NamedTuple):
    """A period in which the processor did one kind of work; times are in seconds since the pass began."""

    work: str  # the kind of work: ``forward``, ``backward``, ``encode`` or ``decode``
    units: tuple[int, ...]  # indices of the units for which the processor worked
    begin: Seconds
    end: Seconds


class Message(NamedTuple):
    """The messages that a rank sends in one exchange, taken together; times are in seconds since the pass began."""

    purpose: Literal["weights", "gradients"]
    unit: int  # index of the unit
    hop: TimedHop
    posted: Seconds  # when the rank posted the messages
    begin: Seconds  # when the first of the links began to send the messages
    arrival: Seconds  # when the last message has arrived


@dataclass(slots=True)
class _UnderWay:
    """A simulated gather or reduction that has started; some of its hops may not be posted yet."""

    unit: int  # index of the unit
    purpose: Literal["weights", "gradients"]
    collective: Collective
    arrivals: list[Seconds]  # for each hop posted so far, its arrival, in seconds since the pass began
    # If two units are gathered together and this is one of the two gathers: both gathers.
    pair: tuple[_UnderWay, ...] = ()
    ended: bool = False  # whether the rank has waited for the last hop, and decoded

    @property
    def left(self) -> bool:
        """Whether a hop is still to be posted."""
        return len(self.arrivals) < len(self.collective.hops)


class _Reduction:
    """The simulated reduction of one unit's gradient, which a :class:`ReductionQueue` starts and continues."""

    def __init__(self, run: Pass, unit: int, elements: int, collective: Collective) -> None:
        self.elements, self.progress = elements, Progress.COLLECTING
        self._run, self._unit, self._collective = run, unit, collective
        self._under_way: _UnderWay | None = None

    def start(self) -> None:
        """Post the first hop, or end the reduction if it has no hop."""
        self._under_way = self._run.start(self._unit, "gradients", self._collective)
        self.progress = Progress.REDUCING
        if not self._collective.hops:  # on one rank
            self.post_next_hop(finish=True)

    def post_next_hop(self, *, finish: bool = False) -> None:
        """Post the next hop; with ``finish``, post all remaining hops, and wait for the mean.

        If all hops are posted already and the last hop stays inside a node, wait for the mean even without ``finish``.
        If the reduction has not started or has ended, do nothing.
        """
        under_way = self._under_way
        if self.progress is not Progress.REDUCING or under_way is None:
            return
        if not finish and under_way.left:
            self._run.post(under_way)
        elif finish or not self._collective.crosses:
            self._run.complete(under_way)
            self.progress = Progress.REDUCED


class Pass:
    """A simulated forward and backward pass; all times are in seconds since the forward pass began."""

    def __init__(self, schedule: Schedule, loads: Sequence[Load], bucket: float) -> None:
        self.seconds: Seconds = 0.0  # the current time; in the end, the time of the whole pass
        self.forward: Seconds = 0.0  # time of the forward pass
        self.exposed: Seconds = 0.0  # time in which the processor waited for messages
        self.adapter = 0.0  # time in which the node's adapter was busy
        # (purpose, unit) of each posted exchange, and ("mean", unit) for the end of each reduction, in order of time.
        self.events: list[tuple[Literal["weights", "gradients", "mean"], int]] = []
        self.stretches: list[Stretch] = []  # the periods in which the processor worked, in order
        self.messages: list[Message] = []  # in the order in which they were posted
        self._schedule, self._loads = schedule, loads
        self._backward = False
        self._adapter_free: Seconds = 0.0  # time at which the adapter will have sent all posted messages
        self._inside_free: Seconds = 0.0  # the same for the links inside the node
        # By unit: its gather, or None if the weights are gathered.
        self._gathers: dict[int, _UnderWay | None] = {}
        self._reductions = {
            unit: _Reduction(self, unit, schedule.sizes[unit], loads[unit].reduce)
            for unit in schedule.reduction_order
        }
        self._queue = ReductionQueue(bucket)
        self._queue.follow(list(self._reductions.values()))

    def compute(self, seconds: Seconds, work: str, units: Sequence[int]) -> None:
        """Let the processor work for ``seconds``.

        ``work`` is the kind of work: ``forward``, ``backward``, ``encode`` or ``decode``.  ``units`` are the indices of
        the units for which the processor works.
        """
        begin = self.seconds
        self.seconds = begin + seconds
        self.stretches.append(Stretch(work, tuple(units), begin, self.seconds))

    def turn(self, least: Seconds) -> None:
        """End the forward pass, and begin the backward pass.

        The backward pass begins now, or at the time ``least`` if this is later.  Units that the schedule keeps between
        the two passes stay gathered.  All other units are freed, and must be gathered again.
        """
        self.seconds = self.forward = np.maximum(self.seconds, least)
        self._gathers = {unit: self._gathers[unit] for unit in self._gathers.keys() & self._schedule.kept}
        self._backward = True

    def gather(self, unit: int, ahead: Sequence[int]) -> None:
        """Start the gathers of ``unit`` and of the units in ``ahead``, and wait for the gather of ``unit``.

        Units that are gathered, or whose gather has started, are skipped.  Two units that the schedule gathers as a
        pair are started together.  The number of gathers under way at one time, including that of ``unit``, is at most
        :data:`~impl.plan.prefetch_schedule.MOST_AHEAD` + 1.
        """
        self._start_gather(unit)
        under_way = sum(gather is not None for gather in self._gathers.values())
        for units in self._schedule.starting(ahead, self._gathers, under_way):
            if len(units) == 2:
                self._start_pair(units)
            else:
                self._start_gather(units[0])
        self._finish_gather(unit)

    def _start_gather(self, unit: int) -> None:
        if unit in self._gathers:
            return
        if self._schedule.in_model_order and not self._backward:
            for earlier in range(unit):  # below stage 3 all ranks gather all units in model order
                self._start_gather(earlier)
                self._finish_gather(earlier)
        self._gathers[unit] = self.start(unit, "weights", self._gather_of(unit))

    def _start_pair(self, units: Sequence[int]) -> None:
        gathers = (*(_UnderWay(unit, "weights", self._gather_of(unit), []) for unit in units),)
        for each in gathers:
            each.pair = gathers
            self._gathers[each.unit] = each
        self._post(gathers)

    def _gather_of(self, unit: int) -> Collective:
        load = self._loads[unit]
        return load.regather if self._backward else load.gather

    def _finish_gather(self, unit: int) -> None:
        if (under_way := self._gathers[unit]) is not None:
            if not under_way.ended:  # else it ended with the other gather of its pair
                self.complete(under_way)
            self._gathers[unit] = None

    def first_gradient(self) -> None:
        """Handle the first gradient of a unit: let the reductions of other units post their next hops.

        :meth:`ReductionQueue.post_next_hops` decides whether the hops are posted now.
        """
        self._queue.post_next_hops()

    def last_gradient(self, units: Sequence[int], reduced: Sequence[int]) -> None:
        """Handle the last gradient of ``units``: free their weights, and start the reductions that may start now.

        ``reduced`` are the indices of those ``units`` whose gradients are reduced in this pass.
        """
        for unit in units:
            del self._gathers[unit]
        for unit in reduced:
            self._reductions[unit].progress = Progress.READY
        self._queue.start_ready()

    def finish(self, *, reduces: bool) -> None:
        """End the backward pass: wait for the means of all reductions under way.

        With ``reduces``, first start the reductions that have not started.
        """
        self._queue.finish(start=reduces)

    def start(self, unit: int, purpose: Literal["weights", "gradients"], collective: Collective) -> _UnderWay:
        """Start ``collective``, a gather or reduction of ``unit``, by posting its first hop.

        Returns a record of the hops that are posted so far.
        """
        under_way = _UnderWay(unit, purpose, collective, [])
        if under_way.left:
            self.post(under_way)
        return under_way

    def complete(self, under_way: _UnderWay) -> None:
        """Simulate the end of a gather or reduction: post its remaining hops, wait for the last hop, and decode.

        The current time (:attr:`seconds`) advances by the time that this takes.  If ``under_way`` is one of two gathers
        that run together as a pair, both gathers end.
        """
        collectives = under_way.pair or (under_way,)
        while any(each.left for each in collectives):
            self.post(under_way)
        for each in collectives:
            if each.arrivals:
                self._wait(each.arrivals[-1])
        for each in collectives:
            self.compute(each.collective.after, "decode", (each.unit,))
            each.ended = True
            if each.purpose == "gradients":
                self.events.append(("mean", each.unit))

    def post(self, under_way: _UnderWay) -> None:
        """Post the next hop of ``under_way``, and all later hops that are posted together with it.

        A hop with :attr:`TimedHop.at_once` is posted together with the hop before.  Before a hop is posted, the rank
        waits for the earlier hop that it follows (:attr:`TimedHop.follows`).  If ``under_way`` is one of two gathers
        that run together as a pair, the next hop of the other gather is posted too.
        """
        self._post(under_way.pair or (under_way,))
        hops, arrivals = under_way.collective.hops, under_way.arrivals
        while under_way.left and hops[len(arrivals)].at_once:
            self._post((under_way,))

    def _post(self, collectives: Sequence[_UnderWay]) -> None:
        """Post the next hop of each of ``collectives``.

        Before a hop is posted, the rank waits for the earlier hop that it follows (:attr:`TimedHop.follows`).  If all
        posted hops are along the same axis, one call posts them.
        """
        posted = [(each, each.collective.hops[len(each.arrivals)]) for each in collectives if each.left]
        for each, hop in posted:
            if 0 < hop.follows <= len(each.arrivals):
                self._wait(each.arrivals[-hop.follows])
        axes = {hop.hop.axis if hop.hop is not None else None for _, hop in posted}
        for number, (each, hop) in enumerate(posted):
            joined = number > 0 and len(axes) == 1
            self.compute(hop.before - hop.call if joined else hop.before, "encode", (each.unit,))
        for each, hop in posted:
            self._send(each, hop)

    def _send(self, under_way: _UnderWay, hop: TimedHop) -> None:
        """Send the messages of ``hop``: each link sends them after all messages that were posted earlier.

        The method only records when the messages are sent and when they arrive; the current time does not advance.
        """
        begin = arrival = self.seconds
        if hop.adapter:
            begin = np.maximum(self._adapter_free, self.seconds)
            arrival = self._adapter_free = begin + hop.adapter
            self.adapter += hop.adapter
        if hop.inside:
            begun = np.maximum(self._inside_free, self.seconds)
            self._inside_free = begun + hop.inside
            begin = np.minimum(begin, begun) if hop.adapter else begun
            arrival = np.maximum(arrival, self._inside_free)
        under_way.arrivals.append(arrival + hop.latency)
        if hop.sends:
            self.events.append((under_way.purpose, under_way.unit))
            self.messages.append(
                Message(under_way.purpose, under_way.unit, hop, self.seconds, begin, under_way.arrivals[-1])
            )

    def _wait(self, until: Seconds) -> None:
        waited = np.maximum(until - self.seconds, 0.0)
        self.exposed = self.exposed + waited
        self.seconds = self.seconds + waited
