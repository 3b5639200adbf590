"""A unit: one block of the model, with its weights and gradients in one shard a rank.

A step calls four events: :meth:`Unit.pre_forward`, :meth:`Unit.post_forward`, :meth:`Unit.pre_backward` and
:meth:`Unit.post_backward`.  Their memory and messages are described, in the order of a step, in
:mod:`~impl.unit.master_shard`, :mod:`~impl.unit.weight_gather`, :mod:`~impl.unit.secondary_shard`,
:mod:`~impl.unit.flat_buffer` and :mod:`~impl.unit.gradient_reduction`.  Outside of passes
:mod:`~impl.unit.whole_values` shows and writes its values.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from impl.errors import WrittenError, ZeroError
from impl.plan.policy import Policy
from impl.plan.prefetch_schedule import MOST_AHEAD
from impl.plan.reduction_queue import ReductionQueue
from impl.plan.shard_layout import UnitGeometry
from impl.plan.traffic import ON_DEVICE, Phase, Placement
from impl.unit.context import MEMORY, UnitContext, recomputing
from impl.unit.flat_buffer import FlatBuffer, Holder, Member, check_hooks
from impl.unit.gradient_reduction import GradientReduction
from impl.unit.master_shard import MasterShard, shard_of
from impl.unit.secondary_shard import Change
from impl.unit.weight_gather import WeightGather


class State(enum.Enum):
    """State of a unit's weights on this rank."""

    SHARDED = enum.auto()  # this rank has its shard; modules hold placeholders
    GATHERING = enum.auto()  # an all-gather is under way
    UNSHARDED = enum.auto()  # gathered, and modules hold the parameters
    HIDDEN = enum.auto()  # gathered, and modules hold placeholders: between passes below stage 3


