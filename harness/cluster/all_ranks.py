"""Exchanges values among all ranks of a trial outside of the wire, for measurements and barriers.

Ranks that are processes use the default group of torch.distributed; ranks that are threads of one process hand their
values over (:mod:`impl.transport.threads`).  All ranks must call each function, in one order.
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
    """Wait until all ranks have called this."""
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
    """Return the tensors of all ranks, in rank order; all have the shape of ``tensor``, and callers only read them."""
    if (thread := current()) is not None:
        return thread.share(tensor.clone())
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def mean_of_group(tensor: Tensor, ranks: int) -> Tensor:
    """Return the mean of ``tensor`` over this rank's group; a group is ``ranks`` consecutive ranks."""
    thread = current()
    number = (dist.get_rank() if thread is None else thread.rank) // ranks
    return torch.stack(gather(tensor)[number * ranks : (number + 1) * ranks]).sum(0) / ranks


def swap(rows: Tensor) -> Tensor:
    """Send each rank its row of ``rows`` (world, ...); returns the rows (world, ...) that this rank receives."""
    if (thread := current()) is not None:
        return torch.stack([sent[thread.rank] for sent in thread.share(rows)])
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows)
    return received


def add(tensor: Tensor) -> None:
    """Replace ``tensor`` by the sum over all ranks."""
    if current() is None:
        dist.all_reduce(tensor)
    else:
        tensor.copy_(torch.stack(gather(tensor)).sum(0))


def take_largest(tensor: Tensor) -> None:
    """Replace each element of ``tensor`` by the largest value of this element on any rank."""
    if current() is None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    else:
        tensor.copy_(torch.stack(gather(tensor)).amax(0))


def world() -> int:
    """Return the number of ranks."""
    thread = current()
    return dist.get_world_size() if thread is None else thread.world.size
