"""Watches all torch optimizers of this process, so that engines learn when their masters are stepped.

An engine's masters are its rank's fp32 shards of the parameters; an optimizer steps the masters, not the parameters.
An engine cannot detect a step by the version counters of its masters, because fused AdamW does not increment them.
Therefore hooks run before and after every optimizer's step.  The hooks find the engines whose masters the optimizer
holds, and report the step to these engines.  The hooks also refuse an optimizer that is not elementwise: an optimizer
that does not step each element of a tensor independently of the other elements.

Some functions of torch would treat one rank's masters as if they were the whole model: ``clip_grad_norm_()``,
``GradScaler`` and the loading of a state dict of another layout.  Each of these functions is replaced by a guard, which
raises an error if it gets masters, and otherwise calls the original function.  Hooks and guards are removed when no
engine is left.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from impl.engine.elementwise_probe import ELEMENTWISE, why_not
from impl.errors import ZeroError
from impl.transport.threads import ThreadRank, current, here
from impl.unit.placeholder import Placeholder

# The live engines, in order of creation.  If ranks are threads of this process, each rank has a table of its own, so
# that 128 ranks do not search one another's engines.
_engines: defaultdict[ThreadRank | None, weakref.WeakValueDictionary[int, Any]]
_engines = defaultdict(weakref.WeakValueDictionary)
_numbers = itertools.count()
# The optimizers that were found elementwise, each with the values of its boolean and text options at that time.
_tried: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
# Reentrant, because a garbage collection may end an engine and call _release() while this thread holds the lock.
_lock = threading.RLock()


def watch_optimizers(engine: Any) -> None:
    """Register ``engine``, so that it learns of each step of an optimizer that holds its masters (fp32 weights)."""
    with _lock:
        _engines[current()][next(_numbers)] = engine
        _watch()
    weakref.finalize(engine, _release).atexit = False


def engines() -> list[Any]:
    """Return all engines that still exist, in the order of their creation, which is the same on all ranks.

    If ranks are threads of one process, only the engines of the calling thread's rank are returned.
    """
    with _lock:
        if (rank := getattr(here, "rank", None)) is not None:  # current() would be another call in every step
            return list(_engines[rank].values()) if rank in _engines else []
        return [engine for each in list(_engines.values()) for engine in each.values()]


def engines_of(optimizers: Iterable[Optimizer]) -> list[Any]:
    """Return the existing engines whose masters (fp32 weights) the optimizers hold, in the order of their creation.

    Raises:
        ZeroError: for an object that is no ``torch.optim.Optimizer``.
    """
    optimizers = list(optimizers)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ZeroError(
                f"got a {type(optimizer).__name__} in place of an optimizer, and its tensors are not known: pass a "
                "torch.optim.Optimizer; if this object wraps an optimizer, pass the wrapped optimizer"
            )
    held = {id(tensor) for o in optimizers for group in o.param_groups for tensor in group["params"]}
    return [engine for engine in engines() if not held.isdisjoint(engine.masters.numbers)]


# Changes to torch while there are engines


class _Guard(NamedTuple):
    """One change to torch: in the attribute ``name`` of ``owner``, the function ``guard`` replaces torch's function."""

    owner: Any
    name: str
    replaced: Callable[..., Any]  # torch's function
    guard: Callable[..., Any]


_handles: Final[list[RemovableHandle]] = []  # handles of the hooks on optimizers' steps
_guards: Final[list[_Guard]] = []  # in the order in which they were set
# The code of torch's wrapper around every optimizer's step(), which calls the hooks.
_STEP: Final = Optimizer.profile_hook_step(lambda: None).__code__


def _watch() -> None:
    """Install hooks on the steps of all optimizers, and replace some functions of torch by guards.

    A guard raises an error if it gets masters (a rank's fp32 weights), and otherwise calls the function of torch that
    it replaces.  Hooks and guards that are installed already are not installed a second time.
    """
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_after_step))
    for owner, name, guard_of in (
        # clip_grad_norm_() calls this function.  It is replaced because torch has no hook for clipping.  A check at
        # the optimizer's step would come too late.
        (clip_grad, "_get_total_norm", _guard_norm),
        (utils, "get_total_norm", _guard_norm),
        (GradScaler, "_unscale_grads_", _guard_unscaling),  # step() and unscale_() detect overflows there
        (Optimizer, "load_state_dict", _guard_loading),  # torch has hooks for it only on a single optimizer
    ):
        replaced = vars(owner)[name]
        if all(replaced is not guard.guard for guard in _guards):
            _guards.append(_Guard(owner, name, replaced, guard_of(replaced)))
            setattr(owner, name, _guards[-1].guard)


def _release() -> None:
    """If no engine is left, remove what :func:`_watch` has installed, so that torch is as it was before.

    :func:`_watch` installs guards, which are functions in place of torch's own.  Nothing is removed while a thread is
    inside an optimizer's step.  If other code has meanwhile put its own function in place of a guard, the guard is
    kept, because the other function may still call it.  Without engines, a guard passes all calls on to torch.
    """
    with _lock:
        for rank in [rank for rank, each in _engines.items() if not list(each.values())]:
            del _engines[rank]
        if _engines or _stepping():
            return
        while _handles:
            _handles.pop().remove()
        for guard in reversed(_guards.copy()):
            if vars(guard.owner)[guard.name] is guard.guard:
                setattr(guard.owner, guard.name, guard.replaced)
                _guards.remove(guard)


