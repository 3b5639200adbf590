"""Measures computation by itself: the unsharded model on all ranks at once, which send nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.measure.step_clock import now
from harness.measure.unsharded_loss import evaluating
from harness.records.trial_record import Alone

MOST: Final = 5  # samples before, and after, the timed steps
_SHARE: Final = 8  # micro-batches of timed steps for each sample of either


def samples(micro_batches: int, when: Literal["before", "after"]) -> int:
    """Number of samples before, or after, ``micro_batches`` of timed steps."""
    share = micro_batches // _SHARE
    return min(MOST, share if when == "after" else max(2, share))


def measure(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    ranks: int,
    when: Literal["before", "after"],
    count: int,
) -> list[Alone]:
    """Time ``count`` micro-batches, in evaluation mode, of the unsharded ``model`` on all ranks at once, and
    an optimizer's step on a rank's share of its parameters; all ranks must call it.
    """
    device, measured = batch[0].device, list[Alone]()
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = nn.Parameter(torch.zeros(-(-numel // ranks), device=device))
    share.grad = torch.zeros_like(share)
    optimizer = make_optimizer([share])
    with evaluating(model):
        for _ in range(count + 1):
            dist.barrier()
            begin, computed = now(device), time.process_time()
            loss: Tensor = model(*batch)
            forward = now(device)
            loss.backward()  # type: ignore[no-untyped-call]
            backward, computed_both = now(device), time.process_time()
            optimizer.step()
            sample = Alone(
                when=when,
                forward=forward - begin,
                backward=backward - forward,
                optimizer=now(device) - backward,
                cpu_seconds=computed_both - computed,
                optimizer_cpu_seconds=time.process_time() - computed_both,
            )
            measured.append(sample)
            model.zero_grad()
    return measured[1:]  # the first warms up
