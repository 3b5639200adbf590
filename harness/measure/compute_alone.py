"""Measures computation by itself: the unsharded model on every rank at once, which send nothing.

One micro-batch forward and backward in the policy's compute type, in evaluation mode, and the optimizer's
step of a rank's share of the parameters; a barrier lets all ranks begin at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.measure.unsharded_loss import evaluating
from harness.records.record import Alone

MOST: Final = 5  # samples before, and after, the timed steps
_SHARE: Final = 8  # micro-batches of timed steps for each sample of either


def samples(micro_batches: int, when: Literal["before", "after"]) -> int:
    """Samples that are taken before, and after, so many micro-batches of timed steps."""
    share = micro_batches // _SHARE
    return min(MOST, share if when == "after" else max(2, share))


def measure(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    stepping: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    ranks: int,
    when: Literal["before", "after"],
    count: int,
) -> list[Alone]:
    """Time ``count`` micro-batches of the unsharded ``model``, which is left without gradients, and the
    optimizer that ``stepping`` makes of a rank's share; all ranks must call it.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = batch[0].device
    share = nn.Parameter(torch.zeros(-(-sum(p.numel() for p in parameters) // ranks), device=device))
    share.grad = torch.zeros_like(share)
    optimizer = stepping([share])
    with evaluating(model):
        found = [_sample(model, batch, optimizer, parameters, when) for _ in range(count + 1)]
    for parameter in parameters:
        parameter.grad = None
    return found[1:]


def _sample(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    when: Literal["before", "after"],
) -> Alone:
    for parameter in parameters:
        parameter.grad = None
    dist.barrier()
    device = batch[0].device
    begin, computed = _now(device), time.process_time()
    loss: Tensor = model(*batch)
    forward = _now(device)
    loss.backward()  # type: ignore[no-untyped-call]
    backward, computed_both = _now(device), time.process_time()
    optimizer.step()
    end, computed_all = _now(device), time.process_time()
    return Alone(
        when=when,
        forward=forward - begin,
        backward=backward - forward,
        optimizer=end - backward,
        cpu_seconds=computed_both - computed,
        optimizer_cpu_seconds=computed_all - computed_both,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
