"""Calls a user's own class, which reduces the gradients or gathers the weights of one unit on one rank.

Such a class is called a *method*, and a unit is a group of parameters.  There are two base classes for users' classes,
one for reductions and one for gathers; both inherit from :class:`Method`.  The engine calls a user's class through
:class:`MethodDriver`, which constructs the object and copies its state.  Every error of a :class:`MethodDriver` names
the class, the rank and the unit.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from impl.comm.method_calls import inside
from impl.comm.method_wire import MethodWire
from impl.comm.watchdog import WireError
from impl.comm.wire import Wire
from impl.errors import ZeroError, raised
from impl.plan.traffic import Tag
from impl.policy.own_method import (
    GatherInfo,
    MethodError,
    MethodMessage,
    MethodUnit,
    OwnMethod,
    Role,
    declared,
)
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Topology
from impl.transport.shared_memory import SharedMemoryError


class Method(abc.ABC):
    """Base class of :class:`~impl.unit.own_reduction.ReductionMethod` and :class:`~impl.unit.own_gather.GatherMethod`.

    Users write subclasses of these two classes, to reduce gradients or to gather weights in a way of their own.

    Args:
        unit: the layout of the unit, a group of parameters: its P = ``unit.numel`` elements, and the S = ``unit.shard``
            elements of this rank.
        wire: sends tensors to other ranks; not to be used in the constructor.
        arguments: the arguments that the policy gives for the class, such as ``method(PowerSGD, rank=4)``, or
            ``method.rank = 4`` in a suite.
    """

    laws: ClassVar[Iterable[str]] = ()
    """Names of the properties that the class promises, such as ``["zero"]``.  The possible names are the members of
    :class:`~impl.policy.own_method.MethodLaw`, in lower case."""

    def __init__(self, unit: MethodUnit, wire: MethodWire, **arguments: Any) -> None:
        self.unit, self.wire = unit, wire
        self.kept: dict[str, Tensor] = {}  # the state, unless a class has its own state() and load()

    def advance(self) -> None:  # noqa: B027  # most methods have nothing to post
        """Post the next messages, if there are any to post.

        The engine calls this from time to time between ``start()`` and ``finish()``, at moments when messages that were
        posted before have usually arrived.
        """

    @abc.abstractmethod
    def finish(self) -> Tensor:
        """Complete the reduction or gather that ``start()`` has begun, and return its result."""

    def state(self) -> Mapping[str, Tensor]:
        """Return a dict of the tensors on which later results depend, such as the errors of error feedback.

        This base class returns ``self.kept``.  A class that keeps its state elsewhere defines both :meth:`state` and
        :meth:`load`.

        The engine saves the state in checkpoints.  It also restores the state after passes that have to leave no trace,
        such as a warm-up.  The names, shapes and types of the tensors must be the same at all times, also for a newly
        constructed object.  The engine does not call this function between ``start()`` and ``finish()``.
        """
        return self.kept

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state``, which :meth:`state` has returned.

        The tensors are copies, which this object may keep and change.
        """
        self.kept = dict(state)


