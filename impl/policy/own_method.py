"""Defines how a policy names a user's class that reduces gradients or gathers weights, and what such a class is given.

Such a class is called a *method*.  There are two kinds of methods:

- A method of reduction reduces a unit's gradient in a way of its own.  It may, for example, send low-rank factors, send
  only some elements and their indices, let ranks vote on signs, or return the mean one step late.  A policy names it in
  ``reduce``: ``Policy(reduce=method(PowerSGD, rank=4))``, or ``policy.reduce = "mine:PowerSGD"`` in a suite.
  :mod:`impl.unit.own_reduction` runs it, and documents the class that a user writes.
- A method of gathering gathers a unit's weights.  A policy names it in ``gather``:
  ``Policy(gather=method(Differences))``.  :mod:`impl.unit.own_gather` runs it, and documents its class.

Pure: no torch.  The module of a user's class is imported on first use.  Therefore records and plans that name the class
can be read on a machine that lacks this module.
"""

from __future__ import annotations

import enum
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, get_args

from impl.codecs.codec import padded_bytes
from impl.errors import raising
from impl.named_object import NamedObjectError, allowed, import_object, is_name
from impl.policy.shard_layout import UnitGeometry
from impl.policy.topology import Axis, Topology

Argument = bool | int | float | str | tuple[Any, ...]
MessageKind = Literal["all_gather", "all_to_all", "shift"]
"""How the ranks of an axis exchange tensors:

- ``all_gather``: each rank sends one tensor to all other ranks;
- ``all_to_all``: each rank sends a different row of its tensor to each other rank;
- ``shift``: each rank sends one tensor to the next rank.
"""

Role = Literal["reduce", "gather"]
"""What a user's class does, which is also the name of the policy's field that holds the class."""

Change = Literal["stepped", "loaded", "unchanged"]
"""How a unit's weights have changed since they were last gathered:

- ``stepped``: an optimizer has stepped them;
- ``loaded``: something else has written them;
- ``unchanged``: they have not changed.
"""


class GatherInfo(NamedTuple):
    """Describes one gather of a unit's weights to the user's class that carries it out.

    All ranks get the same description.
    """

    phase: Literal["forward", "backward", "evaluate"]  # the pass that needs the weights
    # How the weights have changed since the unit's last gather.  It is ``loaded`` also in the first gather, and in the
    # first gather after a failed pass was dropped: ranks must then not rely on what earlier gathers have sent.
    change: Change
    steps: int  # number of optimizer steps since the last gather whose ``change`` was ``loaded``


class MethodError(ValueError):
    """Raised if a user's class cannot be used to reduce gradients or to gather weights, or if its code fails.

    The message names the class and says what is wrong.
    """


class MethodLaw(enum.Enum):
    """A property that a user's class, which reduces gradients or gathers weights, can promise (a law).

    ``zeropp check method`` tests the laws that the class promises.
    """

    SAME_ON_ALL_RANKS = (
        "an element of the mean has the same bits on every rank that computes it, however the mean is sharded"
    )
    ZERO = "a new object turns gradients of zeros into a mean of zeros"
    EXACT = "a new object returns the mean, up to rounding in fp32"
    EXACT_AT_FULL_RANK = (
        "a new object with the arguments of full_rank() returns the mean, up to rounding in fp32"
    )
    BOUND = "the error of each element of a new object's result is within error_bound"
    UNBIASED = "the mean of repeated results for the same gradients is the mean of these gradients"
    SETTLES = "after settles_after() gathers of weights that do not change, the result is these weights, up to rounding"


LAWS: Final = {law.name.lower(): law for law in MethodLaw}
_NEEDS: Final = {
    MethodLaw.EXACT_AT_FULL_RANK: "full_rank",
    MethodLaw.BOUND: "error_bound",
    MethodLaw.SETTLES: "settles_after",
}


