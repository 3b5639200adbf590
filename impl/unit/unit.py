"""Gathers, reshards and reduces one unit: a group of parameters, such as those of a block, that are sharded together.

In a training step, the engine's hooks call four methods of each unit, in this order:
:meth:`Unit.pre_forward`, :meth:`Unit.post_forward`, :meth:`Unit.pre_backward` and :meth:`Unit.post_backward`.
A :class:`Unit` has the parts that do the work:

* :mod:`~impl.unit.master_shard`: this rank's fp32 weights and their mean gradient;
* :mod:`~impl.unit.weight_gather`: the all-gather of the weights;
* :mod:`~impl.unit.secondary_shard`: hpZ's copy of the weights inside a node;
* :mod:`~impl.unit.flat_buffer`: the memory of the gathered weights, and the parameters in it;
* :mod:`~impl.unit.gradient_reduction`: the reduce-scatter of the gradients;
* :mod:`~impl.unit.outer_step`: with local steps, the exchange with other groups after the optimizer's steps.

Outside of passes, :mod:`~impl.unit.whole_values` shows and writes the values of whole parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from impl.errors import WrittenError, ZeroError
from impl.plan.prefetch_schedule import MOST_AHEAD
from impl.plan.traffic import ON_DEVICE, Phase, Placement
from impl.policy.own_method import Change
from impl.policy.policy import Policy
from impl.policy.shard_layout import UnitGeometry
from impl.unit.context import MEMORY, UnitContext, recomputing
from impl.unit.flat_buffer import FlatBuffer, Holder, Member, check_hooks
from impl.unit.gradient_reduction import GradientReduction
from impl.unit.master_shard import MasterShard, shard_of
from impl.unit.outer_step import OuterStep
from impl.unit.own_gather import OwnWeightGather
from impl.unit.weight_gather import WeightGather, start_together


class State(enum.Enum):
    """The state of a unit's weights on one rank."""

    SHARDED = enum.auto()  # this rank has only its shard; modules hold placeholders
    GATHERING = enum.auto()  # an all-gather is under way; modules hold placeholders
    UNSHARDED = enum.auto()  # the weights are gathered, and modules hold the parameters
    # The weights are gathered, but modules hold placeholders.  This is the state between passes below stage 3.  At
    # stage 3 it is the state of the persistent unit, whose small parameters stay gathered.
    HIDDEN = enum.auto()