class MethodDriver:
    """Constructs the object of a user's class for one unit on one rank, and calls the functions of this object.

    A unit is a group of parameters that are gathered and reduced together.  Every error names the class, the rank and
    the unit.

    Raises:
        ZeroError: if the object cannot be constructed.
    """

    role: ClassVar[Role]
    prefix: ClassVar[str]  # begins the names of the object's tensors in a unit's communication state

    def __init__(
        self, method: OwnMethod, geometry: UnitGeometry, wire: Wire, tag: Tag, dtype: torch.dtype
    ) -> None:
        self.method, self.unit = method, MethodUnit.of(geometry, wire.mesh.rank)
        self._where = f"on rank {wire.mesh.rank}, unit {geometry.name!r}"
        self.wire = MethodWire(wire, tag, dtype)
        self._instance = self._new()

    def advance(self) -> None:
        """Let the user's object post its next messages, if its class has the function ``advance()``."""
        if hasattr(self._instance, "advance"):
            self._call("advance")

    # State

    def state(self) -> dict[str, Tensor]:
        """Return copies of the tensors in the state of the user's object, by name.

        The names are those that the object's ``state()`` returns, preceded by ``prefix``, such as ``gather.``.  The
        dict is empty if the class has no function ``state()``.
        """
        if not hasattr(self._instance, "state"):
            return {}
        state, copies = self._call("state"), dict[str, Tensor]()
        if not isinstance(state, Mapping):
            raise self._error(f"state() returned {type(state).__name__}, expected a dict of tensors by name")
        for name, value in state.items():
            if not isinstance(name, str) or "/" in name or not isinstance(value, Tensor):
                raise self._error(
                    f"state() has {name!r} of type {type(value).__name__}: expected tensors, under names without '/'"
                )
            copies[self.prefix + name] = value.detach().clone()
        return copies

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Give the object the tensors of ``state`` whose names begin with ``prefix``; other tensors are ignored.

        The method first waits for all messages that the object has posted.
        """
        self.wire.drain()
        own = {
            name.removeprefix(self.prefix): value
            for name, value in state.items()
            if name.startswith(self.prefix)
        }
        if own:
            self._call("load", {name: value.to(self.wire.device, copy=True) for name, value in own.items()})

    def reset(self) -> None:
        """Replace the object of the user's class by a newly constructed object; to be called on all ranks."""
        self.drain()
        self._instance = self._new()

    def drain(self) -> None:
        """Wait for all messages that the user's object has posted but not yet waited for."""
        self.wire.drain()

    def messages(self, topology: Topology, *gather: GatherInfo) -> tuple[MethodMessage, ...] | None:
        """Return the messages that the user's class declares, in ``bytes()``, for one reduction or gather.

        Args:
            topology: the nodes and ranks between which the messages are sent.
            gather: the pass that needs the weights, if the class gathers weights; left out if the class reduces
                gradients.

        Returns:
            The messages, or None if the class has no function ``bytes()``.
        """
        return declared(self.method, self._instance, self.unit, topology, *gather)

    # Calls

    def _new(self) -> Any:
        try:
            self.method.check_role(self.role)
            return self.method.make(self.unit, self.wire)
        except MethodError as error:
            raise ZeroError(f"method {error} ({self._where})") from error
        except Exception as error:
            ways = "; give arguments as `method.NAME` in a suite, or with `--argument NAME=VALUE`"
            raise self._error(
                f"its constructor raised {raised(error)}{'' if self._fits() else ways}"
            ) from error

    def _fits(self) -> bool:
        """Return whether the constructor accepts the arguments that the policy gives; True if this is unknown."""
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
        """Call the function ``name`` of the user's object, without autograd, and return its result.

        Errors of the engine's communication get a note that names the function and the class.  Any other error that the
        function raises becomes a ZeroError of one line, which names the class, the rank and the unit.
        """
        function: Callable[..., Any] = getattr(self._instance, name)
        try:
            # What the class keeps outlives a pass in inference mode.
            call = inside(f"method {self.method} {self._where}: {name}()")
            with torch.inference_mode(mode=False), torch.no_grad(), call:
                return function(*arguments)
        except (WireError, SharedMemoryError) as error:  # which name rank and unit already
            error.add_note(f"in {name}() of method {self.method}")
            raise
        except Exception as error:
            raise self._error(f"{name}() raised {raised(error)}") from error

    def _checked(self, result: Any, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Check that ``result``, which the user's finish() has returned, is a tensor (numel,) of ``dtype``; return it.

        The returned tensor is detached from autograd.  Raises a ZeroError if the check fails.  ``what`` says in the
        error message what finish() has to return.
        """
        name = str(dtype).removeprefix("torch.")
        if not isinstance(result, Tensor):
            short = "fp32" if dtype is torch.float32 else name
            raise self._error(
                f"finish() returned {type(result).__name__}, expected a tensor of shape ({numel},) and type {short}"
            )
        if (tuple(result.shape), result.dtype) != ((numel,), dtype):
            raise self._error(
                f"finish() returned {str(result.dtype).removeprefix('torch.')} of shape {tuple(result.shape)}, "
                f"expected {name} of shape ({numel},): return {what}"
            )
        return result.detach()

    def _error(self, what: str) -> ZeroError:
        return ZeroError(f"method {self.method} {self._where}: {what}")
