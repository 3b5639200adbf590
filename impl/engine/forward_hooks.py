"""Hooks on modules that gather and reshard units during forward passes.

They report events of the model's units to the :class:`~impl.plan.prefetch_schedule.Schedule`, and
:mod:`impl.engine.schedule_executor` carries out what it answers; backward passes are
:mod:`impl.engine.backward_hooks`'.  Nothing here knows ZeRO++'s techniques by name: they are values of the
policy.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from impl.codecs.reference import DTYPES
from impl.engine.backward_hooks import BackwardHooks, each
from impl.engine.module_buffers import ModuleBuffers
from impl.engine.optimizer_hooks import find
from impl.engine.optimizer_masters import Masters
from impl.engine.schedule_executor import Actions
from impl.errors import ZeroError
from impl.plan.prefetch_schedule import Action
from impl.pytree import cast_tensors, memory_of, tensors_in
from impl.unit.context import UnitContext
from impl.unit.unit import Unit


class Hooks:
    """The passes of one sharded model on one rank, one after the other.

    Args:
        units: the root's first, then in model order.
        modules: of each unit, the module that it travels with.
        buffers: of the model; made equal before a forward pass.
        casts_inputs: whether the model was given in another type than it computes in.
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
        self._model, self._units, self._module_buffers = model, units, buffers
        self._inputs = DTYPES[context.policy.compute] if casts_inputs else None  # what inputs are cast to
        self._of_module: dict[nn.Module, list[int]] = {}
        for index, module in enumerate(modules):
            self._of_module.setdefault(module, []).append(index)
        self.actions = Actions(units, context)
        self.backward = BackwardHooks(model, self._of_module, self.actions, context, masters)
        self.outside = OutsideUses(self.actions)
        # Units in the order they ran; None once it is known, and where it is the model's.
        self._seen: list[int] | None = None if self.actions.schedule.in_model_order else []
        self._nested = 0  # calls of the model inside one of it
        self._entered = 0  # calls of the model by other ways than its forward
        self._called_alone: nn.Module | None = None
        self._parts = _parts(model)
        for module in dict.fromkeys((model, *self._of_module)):
            # A compiler computes what lies between the hooks; traced, they would be what they did once.
            before = torch.compiler.disable(self._pre_forward)  # type: ignore[no-untyped-call]
            after = torch.compiler.disable(self._post_forward)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after, with_kwargs=True, always_call=True)

    # Before a module runs

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        actions, recomputing = self.actions, _recomputing()
        alone = not actions.running and module is not self._model and not recomputing
        root = module is self._model and not recomputing
        nested = root and actions.running > 0 and self._is_called()
        actions.running += 1  # first: the hook after this call takes it back, whatever is refused here
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
        if self._inputs is not None:
            changed = args, kwargs = cast_tensors(args, self._inputs), cast_tensors(kwargs, self._inputs)
        training = torch.is_grad_enabled() and not recomputing
        if training and not actions.saved.active:
            actions.saved.begin()  # a block that is called by itself, outside the model's forward pass
            self._called_alone = module
        for index in self._of_module.get(module, ()):
            if recomputing:  # gather what was resharded, and look no further
                actions.carry_out((Action("wait", index),), "backward")
                continue
            if self._seen is not None and index not in actions.schedule.outer and index not in self._seen:
                self._seen.append(index)
            actions.carry_out(actions.schedule.pre_forward(index), actions.phase)
        if training and self._of_module.get(module):
            self.backward.reshard_after(module, (args, kwargs))
        return changed

    def _is_called(self) -> bool:
        """Whether a call of the model is under way around this one: no hook is told of interrupted ones."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        calls = self._entered
        while frame is not None:
            code, around = frame.f_code, frame.f_back
            calls += code is nn.Module._call_impl.__code__ and frame.f_locals["self"] is self._model  # noqa: SLF001
            frame = around
        return calls > 1

    def _begin_forward(self) -> None:
        """A forward pass of the model begins."""
        actions = self.actions
        actions.running, self._nested = 1, 0
        actions.in_forward = False  # until nothing is refused any more
        for unit in self._units:
            unit.check_held()
        self._check_attached()
        self._module_buffers.make_equal()
        if torch.is_grad_enabled():
            self._module_buffers.changed()
            self.backward.begin_forward()
            actions.saved.begin()
        actions.escaped.clear()
        actions.in_forward = True
        if self._seen is not None:
            self._seen = []

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
        self._parts = _parts(self._model)

    # After it has run

    def _post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        actions = self.actions
        actions.running -= 1
        if _recomputing():  # kept until its backward
            return
        outputs = list(tensors_in(output))
        nested = module is self._model and self._nested > 0
        self._nested -= nested
        indices = () if nested else self._of_module.get(module, ())
        kept = actions.schedule.kept
        if module is not self._model:
            kept = kept.intersection(indices)
        if not _backward_follows(outputs) or any(self._units[index].written() for index in kept):
            kept = frozenset()
        ends: list[Callable[[], None]] = [partial(self._end_unit, index, outputs, kept) for index in indices]
        if module is self._model and not nested:
            if outputs:  # nothing was raised
                ends.append(partial(actions.gather_before, -1, actions.phase))
            ends.append(partial(self._end_forward, outputs, kept))
        if module is self._called_alone:
            ends.append(self._end_alone)
        each(ends)
        if torch.is_grad_enabled() and self._of_module.get(module):
            self.backward.gather_before(module, outputs)

    def _end_unit(self, index: int, outputs: Sequence[Tensor], kept: Collection[int]) -> None:
        """The module of this unit has run in a forward pass; ``kept`` units stay for its backward pass."""
        unit, actions = self._units[index], self.actions
        address = unit.flat.bounds[0]
        if unit.gathered and any(memory_of(tensor) == address for tensor in outputs):
            actions.escaped.add(index)  # a returned parameter (Megatron's bias) is used outside
        actions.carry_out(actions.schedule.post_forward(index, training=index in kept), actions.phase)

    def _end_alone(self) -> None:
        """A block that was called by itself has run."""
        self.actions.saved.end()
        self._called_alone = None

    def _end_forward(self, outputs: Sequence[Tensor], kept: Collection[int]) -> None:
        """The model has run; ``kept`` units stay for its backward pass."""
        actions = self.actions
        actions.in_forward = False
        actions.saved.end()
        if self._seen is not None:
            actions.follow(self._seen)
            self._seen = None
        addresses = {memory_of(tensor) for tensor in outputs}
        actions.escaped.clear()
        each(  # gathered ahead and not used, or returned by a module
            unit.release
            for index, unit in enumerate(self._units)
            if index not in kept and not (unit.gathered and unit.flat.bounds[0] in addresses)
        )

    # Other ways to run

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
            self.actions.gather_before(-1, self.actions.phase)
        finally:
            self._post_forward(self._model, (), {}, None)
            self._entered -= 1

    def drop(self) -> None:
        """Lead out of a pass that failed: :meth:`impl.engine.engine.Zero.drop_gradients`."""
        self.actions.running = 0
        self.outside.brought.clear()
        if self.actions.saved.active:
            self.actions.saved.end()
        self._called_alone = None
        self.backward.drop()

    def check_idle(self, what: str) -> None:
        """Refuse ``what`` inside a forward or backward pass.

        Raises:
            ZeroError: naming it.
        """
        if self.actions.running or _recomputing():
            raise ZeroError(
                f"{what} inside a forward or backward pass, which gathers what it uses itself (a pass that "
                "was interrupted: call drop_gradients())"
            )


class OutsideUses:
    """Uses of parameters outside of the modules that hold them."""

    def __init__(self, actions: Actions) -> None:
        self._actions, self._units = actions, actions.units
        self._external: dict[nn.Module, list[int]] = {}  # units that a module uses beside its own
        self.brought: list[list[int]] = []  # of those, what calls under way have gathered
        for index, unit in enumerate(self._units):
            unit.used_outside = self._user(index)

    def register(self, module: nn.Module, unit: Unit) -> None:
        """Gather ``unit`` ahead of each forward pass of ``module``, and reshard it after."""
        if module not in self._external:
            self._external[module] = []
            module.register_forward_pre_hook(self._pre_forward)  # after the engine's own
            module.register_forward_hook(self._post_forward, always_call=True)
        if (index := self._units.index(unit)) not in self._external[module]:
            self._external[module].append(index)

    def _pre_forward(self, module: nn.Module, _: Any) -> None:
        # While a block is computed again, uses bring what they need.
        fresh = [] if _recomputing() else [i for i in self._external[module] if not self._units[i].in_use]
        self.brought.append(fresh)
        for index in fresh:
            self._actions.bring(index, self._actions.phase)

    def _post_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        addresses = {memory_of(tensor) for tensor in tensors_in(output)}
        for index in self.brought.pop() if self.brought else ():  # none if an earlier hook failed
            if self._units[index].flat.bounds[0] not in addresses:
                self._actions.escaped.discard(index)
                if index not in self._actions.stays:
                    self._units[index].release()

    def _user(self, index: int) -> Callable[[str], None]:
        reference = weakref.ref(self)

        def used(name: str) -> None:
            uses = reference()
            if uses is None:
                raise ZeroError(f"parameter {name!r} of a sharded model whose engine is gone")
            uses._use(index, name)  # noqa: SLF001  # its own

        return used

    def _use(self, index: int, name: str) -> None:
        """A parameter is used while its unit is not shown: in a pass it is gathered, else refused."""
        if _recomputing():
            self._actions.carry_out((Action("wait", index),), "backward")
        elif self._actions.running:
            self._actions.bring(index, self._actions.phase)
        else:
            raise ZeroError(
                f"parameter {name!r} is used outside of a forward pass, where its values are sharded: read "
                "or change it under GatheredParameters; gradients are the masters' "
                "(Zero.clip_grad_norm_(), impl.parameters.access)"
            )


def _backward_follows(outputs: Iterable[Tensor]) -> bool:
    """Whether what a forward pass returned can be differentiated; it returns nothing if it failed."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in outputs)


def _recomputing() -> bool:
    """Whether this runs inside a backward pass: a block is computed again."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001  # there is no public one


def _parts(model: nn.Module) -> list[tuple[nn.Module, dict[str, nn.Module | None], list[str]]]:
    """All modules, with their children and the names of their parameters."""
    return [(part, dict(part._modules), list(part._parameters)) for part in model.modules()]  # noqa: SLF001
