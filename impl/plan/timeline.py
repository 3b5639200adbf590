"""The timeline of a step: what a rank computes, encodes and waits for, in the order of the schedule.

Pure: no torch.  All ranks do the same at the same time, so one of them is followed.  It asks the
:class:`~impl.plan.prefetch_schedule.Schedule` that the engine asks, and posts messages when the engine
(:mod:`impl.unit.unit`) posts them: a gather's first hop when it starts and each further one when the weights
are waited for; a reduction's first hop when the unit's last gradient is there, each further one when the next
unit's first gradient is.

Three resources carry one thing at a time, in the order in which they are asked: the rank's *processor* (or
GPU stream), the node's *adapter* to other nodes, and what connects the ranks *inside* the node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from impl.plan.prefetch_schedule import Schedule

Seconds = float | NDArray[np.float64]
FIRST_GRADIENT: Final = 1 / 3  # of a unit's backward pass has run when the first of its gradients arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One exchange of a collective, in seconds."""

    adapter: float  # that all messages of a node take on its adapter
    inside: float = 0.0  # that all messages of a rank take inside its node
    latency: float = 0.0  # from the end of sending to the arrival, beside other messages
    before: float = 0.0  # of the processor, to encode what is sent, or to copy it


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Hops one after the other, and the seconds of the processor after the last, to decode."""

    hops: tuple[Hop, ...] = ()
    after: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one unit asks for in a pass."""

    forward: Seconds  # of computation; or (n,) of n passes, that are walked together
    backward: Seconds
    gather: Collective = Collective()  # of its weights, before its forward pass
    regather: Collective = Collective()  # before its backward pass
    reduce: Collective = Collective()  # of its gradient
    engine: float = 0.0  # seconds of the processor in each of the two, for whatever else the engine does


def pass_time(
    schedule: Schedule,
    loads: Sequence[Load],
    *,
    bucket: float = math.inf,
    first_gradient: float = FIRST_GRADIENT,
    least_forward: Seconds = 0.0,
) -> Pass:
    """One forward and backward pass, of loads by index, ``bucket`` elements being reduced at once.

    Of the units around all others (embedding, head) the computation lies where the most of it is done: after
    the blocks in forward, before them in backward, which does not begin before ``least_forward``.
    """
    run, outer = Pass(schedule, loads, bucket), [loads[unit] for unit in schedule.outer]
    for unit in schedule.outer:
        run.gather(unit, schedule.ahead_in_forward[unit])
    for unit in schedule.order:
        run.gather(unit, schedule.ahead_in_forward[unit])
        run.compute(loads[unit].forward + loads[unit].engine)
    run.compute(sum(load.forward + load.engine for load in outer))
    run.turn(least_forward)
    for unit in schedule.outer:
        run.gather(unit, schedule.ahead_in_backward[unit])
    run.compute(sum(load.backward + load.engine for load in outer))
    for unit in reversed(schedule.order):
        load = loads[unit]
        run.gather(unit, schedule.ahead_in_backward[unit])
        run.compute(load.backward * first_gradient)
        run.post_next_hops()
        run.compute(load.backward * (1 - first_gradient) + load.engine)
        run.reduce(unit)
    for unit in schedule.outer:
        run.reduce(unit)
    run.finish()
    return run


def least_pass_seconds(schedule: Schedule, loads: Sequence[Load]) -> Seconds:
    """Least seconds of one forward and backward pass, of loads that take computation and the adapter alone.

    The units around all others are taken to compute in whatever time the adapter leaves free, and gradients
    to arrive when backward begins.  Never above what :func:`pass_time` predicts for the same and more.
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
    """A collective under way: hops that are left, seconds after them, and when the last posted arrives."""

    left: list[Hop]
    after: float
    arrival: Seconds


class Pass:
    """A pass under way, in seconds since it began."""

    def __init__(self, schedule: Schedule, loads: Sequence[Load], bucket: float) -> None:
        self.seconds: Seconds = 0.0  # until now; in the end, until the last gradient is reduced
        self.forward: Seconds = 0.0  # of them, until it turned back
        self.exposed: Seconds = 0.0  # of them, waited for messages
        self.adapter = 0.0  # of them, the node's adapter was busy
        self._schedule, self._loads, self._bucket = schedule, loads, bucket
        self._backward = False
        self._adapter_free: Seconds = 0.0  # when each will have sent what was posted
        self._inside_free: Seconds = 0.0
        self._gathers: dict[int, _UnderWay | None] = {}  # of units that are gathered (None), or on their way
        self._reductions: dict[int, _UnderWay] = {}  # under way, as they were started

    def compute(self, seconds: Seconds) -> None:
        """The processor works."""
        self.seconds = self.seconds + seconds

    def turn(self, least: Seconds) -> None:
        """The forward pass is over: of what is gathered only what the schedule keeps is used again."""
        self.seconds = self.forward = np.maximum(self.seconds, least)
        self._gathers = {unit: one for unit, one in self._gathers.items() if unit in self._schedule.kept}
        self._backward = True

    def gather(self, unit: int, ahead: Sequence[int]) -> None:
        """Gather ``unit`` and those ahead of it, unless they are gathered or on their way; wait for it."""
        for index in (unit, *ahead):
            if index not in self._gathers:
                load = self._loads[index]
                self._gathers[index] = self._start(load.regather if self._backward else load.gather)
        if (under_way := self._gathers[unit]) is not None:
            self._finish(under_way)
            self._gathers[unit] = None

    def reduce(self, unit: int) -> None:
        """All gradients of ``unit`` are there: its weights go, its gradient is sent."""
        del self._gathers[unit]
        self.post_next_hops()
        for earlier in list(self._reductions):
            if sum(self._schedule.sizes[index] for index in (*self._reductions, unit)) <= self._bucket:
                break
            self._finish(self._reductions.pop(earlier))
        self._reductions[unit] = self._start(self._loads[unit].reduce)

    def post_next_hops(self) -> None:
        """Every reduction under way posts its next hop, once what it needs has arrived."""
        for under_way in self._reductions.values():
            self._post(under_way)

    def finish(self) -> None:
        """Wait for all reductions."""
        for under_way in self._reductions.values():
            self._finish(under_way)

    def _start(self, collective: Collective) -> _UnderWay:
        under_way = _UnderWay(list(collective.hops), collective.after, self.seconds)
        self._post(under_way)
        return under_way

    def _finish(self, under_way: _UnderWay) -> None:
        while under_way.left:
            self._post(under_way)
        self._wait(under_way.arrival)
        self.compute(under_way.after)

    def _post(self, under_way: _UnderWay) -> None:
        """Wait for the hop that was posted last, and post the next, if there is one."""
        if not under_way.left:
            return
        self._wait(under_way.arrival)
        hop = under_way.left.pop(0)
        self.compute(hop.before)
        under_way.arrival = self.seconds
        if hop.adapter:
            self._adapter_free = np.maximum(self._adapter_free, self.seconds) + hop.adapter
            under_way.arrival = self._adapter_free
            self.adapter += hop.adapter
        if hop.inside:
            self._inside_free = np.maximum(self._inside_free, self.seconds) + hop.inside
            under_way.arrival = np.maximum(under_way.arrival, self._inside_free)
        under_way.arrival = under_way.arrival + hop.latency

    def _wait(self, until: Seconds) -> None:
        waited = np.maximum(until - self.seconds, 0.0)
        self.exposed = self.exposed + waited
        self.seconds = self.seconds + waited
