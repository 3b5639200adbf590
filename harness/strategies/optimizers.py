"""Builds optimizers of ``torch.optim`` by name, and measures their state per element.

Separate from ``strategies`` so that ``zeropp plan`` imports neither the engine nor peers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from harness.errors import Refusal, suggestion
from harness.suites.trial import Optimizer
from impl.plan.traffic import ADAM_BYTES


def with_state(parts: dict[str, int], size: int) -> dict[str, int]:
    """``impl.plan.traffic.memory``'s bytes by part, for ``size`` bytes of optimizer state an element."""
    return parts | {part: size * (parts[part] // ADAM_BYTES) for part in ("optimizer", "host_optimizer")}


def state_bytes_per_element(optimizer: Optimizer) -> int:
    """State bytes of an optimizer per fp32 element, measured by stepping a small tensor.

    Raises:
        Refusal: for an optimizer that cannot be built or cannot step.
    """
    few = nn.Parameter(torch.zeros(64))
    few.grad = torch.zeros_like(few)
    stepping = built(optimizer, [few], unwrapped=True)
    try:
        with torch.no_grad():
            stepping.step()
    except Exception as error:
        raise _refusal(optimizer, error) from error
    return state_bytes(stepping, [few]) // few.numel()


def built(
    optimizer: Optimizer, parameters: Iterable[Any], *, unwrapped: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer that a trial names, over ``parameters`` or groups of them.

    ``unwrapped``, it lacks torch's wrappers, which import its compiler: 1.5 s.

    Raises:
        Refusal: if torch has none of that name, or its arguments do not fit.
    """
    kind = getattr(torch.optim, optimizer.name, None)
    if not _is_optimizer(kind):
        known = [name for name, one in vars(torch.optim).items() if _is_optimizer(one)]
        near = suggestion(optimizer.name, known)
        raise Refusal(f"optimizer.name = {optimizer.name!r}: torch.optim has no such optimizer{near}")
    if unwrapped:
        methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step")}
        kind = type(kind.__name__, (kind,), methods)
    try:
        made: torch.optim.Optimizer = kind(parameters, **cast("dict[str, Any]", optimizer.arguments))
    except Exception as error:  # each checks its arguments in its own way
        raise _refusal(optimizer, error) from error
    return made


def _is_optimizer(thing: object) -> TypeGuard[type[torch.optim.Optimizer]]:
    return isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer)


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


def _refusal(optimizer: Optimizer, error: Exception) -> Refusal:
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Refusal(f"optimizer.arguments of {optimizer.name}: {words}")
