"""Runs a user's own reduction of gradients: a class that a policy names, such as ``reduce = "mine:PowerSGD"``.

:class:`ReductionMethod` documents what such a class has.  The engine makes one object of it for each trained unit on
each rank, and drives it as it drives its own reductions: ``start()`` when the unit's gradient is complete,
``advance()`` at the events at which all ranks post further messages, and ``finish()`` when the mean is needed.  Thus
messages overlap with the computation of other units.

:class:`OwnReduction` stands between engine and class.  It checks what the class returns, and puts class, rank and unit
into every error.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from impl.codecs.rounding_noise import Key
from impl.comm.error_feedback import Errors
from impl.comm.exchanges import Exchange
from impl.comm.method_wire import MethodWire
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.errors import ZeroError, raised
from impl.plan.hops import Hop
from impl.plan.own_method import MethodError, MethodMessage, MethodUnit, OwnMethod, declared
from impl.plan.shard_layout import UnitGeometry
from impl.plan.topology import Topology
from impl.plan.traffic import Tag
from impl.transport.shared_memory import SharedMemoryError
from impl.unit.method_calls import inside

STATE: Final = "method."  # begins the names of a method's entries in a unit's state


class ReductionMethod(abc.ABC):
    """Reduces the gradients of one unit on one rank; base class of reductions of one's own.

    A class need not inherit from this one: it needs :meth:`start` and :meth:`finish`, and may have the rest.
    Between two reductions of a unit the engine calls ``start()`` once, ``advance()`` any number of times (maybe never),
    and ``finish()`` once.  All ranks call them in the same order, also across units.

    Args:
        unit: the unit's parameters and this rank's shard.  P is ``unit.numel``, S is ``unit.shard``.
        wire: sends tensors to other ranks; not to be used in the constructor.
        arguments: what the policy gives, such as ``rank=4``; in a suite ``method.rank = 4``.
    """

    laws: ClassVar[Iterable[str]] = ()
    """What the class promises (:class:`~impl.plan.own_method.MethodLaw`), in lower case, such as ``["zero"]``."""

    def __init__(self, unit: MethodUnit, wire: MethodWire, **arguments: Any) -> None:
        self.unit, self.wire = unit, wire
        self.kept: dict[str, Tensor] = {}  # the state, unless a class has its own state() and load()

    @abc.abstractmethod
    def start(self, gradient: Tensor) -> None:
        """Begin the reduction of ``gradient`` (P,) fp32, this rank's own, and post the first messages.

        The tensor belongs to the method, which may keep and change it.  Padding is zero.
        """

    def advance(self) -> None:  # noqa: B027  # most methods have nothing to post
        """Post the next messages, if there are any.  A message that was posted before has usually arrived."""

    @abc.abstractmethod
    def finish(self) -> Tensor:
        """Finish the reduction; returns (S,) fp32, this rank's shard of the mean over all ranks.

        The tensor must not be changed afterwards.  Padding may have any value.
        """

    def state(self) -> Mapping[str, Tensor]:
        """Return all that later reductions depend on, such as carried errors; here ``self.kept``.

        It is saved in checkpoints, and restored after rehearsals.  Names, shapes and types must be the same from the
        constructor on.  It is not called between ``start()`` and ``finish()``.
        """
        return self.kept

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state` has returned; the tensors belong to the method."""
        self.kept = dict(state)

    # Classes may also have:
    #
    # def bytes(self, unit, topology): the messages of one reduction, as tuples (kind, axis, bytes to each other rank).
    # @staticmethod def error_bound(unit, **arguments): needed for the law ``bound``.
    # @staticmethod def full_rank(unit, **arguments): arguments for the law ``exact_at_full_rank``.


