"""Runs a user's own gather of weights: a class that a policy names, such as ``gather = "mine:Differences"``.

:class:`GatherMethod` documents the functions of such a class.  The engine constructs one object of the class for each
trained unit, a group of parameters, on each rank.  It calls ``start()`` when a gather of the unit begins, usually while
an earlier unit computes; ``advance()`` whenever another unit is about to be used; and ``finish()`` when the weights are
needed.  Frozen units, and the persistent unit, whose small parameters stay gathered, do not use the class.

The engine calls the class through :class:`OwnGather`, which checks the tensors that the class returns.
:class:`OwnWeightGather` takes the place of :class:`~impl.unit.weight_gather.WeightGather` in a unit.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from torch import Tensor

from impl.comm.wire import Wire
from impl.plan.traffic import Phase, Tag
from impl.policy.own_method import Change, GatherInfo, OwnMethod, Role
from impl.policy.shard_layout import UnitGeometry
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import FlatBuffer
from impl.unit.master_shard import MasterShard, Version
from impl.unit.method_driver import Method, MethodDriver

_CHANGES: Final[tuple[Change, ...]] = ("unchanged", "stepped", "loaded")
_RECORD: Final = "gather"  # the name of the engine's own entry in a unit's state


class GatherMethod(Method):
    """Base class for a user's class that gathers the weights of one unit on one rank.

    A unit is a group of parameters that are gathered and reduced together.  A user's class need not inherit from this
    class.  It must have :meth:`start` and :meth:`finish`; all other functions are optional.

    For each gather of a unit the engine calls ``start()`` once, ``advance()`` any number of times (maybe never), and
    ``finish()`` once.  The order of all these calls, for all units, is the same on all ranks.
    """

    @abc.abstractmethod
    def start(self, weights: Tensor, gather: GatherInfo) -> None:
        """Begin a gather, and post the first messages.

        Args:
            weights: (S,) fp32, this rank's shard.  The tensor is a copy, which this object may keep and change.
                Padding is zero.
            gather: the pass that needs the weights, and how the weights have changed since the unit's last gather.
        """

    @abc.abstractmethod
    def finish(self) -> Tensor:
        """Wait for the messages, and return the weights of the whole unit, (P,) in the type ``self.wire.dtype``.

        P is ``self.unit.numel``, the number of the unit's elements with padding.  The engine copies the tensor, so this
        object may keep it.  Padding may have any finite value.
        """

    # A user's class may also have these functions.  The last three are needed if ``laws`` has the property that they
    # name; ``arguments`` are the arguments that the policy gives for the class.
    #
    # def bytes(self, unit, topology, gather): returns the messages of one gather, as tuples (kind, axis, bytes to each
    #     other rank).
    # @staticmethod def error_bound(unit, **arguments): returns the largest error that ``bound`` promises.
    # @staticmethod def full_rank(unit, **arguments): returns arguments with which ``exact_at_full_rank`` is tested.
    # @staticmethod def settles_after(unit, **arguments): returns the number of gathers after which ``settles`` holds.


class OwnGather(MethodDriver):
    """Calls the object of a user's class that gathers weights, and checks the tensors that the object returns."""

    role: ClassVar[Role] = "gather"
    prefix: ClassVar[str] = "gather."

    def __init__(self, method: OwnMethod, geometry: UnitGeometry, wire: Wire, dtype: torch.dtype) -> None:
        self._finite = True
        super().__init__(method, geometry, wire, Tag("forward", "weights", geometry.name), dtype)

    def start(self, weights: Tensor, gather: GatherInfo) -> None:
        """Begin a gather: give the user's object a copy of ``weights`` (S,) fp32, which are this rank's shard."""
        self.wire.tag = Tag(gather.phase, "weights", self.unit.name)
        with torch.inference_mode(mode=False):  # the method may keep the copy beyond a pass in inference mode
            own = weights.detach().clone()
        self._finite = bool(own.isfinite().all())
        self._call("start", own, gather)

    def finish(self) -> Tensor:
        """Return the gathered weights of the unit, (P,), from ``finish()`` of the user's object.

        Raises:
            ZeroError: if the tensor has another shape or type, or is not finite although this rank's shard is finite.
        """
        what = "the weights of the whole unit"
        whole = self._checked(self._call("finish"), self.unit.numel, self.wire.dtype, what)
        # If this rank's weights are not finite already, those of the unit may have any value.
        if self._finite and not bool(whole.isfinite().all()):
            raise self._error(
                "finish() returned NaN or infinity, although this rank's weights are finite: correct the method, or "
                "look for a rank whose weights are not finite"
            )
        return whole


