"""The engine of a sharded model: what a training loop calls.

What runs by itself meanwhile, during passes, is :mod:`impl.engine.hooks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from impl import ops
from impl.engine import state_dict
from impl.engine.bit_renewal import Renewal
from impl.engine.hooks import Hooks
from impl.engine.masters import Stepped, clip_factor
from impl.errors import ZeroError
from impl.plan.policy import Offload
from impl.plan.traffic import CopyKey, realised
from impl.unit.context import UnitContext
from impl.unit.unit import Unit

NOT_ELEMENTWISE: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


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

    def __init__(self, model: nn.Module, units: Sequence[Unit], context: UnitContext, hooks: Hooks) -> None:
        self.model, self.units, self.hooks = model, list(units), hooks
        self.masters, self.buffers, self.scaler = hooks.masters, hooks.buffers, hooks.scaler
        self.wire, self.policy, self.clock = context.wire, context.policy, context.clock
        self._meter, self._host, self._passes = context.meter, context.host, context.passes
        budget = context.policy.budget
        self.renewal = None if budget is None else Renewal(budget, self.units, context)
        # What the model holds of the engine: it lives as long as the model, though nobody keeps it.
        model.zero_grad = self._zero_grad  # type: ignore[method-assign]
        model.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
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

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """A forward pass of the model, whatever is called and computed inside; all ranks must enter it.

        Modules show the root's parameters, as long as it lasts, and others where they are used.  Gradients
        of losses computed inside are reduced as those of ``model(...)``; run backward after the context, or
        several backward passes under :meth:`accumulating`.  Unlike ``model(...)`` and methods that
        :func:`impl.parameters.external.register_forward_method` registered it casts no inputs.
        """
        return self.hooks.unsharded()

    def finish_backward(self) -> None:
        """End a backward pass that failed on this rank; after one that did not there is nothing to do.

        Autograd ends backward passes by itself: it sends what has not been sent, waits for all reductions
        and reshards all weights.  After that the masters' gradients hold the mean over ranks, added to what
        they held.  A parameter that no loss reached has a mean of zero, not none: whether another rank's loss
        reached it is not known without asking, so adaptive optimizers see a zero there.

        Inside :meth:`accumulating` nothing is sent.  A pass that failed on one rank has its other ranks wait
        for this one: this sends what they wait for, zeros after :meth:`drop_gradients`.
        """
        self.hooks.finish_backward()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Passes inside leave no trace: they are run for what is sent; the next ones are as without them.

        Gradients are dropped, and weights will be gathered anew; the errors that codecs carry, what
        stochastic ones go by, buffers, and counts of passes and of copies are as before.

        Raises:
            ZeroError: while there are gradients, which would be dropped too.
        """
        self.hooks.check_finished("rehearsing()")
        if any(master.grad is not None for master in self.masters):
            raise ZeroError("rehearsing() while masters have gradients: step and zero_grad() before it")
        kept, finished, copied = self.communication_state(), self.hooks.finished, self.copied()
        copies = [unit.weight_gather.secondary.state(unit.master_shard.version) for unit in self.units]
        with self.buffers.restored():
            yield
        self._zero_grad()
        self.load_communication_state(kept)
        self.hooks.finished = finished
        self._host.copied.clear()
        self._host.copied.update(copied)
        self.forget_gathered()
        for unit, copy in zip(self.units, copies, strict=True):
            unit.weight_gather.secondary.load(copy, unit.master_shard.version)

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
        scaled = self.policy.loss_scale is not None
        norm: float | None = None
        if scaled:
            self.masters.check_complete(optimizers)
        self.scaler.check_scaled()
        if scaled or max_norm is not None:
            norm = float(self.grad_norm(norm_type)) / self.scaler.scale
            if not math.isfinite(norm):
                self._forget_overflow()
            factor = self.scaler.factor(norm, max_norm)
            if factor is None:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                return Stepped(norm, done=False)
            if factor != 1.0:
                self.masters.scale_gradients(factor)
        for optimizer in optimizers:
            optimizer.step()
        if norm is not None:
            self.scaler.stepped()
        return Stepped(norm, done=True)

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """() fp64 global norm of the mean gradient; NaN and infinity included.

        All ranks must call it: each sends its sum of powers, summed in rank order, so that all
        have the same bits.  Offloaded gradients are summed where they lie, on the host.

        Args:
            norm_type: p of the p-norm, above 0 and at most 8, or ``inf`` for the largest absolute element.

        Raises:
            ZeroError: after a backward pass that failed, or for another ``norm_type``.
        """
        self.hooks.check_finished("grad_norm()")
        return self.masters.norm(self.wire, norm_type)

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
        if self.policy.feedback is not None and not norm.isfinite():  # looking waits for the device
            self._forget_overflow()
        self.masters.scale_gradients(clip_factor(norm, max_norm).float())
        return norm

    def _forget_overflow(self) -> None:
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
        for master in self.masters:
            if set_to_none:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()
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
            self.clock.step, self.clock.micro_batch = self.clock.step + 1, 0
        self.masters.stepped(masters)
        for unit in self.units:
            if unit.geometry.trainable:
                unit.weights_changed("stepped")
        if first and self.renewal is not None:
            self.renewal.stepped()

    def communication_state(self) -> dict[str, Tensor]:
        """What this rank's codecs depend on beside weights: step, micro-batch, errors carried over, copies
        that differences of weights begin with, codecs that a budget chose.

        With masters and optimizer state, it makes a resumed run on the same topology and policy equal to
        an uninterrupted one, bit for bit.
        """
        state = {"step": torch.tensor(self.clock.step), "micro_batch": torch.tensor(self.clock.micro_batch)}
        if self.renewal is not None:
            state["budget"] = self.renewal.state()
        for unit in self.units:
            held = unit.weight_gather.secondary.state(unit.master_shard.version)
            if (errors := unit.reduction.feedback()) is not None:
                held |= errors.state()
            state |= {f"{unit.geometry.name}/{name}": value for name, value in held.items()}
        return state

    def load_communication_state(self, given: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`communication_state` gave on the same rank of the same topology and policy.

        Raises:
            ZeroError: for errors or copies that do not fit, naming their unit, and for those of another
                budget; nothing is changed then.
        """
        found: list[tuple[Unit, dict[str, Tensor], dict[str, Tensor]]] = []  # errors, and copies
        for unit in self.units:
            prefix = f"{unit.geometry.name}/"
            own = {name.removeprefix(prefix): one for name, one in given.items() if name.startswith(prefix)}
            copies: dict[str, Tensor] = {name: own.pop(name) for name in ("copy", "begun") if name in own}
            unit.weight_gather.secondary.check_state(copies)
            feedback, where = unit.reduction.feedback(), f"feedback state of unit {unit.geometry.name!r}"
            if feedback is None and own:
                raise ZeroError(f"{where}, which has no feedback")
            try:
                if feedback is not None:
                    feedback.check_state(own)
            except ValueError as error:
                raise ZeroError(f"{where}: {error}") from None
            found.append((unit, own, copies))
        if self.renewal is not None:
            self.renewal.check_state(given.get("budget"))
        elif "budget" in given:
            raise ZeroError("state of a budget, and this policy has none")
        self.clock.step, self.clock.micro_batch = int(given["step"]), int(given["micro_batch"])
        for unit, own, copies in found:
            if (feedback := unit.reduction.feedback()) is not None:
                feedback.load(own)
            unit.weight_gather.secondary.load(copies, unit.master_shard.version)
        if self.renewal is not None:
            self.renewal.load(given["budget"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state: fp32 parameters and buffers by their original names.

        All ranks must call it, and all get it.
        """
        self.buffers.make_equal()
        return state_dict.full_state_dict(self.model, self.units)

    def load_full_state_dict(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite weights and buffers with those of the unsharded model.

        Raises:
            ZeroError: for missing, unexpected or misshapen entries, naming the first; while parameters are
                seen whole.
        """
        self.check_hidden("load_full_state_dict()")
        for unit in self.units:
            unit.release()
        state_dict.load_full_state_dict(self.model, self.units, given)

    def _load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """What ``model.load_state_dict()`` means: :meth:`load_full_state_dict`, but of values seen whole."""
        if all(len(unit.flat.whole) == len(unit.members) for unit in self.units):
            return type(self.model).load_state_dict(self.model, state_dict, strict, assign)
        if not strict or assign:
            raise ZeroError("load_state_dict() of a sharded model: neither strict=False nor assign=True")
        self.load_full_state_dict(state_dict)
        return _IncompatibleKeys([], [])

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
        self.hooks.check_finished("optimizer.step()")
        self.check_hidden("optimizer.step()")

    def check_hidden(self, what: str) -> None:
        """Refuse ``what``, which writes weights, while parameters are seen whole: leaving would undo it.

        Raises:
            ZeroError: naming it and the first of those parameters.
        """
        for unit in self.units:
            for number in unit.flat.whole:
                name = unit.geometry.slots[number].spec.name
                raise ZeroError(f"{what} under GatheredParameters of {name!r}: leave its context first")


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


class Owner(NamedTuple):
    """Whose a parameter is: its engine, its unit and its number there."""

    engine: Zero
    unit: Unit
    number: int


# No version counter shows that masters were stepped (fused AdamW leaves it alone), so every step is watched;
# the masters that an optimizer holds tell whose weights it changed.  By identity: tensors compare by element.
_owners: MutableMapping[Tensor, weakref.ref[Zero]] = WeakTensorKeyDictionary()
# What modules of sharded models show; units hold these tensors, so what is kept here holds no unit.
_visible: MutableMapping[Tensor, tuple[weakref.ref[Zero], weakref.ref[Unit], int]] = WeakTensorKeyDictionary()
_lock = threading.Lock()
_watching: list[object] = []


def watch_optimizers(engine: Zero, units: Iterable[Unit]) -> None:
    """From now on steps of optimizers that hold masters of ``units`` are reported to ``engine``."""
    with _lock:
        for unit in units:
            for _, master in unit.master_shard.masters:
                _owners[master] = weakref.ref(engine)
            for number, member in enumerate(unit.members):
                place = (weakref.ref(engine), weakref.ref(unit), number)
                _visible[member.parameter] = _visible[member.placeholder] = place
        if not _watching:
            _watch_norms()
            _watching.append(register_optimizer_step_pre_hook(_before_step))
            _watching.append(register_optimizer_step_post_hook(_after_step))


def _watch_norms() -> None:
    """Refuse torch's own gradient norms of masters, which are of one rank's shards.

    ``clip_grad_norm_()`` looks this function up when it is called, however it was imported.
    """
    own = clip_grad._get_total_norm  # noqa: SLF001  # torch has no hook there, and optimizers see it too late

    @functools.wraps(own)
    def total_norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        with _lock:
            masters = list(_owners)
        held = {id(master.grad) for master in masters if master.grad is not None}
        if any(id(one) in held for one in given):
            raise ZeroError(
                "torch.nn.utils.clip_grad_norm_() of masters, which are this rank's shards: their norm is "
                "not the model's; use zero.step(max_norm=) or zero.clip_grad_norm_()"
            )
        return own(given, *args, **kwargs)

    clip_grad._get_total_norm = total_norm  # noqa: SLF001


def find(parameter: Tensor) -> Owner | None:
    """Whose ``parameter`` is, if it is one that modules of a sharded model show.

    Raises:
        ZeroError: if the engine is gone.
    """
    with _lock:
        place = _visible.get(parameter)
    if place is None:
        return None
    engine, unit, number = place[0](), place[1](), place[2]
    if engine is None or unit is None:
        raise ZeroError("a parameter of a sharded model whose engine is gone")
    return Owner(engine, unit, number)


def _owners_of(optimizer: Optimizer) -> set[Zero]:
    found = set()
    with _lock:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in _visible:
                    raise ZeroError(
                        f"{type(optimizer).__name__} holds parameters of a sharded model, which it cannot "
                        "change: construct it with Zero.param_groups()"
                    )
                reference = _owners.get(parameter)
                engine = reference() if reference is not None else None
                if engine is not None:
                    found.add(engine)
    return found


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    owners = _owners_of(optimizer)
    names = {kind.__name__ for kind in type(optimizer).__mro__} & NOT_ELEMENTWISE
    if owners and names:
        raise ZeroError(f"{names.pop()} is not elementwise: on shards it would be another algorithm")
    for engine in owners:
        engine.check_step()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for engine in _owners_of(optimizer):
        engine.optimizer_stepped(held)
