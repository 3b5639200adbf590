"""Parameters that Init cut before their model is sharded: each rank holds its slice alone.

A cut is laid out as a unit is.  If :func:`impl.zero.shard` lays the same parameters out in the same way,
it takes the slice over as it is; otherwise it brings one parameter after the other together and cuts again.
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
from impl.unit.master_shard import sliced
from impl.unit.placeholder import Placeholder, keeper_of, release, restore
from impl.unit.whole_values import assembled

_LARGE: Final = 2**61 - 1


class Cut:
    """Some parameters by name, all trainable or none, of which this rank keeps a slice.

    ``wire`` is called when what gathers them is needed; ``on_use``, with the cut and all of an operation,
    brings values that are used, or refuses.
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
            [ParameterSpec(f"{name}.{own}", tuple(one.shape)) for own, one in parameters.items()],
            grain=policy.grain,
            world=topology.world,
            max_padding=math.inf,  # judged when the model is sharded
            trainable=first.requires_grad,
            group=group,
        )
        axes, outside = topology.gather_axes(group)
        self._axes, self._device = axes[outside:], first.device
        self._parameters = [weakref.ref(parameter) for parameter in parameters.values()]
        self._keepers = [_InCut(self, slot.spec.name) for slot in self.geometry.slots]
        self.piece = torch.empty(0)  # (S,) fp32, this rank's slice, on the device where values were made
        self.pinned: set[int] = set()  # slots that a context shows whole
        # For each slot a number of all values that this rank has cut it from; equal on equal ranks.
        self.drawn = [0] * len(self.geometry.slots)
        self.whole = True  # whether the parameters have their values
        self._uses: list[int] = []
        self.cut()

    @property
    def parameters(self) -> list[nn.Parameter | None]:
        """In slot order; None for one that its module has replaced, and nobody holds any more."""
        return [reference() for reference in self._parameters]

    def number(self, parameter: Tensor) -> int:
        """The slot of ``parameter``, which is one of them."""
        return [one is parameter for one in self.parameters].index(True)

    def cut(self) -> None:
        """Keep this rank's slice of the values as they are now; the rest of them is freed."""
        parameters, values = self.parameters, []
        for parameter, slot in zip(parameters, self.geometry.slots, strict=True):
            values.append(torch.zeros(()).expand(slot.spec.shape) if parameter is None else parameter)
            if tuple(values[-1].shape) != slot.spec.shape:
                raise ZeroError(
                    f"parameter {slot.spec.name!r} was {slot.spec.shape} when Init cut it and is now "
                    f"{tuple(values[-1].shape)}: replace the parameter instead of its data"
                )
        own = sums({str(number): one for number, one in enumerate(parameters) if one is not None})
        for number, value in own.items():
            self.drawn[int(number)] = (31 * self.drawn[int(number)] + value) % _LARGE
        self.piece = sliced(self.geometry, self.mesh.rank, values, self._device)
        for parameter, keeper in zip(parameters, self._keepers, strict=True):
            if parameter is not None:
                release(parameter, keeper)
        self.whole = False

    def gather(self) -> None:
        """Bring the values back, on all ranks of a copy; all of them must call it."""
        if self.whole:
            return
        for number, parameter in enumerate(self.parameters):
            if parameter is not None:
                restore(parameter, self.values(number, self.wire()).to(parameter.dtype))
                _whole[parameter] = weakref.ref(self)
        self.piece = torch.empty(0)
        self._uses = self._counts()
        self.whole = True

    def values(self, number: int, wire: Wire, part: Tensor | None = None) -> Tensor:
        """(shape) fp32: parameter ``number``, of which this rank has ``part`` (elements here,), or what it
        keeps while it is cut; all ranks of a copy must call it.
        """
        start, end = self.geometry.part(self.geometry.slots[number], self.mesh.rank)
        part, tag = self.piece[start:end] if part is None else part, Tag("step", "state", self.name)
        here = part.to(wire.mesh.device)
        return assembled(self.geometry, number, here, self._axes, wire=wire, tag=tag).to(self._device)

    @property
    def viewed(self) -> bool:
        """Whether somebody holds a view of the whole values."""
        return any(map(operator.gt, self._counts(), self._uses))

    def _counts(self) -> list[int]:
        """Of each parameter, the tensors that lie in its memory, and handles of it."""
        return [
            0 if one is None else int(torch._C._storage_Use_Count(one.untyped_storage()._cdata))  # noqa: SLF001
            for one in self.parameters
        ]


class _InCut:
    """Keeper of one parameter of a cut."""

    def __init__(self, cut: Cut, name: str) -> None:
        self.cut, self.name = cut, name

    def use(self, parameter: Placeholder, together: Sequence[Placeholder]) -> Tensor:
        if not self.cut.whole:  # else brought with another one of this operation
            self.cut.on_use(self.cut, [*filter(None, map(cut_of, together))], self.name)
        return parameter


# Keyed by identity: parameters of cuts that are whole now.
_whole: MutableMapping[Tensor, weakref.ref[Cut]] = WeakTensorKeyDictionary()


def cut_of(parameter: Tensor) -> Cut | None:
    """The cut that ``parameter`` belongs to, if to one; it may be whole now."""
    if (keeper := keeper_of(parameter)) is not None:
        return keeper.cut if isinstance(keeper, _InCut) else None
    reference = _whole.get(parameter)
    return None if reference is None else reference()


def drawn(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Of those that are cut, a number of the values that this rank has cut them from."""
    cuts = {name: _keeping(parameter) for name, parameter in parameters.items()}
    return {name: cut.drawn[cut.number(parameters[name])] for name, cut in cuts.items() if cut is not None}


def _keeping(parameter: Tensor) -> Cut | None:
    """The cut that keeps its values."""
    cut = cut_of(parameter)
    return None if cut is None or cut.whole else cut


def taken_over(geometry: UnitGeometry, parameters: Sequence[nn.Parameter], wire: Wire) -> Tensor | None:
    """(S,) fp32 this rank's slice of ``parameters`` as ``geometry`` lays them out; None if none is cut.

    All ranks must call it.  A slice that is laid out like that already costs no message.
    """
    cuts = [_keeping(parameter) for parameter in parameters]
    if all(cut is None for cut in cuts):
        return None
    rank, first = wire.mesh.rank, cuts[0]
    if first is not None and _same(first, geometry, parameters):
        for slot, parameter in zip(geometry.slots, parameters, strict=True):
            start, end = geometry.part(slot, rank)
            part = first.piece[start:end]
            part.copy_(part.to(parameter.dtype))  # a model may be cast after it was cut
        return first.piece
    values = (  # one parameter at a time is whole
        parameter if cut is None else cut.values(cut.number(parameter), wire).to(parameter.dtype)
        for parameter, cut in zip(parameters, cuts, strict=True)
    )
    return sliced(geometry, rank, values, wire.mesh.device)


def _same(cut: Cut, geometry: UnitGeometry, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether ``cut`` holds just these parameters, at the same places."""
    layout, own = (
        (one.padded, one.shards, [(slot.offset, slot.spec.shape) for slot in one.slots])
        for one in (geometry, cut.geometry)
    )
    return layout == own and all(map(operator.is_, cut.parameters, parameters))