class Unit:
    """Gathers and reshards the weights of one unit on one rank, and reduces its gradients.

    A unit is a group of parameters that are sharded together.  To reshard is to free the gathered weights.

    Args:
        geometry: the unit's layout.
        originals: the unit's parameters as the user has made them, in the order of ``geometry.slots``.  They lose their
            values, and the modules get other parameter objects in their place.
        holders: for each original parameter, the modules that hold this parameter.
        context: what the units of the engine share, with the model's policy.
        placement: which of the unit's states are in host memory.
        siblings: the list of the model's units in model order, to which the caller will append this unit.
        cut: (S,) fp32, this rank's shard, if the model was made under ``zeropp.Init``.  In that case the originals have
            no values.
    """

    def __init__(
        self,
        geometry: UnitGeometry,
        originals: Sequence[nn.Parameter],
        holders: Sequence[Sequence[Holder]],
        context: UnitContext,
        placement: Placement = ON_DEVICE,
        *,
        siblings: Sequence[Unit],
        cut: Tensor | None = None,
    ) -> None:
        self.index, self._siblings, self._passes = len(siblings), siblings, context.passes
        self.geometry, self.wire, self.host, self.meter = geometry, context.wire, context.host, context.meter
        self._phases = [phase.for_unit(geometry) for phase in context.policy.phases]
        self.policy = self._phases[0]
        context = self._context = replace(context, policy=self.policy)
        mesh = self.wire.mesh
        device = MEMORY if placement.shard else mesh.device
        shard = shard_of(geometry, mesh.rank, originals, device) if cut is None else cut
        self.master_shard = MasterShard(geometry, context, placement, shard)
        self.flat = FlatBuffer(geometry, context, originals, holders)
        self.flat.used_outside = self._used_outside
        self.members: Sequence[Member] = self.flat.members  # the unit's parameters, in slot order
        parts, own = (geometry, context, self.master_shard, self.flat), self.policy.own_gather
        self._own_gather = own is not None
        self.weight_gather = WeightGather(*parts) if own is None else OwnWeightGather(own, *parts)
        self.reduction = GradientReduction(geometry, context, self.master_shard, self.members)
        steps_apart = self.policy.local_steps is not None and geometry.trainable
        self.outer = OuterStep(geometry, context, self.master_shard) if steps_apart else None
        self._gathers: list[WeightGather | OwnWeightGather] = []  # one for each policy of a schedule
        if len(self._phases) > 1:
            self._prepare_phases()
        self.state = State.SHARDED
        self._persists = self.policy.stage < 3  # whether weights stay gathered until they change
        # Whether a pass may compute with a copy of the weights that an earlier pass made.
        gathers = self._gathers or [self.weight_gather]
        self._keeps_copies = self.master_shard.crosses or any(gather.keeps_copy for gather in gathers)

    @property
    def visible(self) -> list[nn.Parameter]:
        """The parameter objects that modules hold now, in the unit's order: parameters with values, or placeholders."""
        shown = self.state is State.UNSHARDED
        return [member.parameter if shown else member.placeholder for member in self.members]

    # The events of a step

    def pre_forward(self, phase: Phase) -> None:
        """All-gather this unit's weights before its module runs, and start the all-gathers of units that run next."""
        self.all_gather(phase, self._passes.schedule.ahead_in_forward[self.index])

    def post_forward(self, outputs: Collection[int], *, backward: bool) -> None:
        """Reshard the weights after the unit's module has run, unless they must stay gathered (:meth:`used_after`).

        Args:
            outputs: the memory addresses of the tensors that the module has returned.
            backward: whether a backward pass may follow.
        """
        if not self.used_after(outputs, backward=backward):
            self.end_use()

    def used_after(self, outputs: Collection[int], *, backward: bool) -> bool:
        """Return whether the weights must stay gathered after the unit's module has run.

        Returns True in three cases:

        - The module has returned a view of the weights, such as a parameter.
        - The weights were used outside of the module in this forward pass.
        - A backward pass may follow, and the schedule keeps the unit gathered for it.

        Args:
            outputs: the memory addresses of the tensors that the module has returned.
            backward: whether a backward pass may follow.
        """
        passes = self._passes
        if self.gathered and self.flat.address in outputs:  # Megatron's linear layers return their bias
            passes.escaped.add(self.index)
        return (backward and self.index in passes.schedule.kept) or self.index in passes.escaped

    def pre_backward(self) -> None:
        """All-gather this unit's weights when the gradient of the module's output arrives.

        Also start the all-gathers of units that run next in backward.
        """
        self.all_gather("backward", self._passes.schedule.ahead_in_backward[self.index])

    def post_backward(self) -> None:
        """Reshard the weights (free the gathered weights); to be called when all gradients of the unit have arrived."""
        self.reshard()

    # Weights

    @property
    def gathered(self) -> bool:
        """Whether the weights are gathered, which is so in two states.

        In the state ``UNSHARDED``, modules hold the parameters.  In the state ``HIDDEN``, modules hold placeholders
        (parameters without values).  ``HIDDEN`` is the state between passes below stage 3, and at stage 3 for the small
        parameters that stay gathered.
        """
        return self.state is State.UNSHARDED or self.state is State.HIDDEN

    @property
    def in_use(self) -> bool:
        """Whether the weights are gathered, or an all-gather is under way."""
        return self.state is not State.SHARDED

    def all_gather(self, phase: Phase, ahead: Sequence[int] = ()) -> None:
        """All-gather this unit's weights and wait for them; modules hold the parameters afterwards.

        If the unit's present weights are gathered already, nothing is sent for this unit.

        ``ahead`` lists the indices of the units that run next.  The method also starts their all-gathers, without
        waiting, so that their messages overlap with the computation of this unit.  Three rules hold for them:

        - A unit that is gathered already, or being gathered, is left out.
        - There are never more than :data:`~impl.plan.prefetch_schedule.MOST_AHEAD` + 1 all-gathers under way; the
          gather of this unit counts.
        - The schedule has pairs of small units.  If both units of a pair are sharded, their all-gathers are started
          together, which saves launches.  If the limit allows only one more, neither is started now.
        """
        current = self.state is State.UNSHARDED and self.weight_gather.version == self.master_shard.version
        if not current:
            self.start_gather(phase)  # before the units ahead, so that all ranks post in the same order
        pairs, units, gathering = self._passes.schedule.pairs, self._siblings, self._passes.gathering
        for place, index in enumerate(ahead):
            unit = units[index]
            if unit.state is not State.SHARDED:
                continue
            pair = (*ahead[place : place + 2],) if pairs else ()
            together = pair in pairs and units[pair[1]].state is State.SHARDED
            if len(gathering) + together > MOST_AHEAD:  # a pair needs room for two
                break
            if together:
                unit.start_pair(units[pair[1]], phase)
            else:
                unit.start_gather(phase)
        if not current:
            if self._own_gather:
                self._advance_others()
            self.wait()

    def _advance_others(self) -> None:
        """Let a user's own class post the next messages of the gathers of other units that are under way.

        The units are taken in the order of their indices, which is the same on all ranks.
        """
        for index in sorted(self._passes.gathering - {self.index}):
            if isinstance(gather := self._siblings[index].weight_gather, OwnWeightGather):
                gather.advance()

    def start_gather(self, phase: Phase) -> None:
        """Start the all-gather of the unit's weights for a pass of this ``phase``.

        Does nothing if an all-gather is under way, or if the present weights are gathered.  If the masters (fp32
        weights) have changed since the weights were gathered, the weights are gathered anew.

        Below stage 3, a forward pass gathers the units in model order: the method first gathers all units that come
        earlier in this order and are not gathered yet.  The reason is that the passes of different ranks may call
        different units, but all ranks must gather in the same order.

        Raises:
            ZeroError: if one of the unit's parameters is in an open GatheredParameters context.
        """
        if self.flat.shown:
            self.check_hidden("a pass inside")
        if self.state is State.GATHERING:
            return
        if self.state is not State.SHARDED:
            if self.weight_gather.version == self.master_shard.version:
                return
            self._become_sharded()  # a user wrote to a master, so the gathered weights are old
        if self.geometry.trainable and phase != "backward":  # backward uses the weights of the forward pass
            self.master_shard.mark()
        if self._passes.in_forward and self._passes.schedule.in_model_order:
            # Below stage 3, all ranks gather all units in model order, whichever units this rank's pass calls.
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

    def start_pair(self, other: Unit, phase: Phase) -> None:
        """Start the all-gathers of this unit and of ``other``, so that one call of NCCL posts the messages of both.

        Both units must be sharded.

        Raises:
            ZeroError: if a parameter of one of the units is in an open GatheredParameters context.
        """
        gathers = list[WeightGather]()
        for unit in (self, other):
            unit.check_hidden("a pass inside")
            if unit.geometry.trainable and phase != "backward":  # as in start_gather()
                unit.master_shard.mark()
            assert isinstance(unit.weight_gather, WeightGather)  # noqa: S101  # users' gathers are not small
            gathers.append(unit.weight_gather)
        start_together(gathers, phase)
        for unit in (self, other):
            unit.state = State.GATHERING
            self._passes.gathering.add(unit.index)

    def wait(self) -> None:
        """Wait for the all-gather that is under way, if any, and put the gathered parameters into the modules.

        If the unit is sharded and no all-gather is under way, nothing happens.
        """
        if self.state is State.GATHERING:
            try:
                if self.master_shard.crosses:
                    self.master_shard.arrival.join()
                self.state = State.SHARDED  # the state that remains if the gather is interrupted
                self.weight_gather.finish()
            finally:
                self._passes.gathering.discard(self.index)
            self._passes.weights_at[self.flat.address] = self.index
        elif self.state is not State.HIDDEN:
            return
        self.flat.expose()
        self.state = State.UNSHARDED

    def end_use(self) -> None:
        """Reshard the weights, and note which parameters were written while the weights were gathered.

        To reshard is to free the gathered weights, and to put placeholders (parameters without values) into the
        modules.  Weights stay in memory below stage 3, and if they are small parameters that stay gathered (the
        persistent unit).  The modules then only get placeholders.  But if a parameter was written, these weights are
        freed too, since they no longer agree with the masters (the fp32 shards).
        """
        if self.state is State.GATHERING:
            self.wait()  # its messages are already posted
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
        """Reshard the weights as :meth:`end_use` does; raise an error if parameters were written while gathered.

        The error is a WrittenError.  It is also raised if :meth:`end_use` of another unit has noted written parameters
        that no error has named yet.
        """
        self.end_use()
        if self._passes.written:
            self.refuse_written()

    def refuse_written(self) -> None:
        """Raise a WrittenError that names all parameters, in any unit, that were written while they were gathered."""
        names = (*self._passes.written, *(name for unit in self._siblings for name in unit.written()))
        self._passes.written.clear()
        raise WrittenError(names)

    def gather_outside(self) -> None:
        """All-gather the weights, because a parameter is used outside of the unit's module.

        The weights stay gathered until :meth:`end_use_outside` is called, or to the end of the forward pass.
        """
        self._passes.escaped.add(self.index)
        self.all_gather("forward" if torch.is_grad_enabled() else "evaluate")

    def end_use_outside(self, outputs: Collection[int]) -> None:
        """Reshard the weights that :meth:`gather_outside` gathered for another module, after that module has run.

        The weights stay gathered in the cases that :meth:`used_after` lists.  ``outputs`` are the memory addresses of
        the tensors that the module has returned.
        """
        self._passes.escaped.discard(self.index)
        if not self.used_after(outputs, backward=torch.is_grad_enabled()):
            self.reshard()

    def _used_outside(self, name: str) -> None:
        """Gather the weights, because an operation has used the placeholder (without values) of the parameter ``name``.

        Raises:
            ZeroError: if neither a forward nor a backward pass is running.
        """
        if recomputing():
            self.all_gather("backward")
        elif self._passes.running:
            self.gather_outside()
        else:
            raise ZeroError(
                f"parameter {name!r} is used outside of a forward pass, where its values are sharded: to compute "
                "a loss with the parameter, use zero.unsharded(); to read or change the parameter, use "
                "GatheredParameters; to clip or read gradients, use Zero.clip_grad_norm_() or zeropp.Gradient"
            )

    def hide(self) -> None:
        """Put placeholders (without values) into the modules, in place of the parameters; the weights stay gathered."""
        if self.state is State.UNSHARDED:
            self.flat.conceal(sharded=False)
            self.state = State.HIDDEN

    def written(self) -> Sequence[str]:
        """Return the names of the parameters that were written since they were put into the modules.

        The list is empty while modules hold placeholders, which have no values.
        """
        return self.flat.written()

    def weights_changed(self, change: Change = "loaded") -> None:
        """Make all copies of the weights stale, so that the next use of the unit gathers the weights anew.

        ``change`` says why:

        - ``stepped``: an optimizer has stepped the masters (the fp32 shards);
        - ``loaded``: the masters were loaded, or written by a user;
        - ``unchanged``: the masters have not changed, and their values only have to be sent anew.
        """
        self.master_shard.changes += 1
        if self.weight_gather.keeps_copy:
            self.weight_gather.end(change)
        if self.state is State.GATHERING:
            self.wait()
        if self.state is not State.SHARDED:
            self._become_sharded()
        if not self._persists:
            self.flat.detach()

    def _become_sharded(self) -> None:
        """Put placeholders into the modules, and set the state to ``SHARDED``; the flat buffer keeps its memory.

        A placeholder is a parameter without values.
        """
        self.flat.conceal(sharded=True)
        self.state = State.SHARDED

    def follow(self, policy: Policy) -> None:
        """Gather weights and reduce gradients with the codecs of ``policy`` from now on.

        Except for these codecs, ``policy`` must be equal to the present policy.  This must not be called while a
        reduction is under way.
        """
        if policy.weights != self.policy.weights and isinstance(self.weight_gather, WeightGather):
            self.weights_changed("unchanged")
            self.weight_gather.secondary.let_go()
            self.master_shard.encode_as(policy.weights)
            context = replace(self._context, policy=policy)
            self.weight_gather = WeightGather(self.geometry, context, self.master_shard, self.flat)
        self.policy = policy
        self.reduction.follow(policy)

    # Schedules

    def _prepare_phases(self) -> None:
        """Prepare the gathers and reductions of all policies between which a schedule switches.

        This allocates the memory of hpZ's copies, and of the errors that error feedback keeps.  Policies that gather
        weights in the same way share one gather.  When the schedule switches between such policies, hpZ's copy
        therefore stays current.
        """
        known = {self.policy.gathering: self.weight_gather}
        for policy in self._phases:
            if policy.gathering not in known:
                context = replace(self._context, policy=policy)
                known[policy.gathering] = WeightGather(self.geometry, context, self.master_shard, self.flat)
            self._gathers.append(known[policy.gathering])
        copies = sorted(
            (each.secondary for each in known.values() if isinstance(each, WeightGather) and each.keeps_copy),
            key=lambda copy: copy.nbytes,
        )
        if copies:
            copies[-1].share_memory(copies[:-1])
        self.reduction.prepare(self._phases)

    def take_up(self, number: int) -> None:
        """Gather weights and reduce gradients with policy ``number`` of the schedule from now on.

        ``number`` is an index of ``Policy.phases``.  This must not be called during a pass.  If the new policy gathers
        weights in another way than the policy before, the next gather sends the weights themselves: neither hpZ's copy
        of earlier weights, nor differences from this copy.
        """
        policy, gather = self._phases[number], self._gathers[number]
        if gather is not self.weight_gather and isinstance(gather, WeightGather):
            self.weights_changed("unchanged")
            gather.secondary.forget()
            self.master_shard.encode_as(policy.weights)
            self.weight_gather = gather
        self.policy = policy
        self.reduction.take_up(number)

    # Gradients

    def drop_gradients(self) -> None:
        """Forget this rank's gradients of the unit that have not been reduced.

        These are the gradients that passes have collected, and gradients that a failed pass left in ``.grad`` of the
        model's parameters.  The errors that gradient codecs carry to later steps (error feedback) are forgotten too.
        """
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no values are needed
            for member in self.members:
                member.parameter.grad = member.placeholder.grad = None
        self.reduction.drop()

    # State of communication: what later messages depend on, in addition to weights and gradients

    def communication_state(self) -> dict[str, Tensor]:
        """Return a dict of the tensors that this rank needs to resume a run, besides fp32 weights and optimizer state.

        Which tensors the dict has depends on the policy:

        - with error feedback: the errors that gradient codecs keep for later steps;
        - if weights are sent as differences from copies of earlier weights: these copies;
        - with a user's own reduction or gather: its state;
        - with local steps (DiLoCo): the anchor, momentum and encoding errors of outer steps.

        Raises:
            ZeroError: if a user has written to masters without torch's version counter showing it, while copies of the
                old values are kept.
        """
        if self.geometry.trainable and self._keeps_copies:
            # The copies must be those of the present masters, which a user may have written.
            self.master_shard.adopt()
            self.master_shard.check_unwritten()
        errors = self.reduction.kept_errors()
        copies = self.weight_gather.state()
        if self.reduction.own is not None:
            copies = copies | self.reduction.own.state()
        if self.outer is not None:
            copies = copies | self.outer.state()
        return copies if errors is None else copies | errors.state()

    def check_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Raise a ZeroError unless ``state`` has the names, shapes and types of :meth:`communication_state`."""
        expected, shapes = (
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            for tensors in (self.communication_state(), state)
        )
        if shapes != expected:
            raise ZeroError(
                f"state of unit {self.geometry.name!r} is {shapes}, expected {expected}: load a state that was "
                "saved by this rank with the same policy and topology"
            )

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of a ``state`` that :meth:`check_communication_state` has accepted."""
        if (errors := self.reduction.kept_errors()) is not None:
            errors.load(state)
        if self.reduction.own is not None:
            self.reduction.own.load(state)
        if self.outer is not None:
            self.outer.load(state)
        self.weight_gather.load(state)

    def reset_communication_state(self) -> None:
        """Make later messages depend on nothing but the present weights, as in a new engine.

        All ranks must call it.
        """
        self.reduction.reset()
        if self.outer is not None:
            self.outer.reset()
        if isinstance(self.weight_gather, OwnWeightGather):
            self.weight_gather.reset()
        self.weights_changed()

    # Refusals

    def check_hidden(self, place: str) -> None:
        """Raise a ZeroError if a parameter of this unit is in an open GatheredParameters context.

        ``place`` begins the error message and says what is refused, such as "a pass inside".
        """
        for number in self.flat.shown:
            name = self.geometry.slots[number].spec.name
            raise ZeroError(f"{place} GatheredParameters of {name!r} is refused: leave that context first")

    def check_unchanged(self, *, training: bool) -> None:
        """Raise a ZeroError if a user has changed parameters or masters in a way that the engine does not support.

        These changes are not supported:

        - another object was put into a module in place of a parameter;
        - masters (fp32 shards) were written in a way that torch's version counter does not show, at a time when the
          engine still held copies of the old values, such as gathered weights;
        - if ``training`` is true: parameters or masters were frozen or unfrozen, or got gradient hooks.
        """
        shown, trainable = self.state is State.UNSHARDED, self.geometry.trainable
        if trainable:
            self.master_shard.adopt()
            if self.in_use or self._keeps_copies:
                self.master_shard.check_unwritten()
            if training:
                self.master_shard.check_usable()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no values are needed
            for member, slot in zip(self.members, self.geometry.slots, strict=True):
                parameter, placeholder = member.parameter, member.placeholder
                for module, name in member.holders:
                    held = module._parameters.get(name)  # noqa: SLF001
                    if held is not (parameter if shown else placeholder):
                        raise ZeroError(
                            f"parameter {slot.spec.name!r} was replaced by another object in its module "
                            "after the model was sharded: keep the parameter, and write its values under "
                            "GatheredParameters"
                        )
                if not training:
                    continue
                after = parameter._post_accumulate_grad_hooks  # noqa: SLF001  # there is no public name
                if parameter._backward_hooks or len(after or ()) > trainable:  # noqa: SLF001
                    check_hooks(slot.spec.name, parameter, allowed=trainable)
                if not parameter.requires_grad is trainable is placeholder.requires_grad:
                    was, now = ("trained", "frozen") if trainable else ("frozen", "trained")
                    raise ZeroError(
                        f"parameter {slot.spec.name!r} was {was} when the model was sharded and is now "
                        f"{now}: set requires_grad before shard()"
                    )