def _stepping() -> bool:
    """Return whether any thread is inside an optimizer's step.

    During a step, torch iterates over the hooks, and would fail if a hook were removed.  A garbage collection during
    the step may delete the last engine.  This deletion calls :func:`_release`, which must not remove the hooks before
    the step has ended.
    """
    for frame in sys._current_frames().values():  # noqa: SLF001  # documented in spite of its name
        inner: FrameType | None = frame
        while inner is not None:
            if inner.f_code is _STEP:
                return True
            inner = inner.f_back
    return False


def _guard_norm(torch_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(torch_norm)
    def total_norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return torch_norm(tensors, *args, **kwargs)
        if not (watched := engines()):
            _release()
            return torch_norm(tensors, *args, **kwargs)
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(master.grad) for engine in watched for master in engine.masters}
        if not held.isdisjoint(map(id, gradients)):
            raise ZeroError(
                "torch.nn.utils.clip_grad_norm_() got masters, which are this rank's shards: their norm is "
                "not the model's; use zero.step(max_norm=) or zero.clip_grad_norm_()"
            )
        return torch_norm(gradients, *args, **kwargs)

    return total_norm


def _guard_unscaling(unscale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(unscale)
    def unscale_grads(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not engines():
            _release()
        elif _held(optimizer)[1]:
            raise ZeroError(
                "GradScaler got an optimizer of masters, which are this rank's shards: it sees the overflows of this "
                "rank only, so ranks would skip different steps; use the policy's loss_scale and zero.step()"
            )
        return unscale(scaler, optimizer, *args, **kwargs)

    return unscale_grads


def _guard_loading(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        check = None
        if not engines():
            _release()
        elif _held(optimizer)[1]:
            # The check is a hook that runs last, because users' hooks may still change the state.
            check = optimizer.register_load_state_dict_pre_hook(_check_state)
        try:
            load(optimizer, state_dict)
        finally:
            if check is not None:
                check.remove()

    return load_state_dict


def _check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise a ZeroError if a tensor in ``state_dict`` does not have the size of the master (fp32 weights) to which it
    belongs.

    A fused optimizer step with such a tensor would read and write past the end of the tensor.
    """
    saved, own = (
        [number for group in groups for number in group["params"]]
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    kind = type(optimizer)
    # In torch's optimizers, every state that is not a single number has one value per element.
    by_element = kind.__module__.startswith("torch.optim.")
    for number, master in zip(saved, own, strict=False):  # torch itself compares the numbers of tensors
        for key, value in state_dict["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or not value.dim() or value.shape == master.shape:
                continue
            if by_element or value.dim() > 1:  # masters have one dimension
                raise ZeroError(
                    f"load_state_dict() of {kind.__name__} got {key!r} of shape {tuple(value.shape)}, but this rank's "
                    f"shard of the parameters has {master.numel()} elements: if this is the state of a whole model, or "
                    "of another layout, load it with zeropp.load_checkpoint() or zeropp.OptimizerState"
                )


# Hooks on optimizers' steps


def _held(optimizer: Optimizer) -> tuple[set[int], list[Any]]:
    """Return (ids, engines): the :func:`id` of an optimizer's tensors, and the engines whose masters are among them.

    Masters are the fp32 weights of a rank's shards.

    Raises:
        ZeroError: if the optimizer holds parameters of a sharded model instead of masters.
    """
    held = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held.add(id(parameter))
            if isinstance(parameter, Placeholder):
                raise ZeroError(
                    f"{type(optimizer).__name__} holds parameters of a sharded model, which an optimizer cannot "
                    "change: construct the optimizer with Zero.param_groups()"
                )
    return held, [engine for engine in engines() if not held.isdisjoint(engine.masters.numbers)]


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    engines_held = _held(optimizer)[1]
    if engines_held and type(optimizer) not in ELEMENTWISE:
        _check_elementwise(optimizer, closure=any(map(callable, (*args[1:], *kwargs.values()))))
    for engine in engines_held:
        engine.hooks.check_finished("optimizer.step()")
        engine.check_hidden("optimizer.step()")


def _check_elementwise(optimizer: Optimizer, *, closure: bool) -> None:
    """Raise a ZeroError if ``optimizer`` is not elementwise: if it does not step each element independently of others.

    An optimizer is tested at its first step, and again whenever an option that is a boolean or a text has changed.
    ``closure`` says whether the steps are called with a closure.
    """
    groups = optimizer.param_groups
    switches = [value for group in groups for value in group.values() if isinstance(value, bool | str)]
    if _tried.get(optimizer) != switches:
        if (why := why_not(optimizer, closure=closure)) is not None:
            raise ZeroError(f"{type(optimizer).__name__} {why}")
        _tried[optimizer] = switches


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    held, stepped = _held(optimizer)
    for engine in stepped:
        engine.optimizer_stepped(held)