class OwnWeightGather:
    """All-gathers the weights of one unit by a user's own class, and copies them to the unit's flat buffer.

    A unit is a group of parameters that are gathered together.  The policy of ``context`` is the policy for this unit
    (``Policy.for_unit``).
    """

    # A user's class may return weights that it has kept from an earlier gather, so a pass may compute with a copy.
    keeps_copy: Final = True

    def __init__(
        self,
        method: OwnMethod,
        geometry: UnitGeometry,
        context: UnitContext,
        master_shard: MasterShard,
        flat: FlatBuffer,
    ) -> None:
        self.own = OwnGather(method, geometry, context.wire, flat.dtype)
        self._master_shard, self._flat = master_shard, flat
        self._clock, self._passes = context.clock, context.passes
        self.version: Version = (-1, -1)  # the version of the weights that are gathered
        self._change: Change = "loaded"  # how the weights have changed since the last gather
        self._seen = -1  # how many writes to the master torch had counted at the last gather
        # The number of optimizer steps at the last gather in which the user's class was told that weights were loaded.
        self._begun = 0

    def start(self, phase: Phase) -> None:
        """Start a gather of the weights for a pass of this ``phase``."""
        assert phase != "step"  # noqa: S101  # gathers are of passes
        weights, step = self._master_shard.master, self._clock.step
        self.version = self._master_shard.version
        change, self._change = self._present(), "loaded"  # stays so if this method is interrupted
        if change == "loaded":
            self._begun = step
        self._passes.failed = True
        self.own.start(weights, GatherInfo(phase, change, step - self._begun))
        self._passes.failed = False
        self._change, self._seen = "unchanged", self.version[1]

    def advance(self) -> None:
        """Let the user's object post its next messages, if its class has the function ``advance()``."""
        self.own.advance()

    def finish(self) -> None:
        """Finish the gather, and copy the weights to the flat buffer.

        A function of a user's class may fail during a gather, and raise an error.  Torch may still call this method
        afterwards, in a hook.  This method then copies nothing, and raises no second error.  The next gather that
        starts ends this state.
        """
        flat = self._flat.attach()
        if not self._passes.failed:
            self._passes.failed = True
            flat.copy_(self.own.finish())
            self._passes.failed = False

    def _present(self) -> Change:
        """Return how the weights have changed since the last gather: ``unchanged``, ``stepped`` or ``loaded``.

        The result is the first of these changes that applies:

        - ``loaded``, if :meth:`end` or :meth:`distrust` has noted it, if there was no gather yet, or if the start of
          the last gather was interrupted;
        - ``stepped``, if :meth:`end` has noted it, or if torch's version counter shows a write to the master (this
          rank's fp32 shard);
        - ``unchanged``.

        After :meth:`load`, the last gather may be a gather of the run that saved the state.
        """
        written = self._change == "unchanged" and self._seen != self._master_shard.version[1]
        return "stepped" if written else self._change

    def end(self, change: Change) -> None:
        """Note how the weights have changed; the next gather passes this ``change`` to the user's class.

        If this method is called several times before the next gather, the strongest change counts: ``loaded`` before
        ``stepped``, and ``stepped`` before ``unchanged``.
        """
        if change != "unchanged" and self._change != "loaded":
            self._change = change

    def distrust(self) -> None:
        """Make the user's class send the weights afresh in the next gather, without relying on earlier gathers.

        For this, the next gather tells the class that the weights were ``loaded``, even if they were not.  To be called
        if some ranks may not have received all messages of earlier gathers.
        """
        self._change = "loaded"

    def reset(self) -> None:
        """Replace the object of the user's class by a newly constructed object; to be called on all ranks."""
        self.own.reset()
        self.distrust()

    def state(self) -> dict[str, Tensor]:
        """Return a dict of copies of the tensors that a resumed run needs.

        It has the tensors of the user's object, and one more tensor, which holds two integers:

        - the optimizer step at the last gather in which the user's object was told that the weights were ``loaded``;
        - how the weights have changed since the last gather: 0 for ``unchanged``, 1 for ``stepped``, 2 for ``loaded``.
        """
        return {_RECORD: torch.tensor([self._begun, _CHANGES.index(self._present())]), **self.own.state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the ``state`` that :meth:`state` returned on this rank."""
        self.own.load(state)
        self._begun, change = map(int, state[_RECORD])
        self._change, self._seen = _CHANGES[change], self._master_shard.version[1]