class OwnReduction:
    """Drives a method as the ``collective`` of a :class:`~impl.unit.gradient_reduction.GradientReduction`.

    Raises:
        ZeroError: if the class cannot be made; here and later, naming class, rank and unit.
    """

    hops: ClassVar[tuple[Hop, ...]] = ()  # the plan knows none
    mean: ClassVar[None] = None  # the mean is never taken before finish()

    def __init__(self, method: OwnMethod, geometry: UnitGeometry, wire: Wire) -> None:
        self.method, self.unit = method, MethodUnit.of(geometry, wire.mesh.rank)
        self._observer_of, self._where = wire, f"on rank {wire.mesh.rank}, unit {geometry.name!r}"
        self.wire = MethodWire(wire, Tag("backward", "gradients", geometry.name))
        self._out: Tensor | None = None
        self._finite = True
        self._instance = self._new()

    # As a collective

    def collects(self, dtype: torch.dtype) -> bool:
        """Return that gradients cannot be collected in a message: the method makes its own."""
        return False

    def open_message(self) -> Exchange:
        """Raise an error, since :meth:`collects` is False."""
        raise self._error("gradients cannot be collected in a message")

    def start(
        self,
        gradient: Tensor,
        *,
        key: Key | None = None,
        errors: Errors | None = None,
        opened: Exchange | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Give the method a copy of ``gradient`` (P,) in fp32; ``out`` (S,) fp32 receives the mean."""
        self._out = out
        own = gradient.to(torch.float32, copy=True)
        if self._observer_of.observer is not None:
            self._observer_of.observer.local(self.unit.name, own)
        self._finite = bool(own.isfinite().all())
        self._call("start", own)

    def post_next_hop(self) -> None:
        """Let the method post its next messages."""
        if hasattr(self._instance, "advance"):
            self._call("advance")

    def finish(self) -> Tensor:
        """Return the mean (S,) fp32, in memory of the engine's."""
        mean = self.mean_of_method()
        return mean.clone() if self._out is None else self._out.copy_(mean)

    def mean_of_method(self) -> Tensor:
        """Return the method's own tensor (S,) fp32 with the mean, after checking its type, shape and values."""
        mean = self._call("finish")
        if not isinstance(mean, Tensor):
            raise self._error(
                f"finish() returned {type(mean).__name__}, expected a tensor ({self.unit.shard},) fp32"
            )
        expected = (self.unit.shard,), torch.float32
        if (tuple(mean.shape), mean.dtype) != expected:
            raise self._error(
                f"finish() returned {str(mean.dtype).removeprefix('torch.')} of shape {tuple(mean.shape)}, expected "
                f"float32 of shape ({self.unit.shard},): this rank's shard of the mean"
            )
        # Gradients that are not finite already may have any mean.
        if self._finite and not bool(mean.isfinite().all()):
            raise self._error(
                "finish() returned NaN or infinity, although this rank's gradient is finite: correct the method, or "
                "look for a rank whose gradient is not finite"
            )
        return mean.detach()

    def close(self) -> None:
        """Drop the memory for the mean."""
        self._out = None

    # State

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the method's state; entries have the prefix ``method.``."""
        if not hasattr(self._instance, "state"):
            return {}
        state, copies = self._call("state"), dict[str, Tensor]()
        if not isinstance(state, Mapping):
            raise self._error(f"state() returned {type(state).__name__}, expected a dict of tensors by name")
        for name, value in state.items():
            if not isinstance(name, str) or "/" in name or not isinstance(value, Tensor):
                raise self._error(
                    f"state() has {name!r} of type {type(value).__name__}: expected tensors by names without '/'"
                )
            copies[STATE + name] = value.detach().clone()
        return copies

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over entries that :meth:`state` has returned; other entries are ignored."""
        self.wire.drain()
        own = {name.removeprefix(STATE): value for name, value in state.items() if name.startswith(STATE)}
        if own:
            self._call("load", {name: value.to(self.wire.device, copy=True) for name, value in own.items()})

    def reset(self) -> None:
        """Begin anew with a new object of the class; all ranks must do so."""
        self.drain()
        self._instance = self._new()

    def drain(self) -> None:
        """Wait for messages that the method has sent and not received."""
        self.wire.drain()

    def messages(self, topology: Topology) -> tuple[MethodMessage, ...] | None:
        """Return the messages that the method declares for a reduction; None if it declares none."""
        return declared(self.method, self._instance, self.unit, topology)

    def _new(self) -> Any:
        try:
            return self.method.make(self.unit, self.wire)
        except MethodError as error:
            raise ZeroError(f"method {error} ({self._where})") from error
        except Exception as error:
            ways = "; `method.NAME` of a suite and `--argument NAME=VALUE` give arguments"
            raise self._error(
                f"its constructor raised {raised(error)}{'' if self._fits() else ways}"
            ) from error

    def _fits(self) -> bool:
        """Return whether the constructor takes the arguments that it gets."""
        try:
            inspect.signature(self.method.definition).bind(
                self.unit, self.wire, **dict(self.method.arguments)
            )
        except TypeError:
            return False
        except ValueError:  # it has no signature
            return True
        return True

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the class without autograd; errors of its own get one line with class, rank and unit."""
        function: Callable[..., Any] = getattr(self._instance, name)
        try:
            with torch.no_grad(), inside(f"method {self.method} {self._where}: {name}()"):
                return function(*arguments)
        except (WireError, SharedMemoryError) as error:  # which name rank and unit already
            error.add_note(f"in {name}() of method {self.method}")
            raise
        except Exception as error:
            raise self._error(f"{name}() raised {raised(error)}") from error

    def _error(self, what: str) -> ZeroError:
        return ZeroError(f"method {self.method} {self._where}: {what}")
