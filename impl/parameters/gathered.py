"""GatheredParameters: shows sharded parameters whole outside of passes, to read or to change them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from impl.comm.collectives import scattered, whole_of
from impl.comm.wire import Tag, Wire
from impl.engine.optimizer_hooks import Found, find
from impl.errors import ZeroError
from impl.parameters.init import active
from impl.parameters.presharded import Cut, cut_of, whole_cut_of
from impl.plan.geometry import ParameterSpec, UnitGeometry, lay_out
from impl.unit.placeholder import keeper_of
from impl.unit.whole_values import WholeValues

_REPLACED: Final = 2  # beside 0, as it was, and 1, changed


class GatheredParameters:
    """Context in which parameters are seen whole, in their type, by whoever holds them.

    All ranks must enter it.  What rank ``modifier_rank`` wrote is there on all ranks afterwards, and what hpZ
    kept of the old values is stale; what others wrote is discarded.  Elements that were not changed keep
    their fp32 masters bit for bit.  Works on sharded models outside of passes at every stage, after
    :class:`~impl.parameters.init.Init`, and inside it.  Plain parameters outside of ``Init`` are whole on
    every rank, and left as they are.

    Contexts may be nested; a parameter is in one of them at a time.  After an exception inside, nothing is
    written back.

    Args:
        parameters: one, or many; modules' placeholders or not; twice counts once.
        modifier_rank: whose changes count; None for reading.
        enabled: False does nothing at all.

    Raises:
        ZeroError: on entering inside a pass, or with a parameter of another context; on leaving, on all
            ranks, after a change without ``modifier_rank``, or if a module of a sharded model holds another
            object in place of the parameter: the values are then what they were.
    """

    def __init__(
        self,
        parameters: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        *,
        enabled: bool = True,
    ) -> None:
        given = [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)
        self._given = list({id(one): one for one in given}.values()) if enabled else []
        self._modifier = modifier_rank
        self._open: list[_Place] = []
        self._seen: list[tuple[nn.Parameter, bytes]] = []  # what is shown, and the mark of its values

    def __enter__(self) -> Self:
        found = _places(self._given)
        world = found[0].wire.mesh.topology.world if found else 0
        if found and self._modifier is not None and not 0 <= self._modifier < world:
            raise ZeroError(f"modifier_rank {self._modifier} of {world} ranks")
        try:
            for place in found:
                shown = place.show()
                self._open.append(place)
                self._seen.append((shown, _mark(shown)))
        except BaseException:
            self._leave([None] * len(self._open))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self._open:
            self._leave([None] * len(self._open))
            return
        with torch.no_grad():
            wire = self._open[0].wire
            changed = self._changed(wire)  # (ranks, parameters)
            if self._modifier is None:
                self._leave([None] * len(self._open))
                self._refuse(changed)
            else:
                self._leave(self._parts(changed[self._modifier]))

    def _changed(self, wire: Wire) -> Tensor:
        """(ranks, parameters) bool: who changed what."""
        flags = [
            _REPLACED if place.replaced else int(_mark(shown) != mark)
            for place, (shown, mark) in zip(self._open, self._seen, strict=True)
        ]
        mine = torch.tensor(flags, dtype=torch.uint8, device=wire.mesh.device)
        changed = wire.all_gather_small(mine).cpu()
        replaced = (changed == _REPLACED).nonzero().tolist()
        if replaced:
            rank, number = replaced[0]
            place = self._open[number]
            self._leave([None] * len(self._open))
            raise ZeroError(
                f"parameter {place.geometry.slots[place.number].spec.name!r} was replaced by another object "
                f"in its module under GatheredParameters, on rank {rank}: write its values instead"
            )
        return changed.bool()

    def _parts(self, changed: Tensor) -> list[Tensor | None]:
        """This rank's part of each parameter that the modifier changed; None of others."""
        return [
            _sent(place, shown, self._modifier or 0) if flag else None
            for place, (shown, _), flag in zip(self._open, self._seen, changed.tolist(), strict=True)
        ]

    def _leave(self, parts: Sequence[Tensor | None]) -> None:
        for place, part in zip(self._open, parts, strict=True):
            place.leave(part)
        self._open, self._seen = [], []

    def _refuse(self, changed: Tensor) -> None:
        """An error on all ranks if any has written."""
        if changed.any():
            ranks = changed.any(1).nonzero().flatten().tolist()
            raise ZeroError(
                f"{int(changed.any(0).sum())} of {changed.shape[1]} gathered parameters were changed, on "
                f"ranks {', '.join(map(str, ranks))}, without a modifier_rank: say whose values count"
            )


