"""The timeline of a step: what a rank computes, encodes and waits for, in the order of the schedule.

Pure: no torch.  All ranks do the same at the same time, so this follows one of them.  It asks the engine's
:class:`~impl.plan.prefetch_schedule.Schedule`, and posts messages when the engine (:mod:`impl.unit.unit`)
does: a gather's first hop when it starts and each further one in the wait for the weights; a reduction's
first hop at the unit's last gradient, each further one at the next unit's first gradient.

Three resources serve one request at a time, in order: the rank's *processor* (or GPU stream), the node's
*adapter* to other nodes, and the connection of ranks *inside* the node.
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

    adapter: float  # of all messages of a node on its adapter
    inside: float = 0.0  # of all messages of a rank inside its node
    latency: float = 0.0  # from the end of sending to the arrival, beside other messages
    before: float = 0.0  # of the processor, to encode or copy the message


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Hops one after the other, and the seconds of the processor after the last, to decode."""

    hops: tuple[Hop, ...] = ()
    after: float = 0.0


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
) -> Pass:
    """One forward and backward pass of ``loads``, by unit, with ``bucket`` elements in reduction at most.

    Outer units (embedding, head) compute where most of their computation is done: after the blocks in
    forward, before them in backward, which does not begin before ``least_forward``.
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
    """A collective under way: hops left, seconds after them, and the arrival of the last posted hop."""

    left: list[Hop]
    after: float
    arrival: Seconds


class Pass:
    """A pass under way, in seconds since it began."""

    def __init__(self, schedule: Schedule, loads: Sequence[Load], bucket: float) -> None:
        self.seconds: Seconds = 0.0  # until now; in the end, until the last gradient is reduced
        self.forward: Seconds = 0.0  # of the forward pass
        self.exposed: Seconds = 0.0  # of waits for messages
        self.adapter = 0.0  # of the node's busy adapter
        self._schedule, self._loads, self._bucket = schedule, loads, bucket
        self._backward = False
        self._adapter_free: Seconds = 0.0  # when all posted messages will have been sent
        self._inside_free: Seconds = 0.0
        self._gathers: dict[int, _UnderWay | None] = {}  # by unit, under way or finished (None)
        self._reductions: dict[int, _UnderWay] = {}  # under way, as they were started

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
        for index in (unit, *ahead):
            if index not in self._gathers:
                load = self._loads[index]
                self._gathers[index] = self._start(load.regather if self._backward else load.gather)
        if (under_way := self._gathers[unit]) is not None:
            self._finish(under_way)
            self._gathers[unit] = None

    def reduce(self, unit: int) -> None:
        """All gradients of ``unit`` have arrived: drop its weights, and reduce its gradient."""
        del self._gathers[unit]
        self.post_next_hops()
        for earlier in list(self._reductions):
            if sum(self._schedule.sizes[index] for index in (*self._reductions, unit)) <= self._bucket:
                break
            self._finish(self._reductions.pop(earlier))
        self._reductions[unit] = self._start(self._loads[unit].reduce)

    def post_next_hops(self) -> None:
        """Every reduction under way posts its next hop, once the hop before has arrived."""
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
        """Wait for the hop posted last, and post the next, if there is one."""
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
