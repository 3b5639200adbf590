"""Hooks on gradients that gather units again, collect their gradients, and reduce them.

Hooks of autograd hold their object weakly: torch keeps them where Python's garbage collector cannot look.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from impl.engine.optimizer_masters import Masters
from impl.engine.schedule_executor import Actions
from impl.errors import WrittenError, ZeroError
from impl.pytree import tensors_in
from impl.unit.context import UnitContext


class BackwardHooks:
    """The backward passes of one sharded model on one rank.

    Args:
        of_module: indices of the units that travel with a module.
        masters: told when new gradients are there.

    Attributes:
        finished: backward passes so far.
    """

    def __init__(
        self,
        model: nn.Module,
        of_module: Mapping[nn.Module, Sequence[int]],
        actions: Actions,
        context: UnitContext,
        masters: Masters,
    ) -> None:
        self._model, self._of_module, self._actions, self._masters = model, of_module, actions, masters
        self._units, self._wire, self._weights = actions.units, context.wire, context.weights
        self._clock, self._check_every = context.clock, context.policy.order_every
        self._calls: dict[nn.Module, int] = {}  # forward calls whose backward is to come
        self._unfinished = False
        self.finished = 0
        for index, unit in enumerate(self._units):
            if unit.geometry.trainable:
                for number, member in enumerate(unit.members):
                    inside = _weakly(self._collect, index, number, needed=True)
                    outside = _weakly(self._collect_outside, index, number, needed=True)
                    for leaf, hook in ((member.parameter, inside), (member.placeholder, outside)):
                        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # asks for no values
                            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    # Set by a forward pass

    def begin_forward(self) -> None:
        """A forward pass of the model begins.

        Raises:
            ZeroError: after a backward pass that was not finished; for parameters that were frozen since.
        """
        if self._unfinished:
            raise ZeroError(
                "a forward pass after a backward pass that was not finished: call finish_backward() "
                "(and drop its gradients with optimizer.zero_grad() if the backward pass failed)"
            )
        for unit in self._units:
            unit.check_flags()
        self._calls.clear()

    def reshard_after(self, module: nn.Module, inputs: Any) -> None:
        """Once the gradients of a block's inputs are there, its weights are not needed any more.

        Units that count gradients are resharded before; this is for frozen and unused parameters.
        Leaves are left out: they outlive the pass, and so would the hook.
        """
        self._calls[module] = self._calls.get(module, 0) + 1
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.grad_fn is not None]
        if module is self._model or not tensors:
            return
        hook = _weakly(self._passed, module, [len(tensors)])
        for tensor in tensors:
            tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def gather_before(self, module: nn.Module, outputs: Iterable[Tensor]) -> None:
        """Gather a block's units again when the gradient of one of its outputs arrives."""
        hook = _weakly(self._arrive, module)
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    # Events

    def _arrive(self, module: nn.Module) -> None:
        """The gradient of one of ``module``'s outputs is there."""
        if torch.is_grad_enabled():
            raise ZeroError("create_graph=True: gradients of gradients are not supported")
        self._actions.in_backward = self._unfinished = True
        for index in self._of_module[module]:
            self._actions.carry_out(self._actions.schedule.pre_backward(index), "backward")
            unit, started = self._units[index], self._actions.reductions.started
            if unit.geometry.trainable and not unit.gradients.armed and index not in started:
                unit.gradients.arm()

    def _passed(self, module: nn.Module, left: list[int]) -> None:
        """Of the gradients of the inputs of one call of ``module``, ``left`` were to come; one is there."""
        left[0] -= 1
        if left[0]:
            return
        self._calls[module] = self._calls.get(module, 1) - 1
        if self._calls[module] == 0:
            for index in self._of_module[module]:
                self._units[index].release()

    def _collect_outside(self, index: int, number: int) -> None:
        """A gradient arrived at a placeholder; see :meth:`Unit.collect_outside`."""
        if index in self._actions.reductions.started and self._units[index].members[number].whole is None:
            _refuse_next_pass()
        self._units[index].collect_outside(number)
        self._actions.in_backward = self._unfinished = True

    def _collect(self, index: int, number: int) -> None:
        """A gradient arrived at a parameter."""
        self._actions.in_backward = self._unfinished = True
        actions, reductions = self._actions, self._actions.reductions
        if index in reductions.started:
            _refuse_next_pass()
        if not self._units[index].gradients.begun:  # the first of its unit: all ranks' reductions are here
            reductions.proceed()
        in_turn = not actions.accumulating and reductions.next() == index
        if self._units[index].collect(number, in_turn=in_turn):
            actions.carry_out(actions.schedule.post_backward(index), "backward")

    # Between passes

    def accumulate(self, *, on: bool) -> None:
        """From here on backward passes add up locally, or reduce."""
        self._actions.accumulating = on
        for unit in self._units:
            unit.gradients.accumulating = on

    def finish(self) -> None:
        """End a backward pass: :meth:`impl.engine.engine.Zero.finish_backward`."""
        if not self._unfinished:
            raise ZeroError("finish_backward() without a backward pass before it")
        if self._actions.accumulating:
            for unit in self._units:
                unit.gradients.end_pass()
        else:
            self._actions.reductions.start_all()
        self._actions.reductions.finish()
        with contextlib.ExitStack() as ending:
            ending.callback(self._end)
            ending.callback(each, (unit.release for unit in self._units))
        if self._check_every and self.finished % self._check_every == 0:
            self._wire.check_order()

    def _end(self) -> None:
        for unit in self._units:
            unit.master_shard.land()
        self._weights.trim()
        self._calls.clear()
        self._actions.in_backward = self._unfinished = False
        self._clock.next_micro_batch()
        self._masters.arrived()
        self.finished += 1

    def drop(self) -> None:
        """Forget local gradients and reductions that failed."""
        self._actions.reductions.drop_failed()
        for unit in self._units:
            unit.gradients.drop()
            unit.reduction.clear_feedback()

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


def _weakly(method: Callable[..., None], *args: Any, needed: bool = False) -> Callable[[Tensor], None]:
    """A hook on a gradient, which holds the object of ``method`` weakly.

    Once that is gone there is nothing to do: what an old graph saved finds its weights by itself.  A hook
    that is ``needed`` refuses then, as the gradient would be lost.
    """
    reference = weakref.WeakMethod(method)

    def hook(_: Tensor) -> None:
        found = reference()
        if found is not None:
            found(*args)
        elif needed:
            raise ZeroError("a gradient arrived for a sharded model whose engine is gone")

    return hook


def _refuse_next_pass() -> None:
    """Refuse a second backward pass without finish_backward() in between."""
    raise ZeroError(
        "a gradient arrived for a unit that was already reduced: call finish_backward() after "
        "each backward pass; in reentrant checkpoints a parameter that is used twice brings its "
        "gradient in parts, so use_reentrant=False there"
    )


def each(steps: Iterable[Callable[[], None]]) -> None:
    """Take all steps in order, whatever fails in one; the first error is raised at the end.

    Where parameters were written in several, one error names them all.
    """
    failed: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:  # raised below
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
