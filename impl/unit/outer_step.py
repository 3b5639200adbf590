"""Takes one unit's outer step (DiLoCo, 2311.08105), which brings the weights of all groups of ranks together again.

A unit is a group of parameters that are exchanged together.

Between two outer steps, each group of ranks trains by itself, without messages to other groups.  Each rank keeps the
*anchor*: its shard of the weights after the last outer step.  This anchor is the same in all groups.  An outer step has
four parts:

1. Each group subtracts its masters (its present fp32 weights) from the anchor.
2. The differences are averaged over all groups, by messages in the codec that the policy gives for gradients between
   groups.
3. SGD with Nesterov momentum moves the anchor, with the average as its gradient.
4. The masters are set to the anchor.

All groups decode the same messages, so that afterwards their anchors, momenta and masters are equal bit by bit.

The difference and its mean are computed in the memory of the masters, so that an outer step needs no other memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from impl.comm.error_feedback import Errors
from impl.comm.reduce_scatter import Reduction
from impl.plan.hops import outer_hops
from impl.plan.traffic import Tag
from impl.policy.shard_layout import UnitGeometry
from impl.unit.context import UnitContext
from impl.unit.master_shard import MasterShard

_BETWEEN: Final = -1  # stands for the micro-batch in keys of random bits; no backward pass has this number


class OuterStep:
    """Takes the outer steps of one unit (parameters that are exchanged together) on one rank.

    Between two outer steps, each group of ranks trains by itself, without messages to other groups.  In an outer step,
    the groups average how far their weights have moved since the last outer step, and continue from the same weights.

    The policy of ``context`` is the policy for this unit (``Policy.for_unit``), and has local steps.
    """

    def __init__(self, geometry: UnitGeometry, context: UnitContext, master_shard: MasterShard) -> None:
        policy, wire = context.policy, context.wire
        self._geometry, self._wire, self._clock = geometry, wire, context.clock
        self._master_shard, self._rate, self._momentum = (
            master_shard,
            policy.outer_rate,
            policy.outer_momentum,
        )
        self._pads = geometry.pads(wire.mesh.rank)
        hops = outer_hops(policy, wire.mesh.topology, geometry.piece, policy.grain)
        wire.make_groups(hop.axis for hop in hops)
        tag = Tag("step", "gradients", geometry.name)
        self._reduction = Reduction(wire=wire, hops=hops, tag=tag, sums=policy.sums)
        self._anchor = master_shard.keep_anchor()
        self._speed: Tensor | None = None  # (S,) fp32, the momentum
        if self._momentum:
            self._speed = torch.zeros_like(self._anchor)
            context.meter.add("outer", self._speed.nbytes)
        self._errors: Errors | None = None
        if policy.feedback is not None:
            self._errors = Errors(policy.feedback, hops, wire.mesh.device)
            context.meter.add("feedback", self._errors.nbytes)

    @torch.no_grad()
    def take(self) -> None:
        """Take an outer step: give all groups of ranks, whose weights differ by now, the same weights again.

        The *masters* are this rank's shard in fp32, which the optimizer has stepped.  The *anchor* is the shard after
        the last outer step.  The method averages the anchor minus the masters over all groups.  SGD with Nesterov
        momentum then moves the anchor, with this average as gradient.  Afterwards the masters are equal to the anchor,
        and all copies of the weights are stale.

        All ranks that hold the same shard, one in each group, must call this.
        """
        master, anchor, errors = self._master_shard.master, self._anchor, self._errors
        if errors is not None:
            errors.begin(self._clock.step)
        key = replace(self._clock.gradients(self._geometry.name, self._wire.mesh.rank), micro_batch=_BETWEEN)
        moved = torch.sub(anchor, master, out=master)
        self._reduction.start(moved, key=key, errors=errors, out=master)
        mean = self._reduction.finish()
        self._reduction.close()
        for start, end in self._pads:
            mean[start:end] = 0
        if self._speed is not None:
            self._speed.mul_(self._momentum).add_(mean)
            mean.add_(self._speed, alpha=self._momentum)
        anchor.add_(mean, alpha=-self._rate)
        self._master_shard.load_part(0, self._geometry.shard, anchor)

    def clear_feedback(self) -> None:
        """Set to zero the encoding errors that each outer step keeps for the next outer step (error feedback).

        In an outer step, groups of ranks average how far their weights have moved.
        """
        if self._errors is not None:
            self._errors.clear()

    def reset(self) -> None:
        """Set the state of outer steps to that of a new engine.

        The anchor (the shard after the last outer step) becomes a copy of this rank's present shard.  The momentum, and
        the encoding errors that error feedback keeps, become zero.
        """
        self._anchor.copy_(self._master_shard.master)
        if self._speed is not None:
            self._speed.zero_()
        if self._errors is not None:
            self._errors.reset()

    def state(self) -> dict[str, Tensor]:
        """Return copies of the tensors that a resumed run needs to take outer steps, by name.

        In an outer step, groups of ranks average how far their weights have moved since the last outer step.

        - ``anchor``: (S,) fp32, this rank's shard after the last outer step
        - ``momentum``: (S,) fp32, the momentum of outer steps; absent if the policy's ``outer_momentum`` is 0
        - names that begin with ``outer``: the encoding errors that are carried to later outer steps, and the step of
          their last reset; absent without error feedback
        """
        state = {"anchor": self._anchor.clone()}
        if self._speed is not None:
            state["momentum"] = self._speed.clone()
        errors = {} if self._errors is None else self._errors.state()
        return state | {f"outer {name}": value for name, value in errors.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the ``state`` that :meth:`state` returned on this rank, under the same topology and policy."""
        self._anchor.copy_(state["anchor"])
        if self._speed is not None:
            self._speed.copy_(state["momentum"])
        if self._errors is not None:
            names = (name for name in state if name.startswith("outer "))
            self._errors.load({name.removeprefix("outer "): state[name] for name in names})
