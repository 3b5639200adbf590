"""Runs the engine inside a training step, with hooks on modules and on gradients.

The hooks are installed once, when the model is sharded.  A unit is a group of parameters that are gathered and reduced
together, such as those of a block.  In a step the hooks run in this order:

1. *Before a module runs* (``_pre_forward``), check the model, cast inputs, and gather the module's units.
2. *After a module has run* (``_post_forward``), reshard its units (free their gathered weights), and register hooks on
   its outputs.
3. *When the gradient of an output arrives* (:meth:`Hooks.pre_backward`), gather the module's units again.
4. *When the gradient of a parameter arrives* (:meth:`Hooks.collect_gradient`), give the gradient to the reduction of
   the parameter's unit.  After the unit's last gradient, reshard the unit, and start all reductions that are ready.
5. *When autograd has finished* (``_end_backward``), finish all reductions.

Autograd keeps some of these hooks.  Such a hook has only a weak reference to the engine.  If it had a strong reference,
engine and model would stay alive for ever, because Python's garbage collector cannot see what autograd keeps.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from impl.codecs.reference import DTYPES
from impl.engine.masters import LossScaler, Masters
from impl.engine.module_buffers import ModuleBuffers
from impl.engine.outside_uses import NOTHING, SavedTensors, memory_of, weights_in
from impl.errors import ZeroError
from impl.plan.reduction_queue import ReductionQueue
from impl.pytree import cast_tensors, tensors_in
from impl.unit.context import UnitContext, recomputing
from impl.unit.flat_buffer import InUnit
from impl.unit.placeholder import keeper_of
from impl.unit.unit import Unit


class Hooks:
    """Runs the forward and backward passes of one sharded model on one rank.

    ``finished`` is the number of backward passes that have ended so far.

    Args:
        model: the sharded model.
        units: the model's units, which are groups of parameters: first the root's, which has the parameters outside of
            blocks; then the persistent unit, whose small parameters stay gathered; then one unit for each block, in
            model order.
        modules: for each unit, the module that the unit belongs to; the unit is gathered before this module runs.
        context: the objects that the units share, such as the wire, which sends messages, and the policy.
        casts_inputs: whether floating-point inputs of the hooked modules are cast to the compute type.
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
        self._model, self._units, self._context = model, units, context
        self.reductions = ReductionQueue(context.policy.memory.reduce_bucket)
        self._passes = passes = context.passes
        self._check_every, self.finished = context.policy.order_every, 0
        self._warned = False  # whether a warning of autocast was given
        self.saved = SavedTensors(weights_in(units), passes.weights_at)
        self.masters, self.buffers = Masters(units), ModuleBuffers(model, context.wire, self.saved)
        self.scaler = LossScaler(context.policy.loss_scale)
        self._input_dtype = DTYPES[context.policy.compute] if casts_inputs else None
        self._units_of: dict[nn.Module, list[Unit]] = {}
        for unit, module in zip(units, modules, strict=True):
            self._units_of.setdefault(module, []).append(unit)
        # for each module that ran, how many of its inputs have not got their gradient yet
        self._inputs_left: dict[nn.Module, int] = {}
        self._follow_order()
        # The units in the order in which they run in the first forward pass; None once that order is known, and
        # below stage 3, where all ranks follow the model's order.
        self._seen: list[int] | None = None if passes.schedule.in_model_order else []
        self._parts = _parts(model)
        for module in dict.fromkeys((model, *self._units_of)):
            # torch.compile must not trace the hooks: compiled hooks would repeat what their first call did.
            before = torch.compiler.disable(self._pre_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._post_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
            module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]  # copy.deepcopy() looks it up
        for unit in units:
            if unit.geometry.trainable:
                for number, member in enumerate(unit.members):
                    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # no values are needed
                        for leaf, event in (
                            (member.parameter, Hooks.collect_gradient),
                            (member.placeholder, Hooks.collect_outside),
                        ):
                            hook = self._weakly(event, unit.index, number, needed=True)
                            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # Before a module runs

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        passes, again = self._passes, torch._C._current_graph_task_id() != -1  # noqa: SLF001  # recomputing()
        first = not passes.running and not again
        # This comes before any check, since the hook after the module always runs, and decrements the count.
        passes.running += 1
        self.saved.calls.append(NOTHING)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001  # there is no public function
            raise ZeroError(
                f"{type(module).__name__} of a sharded model is called under a transform of torch.func (vmap, grad), "
                "which cannot follow the gathering of weights: use autograd, or call the model before shard()"
            )
        units = self._units_of.get(module, ())
        if first and module is self._model:
            self._begin_forward()
        elif first:
            if self.buffers.possible:
                self.buffers.differ |= self.buffers.changed_by(module)
            for unit in units:
                unit.check_unchanged(training=False)
        changed = None
        if (dtype := self._input_dtype) is not None:
            changed = args, kwargs = cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        # Activation checkpointing recomputes this module in backward: gather its weights, and do nothing else.
        if again:
            for unit in units:
                if unit.policy.planes != 1:
                    raise ZeroError(
                        f"unit {unit.geometry.name!r} is recomputed in the backward pass (activation checkpointing), "
                        f"which planes={unit.policy.planes!r} does not support: backward gathers weights quantised by "
                        "columns, but the recomputed forward needs weights quantised by rows; set planes=1, or turn "
                        "activation checkpointing off"
                    )
                unit.all_gather("backward")
            return changed
        training = torch.is_grad_enabled()
        if training:
            self.saved.take_over()
        for unit in units:
            if self._seen is not None and not unit.geometry.outer and unit.index not in self._seen:
                self._seen.append(unit.index)
            unit.pre_forward("forward" if training else "evaluate")
        if training and units and module is not self._model:
            self._reshard_after(module, (*args, *kwargs.values()))
        return changed

    def _begin_forward(self) -> None:
        """Begin a forward pass: check that the model's parameters were not replaced, and make its buffers equal on all
        ranks.
        """
        passes = self._passes
        passes.in_forward = False  # stays False if a check fails
        training = torch.is_grad_enabled()
        if training and passes.in_backward:
            raise ZeroError(
                "a forward pass follows a backward pass that failed and was not ended: call finish_backward() on "
                "this rank, so that the other ranks get this rank's messages, and drop the gradients with "
                "optimizer.zero_grad()"
            )
        for unit in self._units:
            unit.check_unchanged(training=training)
        self.buffers.possible |= self._check_attached()
        if self.buffers.possible:
            self.buffers.make_equal()
            self.buffers.differ = training or self.buffers.changed_by(self._model)
        if training:
            self._inputs_left.clear()
            if not self._warned and torch.is_autocast_enabled(self._context.wire.mesh.device.type):
                self._warn_of_autocast()
        passes.escaped.clear()
        passes.in_forward = True
        if self._seen is not None:
            self._seen = []

    def _warn_of_autocast(self) -> None:
        """Warn if autocast casts every gathered weight to another type than the policy's compute type.

        Autocast keeps the casts until backward, so they stay in memory even after the gathered weights are freed.  The
        warning is given once, on rank 0.
        """
        mesh, compute = self._context.wire.mesh, DTYPES[self._context.policy.compute]
        cast = torch.get_autocast_dtype(mesh.device.type)
        if cast == compute:
            return
        self._warned = True
        if mesh.rank == 0:
            name = str(cast).removeprefix("torch.")
            setting = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(cast, "bf16")
            warnings.warn(
                f"torch.autocast({name}) keeps a {name} cast of every weight until backward, although units are "
                f"resharded: set compute={setting!r} in the policy and remove autocast",
                stacklevel=2,
            )

    def check_parameters(self) -> None:
        """Raise a ZeroError if parameters were replaced in the model, or added to it, after shard()."""
        for unit in self._units:
            unit.check_unchanged(training=False)
        self._check_attached()

    def _check_attached(self) -> bool:
        """Raise a ZeroError if a parameter was added to the model after shard().

        Returns whether modules, buffers, or parameters without elements have been added to the model or removed from it
        since the last call.
        """
        for part, children, *names in self._parts:
            if part._modules != children or [list(part._parameters), list(part._buffers)] != names:  # noqa: SLF001
                break
        else:
            return False
        for name, parameter in self._model.named_parameters():
            if not isinstance(keeper_of(parameter), InUnit) and parameter.numel():
                raise ZeroError(
                    f"parameter {name!r} was added to the model after it was sharded, so each rank would train its "
                    "own copy: add it before shard()"
                )
        self._parts = _parts(self._model)
        return True

    # After a module has run

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passes, root = self._passes, module is self._model
        passes.running -= 1
        self.saved.leave()
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # recomputing(): its backward needs the weights
            return
        ends = root and not passes.running  # otherwise the model has called itself
        units = () if root and not ends else self._units_of.get(module, ())
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        addresses = {memory_of(tensor) for tensor in outputs}
        backward = self._backward_follows(outputs, self._units if root else units)
        for unit in units:
            unit.post_forward(addresses, backward=backward)
        if ends:
            if outputs:  # there are none if the forward pass raised an exception
                self._gather_unused()
            self._end_forward(addresses, backward=backward)
        if passes.written:
            self._units[0].refuse_written()
        # The units are gathered again when the backward pass reaches the outputs.
        if torch.is_grad_enabled() and module in self._units_of:
            hook = self._weakly(Hooks.pre_backward, module)
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _backward_follows(self, outputs: Sequence[Tensor], units: Sequence[Unit]) -> bool:
        """Return whether a backward pass from ``outputs`` may follow this forward pass.

        ``units`` are the units (groups of parameters) of the module that has run.  Returns False in three cases:

        - autograd is off;
        - no output needs a gradient;
        - one of ``units`` stays gathered for backward, and the user has written to its weights, so that the forward
          pass will end with an error.
        """
        if not torch.is_grad_enabled():
            return False
        kept = self._passes.schedule.kept
        for tensor in outputs:
            if tensor.requires_grad:
                break
        else:
            return False
        for unit in units:  # noqa: SIM110  # all() would cost a call for each unit
            if unit.index in kept and unit.written():
                return False
        return True

    def _end_forward(self, outputs: Collection[int], *, backward: bool) -> None:
        """End a forward pass of the model: free the weights of the units that are still gathered.

        A unit is a group of parameters.  It is still gathered here if it was prefetched and then not used, or if it was
        used outside of its module.

        In stage 3, the first forward pass notes the order in which the units run.  Later passes rely on this order, for
        example to prefetch the next unit.

        Args:
            outputs: the memory addresses of the tensors that the model has returned.
            backward: whether a backward pass may follow.  If True, the units that the backward pass uses first stay
                gathered.
        """
        passes = self._passes
        passes.in_forward = False
        passes.escaped.clear()
        if self._seen is not None:
            passes.schedule = passes.schedule.after(self._seen)
            self._seen = None
            self._follow_order()
        for unit in self._units:
            if unit.in_use:
                unit.post_forward(outputs, backward=backward)
        passes.escaped.clear()

    def _gather_unused(self) -> None:
        """Below stage 3, gather the units (groups of parameters) that this rank's forward pass did not use.

        Other ranks may use these units, and all ranks must take part in every gather.
        """
        if self._passes.schedule.in_model_order and self._passes.in_forward:
            for unit in self._units[-1:]:  # starting the last gather starts those of all units before it
                if not unit.in_use:
                    unit.start_gather("forward" if torch.is_grad_enabled() else "evaluate")
                    unit.reshard()

    def _follow_order(self) -> None:
        """Make reductions start in the order in which units (groups of parameters) probably get their last gradient."""
        order = self._passes.schedule.reduction_order
        self.reductions.follow([self._units[index].reduction for index in order])

    # Backward

    def _weakly(self, event: Callable[..., None], *args: Any, needed: bool = False) -> Callable[[Any], None]:
        """Return a hook for autograd that calls ``event(self, *args)``, but does not keep this engine alive.

        If the engine no longer exists when the hook runs, the hook does nothing or, if ``needed`` is True, raises a
        ZeroError.
        """
        reference = weakref.ref(self)

        def hook(_: Any) -> None:
            if (hooks := reference()) is not None:
                event(hooks, *args)
            elif needed:
                raise ZeroError(
                    "a gradient arrived for a sharded model whose engine is gone: keep the model, or the engine "
                    "that shard() returned, until the backward pass has ended"
                )

        return hook

    def _reshard_after(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        """Register hooks that reshard ``module``, a block, once the gradients of its ``inputs`` have arrived.

        To reshard a block is to free its gathered weights.  A block is also resharded when the gradients of all its
        parameters have arrived.  In a block with frozen or unused parameters, some gradients never arrive, so such a
        block needs these hooks.
        """
        tensors: list[Tensor] = []
        for value in inputs:
            tensors += (value,) if isinstance(value, Tensor) else tensors_in(value)
        # No hooks on leaves: a leaf outlives the pass, and so would its hook.
        tensors = [tensor for tensor in tensors if tensor.grad_fn is not None]
        # If no input needs a gradient, autograd never calls the hook.  Then count one input whose gradient never
        # arrives: otherwise the gradients of another call of the module could reshard it before the backward of this
        # call.
        self._inputs_left[module] = self._inputs_left.get(module, 0) + (len(tensors) or 1)
        # torch's register_multi_grad_hook() would keep the graph alive, and through it the engine.
        hook = self._weakly(Hooks.reshard_unused, module)
        for tensor in tensors:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def pre_backward(self, module: nn.Module) -> None:
        """Gather the units (groups of parameters) of ``module``, because the gradient of one of its outputs has
        arrived.
        """
        if torch.is_grad_enabled():
            raise ZeroError(
                "create_graph=True asks for gradients of gradients, which a sharded model does not support: call "
                "backward() without create_graph"
            )
        if not self._passes.in_backward:
            self._begin_backward()
        for unit in self._units_of[module]:
            unit.pre_backward()

    def collect_gradient(self, index: int, number: int) -> None:
        """Give the gradient that has arrived at parameter ``number`` of unit ``index`` to the unit's reduction.

        A unit is a group of parameters that are gathered and reduced together.  When the first gradient of a block's
        unit arrives in a pass, the running reductions of other units also send their next messages.  After the last
        gradient of a unit, the unit is resharded (its gathered weights are freed), and all reductions that are ready
        start.  If gradients are only accumulated in this pass, no reductions start.
        """
        if not self._passes.in_backward:
            self._begin_backward()
        unit, reductions = self._units[index], self.reductions
        if unit.reduction.begin():
            reductions.post_next_hops()
        if unit.reduction.collect(number, is_next=reductions.next is unit.reduction):
            unit.post_backward()
            if not self._passes.accumulating:
                reductions.start_ready()

    def collect_outside(self, index: int, number: int) -> None:
        """Give the gradient that has arrived at a parameter's placeholder to the reduction of the parameter's unit.

        A unit is a group of parameters.  While it is sharded, modules hold placeholders: parameters without values.  A
        placeholder gets a gradient if it was passed to an ``autograd.Function``.  ``index`` is the index of the unit,
        and ``number`` the index of the parameter in the unit.

        Raises:
            ZeroError: if the parameter is in an open GatheredParameters context.
        """
        unit = self._units[index]
        if number in unit.flat.shown:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                unit.members[number].placeholder.grad = None
            name = unit.geometry.slots[number].spec.name
            raise ZeroError(
                f"backward() reached parameter {name!r} under GatheredParameters, and no optimizer would see the "
                "parameter's gradient: compute a loss with weights inside zero.unsharded(), or use torch.no_grad()"
            )
        unit.reduction.collect_outside(number, is_next=self.reductions.next is unit.reduction)
        if not self._passes.in_backward:
            self._begin_backward()

    def reshard_unused(self, module: nn.Module) -> None:
        """Note that the gradient of one input of ``module`` has arrived.

        Once the gradients of all inputs of all calls of the module have arrived, free the gathered weights of the
        module's units (groups of parameters), even if gradients of some parameters have not arrived.
        """
        left = self._inputs_left[module] = self._inputs_left.get(module, 1) - 1
        if not left:
            for unit in self._units_of[module]:
                unit.reshard()

    def _begin_backward(self) -> None:
        """Begin a backward pass, and make autograd call :meth:`_end_backward` at its end.

        The hooks call this method when the first gradient of the pass arrives.
        """
        passes = self._passes
        if passes.running:
            raise ZeroError(
                "a backward pass runs inside a forward pass of a sharded model: call backward() after the forward "
                "pass (if a forward pass was interrupted: call drop_gradients())"
            )
        passes.in_backward = True
        # FSDP2 and DDP do the same; there is no public function for it.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001

    def _end_backward(self) -> None:
        """End a backward pass: finish its reductions, and end the use of all units' weights (:meth:`Unit.end_use`).

        A unit is a group of parameters that are gathered and reduced together.  Autograd calls this method after the
        last gradient.  Reductions that have not started yet are started first; if the pass only accumulates gradients,
        none are started.
        """
        passes, context = self._passes, self._context
        self.reductions.finish(start=not passes.accumulating)
        for unit in self._units:
            if unit.in_use:
                unit.end_use()
            unit.reduction.end_pass()
        context.weights.trim()
        context.gradients.trim()
        self._inputs_left.clear()
        passes.in_backward = False
        context.clock.micro_batch += 1
        self.masters.unused.update(self.masters.numbers)
        self.scaler.passed()
        self.finished += 1
        if passes.written:
            self._units[0].refuse_written()
        if self._check_every and self.finished % self._check_every == 0:
            context.wire.check_order()

    def finish_backward(self) -> None:
        """End a backward pass that failed on this rank, by sending the messages that the other ranks wait for.

        Nothing happens if no backward pass has begun.  See :meth:`impl.engine.engine.Zero.finish_backward`.
        """
        if self._passes.in_backward:
            self._end_backward()

    def check_finished(self, call: str) -> None:
        """Raise a ZeroError if a backward pass has not ended, or if local gradients are not reduced yet.

        ``call`` is the name of the operation that makes this check, such as ``save()``, for the error message.
        """
        if self._passes.in_backward:
            raise ZeroError(
                f"{call} is refused after a backward pass that failed: call finish_backward() first"
            )
        for unit in self._units:
            if unit.reduction.local is not None:
                raise ZeroError(
                    f"{call} is refused while gradients of accumulating() are not reduced yet: run the last "
                    "micro-batch outside of accumulating(), or call drop_gradients()"
                )

    # Other ways to run

    def run(self, module: nn.Module, entry: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``entry(*args, **kwargs)`` as a forward pass of ``module``, and return the output.

        Raises:
            ZeroError: if ``module`` is neither the model nor one of its blocks.
        """
        if module is not self._model and module not in self._units_of:
            raise ZeroError(
                f"{type(module).__name__} is neither the sharded model nor one of its blocks, so its weights are "
                "not gathered as a whole: call register_forward_method() with the model or with a block"
            )
        output = None
        try:
            args, kwargs = self._pre_forward(module, args, kwargs) or (args, kwargs)
            output = entry(*args, **kwargs)
        finally:
            self._post_forward(module, args, kwargs, output)
        return output

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """Context that counts as one forward pass of the model, so that its weights can be used in the body.

        See :meth:`impl.engine.engine.Zero.unsharded`.
        """
        try:
            with self._context.wire.calling("unsharded()"):
                self._pre_forward(self._model, (), {})
                yield
                self._gather_unused()
        finally:
            self._post_forward(self._model, (), {}, None)

    def drop(self) -> None:
        """Forget a pass that failed, and all gradients that are not reduced yet.

        See :meth:`impl.engine.engine.Zero.drop_gradients`.
        """
        self._passes.running = 0
        self._passes.written.clear()
        self.saved.leave_all()
        self.reductions.drop_failed()
        for unit in self._units:
            unit.drop_gradients()

    def check_idle(self, call: str) -> None:
        """Raise a ZeroError if a forward or backward pass is running.

        ``call`` is the name of the operation that makes this check, such as ``GatheredParameters``, for the error
        message.
        """
        if self._passes.running or recomputing():
            raise ZeroError(
                f"{call} inside a forward or backward pass is refused, since the pass itself gathers the weights that "
                "it uses: leave this call out, or move it after the pass (if a pass was interrupted: call "
                "drop_gradients())"
            )


def _parts(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Module | None], list[str], list[str]]]:
    """Return (module, children by name, names of parameters, names of buffers) for each module in ``model``."""
    return [
        (part, dict(part._modules), list(part._parameters), list(part._buffers))  # noqa: SLF001
        for part in model.modules()
    ]


def _refuse_copy(_: object) -> None:
    raise ZeroError(
        "deepcopy() of a sharded model is not supported, since its weights and hooks belong to one engine: copy "
        "the model before shard(), or load Zero.full_state_dict() into a new model"
    )
