"""A lower bound on a step's time, from a schedule, a link and the time of the computation.

Pure: no torch.  It asks the :class:`~impl.plan.prefetch_schedule.Schedule` that the engine asks.  One
computation runs at a time, the link between nodes carries one message after the other in the order in
which they are posted, and everything else (messages inside a node, encoding, hooks) takes no time.  What a
real step takes beyond it is the engine's own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from impl.plan.prefetch_schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one unit asks for in a pass, in seconds of computation and of the link."""

    forward: float
    backward: float
    gather: float  # of its weights, before its forward pass
    regather: float  # and before its backward pass
    reduce: float  # of its gradient


def pass_seconds(schedule: Schedule, loads: Sequence[Load]) -> float:
    """Least seconds of one forward and backward pass, until the last gradient is reduced.

    Where in a pass the units around all others compute (an embedding before the blocks, a head after them) is
    not known: their computation is taken to fill whatever time the link leaves free.  ``loads`` are by index.
    """
    run = _Run(loads)
    inner, outer = schedule.order, schedule.outer
    for unit in outer:
        run.gather(unit, schedule.ahead_in_forward(unit))
    for unit in inner:
        run.gather(unit, schedule.ahead_in_forward(unit))
        run.now += loads[unit].forward
    run.now = max(run.now, sum(load.forward for load in loads))
    run.turn(schedule.kept)
    begin = run.now
    for unit in outer:
        run.gather(unit, schedule.ahead_in_backward(unit))
    for unit in reversed(inner):
        run.gather(unit, schedule.ahead_in_backward(unit))
        run.now += loads[unit].backward
        run.reduce(unit)
    for unit in outer:
        run.reduce(unit)
    return max(run.now, run.reduced, begin + sum(load.backward for load in loads))


class _Run:
    """A pass under way."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.now = 0.0  # seconds since it began
        self.reduced = 0.0  # when the last gradient will have left the link
        self._loads, self._backward = loads, False
        self._free = 0.0  # when the link will have sent what was posted
        self._arrival: dict[int, float] = {}  # of the weights of units that are gathered, or on their way

    def turn(self, kept: Collection[int]) -> None:
        """The forward pass is over: of what is gathered only ``kept`` units are used again."""
        self._arrival = {unit: at for unit, at in self._arrival.items() if unit in kept}
        self._backward = True

    def gather(self, unit: int, ahead: Sequence[int]) -> None:
        """Gather ``unit`` and those ahead of it, unless they are gathered or on their way; wait for it."""
        for index in (unit, *ahead):
            if index not in self._arrival:
                load = self._loads[index]
                self._arrival[index] = self._send(load.regather if self._backward else load.gather)
        self.now = max(self.now, self._arrival[unit])

    def reduce(self, unit: int) -> None:
        """All gradients of ``unit`` are there: its weights go, its gradient is sent."""
        del self._arrival[unit]
        self.reduced = max(self.reduced, self._send(self._loads[unit].reduce))

    def _send(self, seconds: float) -> float:
        """Post a message; returns when it will have arrived."""
        if seconds:
            self._free = max(self._free, self.now) + seconds
            return self._free
        return self.now
