"""Watches the optimizers of this process: a step changes weights, and some optimizers are refused.

No version counter shows that masters were stepped (fused AdamW leaves it alone), so every step is watched;
the masters that an optimizer holds tell whose weights it changes.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import utils
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from impl.errors import ZeroError
from impl.unit.placeholder import Placeholder

NOT_ELEMENTWISE: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})

_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # of :class:`~impl.engine.engine.Zero`
_lock = threading.Lock()


def watch_optimizers(engine: Any) -> None:
    """From now on steps of optimizers that hold masters of ``engine`` are reported to it."""
    with _lock:
        _watch()
        _engines.add(engine)


def engines() -> list[Any]:
    """All live engines."""
    with _lock:
        return list(_engines)


@functools.cache
def _watch() -> None:
    """Have torch call this file's hooks, and refuse what it would find in gradients of one rank's shards."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    # clip_grad_norm_() looks it up when called; torch has no hook there, and optimizers see it too late.
    torch_norm = clip_grad._get_total_norm  # noqa: SLF001

    @functools.wraps(torch_norm)
    def total_norm(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        held = {id(master.grad) for engine in engines() for master in engine.masters}
        if not held.isdisjoint(map(id, gradients)):
            raise ZeroError(
                "torch.nn.utils.clip_grad_norm_() of masters, which are this rank's shards: their norm is "
                "not the model's; use zero.step(max_norm=) or zero.clip_grad_norm_()"
            )
        return torch_norm(gradients, *args, **kwargs)

    clip_grad._get_total_norm = utils.get_total_norm = total_norm  # noqa: SLF001
    unscale = GradScaler._unscale_grads_  # steps and unscale_() look for overflows in it

    @functools.wraps(unscale)
    def unscale_grads(scaler: GradScaler, optimizer: Optimizer, *args: Any) -> Any:
        if _held(optimizer)[1]:
            raise ZeroError(
                "GradScaler of masters, which are this rank's shards: after an overflow ranks would skip "
                "different steps; use the policy's loss_scale and zero.step()"
            )
        return unscale(scaler, optimizer, *args)

    GradScaler._unscale_grads_ = unscale_grads  # type: ignore[assignment,method-assign]
    load = Optimizer.load_state_dict  # has hooks of one optimizer alone

    @functools.wraps(load)
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        check = None
        if _held(optimizer)[1]:  # a hook, as users' hooks, which run before it, may change the state
            check = optimizer.register_load_state_dict_pre_hook(_check_state)
        try:
            load(optimizer, state_dict)
        finally:
            if check is not None:
                check.remove()

    Optimizer.load_state_dict = load_state_dict  # type: ignore[assignment,method-assign]


def _check_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse, with a ZeroError, a state of other tensors than masters, past whose end a fused step writes."""
    saved, own = (
        [number for group in groups for number in group["params"]]
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    kind = type(optimizer)
    by_element = kind.__module__.startswith("torch.optim.")  # all their states but single numbers are
    for number, master in zip(saved, own, strict=False):  # torch compares how many there are
        for key, value in state_dict["state"].get(number, {}).items():
            if not isinstance(value, Tensor) or not value.dim() or value.shape == master.shape:
                continue
            if by_element or value.dim() > 1:  # masters have one dimension
                raise ZeroError(
                    f"load_state_dict() of {kind.__name__}: {key!r} is {tuple(value.shape)} for a master of "
                    f"{master.numel()} elements, this rank's shard: it is of a whole model, or of another "
                    "layout; use impl.checkpoint.save_load.load(), or impl.parameters.access.OptimizerState"
                )


def _held(optimizer: Optimizer) -> tuple[set[int], list[Any]]:
    """The tensors of an optimizer, by :func:`id`, and the engines with masters among them."""
    held = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held.add(id(parameter))
            if isinstance(parameter, Placeholder):
                raise ZeroError(
                    f"{type(optimizer).__name__} holds parameters of a sharded model, which it cannot "
                    "change: construct it with Zero.param_groups()"
                )
    return held, [engine for engine in engines() if not held.isdisjoint(engine.masters.numbers)]


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    names = {kind.__name__ for kind in type(optimizer).__mro__} & NOT_ELEMENTWISE
    for engine in _held(optimizer)[1]:
        if names:
            raise ZeroError(f"{names.pop()} is not elementwise: on shards it would be another algorithm")
        engine.hooks.check_finished("optimizer.step()")
        engine.check_hidden("optimizer.step()")


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    held, stepped = _held(optimizer)
    for engine in stepped:
        engine.optimizer_stepped(held)
