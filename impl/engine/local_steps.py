"""Takes the outer steps of DiLoCo, which average the progress of groups of ranks that train by themselves.

With local steps, each group of ranks trains by itself.  After every few optimizer steps, an outer step follows: the
groups average how far their weights have moved since the last outer step, and continue from the same weights.
:mod:`impl.plan.local_steps` says after which optimizer steps the outer step of a unit (a group of parameters) is due.
:mod:`impl.unit.outer_step` takes the outer step of one unit.
"""

from __future__ import annotations

from collections.abc import Sequence

from impl.engine.masters import Masters
from impl.errors import ZeroError
from impl.plan.local_steps import fragments_of, meets
from impl.policy.policy import Policy
from impl.unit.unit import Unit


class LocalSteps:
    """Takes the outer steps of one model on one rank, after the optimizer steps at which they are due.

    Between two outer steps, each group of ranks trains by itself, without messages to other groups.  In an outer step,
    the groups average how far their weights have moved since the last outer step, and continue from the same weights.
    """

    def __init__(self, policy: Policy, units: Sequence[Unit], masters: Masters) -> None:
        fragments = fragments_of(policy, [unit.geometry for unit in units])
        self._policy, self._units = policy, list(zip(units, fragments, strict=True))
        self._masters = masters
        # Whether optimizers have stepped some of the masters that have gradients, but not all.
        self._waiting = False

    def reset(self) -> None:
        """Stop waiting for optimizers that have not stepped yet; called after a load, which drops all gradients."""
        self._waiting = False

    def stepped(self, step: int, *, first: bool) -> None:
        """Note that an optimizer has stepped; once all optimizers have stepped, take the outer steps that are due.

        A model may have several optimizers, which together step its masters (fp32 weights).  All optimizers have
        stepped once each master that has a gradient has been stepped since the last backward pass.  In an outer step,
        the groups of ranks that train by themselves average how far their weights have moved.

        Args:
            step: the number of optimizer steps so far.
            first: whether the optimizer is the first to step after a backward pass.

        Raises:
            ZeroError: if optimizers stepped only some of the masters that had gradients, and then another backward
                pass has run.
        """
        if first and self._waiting:
            raise ZeroError(
                "local_steps: optimizers have stepped only some of the masters that have gradients, and then another "
                "backward pass has run: step all optimizers after each backward pass; if some masters are not to be "
                "stepped, clear their gradients before the first optimizer steps"
            )
        self._waiting = first or self._waiting
        if not self._waiting or self._masters.unused_gradients:
            return
        self._waiting = False
        for unit, fragment in self._units:
            if unit.outer is not None and meets(self._policy, step, fragment):
                unit.outer.take()
                unit.weights_changed("stepped")