class _Place(Protocol):
    """Where one parameter's values are kept while nobody sees them whole."""

    wire: Wire
    geometry: UnitGeometry
    number: int

    @property
    def replaced(self) -> bool:
        """Whether a module holds another object in place of the parameter."""

    def show(self) -> nn.Parameter:
        """Bring the values together; what modules hold."""

    def part(self) -> Tensor:
        """(elements here,) fp32 that this rank kept."""

    def leave(self, part: Tensor | None) -> None:
        """Keep ``part`` (elements here,) fp32, or what was kept before."""


class _Sharded:
    """A parameter of a sharded model."""

    def __init__(self, found: Found) -> None:
        self._engine, self._unit, self.number = found
        self._values = WholeValues(self._unit)
        self.wire, self.geometry = self._unit.wire, self._unit.geometry

    @property
    def replaced(self) -> bool:
        member = self._unit.members[self.number]
        return any(holder.held is not member.placeholder for holder in member.holders)

    def show(self) -> nn.Parameter:
        self._engine.hooks.check_idle("GatheredParameters")
        if self._unit.members[self.number].whole is not None:
            raise _twice(self.geometry.slots[self.number].spec.name)
        whole = self._values.gather_member(self.number, self.part())
        return self._values.show(self.number, whole.to(self._unit.members[self.number].placeholder.dtype))

    def part(self) -> Tensor:
        start, end = self._values.part(self.number)
        return self._unit.master_shard.master[start:end].detach()

    def leave(self, part: Tensor | None) -> None:
        self._values.end_showing(self.number)
        if part is not None:
            self._values.write_part(self.number, part)


class _BeforeSharding:
    """A parameter that Init cut, which is one piece of several that are whole together."""

    replaced = False  # its module may: what it holds is sharded later

    def __init__(self, cut: Cut, parameter: nn.Parameter) -> None:
        self._cut, self._parameter, self.number = cut, parameter, cut.number(parameter)
        self.wire, self.geometry = cut.wire(), cut.geometry
        self._kept = torch.empty(0)  # (shape of the parameter) the values before

    def show(self) -> nn.Parameter:
        init = active()
        if self.number in self._cut.pinned:
            raise _twice(self.geometry.slots[self.number].spec.name)
        self._cut.pinned.add(self.number)
        if init is not None:
            init.bring([self._cut])
        else:
            self._cut.gather()
        self._kept = self._parameter.detach().clone()
        self._guard = _no_backward(self._parameter, self.geometry.slots[self.number].spec.name)
        return self._parameter

    def part(self) -> Tensor:
        return _part_of(self._kept, self.geometry, self.number, self.wire.mesh.rank).float()

    def leave(self, part: Tensor | None) -> None:
        if self._guard is not None:
            self._guard.remove()
        # Whole, not this rank's part alone: inside Init, or under an outer context, others may read it next.
        values = self._kept if part is None else self._cut.values(self.number, part, self.wire)
        with torch.no_grad():
            self._parameter.data.copy_(values)
        self._cut.pinned.discard(self.number)
        if active() is None and not self._cut.pinned:
            self._cut.cut()


