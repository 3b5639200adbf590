"""A unit: one block of the model, of whose weights and gradients each rank owns a shard.

It puts its parts together and keeps its state; each part is told in a file of its own, in the order in
which a step meets them: :mod:`~impl.unit.master_shard`, :mod:`~impl.unit.weight_gather`,
:mod:`~impl.unit.secondary_shard`, :mod:`~impl.unit.flat_buffer`, :mod:`~impl.unit.gradient_buffer` and
:mod:`~impl.unit.gradient_reduction`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from impl.codecs.reference import DTYPES
from impl.comm.transfer import Transfer
from impl.errors import WrittenError, ZeroError
from impl.plan.offload_plan import ON_DEVICE, Placement
from impl.plan.shard_layout import UnitGeometry
from impl.plan.traffic import Phase
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import FlatBuffer
from impl.unit.gradient_buffer import GradientBuffer
from impl.unit.gradient_reduction import GradientReduction
from impl.unit.host_memory import MEMORY
from impl.unit.master_shard import MasterShard, Version, sliced
from impl.unit.member import Holder, Member, check_hooks, refuse_use
from impl.unit.weight_gather import WeightGather


class State(enum.Enum):
    """Of a unit's weights on this rank.

    Attributes:
        SHARDED: this rank has its shard; modules hold placeholders.
        GATHERING: an all-gather is under way.
        UNSHARDED: gathered, and modules hold the parameters.
        HIDDEN: gathered, and modules hold placeholders: between passes below stage 3.
    """

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    UNSHARDED = enum.auto()
    HIDDEN = enum.auto()


class Unit:
    """One unit on one rank.

    Args:
        originals: the model's parameters in slot order, with their values.
        holders: for each of them, the modules that hold it.
        placement: what of it lies in host memory.
        cut: (S,) fp32 this rank's slice of the values, if the originals are without them already.

    Attributes:
        used_outside: called with the name of a parameter that is used while modules do not show it;
            gathers the unit, or refuses.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        originals: Sequence[nn.Parameter],
        holders: Sequence[Sequence[Holder]],
        context: UnitContext,
        placement: Placement = ON_DEVICE,
        *,
        cut: Tensor | None = None,
    ) -> None:
        self.geometry, self.wire, self.host, self.meter = geometry, context.wire, context.host, context.meter
        self.policy = context.policy.of_unit(trainable=geometry.trainable, persistent=geometry.persistent)
        own = replace(context, policy=self.policy)
        mesh = self.wire.mesh
        device = MEMORY if placement.shard else mesh.device
        shard = sliced(geometry, mesh.rank, originals, device) if cut is None else cut
        self.master_shard = MasterShard(geometry, own, placement, shard)
        self.weight_gather = WeightGather(geometry, own, self.master_shard)
        self.used_outside: Callable[[str], None] = refuse_use
        self.flat = FlatBuffer(geometry, own, self, originals, holders)
        dtype = DTYPES[self.policy.compute]
        self.gradients = GradientBuffer(geometry, dtype, own.gradients, self.meter)
        self.reduction = GradientReduction(geometry, own, self.master_shard)
        self.state = State.SHARDED
        self._version: Version | None = None  # of the weights that were last gathered
        self._transfer: Transfer | None = None  # while GATHERING
        self._under_way = own.under_way
        self._stays = self.policy.stage < 3  # gathered until the weights change

    @property
    def members(self) -> Sequence[Member]:
        """Its parameters, in slot order."""
        return self.flat.members

    @property
    def visible(self) -> list[nn.Parameter]:
        """What modules show now, in slot order."""
        shown = self.state is State.UNSHARDED
        return [member.parameter if shown else member.placeholder for member in self.members]

    def reserve(self) -> None:
        """Make room in shared memory for this unit's largest messages; all ranks must call it."""
        self.weight_gather.reserve()
        self.reduction.reserve()

    # Weights

    @property
    def gathered(self) -> bool:
        """Whether the weights are here, shown or hidden."""
        return self.state in (State.UNSHARDED, State.HIDDEN)

    @property
    def in_use(self) -> bool:
        """Whether they are here, or on their way."""
        return self.state is not State.SHARDED

    def gather(self, phase: Phase) -> None:
        """Start the all-gather, unless the weights are here or on their way.

        Raises:
            ZeroError: while a parameter of it is seen whole.
        """
        for _, name in self.seen_whole():
            raise ZeroError(f"a pass inside GatheredParameters of {name!r}: leave its context first")
        if self.gathered and self._version != self.master_shard.version:
            self._reshard()  # a master was written by hand
        if self.state is State.SHARDED:
            self._version = self.master_shard.version
            steps = self.weight_gather.gathering(phase, self.flat)
            if self.master_shard.placement.crosses:
                with self.host.ahead() as arrival:
                    self._transfer = Transfer(steps, "gather")
                self.master_shard.arrival = arrival
            else:
                self._transfer = Transfer(steps, "gather")
            self.state = State.GATHERING
            self._under_way.add(self)

    def wait(self) -> None:
        """Finish gathering: modules hold the parameters, with their values, when this returns."""
        if (transfer := self._transfer) is not None:
            self._transfer = None  # first: one that is interrupted brings nothing
            self._under_way.discard(self)
            self.state = State.SHARDED
            self.master_shard.arrival.join()
            transfer.wait()
            self.flat.unhide()
            self.state = State.HIDDEN
        if self.state is State.HIDDEN:
            self.flat.show(gathered=True)
            self.state = State.UNSHARDED

    def bring(self, phase: Phase) -> None:
        """:meth:`gather` and :meth:`wait`."""
        shown = self.state is State.UNSHARDED and self._version == self.master_shard.version
        if not shown or any(self.seen_whole()):
            self.gather(phase)
            self.wait()

    def release(self) -> None:
        """Reshard; what is on its way is awaited first, as its bytes are sent.

        Below stage 3 the weights stay until they change, unseen by modules.

        Raises:
            WrittenError: if some were written, or given other values, since they were gathered, naming them.
        """
        self.wait()
        self.hide()
        if not self._stays:
            written = self.written()
            if written:
                self.flat.lay_again()
            self._reshard()
            self.flat.detach()
            if written:
                raise WrittenError(written)

    def hide(self) -> None:
        """Let modules hold placeholders from here on."""
        if self.state is State.UNSHARDED:
            self.flat.show(gathered=False)
            self.state = State.HIDDEN

    def written(self) -> Sequence[str]:
        """The parameters that were written in place since they were gathered, or lie elsewhere now.

        None below stage 3, where gathered weights stay.
        """
        return list(self.flat.written()) if self.gathered and not self._stays else ()

    def weights_changed(self) -> None:
        """The weights have new values: what was kept of the old ones is stale."""
        self.master_shard.changed()
        self.weight_gather.secondary.end()
        self.wait()
        self._reshard()
        if not self._stays:
            self.flat.detach()

    def seen_whole(self) -> Iterator[tuple[int, str]]:
        """(number, name) of the members that GatheredParameters shows now."""
        for number, (member, slot) in enumerate(zip(self.members, self.geometry.slots, strict=True)):
            if member.whole is not None:
                yield number, slot.spec.name

    def _reshard(self) -> None:
        """The gathered weights are not to be used any more; their memory may be kept for the next ones."""
        self.hide()
        if self.state is State.HIDDEN:
            self.flat.hide()
            self.state = State.SHARDED

    # Gradients

    def collect(self, index: int, *, in_turn: bool = False) -> bool:
        """Take the gradient of member ``index``, which has just arrived; True when none is missing.

        Args:
            index: of the member.
            in_turn: whether this unit is the next to be reduced, so that its message may be opened now
                and, where frames are the elements themselves, be collected in place.
        """
        if not self.gradients.armed:  # its pre-backward event was not seen
            self.gradients.arm()
        if in_turn and not self.gradients.held:
            message = self.reduction.open_message(DTYPES[self.policy.compute])
            if message is not None:
                self.gradients.lie_in(message)
        self.gradients.add(index, self.members[index].parameter)
        self.gradients.missing.discard(index)
        return not self.gradients.missing

    def collect_outside(self, index: int) -> None:
        """Take the gradient that arrived at the placeholder of member ``index``.

        An ``autograd.Function`` that was given the placeholder leads there.  Others of the parameter may be
        yet to come, so it stays missing; if none comes, the unit is reduced at the end of the pass.

        Raises:
            ZeroError: while the parameter is seen whole: no optimizer would see the gradient.
        """
        member = self.members[index]
        if member.whole is not None:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                member.placeholder.grad = None
            raise ZeroError(
                f"backward() to parameter {self.geometry.slots[index].spec.name!r} under GatheredParameters, "
                "which no optimizer would see: compute the loss in a pass of the model, or use "
                "torch.no_grad()"
            )
        if not self.gradients.armed:
            self.gradients.arm()
        self.gradients.add(index, member.placeholder)

    def reduce(self) -> Transfer:
        """Start averaging the collected gradient over all ranks."""
        steps = self.reduction.reducing(self.gradients.whole(), self.gradients.opened)
        transfer = Transfer(steps, "reduction")
        self.gradients.forget()
        return transfer

    # Refusals

    def check_held(self) -> None:
        """Refuse parameters that were put in the place of this unit's.

        Raises:
            ZeroError: naming the first.
        """
        for member, shown, slot in zip(self.members, self.visible, self.geometry.slots, strict=True):
            for holder in member.holders:
                if holder.held is not shown:
                    raise ZeroError(
                        f"parameter {slot.spec.name!r} was replaced by another object in its module after "
                        "the model was sharded: write its values under GatheredParameters"
                    )

    def check_flags(self) -> None:
        """Refuse parameters that were frozen or unfrozen, or given hooks, since the model was sharded.

        Raises:
            ZeroError: naming the first.
        """
        trainable = self.geometry.trainable
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            for member, slot in zip(self.members, self.geometry.slots, strict=True):
                check_hooks(slot.spec.name, member.parameter, own=trainable)
                if member.parameter.requires_grad is trainable is member.placeholder.requires_grad:
                    continue
                was, now = ("trained", "frozen") if trainable else ("frozen", "trained")
                raise ZeroError(
                    f"parameter {slot.spec.name!r} was {was} when the model was sharded and is now {now}: "
                    "set requires_grad before"
                )
