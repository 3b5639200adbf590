"""Builds optimizers by name, sets their learning rates, and measures their state per element."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from harness.errors import Refusal, suggestion
from harness.suites.trial import Optimizer
from impl.engine.elementwise_probe import ELEMENTWISE, bare_step, why_not
from impl.errors import raising
from impl.named_object import NamedObjectError, import_object
from impl.plan.learning_rate import Schedule


def state_bytes_per_element(optimizer: Optimizer) -> int:
    """State bytes of an optimizer per fp32 element, by a step of a small tensor; a Refusal if it cannot."""
    few = nn.Parameter(torch.zeros(64))
    few.grad = torch.zeros_like(few)
    stepping = build(optimizer, [few], unwrapped=True)
    with _raising(optimizer), torch.no_grad():
        stepping.step()
    with _raising(optimizer):  # of tensors without bytes, such as sparse ones
        return state_bytes(stepping, [few]) // few.numel()


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that the engine would refuse at its first step, as not elementwise."""
    if _kind(optimizer) not in ELEMENTWISE:
        few = nn.Parameter(torch.zeros(8, 8))
        if (why := why_not(build(optimizer, [few], unwrapped=True))) is not None:
            raise Refusal(f"optimizer.name = {optimizer.name!r} {why}")


def _kind(optimizer: Optimizer) -> type[torch.optim.Optimizer]:
    """The class of the trial's optimizer; a Refusal if there is none of its name."""
    try:
        user_class = import_object(optimizer.name) if ":" in optimizer.name else None
    except NamedObjectError as error:
        raise Refusal(f"optimizer.name = {error}") from error
    kind = user_class or getattr(torch.optim, optimizer.name, None)
    if not _is_optimizer(kind):
        known = [name for name, attribute in vars(torch.optim).items() if _is_optimizer(attribute)]
        unknown = f"torch.optim has no such optimizer{suggestion(optimizer.name, known)}"
        derived = "expected a class derived from torch.optim.Optimizer"
        raise Refusal(f"optimizer.name = {optimizer.name!r}: {derived if ':' in optimizer.name else unknown}")
    return kind


def build(
    optimizer: Optimizer, parameters: Iterable[Any], *, unwrapped: bool = False
) -> torch.optim.Optimizer:
    """Build the trial's optimizer, or raise a Refusal; ``unwrapped`` imports no compiler, 1.5 s faster."""
    kind = _kind(optimizer)
    if unwrapped:
        methods = {"add_param_group": inspect.unwrap(kind.add_param_group), "step": bare_step(kind)}
        kind = type(kind.__name__, (kind,), methods)
    with _raising(optimizer):
        instance: torch.optim.Optimizer = kind(parameters, **cast("dict[str, Any]", optimizer.arguments))
    return instance


def set_rates(optimizer: torch.optim.Optimizer, schedule: Schedule | None, step: int) -> None:
    """Give every group of an optimizer the learning rate of step ``step``, from 0."""
    if schedule is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule.factor(step)


def _is_optimizer(kind: object) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Bytes of the optimizer's per-element state of ``parameters``; its step counters are not counted."""
    return sum(
        local_part(value).nbytes
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.dim() > 0
    )


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a ``DTensor``; any other tensor as it is."""
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def _raising(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Turn any error of an optimizer into a Refusal."""
    return raising(Refusal, f"optimizer.arguments of {optimizer.name}:")
