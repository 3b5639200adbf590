"""Carries out the schedule's actions on the units of one engine.

What forward hooks, backward hooks and uses of parameters outside of their modules have in common: the
units, the order of their reductions, and how far the pass is.  They run for every module and every gradient
of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from impl.engine.reduction_queue import ReductionQueue
from impl.engine.saved_tensors import SavedTensors
from impl.errors import WrittenError
from impl.plan.prefetch_schedule import MOST_AHEAD, Action, Schedule
from impl.plan.traffic import Phase
from impl.unit.context import UnitContext
from impl.unit.unit import Unit


class Actions:
    """One engine's, on one rank.

    Attributes:
        units: the root's first, then in model order.
        saved: what autograd keeps of forward passes.
        running: forward calls of hooked modules under way.
        in_forward: whether the model's forward pass is under way, and nothing was refused.
        in_backward: whether gradients arrive.
        accumulating: whether backward passes add to local gradients, and reduce nothing.
        escaped: units in use outside of their modules, in this forward pass.
    """

    def __init__(self, units: Sequence[Unit], context: UnitContext) -> None:
        policy = context.policy
        self.units, self._under_way = units, context.under_way
        self.schedule = Schedule.of(policy, [unit.geometry for unit in units])
        self.reductions = ReductionQueue(units, self.schedule.reduction_order, policy.memory.reduce_bucket)
        self.saved = SavedTensors()
        self.running = 0
        self.in_forward = self.in_backward = self.accumulating = False
        self.escaped: set[int] = set()

    @property
    def phase(self) -> Phase:
        """For the ledger."""
        if self.in_backward:
            return "backward"
        return "forward" if torch.is_grad_enabled() else "evaluate"

    @property
    def stays(self) -> frozenset[int]:
        """Units that are not resharded at the end of this forward pass."""
        return self.schedule.kept if torch.is_grad_enabled() else frozenset()

    def carry_out(self, actions: Iterable[Action], phase: Phase) -> None:
        """Carry out ``actions`` in order.

        Raises:
            WrittenError: naming the parameters that were written during the pass.
        """
        try:
            for action in actions:
                unit = self.units[action.unit]
                match action.kind:
                    case "gather":
                        # Units gathered ahead that were then not used must not pile up.
                        if not unit.in_use and len(self._under_way) <= MOST_AHEAD:
                            self.gather_before(action.unit, phase)
                            unit.gather(phase)
                    case "wait":
                        if not unit.in_use:
                            self.gather_before(action.unit, phase)
                        unit.bring(phase)
                        self.saved.gathered(unit)
                    case "release":
                        if action.unit not in self.escaped:
                            unit.release()
                    case "reduce":
                        if not self.accumulating:
                            self.reductions.ready(action.unit)
        except WrittenError as error:
            # Who writes one often writes all: name those of the units that are still gathered, too.
            others = (name for unit in self.units for name in unit.written())
            raise WrittenError((*error.names, *others)) from None

    def gather_before(self, index: int, phase: Phase) -> None:
        """Below stage 3 all ranks gather all units in one order, whichever of them each rank's pass calls."""
        one_order = self.in_forward and self.schedule.in_model_order
        for earlier in (*self.schedule.outer, *self.schedule.order) if one_order else ():
            if earlier == index:
                return
            if not self.units[earlier].in_use:
                self.units[earlier].gather(phase)
                self.units[earlier].release()

    def bring(self, index: int, phase: Phase) -> None:
        """Gather a unit that is used outside of its module; it stays until the forward pass ends."""
        self.escaped.add(index)
        self.carry_out((Action("wait", index),), phase)

    def follow(self, seen: Sequence[int]) -> None:
        """From here on units run, and are reduced, in the order in which they were ``seen`` to run."""
        rest = [index for index in self.schedule.order if index not in seen]
        self.schedule = replace(self.schedule, order=(*seen, *rest))
        self.reductions.order = self.schedule.reduction_order