class Unit:
    """One unit on one rank."""

    def __init__(
        self,
        geometry: UnitGeometry,
        originals: Sequence[nn.Parameter],  # the model's, in slot order, with their values
        holders: Sequence[Sequence[Holder]],  # by original, the modules that hold it
        context: UnitContext,
        placement: Placement = ON_DEVICE,
        *,
        siblings: Sequence[Unit],  # the model's units in order, to which this one will be appended
        queue: ReductionQueue,
        cut: Tensor | None = None,  # (S,) fp32 this rank's slice, if the originals have no values
    ) -> None:
        self.index, self._siblings, self._passes = len(siblings), siblings, context.passes
        self.geometry, self.wire, self.host, self.meter = geometry, context.wire, context.host, context.meter
        self.policy = context.policy.for_unit(geometry)
        context = self._context = replace(context, policy=self.policy)
        mesh = self.wire.mesh
        device = MEMORY if placement.shard else mesh.device
        shard = shard_of(geometry, mesh.rank, originals, device) if cut is None else cut
        self.master_shard = MasterShard(geometry, context, placement, shard)
        self.flat = FlatBuffer(geometry, context, originals, holders)
        self.flat.used_outside = self._used_outside
        self.members: Sequence[Member] = self.flat.members  # its parameters, in slot order
        self.weight_gather = WeightGather(geometry, context, self.master_shard, self.flat)
        self.reduction = GradientReduction(geometry, context, self.master_shard, self.members, queue)
        self.state = State.SHARDED
        self._persists = self.policy.stage < 3  # gathered until the weights change
        # Whether a pass may compute with copies of the weights that an earlier pass made.
        self._keeps_copies = self.master_shard.crosses or self.weight_gather.spared > 0

    @property
    def visible(self) -> list[nn.Parameter]:
        """The parameters that modules hold now, in slot order."""
        shown = self.state is State.UNSHARDED
        return [member.parameter if shown else member.placeholder for member in self.members]

    # The events of a step

    def pre_forward(self, phase: Phase) -> None:
        """All-gather the weights before the unit's module runs, and start gathering those that run next."""
        self.all_gather(phase, self._passes.schedule.ahead_in_forward[self.index])

    def post_forward(self, outputs: Collection[int], *, backward: bool) -> None:
        """End the use of the weights once the unit's module has run, unless they are :meth:`used_after`."""
        if not self.used_after(outputs, backward=backward):
            self.end_use()

    def used_after(self, outputs: Collection[int], *, backward: bool) -> bool:
        """Whether the weights are used after their module has run; ``outputs`` are memory addresses."""
        passes = self._passes
        if self.gathered and self.flat.address in outputs:  # a parameter is returned, as Megatron's bias is
            passes.escaped.add(self.index)
        return (backward and self.index in passes.schedule.kept) or self.index in passes.escaped

    def pre_backward(self) -> None:
        """All-gather the weights again when an output's gradient arrives; start gathering those ahead."""
        self.all_gather("backward", self._passes.schedule.ahead_in_backward[self.index])

    def post_backward(self) -> None:
        """Reshard the weights at the last gradient, and hand the gradients to the queue."""
        self.reshard()
        if not self._passes.accumulating:
            self.reduction.queue.start_ready()

    # Weights

    @property
    def gathered(self) -> bool:
        """Whether the weights are gathered, shown or hidden."""
        return self.state is State.UNSHARDED or self.state is State.HIDDEN

    @property
    def in_use(self) -> bool:
        """Whether the weights are gathered, or being gathered."""
        return self.state is not State.SHARDED

    def all_gather(self, phase: Phase, ahead: Sequence[int] = ()) -> None:
        """All-gather the weights, and start gathering those of the units ``ahead``, which run next."""
        current = self.state is State.UNSHARDED and self.weight_gather.version == self.master_shard.version
        if not current:
            self.start_gather(phase)  # this one first: all ranks post in one order
        for index in ahead:
            unit = self._siblings[index]
            if unit.state is State.SHARDED and len(self._passes.gathering) <= MOST_AHEAD:
                unit.start_gather(phase)  # travels while this one computes
        if not current:
            self.wait()

    def start_gather(self, phase: Phase) -> None:
        """Start the all-gather, unless gathered or under way; a ZeroError while values are seen whole."""
        if self.flat.shown:
            self.check_hidden("a pass inside")
        if self.state is State.GATHERING:
            return
        if self.state is not State.SHARDED:
            if self.weight_gather.version == self.master_shard.version:
                return
            self._become_sharded()  # a master was written by hand
        if self.geometry.trainable and phase != "backward":  # whose weights are those of its forward pass
            self.master_shard.mark()
        if self._passes.in_forward and self._passes.schedule.in_model_order:
            # Below stage 3 all ranks gather all units in one order, whichever units a rank's pass calls.
            for unit in self._siblings[: self.index]:
                if not unit.in_use:
                    unit.start_gather(phase)
                    unit.reshard()
        if self.master_shard.crosses:
            with self.host.ahead() as arrival:
                self.weight_gather.start(phase)
            self.master_shard.arrival = arrival
        else:
            self.weight_gather.start(phase)
        self.state = State.GATHERING
        self._passes.gathering.add(self.index)

    def wait(self) -> None:
        """Finish gathering: afterwards modules hold the parameters with their values."""
        if self.state is State.GATHERING:
            try:
                if self.master_shard.crosses:
                    self.master_shard.arrival.join()
                self.state = State.SHARDED  # if the gather is interrupted
                self.weight_gather.finish()
            finally:
                self._passes.gathering.discard(self.index)
            self._passes.weights_at[self.flat.address] = self.index
        elif self.state is not State.HIDDEN:
            return
        self.flat.expose()
        self.state = State.UNSHARDED

    def end_use(self) -> None:
        """End the use of the weights, and note parameters that were written meanwhile."""
        if self.state is State.GATHERING:
            self.wait()  # its bytes are sent
        if self.state is State.SHARDED:
            return
        if written := self.written():
            self._passes.written += written
            self.flat.lay()
        elif self._persists:
            self.hide()
            return
        self._become_sharded()
        self.flat.detach()

    def reshard(self) -> None:
        """:meth:`end_use`, and raise a WrittenError if parameters were written."""
        self.end_use()
        if self._passes.written:
            self.refuse_written()

    def refuse_written(self) -> None:
        """Raise a WrittenError with the noted parameters and those written in other units."""
        names = (*self._passes.written, *(name for unit in self._siblings for name in unit.written()))
        self._passes.written.clear()
        raise WrittenError(names)

    def gather_outside(self) -> None:
        """All-gather the weights for a use outside of the unit's module; they stay to the end of forward."""
        self._passes.escaped.add(self.index)
        self.all_gather("forward" if torch.is_grad_enabled() else "evaluate")

    def end_use_outside(self, outputs: Collection[int]) -> None:
        """End the use that :meth:`gather_outside` began, unless they are :meth:`used_after`."""
        self._passes.escaped.discard(self.index)
        if not self.used_after(outputs, backward=torch.is_grad_enabled()):
            self.reshard()

    def _used_outside(self, name: str) -> None:
        """Parameter ``name`` is used while modules hold placeholders: gather it in a pass, else refuse."""
        if recomputing():
            self.all_gather("backward")
        elif self._passes.running:
            self.gather_outside()
        else:
            raise ZeroError(
                f"parameter {name!r} is used outside of a forward pass, where its values are sharded: "
                "compute a loss with it inside zero.unsharded(); read or change it under GatheredParameters, "
                "from which no gradient reaches the optimizer; gradients are the masters' "
                "(Zero.clip_grad_norm_(), impl.parameters.access)"
            )

    def hide(self) -> None:
        """Let modules hold placeholders."""
        if self.state is State.UNSHARDED:
            self.flat.conceal(sharded=False)
            self.state = State.HIDDEN

    def written(self) -> Sequence[str]:
        """Parameters written since modules hold them."""
        return self.flat.written()

    def weights_changed(self, change: Change = "loaded") -> None:
        """The weights have new values: make all copies stale."""
        self.master_shard.changes += 1
        if self.weight_gather.spared:
            self.weight_gather.secondary.end(change)
        if self.state is State.GATHERING:
            self.wait()
        if self.state is not State.SHARDED:
            self._become_sharded()
        if not self._persists:
            self.flat.detach()

    def _become_sharded(self) -> None:
        """End the use of gathered weights; their memory may be kept for the next ones."""
        self.flat.conceal(sharded=True)
        self.state = State.SHARDED

    def follow(self, policy: Policy) -> None:
        """Send in the codecs of another ``policy`` from here on; no reduction is under way."""
        if policy.weights != self.policy.weights:
            self.weights_changed("unchanged")
            self.weight_gather.secondary.let_go()
            self.master_shard.encode_as(policy.weights)
            context = replace(self._context, policy=policy)
            self.weight_gather = WeightGather(self.geometry, context, self.master_shard, self.flat)
        self.policy = policy
        self.reduction.follow(policy)

    # Gradients

    def drop_gradients(self) -> None:
        """Forget collected gradients that were not reduced, and those that a failed pass left at leaves."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # asks for no values
            for member in self.members:
                member.parameter.grad = member.placeholder.grad = None
        self.reduction.drop()

    # State of codecs beside weights: carried errors by hop, and the copies that differences start from

    def communication_state(self) -> dict[str, Tensor]:
        """This rank's state, to be loaded again."""
        if self.geometry.trainable and self._keeps_copies:  # copies that are saved are of these masters
            self.master_shard.adopt()
            self.master_shard.check_unwritten()
        errors = self.reduction.feedback()
        copies = self.weight_gather.secondary.state(self.master_shard.version)
        return copies if errors is None else copies | errors.state()

    def check_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse, with a ZeroError that names this unit, a state of other hops, shapes or types."""
        expected, shapes = (
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            for tensors in (self.communication_state(), state)
        )
        if shapes != expected:
            raise ZeroError(f"state of unit {self.geometry.name!r} is {shapes}, expected {expected}")

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a checked state."""
        if (errors := self.reduction.feedback()) is not None:
            errors.load(state)
        self.weight_gather.secondary.load(state, self.master_shard.version)

    # Refusals

    def check_hidden(self, place: str) -> None:
        """Refuse ``place``, with a ZeroError, while parameters are seen whole."""
        for number in self.flat.shown:
            name = self.geometry.slots[number].spec.name
            raise ZeroError(f"{place} GatheredParameters of {name!r}: leave its context first")

    def check_unchanged(self, *, training: bool) -> None:
        """Refuse, with a ZeroError, parameters that were replaced, frozen or unfrozen, or given hooks.

        The same of masters, and writes to them that copies of the weights lack.
        """
        shown, trainable = self.state is State.UNSHARDED, self.geometry.trainable
        if trainable:
            self.master_shard.adopt()
            if self.in_use or self._keeps_copies:
                self.master_shard.check_unwritten()
            if training:
                self.master_shard.check_usable()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # asks for no values
            for member, slot in zip(self.members, self.geometry.slots, strict=True):
                parameter, placeholder = member.parameter, member.placeholder
                for module, name in member.holders:
                    held = module._parameters.get(name)  # noqa: SLF001
                    if held is not (parameter if shown else placeholder):
                        raise ZeroError(
                            f"parameter {slot.spec.name!r} was replaced by another object in its module "
                            "after the model was sharded: write its values under GatheredParameters"
                        )
                if not training:
                    continue
                after = parameter._post_accumulate_grad_hooks  # noqa: SLF001  # there is no public way
                if parameter._backward_hooks or len(after or ()) > trainable:  # noqa: SLF001
                    check_hooks(slot.spec.name, parameter, allowed=trainable)
                if not parameter.requires_grad is trainable is placeholder.requires_grad:
                    was, now = ("trained", "frozen") if trainable else ("frozen", "trained")
                    raise ZeroError(
                        f"parameter {slot.spec.name!r} was {was} when the model was sharded and is now "
                        f"{now}: set requires_grad before"
                    )
