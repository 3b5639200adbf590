"""The engine of a sharded model, as a training loop calls it; :mod:`impl.engine.hooks` run by themselves."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from impl import ops
from impl.engine import state_dict
from impl.engine.bit_renewal import Renewal
from impl.engine.hooks import Hooks
from impl.engine.masters import Stepped, clip_factor, joint_norm
from impl.engine.optimizer_watch import engines, engines_of, watch_optimizers
from impl.errors import ZeroError
from impl.plan.policy import Offload
from impl.plan.topology import ranks_in_words
from impl.plan.traffic import CopyKey
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import InUnit
from impl.unit.placeholder import keeper_of
from impl.unit.unit import Unit


class Zero:
    """The engine of one sharded model on one rank; made by :func:`impl.zero.shard`.

    ``units`` are the root's first, then in model order; ``scaler`` is the loss scale.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], context: UnitContext, hooks: Hooks) -> None:
        self.model, self.units, self.hooks = model, list(units), hooks
        self.masters, self.buffers, self.scaler = hooks.masters, hooks.buffers, hooks.scaler
        self.wire, self.policy, self.clock = context.wire, context.policy, context.clock
        self._meter, self._host, self._passes = context.meter, context.host, context.passes
        budget = context.policy.budget
        self.renewal = None if budget is None else Renewal(budget, self.units, context)
        # By these the model holds the engine, which lives as long, even if nobody else keeps it.
        model.zero_grad = self._zero_grad  # type: ignore[method-assign]
        model.load_state_dict = self._load_state_dict  # type: ignore[method-assign]
        watch_optimizers(self)

    # Training

    def param_groups(self, options: Mapping[int, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """The fp32 masters of this rank, for any elementwise ``torch.optim`` optimizer.

        One dict per group with elements on any rank: ``params``, 1-D fp32 tensors (possibly none here), and
        its ``options``, by the number from ``group_of``; anything else is a ZeroError.  A group partly
        offloaded on a GPU has two dicts, one a device, as torch's fused and foreach kernels need.
        """
        return self.masters.groups(options)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Backward passes inside add gradients up locally, in fp32; the next one outside reduces the sum.

        A ZeroError if the policy reduces every micro-batch.
        """
        self.accumulate(on=True)
        try:
            yield
        finally:
            self.accumulate(on=False)

    def accumulate(self, *, on: bool) -> None:
        """From here on backward passes add up locally, or reduce; see :meth:`accumulating`."""
        if not isinstance(on, bool):
            raise ZeroError(f"accumulate(on={on!r}): expected True or False")
        if on and self.policy.reduces_each_micro_batch:
            raise ZeroError(
                f"accumulating() at stage {self.policy.stage}, which reduces each micro-batch into shards: "
                "set the policy's reduce_every to 'step', and have memory for a whole local gradient"
            )
        self._passes.accumulating = on

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """Context that is a forward pass of the model, whatever runs inside; all ranks must enter it.

        Inside, modules show the root's parameters, and others where they are used; inputs are not cast.  Run
        backward after the context, or several backward passes under :meth:`accumulating`.
        """
        return self.hooks.unsharded()

    def finish_backward(self) -> None:
        """End a backward pass that failed on this rank: send the messages that the other ranks wait for.

        These are zeros after :meth:`drop_gradients`; inside :meth:`accumulating` there are none.  Autograd
        ends other backward passes by itself.  Afterwards the mean over ranks has been added to the masters'
        gradients; a parameter that no loss reached here counts as zero.
        """
        self.hooks.finish_backward()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Passes inside leave no trace: they run for their messages; later passes are as without them.

        Gradients are dropped, and weights gathered anew.  A ZeroError while there are gradients.
        """
        self.hooks.check_finished("rehearsing()")
        if any(master.grad is not None for master in self.masters):
            raise ZeroError("rehearsing() while masters have gradients: step and zero_grad() before it")
        kept, finished, copied = self.communication_state(), self.hooks.finished, self.copied()
        with self.buffers.restored(), self.wire.calling("rehearsing()"):
            yield
        self._zero_grad()
        self.load_communication_state(kept)
        self.hooks.finished = finished
        self._host.copied.clear()
        self._host.copied.update(copied)
        self.forget_gathered()

    def drop_gradients(self) -> None:
        """Forget local gradients that have not been reduced: of a failed pass, or of :meth:`accumulating`.

        Carried errors of gradient codecs are forgotten too, and weights are sent next, not differences.
        After a pass that KeyboardInterrupt ended, the engine is outside of passes again.
        """
        for unit in self.units:
            unit.weight_gather.secondary.distrust()
        self.hooks.drop()
        self.scaler.forget()
        self._forget_measured()

    def step(
        self, *optimizers: torch.optim.Optimizer, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Stepped:
        """Undo the loss scale, clip, and step; or skip the step on all ranks after an overflow.

        For gradients of losses that ``scaler.scaled(loss)`` returned.  All models whose masters the
        ``optimizers`` hold step together: the norm is that of their mean gradients as one, and their loss
        scales must be equal; a loss of several models is scaled by one's scaler.

        With a loss scale ``optimizers`` must be all that hold masters with gradients.  Clipping limits the
        global norm (:meth:`grad_norm`) to ``max_norm``; None does not clip.  Raises LossScaleError: for an
        overflow at the smallest dynamic scale; ZeroError: with a loss scale, if an optimizer is missing or a
        loss was not scaled; if the models cannot step together.
        """
        together = self._together("step()", optimizers, max_norm=max_norm)
        norm: float | None = None
        if max_norm is not None or self.policy.loss_scale is not None:
            norm = float(_joint_norm("step()", together, norm_type)) / self.scaler.scale
            if not math.isfinite(norm):
                for engine in together:
                    engine._forget_overflow()  # noqa: SLF001
            factor = self.scaler.factor(norm, max_norm)
            if factor is None:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for engine in together:
                    engine.scaler.follow(self.scaler, skipped=True)
                return Stepped(norm, done=False)
            if factor != 1.0:
                for engine in together:
                    engine.masters.scale_gradients(factor)
        for optimizer in optimizers:
            optimizer.step()
        if norm is not None:
            self.scaler.stepped()
            for engine in together:
                engine.scaler.follow(self.scaler, skipped=False)
        return Stepped(norm, done=True)

    def _together(
        self, call: str, optimizers: Sequence[torch.optim.Optimizer], *, max_norm: float | None
    ) -> list[Zero]:
        """The engines with masters among the optimizers', which ``call`` takes as one model, and this one.

        Raises a ZeroError if that is not possible.
        """
        together = engines_of(optimizers) or [self]
        if self not in together:
            raise ZeroError(
                f"{call} of optimizers that hold masters of other models alone: call it of the engine whose "
                "param_groups() they were made of"
            )
        for engine in together:
            mine, other = self.wire.mesh.global_ranks, engine.wire.mesh.global_ranks
            if mine != other:
                raise ZeroError(
                    f"{call} of optimizers that hold masters of models on global {ranks_in_words(mine)}, and "
                    f"on global {ranks_in_words(other)}: give each model an optimizer of its own"
                )
            if (self.policy.loss_scale, self.scaler.scale) != (engine.policy.loss_scale, engine.scaler.scale):
                raise ZeroError(
                    f"{call} of optimizers that hold masters of models whose loss scales differ, "
                    f"{self.scaler.scale:g} and {engine.scaler.scale:g}: give them one loss_scale and "
                    "step them together from the start, or give each an optimizer of its own"
                )
        scaled = self.policy.loss_scale is not None
        if scaled or max_norm is not None:
            tensors = {id(t): t for o in optimizers for group in o.param_groups for t in group["params"]}
            others = [t for t in tensors.values() if t.grad is not None]
            sharded = set().union(*(engine.masters.numbers for engine in together))
            if count := sum(id(tensor) not in sharded for tensor in others):
                left = "keep the loss scale" if scaled else "not be clipped"
                raise ZeroError(
                    f"{call} of optimizers that also hold {count} tensors of no sharded model, whose "
                    f"gradients would {left}: give these tensors an optimizer of their own"
                )
            if scaled:
                for engine in together:
                    engine.masters.check_complete(tensors.keys())
        for engine in together:
            engine.scaler.check_scaled()
        return together

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """() fp64 global norm of the mean gradient; NaN and infinity included.

        All ranks must call it, and get the same bits.  ``norm_type`` is p of the p-norm, above 0 and at most
        8, or ``inf``; a ZeroError for another one, or after a backward pass that failed.
        """
        self.hooks.check_finished("grad_norm()")
        with self.wire.calling("grad_norm()"):
            return self.masters.norm(self.wire, norm_type)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> Tensor:
        """Scale all gradients so that their global norm (:meth:`grad_norm`) is at most ``max_norm``.

        These are this model's alone, or those of all models whose masters ``optimizers`` hold, by their joint
        norm.

        Returns () fp64, the norm before.  A norm that is not finite makes the gradients NaN, as in
        ``torch.nn.utils.clip_grad_norm_``.  A ZeroError with a loss scale: :meth:`step` clips then.
        """
        if self.policy.loss_scale is not None:
            raise ZeroError("clip_grad_norm_() of scaled gradients: give max_norm to step() instead")
        together = self._together("clip_grad_norm_()", optimizers, max_norm=max_norm)
        norm = _joint_norm("clip_grad_norm_()", together, norm_type)
        for engine in together:
            if engine.policy.feedback is not None and not norm.isfinite():  # which waits for the device
                engine._forget_overflow()  # noqa: SLF001
            engine.masters.scale_gradients(clip_factor(norm, max_norm).float())
        return norm

    def _forget_overflow(self) -> None:
        """Drop the errors that codecs carry: their gradients are not used."""
        for unit in self.units:
            unit.reduction.clear_feedback()
        self._forget_measured()

    def _forget_measured(self) -> None:
        """Drop the errors that a budget measured: their gradients are not used."""
        if self.renewal is not None:
            self.renewal.forget()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """``model.zero_grad()``: clears the masters' gradients."""
        for master in self.masters:
            if set_to_none:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()
        self.scaler.forget()
        self._forget_measured()

    # State

    def weights_changed(self) -> None:
        """Drop all copies of the weights, because masters were written; all ranks must call it.

        Writes that torch counts, and optimizers' steps, need no call.  Writes through ``.data`` do where hpZ,
        a stage below 3, a persistent unit or offload keeps copies; a pass that would reuse these is refused.
        """
        for unit in self.units:
            unit.weights_changed()

    def forget_gathered(self) -> None:
        """Gather all weights anew from here on, though nothing changed them."""
        for unit in self.units:
            unit.weights_changed("unchanged")

    def optimizer_stepped(self, held: set[int]) -> None:
        """An optimizer of tensors ``held`` has stepped; several after one backward pass are one step."""
        first = self.clock.micro_batch > 0
        if first:
            self.clock.step, self.clock.micro_batch = self.clock.step + 1, 0
        self.masters.unused -= held
        for unit in self.units:
            if unit.geometry.trainable:
                unit.weights_changed("stepped")
        if first and self.renewal is not None:
            self.renewal.stepped()

    def communication_state(self) -> dict[str, Tensor]:
        """The state of this rank's codecs beside weights: step, micro-batch, carried errors, the copies that
        differences of weights start from, codecs that a budget chose.

        With masters and optimizer state it resumes a run, on the same topology and policy, bit for bit.
        """
        state = {"step": torch.tensor(self.clock.step), "micro_batch": torch.tensor(self.clock.micro_batch)}
        if self.renewal is not None:
            state["budget"] = self.renewal.state()
        for unit in self.units:
            held = unit.communication_state()
            state |= {f"{unit.geometry.name}/{name}": value for name, value in held.items()}
        return state

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Take it over, on the same rank, topology and policy; a ZeroError leaves the engine unchanged."""
        unit_states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in state.items():
            name, _, entry = key.rpartition("/")
            unit_states[name][entry] = tensor
        for unit in self.units:
            unit.check_communication_state(unit_states[unit.geometry.name])
        numel = state["budget"].numel() if "budget" in state else 0
        expected = 0 if self.renewal is None else self.renewal.state().numel()
        if numel != expected:
            raise ZeroError(f"state of a budget: {numel} numbers, expected {expected}")
        self.clock.step, self.clock.micro_batch = int(state["step"]), int(state["micro_batch"])
        for unit in self.units:
            unit.load_communication_state(unit_states[unit.geometry.name])
        if self.renewal is not None:
            self.renewal.load(state["budget"])

    def full_state_dict(
        self, *, dtype: torch.dtype | str = torch.float32, allow_overflow: bool = False
    ) -> dict[str, Tensor]:
        """The unsharded model's state: parameters and buffers by name; all ranks must call it.

        Parameters are in ``dtype`` (fp32, bf16, fp16, or a floating-point ``torch.dtype``).  A ZeroError on
        all ranks, which names the parameters, for finite values beyond its largest; ``allow_overflow`` keeps
        what the cast makes of them, infinity.
        """
        self.hooks.check_parameters()
        with self.wire.calling("full_state_dict()"):
            self.buffers.make_equal()
            return state_dict.full_state_dict(self.model, self.units, dtype, allow_overflow=allow_overflow)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite weights and buffers with the unsharded model's, in any floating-point type and strides.

        A ZeroError, before anything is changed, for other names or shapes, tied parameters with different
        values, and values that would change: of other kinds of types, without data, beyond fp32.
        """
        self.hooks.check_parameters()
        self.check_hidden("load_full_state_dict()")
        for unit in self.units:
            unit.reshard()
        state_dict.load_full_state_dict(self.model, self.units, state)

    def _load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """``model.load_state_dict()``: :meth:`load_full_state_dict`, or torch's, of values seen whole."""
        if all(len(unit.flat.shown) == len(unit.members) for unit in self.units):
            return type(self.model).load_state_dict(self.model, state_dict, strict, assign)
        if not strict or assign:
            raise ZeroError("load_state_dict() of a sharded model: neither strict=False nor assign=True")
        self.load_full_state_dict(state_dict)
        return _IncompatibleKeys([], [])

    def memory(self) -> dict[str, int]:
        """Most bytes that this rank's engine has held, by part (keys of :func:`impl.plan.memory.memory`)."""
        return dict(self._meter.peak)

    def copied(self) -> dict[CopyKey, int]:
        """Bytes copied between host and device so far (as :func:`impl.plan.traffic.predict` foresees)."""
        return dict(self._host.copied)

    # Refusals

    def check_hidden(self, call: str) -> None:
        """Refuse a ``call`` that writes weights while parameters are seen whole: leaving would undo it."""
        for unit in self.units:
            if unit.flat.shown:
                unit.check_hidden(f"{call} under")


def _joint_norm(call: str, together: Sequence[Zero], norm_type: float) -> Tensor:
    """() fp64 norm of the mean gradients of some models as one; all ranks must make the ``call``."""
    norms = []
    for engine in together:
        with engine.wire.calling(call):
            norms.append(engine.grad_norm(norm_type))
    return joint_norm(norms, norm_type)


def describe(zero: Zero) -> dict[str, Any]:
    """Algorithms, transports and kernels that ran, for the record."""
    policy, device, units = zero.policy, zero.wire.mesh.device, zero.units
    facts = {
        "stage": policy.stage,
        "group": policy.group_ranks(zero.wire.mesh.topology),
        "gather": policy.gather,
        "reduce": policy.reduce,
        "transports": zero.wire.describe(),
        "kernels": ops.backend_of(device),
    }
    if (warning := ops.warning_of(device)) is not None:
        facts["kernels_warning"] = warning
    if policy.offload != Offload():
        facts["offload"] = {"memory": units[0].host.nature}  # what the host's memory is here
    if policy.loss_scale is not None:
        facts["loss_scale"] = zero.scaler.state_dict()
    return facts


class Owner(NamedTuple):
    """The engine of a parameter, its unit and its number there."""

    engine: Zero
    unit: Unit
    number: int


def find(parameter: Tensor) -> Owner | None:
    """The owner of a sharded ``parameter``, None of others; a ZeroError if its engine is gone."""
    if not isinstance(keeper := keeper_of(parameter), InUnit):
        return None
    for engine in engines():
        for unit in engine.units:
            if unit.flat is keeper.flat():
                return Owner(engine, unit, keeper.number)
    raise ZeroError("a parameter of a sharded model whose engine is gone")
