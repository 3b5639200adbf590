"""Runs a user's own reduction of gradients: a class that a policy names, such as ``reduce = "mine:PowerSGD"``.

:class:`ReductionMethod` documents the functions of such a class.  The engine constructs one object of the class for
each trained unit, a group of parameters, on each rank.  It calls ``start()`` when the unit's gradient is complete; then
``advance()`` any number of times, at the same points on all ranks; and ``finish()`` when the mean is needed.  Thus
messages overlap with the computation of other units.

The engine calls the class through :class:`OwnReduction`, which checks the tensors that the class returns.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor

from impl.codecs.rounding_noise import Key
from impl.comm.error_feedback import Errors
from impl.comm.exchanges import Exchange
from impl.comm.wire import Wire
from impl.plan.hops import Hop
from impl.plan.traffic import Tag
from impl.policy.own_method import OwnMethod, Role
from impl.policy.shard_layout import UnitGeometry
from impl.unit.method_driver import Method, MethodDriver


class ReductionMethod(Method):
    """Base class for a user's class that reduces the gradients of one unit on one rank.

    A unit is a group of parameters that are gathered and reduced together.  A user's class need not inherit from this
    class.  It must have :meth:`start` and :meth:`finish`; all other functions are optional.

    For each reduction of a unit the engine calls ``start()`` once, ``advance()`` any number of times (maybe never), and
    ``finish()`` once.  The order of all these calls, for all units, is the same on all ranks.
    """

    @abc.abstractmethod
    def start(self, gradient: Tensor) -> None:
        """Begin to reduce ``gradient`` (P,) fp32, the local gradient of this rank, and post the first messages.

        The tensor is a copy, which this object may keep and change.  Padding is zero.
        """

    @abc.abstractmethod
    def finish(self) -> Tensor:
        """Wait for the messages, and return this rank's shard (S,) fp32 of the mean of all ranks' gradients.

        S is ``self.unit.shard``.  This object must not change the tensor afterwards.  Padding may have any value.
        """

    # A user's class may also have these functions.  The last two are needed if ``laws`` has the property that they
    # name; ``arguments`` are the arguments that the policy gives for the class.
    #
    # def bytes(self, unit, topology): returns the messages of one reduction, as tuples (kind, axis, bytes to each other
    #     rank).
    # @staticmethod def error_bound(unit, **arguments): returns the largest error that ``bound`` promises.
    # @staticmethod def full_rank(unit, **arguments): returns arguments with which ``exact_at_full_rank`` is tested.


class OwnReduction(MethodDriver):
    """Calls the object of a user's class that reduces gradients, and checks the tensors that the object returns.

    It has the interface of :class:`~impl.comm.reduce_scatter.Reduction`, so that a
    :class:`~impl.unit.gradient_reduction.GradientReduction` can use it as ``collective``.
    """

    role: ClassVar[Role] = "reduce"
    prefix: ClassVar[str] = "method."
    hops: ClassVar[tuple[Hop, ...]] = ()  # the plan does not know the hops of a method
    mean: ClassVar[None] = None  # the mean is never taken before finish()

    def __init__(self, method: OwnMethod, geometry: UnitGeometry, wire: Wire) -> None:
        self._observer_of = wire
        self._out: Tensor | None = None
        self._finite = True
        super().__init__(method, geometry, wire, Tag("backward", "gradients", geometry.name), torch.float32)

    # As a collective

    def collects(self, dtype: torch.dtype) -> bool:
        """Return False: gradients cannot be written straight to a message, since a user's class makes the messages."""
        return False

    def open_message(self) -> Exchange:
        """Raise a ZeroError: a user's class makes the messages itself, so gradients cannot be collected in a message.

        The method exists because this class has the interface of :class:`~impl.comm.reduce_scatter.Reduction`.
        """
        raise self._error("gradients cannot be collected in a message: pass the whole gradient to start()")

    def start(
        self,
        gradient: Tensor,
        *,
        key: Key | None = None,
        errors: Errors | None = None,
        opened: Exchange | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Begin a reduction: give the user's object a copy of ``gradient`` (P,), cast to fp32.

        :meth:`finish` will write the mean to ``out`` (S,) fp32, or to new memory if ``out`` is None.  The arguments
        ``key``, ``errors`` and ``opened`` have no effect, since the class itself encodes and sends gradients.
        """
        self._out = out
        own = gradient.to(torch.float32, copy=True)
        if self._observer_of.observer is not None:
            self._observer_of.observer.local(self.unit.name, own)
        self._finite = bool(own.isfinite().all())
        self._call("start", own)

    def post_next_hop(self) -> None:
        """Let the user's object post its next messages, if its class has the function ``advance()``."""
        self.advance()

    def finish(self) -> Tensor:
        """Return this rank's shard (S,) fp32 of the mean gradient, which the user's object has computed.

        The mean is copied to the memory ``out`` that :meth:`start` was given, or to new memory if ``out`` was None.
        """
        mean = self.mean_of_method()
        return mean.clone() if self._out is None else self._out.copy_(mean)

    def mean_of_method(self) -> Tensor:
        """Return the mean gradient that ``finish()`` of the user's object returns, (S,) fp32, without copying it.

        Raises:
            ZeroError: if the tensor has another shape or type, or is not finite although the local gradient is finite.
        """
        what = "this rank's shard of the mean"
        mean = self._checked(self._call("finish"), self.unit.shard, torch.float32, what)
        # Gradients that are not finite already may have any mean.
        if self._finite and not bool(mean.isfinite().all()):
            raise self._error(
                "finish() returned NaN or infinity, although this rank's gradient is finite: correct the method, or "
                "look for a rank whose gradient is not finite"
            )
        return mean

    def close(self) -> None:
        """Drop the reference to ``out``, the memory for the mean that :meth:`start` was given."""
        self._out = None
