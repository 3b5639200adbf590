"""Defines :class:`Zero`, the engine of a sharded model, with the methods that a training loop calls.

For forward and backward passes, a training loop calls none of these methods: the hooks of :mod:`impl.engine.hooks`
gather weights, free them after use, and reduce gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from impl import ops
from impl.comm.watchdog import WireError
from impl.engine import state_dict
from impl.engine.bit_renewal import Renewal
from impl.engine.hooks import Hooks
from impl.engine.local_steps import LocalSteps
from impl.engine.masters import Stepped, clip_factor, joint_norm
from impl.engine.optimizer_watch import engines, engines_of, watch_optimizers
from impl.errors import ZeroError
from impl.plan.traffic import CopyKey
from impl.policy.own_method import declares
from impl.policy.policy import Offload, Policy
from impl.policy.topology import ranks_in_words
from impl.transport.shared_memory import SharedMemoryError
from impl.unit.context import UnitContext
from impl.unit.flat_buffer import InUnit
from impl.unit.placeholder import keeper_of
from impl.unit.unit import Unit


class Zero:
    """The engine of one sharded model on one rank, made by :func:`impl.zero.shard`.

    A unit is a group of parameters that are gathered and reduced together.  ``units`` are the model's units, in this
    order: the root's unit, which has the parameters outside of all blocks; the persistent unit, whose small parameters
    stay gathered; one unit for each block, in model order.  Frozen parameters have units of their own.

    ``masters`` are this rank's fp32 weights, ``scaler`` has the loss scale, and ``wire.ledger`` has the number of bytes
    that this rank has sent.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], context: UnitContext, hooks: Hooks) -> None:
        self.model, self.units, self.hooks = model, list(units), hooks
        self.masters, self.buffers, self.scaler = hooks.masters, hooks.buffers, hooks.scaler
        self.wire, self.policy, self.clock = context.wire, context.policy, context.clock
        self._meter, self._host, self._passes = context.meter, context.host, context.passes
        budget = context.policy.budget
        self.renewal = None if budget is None else Renewal(budget, self.units, context)
        apart = context.policy.local_steps is not None
        self._local_steps = LocalSteps(context.policy, self.units, self.masters) if apart else None
        self._phase = 0  # the index of the present step's policy in ``policy.phases``
        # These bound methods also keep the engine alive as long as the model, even if the user drops the engine.
        model.zero_grad = self._zero_grad  # type: ignore[method-assign]  # torch has no hook for it
        self._loaded: set[str] = set()  # names of the entries that the last load_state_dict() has loaded
        model.register_state_dict_pre_hook(self._before_state_dict)  # type: ignore[no-untyped-call]
        # torch sets an attribute of this hook, which a bound method cannot have
        model.register_state_dict_post_hook(partial(self._fill_state_dict))  # type: ignore[no-untyped-call]
        model.register_load_state_dict_pre_hook(self._load_from_state_dict)  # type: ignore[no-untyped-call]
        model.register_load_state_dict_post_hook(self._after_load_state_dict)  # type: ignore[no-untyped-call]
        watch_optimizers(self)

    # Training

    def param_groups(self, options: Mapping[int, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return this rank's masters (the fp32 weights of its shards) as parameter groups for a ``torch.optim``
        optimizer.

        The optimizer must be elementwise: it must step each element independently of all others.

        Args:
            options: maps the number of a group, as the ``group_of`` of :func:`impl.zero.shard` returns it, to
                the group's options, such as ``{0: {"lr": 1e-3}}``.

        Returns:
            One dict for each group of the model.  ``params`` are the group's masters, 1-D fp32 tensors that may have no
            elements on this rank.  The other entries are the group's options.  If a part of a group is offloaded from
            a GPU, the group has two dicts, one for each device, as torch's fused and foreach kernels need.

        Raises:
            ZeroError: if ``options`` is not such a mapping, has the number of a group that the model does not have, or
                has an option ``params``.
        """
        return self.masters.groups(options)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context in which backward passes add gradients up locally, in fp32, and send nothing.

        The next backward pass outside of the context reduces the sum.  Contexts may be nested.

        ``model.zero_grad()`` and :meth:`drop_gradients` drop the local sum.  ``zero_grad()`` of an optimizer does not
        drop it, since the optimizer holds only the masters (the fp32 weights of this rank's shards).

        Raises:
            ZeroError: if the policy reduces the gradients of every micro-batch.
        """
        before = self._passes.accumulating
        self.accumulate(on=True)
        try:
            yield
        finally:
            self.accumulate(on=before)

    def accumulate(self, *, on: bool) -> None:
        """Switch local accumulation ``on`` or off for the backward passes that follow; see :meth:`accumulating`.

        Raises:
            ZeroError: if ``on`` is no bool, or if ``on`` is True and the policy reduces the gradients of every
                micro-batch.
        """
        if not isinstance(on, bool):
            raise ZeroError(f"accumulate(on={on!r}): expected True or False")
        if on and self.policy.reduces_each_micro_batch:
            raise ZeroError(
                f"accumulating() has no effect at stage {self.policy.stage}, where the policy reduces the gradients "
                "of each micro-batch into shards: set policy.reduce_every to 'step', which needs memory for a whole "
                "local gradient"
            )
        self._passes.accumulating = on

    def unsharded(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that counts as one forward pass of the model; all ranks must enter it.

        Use it to compute a loss from weights directly, or to call parts of the model.  Inside the context, parameters
        outside of all blocks have their values, and all other parameters are gathered where they are used.  Inputs are
        not cast to the compute type.  Call ``backward()`` after the context.  To run several backward passes, run them
        under :meth:`accumulating`.
        """
        return self.hooks.unsharded()

    def finish_backward(self) -> None:
        """End a backward pass that failed on this rank: send the messages that the other ranks wait for.

        Call it only after a backward pass that raised an error.  The messages carry the gradients that have arrived so
        far, and zeros for all other gradients.  If :meth:`drop_gradients` was called before, the messages carry only
        zeros.  The mean over all ranks is then added to the gradients of the masters (the fp32 weights of this rank's
        shards).  Inside :meth:`accumulating` nothing is sent.
        """
        self.hooks.finish_backward()

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context for passes that must not affect training, such as a warm-up or a measurement of messages.

        On leaving, also after an exception, all gradients are dropped.  The model's buffers get back the values that
        they had on entering.  The state that messages depend on (:meth:`communication_state`), such as the errors of
        error feedback, is restored too.  The next pass gathers all weights anew.

        A backward pass that failed inside the context is ended as by :meth:`drop_gradients` and
        :meth:`finish_backward`, since other ranks may wait for messages of this rank.  If messages themselves failed
        (WireError), only the buffers are restored, because the ranks can send nothing more.

        Raises:
            ZeroError: if masters (the fp32 weights of this rank's shards) have gradients when the context is entered.
        """
        self.hooks.check_finished("rehearsing()")
        if any(master.grad is not None for master in self.masters):
            raise ZeroError(
                "rehearsing() would drop the gradients that masters have: call optimizer.step() and zero_grad() "
                "first"
            )
        before = self.communication_state(), self.hooks.finished, self.copied()
        with self.buffers.restored(), self.wire.calling("rehearsing()"):
            try:
                yield
            except (WireError, SharedMemoryError):
                raise
            except BaseException:
                self.drop_gradients()
                self.finish_backward()
                self._end_rehearsal(*before)
                raise
            self._end_rehearsal(*before)

    def _end_rehearsal(
        self, communication_state: Mapping[str, Tensor], finished: int, copied: Mapping[CopyKey, int]
    ) -> None:
        """Undo what the passes inside :meth:`rehearsing` have changed in the engine.

        The caller restores the model's buffers.  Each use of this context is a rehearsal.

        Args:
            communication_state: what :meth:`communication_state` returned before the rehearsal.
            finished: how many backward passes had finished before the rehearsal.
            copied: what :meth:`copied` returned before the rehearsal.
        """
        self._zero_grad()
        self.load_communication_state(communication_state)
        self.hooks.finished = finished
        self._host.copied.clear()
        self._host.copied.update(copied)
        self.forget_gathered()

    def drop_gradients(self) -> None:
        """Forget this rank's gradients that are not reduced yet, from a failed pass or from :meth:`accumulating`.

        The quantisation errors that gradient codecs would add to later gradients (error feedback) are forgotten too.

        A policy may send weights as differences from earlier weights, of which each rank keeps a copy.  After a failed
        pass these copies may differ between ranks.  Therefore, the next gather after a change of the weights sends the
        weights themselves, not differences.

        A forward pass that was interrupted, for example by KeyboardInterrupt, no longer counts as running.
        """
        for unit in self.units:
            unit.weight_gather.distrust()
        self.hooks.drop()
        self.scaler.forget()
        self._forget_measured()

    def step(
        self, *optimizers: torch.optim.Optimizer, max_norm: float | None = None, norm_type: float = 2.0
    ) -> Stepped:
        """Undo the loss scale, clip gradients and step the optimizers.

        With a loss scale, call ``backward()`` on the result of ``scaler.scaled(loss)``.  If gradients then overflow on
        any rank, all ranks clear their gradients and skip the step.

        The optimizers hold masters (the fp32 weights of this rank's shards).  If they hold masters of several models,
        these models step together: the norm is that of the gradients of all these models, taken as one vector.  The
        loss scales of the models must be equal.  A loss that depends on several models is scaled once, by the scaler of
        any of these models.

        Args:
            optimizers: the optimizers to step.  With a loss scale, pass all optimizers that hold masters with
                gradients.
            max_norm: the largest global norm (:meth:`grad_norm`) that the gradients may have; gradients with a larger
                norm are scaled down.  None does not clip.
            norm_type: the p of the p-norm.

        Returns:
            The norm before clipping, if it was computed, and whether the optimizers have stepped.

        Raises:
            LossScaleError: if gradients overflow at the smallest dynamic loss scale.
            ZeroError: in each of these cases:

                - the models cannot step together, for example because they are on different ranks;
                - with a loss scale or ``max_norm``: an optimizer also holds tensors that have gradients and belong to
                  no sharded model;
                - with a loss scale: the given optimizers do not hold all masters that have gradients;
                - with a loss scale: ``backward()`` was called on a loss that was not scaled.
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
        """Check that the models whose masters the optimizers hold can step together, and return the engines of these
        models.

        Masters are the fp32 weights of this rank's shards.  If the optimizers hold no masters, the result is this
        engine alone.

        Args:
            call: the name of the public method that called this one, such as ``step()``, for error messages.
            optimizers: the optimizers that were passed to the call.
            max_norm: the norm to which the call clips; None if it does not clip.

        Raises:
            ZeroError: in each of these cases:

                - the optimizers hold only masters of other engines;
                - the models are on different ranks, or have different loss scales;
                - a model has a loss scale, and its loss was not scaled;
                - with a loss scale or ``max_norm``: an optimizer also holds tensors that have gradients and belong to
                  no sharded model;
                - with a loss scale: the optimizers do not hold all masters that have gradients.
        """
        together = engines_of(optimizers) or [self]
        if self not in together:
            raise ZeroError(
                f"{call} got optimizers that hold only masters of other models: call it on the engine whose "
                "param_groups() the optimizers were made with"
            )
        for engine in together:
            mine, other = self.wire.mesh.global_ranks, engine.wire.mesh.global_ranks
            if mine != other:
                raise ZeroError(
                    f"{call} got optimizers that hold masters of models on different ranks (global "
                    f"{ranks_in_words(mine)}; global {ranks_in_words(other)}): give each model an optimizer of "
                    "its own"
                )
            if (self.policy.loss_scale, self.scaler.scale) != (engine.policy.loss_scale, engine.scaler.scale):
                raise ZeroError(
                    f"{call} got optimizers that hold masters of models whose loss scales differ, "
                    f"{self.scaler.scale:g} and {engine.scaler.scale:g}: either shard all models with the same "
                    "loss_scale and pass all their optimizers to every step(), or call step() of each model's engine "
                    "with an optimizer of this model alone"
                )
        scaled = self.policy.loss_scale is not None
        if scaled or max_norm is not None:
            tensors = {id(t): t for o in optimizers for group in o.param_groups for t in group["params"]}
            others = [t for t in tensors.values() if t.grad is not None]
            sharded = set().union(*(engine.masters.numbers for engine in together))
            if count := sum(id(tensor) not in sharded for tensor in others):
                left = "keep the loss scale" if scaled else "not be clipped"
                raise ZeroError(
                    f"{call} got optimizers that also hold tensors outside of any sharded model (number: {count}), "
                    f"whose gradients would {left}: give these tensors an optimizer of their own"
                )
            if scaled:
                for engine in together:
                    engine.masters.check_complete(tensors.keys())
        for engine in together:
            engine.scaler.check_scaled()
        return together

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Compute the global norm () fp64 of the model's mean gradient; the norm may be NaN or infinite.

        All ranks must call this, and all get the same bits.  There is one exception: with local steps (DiLoCo), each
        group of ranks trains by itself and has its own mean gradient.  Only the ranks of one group then get the same
        norm.

        Args:
            norm_type: the p of the p-norm, above 0 and at most 8, or ``inf``.

        Raises:
            ZeroError: if ``norm_type`` is out of range, if a backward pass failed, or if gradients of
                :meth:`accumulating` are not reduced yet.
        """
        self.hooks.check_finished("grad_norm()")
        with self.wire.calling("grad_norm()"):
            return self.masters.norm(self.wire, self.policy, norm_type)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> Tensor:
        """Scale the gradients so that their global norm (:meth:`grad_norm`) is at most ``max_norm``.

        All ranks must call it.  A norm that is not finite makes the gradients NaN, as in
        ``torch.nn.utils.clip_grad_norm_``.

        Args:
            max_norm: the largest norm that the gradients may have afterwards.
            norm_type: the p of the p-norm, as for :meth:`grad_norm`.
            optimizers: optimizers that hold masters (fp32 weights in shards) of this model and of other models.  If
                given, the gradients of all these models count as one vector: ``max_norm`` limits the norm of this
                vector, and all gradients are scaled by the same factor.  If not given, only this model's gradients are
                scaled.

        Returns:
            () fp64, the norm before scaling.

        Raises:
            ZeroError: in each of these cases:

                - the policy has a loss scale; pass ``max_norm`` to :meth:`step` instead;
                - ``norm_type`` is out of range, a backward pass failed, or gradients of :meth:`accumulating` are not
                  reduced yet;
                - the models of ``optimizers`` cannot be clipped together, for example because they are on different
                  ranks.
        """
        if self.policy.loss_scale is not None:
            raise ZeroError(
                "clip_grad_norm_() would clip gradients that still have the loss scale: give max_norm to step() "
                "instead"
            )
        together = self._together("clip_grad_norm_()", optimizers, max_norm=max_norm)
        norm = _joint_norm("clip_grad_norm_()", together, norm_type)
        for engine in together:
            # isfinite() makes the host wait for the device, so it is called only with error feedback.
            if engine.current_policy.feedback is not None and not norm.isfinite():
                engine._forget_overflow()  # noqa: SLF001
            engine.masters.scale_gradients(clip_factor(norm, max_norm).float())
        return norm

    def _forget_overflow(self) -> None:
        """Forget all quantisation errors of gradients that have overflowed, since no optimizer will use these
        gradients.

        These are the errors that error feedback adds to later gradients, and the errors that were measured to choose
        codecs (the policy's bit budget).  If a user's class reduces gradients, its objects are constructed anew.
        """
        for unit in self.units:
            unit.reduction.clear_feedback()
            if unit.outer is not None:
                unit.outer.clear_feedback()
        self._forget_measured()

    def _forget_measured(self) -> None:
        """Forget the errors that were measured to choose codecs (bit budget), since the measured gradients were
        dropped.
        """
        if self.renewal is not None:
            self.renewal.forget()

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the masters (fp32 weights) or, without ``set_to_none``, set them to 0.

        ``model.zero_grad()`` calls this.

        Local gradients of :meth:`accumulating` are dropped too.  There is one exception: after a backward pass that
        failed, local gradients stay, since :meth:`finish_backward` sends them.
        """
        if not self._passes.in_backward:
            for unit in self.units:
                unit.reduction.drop_local()
        for master in self.masters:
            if set_to_none:
                master.grad = None
            elif master.grad is not None:
                master.grad.zero_()
        self.scaler.forget()
        self._forget_measured()

    # State

    def weights_changed(self) -> None:
        """Drop all copies of the weights, because masters (the fp32 weights) were written; all ranks must call it.

        Call it after you have written masters through ``.data``, if the engine keeps copies of weights.  The engine
        keeps copies with hpZ, below stage 3, with offload, and of small parameters that stay gathered (the persistent
        unit).  If the call is missing, the next pass that needs an old copy raises an error.

        Optimizer steps need no call.  Writes that increment torch's version counter, such as ``p.copy_()``, need none
        either.
        """
        for unit in self.units:
            unit.weights_changed()

    def forget_gathered(self) -> None:
        """Make the next use of each unit gather the unit's weights anew, although the weights have not changed.

        A unit is a group of parameters that are gathered together.
        """
        for unit in self.units:
            unit.weights_changed("unchanged")

    def optimizer_stepped(self, held: set[int]) -> None:
        """Note that an optimizer has stepped, so that the next pass gathers the new weights.

        If several optimizers step after one backward pass, this counts as one step.  ``held`` has the :func:`id` of
        each tensor that the optimizer holds.
        """
        first = self.clock.micro_batch > 0
        if first:
            self.clock.step, self.clock.micro_batch = self.clock.step + 1, 0
        self.masters.unused -= held
        for unit in self.units:
            if unit.geometry.trainable:
                unit.weights_changed("stepped")
        if first and self.renewal is not None:
            self.renewal.stepped()
        if self._local_steps is not None:
            with self.wire.calling("optimizer.step()"):
                self._local_steps.stepped(self.clock.step, first=first)
        if first and self.policy.schedule:
            self.follow_schedule(self.clock.step)

    @property
    def current_policy(self) -> Policy:
        """The policy of the present step; without a schedule, ``policy`` itself.

        A schedule uses different policies in different steps of a run.  ``policy.phases`` has all of them.
        """
        return self.policy.phases[self._phase]

    def follow_schedule(self, step: int) -> None:
        """Switch to the policy that the schedule gives for the step that follows ``step`` optimizer steps.

        Does nothing if the engine uses this policy already.  All ranks must call this method, and no pass may be
        running.
        """
        number = self.policy.phase_at(step)
        if number != self._phase:
            for unit in self.units:
                unit.take_up(number)
            self._phase = number

    def communication_state(self) -> dict[str, Tensor]:
        """Return the state that this rank's messages depend on, in addition to weights and gradients.

        If a run with the same topology and policy loads this state, the masters (fp32 weights) and the optimizer state,
        it continues bit for bit.  The state has these parts, some of which only some policies need:

        - the numbers of the step and of the micro-batch;
        - the quantisation errors that error feedback adds to later gradients;
        - the copies of earlier weights, if the policy sends weights as differences from these copies;
        - the state of users' own reductions and gathers;
        - the anchors and momenta of outer steps (DiLoCo);
        - the codecs that a bit budget has chosen, and the errors measured for its next choice.
        """
        state = {"step": torch.tensor(self.clock.step), "micro_batch": torch.tensor(self.clock.micro_batch)}
        if self.renewal is not None:
            state["budget"] = self.renewal.state()
        for unit in self.units:
            held = unit.communication_state()
            state |= {f"{unit.geometry.name}/{name}": value for name, value in held.items()}
        return state

    def load_communication_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a ``state`` that :meth:`communication_state` has returned on this rank.

        Topology and policy must be the same as when the state was returned.

        Raises:
            ZeroError: if the names, shapes or types in the state do not fit; the engine is then unchanged.
        """
        if missing := {"step", "micro_batch"} - state.keys():
            raise ZeroError(
                f"state has no {' and no '.join(sorted(missing))}: load a state that communication_state() has returned"
            )
        unit_states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in state.items():
            name, _, entry = key.rpartition("/")
            unit_states[name][entry] = tensor
        if other := sorted(unit_states[""].keys() - {"step", "micro_batch", "budget"}):
            raise ZeroError(
                f"state has an entry {other[0]!r} of no unit: load a state that communication_state() has returned"
            )
        known = {unit.geometry.name for unit in self.units}
        if unknown := sorted(unit_states.keys() - known - {""}):
            raise ZeroError(
                f"state has entries of unit {unknown[0]!r}, which this model does not have: load a state that was "
                "saved with the same model"
            )
        numel = state["budget"].numel() if "budget" in state else 0
        expected = 0 if self.renewal is None else self.renewal.state().numel()
        if numel != expected:
            raise ZeroError(
                f"state of the bit budget has {numel} numbers, expected {expected}: load a state that was saved with "
                "the same policy"
            )
        self.follow_schedule(int(state["step"]))
        try:
            for unit in self.units:
                unit.check_communication_state(unit_states[unit.geometry.name])
        except ZeroError:
            self.follow_schedule(self.clock.step)
            raise
        self.clock.step, self.clock.micro_batch = int(state["step"]), int(state["micro_batch"])
        for unit in self.units:
            unit.load_communication_state(unit_states[unit.geometry.name])
        if self.renewal is not None:
            self.renewal.load(state["budget"])
        if self._local_steps is not None:
            self._local_steps.reset()

    def reset_communication_state(self, *, step: int, micro_batch: int) -> None:
        """Reset everything that messages depend on, except the weights, as in a new engine with the present weights.

        The method resets all that :meth:`communication_state` lists, such as the errors of error feedback, and the
        state of users' own reductions and gathers.  The numbers of the step and of the micro-batch are set to the
        arguments.  All ranks must call this method, and no pass may be running.

        Args:
            step: the number of optimizer steps from which training continues.
            micro_batch: the number of backward passes since the last optimizer step.
        """
        self.clock.step, self.clock.micro_batch = step, micro_batch
        self.follow_schedule(step)
        for unit in self.units:
            unit.reset_communication_state()
        if self.renewal is not None:
            self.renewal.reset()
        if self._local_steps is not None:
            self._local_steps.reset()

    def full_state_dict(
        self,
        *,
        rank0_only: bool = False,
        device: torch.device | str | None = "cpu",
        dtype: torch.dtype | str = torch.float32,
        allow_overflow: bool = False,
    ) -> dict[str, Tensor]:
        """Gather the state dict of the unsharded model, parameters and buffers; all ranks must call it.

        Units (groups of parameters) are gathered one after the other, and each is copied to ``device`` before the next.
        A GPU therefore holds the fp32 weights of one unit at a time, unless ``device`` is the GPU.

        Args:
            rank0_only: whether only rank 0 of the mesh gets the state dict; on all other ranks the result is empty.
            device: the device of the result; None for the device of the mesh.
            dtype: the type of the parameters: fp32, bf16, fp16, or a floating-point ``torch.dtype``.
            allow_overflow: whether a finite value that is too large for ``dtype`` may become infinite.

        Raises:
            ZeroError: on all ranks, if finite values would become infinite and ``allow_overflow`` is False; the
                message names the parameters.
        """
        self.hooks.check_parameters()
        with self.wire.calling("full_state_dict()"):
            self.buffers.make_equal()
            return state_dict.full_state_dict(
                self.model,
                self.units,
                dtype,
                allow_overflow=allow_overflow,
                device=self.wire.mesh.device if device is None else torch.device(device),
                keep=not rank0_only or self.wire.mesh.rank == 0,
            )

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite weights and buffers with the ``state`` dict of the unsharded model.

        Parameters may be in any floating-point type and any memory layout.

        Raises:
            ZeroError: before anything is changed, in each of these cases:

                - names or shapes differ from the model's;
                - parameters that the model ties have different values;
                - a tensor has no data;
                - the model's type cannot hold a value, such as a complex number, a finite value beyond fp32, or an
                  integer that fp32 would round.
        """
        self.hooks.check_parameters()
        self.check_hidden("load_full_state_dict()")
        for unit in self.units:
            unit.reshard()
        state_dict.load_full_state_dict(self.model, self.units, state)

    # The four hooks of model.state_dict() and model.load_state_dict(), which torch's get_model_state_dict() and
    # set_model_state_dict() call.  They do nothing if all parameters of the model are in an open GatheredParameters.

    def _before_state_dict(self, model: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Make buffers equal on all ranks, before ``state_dict()`` collects them; torch calls this hook.

        With ``keep_vars``, nothing is done.
        """
        if not keep_vars and not self._all_shown():
            self.hooks.check_parameters()
            with self.wire.calling("state_dict()"):
                self.buffers.make_equal()

    def _fill_state_dict(self, model: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        """Replace the parameters that ``state_dict()`` has collected in ``state`` by their whole values, gathered from
        all ranks.

        Torch calls this hook.
        """
        if not self._all_shown():
            with self.wire.calling("state_dict()"):
                state_dict.fill(self.model, self.units, state, prefix)

    def _load_from_state_dict(
        self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: object
    ) -> None:
        """Load the entries of ``state`` that belong to the model, and remove them from ``state``.

        torch calls this hook before it loads any entry into the model, and then loads the entries that remain.
        """
        self._loaded.clear()
        if self._all_shown():
            return
        if metadata.get("assign_to_params_buffers"):
            raise ZeroError(
                "load_state_dict(assign=True) of a sharded model is not supported, since each rank keeps only its "
                "slices: leave assign= out, or call it under GatheredParameters of all parameters"
            )
        self.hooks.check_parameters()
        self.check_hidden("load_state_dict()")
        for unit in self.units:
            unit.reshard()
        self._loaded = state_dict.take(self.model, self.units, state, prefix)

    def _after_load_state_dict(self, model: nn.Module, report: Any) -> None:
        """Remove the entries that the engine has loaded from torch's report of missing entries.

        Torch calls this hook after it has loaded a state dict.
        """
        report.missing_keys[:] = [name for name in report.missing_keys if name not in self._loaded]

    def _all_shown(self) -> bool:
        """Return whether all parameters of the model are in an open GatheredParameters context."""
        return all(len(unit.flat.shown) == len(unit.members) for unit in self.units)

    def memory(self) -> dict[str, int]:
        """Return the peak memory of this rank's engine so far, in bytes, for each part of the memory.

        The parts have names, such as ``masters`` or ``gathered``.  :func:`impl.plan.memory.memory` predicts the bytes
        under the same names.
        """
        messages = {"messages": self.wire.message_bytes} if self.wire.streams else {}
        return self._meter.peak | messages

    def copied(self) -> dict[CopyKey, int]:
        """Return how many bytes this rank has copied between host and device so far, by direction, purpose and unit.

        A unit is a group of parameters that are gathered together.

        :func:`impl.plan.traffic.predict` predicts the same numbers.
        """
        return dict(self._host.copied)

    # Refusals

    def check_hidden(self, call: str) -> None:
        """Raise a ZeroError if parameters of the model are in an open GatheredParameters context.

        Calls that write weights make this check, since the context overwrites the weights when it is left.  ``call`` is
        the name of the call that makes the check, for the error message.
        """
        for unit in self.units:
            if unit.flat.shown:
                unit.check_hidden(f"{call} under")


def _joint_norm(call: str, together: Sequence[Zero], norm_type: float) -> Tensor:
    """Return the norm () fp64 of the mean gradients of the models ``together``, taken as one vector.

    All ranks must call it.  ``call`` is the name of the public method that needs the norm, for error messages.
    """
    norms = []
    for engine in together:
        with engine.wire.calling(call):
            norms.append(engine.grad_norm(norm_type))
    return joint_norm(norms, norm_type)


def describe(zero: Zero) -> dict[str, Any]:
    """Return which algorithms, transports and kernels an engine uses, by name, for the record of a benchmark's run."""
    policy, device, units = zero.policy, zero.wire.mesh.device, zero.units
    facts: dict[str, Any] = {
        "stage": policy.stage,
        "group": policy.group_ranks(zero.wire.mesh.topology),
        "gather": "/".join(dict.fromkeys(str(phase.gather) for phase in policy.phases)),
        "reduce": "/".join(dict.fromkeys(str(phase.reduce) for phase in policy.phases)),
        "transports": zero.wire.describe(),
        "kernels": ops.backend_of(device),
    }
    if (warning := ops.warning_of(device)) is not None:
        facts["kernels_warning"] = warning
    if policy.offload != Offload():
        facts["offload"] = {"memory": units[0].host.nature}
    if policy.loss_scale is not None:
        facts["loss_scale"] = zero.scaler.state_dict()
    if policy.local_steps is not None:
        names = ("local_steps", "local_fragments", "outer_rate", "outer_momentum")
        facts |= {name: getattr(policy, name) for name in names}
    for key, own in (("method", policy.own_reduce), ("gather_method", policy.own_gather)):
        if own is not None:
            facts[key] = {
                "class": str(own),
                "laws": sorted(law.name.lower() for law in own.laws),
                "bytes": "declared" if declares(own) else "measured, not predicted",
            }
    return facts


class Owner(NamedTuple):
    """The engine and the unit (group of parameters gathered together) that a parameter belongs to."""

    engine: Zero
    unit: Unit
    number: int  # index of the parameter in ``unit.members``


def find(parameter: Tensor) -> Owner | None:
    """Return the engine and the unit to which a sharded ``parameter`` belongs; None if the parameter is not sharded.

    A unit is a group of parameters that are gathered together.

    Raises:
        ZeroError: if the parameter's engine no longer exists.
    """
    if not isinstance(keeper := keeper_of(parameter), InUnit):
        return None
    for engine in engines():
        for unit in engine.units:
            if unit.flat is keeper.flat():
                return Owner(engine, unit, keeper.number)
    raise ZeroError(
        "this parameter belongs to a sharded model whose engine is gone: keep the model, or the engine that shard() "
        "returned, as long as its parameters are used"
    )
