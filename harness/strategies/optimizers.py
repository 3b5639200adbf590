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
from impl.errors import raising
from impl.named_object import NamedObjectError, import_object
from impl.plan.learning_rate import Schedule
from impl.plan.memory import ADAM_BYTES


def with_state(parts: dict[str, int], size: int) -> dict[str, int]:
    """``impl.plan.memory.memory``'s bytes by part, for ``size`` bytes of optimizer state an element."""
    return parts | {part: size * (parts[part] // ADAM_BYTES) for part in ("optimizer", "host_optimizer")}


def state_bytes_per_element(optimizer: Optimizer) -> int:
    """State bytes of an optimizer per fp32 element, by a step of a small tensor; a Refusal if it cannot."""
    few = nn.Parameter(torch.zeros(64))
    stepping = _stepped(optimizer, few, [torch.zeros_like(few)])
    with _raising(optimizer):  # of tensors without bytes, such as sparse ones
        return state_bytes(stepping, [few]) // few.numel()


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse a user's own optimizer whose three steps on halves differ from those on the whole."""
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 64, generator=draw)
    whole = nn.Parameter(start.clone())
    _stepped(optimizer, whole, gradients)
    for half in (slice(0, 32), slice(32, 64)):
        part = nn.Parameter(start[half].clone())
        _stepped(optimizer, part, [gradient[half].clone() for gradient in gradients])
        if not torch.allclose(part, whole[half], rtol=1e-5, atol=1e-6, equal_nan=True):
            off = float((part - whole[half]).abs().max().detach())
            why = f"optimizer.name = {optimizer.name!r} is not elementwise and would be another algorithm on"
            raise Refusal(f"{why} shards: 3 steps on half of 64 elements are {off:.3g} off those on all")


def _stepped(
    optimizer: Optimizer, parameter: nn.Parameter, gradients: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """The optimizer after a step with each gradient."""
    stepping = build(optimizer, [parameter], unwrapped=True)
    for gradient in gradients:
        parameter.grad = gradient
        with _raising(optimizer), torch.no_grad():
            stepping.step()
    return stepping


def build(
    optimizer: Optimizer, parameters: Iterable[Any], *, unwrapped: bool = False
) -> torch.optim.Optimizer:
    """Build the trial's optimizer, or raise a Refusal; ``unwrapped`` imports no compiler, 1.5 s faster."""
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
    if unwrapped:
        methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step")}
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
