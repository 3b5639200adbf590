"""Builds optimizers of ``torch.optim`` by name, and measures their state per element.

Separate from ``strategies`` so that ``zeropp plan`` imports neither the engine nor peers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from harness.errors import Refusal
from harness.suites.trial import Optimizer
from impl.plan.geometry import UnitGeometry
from impl.plan.policy import Policy
from impl.plan.topology import Topology
from impl.plan.traffic import ADAM_BYTES, memory


def predicted_memory(
    policy: Policy,
    topology: Topology,
    units: Sequence[UnitGeometry],
    optimizer: Optimizer,
    *,
    micro_batches: int,
) -> dict[str, int]:
    """Bytes of one rank by part, as ``impl.plan.traffic`` predicts them for the trial's optimizer."""
    parts = memory(policy, topology, units, micro_batches=micro_batches)
    size = state_bytes_per_element(optimizer)
    states = {part: size * (parts[part] // ADAM_BYTES) for part in ("optimizer", "host_optimizer")}
    return {**parts, **states}


def state_bytes_per_element(optimizer: Optimizer) -> int:
    """State bytes of an optimizer per fp32 element, measured by stepping a small tensor.

    Raises:
        Refusal: for an optimizer that cannot be built or cannot step.
    """
    few = nn.Parameter(torch.zeros(64))
    few.grad = torch.zeros_like(few)
    stepping = _built(_unwrapped(_kind(optimizer)), optimizer, [few])
    try:
        with torch.no_grad():
            stepping.step()
    except Exception as error:
        raise _refusal(optimizer, error) from error
    return state_bytes(stepping, [few]) // few.numel()


def built(optimizer: Optimizer, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Build the optimizer that a trial names, over ``parameters`` or groups of them.

    Raises:
        Refusal: if torch has none of that name, or its arguments do not fit.
    """
    return _built(_kind(optimizer), optimizer, parameters)


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


def _kind(optimizer: Optimizer) -> type[torch.optim.Optimizer]:
    kind = getattr(torch.optim, optimizer.name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise Refusal(f"optimizer.name = {optimizer.name!r}: torch.optim has no such optimizer")
    return kind


def _unwrapped(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The optimizer class without torch's wrappers, which import its compiler: 1.5 s."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step")}
    return type(kind.__name__, (kind,), methods)


def _built(
    kind: type[torch.optim.Optimizer], optimizer: Optimizer, parameters: Iterable[Any]
) -> torch.optim.Optimizer:
    try:
        return kind(parameters, **cast("dict[str, Any]", optimizer.arguments))
    except Exception as error:  # each checks its arguments in its own way
        raise _refusal(optimizer, error) from error


def _refusal(optimizer: Optimizer, error: Exception) -> Refusal:
    words = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Refusal(f"optimizer.arguments of {optimizer.name}: {words}")
