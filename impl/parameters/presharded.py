"""Holds parameters that Init has cut before their model is sharded: each rank has only its slice.

A :class:`Cut` is a group of parameters, such as those of a block, of which each rank holds one slice.  When the model
is sharded, :func:`take_over` makes the engine's shards from the slices.  If :func:`impl.zero.shard` lays the same
parameters out in the same way, no message is sent.  If not, ``take_over`` gathers one parameter after the other and
cuts each again.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from impl.comm.mesh import Mesh
from impl.comm.wire import Wire
from impl.errors import ZeroError
from impl.parameters.initial_weights import sums
from impl.plan.traffic import Tag
from impl.policy.policy import Policy
from impl.policy.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.unit.flat_buffer import handles
from impl.unit.master_shard import shard_of
from impl.unit.placeholder import Placeholder, keeper_of, release, restore
from impl.unit.whole_values import assemble

_LARGE: Final = 2**61 - 1  # the modulus of the hash of values


class Cut:
    """Holds this rank's slice of a group of parameters; either all of them are trainable, or all are frozen.

    Args:
        name: the name of the cut, for error messages.
        parameters: the parameters by name.
        policy: the policy that the model will be sharded with.
        mesh: the ranks.
        wire: a function that is called when values are gathered, and returns the object that sends the messages.
        on_use: a function that is called when an operation uses a parameter of this cut.  Its arguments are this cut, a
            list of all cuts that the operation uses, and the parameter's name.  The function gathers the values, or
            raises an error.
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        policy: Policy,
        *,
        mesh: Mesh,
        wire: Callable[[], Wire],
        on_use: Callable[[Cut, Sequence[Cut], str], None],
    ) -> None:
        topology = mesh.topology
        self.name, self.mesh, self.wire, self.on_use = name, mesh, wire, on_use
        group, first = policy.group_ranks(topology), next(iter(parameters.values()))
        self.geometry = lay_out(
            name,
            [ParameterSpec(f"{name}.{key}", tuple(tensor.shape)) for key, tensor in parameters.items()],
            grain=policy.grain,
            world=topology.world,
            max_padding=math.inf,  # checked when the model is sharded
            trainable=first.requires_grad,
            group=group,
        )
        axes, outside = topology.gather_axes(group)
        self._axes, self._device = axes[outside:], first.device
        self._parameters = [weakref.ref(parameter) for parameter in parameters.values()]
        self._keepers = [_InCut(self, slot.spec.name) for slot in self.geometry.slots]
        # (S,) fp32, this rank's slice, on the device of the values; empty while the parameters are whole
        self.shard = torch.empty(0)
        # The indices of the parameters that are in an open GatheredParameters context.
        self.pinned: set[int] = set()
        # For each parameter, a hash of the whole values from which the slice was cut, so that ranks can compare them.
        self.drawn = [0] * len(self.geometry.slots)
        self.whole = True  # whether the parameters have their whole values
        # For each parameter, the number of objects that held its memory when it was gathered (:meth:`_counts`).
        self._uses: list[int] = []
        self.cut()

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """The parameters in the order that they have in the slice; None for a parameter that no longer exists."""
        return [reference() for reference in self._parameters]

    def number(self, parameter: Tensor) -> int:
        """Return the index of ``parameter`` among the parameters of this cut; the parameter must be one of these."""
        return [other is parameter for other in self.parameters].index(True)

    def cut(self) -> None:
        """Keep this rank's slice of the parameters' present values, and free all other values.

        Raises:
            ZeroError: if a parameter's shape has changed since the first call.
        """
        parameters, values = self.parameters, []
        for parameter, slot in zip(parameters, self.geometry.slots, strict=True):
            values.append(torch.zeros(()).expand(slot.spec.shape) if parameter is None else parameter)
            if tuple(values[-1].shape) != slot.spec.shape:
                raise ZeroError(
                    f"parameter {slot.spec.name!r} had shape {slot.spec.shape} when Init cut it, and now has "
                    f"{tuple(values[-1].shape)}: to resize it, put a new parameter in its module instead of "
                    "assigning its data"
                )
        alive = {str(number): tensor for number, tensor in enumerate(parameters) if tensor is not None}
        for number, total in sums(alive).items():
            self.drawn[int(number)] = (31 * self.drawn[int(number)] + total) % _LARGE
        self.shard = shard_of(self.geometry, self.mesh.rank, values, self._device)
        for parameter, keeper in zip(parameters, self._keepers, strict=True):
            if parameter is not None:
                release(parameter, keeper)
        self.whole = False

    def gather(self) -> None:
        """Gather the whole values of all parameters of this cut, and give each parameter its values.

        All ranks that together hold one copy of the parameters must call it.
        """
        if self.whole:
            return
        for number, parameter in enumerate(self.parameters):
            if parameter is not None:
                restore(parameter, self.values(number, self.wire()).to(parameter.dtype))
                _whole[parameter] = weakref.ref(self)
        self.shard = torch.empty(0)
        self._uses = self._counts()
        self.whole = True

    def values(self, number: int, wire: Wire, part: Tensor | None = None) -> Tensor:
        """Gather and return the values of the parameter with index ``number``, in fp32 and in the parameter's shape.

        The parameter object is not changed.  All ranks that together hold one copy of the parameters must call it.

        ``part`` (n,) has the values of the parameter's elements in this rank's slice.  By default, these values are
        read from the slice.
        """
        start, end = self.geometry.part(self.geometry.slots[number], self.mesh.rank)
        part = (self.shard[start:end] if part is None else part).to(wire.mesh.device)
        tag = Tag("step", "state", self.name)
        with wire.calling("Init"):
            return assemble(self.geometry, number, part, self._axes, wire=wire, tag=tag).to(self._device)

    @property
    def viewed(self) -> bool:
        """Whether a view of a parameter's whole values, made since the values were gathered, still exists."""
        return any(map(operator.gt, self._counts(), self._uses))

    def _counts(self) -> list[int]:
        """Return, for each parameter, the number of tensors and other objects that hold its memory."""
        return [0 if parameter is None else handles(parameter) for parameter in self.parameters]


