"""Measures how long the computation of a step takes, without any communication.

All ranks run the unsharded model at the same time and send nothing, so that they compete for cores as in a real step.
Samples are taken before and after the timed steps, to see whether the machine has slowed down.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor, nn

from harness.cluster import all_ranks
from harness.measure.step_clock import now
from harness.measure.unsharded_loss import evaluating
from harness.records.trial_record import Alone

MOST: Final = 5  # largest number of samples before the timed steps, and of samples after them
_SHARE: Final = 8  # one sample before, and one after, for so many timed micro-batches


def samples(micro_batches: int, when: Literal["before", "after"]) -> int:
    """Return how many samples :func:`measure` should take before, or after, the timed steps.

    There is one sample for every 8 micro-batches of the timed steps, up to :data:`MOST`.  Before the timed steps, at
    least 2 samples are taken.

    Args:
        micro_batches: Number of micro-batches of all timed steps together.
        when: Whether the samples are taken before or after the timed steps.
    """
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
    """Measure the seconds of the unsharded model's forward pass, backward pass and optimizer step.

    All ranks must call this.  They compute at the same time, and send nothing meanwhile.

    Args:
        model: The unsharded model; passes run in evaluation mode.
        batch: Inputs and targets of a micro-batch.
        make_optimizer: Builds the trial's optimizer for a list of parameters.
        ranks: Number of ranks.  The timed optimizer step updates 1 / ``ranks`` of the model's trained elements.
        when: Whether the samples are taken before or after the timed steps, for the record.
        count: Number of samples.  One more sample is taken first, to warm up, and is dropped.

    Returns:
        ``count`` samples of this rank.
    """
    device, measured = batch[0].device, list[Alone]()
    numel = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    share = nn.Parameter(torch.zeros(-(-numel // ranks), device=device))
    share.grad = torch.zeros_like(share)
    optimizer = make_optimizer([share])
    with evaluating(model):
        for _ in range(count + 1):
            all_ranks.barrier()
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
