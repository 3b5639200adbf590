"""Global optimizer hooks: tell an engine that its masters were stepped, and refuse optimizers that cannot be.

No version counter shows it (fused AdamW leaves it alone), so every optimizer's step is watched; the
masters that it holds tell whose weights it changed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from impl.engine.hooks import Hooks
from impl.errors import ZeroError
from impl.unit.unit import Unit

NOT_ELEMENTWISE: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


class Engine(Protocol):
    """Who is told of steps: :class:`impl.engine.engine.Zero`."""

    hooks: Hooks

    def check_step(self) -> None:
        """Refuse a step now."""

    def optimizer_stepped(self, masters: Iterable[Tensor]) -> None:
        """An optimizer that holds ``masters`` has stepped."""


class Owner(NamedTuple):
    """Whose a parameter is: its engine, its unit and its number there."""

    engine: Engine
    unit: Unit
    number: int


# Keyed by identity: tensors compare elementwise.
_owners: MutableMapping[Tensor, weakref.ref[Engine]] = WeakTensorKeyDictionary()
# What modules of sharded models show; units hold these tensors, so what is kept here holds no unit.
_visible: MutableMapping[Tensor, tuple[weakref.ref[Engine], weakref.ref[Unit], int]] = (
    WeakTensorKeyDictionary()
)
_lock = threading.Lock()
_watching: list[object] = []


def watch_optimizers(engine: Engine, units: Iterable[Unit]) -> None:
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


def _owners_of(optimizer: Optimizer) -> set[Engine]:
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
