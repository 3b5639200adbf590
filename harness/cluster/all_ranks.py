"""Exchanges values among all ranks of a trial, for measurements and barriers, outside of the engine's own messages.

Ranks that are processes use the default group of torch.distributed.  Ranks that are threads of one process hand their
values over in memory (:mod:`impl.transport.threads`).  All ranks must call the same functions in the same order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from impl.transport.threads import current

T = TypeVar("T")


def backend() -> str:
    """Return the name of the backend of torch that carries messages, or ``threads`` if ranks are threads."""
    return str(dist.get_backend()) if current() is None else "threads"


def barrier() -> None:
    """Wait until all ranks have called this function."""
    if (thread := current()) is None:
        dist.barrier()
    else:
        thread.share(None)


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in rank order; each value must be picklable."""
    if (thread := current()) is not None:
        return thread.share(value)
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks, in rank order.

    All ranks must pass tensors of one shape.  Callers must not write into the returned tensors.
    """
    if (thread := current()) is not None:
        return thread.share(tensor.clone())
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def mean_of_group(tensor: Tensor, ranks: int) -> Tensor:
    """Return the elementwise mean of ``tensor`` over the ranks of this rank's group.

    A group is ``ranks`` consecutive ranks: with ``ranks`` 2, ranks 0 and 1 are a group, and ranks 2 and 3 are a group.
    """
    thread = current()
    number = (dist.get_rank() if thread is None else thread.rank) // ranks
    return torch.stack(gather(tensor)[number * ranks : (number + 1) * ranks]).sum(0) / ranks


def swap(rows: Tensor) -> Tensor:
    """Send row i of ``rows`` (world, ...) to rank i, and return the rows (world, ...) that this rank receives.

    Row i of the returned tensor comes from rank i.
    """
    if (thread := current()) is not None:
        return torch.stack([sent[thread.rank] for sent in thread.share(rows)])
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received


def add(tensor: Tensor) -> None:
    """Replace each element of ``tensor``, in place, by the sum of this element over all ranks."""
    if current() is None:
        dist.all_reduce(tensor)
    else:
        tensor.copy_(torch.stack(gather(tensor)).sum(0))


def take_largest(tensor: Tensor) -> None:
    """Replace each element of ``tensor``, in place, by the largest value of this element on any rank."""
    if current() is None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    else:
        tensor.copy_(torch.stack(gather(tensor)).amax(0))


def world() -> int:
    """Return the number of ranks."""
    thread = current()
    return dist.get_world_size() if thread is None else thread.world.size
