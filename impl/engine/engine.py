"""The engine of a sharded model: what a training loop calls.

What runs by itself meanwhile, during passes, is :mod:`impl.engine.hooks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from impl import ops
from impl.engine import state_dict as state
from impl.engine.bit_renewal import Renewal
from impl.engine.gradient_clipping import clip_factor, gradient_norm
from impl.engine.hooks import Hooks
from impl.engine.module_buffers import ModuleBuffers
from impl.engine.optimizer_hooks import watch_optimizers
from impl.engine.optimizer_masters import Masters
from impl.engine.optimizer_step import LossScaler, Stepped
from impl.errors import ZeroError
from impl.plan.offload_plan import CopyKey, realised
from impl.plan.policy import Offload
from impl.unit.context import UnitContext
from impl.unit.unit import Unit


class Zero:
    """The engine of one sharded model on one rank; made by :func:`impl.zero.shard`.

    Attributes:
        units: the root's first, then in model order.
        clock: what stochastic codecs and feedback go by.
        masters: what an optimizer steps.
        buffers: the model's persistent ones, which are kept equal on all ranks.
        renewal: of the codecs, where the policy has a budget.
        hooks: what happens in forward and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        modules: Sequence[nn.Module],
        context: UnitContext,
        *,
        casts_inputs: bool,
    ) -> None:
        self.model, self.units = model, list(units)
        self.wire, self.policy = context.wire, context.policy
        self.scaler = LossScaler(context.policy.loss_scale)
        self.clock, self._meter, self._host = context.clock, context.meter, context.host
        self._passes = context.passes
        budget = context.policy.budget
        self.renewal = None if budget is None else Renewal(budget, self.units, context)
        self.masters = Masters(self.units)
        self.buffers = ModuleBuffers(model, context.wire)
        self.hooks = Hooks(
            model,
            self.units,
            modules,
            context,
            masters=self.masters,
            buffers=self.buffers,
            scaler=self.scaler,
            casts_inputs=casts_inputs,
        )
        # What the model holds of the engine: it lives as long as the model, though nobody keeps it.
        model.register_load_state_dict_pre_hook(self._refuse_load)  # type: ignore[no-untyped-call]
        model.zero_grad = self._zero_grad  # type: ignore[method-assign]
        for module in dict.fromkeys((model, *modules)):
            module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]  # found by copy.deepcopy()
        watch_optimizers(self, self.units)

    # Training

    def param_groups(self, options: Mapping[int, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """The fp32 masters of this rank, for any elementwise ``torch.optim`` optimizer.

        Args:
            options: optimizer options of each group, by the number that ``group_of`` gave.

        Returns:
            One dict per group with elements on any rank: ``params``, 1-D fp32 tensors (possibly
            none here), and the group's options.  A group of which some masters are offloaded is two dicts
            on a GPU, one a device: torch steps a list of one device by fused or foreach kernels.

        Raises:
            ZeroError: for options that are no table of groups.
        """
        return self.masters.groups(options)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add their gradients up locally, in fp32; the next one reduces the sum.

        Raises:
            ZeroError: if the policy reduces every micro-batch.
        """
        self.accumulate(on=True)
        try:
            yield
        finally:
            self.accumulate(on=False)

    def accumulate(self, *, on: bool) -> None:
        """From here on backward passes add up locally, or reduce; see :meth:`accumulating`.

        Raises:
            ZeroError: if the policy reduces every micro-batch, or for what is neither True nor False.
        """
        if not isinstance(on, bool):
            raise ZeroError(f"accumulate(on={on!r}): expected True or False")
        if on and self.policy.reduces_each_micro_batch:
            raise ZeroError(
                f"accumulating() at stage {self.policy.stage}, which reduces each micro-batch into shards: "
                "set the policy's reduce_every to 'step', and have memory for a whole local gradient"
            )
        self._passes.accumulating = on

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """A forward pass of the model, whatever is called and computed inside; all ranks must enter it.

        Modules show the root's parameters, as long as it lasts, and others where they are used.  Gradients
        of losses computed inside are reduced as those of ``model(...)``; run backward after the context, or
        several backward passes under :meth:`accumulating`.  Unlike ``model(...)`` and methods that
        :func:`impl.parameters.external.register_forward_method` registered it casts no inputs.
        """
        with self.hooks.unsharded():
            yield

    def finish_backward(self) -> None:
        """End a backward pass that failed on this rank; after one that did not there is nothing to do.

        Autograd ends backward passes by itself: it sends what has not been sent, waits for all reductions
        and reshards all weights.  After that the masters' gradients hold the mean over ranks, added to what
        they held.  A parameter that no loss reached has a mean of zero, not none: whether another rank's loss
        reached it is not known without asking, so adaptive optimizers see a zero there.

        Inside :meth:`accumulating` nothing is sent.  A pass that failed on one rank has its other ranks wait
        for this one: this sends what they wait for, zeros after :meth:`drop_gradients`.
        """
        self.hooks.backward.finish()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Passes inside leave no trace: they are run for what is sent; the next ones are as without them.

        Gradients are dropped, and weights will be gathered anew; the errors that codecs carry, what
        stochastic ones go by, buffers, and counts of passes and of copies are as before.

        Raises:
            ZeroError: while there are gradients, which would be dropped too.
        """
        self.hooks.backward.check_finished("rehearsing()")
        if any(master.grad is not None for master in self.masters):
            raise ZeroError("rehearsing() while masters have gradients: step and zero_grad() before it")
        kept, finished, copied = self.communication_state(), self.hooks.backward.finished, self.copied()
        secondaries = [unit.weight_gather.secondary for unit in self.units]
        copies = [secondary.kept() for secondary in secondaries]
        with self.buffers.restored():
            yield
        self._zero_grad()
        self.load_communication_state(kept)
        self.hooks.backward.finished = finished
        self._host.copied.clear()
        self._host.copied.update(copied)
        self.forget_gathered()
        for secondary, copy in zip(secondaries, copies, strict=True):
            secondary.put_back(copy)

    def drop_gradients(self) -> None:
        """Forget local gradients that have not been reduced: of a failed pass, or of :meth:`accumulating`.

        The errors that gradient codecs carry go too: a failed pass may have left some; and what differences
        of weights begin with, for ranks may have stopped at different places.  After a pass that
        KeyboardInterrupt left, of which torch tells no hook, the engine is outside of passes again.
        """
        for unit in self.units:
            unit.weight_gather.secondary.distrust()
        self.hooks.drop()
        self.scaler.forget()
        self._forget_measured()

    def step(
        self, *optimizers: torch.optim.Optimizer, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Stepped:
        """Unscale the loss's scale away, clip, and step; or skip the step on all ranks after an overflow.

        For losses that were multiplied by ``scaler.scaled(loss)``.

        Args:
            optimizers: over :meth:`param_groups`; with a loss scale all that hold masters with gradients,
                since unscaling and overflow are of all of them together.
            max_norm: largest global norm of the mean gradient; None does not clip.
            norm_type: which norm; see :meth:`grad_norm`.

        Raises:
            LossScaleError: for an overflow at the smallest dynamic scale.
            ZeroError: with a loss scale, if an optimizer is missing or a loss was not scaled.
        """
        if self.policy.loss_scale is not None:
            self.masters.check_complete(optimizers)
        return self.scaler.step(self, optimizers, max_norm, norm_type)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """() fp64 global norm of the mean gradient; NaN and infinity included.

        All ranks must call it: each sends its sum of powers, summed in rank order, so that all
        have the same bits.  Offloaded gradients are summed where they lie, on the host.

        Args:
            norm_type: p of the p-norm, above 0 and at most 8, or ``inf`` for the largest absolute element.

        Raises:
            ZeroError: after a backward pass that failed, or for another ``norm_type``.
        """
        self.hooks.backward.check_finished("grad_norm()")
        return gradient_norm(self.units, self.wire, norm_type)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm (:meth:`grad_norm`) is at most ``max_norm``.

        Returns:
            () fp64 norm before scaling.  A norm that is not finite makes the gradients NaN, as
            ``torch.nn.utils.clip_grad_norm_`` does.

        Raises:
            ZeroError: with a loss scale, whose gradients are unscaled and clipped in :meth:`step`.
        """
        if self.policy.loss_scale is not None:
            raise ZeroError("clip_grad_norm_() of scaled gradients: give max_norm to step() instead")
        norm = self.grad_norm(norm_type)
        if self.policy.feedback is not None:  # looking waits for the device
            self.overflowed(norm)
        self.scale_gradients(clip_factor(norm, max_norm).float())
        return norm

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply the masters' gradients, where they are there."""
        self.masters.scale_gradients(factor)

    def overflowed(self, norm: Tensor | None = None) -> bool:
        """Whether any rank's gradient holds a NaN or an infinity; the same answer on all ranks.

        If so, the errors that gradient codecs carry are forgotten: they are of gradients that are not
        used.  ``norm`` is :meth:`grad_norm`'s, where it is known.
        """
        overflowed = not bool(torch.isfinite(self.grad_norm() if norm is None else norm))
        if overflowed:
            self.forget_overflow()
        return overflowed

    def forget_overflow(self) -> None:
        """Drop the errors that codecs carry: they are of gradients that are not used."""
        for unit in self.units:
            unit.reduction.clear_feedback()
        self._forget_measured()

    def _forget_measured(self) -> None:
        """Drop what a budget measured of gradients that are not used."""
        if self.renewal is not None:
            self.renewal.forget()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """What ``model.zero_grad()`` means: the gradients are the masters'."""
        self.masters.zero_gradients(set_to_none=set_to_none)
        self.scaler.forget()
        self._forget_measured()

    # State

    def weights_changed(self) -> None:
        """Call after writing masters by hand: what was gathered of them is no longer true.

        Optimizer steps and :meth:`load_full_state_dict` do it themselves.
        """
        for unit in self.units:
            unit.weights_changed()

    def forget_gathered(self) -> None:
        """Gather all weights anew from here on, though nothing changed them."""
        for unit in self.units:
            unit.weights_changed("unchanged")

    def optimizer_stepped(self, masters: Iterable[Tensor]) -> None:
        """An optimizer that holds ``masters`` has stepped; called by itself, from the watch.

        Several optimizers that step after one backward pass are one step.  Frozen weights did not change.
        """
        first = self.clock.micro_batch > 0
        if first:
            self.clock.next_step()
        self.masters.stepped(masters)
        for unit in self.units:
            if unit.geometry.trainable:
                unit.weights_changed("stepped")
        if first and self.renewal is not None:
            self.renewal.stepped()

    def communication_state(self) -> dict[str, Tensor]:
        """What this rank's codecs depend on beside weights
        (:func:`impl.engine.state_dict.communication_state`).
        """
        return state.communication_state(self.units, self.clock, renewal=self.renewal)

    def load_communication_state(self, given: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`communication_state` gave on the same rank.

        Raises:
            ZeroError: for errors or copies that do not fit; nothing is changed then.
        """
        state.load_communication_state(self.units, self.clock, given, renewal=self.renewal)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state: fp32 parameters and buffers by their original names.

        All ranks must call it, and all get it.
        """
        self.buffers.make_equal()
        return state.full_state_dict(self.model, self.units)

    def load_full_state_dict(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite weights and buffers with those of the unsharded model.

        Raises:
            ZeroError: for missing, unexpected or misshapen entries, naming the first; while parameters are
                seen whole.
        """
        self.check_hidden("load_full_state_dict()")
        for unit in self.units:
            unit.release()
        state.load_full_state_dict(self.model, self.units, given)

    def memory(self) -> dict[str, int]:
        """Most bytes that this rank's engine has held, by part (keys of :func:`impl.plan.memory.memory`)."""
        return dict(self._meter.peak)

    def copied(self) -> dict[CopyKey, int]:
        """Bytes copied between host and device so far (as ``traffic.predict`` foresees)."""
        return dict(self._host.copied)

    # Refusals, also of what watches the model's parameters and optimizers

    def check_step(self) -> None:
        """Refuse an optimizer's step now.

        Raises:
            ZeroError: after a backward pass that failed, or while parameters are seen whole.
        """
        self.hooks.backward.check_finished("optimizer.step()")
        self.check_hidden("optimizer.step()")

    def check_hidden(self, what: str) -> None:
        """Refuse ``what``, which writes weights, while parameters are seen whole: leaving would undo it.

        Raises:
            ZeroError: naming it and the first of those parameters.
        """
        for unit in self.units:
            for _, name in unit.seen_whole():
                raise ZeroError(f"{what} under GatheredParameters of {name!r}: leave its context first")

    def _refuse_load(self, module: nn.Module, *_: Any) -> None:
        if any(member.whole is None for unit in self.units for member in unit.members):
            raise ZeroError(
                f"{type(module).__name__}.load_state_dict() of a sharded model loads nothing: use "
                "Zero.load_full_state_dict(), or GatheredParameters of all its parameters"
            )


def describe(zero: Zero) -> dict[str, Any]:
    """Algorithms, transports and kernels that ran, for the record."""
    policy, device, units = zero.policy, zero.wire.mesh.device, zero.units
    said = {
        "stage": policy.stage,
        "group": policy.group_ranks(zero.wire.mesh.topology),
        "gather": policy.gather,
        "reduce": policy.reduce,
        "transports": zero.wire.describe(),
        "kernels": ops.backend_of(device),
    }
    if (warning := ops.warning_of(device)) is not None:
        said["kernels_warning"] = warning
    if policy.offload != Offload():
        # The shares that whole units come to, and what the host's memory is here.
        placements = [unit.master_shard.placement for unit in units]
        shares = realised(policy, placements, [unit.geometry for unit in units])
        said["offload"] = {**dataclasses.asdict(shares), "memory": units[0].host.nature}
    if policy.loss_scale is not None:
        said["loss_scale"] = zero.scaler.state_dict()
    return said


def _refuse_copy(_: object) -> None:
    raise ZeroError(
        "deepcopy() of a sharded model: weights and hooks are one engine's; copy the model before shard(), "
        "or give a new one Zero.full_state_dict()"
    )
