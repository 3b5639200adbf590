"""Drives a user's own class, a *method*, which reduces the gradients or gathers the weights of one unit on one rank.

:class:`Method` is what the base classes of users' classes have in common.  :class:`MethodDriver` stands between engine
and class: it makes the object, copies its state, and puts class, rank and unit into every error.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

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
from impl.unit.method_calls import inside


class Method(abc.ABC):
    """Base class of users' methods: see :mod:`impl.unit.own_reduction` and :mod:`impl.unit.own_gather`.

    Args:
        unit: the unit's parameters and this rank's shard.  P is ``unit.numel``, S is ``unit.shard``.
        wire: sends tensors to other ranks; not to be used in the constructor.
        arguments: what the policy gives, such as ``rank=4``; in a suite ``method.rank = 4``.
    """

    laws: ClassVar[Iterable[str]] = ()
    """What the class promises (:class:`~impl.policy.own_method.MethodLaw`), in lower case, such as ``["zero"]``."""

    def __init__(self, unit: MethodUnit, wire: MethodWire, **arguments: Any) -> None:
        self.unit, self.wire = unit, wire
        self.kept: dict[str, Tensor] = {}  # the state, unless a class has its own state() and load()

    def advance(self) -> None:  # noqa: B027  # most methods have nothing to post
        """Post the next messages, if there are any.  A message that was posted before has usually arrived."""

    @abc.abstractmethod
    def finish(self) -> Tensor:
        """Finish what ``start()`` has begun, and return the result."""

    def state(self) -> Mapping[str, Tensor]:
        """Return everything on which later results depend, such as carried errors; here ``self.kept``.

        The engine saves this state in checkpoints, and restores it after rehearsals.  Names, shapes and types must be
        those of a newly constructed object.  The engine does not call this between ``start()`` and ``finish()``.
        """
        return self.kept

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state` has returned; the tensors belong to the method."""
        self.kept = dict(state)


class MethodDriver:
    """Makes the object of a user's class for one unit on one rank, and calls it.

    Raises:
        ZeroError: if the object cannot be made.  This error and all later ones name the class, the rank and the unit.
    """

    role: ClassVar[Role]
    prefix: ClassVar[str]  # begins the names of the method's entries in a unit's state

    def __init__(
        self, method: OwnMethod, geometry: UnitGeometry, wire: Wire, tag: Tag, dtype: torch.dtype
    ) -> None:
        self.method, self.unit = method, MethodUnit.of(geometry, wire.mesh.rank)
        self._where = f"on rank {wire.mesh.rank}, unit {geometry.name!r}"
        self.wire = MethodWire(wire, tag, dtype)
        self._instance = self._new()

    def advance(self) -> None:
        """Let the method post its next messages."""
        if hasattr(self._instance, "advance"):
            self._call("advance")

    # State

    def state(self) -> dict[str, Tensor]:
        """Return a copy of the method's state; names of entries begin with the prefix."""
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
        """Take over entries that :meth:`state` has returned; other entries are ignored."""
        self.wire.drain()
        own = {
            name.removeprefix(self.prefix): value
            for name, value in state.items()
            if name.startswith(self.prefix)
        }
        if own:
            self._call("load", {name: value.to(self.wire.device, copy=True) for name, value in own.items()})

    def reset(self) -> None:
        """Begin anew with a new object of the class; all ranks must do so."""
        self.drain()
        self._instance = self._new()

    def drain(self) -> None:
        """Wait for the messages that the method has posted and not waited for."""
        self.wire.drain()

    def messages(self, topology: Topology, *gather: GatherInfo) -> tuple[MethodMessage, ...] | None:
        """Return the messages that the method declares for a reduction or a ``gather``; None without ``bytes()``."""
        return declared(self.method, self._instance, self.unit, topology, *gather)

    # Calls

    def _new(self) -> Any:
        try:
            self.method.check_role(self.role)
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
        """Call the function ``name`` of the user's object, without autograd.

        An error that the function raises is turned into a ZeroError of one line with class, rank and unit.
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
        """Return the ``result`` of finish() if it is a tensor (numel,) of ``dtype``.

        Raises a ZeroError otherwise; ``what`` says in the message what finish() must return.
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
                f"expected {name} of shape ({numel},): {what}"
            )
        return result.detach()

    def _error(self, what: str) -> ZeroError:
        return ZeroError(f"method {self.method} {self._where}: {what}")