class MethodSlot(NamedTuple):
    """The place of one parameter in its unit's gradient: the elements [offset, offset + numel)."""

    name: str  # qualified, as in ``named_parameters()``
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The place in the unit's gradient one past the parameter's last element."""
        return self.offset + self.numel

    @property
    def matrix(self) -> tuple[int, int]:
        """The parameter's shape as a matrix: (size of the first dimension, product of the sizes of all others).

        A parameter of shape (4, 3, 2) gives (4, 6), and a vector of 5 elements gives (5, 1).
        """
        rows = self.shape[0] if self.shape else 1
        return rows, self.numel // rows


@dataclass(frozen=True, slots=True)
class MethodUnit:
    """A unit that a user's class reduces or gathers, as one rank sees it: P elements, of which this rank keeps S."""

    name: str
    slots: tuple[MethodSlot, ...]  # the parameters; elements outside of all slots are padding
    numel: int  # P, elements of the gradient, padding included
    start: int  # first element of this rank's shard
    end: int  # one past the last element of this rank's shard

    @classmethod
    def of(cls, geometry: UnitGeometry, rank: int) -> MethodUnit:
        """Returns the description of a unit for ``rank``, from the unit's layout ``geometry``."""
        slots = (MethodSlot(slot.spec.name, slot.spec.shape, slot.offset) for slot in geometry.slots)
        return cls(geometry.name, tuple(slots), geometry.padded, *geometry.bounds(rank))

    @property
    def elements(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def shard(self) -> int:
        """S, the number of elements of this rank's shard."""
        return self.end - self.start

    def rows(self, whole: Any, ranks: int) -> Any:
        """Returns the shards of ``whole`` (P,) as (ranks, S): row ``i`` is the shard that rank ``i`` keeps.

        ``ranks`` is the number of all ranks.  There are P / S different shards.  If several groups of ranks each keep
        all shards, there are fewer shards than ranks, and the shards are repeated.  With 4 ranks in 2 groups, the rows
        0 and 2 are the first shard, and the rows 1 and 3 are the second shard.
        """
        shards = self.numel // self.shard
        return whole.view(shards, -1).repeat(ranks // shards, 1)

    def whole(self, rows: Any) -> Any:
        """Joins ``rows`` (ranks, S), the shards of all ranks in rank order, to (P,); this undoes :meth:`rows`."""
        return rows[: self.numel // self.shard].reshape(-1)

    @property
    def own(self) -> slice:
        """The slice that cuts this rank's shard out of the unit's gradient or weights (P,): ``whole[unit.own]``."""
        return slice(self.start, self.end)


class MethodMessage(NamedTuple):
    """A message that every rank sends in each reduction or gather, as declared by the ``bytes()`` of a user's class.

    :func:`declared` rounds ``nbytes`` up to a multiple of 16, since messages are padded to such multiples.
    """

    kind: MessageKind
    axis: str  # ``world``, ``node`` or ``local``
    nbytes: int  # bytes that a rank sends to each other rank of the axis


@dataclass(frozen=True, slots=True)
class OwnMethod:
    """A user's class, which reduces gradients or gathers weights, and the arguments to construct it with."""

    name: str  # ``module:Class``
    arguments: tuple[tuple[str, Argument], ...] = ()  # (name, value) of each argument
    # The class.  None: it is imported by its name when it is first needed.
    kind: type | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        texts = (
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"
            for name, value in self.arguments
        )
        return f"{self.name}({', '.join(texts)})" if self.arguments else self.name

    @property
    def readable(self) -> bool:
        """Whether the attributes of the class may be read: it was given as a class, or its module may be imported.

        Inside the context :func:`impl.named_object.forbidden`, no module of a user may be imported.
        """
        return self.kind is not None or allowed()

    @property
    def definition(self) -> type[Any]:
        """The class, which is imported if necessary.

        Raises MethodError: if the class cannot be imported, or is not accepted by :func:`checked`.
        """
        return self.kind or _imported(self.name)

    @property
    def laws(self) -> frozenset[MethodLaw]:
        """The laws that the class promises (:class:`MethodLaw`); empty if the class names none."""
        return frozenset(LAWS[name] for name in getattr(self.definition, "laws", ()))

    def check_role(self, role: Role) -> None:
        """Raises a MethodError if the class cannot be used in the policy's field ``role``: ``reduce`` or ``gather``."""
        other = role_of(self.definition)
        if other not in (None, role):
            expected = {"reduce": "start(gradient)", "gather": "start(weights, gather)"}
            does = {"reduce": "reduces gradients", "gather": "gathers weights"}
            raise MethodError(
                f"{self}: has {expected[other]}, so it {does[other]}, but {role} needs a class with {expected[role]}: "
                f"name {self.name.rpartition(':')[2]} in {other} instead of {role}"
            )

    def make(self, unit: MethodUnit, wire: Any) -> Any:
        """Returns a new object of the class for one unit on one rank; the object sends through ``wire``."""
        return self.definition(unit, wire, **dict(self.arguments))

    def error_bound(self, unit: MethodUnit) -> float:
        """Returns the relative error bound that the class promises.

        The error of each element is at most the returned bound times a magnitude M.  The bound is 0 if the class
        promises the law ``exact``, and infinity if it promises no bound.  M depends on what the class does:

        - If the class gathers weights, M is the largest magnitude of the weights in the element's shard.
        - If the class reduces gradients, the P elements of the unit are cut into one piece for each rank.  For the
          piece that contains the element, take the largest magnitude of each rank's gradient; M is the mean of these
          over ranks.  With two ranks and the largest magnitudes 1 and 3, M is 2.
        """
        laws = self.laws
        if MethodLaw.EXACT in laws:
            return 0.0
        return (
            float(self.definition.error_bound(unit, **dict(self.arguments)))
            if MethodLaw.BOUND in laws
            else math.inf
        )


def method(source: type[Any] | str, **arguments: Any) -> OwnMethod:
    """Returns a value for a policy's field ``reduce`` or ``gather`` that names a user's class and its arguments.

    With this value, the user's class reduces gradients or gathers weights.  ``source`` is the class, or its name as
    ``module:Class``.  The ``arguments`` are passed to the class when it is constructed.  For example:
    ``Policy(reduce=method(PowerSGD, rank=4))``.

    Raises MethodError: if a class is not accepted by :func:`checked`; if the name does not have the form
    ``module:Class``; or if an argument is not a number, text, bool, list or tuple.
    """
    values = tuple(
        (name, tuple(value) if isinstance(value, list) else value) for name, value in arguments.items()
    )
    for name, value in values:
        if not isinstance(value, bool | int | float | str | tuple):
            raise MethodError(
                f"{name}={value!r}: an argument of a method must be a number, text, bool or list"
            )
    if isinstance(source, str):
        if not is_name(source):
            raise MethodError(f"{source!r} does not name a class: expected 'module:Class'")
        return OwnMethod(source, values)
    name = f"{source.__module__}:{source.__qualname__}"
    return OwnMethod(name, values, checked(name, source))


@functools.cache
def _imported(name: str) -> type[Any]:
    try:
        return checked(name, import_object(name))
    except NamedObjectError as error:
        raise MethodError(str(error)) from error


def checked(name: str, kind: Any) -> type[Any]:
    """Returns ``kind`` if it is a class that can reduce gradients or gather weights, and otherwise raises an error.

    Such a class has the methods ``start`` and ``finish``, defines both ``state`` and ``load`` or neither, and has all
    methods that its laws need (:class:`MethodLaw`).

    Raises MethodError: the message begins with ``name``, the class's name, and says what is missing or wrong.
    """
    if not isinstance(kind, type):
        raise MethodError(f"{name}: is a {type(kind).__name__}, expected a class: name the class")
    for member in ("start", "finish"):
        if not callable(getattr(kind, member, None)):
            raise MethodError(f"{name}: has no method {member!r}: define it in the class")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise MethodError(f"{name}: has no method {missing[0]!r}: define it in the class")
    if callable(getattr(kind, "state", None)) != callable(getattr(kind, "load", None)):
        raise MethodError(
            f"{name}: has only one of the functions 'state' and 'load': define both, or neither"
        )
    laws = getattr(kind, "laws", ())
    if isinstance(laws, str) or not isinstance(laws, Iterable):
        raise MethodError(f"{name}: laws = {laws!r}: expected a list with some of {', '.join(LAWS)}")
    for law in laws:
        if law not in LAWS:
            raise MethodError(f"{name}: unknown law {law!r}: expected some of {', '.join(LAWS)}")
        if (needed := _NEEDS.get(LAWS[law])) is not None and not callable(getattr(kind, needed, None)):
            raise MethodError(
                f"{name}: has no method {needed!r}, which the law {law!r} needs: define it, or remove the law"
            )
        if LAWS[law] is MethodLaw.SETTLES and role_of(kind) == "reduce":
            raise MethodError(
                f"{name}: only a class that gathers weights can promise the law {law!r}, and this class reduces "
                f"gradients: remove {law!r} from laws"
            )
    return kind


def role_of(kind: type[Any]) -> Role | None:
    """Returns the policy's field in which the user's class ``kind`` can be used, ``reduce`` or ``gather``.

    A class with ``start(gradient)`` can be used in ``reduce``, and a class with ``start(weights, gather)`` in
    ``gather``.  Returns None if the field is not known, because ``start()`` takes any number of arguments, or has no
    signature that Python can read.
    """
    try:
        parameters = list(inspect.signature(kind.start).parameters.values())
    except ValueError:  # it has no signature
        return None
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]
    return "gather" if len(needed) > 2 else "reduce"  # the first one is self


def _axes(topology: Topology) -> tuple[Axis, ...]:
    return topology.world_axis, topology.node_axis, topology.local_axis


def axis_of(topology: Topology, name: str) -> Axis:
    """Returns the axis of ``topology`` with the given ``name``: ``world``, ``node`` or ``local``.

    Raises MethodError: for any other name.
    """
    axes = {axis.name: axis for axis in _axes(topology)}
    if name not in axes:
        raise MethodError(f"axis {name!r}: expected one of {', '.join(axes)}")
    return axes[name]


class PlannedWire:
    """A stand-in for the wire, for a user's class that is constructed only to call its ``bytes()``.

    The wire is the object through which ranks send.  The stand-in tells the class how many ranks a group along an axis
    has, and which index the rank has in its group.  The stand-in cannot send: its methods that send on a real wire
    raise a MethodError.
    """

    def __init__(self, topology: Topology, rank: int = 0) -> None:
        self.topology, self.rank, self.device = topology, rank, "cpu"
        self.dtype = None  # torch's default

    def size(self, axis: str = "world") -> int:
        """Returns the number of ranks in a group along ``axis``, which is ``world``, ``node`` or ``local``."""
        return axis_of(self.topology, axis).size

    def index(self, axis: str = "world") -> int:
        """Returns the index of this rank in its group along ``axis``."""
        return axis_of(self.topology, axis).digit(self.rank)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise MethodError(
            "the method sends in its constructor or in bytes(): send in start(), advance() and finish() only"
        )

    all_gather = all_to_all = shift = _refuse


def declared(
    own: OwnMethod, instance: Any, unit: MethodUnit, topology: Topology, *gather: GatherInfo
) -> tuple[MethodMessage, ...] | None:
    """Returns the messages that ``instance``, an object of a user's class, declares in its ``bytes()``.

    If the class gathers weights, ``gather`` describes one gather of ``unit``, and the result is the messages of this
    gather.  If the class reduces gradients, there is no ``gather``, and the result is the messages of one reduction.
    The bytes of each message are rounded up to a multiple of 16.  Returns None if the class has no ``bytes()``.

    Raises MethodError: if ``bytes()`` raises an error, or returns anything but tuples of kind, axis and bytes.
    """
    count: Callable[..., Any] | None = getattr(instance, "bytes", None)
    if count is None:
        return None
    with raising(MethodError, f"{own}: bytes() raised"):
        listed = list(count(unit, topology, *gather))
    axes = tuple(axis.name for axis in _axes(topology))
    rows = list[MethodMessage]()
    for row in listed:
        match row:
            case (str(kind), str(axis), int(nbytes)) if kind in get_args(MessageKind) and axis in axes:
                rows.append(MethodMessage(kind, axis, nbytes))  # type: ignore[arg-type]  # as the guard says
                continue
        raise MethodError(
            f"{own}: bytes() returned {row!r}: expected (kind, axis, bytes) with a kind of "
            f"{', '.join(get_args(MessageKind))}, and an axis of {', '.join(axes)}"
        )
    return tuple(row._replace(nbytes=padded_bytes(row.nbytes)) for row in rows)


Declared = Mapping[str, tuple[MethodMessage, ...] | None]
"""For each unit's name, the messages that a method declares for a reduction; None if its class has no ``bytes()``."""


DeclaredGathers = Mapping[str, Callable[[GatherInfo], tuple[MethodMessage, ...] | None]]
"""For each unit's name, a function that returns the messages that a method declares for a given gather of the unit.

The function returns None if the method's class has no ``bytes()``."""


def planned_messages(own: OwnMethod, topology: Topology, units: Iterable[UnitGeometry]) -> Declared:
    """Returns, for each unit's name, the messages that a user's class declares for one reduction of the unit.

    The value is None if the class has no ``bytes()``.  Frozen and persistent units are left out, since the class does
    not reduce them.  No running ranks are needed.

    Raises MethodError: if the class cannot be imported or constructed, or its ``bytes()`` is wrong.
    """
    return {
        name: None if instance is None else declared(own, instance, unit, topology)
        for name, unit, instance in _planned(own, topology, units, "reduce")
    }


def planned_gathers(own: OwnMethod, topology: Topology, units: Iterable[UnitGeometry]) -> DeclaredGathers:
    """Returns, for each unit's name, a function that returns the messages of one gather of the unit.

    The function's argument is a :class:`GatherInfo`, which describes the gather.  Its result is the messages that the
    user's class ``own`` declares in its ``bytes()``, or None if the class has no ``bytes()``.

    Frozen and persistent units are left out, since the class does not gather them.  No running ranks are needed.

    Raises MethodError: if the class cannot be imported or constructed.  The returned functions raise it if ``bytes()``
    is wrong.
    """

    def messages(unit: MethodUnit, instance: Any, gather: GatherInfo) -> tuple[MethodMessage, ...] | None:
        return None if instance is None else declared(own, instance, unit, topology, gather)

    return {
        name: functools.partial(messages, unit, instance)
        for name, unit, instance in _planned(own, topology, units, "gather")
    }


def declares(own: OwnMethod) -> bool:
    """Returns whether the user's class declares its messages, that is, whether it has a method ``bytes()``."""
    return callable(getattr(own.definition, "bytes", None))


def _planned(
    own: OwnMethod, topology: Topology, units: Iterable[UnitGeometry], role: Role
) -> Iterator[tuple[str, MethodUnit, Any]]:
    """Yield (name, unit as rank 0 sees it, an object of the user's class) for each trained unit that is not persistent.

    The object is None if the class has no ``bytes()``.

    Raises MethodError: if the class does not fit the policy's field ``role``, or if its constructor raises an error.
    """
    own.check_role(role)
    for geometry in units:
        if geometry.trainable and not geometry.persistent:
            unit, instance = MethodUnit.of(geometry, 0), None
            if declares(own):
                try:
                    instance = own.make(unit, PlannedWire(topology))
                except Exception as error:
                    raise MethodError(
                        f"{own}, unit {geometry.name!r}: its constructor raised {type(error).__name__}: {error}"
                    ) from error
            yield geometry.name, unit, instance
