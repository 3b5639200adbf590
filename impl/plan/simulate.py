"""A lower bound on a step's time, from a schedule, a link and the time of the computation.

Pure: no torch.  It drives the :class:`~impl.plan.prefetch_schedule.Schedule` that the engine drives.  One
computation runs at a time, the link between nodes carries one message after the other in the order in
which they are posted, and everything else (messages inside a node, encoding, hooks) takes no time.  What a
real step takes beyond it is the engine's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from impl.plan.prefetch_schedule import Action, Schedule


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
        run.carry_out(schedule.pre_forward(unit))
    for unit in inner:
        run.carry_out(schedule.pre_forward(unit))
        run.now += loads[unit].forward
        run.carry_out(schedule.post_forward(unit))
    run.now = max(run.now, sum(load.forward for load in loads))
    run.turn(schedule.kept)
    begin = run.now
    for unit in outer:
        run.carry_out(schedule.pre_backward(unit))
    for unit in reversed(inner):
        run.carry_out(schedule.pre_backward(unit))
        run.now += loads[unit].backward
        run.carry_out(schedule.post_backward(unit))
    for unit in outer:
        run.carry_out(schedule.post_backward(unit))
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

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Do what the schedule says."""
        for action in actions:
            load = self._loads[action.unit]
            match action.kind:
                case "gather" | "wait":
                    if action.unit not in self._arrival:
                        seconds = load.regather if self._backward else load.gather
                        self._arrival[action.unit] = self._send(seconds)
                    if action.kind == "wait":
                        self.now = max(self.now, self._arrival[action.unit])
                case "release":
                    self._arrival.pop(action.unit, None)
                case "reduce":
                    self.reduced = max(self.reduced, self._send(load.reduce))

    def _send(self, seconds: float) -> float:
        """Post a message; returns when it will have arrived."""
        if seconds:
            self._free = max(self._free, self.now) + seconds
            return self._free
        return self.now
