"""Hooks on modules and gradients that gather, reshard and reduce units during passes.

Hooks report events of the model's units to the :class:`~impl.plan.schedule.Schedule` and carry out its
actions.  Nothing here knows ZeRO++'s techniques by name: they are values of the policy.

They run for every module and every gradient of a step, so all that they read is one object's: how far the
passes are, which units are gathered for whom, and which reductions are under way.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from impl.codecs.reference import DTYPES
from impl.engine.masters import Masters
from impl.engine.module_buffers import ModuleBuffers
from impl.engine.optimizer_hooks import find
from impl.engine.pytree import cast_tensors, memory_of, tensors_in
from impl.engine.reduction_queue import ReductionQueue
from impl.engine.saved_tensors import SavedTensors
from impl.errors import WrittenError, ZeroError
from impl.plan.schedule import MOST_AHEAD, Action, Schedule
from impl.plan.traffic import Phase, kept_units
from impl.unit.context import UnitContext
from impl.unit.unit import Unit


class Hooks:
    """The passes of one sharded model on one rank, one after the other.

    Args:
        model: whose modules and parameters are hooked.
        units: the root's first, then in model order.
        modules: of each unit, the module that it travels with.
        context: by the units.
        masters: told when new gradients are there.
        buffers: of the model; made equal before a forward pass.
        casts_inputs: whether the model was given in another type than it computes in.

    Attributes:
        accumulating: whether backward passes add to local gradients, and reduce nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        modules: Sequence[nn.Module],
        context: UnitContext,
        *,
        masters: Masters,
        buffers: ModuleBuffers,
        casts_inputs: bool,
    ) -> None:
        self._model, self._units, self._masters, self._module_buffers = model, units, masters, buffers
        self._wire, self._policy, self._clock = context.wire, context.policy, context.clock
        self._weights, self._under_way = context.weights, context.under_way
        self._casts_inputs = casts_inputs
        self.accumulating = False
        self._of_module: dict[nn.Module, list[int]] = {}
        for index, module in enumerate(modules):
            self._of_module.setdefault(module, []).append(index)
        self._kept = kept_units(self._policy, [unit.geometry for unit in units])
        outer = tuple(self._of_module.get(model, ()))
        limits = self._policy.memory
        self._schedule = Schedule(
            [unit.geometry.padded for unit in units],
            tuple(index for index in range(len(units)) if index not in outer),
            outer,
            limits.prefetch,
            limits.max_live,
            self._kept,
            in_model_order=self._policy.stage < 3,
        )
        self._reductions = ReductionQueue(units, self._schedule.reduction_order, limits.reduce_bucket)
        self._saved = SavedTensors()
        # Units in the order they ran; None once it is known, and where it is the model's.
        self._seen: list[int] | None = None if self._schedule.in_model_order else []
        self._running = 0  # forward calls of hooked modules under way
        self._nested = 0  # of those, calls of the model inside one of it
        self._entered = 0  # calls of the model by other ways than its forward
        self._in_model = False  # whether the model's forward pass is under way
        self._called_alone: nn.Module | None = None
        self._escaped: set[int] = set()  # units in use outside of their modules, in this forward pass
        self._external: dict[nn.Module, list[int]] = {}  # units that a module uses beside its own
        self._brought: list[list[int]] = []  # of those, what calls under way have gathered
        self._calls: dict[nn.Module, int] = {}  # forward calls whose backward is to come
        self._in_backward = False
        self._unfinished = False
        self._finished = 0  # backward passes so far
        self._parts = self._parts_now()
        self._install()

    def _install(self) -> None:
        """Hook the model, its units' modules, and their parameters."""
        for module in dict.fromkeys((self._model, *self._of_module)):
            # A compiler computes what lies between the hooks; traced, they would be what they did once.
            before = torch.compiler.disable(self._pre_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._post_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
        for index, unit in enumerate(self._units):
            unit.used_outside = self._user(index)
            if unit.geometry.trainable:
                for number, member in enumerate(unit.members):
                    for leaf in (member.parameter, member.placeholder):
                        hook = self._collector(index, number, outside=leaf is member.placeholder)
                        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # asks for no values
                            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # Events

    def _phase(self) -> Phase:
        if self._in_backward:
            return "backward"
        return "forward" if torch.is_grad_enabled() else "evaluate"

    def _carry_out(self, actions: Iterable[Action], phase: Phase) -> None:
        try:
            for action in actions:
                unit = self._units[action.unit]
                match action.kind:
                    case "gather":
                        # Units gathered ahead that were then not used must not pile up.
                        if not unit.in_use and len(self._under_way) <= MOST_AHEAD:
                            self._gather_before(action.unit, phase)
                            unit.gather(phase)
                    case "wait":
                        if not unit.in_use:
                            self._gather_before(action.unit, phase)
                        unit.gather(phase)
                        unit.wait()
                        self._saved.gathered(unit)
                    case "release":
                        if action.unit not in self._escaped:
                            unit.release()
                    case "reduce":
                        if not self.accumulating:
                            self._reductions.ready(action.unit)
        except WrittenError as error:
            raise self._with_all(error) from None

    def _gather_before(self, index: int, phase: Phase) -> None:
        """Below stage 3 all ranks gather all units in one order, whichever of them each rank's pass calls."""
        one_order = self._in_model and self._schedule.in_model_order
        for earlier in (*self._schedule.outer, *self._schedule.order) if one_order else ():
            if earlier == index:
                return
            if not self._units[earlier].in_use:
                self._units[earlier].gather(phase)
                self._units[earlier].release()

    def _with_all(self, error: WrittenError) -> WrittenError:
        """What it says, and of the units that are still gathered: who writes one often writes all."""
        return WrittenError((*error.names, *(name for unit in self._units for name in unit.written())))

    # Forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        recomputing = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # inside a backward pass
        alone = not self._running and module is not self._model and not recomputing
        root = module is self._model and not recomputing
        nested = root and self._running > 0 and self._is_called()
        self._running += 1  # first: the hook after this call takes it back, whatever is refused here
        self._nested += nested
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001  # there is no public one
            raise ZeroError(
                f"{type(module).__name__} of a sharded model under a transform of torch.func (vmap, grad), "
                "which cannot see its weights come and go: use autograd, or the model before shard()"
            )
        if alone:
            for index in self._of_module.get(module, ()):
                self._units[index].check_held()
        changed = None
        if root and not nested:
            self._begin_forward()
        if self._casts_inputs:
            dtype = DTYPES[self._policy.compute]
            changed = args, kwargs = cast_tensors(args, dtype), cast_tensors(kwargs, dtype)
        if torch.is_grad_enabled() and not recomputing and not self._saved.active:
            self._saved.begin()  # a block that is called by itself, outside the model's forward pass
            self._called_alone = module
        for index in self._of_module.get(module, ()):
            if recomputing:  # gather what was released, and look no further
                self._carry_out((Action("wait", index),), "backward")
                continue
            if self._seen is not None and index not in self._schedule.outer and index not in self._seen:
                self._seen.append(index)
            self._carry_out(self._schedule.pre_forward(index), self._phase())
        if self._of_module.get(module) and not recomputing and torch.is_grad_enabled():
            self._after_backward_of(module, (args, kwargs))
        return changed

    def _is_called(self) -> bool:
        """Whether a call of the model is under way around this one: no hook is told of interrupted ones."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        calls = self._entered
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:  # noqa: SLF001
                calls += frame.f_locals["self"] is self._model
            frame = frame.f_back
        return calls > 1

    def _parts_now(self) -> list[tuple[nn.Module, dict[str, nn.Module | None], list[str]]]:
        """All modules, with their children and the names of their parameters."""
        return [(part, dict(part._modules), list(part._parameters)) for part in self._model.modules()]  # noqa: SLF001

    def _check_attached(self) -> None:
        """Refuse parameters that came to the model since it was sharded."""
        if all(
            part._modules == children and list(part._parameters) == names  # noqa: SLF001
            for part, children, names in self._parts
        ):
            return
        for name, parameter in self._model.named_parameters():
            if find(parameter) is None and parameter.numel():
                raise ZeroError(
                    f"parameter {name!r} came to the model after it was sharded: each rank would train its "
                    "own; add it before shard()"
                )
        self._parts = self._parts_now()

    def _begin_forward(self) -> None:
        self._running, self._nested = 1, 0
        self._in_model = False  # until nothing is refused any more
        for unit in self._units:
            unit.check_held()
        self._check_attached()
        self._module_buffers.make_equal()
        if torch.is_grad_enabled():
            self._module_buffers.changed()
            if self._unfinished:
                raise ZeroError(
                    "a forward pass after a backward pass that was not finished: call finish_backward() "
                    "(and drop its gradients with optimizer.zero_grad() if the backward pass failed)"
                )
            for unit in self._units:
                unit.check_flags()
            self._calls.clear()
            self._saved.begin()
        self._escaped.clear()
        self._in_model = True
        if self._seen is not None:
            self._seen = []

    def _after_backward_of(self, module: nn.Module, inputs: Any) -> None:
        """Once the gradients of a block's inputs are there, its weights are not needed any more.

        Units that count gradients are released before; this is for frozen and unused parameters.
        Leaves are left out: they outlive the pass, and so would the hook.
        """
        self._calls[module] = self._calls.get(module, 0) + 1
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.grad_fn is not None]
        if module is self._model or not tensors:
            return
        reference, left = weakref.ref(self), [len(tensors)]

        def passed(_: Tensor) -> None:
            left[0] -= 1
            hooks = reference()
            if left[0] == 0 and hooks is not None:
                hooks._calls[module] = hooks._calls.get(module, 1) - 1  # noqa: SLF001  # its own hook
                if hooks._calls[module] == 0:  # noqa: SLF001
                    for index in hooks._of_module[module]:  # noqa: SLF001
                        hooks._units[index].release()  # noqa: SLF001

        for tensor in tensors:
            tensor.register_hook(passed)  # type: ignore[no-untyped-call]

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running -= 1
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # recomputed: kept until its backward
            return
        outputs = list(tensors_in(output))
        nested = module is self._model and self._nested > 0
        self._nested -= nested
        indices = () if nested else self._of_module.get(module, ())
        ends: list[Callable[[], None]] = [partial(self._end_unit, index, outputs) for index in indices]
        if module is self._model and not nested:
            if outputs:  # nothing was raised
                ends.append(partial(self._gather_before, -1, self._phase()))
            ends.append(partial(self._end_forward, outputs))
        if module is self._called_alone:
            ends.append(self._end_alone)
        _each(ends)
        if torch.is_grad_enabled() and self._of_module.get(module):
            arrive = self._arrival(module)
            for tensor in outputs:
                if tensor.grad_fn is not None:
                    tensor.register_hook(arrive)  # type: ignore[no-untyped-call]

    def _end_unit(self, index: int, outputs: Sequence[Tensor]) -> None:
        """The module of this unit has run in a forward pass."""
        unit, training = self._units[index], torch.is_grad_enabled()
        address = unit.flat.bounds[0]
        if unit.gathered and any(memory_of(tensor) == address for tensor in outputs):
            self._escaped.add(index)  # a returned parameter (Megatron's bias) is used outside
        self._carry_out(self._schedule.post_forward(index, training=training), self._phase())

    def _end_alone(self) -> None:
        """A block that was called by itself has run."""
        self._saved.end()
        self._called_alone = None

    def _end_forward(self, outputs: Sequence[Tensor]) -> None:
        self._in_model = False
        self._saved.end()
        if self._seen is not None:
            rest = [i for i in self._schedule.order if i not in self._seen]
            self._schedule = replace(self._schedule, order=(*self._seen, *rest))
            self._reductions.order = self._schedule.reduction_order
            self._seen = None
        addresses = {memory_of(tensor) for tensor in outputs}
        kept = self._kept if torch.is_grad_enabled() else ()
        self._escaped.clear()
        _release(  # gathered ahead and not used, or returned by a module
            unit
            for index, unit in enumerate(self._units)
            if index not in kept and not (unit.gathered and unit.flat.bounds[0] in addresses)
        )

    def run(self, module: nn.Module, entry: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``entry`` returns, called as if it were the forward pass of ``module``.

        Raises:
            ZeroError: if ``module`` is neither the model nor one of its blocks.
        """
        if module is not self._model and module not in self._of_module:
            raise ZeroError(
                f"{type(module).__name__} is neither the sharded model nor one of its blocks, whose weights "
                "come and go together: register a method of one of those"
            )
        self._entered += module is self._model
        output = None
        try:
            args, kwargs = self._pre_forward(module, args, kwargs) or (args, kwargs)
            output = entry(*args, **kwargs)
        finally:
            self._post_forward(module, args, kwargs, output)
            self._entered -= module is self._model
        return output

    @contextlib.contextmanager
    def unsharded(self) -> Iterator[None]:
        """A forward pass of the model: :meth:`impl.engine.engine.Zero.unsharded`."""
        self._entered += 1
        try:
            self._pre_forward(self._model, (), {})
            yield
            self._gather_before(-1, self._phase())
        finally:
            self._post_forward(self._model, (), {}, None)
            self._entered -= 1

    # Parameters used outside of their modules

    def register_external(self, module: nn.Module, unit: Unit) -> None:
        """Gather ``unit`` ahead of each forward pass of ``module``, and release it after."""
        if module not in self._external:
            self._external[module] = []
            module.register_forward_pre_hook(self._pre_external)  # after the engine's own
            module.register_forward_hook(self._post_external, always_call=True)
        if (index := self._units.index(unit)) not in self._external[module]:
            self._external[module].append(index)

    def _pre_external(self, module: nn.Module, _: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # then uses bring what they need
        fresh = [] if recomputing else [i for i in self._external[module] if not self._units[i].in_use]
        self._brought.append(fresh)
        for index in fresh:
            self._bring(index, self._phase())

    def _post_external(self, module: nn.Module, _: Any, output: Any) -> None:
        addresses = {memory_of(tensor) for tensor in tensors_in(output)}
        kept = self._kept if torch.is_grad_enabled() else ()
        for index in self._brought.pop() if self._brought else ():  # none if an earlier hook failed
            if self._units[index].flat.bounds[0] not in addresses:
                self._escaped.discard(index)
                if index not in kept:
                    self._units[index].release()

    def _bring(self, index: int, phase: Phase) -> None:
        """Gather a unit that is used outside of its module; it stays until the forward pass ends."""
        self._escaped.add(index)
        self._carry_out((Action("wait", index),), phase)

    def _user(self, index: int) -> Callable[[str], None]:
        reference = weakref.ref(self)

        def used(name: str) -> None:
            hooks = reference()
            if hooks is None:
                raise ZeroError(f"parameter {name!r} of a sharded model whose engine is gone")
            hooks._use(index, name)  # noqa: SLF001  # its own

        return used

    def _use(self, index: int, name: str) -> None:
        """A parameter is used while its unit is not shown: in a pass it is gathered, else refused."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # computed again, inside a backward pass
            self._carry_out((Action("wait", index),), "backward")
        elif self._running:
            self._bring(index, self._phase())
        else:
            raise ZeroError(
                f"parameter {name!r} is used outside of a forward pass, where its values are sharded: read "
                "or change it under GatheredParameters; gradients are the masters' "
                "(Zero.clip_grad_norm_(), impl.parameters.access)"
            )

    # Backward

    # Hooks of autograd hold this object weakly: torch keeps them where Python's garbage collector
    # cannot look.

    def _arrival(self, module: nn.Module) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)

        def arrive(_: Tensor) -> None:
            hooks = reference()
            if hooks is not None:
                hooks._arrive(module)  # noqa: SLF001  # its own hook

        return arrive

    def _arrive(self, module: nn.Module) -> None:
        """The gradient of one of ``module``'s outputs is there."""
        if torch.is_grad_enabled():
            raise ZeroError("create_graph=True: gradients of gradients are not supported")
        self._in_backward = self._unfinished = True
        for index in self._of_module[module]:
            self._carry_out(self._schedule.pre_backward(index), "backward")
            unit = self._units[index]
            if unit.geometry.trainable and not unit.gradients.armed and index not in self._reductions.started:
                unit.gradients.arm()

    def _collector(self, index: int, number: int, *, outside: bool = False) -> Callable[[Tensor], None]:
        reference = weakref.ref(self)

        def collect(_: Tensor) -> None:
            hooks = reference()
            assert hooks is not None  # noqa: S101  # its model is in use
            (hooks._collect_outside if outside else hooks._collect)(index, number)  # noqa: SLF001  # its own

        return collect

    def _collect_outside(self, index: int, number: int) -> None:
        """A gradient arrived at a placeholder; see :meth:`Unit.collect_outside`."""
        if index in self._reductions.started and self._units[index].members[number].whole is None:
            self._next_pass()
        self._units[index].collect_outside(number)
        self._in_backward = self._unfinished = True

    def _collect(self, index: int, number: int) -> None:
        self._in_backward = self._unfinished = True
        if index in self._reductions.started:
            self._next_pass()
        if not self._units[index].gradients.begun:  # the first of its unit: all ranks' reductions are here
            self._reductions.proceed()
        in_turn = not self.accumulating and self._reductions.next() == index
        if self._units[index].collect(number, in_turn=in_turn):
            self._carry_out(self._schedule.post_backward(index), "backward")

    def _next_pass(self) -> None:
        """A second backward pass began without finish_backward() in between."""
        raise ZeroError(
            "a gradient arrived for a unit that was already reduced: call finish_backward() after "
            "each backward pass; in reentrant checkpoints a parameter that is used twice brings its "
            "gradient in parts, so use_reentrant=False there"
        )

    # Between passes

    def finish(self) -> None:
        """End a backward pass: :meth:`impl.engine.engine.Zero.finish_backward`."""
        if not self._unfinished:
            raise ZeroError("finish_backward() without a backward pass before it")
        if self.accumulating:
            for unit in self._units:
                unit.gradients.end_pass()
        else:
            self._reductions.start_all()
        self._reductions.finish()
        with contextlib.ExitStack() as ending:
            ending.callback(self._end_backward)
            ending.callback(_release, self._units)
        if self._policy.order_every and self._finished % self._policy.order_every == 0:
            self._wire.check_order()

    def _end_backward(self) -> None:
        for unit in self._units:
            unit.master_shard.land()
        self._weights.trim()
        self._calls.clear()
        self._in_backward = self._unfinished = False
        self._clock.next_micro_batch()
        self._masters.arrived()
        self._finished += 1

    def drop(self) -> None:
        """Lead out of a pass that failed: :meth:`impl.engine.engine.Zero.drop_gradients`."""
        self._running = self._nested = 0
        self._brought.clear()
        if self._saved.active:
            self._saved.end()
        self._called_alone = None
        self._reductions.drop_failed()
        for unit in self._units:
            unit.gradients.drop()
            unit.reduction.clear_feedback()

    def accumulate(self, *, on: bool) -> None:
        """From here on backward passes add up locally, or reduce."""
        self.accumulating = on
        for unit in self._units:
            unit.gradients.accumulating = on

    def check_idle(self, what: str) -> None:
        """Refuse ``what`` inside a forward or backward pass.

        Raises:
            ZeroError: naming it.
        """
        if self._running or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            raise ZeroError(
                f"{what} inside a forward or backward pass, which gathers what it uses itself (a pass that "
                "was interrupted: call drop_gradients())"
            )

    def check_finished(self, what: str) -> None:
        """Refuse ``what`` after a backward pass that was not finished.

        Raises:
            ZeroError: naming it.
        """
        if self._unfinished:
            raise ZeroError(f"{what} after a backward pass: call finish_backward() first")
        if any(unit.gradients.held for unit in self._units):
            raise ZeroError(
                f"{what} while gradients of accumulating() wait to be reduced: run the last micro-batch "
                "outside of it, or call drop_gradients()"
            )


def _release(units: Iterable[Unit]) -> None:
    """Release all of them in order, as :func:`_each`; an interrupt ends it, as each may wait for ranks."""
    _each((unit.release for unit in units), Exception)


def _each(steps: Iterable[Callable[[], None]], whatever: type[BaseException] = BaseException) -> None:
    """Take all steps in order, whatever fails in one; the first error is raised at the end.

    Where parameters were written in several, one error names them all.
    """
    failed: list[BaseException] = []
    for step in steps:
        try:
            step()
        except whatever as error:  # raised below
            failed.append(error)
    if not failed:
        return
    first = failed[0]
    if isinstance(first, WrittenError):
        written = (error for error in failed if isinstance(error, WrittenError))
        first = WrittenError(name for error in written for name in error.names)
    try:
        raise first
    finally:
        failed.clear()  # an error holds the frames that it passed, and this one holds the error
        del first