class _InCut:
    """Gathers a cut parameter, of which each rank holds only a slice, when an operation uses the parameter.

    While a parameter is cut, it is a placeholder without values.  An operation that gets the placeholder as an argument
    first calls :meth:`use` of the placeholder's :class:`~impl.unit.placeholder.Keeper`: an object of this class.
    """

    def __init__(self, cut: Cut, name: str) -> None:
        self.cut, self.name = cut, name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        """Gather the values of ``parameter`` for an operation, and return the parameter.

        The parameter is a placeholder: while each rank has only a slice of its values, it has no values.  ``together``
        are all placeholders that the operation uses; their values are gathered too.  Raises a ZeroError if the
        operation runs outside of the Init that has cut the parameter to slices.
        """
        if not self.cut.whole:  # the cut is whole if another parameter of this operation was used before
            self.cut.on_use(self.cut, [*filter(None, map(cut_of, together))], self.name)
        return parameter


# Maps each cut parameter that has its whole values now, by identity, to its cut.
_whole: MutableMapping[Tensor, weakref.ref[Cut]] = WeakTensorKeyDictionary()


def cut_of(parameter: Tensor) -> Cut | None:
    """Return the cut (group of parameters held in slices) to which ``parameter`` belongs; None if there is none.

    The cut is returned also while its values are gathered.
    """
    if (keeper := keeper_of(parameter)) is not None:
        return keeper.cut if isinstance(keeper, _InCut) else None
    reference = _whole.get(parameter)
    return None if reference is None else reference()


def drawn_numbers(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return, by name, a hash for each of the ``parameters`` of which this rank holds only a slice.

    When the model is sharded, the ranks compare these hashes, to find out whether they have started from equal values.

    A parameter's hash is computed from its whole values when they are cut to slices.  If the parameter is gathered and
    cut again, the hash is updated with the values that the parameter has then.  Ranks that have cut equal values at
    every cut therefore have equal hashes.
    """
    cuts = {name: _keeping(parameter) for name, parameter in parameters.items()}
    return {name: cut.drawn[cut.number(parameters[name])] for name, cut in cuts.items() if cut is not None}


def _keeping(parameter: Tensor) -> Cut | None:
    """Return the cut (group of parameters) that holds this rank's slice of ``parameter``.

    Returns None if the parameter belongs to no cut, or if the values of its cut are gathered.
    """
    cut = cut_of(parameter)
    return None if cut is None or cut.whole else cut


def take_over(geometry: UnitGeometry, parameters: Sequence[nn.Parameter], wire: Wire) -> Tensor | None:
    """Return this rank's shard (S,) fp32 of ``parameters`` in the layout of ``geometry``, made from their slices.

    The slices are those that Init has kept on each rank.  All ranks must call this function.  If the slices have the
    layout of ``geometry``, no message is sent.  If not, each parameter is gathered and cut anew, one after the other.
    Returns None if there are no slices, because every rank holds all parameters whole.
    """
    cuts = [_keeping(parameter) for parameter in parameters]
    if all(cut is None for cut in cuts):
        return None
    rank, first = wire.mesh.rank, cuts[0]
    if first is not None and _same(first, geometry, parameters):
        for slot, parameter in zip(geometry.slots, parameters, strict=True):
            start, end = geometry.part(slot, rank)
            part = first.shard[start:end]
            part.copy_(part.to(parameter.dtype))  # the user may have cast the model after it was cut
        return first.shard
    values = (  # a generator, so that only one parameter at a time is whole
        parameter if cut is None else cut.values(cut.number(parameter), wire).to(parameter.dtype)
        for parameter, cut in zip(parameters, cuts, strict=True)
    )
    return shard_of(geometry, rank, values, wire.mesh.device)


def _same(cut: Cut, geometry: UnitGeometry, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether ``cut`` holds slices of exactly the given ``parameters``, laid out as in ``geometry``."""
    layout, cut_layout = (
        (laid_out.padded, laid_out.shards, [(slot.offset, slot.spec.shape) for slot in laid_out.slots])
        for laid_out in (geometry, cut.geometry)
    )
    return layout == cut_layout and all(map(operator.is_, cut.parameters, parameters))