class _Uncut:
    """A parameter inside Init that is whole on each rank, as it is yet to be cut."""

    replaced = False

    def __init__(self, parameter: nn.Parameter, wire: Wire) -> None:
        world = wire.mesh.topology.world
        spec = ParameterSpec("a parameter", tuple(parameter.shape))
        self.geometry = lay_out("uncut", [spec], grain=1, world=world, max_padding=float("inf"))
        self.wire, self.number, self._parameter = wire, 0, parameter
        self._kept = parameter.detach().clone()

    def show(self) -> nn.Parameter:
        self._guard = _no_backward(self._parameter, "of a module under construction")
        return self._parameter

    def part(self) -> Tensor:
        return _part_of(self._kept, self.geometry, 0, self.wire.mesh.rank).float()

    def leave(self, part: Tensor | None) -> None:
        if self._guard is not None:
            self._guard.remove()
        if part is None:
            self._parameter.data.copy_(self._kept)
            return
        numel = self._parameter.numel()
        longest = torch.zeros(self.geometry.shard, device=part.device)
        longest[: part.numel()] = part
        axis = self.wire.mesh.topology.world_axis
        whole = whole_of(self.wire, [axis], longest, Tag("step", "state"))
        self._parameter.data.copy_(whole.view(-1)[:numel].view(self._parameter.shape))


def _no_backward(parameter: nn.Parameter, name: str) -> RemovableHandle | None:
    """Refuse gradients of a parameter that no engine owns yet, and that nobody would average."""
    if not parameter.requires_grad:
        return None

    def refuse(_: Tensor) -> None:
        raise ZeroError(
            f"backward() under GatheredParameters reached parameter {name!r} before the model is sharded: "
            "train after shard()"
        )

    return parameter.register_hook(refuse)  # type: ignore[no-untyped-call,no-any-return]


def _places(parameters: Sequence[nn.Parameter]) -> list[_Place]:
    """Where each of them is kept; plain ones outside of Init are left out.

    Raises:
        ZeroError: for one that was taken from its module before the model was sharded.
    """
    init = active()
    places: list[_Place] = []
    for parameter in parameters:
        if (found := find(parameter)) is not None:
            places.append(_Sharded(found))
        elif (cut := cut_of(parameter)) is not None:
            places.append(_BeforeSharding(cut, parameter))
        elif (keeper := keeper_of(parameter)) is not None:
            raise ZeroError(
                f"GatheredParameters of {keeper.name!r}, which was taken from its module before the model "
                "was sharded: take it from the module again"
            )
        elif (whole := whole_cut_of(parameter)) is not None:  # by Init, or another context
            places.append(_BeforeSharding(whole, parameter))
        elif init is not None:
            places.append(_Uncut(parameter, init.wire()))
    return places


def _part_of(values: Tensor, geometry: UnitGeometry, number: int, rank: int) -> Tensor:
    """(elements here,) view of ``values``, slot ``number``, that lies in ``rank``'s shard."""
    slot = geometry.slots[number]
    first, end = geometry.overlap(slot, rank)
    return values.detach().reshape(-1)[first - slot.offset : end - slot.offset]


def _sent(place: _Place, shown: nn.Parameter, source: int) -> Tensor:
    """(elements here,) fp32: this rank's part of what ``source`` sees; unchanged elements as they were."""
    mesh = place.wire.mesh
    ranks = range(mesh.topology.world)
    parts = [_part_of(shown, place.geometry, place.number, rank) for rank in ranks]
    longest = max(part.numel() for part in parts)
    tag = Tag("step", "state", place.geometry.name)
    received = scattered(place.wire, source, parts if mesh.rank == source else None, longest, tag)
    before = place.part()
    part = received[: before.numel()].to(before.device)
    return torch.where(before.to(shown.dtype).float() == part, before, part)


def _mark(values: Tensor) -> bytes:
    """A fingerprint of the bits."""
    bits = values.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(bits.data, digest_size=16).digest()


def _twice(name: str) -> ZeroError:
    return ZeroError(f"GatheredParameters of {name!r} inside another one of it: leave that first")
