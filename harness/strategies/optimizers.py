"""Builds a trial's optimizer by name, sets its learning rate, and measures the size of its state."""

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
    """Return an optimizer's bytes of state for each fp32 element, measured in a step on a small tensor.

    Raises:
        Refusal: if the optimizer cannot be built, or cannot take the step.
    """
    few = nn.Parameter(torch.zeros(64))
    few.grad = torch.zeros_like(few)
    stepping = build(optimizer, [few], unwrapped=True)
    with _raising(optimizer), torch.no_grad():
        stepping.step()
    with _raising(optimizer):  # a state of sparse tensors has no size in bytes
        return state_bytes(stepping, [few]) // few.numel()


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise a Refusal now if an optimizer is not elementwise; the engine would refuse it only at its first step."""
    if _kind(optimizer) not in ELEMENTWISE:
        few = nn.Parameter(torch.zeros(8, 8))
        if (why := why_not(build(optimizer, [few], unwrapped=True))) is not None:
            raise Refusal(f"optimizer.name = {optimizer.name!r} {why}")


def _kind(optimizer: Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of the trial's optimizer; raise a Refusal if there is no class of this name."""
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
    """Build the trial's optimizer.

    Args:
        optimizer: Name and arguments.
        parameters: Parameters or parameter groups.
        unwrapped: Call the bare methods, without torch's wrappers, which import torch's compiler (1.5 s).

    Raises:
        Refusal: if there is no such optimizer, or its arguments do not fit.
    """
    kind = _kind(optimizer)
    if unwrapped:
        methods = {"add_param_group": inspect.unwrap(kind.add_param_group), "step": bare_step(kind)}
        kind = type(kind.__name__, (kind,), methods)
    with _raising(optimizer):
        instance: torch.optim.Optimizer = kind(parameters, **cast("dict[str, Any]", optimizer.arguments))
    return instance


def set_rates(optimizer: torch.optim.Optimizer, schedule: Schedule | None, step: int) -> None:
    """Set the learning rate of every parameter group for optimizer step ``step``, counted from 0."""
    if schedule is None:
        return
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * schedule.factor(step)


def _is_optimizer(kind: object) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Return the bytes of the optimizer's state for ``parameters`` on this rank, without scalars (step counters)."""
    return sum(
        local_part(value).nbytes
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.dim() > 0
    )


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a ``DTensor``, or any other tensor as it is."""
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def _raising(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Turn any error of an optimizer into a Refusal."""
    return raising(Refusal, f"optimizer.arguments of {optimizer.name}:")
