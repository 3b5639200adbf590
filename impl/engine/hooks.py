"""Hooks on modules and gradients, which tell units, buffers, scaler and reductions of the events of a step.

Hooks of autograd hold the engine weakly: torch keeps them out of reach of Python's garbage collector.
"""

from __future__ import annotations

import contextlib
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
    """The passes of one sharded model on one rank; ``finished`` counts its backward passes.

    ``units`` are the root's first, then in model order, each with its module in ``modules``.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        modules: Sequence[nn.Module],
        context: UnitContext,
        reductions: ReductionQueue,
        *,
        casts_inputs: bool,
    ) -> None:
        self._model, self._units, self._context, self._reductions = model, units, context, reductions
        self._passes = passes = context.passes
        self._check_every, self.finished = context.policy.order_every, 0
        self.saved = SavedTensors(weights_in(units), passes.weights_at)
        self.masters, self.buffers = Masters(units), ModuleBuffers(model, context.wire, self.saved)
        self.scaler = LossScaler(context.policy.loss_scale)
        self._input_dtype = DTYPES[context.policy.compute] if casts_inputs else None
        self._units_of: dict[nn.Module, list[Unit]] = {}
        for unit, module in zip(units, modules, strict=True):
            self._units_of.setdefault(module, []).append(unit)
        self._inputs_left: dict[nn.Module, int] = {}  # by called module, inputs without a gradient yet
        self._follow_order()
        # Units in the order they ran; None once it is known, or where model order counts.
        self._seen: list[int] | None = None if passes.schedule.in_model_order else []
        self._parts = _parts(model)
        for module in dict.fromkeys((model, *self._units_of)):
            # Compilers must compile between the hooks only: traced, hooks would repeat their first call.
            before = torch.compiler.disable(self._pre_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._post_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
            module.__deepcopy__ = _refuse_copy  # type: ignore[assignment]  # found by copy.deepcopy()
        for unit in units:
            if unit.geometry.trainable:
                for number, member in enumerate(unit.members):
                    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # asks for no values
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
        passes.running += 1  # at once: the hook after the module decrements it, whatever is refused here
        self.saved.calls.append(NOTHING)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001  # there is no public one
            raise ZeroError(
                f"{type(module).__name__} of a sharded model under a transform of torch.func (vmap, grad), "
                "which cannot see its weights come and go: use autograd, or the model before shard()"
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
        if again:  # a block is computed again: only gather resharded weights
            for unit in units:
                if unit.policy.planes > 1:
                    raise ZeroError(
                        f"unit {unit.geometry.name!r} runs again in backward, for which planes = 2 has "
                        "the plane of columns, and not forward's: use planes = 1, or keep activations"
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
        """A forward pass of the model begins."""
        passes = self._passes
        passes.in_forward = False  # until all checks have passed
        training = torch.is_grad_enabled()
        if training and passes.in_backward:
            raise ZeroError(
                "a forward pass after a backward pass that failed: call finish_backward(), as the other "
                "ranks do, and drop its gradients with optimizer.zero_grad()"
            )
        for unit in self._units:
            unit.check_unchanged(training=training)
        self.buffers.possible |= self._check_attached()
        if self.buffers.possible:
            self.buffers.make_equal()
            self.buffers.differ = training or self.buffers.changed_by(self._model)
        if training:
            self._inputs_left.clear()
        passes.escaped.clear()
        passes.in_forward = True
        if self._seen is not None:
            self._seen = []

    def check_parameters(self) -> None:
        """Refuse, with a ZeroError, parameters that were replaced, or came to the model, after shard()."""
        for unit in self._units:
            unit.check_unchanged(training=False)
        self._check_attached()

    def _check_attached(self) -> bool:
        """Refuse parameters that came to the model since it was sharded; whether others came or went."""
        for part, children, *names in self._parts:
            if part._modules != children or [list(part._parameters), list(part._buffers)] != names:  # noqa: SLF001
                break
        else:
            return False
        for name, parameter in self._model.named_parameters():
            if not isinstance(keeper_of(parameter), InUnit) and parameter.numel():
                raise ZeroError(
                    f"parameter {name!r} came to the model after it was sharded: each rank would train its "
                    "own; add it before shard()"
                )
        self._parts = _parts(self._model)
        return True

    # After it has run

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        passes, root = self._passes, module is self._model
        passes.running -= 1
        self.saved.leave()
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # recomputing(): kept until its backward
            return
        ends = root and not passes.running  # else the model called itself
        units = () if root and not ends else self._units_of.get(module, ())
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        addresses = {memory_of(tensor) for tensor in outputs}
        backward = self._backward_follows(outputs, self._units if root else units)
        for unit in units:
            unit.post_forward(addresses, backward=backward)
        if ends:
            if outputs:  # nothing was raised
                self._gather_unused()
            self._end_forward(addresses, backward=backward)
        if passes.written:
            self._units[0].refuse_written()
        if torch.is_grad_enabled() and module in self._units_of:  # gather its units again before its backward
            hook = self._weakly(Hooks.pre_backward, module)
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _backward_follows(self, outputs: Sequence[Tensor], units: Sequence[Unit]) -> bool:
        """Whether a backward pass can follow: not if weights that stay for it were written."""
        if not torch.is_grad_enabled():
            return False
        kept = self._passes.schedule.kept
        for tensor in outputs:
            if tensor.requires_grad:
                break
        else:
            return False
        for unit in units:  # noqa: SIM110  # one call in place of one for each unit
            if unit.index in kept and unit.written():
                return False
        return True

    def _end_forward(self, outputs: Collection[int], *, backward: bool) -> None:
        """The model has run: end the use of units that were gathered ahead and not used."""
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
        """Below stage 3 gather units that this rank's pass did not use, as all ranks gather all units."""
        if self._passes.schedule.in_model_order and self._passes.in_forward:
            for unit in self._units[-1:]:  # and all before it
                if not unit.in_use:
                    unit.start_gather("forward" if torch.is_grad_enabled() else "evaluate")
                    unit.reshard()

    def _follow_order(self) -> None:
        """Reduce gradients in the schedule's order from the next pass on."""
        order = self._passes.schedule.reduction_order
        self._reductions.order = [self._units[index].reduction for index in order]

    # Backward

    def _weakly(self, event: Callable[..., None], *args: Any, needed: bool = False) -> Callable[[Any], None]:
        """A hook of autograd that calls ``event`` while the engine lives; ``needed`` ones raise after."""
        reference = weakref.ref(self)

        def hook(_: Any) -> None:
            if (hooks := reference()) is not None:
                event(hooks, *args)
            elif needed:
                raise ZeroError("a gradient arrived for a sharded model whose engine is gone")

        return hook

    def _reshard_after(self, module: nn.Module, inputs: Sequence[Any]) -> None:
        """Reshard a block, with parameters frozen or unused, once its inputs' gradients have arrived."""
        tensors: list[Tensor] = []
        for value in inputs:
            tensors += (value,) if isinstance(value, Tensor) else tensors_in(value)
        # Leaves are left out: they outlive the pass, and so would the hook.
        tensors = [tensor for tensor in tensors if tensor.grad_fn is not None]
        # A call without such inputs counts one that never arrives: its backward may be yet to come.
        self._inputs_left[module] = self._inputs_left.get(module, 0) + (len(tensors) or 1)
        # torch's own register_multi_grad_hook() would keep the graph alive, and so the engine.
        hook = self._weakly(Hooks.reshard_unused, module)
        for tensor in tensors:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def pre_backward(self, module: nn.Module) -> None:
        """The gradient of an output of ``module`` has arrived."""
        if torch.is_grad_enabled():
            raise ZeroError("create_graph=True: gradients of gradients are not supported")
        if not self._passes.in_backward:
            self._begin_backward()
        for unit in self._units_of[module]:
            unit.pre_backward()

    def collect_gradient(self, index: int, number: int) -> None:
        """The gradient of a parameter has arrived."""
        if not self._passes.in_backward:
            self._begin_backward()
        if self._units[index].reduction.collect(number):
            self._units[index].post_backward()

    def collect_outside(self, index: int, number: int) -> None:
        """A gradient has arrived at the placeholder of a parameter."""
        unit = self._units[index]
        if number in unit.flat.shown:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                unit.members[number].placeholder.grad = None
            name = unit.geometry.slots[number].spec.name
            raise ZeroError(
                f"backward() to parameter {name!r} under GatheredParameters, which no optimizer would see: "
                "compute a loss with weights inside zero.unsharded(), or use torch.no_grad()"
            )
        unit.reduction.collect_outside(number)
        if not self._passes.in_backward:
            self._begin_backward()

    def reshard_unused(self, module: nn.Module) -> None:
        """The gradient of an input of a call of ``module`` has arrived."""
        left = self._inputs_left[module] = self._inputs_left.get(module, 1) - 1
        if not left:
            for unit in self._units_of[module]:
                unit.reshard()

    def _begin_backward(self) -> None:
        """At a pass's first gradient, have autograd call :meth:`_end_backward` after it."""
        passes = self._passes
        if passes.running:
            raise ZeroError(
                "a backward pass inside a forward pass of a sharded model (a forward pass that was "
                "interrupted: call drop_gradients())"
            )
        passes.in_backward = True
        # As FSDP2 and DDP do; there is no public way.
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001

    def _end_backward(self) -> None:
        """Called by autograd after a backward pass: start all reductions, wait for them, reshard."""
        passes, context = self._passes, self._context
        self._reductions.finish(start=not passes.accumulating)
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
        """End a backward pass that failed on this rank: :meth:`impl.engine.engine.Zero.finish_backward`."""
        if self._passes.in_backward:
            self._end_backward()

    def check_finished(self, call: str) -> None:
        """Refuse ``call``, with a ZeroError, in or after a backward pass that was not finished."""
        if self._passes.in_backward:
            raise ZeroError(f"{call} after a backward pass that failed: call finish_backward() first")
        for unit in self._units:
            if unit.reduction.local is not None:
                raise ZeroError(
                    f"{call} while gradients of accumulating() wait to be reduced: run the last micro-batch "
                    "outside of it, or call drop_gradients()"
                )

    # Other ways to run

    def run(self, module: nn.Module, entry: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``entry`` as the forward pass of ``module``, the model or a block; returns its output."""
        if module is not self._model and module not in self._units_of:
            raise ZeroError(
                f"{type(module).__name__} is neither the sharded model nor one of its blocks, whose weights "
                "come and go together: register a method of one of those"
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
        """A forward pass of the model: :meth:`impl.engine.engine.Zero.unsharded`."""
        try:
            with self._context.wire.calling("unsharded()"):
                self._pre_forward(self._model, (), {})
                yield
                self._gather_unused()
        finally:
            self._post_forward(self._model, (), {}, None)

    def drop(self) -> None:
        """Leave a pass that failed: :meth:`impl.engine.engine.Zero.drop_gradients`."""
        self._passes.running = 0
        self._passes.written.clear()
        self.saved.leave_all()
        self._reductions.drop_failed()
        for unit in self._units:
            unit.drop_gradients()

    def check_idle(self, call: str) -> None:
        """Refuse ``call``, with a ZeroError, inside a forward or backward pass."""
        if self._passes.running or recomputing():
            raise ZeroError(
                f"{call} inside a forward or backward pass, which gathers what it uses itself (a pass that "
                "was interrupted: call drop_gradients())"
            )


def _parts(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Module | None], list[str], list[str]]]:
    """All modules, with their children, and the names of their parameters and of their buffers."""
    return [
        (part, dict(part._modules), list(part._parameters), list(part._buffers))  # noqa: SLF001
        for part in model.modules()
    ]


def _refuse_copy(_: object) -> None:
    raise ZeroError(
        "deepcopy() of a sharded model: weights and hooks are one engine's; copy the model before shard(), "
        "or give a new one Zero.full_state_dict()"
    )
