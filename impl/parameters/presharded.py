"""Parameters that Init cut before their model is sharded: each rank holds its slice alone.

A cut is laid out like a unit.  If :func:`impl.zero.shard` lays the same parameters out in the same way, it
takes the slice over; otherwise it gathers one parameter after the other and cuts again.
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
from impl.plan.policy import Policy
from impl.plan.shard_layout import ParameterSpec, UnitGeometry, lay_out
from impl.plan.traffic import Tag
from impl.unit.flat_buffer import handles
from impl.unit.master_shard import shard_of
from impl.unit.placeholder import Placeholder, keeper_of, release, restore
from impl.unit.whole_values import assemble

_LARGE: Final = 2**61 - 1


class Cut:
    """This rank's slice of some parameters, by name, all trainable or none.

    ``wire`` makes the wire when it is needed; ``on_use``, called with the cut and all cuts of an operation,
    gathers used values, or refuses.
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
        self.shard = torch.empty(0)  # (S,) fp32, this rank's slice, on the device of the values
        self.pinned: set[int] = set()  # slots that a context shows whole
        # By slot, a number of all values that this rank has cut it from; equal for equal values.
        self.drawn = [0] * len(self.geometry.slots)
        self.whole = True  # whether the parameters have their values
        self._uses: list[int] = []
        self.cut()

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """In slot order; None for a parameter that was replaced, and no longer exists."""
        return [reference() for reference in self._parameters]

    def number(self, parameter: Tensor) -> int:
        """The slot of ``parameter``, which is one of them."""
        return [other is parameter for other in self.parameters].index(True)

    def cut(self) -> None:
        """Keep this rank's slice of the present values; the rest is freed."""
        parameters, values = self.parameters, []
        for parameter, slot in zip(parameters, self.geometry.slots, strict=True):
            values.append(torch.zeros(()).expand(slot.spec.shape) if parameter is None else parameter)
            if tuple(values[-1].shape) != slot.spec.shape:
                raise ZeroError(
                    f"parameter {slot.spec.name!r} was {slot.spec.shape} when Init cut it and is now "
                    f"{tuple(values[-1].shape)}: replace the parameter instead of its data"
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
        """Gather the values on all ranks of a copy; all of them must call it."""
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
        """(shape) fp32: parameter ``number`` from all ranks' parts (n,); all ranks of a copy must call it."""
        start, end = self.geometry.part(self.geometry.slots[number], self.mesh.rank)
        part = (self.shard[start:end] if part is None else part).to(wire.mesh.device)
        tag = Tag("step", "state", self.name)
        with wire.calling("Init"):
            return assemble(self.geometry, number, part, self._axes, wire=wire, tag=tag).to(self._device)

    @property
    def viewed(self) -> bool:
        """Whether there are views of the whole values."""
        return any(map(operator.gt, self._counts(), self._uses))

    def _counts(self) -> list[int]:
        """For each parameter, the number of tensors in its memory, and handles of it."""
        return [0 if parameter is None else handles(parameter) for parameter in self.parameters]


class _InCut:
    """Keeper of one parameter of a cut."""

    def __init__(self, cut: Cut, name: str) -> None:
        self.cut, self.name = cut, name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        if not self.cut.whole:  # else gathered with another one of this operation
            self.cut.on_use(self.cut, [*filter(None, map(cut_of, together))], self.name)
        return parameter


# Keyed by identity: parameters of cuts that are whole now.
_whole: MutableMapping[Tensor, weakref.ref[Cut]] = WeakTensorKeyDictionary()


def cut_of(parameter: Tensor) -> Cut | None:
    """The cut of ``parameter``, which may be whole now; None for others."""
    if (keeper := keeper_of(parameter)) is not None:
        return keeper.cut if isinstance(keeper, _InCut) else None
    reference = _whole.get(parameter)
    return None if reference is None else reference()


def drawn_numbers(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """For each cut parameter, a number of the values that this rank has cut it from."""
    cuts = {name: _keeping(parameter) for name, parameter in parameters.items()}
    return {name: cut.drawn[cut.number(parameters[name])] for name, cut in cuts.items() if cut is not None}


def _keeping(parameter: Tensor) -> Cut | None:
    """The cut of ``parameter``, unless whole."""
    cut = cut_of(parameter)
    return None if cut is None or cut.whole else cut


def take_over(geometry: UnitGeometry, parameters: Sequence[nn.Parameter], wire: Wire) -> Tensor | None:
    """(S,) fp32 this rank's slice of ``parameters`` in the layout of ``geometry``; None if none is cut.

    All ranks must call it.  A slice in that layout already costs no message.
    """
    cuts = [_keeping(parameter) for parameter in parameters]
    if all(cut is None for cut in cuts):
        return None
    rank, first = wire.mesh.rank, cuts[0]
    if first is not None and _same(first, geometry, parameters):
        for slot, parameter in zip(geometry.slots, parameters, strict=True):
            start, end = geometry.part(slot, rank)
            part = first.shard[start:end]
            part.copy_(part.to(parameter.dtype))  # a model may be cast after it was cut
        return first.shard
    values = (  # one parameter at a time is whole
        parameter if cut is None else cut.values(cut.number(parameter), wire).to(parameter.dtype)
        for parameter, cut in zip(parameters, cuts, strict=True)
    )
    return shard_of(geometry, rank, values, wire.mesh.device)


def _same(cut: Cut, geometry: UnitGeometry, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether ``cut`` holds exactly these parameters, at the same places."""
    layout, cut_layout = (
        (laid_out.padded, laid_out.shards, [(slot.offset, slot.spec.shape) for slot in laid_out.slots])
        for laid_out in (geometry, cut.geometry)
    )
    return layout == cut_layout and all(map(operator.is_, cut.parameters, parameters))
